"""The FFI library `_ffi.so`: finds it, registers its custom-call target with XLA, hands it cubins.

The library is cheap to load and opens libcuda only when XLA runs a program on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib

import jax

__all__ = ["TARGET", "library", "register", "register_image", "require"]

TARGET = "jax_fa4_launch_v1"  # the number is that of the plan format: a changed meaning needs a new target
PLATFORM = "CUDA"
STAGES = ("instantiate", "initialize", "execute")
LIBRARY = "_ffi.so"


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded library, or None where the package was installed without it."""
    import jax_fa4  # the package is complete only now: it calls `register` while it is being imported

    for folder in jax_fa4.__path__:  # an editable install has the sources in one folder and the library in another
        path = pathlib.Path(folder) / LIBRARY
        if path.is_file():
            return _declare(ctypes.CDLL(str(path)))
    return None


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    for name in ("jax_fa4_state_type_id", "jax_fa4_state_type_info"):
        getattr(lib, name).restype = ctypes.c_void_p
    lib.jax_fa4_register_image.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)
    lib.jax_fa4_register_image.restype = ctypes.c_int
    return lib


@functools.cache
def register() -> bool:
    """Registers the custom-call target for CUDA, once; False (and nothing done) without the library."""
    lib = library()
    if lib is None:
        return False
    type_id = jax.ffi.pycapsule(ctypes.c_void_p(lib.jax_fa4_state_type_id()))
    type_info = jax.ffi.pycapsule(ctypes.c_void_p(lib.jax_fa4_state_type_info()))
    # The type comes before the target, whose handlers use it.
    jax.ffi.register_ffi_type(f"{TARGET}_state", {"type_id": type_id, "type_info": type_info}, platform=PLATFORM)
    handlers = {stage: jax.ffi.pycapsule(getattr(lib, f"jax_fa4_{stage}")) for stage in STAGES}
    jax.ffi.register_ffi_target(TARGET, handlers, platform=PLATFORM)
    jax.ffi.register_ffi_target_as_batch_partitionable(TARGET)
    return True


def require() -> None:
    """Makes sure that the custom call can run in this process.

    Raises:
      RuntimeError: the package was installed without its library.
    """
    if not register():
        raise RuntimeError(
            f"jax_fa4 was installed without its launcher {LIBRARY}, so its GPU kernels cannot run: install a wheel for "
            "Linux, or a C++17 compiler and reinstall from source; implementation='xla' works without it"
        )


def register_image(key: str, image: bytes) -> None:
    """Makes a cubin known under its key: the library copies it, and loads it when a launch first needs it.

    Raises:
      RuntimeError: the package was installed without its library.
      ValueError: `key` is not 64 hex digits, or `image` is empty.
    """
    require()
    lib = library()
    assert lib is not None, "require() has just loaded it"
    if lib.jax_fa4_register_image(key.encode(), image, len(image)):
        got = f"{key!r} and {len(image)} bytes"
        raise ValueError(f"a cubin needs a key of 64 lower-case hex digits and bytes, got {got}")
