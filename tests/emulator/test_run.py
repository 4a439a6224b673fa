"""The entry: what a launch must fit, and what it gives back."""

from __future__ import annotations

import numpy as np
import pytest

from jax_fa4.emulator.errors import UnknownInstruction
from jax_fa4.emulator.launch import Buffer, Launch, Options, TensorMap
from jax_fa4.emulator.run import run

from .snippet import module_text, run_body

GRID = {"grid": (1, 1, 1), "block": 32}


def launched(body: str, params=(), **launch):
    return run(module_text(body, params), Launch(**{**GRID, "params": params, **launch}))


def test_grids_blocks_and_parameters_reach_the_kernel():
    result = np.zeros(2 * 3 * 64, np.uint32)
    body = """
    ld.param.b64 %d0, [p0]; ld.param.b32 %r9, [p1+4];
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %nctaid.x; mov.u32 %r4, %tid.x; mov.u32 %r5, %tid.y;
    mov.u32 %r6, %ntid.x; mad.lo.u32 %r7, %r2, %r3, %r1; mul.lo.u32 %r7, %r7, 64;
    mad.lo.u32 %r8, %r5, %r6, %r4; add.u32 %r7, %r7, %r8;
    mad.wide.u32 %d1, %r7, 4, %d0; add.u32 %r7, %r7, %r9; st.global.b32 [%d1], %r7;
    """
    params = (Buffer(result), np.array([7, 1000], np.uint32).tobytes())
    launched(body, params, grid=(2, 3, 1), block=(16, 4, 1))
    assert result.tolist() == [1000 + i for i in range(384)]


def test_pointers_may_start_inside_an_array_and_share_it():
    array = np.arange(8, dtype=np.uint32)
    body = "ld.param.b64 %d0, [p0]; ld.param.b64 %d1, [p1]; ld.global.b32 %r1, [%d0]; st.global.b32 [%d1], %r1;"
    launched(body, (Buffer(array, offset=20), Buffer(array)))
    assert array[0] == 5


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"params": (bytes(4),)}, "0 parameters, the launch 1"),
        ({"block": 40}, "whole warps"),
        ({"block": 2048}, "up to 1024"),
        ({"cluster": (2, 1, 1)}, "multiple of the cluster"),
        ({"smem_bytes": 228 * 1024}, "bytes of shared memory"),
    ],
)
def test_launches_that_do_not_fit(launch, message):
    with pytest.raises(ValueError, match=message):
        run(module_text("mov.b32 %r1, 0;", ()), Launch(**{**GRID, "params": (), **launch}))


def test_parameters_must_have_their_sizes():
    text = module_text("mov.b32 %r1, 0;", (bytes(8),))
    with pytest.raises(ValueError, match="has 8 bytes, the launch gives 4"):
        run(text, Launch(**GRID, params=(bytes(4),)))


def test_required_block_sizes_are_checked():
    text = module_text("mov.b32 %r1, 0;", ()).replace("{\n.reg", ".reqntid 64, 1, 1\n{\n.reg", 1)
    with pytest.raises(ValueError, match=r"needs blocks of \(64, 1, 1\)"):
        run(text, Launch(**GRID, params=()))


def test_illegal_tensor_maps_are_refused():
    array = np.zeros((8, 12), np.float32)
    bad = TensorMap(buffer=Buffer(array), dtype="f32", dims=(12, 8), strides=(44,), box=(4, 4))
    with pytest.raises(ValueError, match="tensor map"):
        launched("mov.b32 %r1, 0;", (bad,))


def test_arrays_must_be_contiguous():
    with pytest.raises(ValueError, match="contiguous"):
        launched("mov.b32 %r1, 0;", (Buffer(np.zeros((4, 4), np.float32)[:, ::2]),))


def test_an_entry_is_named_where_there_are_several():
    text = module_text("mov.b32 %r1, 0;", ())
    second = text[text.index(".visible") :].replace("snippet", "other")
    with pytest.raises(UnknownInstruction, match="2 entries"):
        run(text + second, Launch(**GRID, params=()))
    assert run(text + second, Launch(**GRID, params=()), entry="other").stats.instructions == 2


def test_several_clusters_may_run_at_a_time():
    flags = np.zeros(2, np.uint32)
    body = """
    ld.param.b64 %d0, [p0]; mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 1;
    @%p1 bra SET;
    W: ld.acquire.gpu.global.b32 %r2, [%d0]; setp.eq.u32 %p2, %r2, 0; @%p2 bra W;
    bra DONE;
    SET: mov.b32 %r3, 1; st.release.gpu.global.b32 [%d0], %r3;
    DONE:
    """
    run_body(body, params=(Buffer(flags),), grid=(2, 1, 1), options=Options(resident_clusters=2))
    assert flags[0] == 1
