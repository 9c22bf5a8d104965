"""What a check is made of: the claims as comparisons, the work, and the arms that do it.

A check states each claim beforehand as a `Comparison`, makes the same work for every arm in `Check.prepare`, and
has one method a competitor, marked with `arm`. Timing, repetition, seeds, storage and statistics belong to the
harness: an arm contains no stopwatch, no loop over seeds and no printing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from practicum.toolbox.errors import InputError

Scale = Literal["quick", "full", "paper"]
SCALES: tuple[Scale, ...] = ("quick", "full", "paper")

T = TypeVar("T")
Margin = float | Mapping[str, float]

RULES = {
    "difference_at_least": "the difference is at least",
    "difference_above": "the difference is above",
    "difference_at_most": "the difference is at most",
    "ratio_at_least": "the ratio is at least",
    "ratio_at_most": "the ratio is at most",
    "within": "the difference stays within ±",
    "value_at_least": "the value is at least",
    "value_at_most": "the value is at most",
}


NOT_FINITE = "not finite:"


class CannotMeasure(InputError):
    """What keeps a check from running at all: an option out of range, say. Its message is shown as one line."""


@dataclass(frozen=True)
class Request:
    """What is to be measured, for one seed.

    Attributes
    ----------
    scale : {"quick", "full", "paper"}
        Sizes only: ``quick`` takes at most 60 s on 2 cores, ``full`` 30 min, ``paper`` has the sizes of the paper.
    seed : int
        The seed of this repetition. Every source of randomness in `Check.prepare` and in the arms derives from it.
    model, data : str or None
        The user's model (hub id or path) and data (path), or None for the embedded defaults.
    device : str
        A torch device such as ``"cpu"`` or ``"cuda:0"``.
    options : mapping of str to str
        The method's own options, as declared in its card under ``[[options]]``.
    """

    scale: Scale = "quick"
    seed: int = 0
    model: str | None = None
    data: str | None = None
    device: str = "cpu"
    options: Mapping[str, str] = field(default_factory=dict)

    def pick(self, *, quick: T, full: T, paper: T | None = None) -> T:
        """Return the value for this scale; ``paper`` defaults to ``full``.

        >>> Request(scale="full").pick(quick=100, full=2000)
        2000
        """
        if self.scale == "quick":
            return quick
        return full if self.scale == "full" or paper is None else paper


@dataclass(frozen=True)
class Comparison:
    """A claim of the paper as an inequality between two arms, stated before anything is measured.

    Exactly one rule is given. Rules on differences and ratios compare ``arm`` with ``against`` by pairs (the same
    seed, the same work); rules on values look at ``arm`` alone. Every margin is a number, or a mapping from scale to
    number where the specification asks for that.

    Parameters
    ----------
    claim : str
        The id of the claim in the card.
    metric : str
        Name of the metric, a key of what the arms return.
    arm : str
        The arm the claim is about.
    against : str, tuple of str or None
        The baseline. With several, the best of them for each seed counts, so that a claim of being ahead is one of
        being ahead of all. ``None`` with the ``value_*`` rules.
    difference_at_least, difference_above, difference_at_most : float, optional
        Margin on ``arm - against``. ``difference_above`` is strict: a tie does not satisfy it.
    ratio_at_least, ratio_at_most : float, optional
        Margin on ``arm / against``, both positive.
    within : float, optional
        Equivalence: ``|arm - against| <= within``.
    value_at_least, value_at_most : float, optional
        Margin on the metric of ``arm`` itself.
    timed : bool
        Whether the metric is measured by the stopwatch. The arms of a timed comparison run alone.

    Examples
    --------
    >>> Comparison("more-accurate", metric="accuracy", arm="ours", against="theirs", difference_above=0.0).rule
    'difference_above'
    """

    claim: str
    metric: str
    arm: str
    against: str | tuple[str, ...] | None = None
    difference_at_least: Margin | None = None
    difference_above: Margin | None = None
    difference_at_most: Margin | None = None
    ratio_at_least: Margin | None = None
    ratio_at_most: Margin | None = None
    within: Margin | None = None
    value_at_least: Margin | None = None
    value_at_most: Margin | None = None
    timed: bool = False

    def __post_init__(self) -> None:
        given = [rule for rule in RULES if getattr(self, rule) is not None]
        if len(given) != 1:
            raise ValueError(f"claim {self.claim!r}: give exactly one of {', '.join(RULES)}; got {given or 'none'}")
        if (self.against is None) != given[0].startswith("value_"):
            raise ValueError(f"claim {self.claim!r}: {given[0]} and against={self.against!r} do not go together")
        if given[0] == "within" and len(self.baselines) != 1:
            raise ValueError(f"claim {self.claim!r}: within needs one baseline; got {self.against!r}")

    @property
    def rule(self) -> str:
        """The name of the rule that was given."""
        return next(rule for rule in RULES if getattr(self, rule) is not None)

    def margin(self, scale: str) -> float:
        """The margin that counts at this scale."""
        margin = getattr(self, self.rule)
        if not isinstance(margin, Mapping):
            return float(margin)
        return float(margin[scale] if scale in margin else margin["full"])

    @property
    def baselines(self) -> tuple[str, ...]:
        """The arms of ``against`` as a tuple, empty for a rule on a value."""
        if self.against is None:
            return ()
        return (self.against,) if isinstance(self.against, str) else tuple(self.against)


@dataclass(frozen=True)
class Workload:
    """Work for the stopwatch: the harness calls ``call()`` alone, interleaved with the other arms of the seed.

    Parameters
    ----------
    call : callable without arguments
        One repetition. Called once to warm up, then ``repeats`` times; the median counts.
    units : float, optional
        With it the metric is ``units / seconds`` (queries a second); without it, seconds.
    clock : {"wall", "cpu"}
        Elapsed time, or the CPU time of this process.
    threads : int
        Threads that BLAS, OpenMP and torch may use meanwhile.
    repeats : int
    warm_up : bool
        Whether the call before the first measured one is made. Switch off only where one call takes seconds.
    metrics : callable, optional
        ``metrics(returned) -> mapping of str to float``: what the work came to, computed off the clock from what
        the last call returned.
    """

    call: Callable[[], Any]
    units: float | None = None
    clock: Literal["wall", "cpu"] = "wall"
    threads: int = 1
    repeats: int = 3
    warm_up: bool = True
    metrics: Callable[[Any], Mapping[str, float]] | None = None


@dataclass(frozen=True)
class Curve:
    """A plot of the report with a line for each arm that gives its points.

    Parameters
    ----------
    name : str
        Key of the points in `Metrics.curves`.
    x, y : str
        What the axes show.
    diagonal : bool
        Whether to draw the line y = x, where a perfect reliability diagram lies.
    """

    name: str
    x: str
    y: str
    diagonal: bool = False


@dataclass
class Metrics:
    """What an arm returns.

    Parameters
    ----------
    values : mapping of str to float
        Metric name to value.
    timed : mapping of str to Workload
        Metric name to the work whose time is the metric.
    missing : mapping of str to str
        Metrics that cannot be measured on this data, with the reason; their claims get "could not measure".
    notes : sequence of str
        Anything a reader of the result must know about this arm (which implementation ran, for example).
    curves : mapping of str to sequence of (float, float)
        Name of a `Curve` of the check to its points, as many for every seed: the report draws their means over
        seeds, point by point. A point that is not finite (an empty bin) is left out of the mean.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    timed: Mapping[str, Workload] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)


