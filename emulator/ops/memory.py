"""Loads, stores and atomics of the generic proxy, PTX ISA 9.7.9 and 9.7.13 (`ld`, `st`, `atom`, `red`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from jax_fa4.emulator.decode import Effect, Form, family
from jax_fa4.emulator.errors import Fault
from jax_fa4.emulator.memory import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, UNSIGNED
from jax_fa4.emulator.rounding import bf16_bits, bf16_value, flush
from jax_fa4.emulator.schedule import POLL, Wait
from jax_fa4.emulator.state import Cta, Lanes, Warp, lanes_of
from jax_fa4.emulator.text.module import Vector

SEMANTICS = ("weak", "relaxed", "acquire", "release", "volatile", "mmio", "acq_rel")
SCOPES = ("cta", "cluster", "gpu", "sys")
SPACES = ("global", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry", "const", "generic")
CACHE_HINTS = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "L1::", "L2::", "noftz")
SPINNABLE = ("relaxed", "acquire", "volatile", "mmio", "acq_rel")

Words = npt.NDArray[Any]  # unsigned [lanes, words of a lane]


class _Access:
    """What `ld` and `st` have in common: space, width, count, and whether programs spin on it."""

    def __init__(self, form: Form):
        semantics = form.take(*SEMANTICS, default="weak")
        form.take(*SCOPES, default="none")
        self.space = form.take(*SPACES, default="generic").partition("::")[0]
        form.modifiers = [word for word in form.modifiers if not _is_hint(word)]
        self.count = int(form.take("v2", "v4", "v8", default="v1")[1:])
        (self.kind,) = form.types()
        form.end()
        self.is_spinnable = semantics in SPINNABLE and self.space in ("global", "generic", "shared")
        self.size = int(self.kind[1:]) // 8
        if self.size == 16:
            raise form.unknown("of 128 bits is not implemented")

    @property
    def register_type(self) -> str:
        """The type of a register that holds one element."""
        return "b16" if self.size == 1 else f"b{8 * self.size}"


def _is_hint(word: str) -> bool:
    return word in CACHE_HINTS or word.startswith(("L1::", "L2::"))


def owner_of(warp: Warp, addresses: npt.NDArray[np.int64], what: str, *, own_only: bool = False) -> Cta:
    """The one CTA that shared addresses lie in."""
    rank = int(addresses[0]) >> 24
    if rank == warp.cta.rank:
        return warp.cta
    owner = warp.cta.cluster.cta_of(int(addresses[0]))
    if own_only:
        raise Fault("bounds", f"{what} reaches into the shared memory of CTA {rank}", address=int(addresses[0]))
    if owner.has_exited:
        raise Fault(
            "exit", f"{what} reaches into the shared memory of a CTA that has exited", address=int(addresses[0])
        )
    return owner


def by_owner(
    warp: Warp, addresses: npt.NDArray[np.int64], what: str, *, own_only: bool = False
) -> list[tuple[Cta, npt.NDArray[np.bool_] | slice]]:
    """The CTAs that shared addresses lie in, and which addresses are theirs."""
    ranks = addresses >> 24
    if (ranks == ranks[0]).all():
        return [(owner_of(warp, addresses, what, own_only=own_only), slice(None))]
    return [
        (owner_of(warp, addresses[ranks == rank], what, own_only=own_only), ranks == rank) for rank in np.unique(ranks)
    ]


def load_shared(
    warp: Warp, addresses: npt.NDArray[np.int64], size: int, count: int, what: str, *, for_atomic: bool = False
) -> Words:
    """Words at shared addresses of any CTA of the cluster."""
    result = np.empty((len(addresses), count), UNSIGNED[size])
    for cta, mine in by_owner(warp, addresses, what):
        offsets = addresses[mine] & 0xFFFFFF
        result[mine] = cta.smem.load(offsets, size, count, warp.clock, what, for_atomic=for_atomic)
    return result


def store_shared(
    warp: Warp, addresses: npt.NDArray[np.int64], values: Words, what: str, *, by_atomic: bool = False
) -> None:
    """Write words at shared addresses of any CTA of the cluster."""
    for cta, mine in by_owner(warp, addresses, what):
        cta.smem.store(addresses[mine] & 0xFFFFFF, values[mine], warp.clock, what, by_atomic=by_atomic)


def load_param(warp: Warp, addresses: npt.NDArray[np.uint64], size: int, count: int) -> Words:
    """Words of the parameter block."""
    block = warp.machine.params
    offsets = (addresses - np.uint64(PARAM_WINDOW)).astype(np.int64)
    if (offsets < 0).any() or (offsets + size * count > len(block)).any():
        raise Fault("bounds", "ld.param lies outside of the parameters", address=int(addresses[0]))
    if (offsets % size).any():
        raise Fault("alignment", f"ld.param needs a multiple of {size}", address=int(addresses[0]))
    return block.view(UNSIGNED[size])[(offsets // size)[:, None] + np.arange(count)]


def space_of(address: int) -> str:
    """The state space that a generic address lies in."""
    return {SHARED_WINDOW >> 40: "shared", LOCAL_WINDOW >> 40: "local", PARAM_WINDOW >> 40: "param"}.get(
        address >> 40, "global"
    )


def load(
    warp: Warp,
    lanes: Lanes,
    space: str,
    addresses: Any,
    size: int,
    count: int,
    what: str,
    *,
    for_atomic: bool = False,
) -> Words:
    """Words at addresses (of the executing lanes only) of a state space."""
    if space == "generic":
        space = space_of(int(addresses[0]))
        if space == "shared":
            addresses = (addresses - np.uint64(SHARED_WINDOW)).astype(np.int64)
        elif space == "local":
            addresses = addresses - np.uint64(LOCAL_WINDOW)
    if space == "shared":
        return load_shared(warp, addresses, size, count, what, for_atomic=for_atomic)
    if space == "param":
        return load_param(warp, addresses, size, count)
    if space == "local":
        return warp.local.load(lanes.index, addresses.astype(np.int64), size, count)
    return warp.machine.global_memory.load(addresses, size, count, what)


def store(
    warp: Warp, lanes: Lanes, space: str, addresses: Any, values: Words, what: str, *, by_atomic: bool = False
) -> None:
    """Write words at addresses (of the executing lanes only) of a state space."""
    if space == "generic":
        space = space_of(int(addresses[0]))
        if space == "shared":
            addresses = (addresses - np.uint64(SHARED_WINDOW)).astype(np.int64)
        elif space == "local":
            addresses = addresses - np.uint64(LOCAL_WINDOW)
    if space == "shared":
        warp.writing_lanes |= lanes.bits
        store_shared(warp, addresses, values, what, by_atomic=by_atomic)
    elif space == "local":
        warp.local.store(lanes.index, addresses.astype(np.int64), values)
    else:
        warp.machine.progress += 1
        warp.machine.global_memory.store(addresses, values, what)


def _addresses(form: Form, operand: int, space: str) -> Callable[[Warp, Lanes], Any]:
    """How to get the executing lanes' addresses."""
    where = form.shared(operand) if space == "shared" else form.generic(operand)
    return lambda warp, lanes: where.at(warp)[lanes.index]


