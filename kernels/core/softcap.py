"""Softcap: scores s become softcap * tanh(s / softcap).

The hardware's tanh is right to 2^-11, so that a cap of 50 would move a score by 0.02. A quotient of polynomials costs
one hardware instruction as well and is right to 3e-7.
"""

import cutlass.cute as cute
from cutlass import Float32

__all__ = ["cap", "slopes_by_cap", "tanh"]

LIMIT = 8.0  # tanh is 1 - 2.3e-7 there
# tanh(x) = x * p(x^2) / q(x^2) for |x| <= LIMIT: least relative error 6.4e-9 before rounding, lowest power first
NUMERATOR = (
    0.9999999935703272,
    0.13444501175761722,
    0.003571601825732634,
    2.189472486210277e-05,
    1.523050596742579e-08,
)
DENOMINATOR = (1.0, 0.4677782849614963, 0.026164457382575865, 0.00034112982474661423, 8.522482487133092e-07)


def cap(scores: cute.Tensor, factor: Float32) -> None:
    """Scores [rows, columns] of a block become tanh(scores * factor), in place; factor = softmax_scale / softcap."""
    rows, columns = scores.shape
    for r in range(cute.size(rows)):
        for c in range(cute.size(columns)):
            scores[r, c] = tanh(scores[r, c] * factor)


def slopes_by_cap(scores: cute.Tensor, slopes: cute.Tensor, factor: Float32) -> None:
    """The derivatives of softcap * tanh(x) by softcap, x = scores * factor: tanh(x) - x * (1 - tanh(x)^2)."""
    rows, columns = scores.shape
    for r in range(cute.size(rows)):
        for c in range(cute.size(columns)):
            x = scores[r, c] * factor
            t = tanh(x)
            # where tanh has reached 1 its slope is 0 but for rounding, however large x is
            x = cute.arch.fmax(cute.arch.fmin(x, LIMIT, nan=True), -LIMIT, nan=True)
            slopes[r, c] = t - x * cute.math.fma(-t, t, Float32(1.0))


def tanh(x: Float32) -> Float32:
    """Relative error 3e-7; NaN stays NaN."""
    x = cute.arch.fmax(cute.arch.fmin(x, LIMIT, nan=True), -LIMIT, nan=True)
    square = x * x
    return x * _polynomial(square, NUMERATOR) * cute.arch.rcp_approx(_polynomial(square, DENOMINATOR))


def _polynomial(x: Float32, coefficients: tuple[float, ...]) -> Float32:
    *rest, result = (Float32(c) for c in coefficients)
    for c in reversed(rest):
        result = cute.math.fma(result, x, c)
    return result