class Unavailable(Exception):
    """Raised by an arm that cannot run here (a peer that is not installed). It is reported, and is not a failure."""


ArmMethod = TypeVar("ArmMethod", bound=Callable[..., Any])


def arm(name: str, *, timed: bool = False) -> Callable[[ArmMethod], ArmMethod]:
    """Mark a method of a `Check` as the arm ``name``: ``method(self, work) -> Metrics``, ``work`` from `prepare`.

    ``timed`` marks an arm that returns work for the stopwatch; the arms of timed comparisons need no mark.
    """

    def mark(method: ArmMethod) -> ArmMethod:
        method.__practicum_arm__ = (name, timed)  # type: ignore[attr-defined]
        return method

    return mark


class Check:
    """The claims of one method, measured. Subclass it in the ``check.py`` of a room.

    Attributes
    ----------
    comparisons : tuple of Comparison
        One for each claim of the card, in its order.
    seeds : mapping of scale to int
        Default number of seeds.
    trade_offs : tuple of (str, str)
        Pairs (timed metric, quality metric); each is a point per arm in the report's time-quality plot.
    curves : tuple of Curve
        The plots of the report beside those of the claims and trade-offs.
    threads : int or None
        Threads for ``prepare`` and for all that an arm does off the stopwatch, so that the numbers do not depend on
        how many seeds run side by side. ``None`` takes all cores, and is heeded only where seeds run one by one: in
        a check with timed arms.

    Examples
    --------
    >>> import numpy as np
    >>> class MedianCheck(Check):
    ...     comparisons = (
    ...         Comparison("robust", metric="error", arm="median", against="mean", difference_at_most=0.0),
    ...     )
    ...     def prepare(self, request):
    ...         return np.random.default_rng(request.seed).standard_cauchy(100)
    ...     @arm("median")
    ...     def median(self, sample):
    ...         return Metrics({"error": abs(float(np.median(sample)))})
    ...     @arm("mean")
    ...     def mean(self, sample):
    ...         return Metrics({"error": abs(float(np.mean(sample)))})
    >>> list(MedianCheck().arms())
    ['median', 'mean']
    """

    comparisons: tuple[Comparison, ...] = ()
    seeds: Mapping[str, int] = {"quick": 3, "full": 5, "paper": 5}
    trade_offs: tuple[tuple[str, str], ...] = ()
    curves: tuple[Curve, ...] = ()
    threads: int | None = 1
    portable: bool = False

    def prepare(self, request: Request) -> Any:
        """Make the work of one seed, the same for every arm. Runs once per seed."""
        raise TypeError(f"{type(self).__name__} must define prepare(request)")

    def derive(self, arm: str, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Metrics that follow from others once everything is timed (a slope over sizes, say)."""
        return {}

    def remarks(self, means: Mapping[str, Mapping[str, float]]) -> Iterable[str]:
        """Sentences for the report that follow from the means over seeds, ``means[arm][metric]``."""
        return ()

    def arms(self) -> dict[str, Callable[[Any], Metrics]]:
        """The arms by name, in the order of their definition, base classes first."""
        found: dict[str, Callable[[Any], Metrics]] = {}
        for owner in reversed(type(self).__mro__):
            for attribute, member in vars(owner).items():
                mark = getattr(member, "__practicum_arm__", None)
                if mark is not None:
                    found[mark[0]] = getattr(self, attribute)
        return found

    def timed_arms(self) -> list[str]:
        """Arms of timed comparisons, and those marked as timed: they run alone, in the calling process."""
        named = {name for c in self.comparisons if c.timed for name in (c.arm, *c.baselines)}
        return [name for name, method in self.arms().items() if name in named or method.__practicum_arm__[1]]  # type: ignore[attr-defined]

    def validate(self) -> None:
        """Raise ValueError where the comparisons name arms that are not there, or name a claim twice."""
        arms = self.arms()
        for comparison in self.comparisons:
            for name in (comparison.arm, *comparison.baselines):
                if name not in arms:
                    raise ValueError(f"claim {comparison.claim!r} names the arm {name!r}; there are {', '.join(arms)}")
        claims = [comparison.claim for comparison in self.comparisons]
        twice = {claim for claim in claims if claims.count(claim) > 1}
        if twice:
            raise ValueError(f"more than one comparison for the claim {sorted(twice)[0]!r}")


def as_metrics(returned: Metrics | Mapping[str, float]) -> Metrics:
    """Accept a plain mapping from an arm, and move values that are not finite to ``missing`` with the reason.

    Raises
    ------
    TypeError
        When the arm returned something else, or a value that is not a number.
    """
    metrics = returned if isinstance(returned, Metrics) else Metrics(values=returned)
    if not isinstance(metrics.values, Mapping):
        raise TypeError(f"an arm returns Metrics or a mapping of name to number; got {type(returned).__name__}")
    values, missing = {}, dict(metrics.missing)
    for name, value in metrics.values.items():
        number = float(value)
        if math.isfinite(number):
            values[name] = number
        else:
            missing[name] = f"{NOT_FINITE} the arm returned {number}"
    return Metrics(values, metrics.timed, missing, tuple(metrics.notes), metrics.curves)