@family("ld", "ldu")
def ld(form: Form) -> Effect:
    access = _Access(form)
    target = form.operands[0]
    names = target.items if isinstance(target, Vector) else (target,)
    if len(names) != access.count:
        raise form.unknown(f"loads {access.count} elements into {len(names)} registers")
    addresses = _addresses(form, 1, access.space)
    width = getattr(names[0], "width", 8 * access.size)
    destinations = [form.dst(name, f"u{width}") for name in names]
    signed = np.dtype(f"i{access.size}") if access.kind.startswith("s") and width != 8 * access.size else None
    what = form.instruction.opcode

    def execute(warp: Warp, lanes: Lanes) -> Wait | None:
        words = load(warp, lanes, access.space, addresses(warp, lanes), access.size, access.count, what)
        if signed is not None:
            words = words.view(signed)
        for i, destination in enumerate(destinations):
            if destination is not None:
                warp.v[destination][lanes.index] = words[:, i]
        return POLL if access.is_spinnable else None

    return form.effect(execute)


@family("st")
def st(form: Form) -> Effect:
    access = _Access(form)
    addresses = _addresses(form, 0, access.space)
    sources = form.srcs(1, access.register_type)
    if len(sources) != access.count:
        raise form.unknown(f"stores {len(sources)} registers as {access.count} elements")
    dtype = UNSIGNED[access.size]
    what = form.instruction.opcode

    def execute(warp: Warp, lanes: Lanes) -> None:
        index = lanes.index
        values = np.stack([warp.v[source][index] for source in sources], axis=1).astype(dtype, copy=False)
        store(warp, lanes, access.space, addresses(warp, lanes), values, what)

    return form.effect(execute)


