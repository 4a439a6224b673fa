"""Compiles a kernel's device code, on any machine: neither a GPU nor a driver is needed."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jax_fa4.configs.params import PointerParam, ScalarParam

if TYPE_CHECKING:
    from jax_fa4.configs import (
        BackwardConfig,
        CombineConfig,
        Config,
        DecodeConfig,
        KernelConfig,
        PostprocessConfig,
        PreprocessConfig,
        ScheduleConfig,
        ScoresConfig,
    )
    from jax_fa4.configs.blackwell import ForwardSm100Config
    from jax_fa4.configs.grouped import GroupedSm100Config

__all__ = ["Compiled", "compile_kernel"]

DENSE = ("mask", "bias")
_compiling = threading.Lock()  # the DSL reads the name prefix from the kernel function


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """Device code of one config."""

    cubin: bytes
    ptx: str
    entry: str
    smem_bytes: int  # dynamic shared memory of a CTA
    threads: int  # of a CTA


def compile_kernel(config: Config) -> Compiled:
    """Compiles `config` with CuTe DSL, imported here for the first time. Takes seconds; leaves no files behind."""
    with _compiling, tempfile.TemporaryDirectory() as folder:
        # an option: once the DSL has been used in a process, it no longer reads the architecture from the environment
        options = f"--gpu-arch {config.arch} --keep-ptx --keep-cubin --dump-dir {folder}"
        artifacts = COMPILERS[config.arch, config.kernel](config, options)
    ptx = artifacts.PTX
    entries = re.findall(r"\.visible \.entry (\w+)\(", ptx)
    if len(entries) != 1:
        raise RuntimeError(f"expected one kernel in the PTX, got {entries}")
    return Compiled(
        cubin=artifacts.CUBIN, ptx=ptx, entry=entries[0], smem_bytes=config.smem_bytes, threads=config.threads
    )


def _array(config: Any, head_dim: int) -> Any:
    """A stand-in for an array (seq, head_dim, heads, batch)."""
    import cutlass
    import cutlass.cute as cute

    dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.dtype]
    seq, heads, batch = cute.sym_int32(), cute.sym_int32(), cute.sym_int32()
    aligned = 16 // config.element_bytes  # elements: TMA's strides are multiples of 16 bytes
    seq_stride, head_stride, batch_stride = (cute.sym_int64(divisibility=aligned) for _ in range(3))
    return cute.runtime.make_fake_tensor(
        dtype,
        (seq, head_dim, heads, batch),
        (seq_stride, 1, head_stride, batch_stride),
        assumed_align=16,
    )


def _pointers(config: Any) -> dict[str, Any]:
    """Stand-ins for the config's pointer parameters and the strides of dense arrays, by name."""
    import cutlass
    import cutlass.cute as cute

    types = {
        "bool": cutlass.Uint8,
        "int32": cutlass.Int32,
        "float32": cutlass.Float32,
        "bfloat16": cutlass.BFloat16,
        "float16": cutlass.Float16,
    }
    pointers = {
        param.name: cute.runtime.nullptr(types[param.dtype], cute.AddressSpace.gmem, param.pointee_align)
        for param in config.params
        if isinstance(param, PointerParam)
    }
    strides = {f"{name}_strides": tuple(cutlass.Int64(0) for _ in range(3)) for name in DENSE if name in pointers}
    return pointers | strides


def _scalars(config: Any, names: Sequence[str]) -> dict[str, Any]:
    """Stand-ins for some of the config's scalar parameters, by name."""
    import cutlass

    types = {"int32": cutlass.Int32, "int64": cutlass.Int64}
    dtypes: dict[str, str] = {param.name: param.dtype for param in config.params if isinstance(param, ScalarParam)}
    return {name: types[dtypes[name]](1) for name in names}


