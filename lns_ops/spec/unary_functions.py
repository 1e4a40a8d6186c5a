"""Functions of one number as tables of their results.

A format has at most 65,536 codes, so a table of all results represents the function completely.

Why tables: exp, the logarithms, sigmoid, GELU, powers and their derivatives take one memory access
a value, are rounded once, and are the same on every device by construction. A table is built on the
host when a combination of function, parameters and format is first used. It is indexed by the low
``bits`` bits of a code, with 2 bytes an entry: 8 KB for 12 bits, 128 KB for 16.

Rounding. Every entry is the code nearest in logarithm to the exact value at the exact argument
``sign x 2^(log / 2^f)``. The value is computed in float64 and trusted to a relative error of
``2^-36``, some 10^4 times the actual error of the formulas. If the two ends of this interval have
different codes (about one entry in a hundred tables), the value is computed with 60 digits. Powers
are exact in integers, ``p log``. Sums with a number (``plus``) are exact, like sums of two codes.
Ties occur only in powers, and in exponentials whose base is a power of two; they go to even, as in
:func:`lns_ops.functional.sqrt`. Results above the range saturate, results below it are zero.

Where a function is undefined (log of zero or less, 0 to a negative power, fractional powers of
negatives) the table holds :func:`undefined`, a word that no operation produces. Reading it is an
error like division by zero: it raises on a CPU and is counted on a GPU.

A function is written once, with ``m`` for either :mod:`math` or :mod:`mpmath`; it raises
``ValueError`` or ``ZeroDivisionError`` where it is undefined. Derivatives are separate functions
(``d_gelu`` and so on) of the *argument*: near 1 the rounded result of a sigmoid no longer
determines ``1 - y``, and so the derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lns_ops.spec import reference
from lns_ops.spec.format import LNSFormat, logarithm

TRUSTED = 2.0**-36
"""Upper bound for the relative error of float64 formulas; where it matters, 60 digits are used."""
_DIGITS = 60

_Scalar = Callable[..., Any]
FUNCTIONS: dict[str, _Scalar] = {}
"""The functions by name, each as ``f(m, x, *parameters)``."""


def _function(f: _Scalar) -> _Scalar:
    FUNCTIONS[f.__name__.strip("_")] = f
    return f


@_function
def exp(m: Any, x: Any) -> Any:
    """Return ``e^x``."""
    return m.exp(x)


@_function
def power_of(m: Any, x: Any, base: float) -> Any:
    """Return ``base^x`` for a positive base."""
    return m.exp(x * m.log(base))


@_function
def expm1(m: Any, x: Any) -> Any:
    """Return ``e^x - 1``."""
    return m.expm1(x)


@_function
def log(m: Any, x: Any) -> Any:
    """Return ``ln x``."""
    if x == 0:
        raise ValueError
    # mpmath's logarithm or root of a negative number is complex
    return m.log(x) if x > 0 else m.sqrt(x)


@_function
def log2(m: Any, x: Any) -> Any:
    """Return ``ln x / ln 2``."""
    return log(m, x) / m.log(2)


@_function
def log10(m: Any, x: Any) -> Any:
    """Return ``ln x / ln 10``."""
    return log(m, x) / m.log(10)


@_function
def log1p(m: Any, x: Any) -> Any:
    """Return ``ln (1 + x)``."""
    return m.log1p(x)


@_function
def sigmoid(m: Any, x: Any) -> Any:
    """Return ``1 / (1 + e^-x)``."""
    e = m.exp(-abs(x))
    return 1 / (1 + e) if x >= 0 else e / (1 + e)


@_function
def d_sigmoid(m: Any, x: Any) -> Any:
    """Return ``sigmoid(x) sigmoid(-x)``."""
    return sigmoid(m, x) * sigmoid(m, -x)


@_function
def tanh(m: Any, x: Any) -> Any:
    """Return the hyperbolic tangent."""
    return m.tanh(x)


@_function
def d_tanh(m: Any, x: Any) -> Any:
    """Return ``1 - tanh^2 x``, as four times the sigmoid's derivative at 2x."""
    return 4 * d_sigmoid(m, 2 * x)


