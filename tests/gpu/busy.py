"""A stream of its own that keeps a GPU busy while a test runs calls of JAX beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jax_fa4.cubins.driver import open_driver

FILLED_BYTES = 512 << 20
NUM_FILLS = 256  # 0.1 ms each where nothing else runs; a stream has room for more
SOME_FILLS = 8


class BusyStream:
    """Fills of memory, one behind the other, in the context that JAX uses: their CTAs run beside those of kernels."""

    def __init__(self, device: int) -> None:
        self.cuda = cuda = open_driver()
        call(cuda.cuCtxSetCurrent, call(cuda.cuDevicePrimaryCtxRetain, call(cuda.cuDeviceGet, device)))
        self.stream = call(cuda.cuStreamCreate, cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.memory = call(cuda.cuMemAlloc, FILLED_BYTES)
        self.events = {number: call(cuda.cuEventCreate, 0) for number in (0, SOME_FILLS)}

    @contextmanager
    def working(self) -> Iterator[None]:
        """Fails unless the GPU went on with fills, but did not end them, while the body waited for its own work."""
        cuda = self.cuda
        for number in range(NUM_FILLS):
            call(cuda.cuMemsetD32Async, self.memory, number, FILLED_BYTES // 4, self.stream)
            if number in self.events:
                call(cuda.cuEventRecord, self.events[number], self.stream)
        call(cuda.cuEventSynchronize, self.events[0])
        yield
        (some,), (all_,) = cuda.cuEventQuery(self.events[SOME_FILLS]), cuda.cuStreamQuery(self.stream)
        call(cuda.cuStreamSynchronize, self.stream)
        assert some == cuda.CUresult.CUDA_SUCCESS, "the fills waited for the calls"
        assert all_ == cuda.CUresult.CUDA_ERROR_NOT_READY, "the calls waited for the fills"

    def close(self) -> None:
        """Gives its memory back."""
        call(self.cuda.cuMemFree, self.memory)
        call(self.cuda.cuStreamDestroy, self.stream)


def call(function: Callable[..., Any], *args: Any) -> Any:
    """What a function of the driver returns beside its status, which must be success."""
    status, *results = function(*args)
    assert int(status) == 0, f"{function.__name__}: {status}"
    return results[0] if results else None


@contextmanager
def busy_stream(device: int = 0) -> Iterator[BusyStream]:
    """Closed at the end."""
    stream = BusyStream(device)
    try:
        yield stream
    finally:
        stream.close()
