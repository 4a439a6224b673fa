"""Blackwell's kernels."""
