"""Trains a small character language model, written with Flax nnx, on English text that ships with Python.

Run it with `make demo`. On a CPU the attention is blockwise JAX; on a GPU that has a kernel for it, a cubin.
`--attention cudnn` trains the same model on the same text with JAX's call of cuDNN, and `--out` keeps losses.
The last lines show the model's own writing, produced one character at a time from a key/value cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import textwrap
import time
from collections.abc import Callable
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import jax_fa4
from jax_fa4 import cubins
from jax_fa4.arguments import at_least
from jax_fa4.bench.report import environment
from jax_fa4.configs import forward_config
from jax_fa4.flax import attention_fn
from jax_fa4.spec import AttentionSpec, MaskSpec
from jax_fa4.support import why_unsupported

HEAD_DIM = 64
FEWEST_STEPS = 2  # the learning rate rises in the first, and falls behind it
ATTENTIONS = ("jax_fa4", "cudnn", "xla")
PROMPTS = ("The ", "If the ", "This is ")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model and of a batch."""

    vocabulary: int
    layers: int
    heads: int
    length: int
    batch: int

    @property
    def features(self) -> int:
        """Width of the residual stream."""
        return self.heads * HEAD_DIM


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A model, its loss before each step in nats a character, and the speed of the median step."""

    model: CharacterModel
    losses: list[float]
    tokens_per_second: float


def jax_nn_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    *,
    is_causal: bool,
    implementation: str,
    **_: object,
) -> jax.Array:
    """JAX's own, as a Flax module calls it. Single queries with a mask of the cache's places are left to XLA."""
    name = implementation if mask is None else "xla"
    mask = None if mask is None else mask.astype(bool)
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=is_causal, implementation=name)


def attention_fn_of(attention: str) -> Callable[..., jax.Array]:
    """What a Flax module calls for one of ATTENTIONS."""
    if attention == "jax_fa4":
        return attention_fn
    return functools.partial(jax_nn_attention, implementation=attention)


class Block(nnx.Module):
    """Attention and a two-layer network, each behind a norm and around a residual connection."""

    def __init__(self, shape: Shape, dtype: jnp.dtype, rngs: nnx.Rngs, attention: str):
        width = shape.features
        self.attention_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            shape.heads, width, use_bias=False, dtype=dtype, attention_fn=attention_fn_of(attention), rngs=rngs
        )
        self.network_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.widen = nnx.Linear(width, 4 * width, use_bias=False, dtype=dtype, rngs=rngs)
        self.narrow = nnx.Linear(4 * width, width, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, *, decode: bool) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), is_causal=not decode, decode=decode)
        return x + self.narrow(nnx.gelu(self.widen(self.network_norm(x))))


class CharacterModel(nnx.Module):
    """Logits [batch, length, vocabulary] of the next character."""

    def __init__(self, shape: Shape, dtype: jnp.dtype, rngs: nnx.Rngs, attention: str = "jax_fa4"):
        self.characters = nnx.Embed(shape.vocabulary, shape.features, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(shape.length, shape.features, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(shape, dtype, rngs, attention) for _ in range(shape.layers)])
        self.norm = nnx.RMSNorm(shape.features, dtype=dtype, rngs=rngs)
        self.logits = nnx.Linear(shape.features, shape.vocabulary, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, ids: jax.Array, positions: jax.Array, *, decode: bool = False) -> jax.Array:
        x = self.characters(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x, decode=decode)
        return self.logits(self.norm(x)).astype(jnp.float32)

    def empty_caches(self, shape: Shape) -> None:
        """Makes room for `length` keys and values of one sequence in every block."""
        for block in self.blocks:
            block.attention.init_cache((1, shape.length, shape.features), dtype=block.attention.dtype)


def mean_loss(model: CharacterModel, windows: jax.Array) -> jax.Array:
    """Cross entropy, in nats a character, of windows [batch, length + 1]."""
    ids, targets = windows[:, :-1], windows[:, 1:]
    logits = model(ids, jnp.arange(ids.shape[1]))
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


@nnx.jit
def train_step(model: CharacterModel, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
    """One step of the optimiser; returns the loss before it."""
    loss, grads = nnx.value_and_grad(mean_loss)(model, windows)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def next_logits(model: CharacterModel, character: jax.Array, position: jax.Array) -> jax.Array:
    """Logits [vocabulary] after one more character, whose key and value enter the caches."""
    return model(character.reshape(1, 1), position.reshape(1, 1), decode=True)[0, 0]


def write(
    model: CharacterModel,
    shape: Shape,
    vocabulary: str,
    prompt: str,
    rng: np.random.Generator,
    temperature: float = 0.7,
) -> str:
    """Continues the prompt until the model's window is full."""
    model.empty_caches(shape)
    text = prompt
    for position in range(shape.length - 1):
        logits = next_logits(model, jnp.asarray(vocabulary.index(text[position])), jnp.asarray(position))
        if position == len(text) - 1:
            noise = rng.gumbel(size=len(vocabulary))
            text += vocabulary[int(np.argmax(np.asarray(logits) / temperature + noise))]
    return text


def prose() -> str:
    """The paragraphs of Python's manual that are sentences, one a line."""
    paragraphs = (paragraph for topic in topics.values() for paragraph in topic.split("\n\n"))
    return "\n".join(" ".join(p.split()) for p in paragraphs if p[:1].isupper() and p.rstrip().endswith("."))


