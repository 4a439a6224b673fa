"""The problems that are timed: prefill, packed documents, decoding, and decoding from pages. All in bfloat16."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

import numpy as np

__all__ = ["GRID", "SMOKE", "UNBOUNDED", "Cell", "Direction", "Kind", "select"]

Kind = Literal["prefill", "varlen", "decode", "paged"]
Direction = Literal["forward", "backward"]
Window = tuple[int | None, int | None]

TOKENS = 16384  # of a batch, in most cells: batches are as large as the sequences are short
BACKWARD_WORK = 2.5  # a backward has five matrix products, a forward two
UNBOUNDED = (None, None)
ELEMENT_BYTES = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One problem. Packed documents have `lengths` and batch 1; keys in pages have a `page_size`."""

    name: str
    kind: Kind
    batch: int = 1
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    window: Window = UNBOUNDED  # keys before and after a query's place, inclusive
    lengths: tuple[int, ...] = ()
    page_size: int | None = None

    def __str__(self) -> str:
        lengths = f"{self.batch}x{self.q_len}" + (f"x{self.kv_len}" if self.kv_len != self.q_len else "")
        heads = f"h{self.q_heads}" + (f".{self.kv_heads}" if self.kv_heads != self.q_heads else "")
        dims = f"d{self.head_dim}" + (f".{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        mask = (["causal"] if self.causal else []) + ([f"window {self.window[0]}"] if self.window != UNBOUNDED else [])
        return " ".join([self.name, lengths, heads, dims, *mask])

    @property
    def directions(self) -> tuple[Direction, ...]:
        """What is timed of it: who decodes needs no gradient."""
        return ("forward", "backward") if self.kind in ("prefill", "varlen") else ("forward",)

    @property
    def unit(self) -> str:
        """Of the speed: decoding is a matter of memory, the others of arithmetic."""
        return "TFLOP/s" if self.kind in ("prefill", "varlen") else "TB/s"

    def work(self, direction: Direction) -> float:
        """FLOP of the (query, key) pairs that the mask keeps, or bytes of keys and values."""
        if self.unit == "TB/s":
            return ELEMENT_BYTES * self.batch * self.kv_len * self.kv_heads * (self.head_dim + self.head_dim_v)
        sequences = [(n, n) for n in self.lengths] or [(self.q_len, self.kv_len)] * self.batch
        pairs = sum(_visible_pairs(q_len, kv_len, self.causal, self.window) for q_len, kv_len in sequences)
        forward = 2 * self.q_heads * pairs * (self.head_dim + self.head_dim_v)
        return forward if direction == "forward" else BACKWARD_WORK * forward


def select(words: Iterable[str]) -> tuple[Cell, ...]:
    """The cells of the grid whose kind or name is one of the words, all if there is none; `smoke` is the small one.

    A word may also be all that is printed of a cell.

    Raises ValueError for a word that no cell answers to.
    """
    words = tuple(words)
    known = {word for cell in (*GRID, SMOKE) for word in (cell.kind, cell.name)}
    for word in words:
        if word not in known and word not in map(str, (*GRID, SMOKE)):
            raise ValueError(f"no cell is called {word!r} (there are {', '.join(sorted(known))})")
    if not words:
        return GRID
    return tuple(
        cell
        for cell in (*GRID, SMOKE)
        if cell.name in words or str(cell) in words or (cell.kind in words and cell != SMOKE)
    )


def _visible_pairs(q_len: int, kv_len: int, causal: bool, window: Window) -> int:
    """The last query stands at the last key."""
    left, right = window
    place = np.arange(q_len, dtype=np.int64) + kv_len - q_len
    first = np.zeros_like(place) if left is None else np.maximum(place - left, 0)
    right = 0 if causal else right
    end = np.full_like(place, kv_len) if right is None else np.clip(place + right + 1, 0, kv_len)
    return int(np.maximum(end - first, 0).sum())


def _prefill(
    name: str, seq: int, heads: tuple[int, int], dims: tuple[int, int], causal: bool, tokens: int = TOKENS
) -> Cell:
    return Cell(
        name=name,
        kind="prefill",
        batch=tokens // seq,
        q_len=seq,
        kv_len=seq,
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=dims[0],
        head_dim_v=dims[1],
        causal=causal,
    )


def _prefill_grid() -> list[Cell]:
    both = (False, True)
    cells = [_prefill("d64", seq, (32, 32), (64, 64), causal) for seq in (1024, 4096, 16384) for causal in both]
    cells += [
        _prefill("d128", seq, (16, 16), (128, 128), causal) for seq in (512, 2048, 8192, 16384) for causal in both
    ]
    cells += [_prefill("d256", seq, (8, 8), (256, 256), causal) for seq in (1024, 4096, 16384) for causal in both]
    for seq, causal in ((4096, False), (16384, True)):
        cells.append(_prefill("d96", seq, (16, 16), (96, 96), causal))
        cells.append(_prefill("d192", seq, (8, 8), (192, 192), causal))
        cells.append(_prefill("mla", seq, (16, 16), (192, 128), causal))
    cells.append(_prefill("gqa", 8192, (32, 8), (128, 128), True, tokens=4 * 8192))
    cells.append(_prefill("mqa", 8192, (32, 1), (128, 128), True))
    window = _prefill("window", 16384, (32, 8), (128, 128), True)
    cells.append(dataclasses.replace(window, window=(4096, 0)))
    return cells


def packings() -> dict[str, tuple[int, ...]]:
    """Lengths of documents that fill a batch: equal ones, and a log-normal mix with the longest last or first."""
    equal = {f"docs{n}": (TOKENS // n,) * n for n in (1, 4, 16, 64)}
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while (room := TOKENS - sum(lengths)) > 0:
        lengths.append(min(int(np.clip(rng.lognormal(6.0, 1.2), 16, 8192)), room))
    ascending = sorted(lengths)
    return {**equal, "mix": tuple(ascending), "mix_sorted": tuple(reversed(ascending))}


def _varlen_grid() -> list[Cell]:
    return [
        Cell(
            name=name,
            kind="varlen",
            q_len=TOKENS,
            kv_len=TOKENS,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim,
            causal=True,
            lengths=lengths,
        )
        for head_dim, q_heads, kv_heads in ((64, 32, 32), (128, 16, 16), (128, 32, 8))
        for name, lengths in packings().items()
    ]


def _decode(name: str, kind: Kind, batch: int, kv_len: int, page_size: int | None = None) -> Cell:
    return Cell(
        name=name,
        kind=kind,
        batch=batch,
        q_len=1,
        kv_len=kv_len,
        q_heads=32,
        kv_heads=8,
        head_dim=128,
        head_dim_v=128,
        page_size=page_size,
    )


def _decode_grid() -> list[Cell]:
    sizes = ((1, 8192), (1, 131072), (8, 32768), (64, 8192), (128, 2048))
    cells = [_decode("decode", "decode", batch, kv_len) for batch, kv_len in sizes]
    return cells + [
        _decode(f"page{page_size}", "paged", batch, kv_len, page_size)
        for page_size in (16, 64)
        for batch, kv_len in ((8, 32768), (64, 8192))
    ]


GRID = (*_prefill_grid(), *_varlen_grid(), *_decode_grid())
SMOKE = _prefill("smoke", 128, (2, 2), (64, 64), True, tokens=128)