@_function
def d_sigmoid_of_result(m: Any, y: Any) -> Any:
    """Return ``y (1 - y)``."""
    return y * (1 - y)


@_function
def d_tanh_of_result(m: Any, y: Any) -> Any:
    """Return ``1 - y^2``."""
    return (1 - y) * (1 + y)


@_function
def silu(m: Any, x: Any) -> Any:
    """Return ``x sigmoid(x)``; S. Elfwing et al. 2018 (arXiv:1702.03118), Swish with beta = 1."""
    return x * sigmoid(m, x)


@_function
def d_silu(m: Any, x: Any) -> Any:
    """Return ``sigmoid(x) (1 + x sigmoid(-x))``."""
    return sigmoid(m, x) * (1 + x * sigmoid(m, -x))


def _normal(m: Any, x: Any) -> Any:
    """Return the normal distribution function ``Phi(x)``."""
    return m.erfc(-x / m.sqrt(2)) / 2


@_function
def gelu(m: Any, x: Any) -> Any:
    """Return ``x Phi(x)``; D. Hendrycks, K. Gimpel 2016 (arXiv:1606.08415)."""
    return x * _normal(m, x)


@_function
def d_gelu(m: Any, x: Any) -> Any:
    """Return ``Phi(x) + x phi(x)``."""
    return _normal(m, x) + x * m.exp(-x * x / 2) / m.sqrt(2 * m.pi)


_CUBIC = 0.044715


def _cubic(m: Any, x: Any) -> Any:
    return m.sqrt(2 / m.pi) * (x + _CUBIC * x * x * x)


@_function
def gelu_tanh(m: Any, x: Any) -> Any:
    """Return GELU by its tanh approximation.

    It is ``x (1 + tanh u) / 2 = x sigmoid(2 u)`` with ``u = sqrt(2 / pi) (x + 0.044715 x^3)``.
    """
    return x * sigmoid(m, 2 * _cubic(m, x))


@_function
def d_gelu_tanh(m: Any, x: Any) -> Any:
    """Return ``sigmoid(2u) + 2 x u' sigmoid(2u) sigmoid(-2u)``."""
    u, slope = _cubic(m, x), m.sqrt(2 / m.pi) * (1 + 3 * _CUBIC * x * x)
    high, low = sigmoid(m, 2 * u), sigmoid(m, -2 * u)
    return high * (1 + 2 * x * slope * low) if low else high


@_function
def softplus(m: Any, x: Any, beta: float, threshold: float) -> Any:
    """Return ``ln(1 + e^(beta x)) / beta``, or ``x`` if ``beta x > threshold``, as torch does."""
    return x if beta * x > threshold else (max(beta * x, 0) + m.log1p(m.exp(-abs(beta * x)))) / beta


@_function
def d_softplus(m: Any, x: Any, beta: float, threshold: float) -> Any:
    """Return ``sigmoid(beta x)``, and 1 beyond the threshold."""
    return 1 if beta * x > threshold else sigmoid(m, beta * x)


@_function
def log_sigmoid(m: Any, x: Any) -> Any:
    """Return ``ln sigmoid(x)``."""
    return min(x, 0) - m.log1p(m.exp(-abs(x)))


@_function
def d_log_sigmoid(m: Any, x: Any) -> Any:
    """Return ``sigmoid(-x)``."""
    return sigmoid(m, -x)


@_function
def elu(m: Any, x: Any, alpha: float, scale: float, input_scale: float) -> Any:
    """Return ``scale x`` above zero, ``scale alpha (e^(input_scale x) - 1)`` below.

    Source: D.-A. Clevert et al. 2016 (arXiv:1511.07289).
    """
    return scale * x if x > 0 else scale * alpha * m.expm1(input_scale * x)


