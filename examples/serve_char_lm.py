"""Serves the character model of train_char_lm.py to many readers at once, by continuous batching over a paged cache.

Requests differ in the length of their prompts and answers. Each has a slot of the batch until its answer is complete;
then the next one gets the slot, while the others go on. Keys and values lie in pages of one pool, so a request takes
the room that it needs and not that of the longest. Prompts are read in chunks, beside slots that write.

The same requests are served again with a dense cache, which must write the same, or this ends with an error; and once
more with that and `jax.nn.dot_product_attention`, which may not where it rounds differently.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

import jax_fa4
from jax_fa4.arguments import at_least
from jax_fa4.bench.report import environment

sys.path.insert(0, str(Path(__file__).parent))
import train_char_lm as training

PAGE_SIZE = 16
CHUNK = 32  # characters of a prompt that one step reads
TEMPERATURE = 0.7
SHORTEST_PROMPT = 2  # characters: a step that reads several, and then one that reads one
SHORTEST = SHORTEST_PROMPT + 1  # of prompt and answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, as indices of characters, and how many more to write."""

    number: int
    prompt: np.ndarray
    new: int

    @property
    def length(self) -> int:
        """Of prompt and answer."""
        return len(self.prompt) + self.new


class Batch(NamedTuple):
    """What a step reads of each of S slots. Slots without a request have no tokens."""

    tokens: jax.Array  # [S, C] int32: each slot's next, its first `counts`
    counts: jax.Array  # [S] int32
    lengths: jax.Array  # [S] int32: tokens that are in the cache already
    requests: jax.Array  # [S] int32: decides the noise that an answer is drawn with
    page_table: jax.Array  # [S, P] int32

    @property
    def positions(self) -> jax.Array:
        """[S, C]: where tokens stand in their sequence; -1 is padding."""
        place = jnp.arange(self.tokens.shape[1])
        return jnp.where(place < self.counts[:, None], self.lengths[:, None] + place, -1)


Store = tuple[jax.Array, jax.Array]  # keys and values of one layer
Attend = Callable[[Store, jax.Array, jax.Array, jax.Array, Batch], tuple[Store, jax.Array]]


def attend_paged(store: Store, q: jax.Array, k: jax.Array, v: jax.Array, batch: Batch) -> tuple[Store, jax.Array]:
    """Appends k and v [S, C, H, D] to the pages, and attends to all that is there then."""
    store = jax_fa4.append_kv(*store, k, v, batch.page_table, batch.positions)
    total = batch.lengths + batch.counts
    return store, jax_fa4.attention_paged(q, *store, batch.page_table, total, q_lengths=batch.counts)


def attend_dense(store: Store, q: jax.Array, k: jax.Array, v: jax.Array, batch: Batch) -> tuple[Store, jax.Array]:
    """The same with keys and values [S, L, H, D]."""
    store = _write(store, k, v, batch)
    lengths = {"q_lengths": batch.counts, "kv_lengths": batch.lengths + batch.counts}
    return store, jax_fa4.attention(q, *store, causal=True, **lengths)


def attend_jax_nn(store: Store, q: jax.Array, k: jax.Array, v: jax.Array, batch: Batch) -> tuple[Store, jax.Array]:
    """The same with a mask over all L places."""
    store = _write(store, k, v, batch)
    visible = jnp.arange(store[0].shape[1]) <= batch.positions[:, None, :, None]
    return store, jax.nn.dot_product_attention(q, *store, mask=visible)


def _write(store: Store, k: jax.Array, v: jax.Array, batch: Batch) -> Store:
    """Puts new keys and values into a dense cache."""
    slots, room = store[0].shape[:2]
    index = jnp.arange(slots)[:, None], jnp.where(batch.positions < 0, room, batch.positions)  # padding goes nowhere
    keys, values = (old.at[index].set(new, mode="drop") for old, new in zip(store, (k, v), strict=True))
    return keys, values