def windows_of(ids: np.ndarray, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """A batch of random windows [batch, length + 1]."""
    starts = rng.integers(0, len(ids) - shape.length, size=shape.batch)
    return ids[starts[:, None] + np.arange(shape.length + 1)]


def characters() -> tuple[str, np.ndarray]:
    """All characters of the text in order, and the text as indices into them."""
    text = prose()
    vocabulary = "".join(sorted(set(text)))
    return vocabulary, np.searchsorted(np.array(list(vocabulary)), np.array(list(text))).astype(np.int32)


def train_and_measure(
    shape: Shape,
    dtype: jnp.dtype,
    ids: np.ndarray,
    steps: int,
    rng: np.random.Generator,
    *,
    reports: int = 8,
    attention: str = "jax_fa4",
) -> Trained:
    """So many steps; a progress bar shows them, and a line each of the losses on the way."""
    model = CharacterModel(shape, dtype, nnx.Rngs(0), attention)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, max(1, steps // 20), steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, b2=0.95), wrt=nnx.Param)
    train_one = nnx.cached_partial(train_step, model, optimizer)  # which are looked at once, not in every step
    losses: list[float] = []
    seconds: list[float] = []
    shown = 0
    for step in (bar := tqdm(range(1, steps + 1), unit="step")):
        windows = jnp.asarray(windows_of(ids, shape, rng))
        start = time.perf_counter()
        losses.append(float(train_one(windows)))
        seconds.append(time.perf_counter() - start)
        if reports and (step == 1 or step % max(1, steps // reports) == 0):
            bar.write(f"step {step:5d}  loss {np.mean(losses[shown:]):.3f}")
            shown = step
    speed = shape.batch * shape.length / statistics.median(seconds)
    return Trained(model=model, losses=losses, tokens_per_second=speed)


def train(
    shape: Shape, dtype: jnp.dtype, ids: np.ndarray, steps: int, rng: np.random.Generator, reports: int = 8
) -> CharacterModel:
    """The model alone, trained with jax_fa4."""
    return train_and_measure(shape, dtype, ids, steps, rng, reports=reports).model


def implementation(dtype: jnp.dtype) -> str:
    """What runs the causal attention of this model on the device at hand."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return "blockwise JAX"
    arch = f"sm_{device.compute_capability.replace('.', '')}a"
    causal = MaskSpec(has_right=True)
    spec = AttentionSpec(dtype=dtype.name, head_dim=HEAD_DIM, head_dim_v=HEAD_DIM, group=1, mask=causal)
    config = forward_config(spec, arch)
    if config is None:
        return f"blockwise JAX: {why_unsupported(spec, arch)}"
    cubin = cubins.get(config)
    return f"{arch} cubin {cubin.key[:12]}, {len(cubin.image):,} bytes, for the forward"


def main() -> None:
    """Trains, reports, writes."""
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=at_least(FEWEST_STEPS), default=800)
    parser.add_argument("--layers", type=at_least(1), default=6 if on_gpu else 2)
    heads_help = f"of {HEAD_DIM} features each"
    parser.add_argument("--heads", type=at_least(1), default=6 if on_gpu else 2, help=heads_help)
    parser.add_argument("--length", type=at_least(1), default=512 if on_gpu else 64, help="characters the model sees")
    parser.add_argument("--batch", type=at_least(1), default=32 if on_gpu else 8)
    parser.add_argument("--attention", choices=ATTENTIONS, default=ATTENTIONS[0], help="cudnn needs a GPU")
    parser.add_argument("--out", type=pathlib.Path, help="also write losses and speed to this JSON file")
    args = parser.parse_args()
    if args.attention == "cudnn" and not on_gpu:
        parser.error("--attention cudnn needs a GPU, where the model computes in bfloat16")

    vocabulary, ids = characters()
    training, held_out = np.split(ids, [int(0.95 * len(ids))])

    dtype = jnp.dtype(jnp.bfloat16 if on_gpu else jnp.float32)
    shape = Shape(
        vocabulary=len(vocabulary), layers=args.layers, heads=args.heads, length=args.length, batch=args.batch
    )
    print(f"jax_fa4 {jax_fa4.__version__} on {jax.devices()[0].device_kind}, {dtype.name}")
    print(f"attention: {implementation(dtype) if args.attention == 'jax_fa4' else f'jax.nn, {args.attention}'}")
    print(f"{len(ids):,} characters of Python's own manual")

    rng = np.random.default_rng(0)
    start = time.perf_counter()
    trained = train_and_measure(shape, dtype, training, args.steps, rng, attention=args.attention)
    model = trained.model
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    print(f"trained {parameters:,} parameters in {time.perf_counter() - start:.0f} s")
    print(f"{args.attention}: {trained.tokens_per_second:,.0f} tokens per second in the median step")
    held_out_loss = nnx.jit(mean_loss)
    unseen = [float(held_out_loss(model, jnp.asarray(windows_of(held_out, shape, rng)))) for _ in range(16)]
    print(f"loss on text it has not seen: {np.mean(unseen):.3f} nats a character")
    if args.out:
        found = {
            "environment": environment(),
            "attention": args.attention,
            "shape": dataclasses.asdict(shape),
            "parameters": parameters,
            "dtype": dtype.name,
            "steps": args.steps,
            "tokens_per_second": round(trained.tokens_per_second),
            "losses": [round(loss, 5) for loss in trained.losses],
            "unseen_loss": round(float(np.mean(unseen)), 5),
        }
        args.out.write_text(json.dumps(found, indent=1) + "\n")

    for prompt in PROMPTS:
        print(f"\nAfter {prompt!r} it writes:\n")
        print(textwrap.indent(write(model, shape, vocabulary, prompt, rng), "  | ", lambda line: True))


if __name__ == "__main__":
    main()
