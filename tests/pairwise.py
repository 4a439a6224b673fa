"""Rows of a matrix too large to test in full."""

from __future__ import annotations

import itertools
import random
from typing import Any


def pairwise(factors: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Rows such that any two values of any two factors meet in one; each row is the best of some random ones."""
    rng = random.Random(0)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(factors, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rows = []
    while missing:
        seeds = [dict(rng.choice(sorted(missing))) for _ in range(40)]
        candidates = [{name: seed.get(name, rng.randrange(len(factors[name]))) for name in factors} for seed in seeds]
        covers = [missing.intersection(itertools.combinations(row.items(), 2)) for row in candidates]
        best = max(range(len(covers)), key=lambda n: len(covers[n]))
        missing -= covers[best]
        rows.append({name: factors[name][i] for name, i in candidates[best].items()})
    return rows
