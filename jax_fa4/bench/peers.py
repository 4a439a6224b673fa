"""Who computes attention: jax_fa4 and every other implementation that may be installed, behind one small interface.

A peer that is absent says why; one that refuses a cell raises. Nothing is imported before somebody asks for it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4.bench.cells import UNBOUNDED, Cell, Direction
from jax_fa4.bench.operands import Operands
from jax_fa4.spec import Implementation

__all__ = ["DEFAULT", "DETERMINISTIC", "OURS", "PEERS", "Calls", "Peer", "select"]

OURS = "jax_fa4"
DETERMINISTIC = "deterministic"  # jax_fa4 with gradients that are bitwise reproducible
FLUSH_ELEMENTS = 1 << 25  # float32: more than twice any L2
JAX_FLUSH = "wrapped_cbrt"
TORCH_FLUSH = "sinh_kernel"
SEEN_ELEMENTS = 1 << 16  # of a result that are compared
Call = Callable[[], Any]
Attend = Callable[[Any, Any, Any], Any]  # of q, k and v


class Calls(NamedTuple):
    """What a peer runs for a cell. A call puts its work into the device's queue and returns what `wait` waits for."""

    run: dict[Direction, Call]
    refused: dict[Direction, str]  # with the reason
    flush: Call  # overwrites the L2, in the same queue
    flush_kernel: str  # part of the name of the kernel that does, which no other kernel's name has
    wait: Callable[[Any], object]
    seen: dict[Direction, np.ndarray]  # some elements of the results, float32


class Peer(Protocol):
    """An implementation of attention."""

    @property
    def name(self) -> str:
        """What a user calls it."""

    def why_missing(self) -> str | None:
        """None if it can run here, else the reason."""

    def version(self) -> str:
        """Of its package."""

    def calls(self, cell: Cell, x: Operands, directions: Collection[Direction] | None = None) -> Calls:
        """Compiles what the cell needs, or only some directions, and runs it once.

        Raises whatever the peer raises at a cell that it refuses.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class JaxPeer:
    """One that is called from JAX. `attend` gives the function of q, k and v for a cell."""

    name: str
    package: str
    module: str = "jax"
    attend: Callable[[Cell, Operands], Attend]
    needs_gpu: bool = True

    def why_missing(self) -> str | None:
        """None if it can run here, else the reason."""
        if self.needs_gpu and jax.default_backend() != "gpu":
            return "needs an NVIDIA GPU"
        return _why_not_importable(self.module)

    def version(self) -> str:
        """Of its package."""
        return _version(self.package, self.module)

    def calls(self, cell: Cell, x: Operands, directions: Collection[Direction] | None = None) -> Calls:
        """Compiles the forward, the forward that keeps what a backward needs, and the backward."""
        attend = self.attend(cell, x)
        forward = jax.jit(attend)
        run: dict[Direction, Call] = {"forward": lambda: forward(x.q, x.k, x.v)}
        seen: dict[Direction, np.ndarray] = {"forward": _seen(np.asarray(forward(x.q, x.k, x.v)))}
        refused: dict[Direction, str] = {}
        if "backward" in (cell.directions if directions is None else directions):
            try:
                run["backward"] = backward = _backward(attend, x)
                seen["backward"] = _seen(*map(np.asarray, backward()))
            except Exception as error:  # whatever a peer raises is its reason
                run.pop("backward", None)
                refused["backward"] = reason_of(error)
        return Calls(run, refused, jax_flush(), JAX_FLUSH, jax.block_until_ready, seen)


def _backward(attend: Attend, x: Operands) -> Call:
    """Only the gradient: the forward runs here, once."""
    _, pull = jax.jit(lambda *qkv: jax.vjp(attend, *qkv))(x.q, x.k, x.v)
    backward = jax.jit(lambda pull, dout: pull(dout))
    return lambda: backward(pull, x.dout)


@functools.cache
def jax_flush() -> Call:
    """A function that no attention needs. A CPU's caches are left alone."""
    if jax.default_backend() != "gpu":
        return lambda: None
    flush = jax.jit(jnp.cbrt, donate_argnums=0)
    buffer = flush(jnp.ones(FLUSH_ELEMENTS, jnp.float32))

    def run() -> Any:
        nonlocal buffer
        buffer = flush(buffer)
        return buffer

    return run


