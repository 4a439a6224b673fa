"""How a program asks for cluster launch control; which kernels have it is a matter of tests/kernels."""

import re

import jax
import pytest

import jax_fa4
from jax_fa4.scheduling import ENVIRONMENT_VARIABLE, takes_over


@pytest.mark.parametrize(("value", "asked"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_environment_asks_for_it(monkeypatch, value, asked):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, value)
    assert takes_over() is asked


def test_the_context_goes_before_the_environment(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "1")
    with jax_fa4.cluster_launch_control(False):
        assert not takes_over()
        with jax_fa4.cluster_launch_control():
            assert takes_over()
    assert takes_over()


def test_another_choice_traces_and_lowers_a_program_again(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    traced = []

    @jax.jit
    def program(x):
        traced.append(takes_over())
        return x

    for is_on in (False, True, False):
        with jax_fa4.cluster_launch_control(is_on):
            program(1.0)
    assert traced == [False, True]


def test_what_is_neither_yes_nor_no_is_refused(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "yes")
    with pytest.raises(ValueError, match=re.escape("variable JAX_FA4_CLC must be 0 or 1, got 'yes'")):
        takes_over()
    with pytest.raises(TypeError, match="is_on must be"), jax_fa4.cluster_launch_control(1):
        pass