def _increment(r, s):
    return r.dtype.type(0) if r >= s else r + r.dtype.type(1)


def _decrement(r, s):
    return s if r == 0 or r > s else r - r.dtype.type(1)


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "min": np.fmin,
    "max": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda r, s: s,
    "inc": _increment,
    "dec": _decrement,
}


ONE_BY_ONE = ("inc", "dec")  # their functions are of scalars


def reduce_words(name: str, kind: str, old: Words, new: Words, *, flushes: bool) -> Words:
    """`old op new` on arrays of the element's unsigned type; float additions on global memory flush subnormals."""
    function = OPERATIONS[name]
    if kind in ("f16x2", "bf16x2"):
        halves = reduce_words(name, kind[:-2], old.view(np.uint16), new.view(np.uint16), flushes=flushes)
        return halves.view(old.dtype)
    if kind == "bf16":
        return bf16_bits(function(bf16_value(old), bf16_value(new)).astype(np.float32))
    dtype = {"b": "u", "u": "u", "s": "i", "f": "f"}[kind[0]] + str(old.dtype.itemsize)
    a, b = old.view(dtype), new.view(dtype)
    if kind == "f32" and flushes and name == "add":
        return flush(function(flush(a), flush(b))).view(old.dtype)
    return np.asarray(function(a, b), dtype).view(old.dtype)


def _register_atomic(name: str) -> None:
    @family(name)
    def atomic(form: Form) -> Effect:
        """Lanes that touch the same words act one after the other, lowest first."""
        form.take(*SEMANTICS, default="relaxed")
        form.take(*SCOPES, default="gpu")
        space = form.take(*SPACES, default="generic").partition("::")[0]
        form.modifiers = [word for word in form.modifiers if not _is_hint(word)]
        operation = form.take(*OPERATIONS, "cas")
        count = int(form.take("v2", "v4", "v8", default="v1")[1:])
        (kind,) = form.types()
        form.end()
        size = {"f16x2": 4, "bf16x2": 4, "bf16": 2}.get(kind) or int(kind[1:]) // 8
        returns = name == "atom"
        addresses = _addresses(form, int(returns), space)
        register = f"b{8 * size}"
        first = form.srcs(1 + returns, register)
        swap = form.srcs(2 + returns, register) if operation == "cas" else None
        results = form.dsts(0, register) if returns else ()
        what = form.instruction.opcode
        if len(first) != count:
            raise form.unknown(f"has {len(first)} values for {count} elements")

        def at_once(warp: Warp, lanes: Lanes, where: npt.NDArray[Any]) -> None:
            """For lanes whose words are apart."""
            old = load(warp, lanes, space, where, size, count, what, for_atomic=True)
            new = np.stack([warp.v[slot] for slot in first], axis=1)[lanes.index]
            if swap is None:
                value = reduce_words(operation, kind, old, new, flushes=space != "shared")
            else:
                value = np.where(old == new, warp.v[swap[0]][lanes.index][:, None], old)
            store(warp, lanes, space, where, np.asarray(value, old.dtype).reshape(old.shape), what, by_atomic=True)
            for i, slot in enumerate(results):
                if slot is not None:
                    warp.v[slot][lanes.index] = old[:, i]

        def execute(warp: Warp, lanes: Lanes) -> Wait | None:
            warp.machine.progress += 1
            where = addresses(warp, lanes)
            if operation in ONE_BY_ONE or space not in ("global", "generic") or not _are_apart(where, size * count):
                for lane, address in zip(lanes.index.tolist(), where, strict=True):
                    at_once(warp, lanes_of(1 << lane), np.array([address]))
            else:
                at_once(warp, lanes, where)
            return POLL if returns else None

        return form.effect(execute)


def _are_apart(addresses: npt.NDArray[Any], size: int) -> bool:
    """Whether no two lanes touch the same bytes."""
    return len(addresses) == 1 or bool((np.diff(np.sort(addresses)) >= size).all())


for _name in ("atom", "red"):
    _register_atomic(_name)
