"""Numbers and names in words, the same wherever a result is shown."""

from __future__ import annotations

import math
import re
from typing import Any

MISSING = "–"


def three_digits(x: float | None, *, exact: bool = False) -> str:
    """Write a number to three significant digits, whole numbers below 1000 without decimals.

    Parameters
    ----------
    x : float or None
        None and NaN give a dash.
    exact : bool
        Drop trailing zeros, for a number that was chosen and not measured.

    Examples
    --------
    >>> [three_digits(x) for x in (0.8, 2977.4, 50.0, -0.05, 1.5e-7, math.inf, math.nan)]
    ['0.800', '2,980', '50', '−0.0500', '1.50 × 10⁻⁷', '∞', '–']
    >>> three_digits(-0.05, exact=True)
    '−0.05'
    """
    if x is None or math.isnan(x):
        return MISSING
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    if x == 0:
        return "0"
    mantissa, _, power = f"{abs(x):.2e}".partition("e")
    exponent = int(power)
    if -4 < exponent < 7:
        text = f"{float(f'{abs(x):.2e}'):,.{max(0, 2 - exponent)}f}"
        if "." in text and (exact or float(x).is_integer()):
            text = text.rstrip("0").rstrip(".")
    else:
        text = f"{mantissa} × 10{str(exponent).translate(SUPERSCRIPTS)}"
    return f"−{text}" if x < 0 else text


SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def deviation(x: float) -> str:
    """Write a standard deviation to two significant digits, which is as much as a few seeds tell.

    >>> deviation(0.000331), deviation(15.3), deviation(0.0)
    ('0.00033', '15', '0')
    """
    if not finite(x) or x == 0 or not 1e-6 <= x < 1e6:
        return three_digits(x)
    rounded = f"{x:.1e}"
    return f"{float(rounded):,.{max(0, 1 - int(rounded.partition('e')[2]))}f}"


def metric_name(metric: str) -> str:
    """Write the name of a metric for reading.

    >>> metric_name("queries_per_second@0.80"), metric_name("recall@10")
    ('queries per second @ 0.80', 'recall@10')
    """
    name, at, setting = metric.partition("@")
    readable = name.replace("_", " ").strip()
    return f"{readable} @ {setting.replace('_', ' ')}" if at and " " in readable else f"{readable}{at}{setting}"


def base_name(metric: str) -> str:
    """Return the name of a metric without its setting.

    >>> base_name("recall@10"), base_name("seconds[n=500]")
    ('recall', 'seconds')
    """
    return re.split(r"[@\[(:/=|]", metric, maxsplit=1)[0].strip() or metric


def bytes_in_words(count: float) -> str:
    """Write a number of bytes in the unit that suits it.

    >>> bytes_in_words(512), bytes_in_words(3 * 2**29)
    ('512 B', '1.50 GiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1000:
            return f"{three_digits(size)} {unit}"
        size /= 1024
    return f"{three_digits(size)} GiB"


def seconds_in_words(seconds: float) -> str:
    """Write a duration in the unit that suits it.

    >>> seconds_in_words(0.0123), seconds_in_words(4.5), seconds_in_words(754)
    ('12.3 ms', '4.50 s', '12.6 min')
    """
    if 0 < seconds < 1:
        return f"{three_digits(seconds * 1000)} ms"
    return f"{three_digits(seconds)} s" if seconds < 300 else f"{three_digits(seconds / 60)} min"


def plural(count: int, noun: str) -> str:
    """Write a count with its noun.

    >>> plural(1, "seed"), plural(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def finite(value: Any) -> bool:
    """Whether this is a number, and neither NaN nor infinite.

    >>> finite(2), finite(math.inf), finite(None)
    (True, False, False)
    """
    return isinstance(value, int | float) and math.isfinite(value)
