"""Runs against a libcuda that logs: which cubins are loaded, what they are allowed, and what reaches the driver."""

import struct

import pytest

from jax_fa4.plan import Launch, Pointer, Scalar, encode, encode_images

KEY, CUBIN = "ab" * 32, b"registered\0"
SIZES = "128,8,4,4"  # of make_plan's parameters
Q, OUT = range(2)


@pytest.fixture
def request_for(buffers):
    """A request of native.py with `CUBIN` registered under `KEY`."""

    def make(plan, *, shape=(2, 300), register=((KEY, CUBIN),), **more):
        operands, results = buffers(*shape)
        plan = plan if isinstance(plan, bytes) else encode(plan)
        return {"plan": plan, "operands": operands, "results": results, "register": register, **more}

    return make


def test_a_launch_reaches_the_driver_with_every_byte(run, make_plan, request_for):
    (answer,), log = run(request_for(make_plan(), stream=0x77), params=SIZES)
    values = (b"\xee" * 128, struct.pack("<Q", 0x90000), struct.pack("<i", 300), struct.pack("<f", 0.5))
    assert answer == {}
    assert log == [
        "load registered",
        "kernel scale of 0x11",
        "attribute 8 = 100000 of 0x22 on 100",
        "map dtype 9 address 0x10000 dims 64 300 2 strides 128 38400 box 64 128 1 modes 0 3 2 0",
        "launch 0x22 grid 6 1 1 block 384 1 1 smem 100000 stream 0x77 " + " ".join(value.hex() for value in values),
    ]


def test_clusters_and_programmatic_launches_are_attributes(run, make_plan, request_for):
    plan = make_plan(grid=(16, 2, 1), cluster=(8, 2, 1), programmatic=True, smem_bytes=0, params=())
    _, log = run(request_for(plan))
    assert log[2:] == [
        "attribute 14 = 1 of 0x22 on 100",  # more than eight CTAs a cluster
        "launch 0x22 grid 16 2 1 block 384 1 1 smem 0 stream (nil) attribute 4 (8 2 1) attribute 6 (1 0 0)",
    ]


def test_launches_are_sent_in_order_and_empty_ones_left_out(run, make_launch, make_plan, request_for):
    grids = (3, 0, 5)
    launches = tuple(make_launch(grid=(x, 1, 1), smem_bytes=0, params=()) for x in grids)
    _, log = run(request_for(make_plan(launches=launches)))
    assert [line.split()[3] for line in log if line.startswith("launch")] == ["3", "5"]


def test_a_limit_of_shared_memory_is_only_raised(run, make_plan, request_for):
    sizes = (100_000, 50_000, 200_000)
    _, log = run(*(request_for(make_plan(smem_bytes=size, params=())) for size in sizes))
    assert [line for line in log if line.startswith("attribute")] == [
        "attribute 8 = 100000 of 0x22 on 100",
        "attribute 8 = 200000 of 0x22 on 100",
    ]


def test_limits_are_those_of_the_device(run, make_plan, request_for):
    _, log = run(request_for(make_plan(params=()), ordinal=3))
    assert log[2] == "attribute 8 = 100000 of 0x22 on 103"


def test_a_bad_second_launch_sends_not_even_the_first(run, make_launch, make_plan, request_for):
    good, bad = ((Pointer(buffer=Q, offset=offset),) for offset in (0, -1))
    launches = (make_launch(params=good), make_launch(entry="second", params=bad))
    (answer,), log = run(request_for(make_plan(launches=launches)), params="8")
    assert answer["error"]["message"].startswith("second: param 0: pointer to q: 0 bytes from byte -1 are not inside")
    assert not any(line.startswith("launch") for line in log)


@pytest.mark.parametrize(("sets", "evaluated"), [(1, 1), (2, 2), (4, 4), (5, 20)])
def test_a_run_with_the_buffers_of_a_recent_one_is_not_evaluated_again(run, make_plan, request_for, sets, evaluated):
    (answer,), log = run(request_for(make_plan(), runs=20, sets=sets), params=SIZES)
    assert answer == {}
    assert sum(line.startswith("map") for line in log) == evaluated
    launches = [line for line in log if line.startswith("launch")]
    pointers = [struct.pack("<Q", 0x90000 + (i << 20)).hex() for i in range(sets)]
    assert len(launches) == 20
    assert all(pointers[i % sets] in line for i, line in enumerate(launches))


# --- cubins ---

IMAGES = encode_images({KEY: b"embedded\0", "cd" * 32: b"another\0"})


@pytest.mark.parametrize(("register", "loaded"), [((), "embedded"), (((KEY, CUBIN),), "registered")])
def test_a_cubin_is_loaded_once_a_process(run, make_plan, request_for, register, loaded):
    request = request_for(make_plan(params=(), smem_bytes=0), register=register, images=IMAGES)
    answers, log = run(request, dict(request))
    assert answers == [{}, {}]
    assert [line.split(" grid")[0] for line in log] == [
        f"load {loaded}",
        "kernel scale of 0x11",
        "launch 0x22",
        "launch 0x22",
    ]


