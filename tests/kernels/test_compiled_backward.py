"""What the compiler makes of backward kernels: no register is spilled, and every product is there once."""

import functools
import re

import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL (pip install 'jax-fa4[cuda13]')")

from jax_fa4 import cubins
from jax_fa4.configs import backward_config, score_configs
from jax_fa4.cubins import report
from jax_fa4.spec import AttentionSpec, MaskSpec

CAUSAL = MaskSpec(has_right=True)
SPECS = {  # of the kernels that tests emulate as well
    "d64-causal": {"mask": CAUSAL},
    "d64-softcap-mask": {"has_softcap": True, "mask": MaskSpec(has_dense=True)},
    "d128": {"head_dim": 128, "head_dim_v": 128},
    "d128-causal": {"head_dim": 128, "head_dim_v": 128, "mask": CAUSAL},
    "d72-v104": {"head_dim": 72, "head_dim_v": 104},
    "d96-window": {"head_dim": 96, "head_dim_v": 96, "mask": MaskSpec(has_left=True, has_right=True)},
    "d256": {"head_dim": 256, "head_dim_v": 256},
    "d192-v128-causal": {"head_dim": 192, "head_dim_v": 128, "mask": CAUSAL, "dtype": "float16"},
}
SCORES = {  # likewise
    "bias": {"bias_dtype": "float32", "mask": MaskSpec(has_q_lengths=True, has_kv_lengths=True)},
    "softcap": {"has_softcap": True, "mask": MaskSpec(has_dense=True), "head_dim": 72, "head_dim_v": 104},
}
specs = pytest.mark.parametrize("spec", SPECS)
counting = pytest.mark.parametrize("spec", ["d128", "d72-v104", "d96-window"])  # narrow, and postprocess starts early


def config_of(spec):
    fields = SPECS.get(spec) or SCORES[spec]
    call = AttentionSpec(**{"dtype": "bfloat16", "head_dim": 64, "head_dim_v": 64, "group": 1, **fields})
    main = backward_config(call, "sm_90a")
    return main if spec in SPECS else score_configs(main, (spec,), bias_has_rows=True)[0]


@functools.cache
def resources(spec):
    try:
        return report.resources_of(cubins.get(config_of(spec)))
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("spec", [*SPECS, *SCORES])
def test_nothing_spills(spec):
    found = resources(spec)
    assert (found.spill_loads, found.spill_stores, found.stack_bytes, found.local_bytes) == (0, 0, 0, 0)


@specs
def test_every_product_is_a_wgmma_and_none_is_issued_twice(spec):
    """Five products in the loop of each span, and once more in the steps before and behind the loops."""
    config = config_of(spec)
    scores, gradients, queries = config.k_steps + config.v_steps, 2 * config.tile_m // 16, config.tile_n // 16
    loops = 1 + config.has_left + config.has_right
    expected = (1 + loops) * (scores + gradients + queries)
    if config.is_wide:
        expected = wide_products(config, loops)
    assert resources(spec).count("HGMMA") == expected


@specs
def test_products_run_side_by_side(spec):
    """An assembler that is short of registers waits behind each of them, though nothing spills."""
    found = resources(spec)
    assert found.count("WARPGROUP") < found.count("HGMMA")  # fences before, waits behind


def instructions(spec):
    """Of the PTX, in order; comments and directives are none."""
    lines = (line.strip() for line in cubins.get(config_of(spec)).ptx.splitlines())
    return [" ".join(line.split()) for line in lines if line and line[0] not in "/."]


def address_of(instruction):
    return re.search(r"\[(.*?)\]", instruction).group(1)


@counting
def test_all_that_a_warp_has_added_to_dq_has_arrived_when_it_counts_itself(spec):
    """With `.read` it would only have left shared memory. What is read as well is dq_turn, the other is dq_done."""
    found = instructions(spec)
    turns = {address_of(line) for line in found if line.startswith("ld.acquire.gpu")}
    counts = [i for i, line in enumerate(found) if line.startswith("red.release.gpu")]
    ahead = [found[i - 1] for i in counts if address_of(found[i]) not in turns]
    assert ahead == ["cp.async.bulk.wait_group 0;"] * 2  # of each warpgroup's adding warp


@counting
def test_postprocess_may_start_once_its_counters_are_zero(spec):
    found = [line for line in instructions(spec) if line.startswith("griddepcontrol")]
    assert found == ["griddepcontrol.wait;", "griddepcontrol.launch_dependents;"]


def wide_products(config, loops):
    """The warpgroup of the weights has the spans' loops, those of dS and dQ one; instructions take 192 columns."""
    dk, dv = (config.tile_m // 16 * (1 if columns <= 192 else 2) for columns in (config.columns, config.v_columns))
    weights = (1 + loops) * (config.columns // 16 + dv)
    dscores = 2 * (config.v_columns // 16 + dk)
    dq = config.tile_n // 16 * {3: 2, 4: 2}[config.slabs]  # one slab or two; one after the other
    return weights + dscores + dq
