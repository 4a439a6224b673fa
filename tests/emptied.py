"""Rows that see no key for a reason other than their place: a mask, a bias or segments hide all of them."""

from __future__ import annotations

from typing import Any

import numpy as np

REASONS = ("mask", "bias", "segments")


def rows_to_empty(batch: int, q_len: int) -> np.ndarray:
    """bool [batch, q_len]: in the first entry some rows and all from the 65th on, all of the last entry."""
    rows = np.zeros((batch, q_len), bool)
    rows[0, 3:9] = rows[0, 64:] = rows[-1] = True
    return rows


def without_keys(x: dict[str, Any], rows: np.ndarray, reason: str) -> dict[str, Any]:
    """A call in BTNH whose `rows`, bool [B, T], see no key, for one of `REASONS`, beside whom x hides keys from."""
    (batch, q_len), kv_len = rows.shape, x["k"].shape[1]
    shape, hidden = (batch, 1, q_len, kv_len), rows[:, None, :, None]
    if reason == "mask":
        return {**x, "mask": np.broadcast_to(x.get("mask", True), shape) & ~hidden}
    if reason == "bias":
        return {**x, "bias": np.where(hidden, np.float32(-np.inf), x.get("bias", np.zeros(shape, np.float32)))}
    ids = {"q_segment_ids": np.zeros((batch, q_len), np.int32), "kv_segment_ids": np.zeros((batch, kv_len), np.int32)}
    ids |= {name: x[name] for name in ids if name in x}
    return {**x, **ids, "q_segment_ids": np.where(rows, np.int32(1000), ids["q_segment_ids"])}