def test_a_key_keeps_the_cubin_it_had_first(run, make_plan, request_for):
    _, log = run(request_for(make_plan(params=()), register=((KEY, CUBIN), (KEY, b"other\0"))))
    assert log[0] == "load registered"


WHERE = "scale for sm_90a on device 0 of compute capability 9.0"


def test_a_cubin_that_lacks_its_kernel_is_unloaded(run, make_plan, request_for):
    (answer,), log = run(request_for(make_plan(params=())), fail="cuLibraryGetKernel=500")
    assert answer["error"]["message"] == f"{WHERE}: cubin of key {KEY}: cuLibraryGetKernel: unknown CUDA error (500)"
    assert log[-1] == "unload 0x11"


# --- errors ---


def error_of(run, request, **settings):
    (answer,), log = run(request, **settings)
    assert not any(line.startswith("launch") for line in log)
    return answer["error"]


def test_an_unknown_kernel_says_what_to_do(run, make_plan, request_for):
    error = error_of(run, request_for(make_plan(), register=()))
    assert error["code"] == "NOT_FOUND"
    assert error["message"].startswith(f"{WHERE}: no cubin of key {KEY} is known in this process")
    assert "call or lower the program in this process" in error["message"]
    assert "python -m jax_fa4 build" in error["message"]


def test_a_device_without_kernels_is_named(run, make_plan, request_for, unchecked):
    plans = encode([make_plan(), unchecked(make_plan(), arch="sm_100a")])
    assert error_of(run, request_for(plans, ordinal=1), capability=80) == {
        "code": "FAILED_PRECONDITION",
        "message": "the program has kernels for sm_90a, sm_100a, but device 1 is of compute capability 8.0",
    }


def test_shared_memory_beyond_the_device_is_refused(run, make_plan, request_for):
    assert error_of(run, request_for(make_plan(params=())), smem=99_999) == {
        "code": "FAILED_PRECONDITION",
        "message": "scale: smem_bytes is 100000, but a block of this device has at most 99999",
    }


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("128,8,4", "the plan has 4 params, the kernel 3"),
        ("128,8,4,4,4", "the plan has 4 params, the kernel has more"),
        ("128,8,8,4", "param 2: the plan has 4 bytes, the kernel 8"),
        ("64,8,4,4", "param 0: the plan has 128 bytes, the kernel 64"),
    ],
)
def test_parameters_unlike_the_kernels_are_refused(run, make_plan, request_for, sizes, message):
    assert error_of(run, request_for(make_plan()), params=sizes)["message"] == f"scale: {message}"


LAUNCH = "launch of scale with grid (6, 1, 1), block 384, cluster (1, 1, 1), 100000 bytes of shared memory"
FAILURES = {
    "cuInit=100": "cuInit: unknown CUDA error (100)",
    "cuDeviceGet=1": "device 0: cuDeviceGet: CUDA_ERROR_INVALID_VALUE (1)",
    "cuLibraryLoadData=1": f"{WHERE}: cubin of key {KEY}: cuLibraryLoadData: CUDA_ERROR_INVALID_VALUE (1)",
    "cuKernelSetAttribute=1": (
        "scale: cuKernelSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES): CUDA_ERROR_INVALID_VALUE (1)"
    ),
    "cuTensorMapEncodeTiled=1": f"{LAUNCH}: param 0: cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE (1)",
}


@pytest.mark.parametrize(("fail", "message"), FAILURES.items(), ids=FAILURES)
def test_a_failed_call_is_named_with_its_cuda_error(run, make_plan, request_for, fail, message):
    error = error_of(run, request_for(make_plan()), fail=fail, params=SIZES)
    assert error == {"code": "INTERNAL", "message": message}


def test_a_process_without_a_current_context_still_launches(run, make_plan, request_for):
    answers, _ = run(request_for(make_plan()), fail="cuKernelGetFunction=201", params=SIZES)
    assert answers == [{}]


def test_a_failed_launch_names_error_kernel_and_grid(run, make_plan, request_for):
    (answer,), _ = run(request_for(make_plan()), fail="cuLaunchKernelEx=700", params=SIZES)
    assert answer["error"] == {
        "code": "INTERNAL",
        "message": f"{LAUNCH}: cuLaunchKernelEx: CUDA_ERROR_ILLEGAL_ADDRESS (700)",
    }


def test_the_largest_launch_fits_the_librarys_storage(run, make_plan, request_for):
    params = tuple(Scalar(dtype="i64", value=n) for n in range(64))
    launches = tuple(Launch(cubin=KEY, entry=f"k{n}", grid=(1, 1, 1), block=1024, params=params) for n in range(8))
    (answer,), log = run(request_for(make_plan(launches=launches)), params=",".join(["8"] * 64))
    assert answer == {}
    expected = " ".join(struct.pack("<q", n).hex() for n in range(64))
    assert [line.endswith(expected) for line in log if line.startswith("launch")] == [True] * 8