@_function
def d_elu(m: Any, x: Any, alpha: float, scale: float, input_scale: float) -> Any:
    """Return ``scale`` above zero, ``scale alpha input_scale e^(input_scale x)`` below."""
    return scale if x > 0 else scale * alpha * input_scale * m.exp(input_scale * x)


@_function
def d_elu_of_result(m: Any, y: Any, alpha: float, scale: float, input_scale: float) -> Any:
    """Return ``scale`` above zero, ``input_scale (y + scale alpha)`` below."""
    return scale if y > 0 else input_scale * (y + scale * alpha)


@_function
def mish(m: Any, x: Any) -> Any:
    """Return ``x tanh(softplus x)``; D. Misra 2020 (arXiv:1908.08681)."""
    return x * m.tanh(softplus(m, x, 1.0, math.inf))


@_function
def d_mish(m: Any, x: Any) -> Any:
    """Return ``t + x sigmoid(x) (1 - t^2)`` with ``t = tanh(softplus x)``."""
    plus = softplus(m, x, 1.0, math.inf)
    return m.tanh(plus) + x * sigmoid(m, x) * d_tanh(m, plus)


@_function
def hardsigmoid(m: Any, x: Any) -> Any:
    """Return ``(x + 3) / 6``, clamped to 0 .. 1."""
    return min(max(x + 3, 0), 6) / 6


@_function
def d_hardsigmoid(m: Any, x: Any) -> Any:
    """Return 1/6 between -3 and 3, else 0."""
    return m.exp(0) / 6 if abs(x) < 3 else 0


@_function
def hardswish(m: Any, x: Any) -> Any:
    """Return ``x hardsigmoid(x)``; A. Howard et al. 2019 (arXiv:1905.02244)."""
    return x * hardsigmoid(m, x)


@_function
def d_hardswish(m: Any, x: Any) -> Any:
    """Return 0 up to -3, ``x / 3 + 1 / 2`` between, 1 from 3 on."""
    return 0 if x < -3 else 1 if x > 3 else (2 * x + 3) / 6


def undefined(fmt: LNSFormat) -> int:
    """Return a table's entry for undefined results: the sign bit and a zero logarithm."""
    return fmt.sign_mask


@lru_cache(maxsize=256)
def table(function: str, parameters: tuple[float, ...], fmt: LNSFormat) -> NDArray[np.int16]:
    """Return the codes of ``function`` at every code of a format.

    The table is int16 with ``2^bits`` entries, read-only, indexed by the low ``bits`` bits of the
    argument.

    Args:
        function: a name in :data:`FUNCTIONS`; ``power`` with the exponent as its only parameter; or
            ``plus`` with a number of any size, whose logarithm is rounded as in encoding.
        parameters: arguments of the function after the first.
        fmt: the format of argument and result.

    Raises:
        ValueError: unknown function, or a parameter that is not finite.
    """
    if function not in FUNCTIONS and function not in _EXACT:
        raise ValueError(
            f"function {function!r}: must be {', '.join(_EXACT)} or one of"
            f" {', '.join(sorted(FUNCTIONS))}"
        )
    if any(math.isnan(p) or (math.isinf(p) and function != "softplus") for p in parameters):
        raise ValueError(f"{function} with parameters {parameters}: they must be finite numbers")
    words = np.arange(1 << fmt.bits).astype(np.int64)
    codes = np.where(words >> (fmt.bits - 1), words | fmt.sign_mask, words).astype(np.int16)
    codes[codes & fmt.field_mask == 0] = 0
    result = (
        _EXACT[function](codes, parameters[0], fmt)
        if function in _EXACT
        else _rounded(FUNCTIONS[function], parameters, codes, fmt)
    )
    result.setflags(write=False)
    return result