Step = Callable[[list[jax.Array], list[Store], Batch], tuple[list[Store], jax.Array]]


@functools.cache
def step_of(graph: nnx.GraphDef, tree: jax.tree_util.PyTreeDef, attend: Attend) -> Step:
    """Of the leaves of a model's state, one step of serving.

    Each step takes a list of arrays: what else a model consists of is looked at once, not in front of every step.
    """

    @functools.partial(jax.jit, donate_argnums=1)
    def step(leaves: list[jax.Array], stores: list[Store], batch: Batch) -> tuple[list[Store], jax.Array]:
        return read(nnx.merge(graph, jax.tree.unflatten(tree, leaves)), stores, batch, attend)

    return step


def read(
    model: training.CharacterModel, stores: list[Store], batch: Batch, attend: Attend
) -> tuple[list[Store], jax.Array]:
    """Reads each slot's tokens; returns the caches with them, and the character that each slot would write next [S]."""
    x = model.characters(batch.tokens) + model.positions(jnp.maximum(batch.positions, 0))
    stores = list(stores)
    for n, block in enumerate(model.blocks):
        normed = block.attention_norm(x)
        q, k, v = (project(normed) for project in (block.attention.query, block.attention.key, block.attention.value))
        stores[n], attended = attend(stores[n], q, k, v, batch)
        x = x + block.attention.out(attended)
        x = x + block.narrow(nnx.gelu(block.widen(block.network_norm(x))))
    last = jnp.take_along_axis(x, jnp.maximum(batch.counts - 1, 0)[:, None, None], axis=1)[:, 0]
    logits = model.logits(model.norm(last)).astype(jnp.float32)
    return stores, jnp.argmax(logits / TEMPERATURE + _noise(batch, logits.shape[-1]), axis=-1)


def _noise(batch: Batch, vocabulary: int) -> jax.Array:
    """[S, vocabulary]: the same for a request and place, whatever slot and batch it is served in."""

    def of(request: jax.Array, place: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), request), place)
        return jax.random.gumbel(key, (vocabulary,))

    return jax.vmap(of)(batch.requests, batch.lengths + batch.counts)


class Cache(Protocol):
    """Keys and values of every layer, and which request has what room in them."""

    stores: list[Store]
    attend: Attend
    page_table: np.ndarray  # [S, P] int32

    def take(self, slot: int, length: int) -> bool:
        """Gives the slot room for so many tokens. False if there is none now."""

    def release(self, slot: int) -> None:
        """The slot's request is complete."""


class PagedCache:
    """A pool of pages; a request holds as many as it needs."""

    attend = staticmethod(attend_paged)

    def __init__(self, shape: training.Shape, dtype: jnp.dtype, slots: int, num_pages: int):
        rows = self.rows(shape, slots, num_pages)
        self.stores = [(jnp.zeros(rows, dtype), jnp.zeros(rows, dtype)) for _ in range(shape.layers)]
        self.page_table = np.zeros((slots, _pages(shape.length)), np.int32)
        self.free = list(range(num_pages))
        self.held: dict[int, list[int]] = {}

    def rows(self, shape: training.Shape, slots: int, num_pages: int) -> tuple[int, ...]:
        """Shape of a layer's keys."""
        return num_pages, PAGE_SIZE, shape.heads, training.HEAD_DIM

    def take(self, slot: int, length: int) -> bool:
        """Pages in whatever order they are free."""
        count = _pages(length)
        if count > len(self.free):
            return False
        self.held[slot] = [self.free.pop() for _ in range(count)]
        self.page_table[slot, :count] = self.held[slot]
        return True

    def release(self, slot: int) -> None:
        """Its pages are free again."""
        self.free += self.held.pop(slot)


