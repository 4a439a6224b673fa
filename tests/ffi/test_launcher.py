"""The launcher: what it does where the library is absent, and what registering a cubin takes."""

import subprocess
import sys

import pytest

from jax_fa4 import launcher


@pytest.fixture
def no_library(monkeypatch):
    launcher.library.cache_clear()
    launcher.register.cache_clear()
    monkeypatch.setattr(launcher, "LIBRARY", "_absent.so")
    yield
    monkeypatch.undo()
    launcher.library.cache_clear()
    launcher.register.cache_clear()


def test_without_the_library_registering_does_nothing(no_library):
    assert launcher.register() is False


def test_without_the_library_needing_it_says_what_to_do(no_library):
    with pytest.raises(RuntimeError, match=r"installed without its launcher _absent\.so.*C\+\+17 compiler"):
        launcher.require()


def test_registering_twice_does_no_harm():
    assert launcher.register() is True
    launcher.register.cache_clear()
    assert launcher.register() is True


@pytest.mark.parametrize(
    ("key", "image"),
    [("ab", b"x"), ("AB" * 32, b"x"), ("xy" * 32, b"x"), ("ab" * 32 + "0", b"x"), ("ab" * 32, b"")],
)
def test_a_cubin_needs_a_key_and_bytes(key, image):
    with pytest.raises(ValueError, match="64 lower-case hex digits and bytes"):
        launcher.register_image(key, image)


def test_importing_the_package_opens_no_libcuda():
    code = "import jax_fa4; print('libcuda.so' in open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