def _power(codes: NDArray[np.int16], p: float, fmt: LNSFormat) -> NDArray[np.int16]:
    """Return codes to the power of ``p``: ``p log`` in integers, rounded half to even."""
    exponent, signs_logs = Fraction(p), reference.unpack(codes, fmt)
    whole = exponent.denominator == 1
    sign = signs_logs[0] & (whole and exponent.numerator % 2 == 1)
    result = reference.pack(sign, _rounded_products(exponent, signs_logs[1]), fmt)
    result[codes == 0] = 0 if p > 0 else fmt.bias if p == 0 else undefined(fmt)
    if not whole:
        result[codes < 0] = undefined(fmt)
    return result


def _plus(codes: NDArray[np.int16], number: float, fmt: LNSFormat) -> NDArray[np.int16]:
    """Return the sums of codes and a nonzero number."""
    other = np.array(number < 0), np.array(logarithm(abs(number), fmt.fraction_bits))
    sums = reference.add_unpacked(*reference.unpack(codes, fmt), *other, fmt.fraction_bits)
    return reference.pack(*sums, fmt)


_EXACT = {"power": _power, "plus": _plus}


def _rounded_products(p: Fraction, logs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``p log`` rounded half to even, or 2^20 or -2^20 for larger products.

    A product of 38 and 15 bits is exact in float64. A product of more bits is within 2^-33 of the
    exact one; if that is too close to a tie, fractions are used.
    """
    limit = 1 << 20
    with np.errstate(over="ignore", under="ignore"):
        products = np.clip(float(p) * logs.astype(np.float64), -limit, limit)
    nearest = np.rint(products)
    if p.numerator.bit_length() > 38:
        for i in np.flatnonzero(np.abs(np.abs(products - nearest) - 0.5) < 2.0**-32):
            nearest[i] = round(p * int(logs[i]))
    return nearest.astype(np.int64)


def _values(
    f: _Scalar, arguments: list[float], parameters: tuple[float, ...]
) -> tuple[NDArray[np.float64], list[int]]:
    """Return the float64 values of a function, and the indices at which it is undefined.

    Beyond float64's range a value is its largest number, which saturates every format. The loop
    creates only numbers: if it created 65,536 pairs, four fifths of its time would be garbage
    collection, which visits all of torch's objects.
    """
    values, missing = [], []
    for i, x in enumerate(arguments):
        try:
            values.append(float(f(math, x, *parameters)))
        except OverflowError:
            values.append(math.inf)
        except (ValueError, ZeroDivisionError):
            values.append(0.0)
            missing.append(i)
    largest = np.finfo(np.float64).max / 2
    return np.clip(values, -largest, largest), missing


def _rounded(
    f: _Scalar, parameters: tuple[float, ...], codes: NDArray[np.int16], fmt: LNSFormat
) -> NDArray[np.int16]:
    arguments = reference.decode(codes, fmt, np.float64).tolist()
    values, missing = _values(f, arguments, parameters)
    low, high = (reference.encode(values * (1 + side * TRUSTED), fmt) for side in (-1, 1))
    for i in np.flatnonzero(low != high):
        low[i] = _with_digits(f, parameters, int(codes[i]), fmt)
    low[missing] = undefined(fmt)
    return low


def _with_digits(f: _Scalar, parameters: tuple[float, ...], code: int, fmt: LNSFormat) -> int:
    """Return the entry for one code, by arithmetic of 60 digits."""
    import mpmath

    sign, log = (int(part[0]) for part in reference.unpack(np.array([code], np.int16), fmt))
    with mpmath.workdps(_DIGITS):
        x = (
            (-1) ** sign * mpmath.power(2, mpmath.mpf(log) / (1 << fmt.fraction_bits))
            if code
            else mpmath.mpf(0)
        )
        y = mpmath.mpf(f(mpmath, x, *parameters))
        if y == 0:
            return 0
        exact = mpmath.log(abs(y), 2) * (1 << fmt.fraction_bits)
        doubled = mpmath.nint(2 * exact)
        tie = abs(2 * exact - doubled) < mpmath.mpf(10) ** (20 - _DIGITS)
        ulps = int(mpmath.nint(doubled / 2 if tie else exact))  # half to even
    return int(reference.pack(np.array([y < 0]), np.array([ulps]), fmt)[0])
