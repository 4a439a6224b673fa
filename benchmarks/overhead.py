"""What a call costs beside its kernel: launch overhead inside one jit, and the first call of a process.

    python benchmarks/overhead.py [--out results.json]

Needs an NVIDIA GPU and cubins in the cache (`python -m jax_fa4 build`). Launch overhead is what a chain of 200 calls
with tiny operands takes beyond the kernels' own time, which the profiler tells: once as XLA runs the chain by default
(captured in a CUDA graph), once launched call by call. The first call is compared with that of a function that does
nearly nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from jax_fa4 import arguments

CALLS = 200  # in one program
STEPS = 10  # runs of the program that are timed together
REPEATS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=arguments.file_to_write, help="also write the figures to this JSON file")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # one measurement, in a process of its own
    args = parser.parse_args()
    if args.part:
        print(json.dumps(PARTS[args.part]()))
        return
    if shutil.which("nvidia-smi") is None:
        parser.error("needs an NVIDIA GPU, and nvidia-smi on the path")
    flags = os.environ.get("XLA_FLAGS", "")
    figures = {
        "environment": _in_process("environment"),
        "captured": _in_process("chain"),
        "launched_singly": _in_process("chain", XLA_FLAGS=f"{flags} --xla_gpu_enable_command_buffer="),
        "first_call": _in_process("first_call"),
    }
    text = json.dumps(figures, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def environment() -> dict[str, Any]:
    """Card, driver and versions."""
    import jax

    import jax_fa4

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    card = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    date = time.strftime("%Y-%m-%d")
    return {"date": date, "card": card, "jax": jax.__version__, "jax_fa4": jax_fa4.__version__}


def chain() -> dict[str, float]:
    """Microseconds per call of a chain of dependent attention calls."""
    import jax
    import jax.numpy as jnp

    import jax_fa4

    q = jax.random.normal(jax.random.key(0), (1, 1, 1, 64), jnp.bfloat16)

    @jax.jit
    def attention(q: jax.Array) -> jax.Array:
        for _ in range(CALLS):
            q = jax_fa4.attention(q, q, q, implementation="kernel")
        return q

    total = _timed(attention, q)
    kernel = _kernel_microseconds(attention, q)
    return {"total_us_per_call": total, "kernel_us": kernel, "added_us_per_call": round(total - kernel, 3)}


def _kernel_microseconds(function: Callable[..., Any], *args: Any) -> float:
    """Median time that one launch of our kernel takes on the device."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            function(*args).block_until_ready()
        (trace,) = pathlib.Path(folder).rglob("*.xplane.pb")
        planes = [p for p in jax.profiler.ProfileData.from_file(str(trace)).planes if "GPU" in p.name]
        events = (event for plane in planes for line in plane.lines for event in line.events)
        durations = [event.duration_ns for event in events if event.name.startswith("jax_fa4")]
    return round(statistics.median(durations) / 1e3, 3)


def _timed(function: Callable[..., Any], x: Any) -> float:
    """Microseconds per call when steps follow each other as in training: each takes the result of the one before."""
    samples = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(STEPS):
            x = function(x)
        x.block_until_ready()
        samples.append((time.perf_counter() - start) / (STEPS * CALLS))
    return round(statistics.median(samples) * 1e6, 3)


def first_call() -> dict[str, Any]:
    """Milliseconds of the first calls of a process whose cubin cache is warm."""
    import jax
    import jax.numpy as jnp

    import jax_fa4

    q = jax.random.normal(jax.random.key(0), (2, 128, 4, 64), jnp.bfloat16).block_until_ready()

    def milliseconds(function: Callable[[jax.Array], jax.Array]) -> float:
        start = time.perf_counter()
        jax.jit(function)(q).block_until_ready()
        return round((time.perf_counter() - start) * 1e3, 1)

    milliseconds(lambda q: q * 3)  # the backend's own first compilation
    empty = milliseconds(lambda q: q + 1)
    attention = milliseconds(lambda q: jax_fa4.attention(q, q, q, causal=True, implementation="kernel"))
    again = milliseconds(lambda q: jax_fa4.attention(q, q, q, causal=True, implementation="kernel") + 1)
    imported = sorted({"cutlass", "cuda"} & set(sys.modules))
    return {"empty_jit_ms": empty, "first_ms": attention, "second_program_ms": again, "imports": imported}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "environment": environment,
    "chain": chain,
    "first_call": first_call,
}


def _in_process(part: str, **variables: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, __file__, "--part", part], env=os.environ | variables, capture_output=True, text=True
    )
    if run.returncode:
        raise SystemExit(run.stderr)
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
