"""Handing a cubin to the C++ library."""

import pytest

from jax_fa4 import launcher
from jax_fa4.cubins import load, register


@pytest.fixture
def received(monkeypatch):
    """What the C++ library was given."""
    images = []
    monkeypatch.setattr(launcher, "register_image", lambda key, image: images.append((key, image)), raising=False)
    monkeypatch.setattr(load, "_registered", set())
    return images


def test_a_cubin_is_handed_over_once(received, cubin):
    register(cubin)
    register(cubin)
    assert received == [(cubin.key, cubin.image)]


def test_a_refusal_is_not_taken_for_success(received, cubin, monkeypatch):
    def refuse(key, image):
        raise RuntimeError("no library")

    with monkeypatch.context() as without_library:
        without_library.setattr(launcher, "register_image", refuse)
        with pytest.raises(RuntimeError, match="no library"):
            register(cubin)
    register(cubin)
    assert received == [(cubin.key, cubin.image)]