def _jax_fa4(cell: Cell, x: Operands, deterministic: bool = False) -> Attend:
    import jax_fa4

    where: Implementation | None = (
        "kernel" if jax.default_backend() == "gpu" else None
    )  # blockwise JAX on a GPU is not what is asked for
    offsets, pages, kv_lengths = x.cu_seqlens, x.page_table, x.kv_lengths
    if pages is not None and kv_lengths is not None:
        return lambda q, k, v: jax_fa4.attention_paged(q, k, v, pages, kv_lengths, implementation=where)
    if offsets is not None:
        longest = max(cell.lengths)
        return lambda q, k, v: jax_fa4.attention_varlen(
            q,
            k,
            v,
            offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            causal=cell.causal,
            window=cell.window,
            implementation=where,
            deterministic=deterministic,
        )
    attend = functools.partial(jax_fa4.attention, causal=cell.causal, window=cell.window)
    return functools.partial(attend, implementation=where, deterministic=deterministic)


def _deterministic(cell: Cell, x: Operands) -> Attend:
    _refuse(cell, "decode", "paged")
    return _jax_fa4(cell, x, deterministic=True)


def _jax_nn(cell: Cell, implementation: Literal["cudnn", "xla"]) -> Attend:
    _refuse(cell, "varlen", "paged")
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=cell.causal, implementation=implementation)
    return functools.partial(attend, local_window_size=_window(cell))


def _fa3(cell: Cell, x: Operands) -> Attend:
    import dew_flash_attn

    _refuse(cell, "paged")
    left, right = (-1 if bound is None else bound for bound in cell.window)
    if x.cu_seqlens is not None:
        return lambda q, k, v: dew_flash_attn.flash_mha_varlen(
            q, k, v, x.cu_seqlens, max(cell.lengths), is_causal=cell.causal, window_size=(left, right)
        )
    return lambda q, k, v: dew_flash_attn.flash_mha(q, k, v, is_causal=cell.causal, window_size=(left, right))


def _tokamax(cell: Cell, x: Operands) -> Attend:
    import tokamax

    _refuse(cell, "varlen", "decode", "paged")
    attend = functools.partial(tokamax.dot_product_attention, is_causal=cell.causal, implementation="mosaic")
    return functools.partial(attend, local_window_size=_window(cell))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchPeer:
    """FlashAttention-4 in PyTorch. It gets JAX's arrays, not copies."""

    name: str = "fa4"
    package: str = "flash-attn-4"

    def why_missing(self) -> str | None:
        """None if it can run here, else the reason."""
        if jax.default_backend() != "gpu":
            return "needs an NVIDIA GPU"
        return _why_not_importable("flash_attn.cute")

    def version(self) -> str:
        """Of its package."""
        return _version(self.package, "flash_attn.cute")

    def calls(self, cell: Cell, x: Operands, directions: Collection[Direction] | None = None) -> Calls:
        """Runs eagerly; the gradient's graph is kept from call to call."""
        import torch

        _refuse(cell, "paged")
        jax.block_until_ready(x)
        attend = _fa4(cell, x)
        q, k, v, dout = (torch.from_dlpack(array) for array in (x.q, x.k, x.v, x.dout))
        run: dict[Direction, Call] = {"forward": lambda: attend(q, k, v)}
        seen: dict[Direction, np.ndarray] = {"forward": _flat(attend(q, k, v))}
        refused: dict[Direction, str] = {}
        if "backward" in (cell.directions if directions is None else directions):
            try:
                leaves = [array.detach().requires_grad_() for array in (q, k, v)]
                result = attend(*leaves)
                run["backward"] = lambda: torch.autograd.grad(result, leaves, dout, retain_graph=True)
                seen["backward"] = np.concatenate([_flat(gradient) for gradient in run["backward"]()])
            except Exception as error:  # whatever a peer raises is its reason
                run.pop("backward", None)
                refused["backward"] = reason_of(error)
        return Calls(run, refused, _torch_flush(), TORCH_FLUSH, lambda result: torch.cuda.synchronize(), seen)