def _compile_forward_sm90(config: KernelConfig, options: str) -> Any:
    import cutlass
    import cutlass.cute as cute

    from .core.inputs import Inputs
    from .core.rows import GlobalRows
    from .core.scheduler import Grid
    from .sm90.forward import ForwardSm90, Results

    kernel = ForwardSm90(config)
    ForwardSm90.kernel.set_name_prefix(config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    q, k = _array(config, config.head_dim), _array(config, config.head_dim)
    v, pointers = _array(config, config.head_dim_v), _pointers(config)
    out = _array(config, config.head_dim_v) if config.out_by_tma else None
    rows = None
    if config.has_cu_seqlens or not config.out_by_tma:
        rows = GlobalRows(pointers["out"], *(cutlass.Int64(0) for _ in range(3)))
    results = Results(pointers["lse"], pointers.get("q_schedule"), rows)
    inputs = Inputs(*(pointers.get(name) for name in Inputs._fields))
    grid = Grid(*(cutlass.Int32(1) for _ in Grid._fields))
    return cute.compile(kernel.launch, q, k, v, out, results, inputs, grid, options=options).artifacts


def _compile_backward_sm90(config: BackwardConfig, options: str) -> Any:
    import cutlass
    import cutlass.cute as cute

    from .core.inputs import Inputs
    from .core.rows import GlobalRows
    from .core.scheduler import Grid
    from .sm90.backward import BackwardSm90, Parts
    from .sm90.backward_keys import Packed, Rows
    from .sm90.backward_wide import BackwardWideSm90

    implementation: Any = BackwardWideSm90 if config.is_wide else BackwardSm90
    kernel = implementation(config)
    implementation.kernel.set_name_prefix(config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    d, e = config.head_dim, config.head_dim_v
    arrays = (_array(config, columns) for columns in (d, e, d, e, d, e))  # q, dout, k, v, dk, dv
    pointers = _pointers(config)
    pointers["key_blocks"] = pointers.get("query_blocks")  # to the kernel, keys are what sees
    rows, inputs = (kind(*(pointers.get(name) for name in kind._fields)) for kind in (Rows, Inputs))
    grid = Grid(*(cutlass.Int32(1) for _ in Grid._fields))
    others: dict[str, Any] = {}
    if config.has_cu_seqlens:
        dk, dv = (GlobalRows(pointers[name], *(cutlass.Int64(0) for _ in range(3))) for name in ("dk", "dv"))
        others["packed"] = Packed(pointers["kv_schedule"], dk, dv, cutlass.Int32(1))
    if config.splits_heads:
        others["parts"] = Parts(pointers["dk_sum"], pointers["dv_sum"], cutlass.Int32(1))
    return cute.compile(kernel.launch, *arrays, rows, inputs, grid, **others, options=options).artifacts


def _compile_preprocess_sm90(config: PreprocessConfig, options: str) -> Any:
    import cutlass
    import cutlass.cute as cute

    from .sm90.preprocess import Arrays, PreprocessSm90

    kernel = PreprocessSm90(config)
    PreprocessSm90.kernel.set_name_prefix(config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    out, dout = (_array(config, config.head_dim_v) for _ in range(2))
    extents = (cutlass.Int32(1) for _ in range(3))
    q_slots = cutlass.Int32(1) if config.has_cu_seqlens else None
    pointers = _pointers(config)
    arrays = Arrays(*(pointers.get(name) for name in Arrays._fields))
    return cute.compile(kernel.launch, out, dout, arrays, *extents, q_slots, options=options).artifacts


def _compile_postprocess_sm90(config: PostprocessConfig, options: str) -> Any:
    import cutlass
    import cutlass.cute as cute

    from .core.rows import GlobalRows
    from .sm90.postprocess import Adders, PackedQueries, PostprocessSm90

    kernel = PostprocessSm90(config)
    PostprocessSm90.kernel.set_name_prefix(config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    array, pointers = _array(config, config.head_dim), _pointers(config)
    extents = (cutlass.Int32(1) for _ in range(2))
    parts = None if config.array == "dq" else cutlass.Int32(1)
    source, scale = pointers[f"{config.array}_sum"], pointers.get("softmax_scale")
    turn = pointers.get("dq_turn")
    adders = packed = None
    if config.array == "dq" and config.counts_adders:
        adders = Adders(pointers["dq_done"], cutlass.Int32(1), cutlass.Int32(1))
    if config.has_cu_seqlens:
        dq = GlobalRows(pointers["dq"], *(cutlass.Int64(0) for _ in range(3)))
        packed = PackedQueries(pointers["q_schedule"], pointers.get("kv_schedule"), dq, cutlass.Int32(1))
    return cute.compile(
        kernel.launch, array, source, scale, turn, *extents, parts, adders, packed, options=options
    ).artifacts


def _compile_scores_sm90(config: ScoresConfig, options: str) -> Any:
    import cutlass
    import cutlass.cute as cute

    from .core.inputs import Inputs
    from .core.scheduler import Grid
    from .sm90.backward_scores import BackwardScoresSm90, Rows, Shares

    kernel = BackwardScoresSm90(config)
    BackwardScoresSm90.kernel.set_name_prefix(config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    d, e = config.head_dim, config.head_dim_v
    arrays = (_array(config, columns) for columns in (d, e, d, e))  # q, dout, k, v
    pointers = _pointers(config)
    rows, inputs = (kind(*(pointers.get(name) for name in kind._fields)) for kind in (Rows, Inputs))
    result, schedule = pointers[config.result.name], pointers.get("kv_schedule")
    grid = Grid(*(cutlass.Int32(1) for _ in Grid._fields))
    shares = Shares(**_scalars(config, Shares._fields)) if config.kept == "tiles" else None
    q_slots = cutlass.Int32(1) if config.has_cu_seqlens else None
    return cute.compile(
        kernel.launch, *arrays, rows, result, schedule, inputs, grid, shares, q_slots, options=options
    ).artifacts


def _compile_forward_sm100(config: ForwardSm100Config, options: str) -> Any:
    import cutlass
    import cutlass.cute as cute

    from .core.inputs import Inputs
    from .core.rows import GlobalRows
    from .sm100.forward import ForwardSm100
    from .sm100.packed import PackedSm100
    from .sm100.shared import Extents

    kernel = PackedSm100(config) if config.has_cu_seqlens else ForwardSm100(config)
    kernel.kernel.set_name_prefix(config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    q, k = _array(config, config.head_dim), _array(config, config.head_dim)
    v, pointers = _array(config, config.head_dim_v), _pointers(config)
    out = _array(config, config.head_dim_v)
    if not config.out_by_tma:
        out = GlobalRows(pointers["out"], *(cutlass.Int64(0) for _ in range(3)))
    inputs = Inputs(*(pointers.get(name) for name in Inputs._fields))
    sizes = _scalars(config, ("q_len", "kv_len", "q_heads", "kv_heads", "batch"))
    grid = Extents(**sizes, schedule=pointers.get("q_schedule"))
    return cute.compile(kernel.launch, q, k, v, out, pointers["lse"], inputs, grid, options=options).artifacts


def _compile_grouped_sm100(config: GroupedSm100Config, options: str) -> Any:
    import cutlass
    import cutlass.cute as cute

    from .core.inputs import Inputs
    from .core.pages import Pages
    from .core.rows import GlobalRows
    from .sm100.grouped import GroupedSm100
    from .sm100.shared import Extents

    kernel = GroupedSm100(config)
    GroupedSm100.kernel.set_name_prefix(config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    pointers = _pointers(config)

    def rows(name: str) -> Any:
        return GlobalRows(pointers[name], *(cutlass.Int64(0) for _ in range(3))) if name in pointers else None

    k = v = None
    if not config.gathers_keys:
        k, v = _array(config, config.head_dim), _array(config, config.head_dim_v)
    out, lse = rows("out"), pointers.get("lse")
    if config.is_split:
        out, lse = pointers["partial_out"], pointers["partial_lse"]
    inputs = Inputs(*(pointers.get(name) for name in Inputs._fields))
    names = ("q_len", "kv_len", "q_heads", "kv_heads", "batch")
    splits = _scalars(config, ("num_splits",)) if config.is_split else {}
    pages = Pages(**_scalars(config, Pages._fields)) if config.page_size is not None else None
    extents = Extents(
        **_scalars(config, names),
        q=rows("q"),
        k=rows("k"),
        v=rows("v"),
        num_splits=splits.get("num_splits"),
        page_table=pointers.get("page_table"),
        pages=pages,
    )
    return cute.compile(kernel.launch, k, v, out, lse, inputs, extents, options=options).artifacts


def _compile_decode_sm90(config: DecodeConfig, options: str) -> Any:
    import cutlass
    import cutlass.cute as cute

    from .core.inputs import Inputs
    from .core.pages import Pages
    from .sm90.decode import Arrays, DecodeSm90, Extents, OutStrides

    kernel = DecodeSm90(config)
    DecodeSm90.kernel.set_name_prefix(config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    k, v = _array(config, config.head_dim), _array(config, config.head_dim_v)
    pointers = _pointers(config)
    arrays, inputs = (kind(*(pointers.get(name) for name in kind._fields)) for kind in (Arrays, Inputs))
    extents = Extents(**_scalars(config, Extents._fields))
    out_strides = OutStrides(*(cutlass.Int64(1) for _ in OutStrides._fields)) if config.has_clusters else None
    pages = Pages(**_scalars(config, Pages._fields)) if config.page_size is not None else None
    return cute.compile(
        kernel.launch, k, v, arrays, inputs, pointers.get("page_table"), extents, out_strides, pages, options=options
    ).artifacts


def _compile_combine(config: CombineConfig, options: str) -> Any:
    import cutlass.cute as cute

    from .core.combine import Arrays, Combine, Extents

    kernel = Combine(config)
    Combine.kernel.set_name_prefix(config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    pointers = _pointers(config)
    arrays = Arrays(*(pointers.get(name) for name in Arrays._fields))
    extents = Extents(**_scalars(config, Extents._fields))
    return cute.compile(kernel.launch, arrays, extents, options=options).artifacts


def _compile_schedule(config: ScheduleConfig, options: str) -> Any:
    import cutlass.cute as cute

    from .core.schedule import Arrays, Extents, ScheduleKernel

    kernel = ScheduleKernel(config)
    ScheduleKernel.kernel.set_name_prefix(config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    pointers = _pointers(config)
    pointers["schedule"] = pointers.pop(f"{config.side}_schedule")
    arrays = Arrays(*(pointers.get(name) for name in Arrays._fields))
    extents = Extents(**_scalars(config, Extents._fields))
    return cute.compile(kernel.launch, arrays, extents, options=options).artifacts


COMPILERS: dict[tuple[str, str], Callable[[Any, str], Any]] = {
    ("sm_90a", "forward"): _compile_forward_sm90,
    ("sm_90a", "backward"): _compile_backward_sm90,
    ("sm_90a", "backward_wide"): _compile_backward_sm90,
    ("sm_90a", "preprocess"): _compile_preprocess_sm90,
    ("sm_90a", "postprocess"): _compile_postprocess_sm90,
    ("sm_90a", "backward_scores"): _compile_scores_sm90,
    ("sm_90a", "decode"): _compile_decode_sm90,
    **{(arch, "combine"): _compile_combine for arch in ("sm_90a", "sm_100a", "sm_103a")},
    **{(arch, "schedule"): _compile_schedule for arch in ("sm_90a", "sm_100a", "sm_103a")},
    ("sm_100a", "forward"): _compile_forward_sm100,
    ("sm_103a", "forward"): _compile_forward_sm100,
    **{(arch, kernel): _compile_grouped_sm100 for arch in ("sm_100a", "sm_103a") for kernel in ("grouped", "decode")},
}
