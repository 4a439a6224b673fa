"""Trains a GPT of about 100 million parameters with jax_fa4 and with cuDNN, from the same start on the same tokens.

    python benchmarks/train_gpt.py --steps 200 --out found.json

Prints the tokens per second of both and how far their losses lie apart. What is near is told by a third training: that
with cuDNN again, from parameters that differ in their last bit of bfloat16. The three take turns. On a CPU the default
sizes are tiny, and plain XLA stands in for cuDNN.

Tokens are pairs of a key and a value. Keys follow each other in a fixed circle; each window chooses a value for
every key and keeps it. Only attention to earlier tokens can tell a value, so how far the loss falls below what a model
without attention can reach, which is known exactly, says how much of it attention has learned.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import jax_fa4
from jax_fa4.bench.report import environment

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
TURN = 10  # steps of one training before the next has its turn
UNIT = 2.0**-8  # of bfloat16: the distance of its numbers over their size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model and of a batch. `keys` times `values` of the vocabulary's tokens occur."""

    vocabulary: int
    layers: int
    heads: int
    head_dim: int
    length: int
    batch: int
    keys: int
    values: int

    @property
    def features(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim


class Block(nnx.Module):
    """Causal attention and a two-layer network, each behind a norm and around a residual connection."""

    def __init__(self, shape: Shape, dtype: jnp.dtype, rngs: nnx.Rngs):
        width = shape.features
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.attention_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.to_qkv = linear(width, 3 * width)
        self.from_heads = linear(width, width)
        self.network_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.widen = linear(width, 4 * width)
        self.narrow = linear(4 * width, width)
        self.heads = shape.heads

    def __call__(self, x: jax.Array, attend: Attend) -> jax.Array:
        qkv = self.to_qkv(self.attention_norm(x)).reshape(*x.shape[:-1], 3, self.heads, -1)
        q, k, v = (qkv[..., n, :, :] for n in range(3))
        x = x + self.from_heads(attend(q, k, v).reshape(x.shape))
        return x + self.narrow(nnx.gelu(self.widen(self.network_norm(x))))


class Gpt(nnx.Module):
    """Logits [batch, length, vocabulary] in float32."""

    def __init__(self, shape: Shape, dtype: jnp.dtype, rngs: nnx.Rngs):
        small = nnx.initializers.normal(0.02)
        embed = functools.partial(nnx.Embed, dtype=dtype, embedding_init=small, rngs=rngs)
        self.tokens = embed(shape.vocabulary, shape.features)
        self.positions = embed(shape.length, shape.features)
        self.blocks = nnx.List([Block(shape, dtype, rngs) for _ in range(shape.layers)])
        self.norm = nnx.RMSNorm(shape.features, dtype=dtype, rngs=rngs)

    def __call__(self, ids: jax.Array, attend: Attend) -> jax.Array:
        x = self.tokens(ids) + self.positions(jnp.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, attend)
        return self.tokens.attend(self.norm(x)).astype(jnp.float32)


def attention_of(name: str) -> Attend:
    """Causal attention of q, k and v [batch, length, heads, head dim]."""
    if name == "jax_fa4":
        return functools.partial(jax_fa4.attention, causal=True)
    return functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=name)


