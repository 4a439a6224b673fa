"""The library's test entry points through ctypes; as a script it answers requests in a process of its own.

A request is a dict of the fields of TestCall: `plan` and `images` are bytes, `operands` and `results` lists of
(XLA dtype code, shape, address), `entry` is "evaluate" or "run". Needs nothing but the standard library.
"""

import ctypes
import json
import pickle
import sys

TEST_RANK = 8


class TestBuffer(ctypes.Structure):
    __test__ = False
    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.c_int64 * TEST_RANK),
        ("data", ctypes.c_void_p),
    )


class TestCall(ctypes.Structure):
    __test__ = False
    _fields_ = (
        ("plan", ctypes.c_char_p),
        ("plan_size", ctypes.c_size_t),
        ("images", ctypes.c_char_p),
        ("images_size", ctypes.c_size_t),
        ("buffers", ctypes.POINTER(TestBuffer)),
        ("num_operands", ctypes.c_size_t),
        ("num_results", ctypes.c_size_t),
        ("major", ctypes.c_int32),
        ("minor", ctypes.c_int32),
        ("multiprocessors", ctypes.c_int32),
        ("ordinal", ctypes.c_int32),
        ("runs", ctypes.c_int32),
        ("sets", ctypes.c_int32),
    )


def answer(
    lib,
    *,
    entry,
    plan,
    images=b"",
    operands=(),
    results=(),
    major=9,
    minor=0,
    multiprocessors=132,
    ordinal=0,
    stream=0,
    runs=1,
    sets=1,
):
    """The library's JSON answer as Python values."""
    buffers = [
        TestBuffer(dtype, len(shape), (ctypes.c_int64 * TEST_RANK)(*shape), address)
        for dtype, shape, address in (*operands, *results)
    ]
    array = (TestBuffer * max(1, len(buffers)))(*buffers)
    bytes_and_buffers = (plan, len(plan), images, len(images), array, len(operands), len(results))
    call = TestCall(*bytes_and_buffers, major, minor, multiprocessors, ordinal, runs, sets)
    function = getattr(lib, f"jax_fa4_test_{entry}")
    function.restype = ctypes.c_size_t
    middle = (ctypes.c_void_p(stream),) if entry == "run" else ()
    out = ctypes.create_string_buffer(1 << 16)
    size = function(ctypes.byref(call), *middle, out, ctypes.c_size_t(len(out)))
    if size > len(out):
        out = ctypes.create_string_buffer(size)
        function(ctypes.byref(call), *middle, out, ctypes.c_size_t(len(out)))
    return json.loads(out.raw[:size])


def main():
    """Requests come pickled on stdin, answers go to stdout as JSON; `register` lists cubins to make known first."""
    lib = ctypes.CDLL(sys.argv[1])
    requests = pickle.load(sys.stdin.buffer)
    answers = []
    for request in requests:
        for key, image in request.pop("register", ()):
            lib.jax_fa4_register_image(key.encode(), image, ctypes.c_size_t(len(image)))
        answers.append(answer(lib, **request))
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main()