def _flat(tensor: Any) -> np.ndarray:
    """Some elements of PyTorch's; numpy has no bfloat16 of its own."""
    array: np.ndarray = tensor.detach().reshape(-1)[:: _step(tensor.numel())].float().cpu().numpy()
    return array


def _fa4(cell: Cell, x: Operands) -> Attend:
    import torch
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    if x.cu_seqlens is None:
        attend = functools.partial(flash_attn_func, causal=cell.causal, window_size=cell.window)
    else:
        offsets, longest = torch.from_dlpack(x.cu_seqlens), max(cell.lengths)
        attend = functools.partial(
            flash_attn_varlen_func,
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=cell.causal,
            window_size=cell.window,
        )

    def first_result(q: Any, k: Any, v: Any) -> Any:
        result = attend(q, k, v)
        return result[0] if isinstance(result, tuple) else result

    return first_result


@functools.cache
def _torch_flush() -> Call:
    import torch

    buffer = torch.ones(FLUSH_ELEMENTS, device="cuda")
    return lambda: buffer.sinh_()


def reason_of(error: Exception) -> str:
    """A line that says why a peer did not run."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def select(names: Sequence[str]) -> tuple[Peer, ...]:
    """jax_fa4 and the named peers, or those of DEFAULT if none is named. Raises ValueError for an unknown name."""
    for name in names:
        if name not in PEERS:
            raise ValueError(f"no peer is called {name!r} (there are {', '.join(PEERS)})")
    return tuple(PEERS[name] for name in dict.fromkeys((OURS, *(names or DEFAULT))))


def _refuse(cell: Cell, *kinds: str) -> None:
    if cell.kind in kinds:
        raise NotImplementedError(f"has no call for {cell.kind}")


def _window(cell: Cell) -> Any:
    """As `jax.nn` takes it."""
    return None if cell.window == UNBOUNDED else cell.window


def _seen(*arrays: np.ndarray) -> np.ndarray:
    """Elements from everywhere."""
    return np.concatenate([array.reshape(-1)[:: _step(array.size)].astype(np.float32) for array in arrays])


def _step(size: int) -> int:
    """Odd, so that no axis is seen at one place only."""
    return max(size // SEEN_ELEMENTS, 1) | 1


def _why_not_importable(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a package may also fail at what it looks for when it is imported
        return reason_of(error)
    return None


def _version(package: str, module: str) -> str:
    """What was installed, or what a module that is only on the path says of itself."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return getattr(importlib.import_module(module), "__version__", "unknown")


_ALL: tuple[Peer, ...] = (
    JaxPeer(name=OURS, package="jax_fa4", module="jax_fa4", attend=_jax_fa4, needs_gpu=False),
    JaxPeer(name=DETERMINISTIC, package="jax_fa4", module="jax_fa4", attend=_deterministic, needs_gpu=False),
    JaxPeer(name="cudnn", package="jax", attend=lambda cell, x: _jax_nn(cell, "cudnn")),
    JaxPeer(name="fa3", package="dew-flash-attn-cu13", module="dew_flash_attn", attend=_fa3),
    TorchPeer(),
    JaxPeer(name="tokamax", package="tokamax", module="tokamax", attend=_tokamax),
    JaxPeer(name="xla", package="jax", attend=lambda cell, x: _jax_nn(cell, "xla"), needs_gpu=False),
)
PEERS = {peer.name: peer for peer in _ALL}
DEFAULT = ("cudnn", "fa3", "fa4", "tokamax")
