"""The examples of public docstrings are run."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["api", "combine", "export", "jax_nn", "paged", "testing", "varlen"])
def test_the_examples_give_what_they_say(module):
    results = doctest.testmod(importlib.import_module(f"jax_fa4.{module}"))
    assert results.attempted > 0
    assert results.failed == 0