@functools.cache
def step_of(attention: str) -> Callable[[Gpt, nnx.Optimizer, jax.Array], jax.Array]:
    """One step on windows [batch, length + 1]; it returns the mean loss before it, in nats."""
    attend = attention_of(attention)

    @nnx.jit
    def step(model: Gpt, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
        def mean_loss(model: Gpt) -> jax.Array:
            logits = model(windows[:, :-1], attend)
            return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

        loss, gradients = nnx.value_and_grad(mean_loss)(model)
        optimizer.update(model, gradients)
        return loss

    return step


class Training:
    """One model on its way; `losses` has an entry a step, `turns` the seconds of each turn."""

    def __init__(self, model: Gpt, rule: optax.GradientTransformation, attention: str):
        self.model = model
        self.optimizer = nnx.Optimizer(model, rule, wrt=nnx.Param)
        self.step = step_of(attention)
        self.losses: list[jax.Array] = []
        self.turns: list[float] = []

    def turn(self, batches: list[jax.Array]) -> None:
        """A step for each batch."""
        start = time.perf_counter()
        for windows in batches:
            self.losses.append(self.step(self.model, self.optimizer, windows))
        jax.block_until_ready((self.losses[-1], nnx.state(self.model)))
        self.turns.append(time.perf_counter() - start)


def changed(model: Gpt, size: float) -> Gpt:
    """The model with every parameter multiplied by 1 + size or 1 - size."""
    rng = np.random.default_rng(1)
    graph, parameters, others = nnx.split(model, nnx.Param, ...)
    parameters = jax.tree.map(lambda x: x * (1 + size * rng.choice((-1, 1), x.shape)).astype(np.float32), parameters)
    return nnx.merge(graph, parameters, others)


def batches(shape: Shape, steps: int) -> Iterator[np.ndarray]:
    """Windows [batch, length + 1] of tokens key * values + value."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        starts = rng.integers(0, shape.keys, (shape.batch, 1))
        keys = (starts + np.arange(shape.length + 1)) % shape.keys
        chosen = rng.integers(0, shape.values, (shape.batch, shape.keys))
        yield (keys * shape.values + np.take_along_axis(chosen, keys, axis=1)).astype(np.int32)


def bounds(shape: Shape) -> dict[str, float]:
    """Least expected losses, in nats: from the tokens' frequencies, from the token before, and from all tokens before.

    Of the last, a value costs as much as it has choices where its key occurs for the first time, and then nothing.
    """
    of_value = math.log(shape.values)
    first_times = min(shape.keys - 1, shape.length)  # the window's first token is no target
    return {
        "unigram": math.log(shape.keys) + of_value,
        "without_attention": of_value,
        "optimum": of_value * first_times / shape.length,
    }


def smoothed(losses: list[jax.Array]) -> np.ndarray:
    """Means of the last TURN losses, from the first step that has so many."""
    width = min(TURN, len(losses))
    return np.convolve(np.asarray(losses, np.float64), np.full(width, 1 / width), "valid")


def distance(a: Training, b: Training) -> dict[str, float]:
    """How far two smoothed curves of losses lie apart, in nats."""
    apart = np.abs(smoothed(a.losses) - smoothed(b.losses))
    return {"largest": float(apart.max()), "mean": float(apart.mean()), "at_the_end": float(apart[-1])}


def run(shape: Shape, dtype: jnp.dtype, peer: str, steps: int, rate: float) -> dict[str, object]:
    """Trains three times; what was found."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, steps // 10), max(2, steps))
    rule = optax.adamw(schedule, b2=0.95)
    model = Gpt(shape, dtype, nnx.Rngs(0))
    trainings = {
        "jax_fa4": Training(nnx.clone(model), rule, "jax_fa4"),
        peer: Training(nnx.clone(model), rule, peer),
        f"{peer}, last bit": Training(changed(model, UNIT / 2), rule, peer),
    }
    source = batches(shape, steps)
    with tqdm(total=steps * len(trainings), unit="step") as bar:
        for first in range(0, steps, TURN):
            turn = [jnp.asarray(next(source)) for _ in range(min(TURN, steps - first))]
            for training in trainings.values():
                training.turn(turn)
                bar.update(len(turn))
            bar.set_postfix(loss=f"{float(trainings['jax_fa4'].losses[-1]):.3f}")
    tokens = shape.batch * shape.length * min(TURN, steps)
    speeds = {
        name: tokens / statistics.median(training.turns[1:] or training.turns) for name, training in trainings.items()
    }
    least = bounds(shape)
    ends = {name: float(smoothed(training.losses)[-1]) for name, training in trainings.items()}
    return {
        "shape": dataclasses.asdict(shape),
        "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))),
        "dtype": dtype.name,
        "steps": steps,
        "rate": rate,
        "tokens_per_second": {name: round(speed) for name, speed in speeds.items()},
        "ratio": round(speeds["jax_fa4"] / speeds[peer], 4),
        "least_losses": {name: round(loss, 5) for name, loss in least.items()},
        "below_without_attention": {name: round(least["without_attention"] - end, 5) for name, end in ends.items()},
        "losses": {name: [round(float(x), 5) for x in training.losses] for name, training in trainings.items()},
        "distance": distance(trainings["jax_fa4"], trainings[peer]),
        "distance_of_last_bit": distance(trainings[f"{peer}, last bit"], trainings[peer]),
    }


def main() -> None:
    """Reads sizes, trains, reports."""
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200 if on_gpu else 20)
    parser.add_argument("--layers", type=int, default=12 if on_gpu else 1)
    parser.add_argument("--heads", type=int, default=12 if on_gpu else 2)
    parser.add_argument("--head-dim", type=int, default=64 if on_gpu else 16)
    parser.add_argument("--length", type=int, default=2048 if on_gpu else 32)
    parser.add_argument("--batch", type=int, default=8 if on_gpu else 4)
    parser.add_argument("--vocabulary", type=int, default=16384 if on_gpu else 64)
    parser.add_argument("--keys", type=int, default=8 if on_gpu else 4, help="that follow each other in a circle")
    parser.add_argument("--values", type=int, default=8, help="of each key, one of them a window")
    parser.add_argument("--rate", type=float, default=3e-4 if on_gpu else 1e-3, help="of learning, at its highest")
    parser.add_argument("--peer", choices=("cudnn", "xla"), default="cudnn" if on_gpu else "xla")
    parser.add_argument("--out", type=pathlib.Path, help="also write everything to this JSON file")
    args = parser.parse_args()
    if args.keys * args.values > args.vocabulary:
        parser.error(f"{args.keys} keys of {args.values} values are more tokens than {args.vocabulary}")
    shape = Shape(
        vocabulary=args.vocabulary,
        layers=args.layers,
        heads=args.heads,
        head_dim=args.head_dim,
        length=args.length,
        batch=args.batch,
        keys=args.keys,
        values=args.values,
    )
    found = run(shape, jnp.dtype(jnp.bfloat16 if on_gpu else jnp.float32), args.peer, args.steps, args.rate)
    found = {"environment": environment(), **found}
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['parameters']:,} parameters, {found['dtype']}, {args.steps} steps")
    for name, speed in found["tokens_per_second"].items():
        losses = found["losses"][name]
        print(f"{name:16} {speed:>12,} tokens/s   loss {losses[0]:.4f} to {losses[-1]:.4f}")
    least = found["least_losses"]
    print(
        f"least loss by frequencies {least['unigram']:.4f}, without attention {least['without_attention']:.4f}, "
        f"with {least['optimum']:.4f}; jax_fa4 ends {found['below_without_attention']['jax_fa4']:.4f} below the second"
    )
    print(f"tokens per second of jax_fa4 over those of {args.peer}: {found['ratio']:.3f}")
    for label, key in ((f"jax_fa4 and {args.peer}", "distance"), ("another last bit", "distance_of_last_bit")):
        apart = found[key]
        print(
            f"losses apart, {label}: largest {apart['largest']:.5f}, mean {apart['mean']:.5f}, "
            f"at the end {apart['at_the_end']:.5f}"
        )


if __name__ == "__main__":
    main()