class DenseCache(PagedCache):
    """Room for the longest request in each slot. Requests still wait for pages, so that the batches are the same."""

    attend = staticmethod(attend_dense)

    def rows(self, shape: training.Shape, slots: int, num_pages: int) -> tuple[int, ...]:
        """Shape of a layer's keys."""
        return slots, shape.length, shape.heads, training.HEAD_DIM


class JaxNnCache(DenseCache):
    """The same, for attention of JAX's own."""

    attend = staticmethod(attend_jax_nn)


def _pages(length: int) -> int:
    return -(-length // PAGE_SIZE)


def pool_size(slots: int, length: int) -> int:
    """Fewer pages than all slots would need for the longest requests, but enough for one of those."""
    return max(slots * _pages(length) * 3 // 4, _pages(length))


@dataclasses.dataclass
class Reading:
    """A request in a slot: all its tokens so far, of which `cached` have been read."""

    request: Request
    tokens: list[int]
    cached: int = 0


def serve(model: training.CharacterModel, requests: Sequence[Request], cache: Cache, bar: tqdm) -> dict[int, list[int]]:
    """The answers, by the numbers of requests. The bar counts characters written.

    Raises ValueError if a request can never get the room that it needs.
    """
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    step = step_of(graph, tree, cache.attend)
    waiting = collections.deque(requests)
    slots: list[Reading | None] = [None] * len(cache.page_table)
    answers: dict[int, list[int]] = {}
    while waiting or any(slots):
        _admit(waiting, slots, cache)
        batch = _batch(slots, cache.page_table)
        cache.stores, written = step(leaves, cache.stores, batch)
        new = 0
        for slot, (character, count) in enumerate(
            zip(np.asarray(written).tolist(), batch.counts.tolist(), strict=True)
        ):
            reading = slots[slot]
            if reading is None:
                continue
            reading.cached += count
            if reading.cached < len(reading.tokens):
                continue  # the prompt goes on
            reading.tokens.append(character)
            new += 1
            if len(reading.tokens) == reading.request.length:
                answers[reading.request.number] = reading.tokens[len(reading.request.prompt) :]
                cache.release(slot)
                slots[slot] = None
        bar.update(new)
    return answers


def _admit(waiting: collections.deque[Request], slots: list[Reading | None], cache: Cache) -> None:
    """In the order of their arrival, as long as slots and room last."""
    for slot, reading in enumerate(slots):
        if reading is None and waiting and cache.take(slot, waiting[0].length):
            request = waiting.popleft()
            slots[slot] = Reading(request, request.prompt.tolist())
    if not any(slots):
        raise ValueError(f"request {waiting[0].number} needs more room than the cache has")


def _batch(slots: Sequence[Reading | None], page_table: np.ndarray) -> Batch:
    """One token of each, or a chunk where a prompt is read: two shapes, so two programs."""
    unread = [[] if reading is None else reading.tokens[reading.cached :] for reading in slots]
    width = CHUNK if any(len(tokens) > 1 for tokens in unread) else 1
    tokens = np.zeros((len(slots), width), np.int32)
    for slot, new in enumerate(unread):
        tokens[slot, : len(new[:width])] = new[:width]
    return Batch(
        tokens=tokens,
        counts=np.array([len(new[:width]) for new in unread], np.int32),
        lengths=np.array([0 if reading is None else reading.cached for reading in slots], np.int32),
        requests=np.array([-1 if reading is None else reading.request.number for reading in slots], np.int32),
        page_table=page_table.copy(),
    )


def random_requests(ids: np.ndarray, count: int, length: int, rng: np.random.Generator) -> list[Request]:
    """Prompts from the text, of 2 characters to half of `length`, and answers that need not fill the rest.

    `length` is at least 3.
    """
    requests = []
    for number in range(count):
        size = int(rng.integers(SHORTEST_PROMPT, max(length // 2, SHORTEST)))
        start = int(rng.integers(0, len(ids) - size))
        new = int(rng.integers(1, length - size + 1))
        requests.append(Request(number=number, prompt=ids[start : start + size], new=new))
    return requests


def timed(
    name: str, model: training.CharacterModel, requests: Sequence[Request], make_cache: Callable[[], Cache]
) -> tuple[dict[int, list[int]], float]:
    """Answers, and tokens (characters) of them a second. What compiles is served once before."""
    count = sum(request.new for request in requests)
    with tqdm(disable=True) as bar:
        serve(model, [dataclasses.replace(requests[0], new=2)], make_cache(), bar)
    start = time.perf_counter()
    with tqdm(total=count, desc=name, unit="token") as bar:
        answers = serve(model, requests, make_cache(), bar)
    return answers, count / (time.perf_counter() - start)


def main() -> None:
    """Trains, serves three times, compares; an error if the paged and the dense cache give different answers."""
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=at_least(training.FEWEST_STEPS), default=800 if on_gpu else 200, help="of training"
    )
    parser.add_argument("--layers", type=at_least(1), default=6 if on_gpu else 2)
    heads_help = f"of {training.HEAD_DIM} features each"
    parser.add_argument("--heads", type=at_least(1), default=6 if on_gpu else 2, help=heads_help)
    length = 512 if on_gpu else 128
    parser.add_argument("--length", type=at_least(SHORTEST), default=length, help="characters of prompt and answer")
    parser.add_argument("--requests", type=at_least(1), default=256 if on_gpu else 24)
    slots_help = "requests that are served at once"
    parser.add_argument("--slots", type=at_least(1), default=64 if on_gpu else 8, help=slots_help)
    parser.add_argument("--out", type=Path, help="also write what was measured to this JSON file")
    args = parser.parse_args()

    dtype = jnp.dtype(jnp.bfloat16 if on_gpu else jnp.float32)
    vocabulary, ids = training.characters()
    shape = training.Shape(
        vocabulary=len(vocabulary), layers=args.layers, heads=args.heads, length=args.length, batch=16
    )
    rng = np.random.default_rng(0)
    model = training.train(shape, dtype, ids, args.steps, rng, reports=1)
    requests = random_requests(ids, args.requests, args.length, rng)
    num_pages = pool_size(args.slots, args.length)

    caches = {"paged": PagedCache, "dense": DenseCache, "jax.nn": JaxNnCache}
    print(f"jax_fa4 {jax_fa4.__version__} on {jax.devices()[0].device_kind}, {dtype.name}")
    print(f"{len(requests)} requests of up to {args.length} characters in {args.slots} slots, {num_pages} pages")
    answers, speeds = {}, {}
    for name, cache in caches.items():
        make_cache = functools.partial(cache, shape, dtype, args.slots, num_pages)
        answers[name], speeds[name] = timed(name, model, requests, make_cache)
        print(f"{name}: {speeds[name]:,.0f} tokens per second")
    same = {
        name: sum(answers["paged"][request.number] == answers[name][request.number] for request in requests)
        for name in ("dense", "jax.nn")
    }
    for name, count in same.items():
        print(f"paged over {name}: {speeds['paged'] / speeds[name]:.2f}, the same answer to {count} of {len(requests)}")
    longest = max(requests, key=lambda request: request.new)
    for name, part in (("prompt", longest.prompt), ("answer", answers["paged"][longest.number])):
        print(f"\n{name}: {''.join(vocabulary[n] for n in part)!r}")
    if args.out:
        sizes = {name: value for name, value in vars(args).items() if name != "out"} | {"num_pages": num_pages}
        counts = {"requests": len(requests), "tokens": sum(request.new for request in requests)}
        found = {"environment": environment(), "dtype": dtype.name, "sizes": sizes, "served": counts}
        found |= {"tokens_per_second": speeds, "same_answers_as_paged": same}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    if same["dense"] < len(requests):
        sys.exit(f"paged and dense answers differ for {len(requests) - same['dense']} of {len(requests)} requests")


if __name__ == "__main__":
    main()
