"""How far a confidence can be believed: calibration errors, proper scores, and the maps that recalibrate.

Two shapes of prediction occur everywhere below. A *confidence* is a vector of shape (N,) with the probability that each
of N answers is right. *Option probabilities* are N rows, one a question, of shape (K_i,), each summing to 1: a matrix
where all questions have as many options, else a list of arrays; ``y`` then has the index of the right option of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, TypeGuard

import numpy as np
from scipy.optimize import brentq, isotonic_regression
from scipy.special import ndtr, softmax
from scipy.stats import rankdata

from practicum.toolbox.errors import InputError

Scheme: TypeAlias = Literal["width", "mass"]
Rows: TypeAlias = np.ndarray | Sequence[np.ndarray] | Sequence[Sequence[float]]
Vector: TypeAlias = np.ndarray | Sequence[float] | Sequence[bool]

SCHEMES = ("width", "mass")
COLDEST, HOTTEST = 1e-2, 1e2
SUM_TOLERANCE = 1e-3


@dataclass(frozen=True)
class ReliabilityCurve:
    """Accuracy beside confidence in bins of confidence; empty bins are left out.

    Attributes
    ----------
    lower, upper : ndarray of shape (n_bins,), float64
        A bin holds confidences c with ``lower < c <= upper``; the first one its lower end too.
    confidence, accuracy : ndarray of shape (n_bins,), float64
        Means over the answers in the bin.
    count : ndarray of shape (n_bins,), int64
        At least 1.
    """

    lower: np.ndarray
    upper: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray
    count: np.ndarray

    @property
    def weight(self) -> np.ndarray:
        """Share of the answers in each bin, of shape (n_bins,), float64."""
        return self.count / self.count.sum()


def reliability_curve(
    confidence: Vector, correct: Vector, n_bins: int = 10, scheme: Scheme = "width"
) -> ReliabilityCurve:
    """Return accuracy and mean confidence in bins of confidence.

    Parameters
    ----------
    confidence : array-like of shape (N,)
        Probabilities from 0 to 1.
    correct : array-like of shape (N,)
        0 or 1, or booleans: whether each answer was right.
    n_bins : int
        At least 1.
    scheme : {"width", "mass"}
        Bins of equal width on [0, 1], or bins that hold equally many answers. Equal confidences are never torn apart,
        so there can be fewer bins of equal mass, and of unequal mass, where there are ties.

    Returns
    -------
    ReliabilityCurve

    Raises
    ------
    InputError
        A ValueError naming the argument.

    Examples
    --------
    >>> curve = reliability_curve([0.7, 0.8, 0.8, 1.0], [0, 1, 1, 1], n_bins=5)
    >>> curve.upper, curve.accuracy, curve.count
    (array([0.8, 1. ]), array([0.66666667, 1.        ]), array([3, 1]))
    """
    confidence, correct = _answers(confidence, correct)
    edges = _edges(confidence, n_bins, scheme)
    bins = np.searchsorted(edges[1:-1], confidence, side="left")
    count = np.bincount(bins, minlength=len(edges) - 1)
    filled = count > 0
    sums = [np.bincount(bins, weights=values, minlength=len(edges) - 1)[filled] for values in (confidence, correct)]
    count = count[filled]
    return ReliabilityCurve(edges[:-1][filled], edges[1:][filled], sums[0] / count, sums[1] / count, count)


def ece(confidence: Vector, correct: Vector, n_bins: int = 10, scheme: Scheme = "width") -> float:
    r"""Return the expected calibration error.

    .. math:: ECE = \sum_b \frac{n_b}{N} \left| acc_b - conf_b \right|

    Bins are closed on the right, a confidence of 1 is in the last one, and empty bins count nothing.

    Parameters
    ----------
    confidence : array-like of shape (N,)
        Probabilities from 0 to 1.
    correct : array-like of shape (N,)
        0 or 1, or booleans.
    n_bins : int
        At least 1.
    scheme : {"width", "mass"}
        Of the bins, as in `reliability_curve`.

    Returns
    -------
    float
        From 0 to 1.

    Raises
    ------
    InputError
        A ValueError naming the argument.

    References
    ----------
    C. Guo et al., "On Calibration of Modern Neural Networks", ICML 2017.

    Examples
    --------
    >>> round(ece([0.9, 0.9, 0.6, 1.0], [1, 0, 1, 1]), 3)
    0.3
    """
    curve = reliability_curve(confidence, correct, n_bins, scheme)
    return float(curve.weight @ np.abs(curve.accuracy - curve.confidence))


def debiased_ece(confidence: Vector, correct: Vector, n_bins: int = 10, scheme: Scheme = "width") -> float:
    r"""Return the expected calibration error less its estimated small-sample bias.

    The plain error of a perfectly calibrated predictor is not 0: in a bin of n answers the accuracy misses its
    expectation by about s = sqrt(acc (1 - acc) / n), and the absolute value turns that into error. With the accuracy of
    each bin taken as normal around what was observed, a new sample would show :math:`E|Z|`, Z normal with mean
    :math:`\delta = acc - conf` and deviation s; what that exceeds :math:`|\delta|` by is the bias that is subtracted.

    The estimate is of first order. For a perfectly calibrated predictor it takes away some four tenths of the bias, and
    nearly all of it where bins are truly off. It can fall below 0, and is left there so that means over seeds stay
    honest.

    Parameters
    ----------
    confidence : array-like of shape (N,)
        Probabilities from 0 to 1.
    correct : array-like of shape (N,)
        0 or 1, or booleans.
    n_bins : int
        At least 1.
    scheme : {"width", "mass"}
        Of the bins, as in `reliability_curve`.

    Returns
    -------
    float
        At most `ece` of the same arguments.

    Raises
    ------
    InputError
        A ValueError naming the argument.

    References
    ----------
    A. Kumar, P. Liang, T. Ma, "Verified Uncertainty Calibration", NeurIPS 2019, whose simulated correction this is in
    closed form.

    Examples
    --------
    >>> confidence, correct = [0.75] * 40, [1] * 28 + [0] * 12
    >>> round(ece(confidence, correct), 3), round(debiased_ece(confidence, correct), 3)
    (0.05, 0.029)
    """
    curve = reliability_curve(confidence, correct, n_bins, scheme)
    difference = np.abs(curve.accuracy - curve.confidence)
    spread = np.sqrt(curve.accuracy * (1 - curve.accuracy) / curve.count)
    return float(curve.weight @ (2 * difference - _mean_absolute_normal(difference, spread)))


def brier(probabilities: Vector | Rows, y: Vector) -> float:
    r"""Return the Brier score.

    .. math:: \frac{1}{N} \sum_n \sum_i (p_{n,i} - [y_n = i])^2

    Parameters
    ----------
    probabilities : array-like of shape (N,), or N rows of shape (K_i,)
        Confidences, or option probabilities; of the latter the squares are summed over the options, so that the score
        of two options is twice that of the confidence in one of them.
    y : array-like of shape (N,)
        For confidences 0 or 1; for option probabilities the index of the right option.

    Returns
    -------
    float
        From 0 to 1 for confidences, to 2 for options.

    Raises
    ------
    InputError
        A ValueError naming the argument, and the question where there is one.

    Examples
    --------
    >>> round(brier([0.9, 0.6], [1, 0]), 3)
    0.185
    >>> round(brier([[0.9, 0.1], [0.6, 0.3, 0.1]], [0, 1]), 3)
    0.44
    """
    flat, hits, n_answers = _events(probabilities, y)
    return float(np.sum((flat - hits) ** 2) / n_answers)


@dataclass(frozen=True)
class BrierDecomposition:
    """Murphy's three parts of a Brier score, and what the binning leaves over; see `brier_decomposition`.

    Attributes
    ----------
    reliability : float
        How far the frequencies in the bins are from the forecasts there; 0 is best.
    resolution : float
        How far the frequencies in the bins differ from the overall one; more is better.
    uncertainty : float
        What forecasting the overall frequency would score.
    within_bin : float
        Of the forecasts that share a bin: their variance less twice their covariance with what happened.
    """

    reliability: float
    resolution: float
    uncertainty: float
    within_bin: float

    @property
    def brier(self) -> float:
        """The score: reliability - resolution + uncertainty + within_bin."""
        return self.reliability - self.resolution + self.uncertainty + self.within_bin


def brier_decomposition(
    probabilities: Vector | Rows, y: Vector, n_bins: int | None = 10, scheme: Scheme = "width"
) -> BrierDecomposition:
    """Split the Brier score into reliability, resolution and uncertainty, exactly.

    Parameters
    ----------
    probabilities : array-like of shape (N,), or N rows of shape (K_i,)
        Confidences or option probabilities. Options of different questions have nothing in common, so every option is
        taken as an event of its own, that it is the right one, and all events are pooled.
    y : array-like of shape (N,)
        As in `brier`.
    n_bins : int, optional
        None gives every value that occurs a bin of its own; ``within_bin`` is then 0.
    scheme : {"width", "mass"}
        Of the bins, as in `reliability_curve`.

    Returns
    -------
    BrierDecomposition
        Its ``brier`` equals that of `brier`.

    Raises
    ------
    InputError
        A ValueError naming the argument.

    References
    ----------
    A. H. Murphy, "A New Vector Partition of the Probability Score", J. Applied Meteorology 12, 1973; the fourth term:
    D. B. Stephenson et al., "Two Extra Components in the Brier Score Decomposition", Weather and Forecasting 23, 2008.

    Examples
    --------
    >>> parts = brier_decomposition([0.8, 0.8, 0.3, 0.2], [1, 0, 0, 0])
    >>> round(parts.uncertainty, 4), round(parts.brier, 4), round(brier([0.8, 0.8, 0.3, 0.2], [1, 0, 0, 0]), 4)
    (0.1875, 0.2025, 0.2025)
    """
    flat, hits, n_answers = _events(probabilities, y)
    if n_bins is None:
        bins = np.unique(flat, return_inverse=True)[1]
    else:
        bins = np.searchsorted(_edges(flat, n_bins, scheme)[1:-1], flat, side="left")
    count = np.maximum(np.bincount(bins), 1)
    forecast = (np.bincount(bins, weights=flat) / count)[bins]
    frequency = (np.bincount(bins, weights=hits) / count)[bins]
    overall = hits.mean()
    scale = len(flat) / n_answers
    return BrierDecomposition(
        reliability=float(scale * np.mean((forecast - frequency) ** 2)),
        resolution=float(scale * np.mean((frequency - overall) ** 2)),
        uncertainty=float(scale * overall * (1 - overall)),
        within_bin=float(scale * np.mean((flat - forecast) ** 2 - 2 * (flat - forecast) * (hits - frequency))),
    )


def nll(probabilities: Vector | Rows, y: Vector) -> float:
    """Return the mean negative log-likelihood, in nats.

    Parameters
    ----------
    probabilities : array-like of shape (N,), or N rows of shape (K_i,)
        Confidences or option probabilities.
    y : array-like of shape (N,)
        As in `brier`.

    Returns
    -------
    float
        Infinite when something that happened was given probability 0; nothing is clipped.

    Raises
    ------
    InputError
        A ValueError naming the argument.

    Examples
    --------
    >>> round(nll([[0.5, 0.5], [0.25, 0.25, 0.5]], [0, 1]), 4)
    1.0397
    """
    if _is_vector(probabilities):
        confidence, correct = _answers(probabilities, y, names=("probabilities", "y"))
        given = np.where(correct == 1, confidence, 1 - confidence)
    else:
        rows = _probability_rows(probabilities)
        given = np.array([row[gold] for row, gold in zip(rows, _gold(rows, y), strict=True)])
    with np.errstate(divide="ignore"):
        return float(-np.log(given).mean())


def auroc(confidence: Vector, correct: Vector) -> float:
    """Return the probability that a right answer has more confidence than a wrong one, ties counting half.

    Parameters
    ----------
    confidence : array-like of shape (N,)
        Any finite scores.
    correct : array-like of shape (N,)
        0 or 1, or booleans.

    Returns
    -------
    float
        From 0 to 1; nan when all answers are right or all are wrong.

    Raises
    ------
    InputError
        A ValueError naming the argument.

    Examples
    --------
    >>> auroc([0.9, 0.8, 0.8, 0.1], [1, 1, 0, 0])
    0.875
    """
    confidence, correct = _answers(confidence, correct, bounded=False)
    n_right = int(correct.sum())
    n_wrong = len(correct) - n_right
    if not n_right or not n_wrong:
        return float("nan")
    ranks = rankdata(confidence)[correct == 1].sum()
    return float((ranks - n_right * (n_right + 1) / 2) / (n_right * n_wrong))


class TemperatureScaling:
    r"""Divide logits by the one temperature that makes the right answers likeliest.

    .. math:: p = softmax(s / T), \quad T = \arg\min -\sum_n \log p_{n, y_n}

    The likelihood is concave in 1/T, so the zero of its slope is the optimum. No prediction changes, only confidences.

    Attributes
    ----------
    temperature_ : float
        From 0.01 (reached where all answers are right) to 100 (reached where the model does no better than chance).

    References
    ----------
    C. Guo et al., "On Calibration of Modern Neural Networks", ICML 2017.

    Examples
    --------
    >>> logits = [np.array([4.0, 0.0]), np.array([0.0, 4.0]), np.array([4.0, 0.0, 0.0])]
    >>> scaling = TemperatureScaling().fit(logits, [0, 1, 1])
    >>> round(scaling.temperature_, 2), [len(p) for p in scaling.predict_proba(logits)]
    (4.25, [2, 2, 3])
    """

    temperature_: float

    def fit(self, logits: Rows, y: Vector) -> Self:
        """Find the temperature.

        Parameters
        ----------
        logits : N rows of shape (K_i,)
            Unnormalised log-probabilities of the options, finite.
        y : array-like of shape (N,)
            Index of the right option of each.

        Returns
        -------
        TemperatureScaling
            Itself.

        Raises
        ------
        InputError
            A ValueError naming the argument and the question.
        """
        rows = _rows(logits, "logits")
        gold = _gold(rows, y)
        # Padding of -inf has no probability at any temperature; its product with that probability must count 0.
        padded = np.full((len(rows), max(map(len, rows))), -np.inf)
        for i, row in enumerate(rows):
            padded[i, : len(row)] = row - row.max()
        values = np.where(np.isinf(padded), 0.0, padded)
        right = padded[np.arange(len(rows)), gold]

        def slope(log_temperature: float) -> float:
            p = softmax(padded / np.exp(log_temperature), axis=1)
            return float(np.mean((p * values).sum(axis=1) - right))

        coldest, hottest = np.log(COLDEST), np.log(HOTTEST)
        if slope(coldest) <= 0:
            self.temperature_ = COLDEST
        elif slope(hottest) >= 0:
            self.temperature_ = HOTTEST
        else:
            self.temperature_ = float(np.exp(brentq(slope, coldest, hottest, xtol=1e-12)))
        return self

    def predict_proba(self, logits: Rows) -> list[np.ndarray]:
        """Return the option probabilities at the fitted temperature.

        Parameters
        ----------
        logits : N rows of shape (K_i,)

        Returns
        -------
        list of ndarray of shape (K_i,), float64

        Raises
        ------
        InputError
            A ValueError naming the argument and the question.
        """
        return [softmax(row / self.temperature_) for row in _rows(logits, "logits")]


class IsotonicCalibration:
    """Replace each probability by the frequency that goes with it, under the only assumption that more means more.

    Of option probabilities every option is taken as an event, that it is the right one; the mapped ones are scaled to
    sum to 1 again, and a row that is mapped to zeros becomes uniform.

    Attributes
    ----------
    thresholds_, values_ : ndarray of shape (n_thresholds,), float64
        Corners of the map; it is linear in between and constant beyond.

    References
    ----------
    B. Zadrozny, C. Elkan, "Transforming Classifier Scores into Accurate Multiclass Probability Estimates", KDD 2002.

    Examples
    --------
    >>> calibration = IsotonicCalibration().fit([0.6, 0.7, 0.8, 0.9], [0, 1, 0, 1])
    >>> calibration.predict_proba([0.5, 0.75, 1.0])
    array([0. , 0.5, 1. ])
    """

    thresholds_: np.ndarray
    values_: np.ndarray

    def fit(self, probabilities: Vector | Rows, y: Vector) -> Self:
        """Fit the map.

        Parameters
        ----------
        probabilities : array-like of shape (N,), or N rows of shape (K_i,)
            Confidences or option probabilities.
        y : array-like of shape (N,)
            As in `brier`.

        Returns
        -------
        IsotonicCalibration
            Itself.

        Raises
        ------
        InputError
            A ValueError naming the argument.
        """
        flat, hits, _ = _events(probabilities, y)
        self.thresholds_, where, count = np.unique(flat, return_inverse=True, return_counts=True)
        self.values_ = isotonic_regression(np.bincount(where, weights=hits) / count, weights=count).x
        return self

    def predict_proba(self, probabilities: Vector | Rows) -> Any:
        """Return calibrated probabilities.

        Parameters
        ----------
        probabilities : array-like of shape (N,), or N rows of shape (K_i,)

        Returns
        -------
        ndarray of shape (N,), or list of ndarray of shape (K_i,), float64
            As was given.

        Raises
        ------
        InputError
            A ValueError naming the argument.
        """
        if _is_vector(probabilities):
            confidence = np.asarray(probabilities, dtype=np.float64)
            _require_probabilities(confidence, "probabilities")
            return np.interp(confidence, self.thresholds_, self.values_)
        mapped = [np.interp(row, self.thresholds_, self.values_) for row in _probability_rows(probabilities)]
        return [row / row.sum() if row.sum() > 0 else np.full(len(row), 1 / len(row)) for row in mapped]


def reliability_diagram(
    answers: Mapping[str, tuple[Vector, Vector]],
    n_bins: int = 10,
    scheme: Scheme = "width",
    *,
    title: str | None = None,
) -> Any:
    """Draw accuracy against confidence, with the diagonal of perfect calibration and the share of answers in each bin.

    Parameters
    ----------
    answers : mapping of str to (confidence, correct)
        A line each, under this name; the two as in `ece`.
    n_bins : int
    scheme : {"width", "mass"}
        As in `reliability_curve`.
    title : str, optional

    Returns
    -------
    plotly.graph_objects.Figure
        ``write_html`` makes a page of it, ``to_plotly_json`` plain data.

    Raises
    ------
    InputError
        A ValueError naming the argument.

    Examples
    --------
    >>> figure = reliability_diagram({"before": ([0.9, 0.8, 0.9], [1, 0, 0]), "after": ([0.4, 0.3, 0.4], [1, 0, 0])})
    >>> [trace.name for trace in figure.data if trace.showlegend]
    ['before (ECE 0.533)', 'after (ECE 0.167)']
    """
    from plotly.graph_objects import Bar, Figure, Scatter

    if not answers:
        raise InputError("answers={}: must have at least one pair (confidence, correct)")
    figure = Figure()
    diagonal = {"color": "gray", "dash": "dash", "width": 1}
    figure.add_trace(Scatter(x=[0, 1], y=[0, 1], mode="lines", line=diagonal, hoverinfo="skip", showlegend=False))
    for number, (name, (confidence, correct)) in enumerate(answers.items()):
        curve = reliability_curve(confidence, correct, n_bins, scheme)
        error = float(curve.weight @ np.abs(curve.accuracy - curve.confidence))
        colour = DIAGRAM_COLOURS[number % len(DIAGRAM_COLOURS)]
        text = [
            f"{n} answers in ({a:.2f}, {b:.2f}]" for n, a, b in zip(curve.count, curve.lower, curve.upper, strict=True)
        ]
        figure.add_trace(
            Scatter(
                x=curve.confidence.tolist(),
                y=curve.accuracy.tolist(),
                mode="lines+markers",
                name=f"{name} (ECE {error:.3f})",
                legendgroup=name,
                showlegend=True,
                line={"color": colour},
                marker={"symbol": DIAGRAM_SYMBOLS[number % len(DIAGRAM_SYMBOLS)], "size": 9},
                text=text,
                hovertemplate="confidence %{x:.3f}<br>accuracy %{y:.3f}<br>%{text}<extra></extra>",
            )
        )
        figure.add_trace(
            Bar(
                x=((curve.lower + curve.upper) / 2).tolist(),
                y=curve.weight.tolist(),
                width=(curve.upper - curve.lower).tolist(),
                legendgroup=name,
                showlegend=False,
                marker={"color": colour, "opacity": 0.4},
                yaxis="y2",
                text=text,
                textposition="none",
                hovertemplate="%{y:.1%} of the answers<br>%{text}<extra></extra>",
            )
        )
    figure.update_layout(
        title=title,
        barmode="overlay",
        xaxis={"title": {"text": "confidence"}, "range": [0, 1], "anchor": "y2"},
        yaxis={"title": {"text": "accuracy"}, "range": [0, 1.02], "domain": [0.3, 1]},
        yaxis2={"title": {"text": "share"}, "range": [0, 1], "domain": [0, 0.22]},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    )
    return figure


# Told apart by the colour-blind too: Okabe and Ito's palette.
DIAGRAM_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DIAGRAM_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")


def _mean_absolute_normal(mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """E|Z| of normal Z; the mean itself, which is not negative, where there is no deviation."""
    standard = np.divide(mean, deviation, out=np.zeros_like(mean), where=deviation > 0)
    folded = deviation * np.sqrt(2 / np.pi) * np.exp(-(standard**2) / 2) + mean * (1 - 2 * ndtr(-standard))
    return np.where(deviation > 0, folded, mean)


def _edges(confidence: np.ndarray, n_bins: int, scheme: str) -> np.ndarray:
    """Ends of the bins, ascending, the first 0 and the last 1."""
    if isinstance(n_bins, bool) or not isinstance(n_bins, int | np.integer) or n_bins < 1:
        raise InputError(f"n_bins={n_bins!r}: must be a whole number, at least 1")
    if scheme not in SCHEMES:
        raise InputError(f"scheme={scheme!r}: must be one of {', '.join(map(repr, SCHEMES))}")
    shares = np.arange(1, n_bins) / n_bins
    if scheme == "width":
        inner = shares
    else:
        inner = np.unique(np.quantile(confidence, shares, method="inverted_cdf")) if n_bins > 1 else shares
        inner = inner[(inner > 0) & (inner < 1)]
    return np.concatenate([[0.0], inner, [1.0]])


def _answers(
    confidence: Any, correct: Any, *, bounded: bool = True, names: tuple[str, str] = ("confidence", "correct")
) -> tuple[np.ndarray, np.ndarray]:
    """Both as float64 vectors of equal length."""
    vectors = [_numbers(values, name) for values, name in zip((confidence, correct), names, strict=True)]
    if len(vectors[0]) != len(vectors[1]):
        raise InputError(f"{names[1]}: has {len(vectors[1])} values; {names[0]} has {len(vectors[0])}")
    if bounded:
        _require_probabilities(vectors[0], names[0])
    elif not np.isfinite(vectors[0]).all():
        i = int(np.flatnonzero(~np.isfinite(vectors[0]))[0])
        raise InputError(f"{names[0]}[{i}]={vectors[0][i]}: must be a finite number")
    wrong = np.flatnonzero((vectors[1] != 0) & (vectors[1] != 1))
    if len(wrong):
        raise InputError(f"{names[1]}[{wrong[0]}]={vectors[1][wrong[0]]}: must be 0 or 1")
    return vectors[0], vectors[1]


def _numbers(values: Any, name: str) -> np.ndarray:
    try:
        vector = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: must be a vector of numbers") from error
    if vector.ndim != 1:
        raise InputError(f"{name}: has shape {vector.shape}; must be a vector of numbers")
    if not len(vector):
        raise InputError(f"{name}: is empty; must have at least one value")
    return vector


def _require_probabilities(values: np.ndarray, name: str) -> None:
    outside = np.flatnonzero(~((values >= 0) & (values <= 1)))
    if len(outside):
        raise InputError(f"{name}[{outside[0]}]={values[outside[0]]}: must be a probability from 0 to 1")


def _is_vector(probabilities: Any) -> TypeGuard[Vector]:
    return len(probabilities) == 0 or np.ndim(probabilities[0]) == 0


def _events(probabilities: Any, y: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """Probabilities of all events, whether each happened, and the number of answers they belong to."""
    if _is_vector(probabilities):
        confidence, correct = _answers(probabilities, y, names=("probabilities", "y"))
        return confidence, correct, len(confidence)
    rows = _probability_rows(probabilities)
    starts = np.cumsum([0, *map(len, rows[:-1])])
    hits = np.zeros(sum(map(len, rows)))
    hits[starts + _gold(rows, y)] = 1
    return np.concatenate(rows), hits, len(rows)


def _probability_rows(probabilities: Any) -> list[np.ndarray]:
    rows = _rows(probabilities, "probabilities")
    for i, row in enumerate(rows):
        _require_probabilities(row, f"probabilities[{i}]")
        if abs(row.sum() - 1) > SUM_TOLERANCE:
            raise InputError(f"probabilities[{i}]: sum to {row.sum():.6g}; must sum to 1")
    return rows


def _rows(values: Any, name: str) -> list[np.ndarray]:
    rows = [np.asarray(row, dtype=np.float64) for row in values]
    if not rows:
        raise InputError(f"{name}: is empty; must have at least one question")
    for i, row in enumerate(rows):
        if row.ndim != 1 or len(row) < 2:
            raise InputError(
                f"{name}[{i}]: has shape {row.shape}; must be a vector with a value for each option, 2 or more"
            )
        if not np.isfinite(row).all():
            raise InputError(f"{name}[{i}]: has {row[~np.isfinite(row)][0]}; must be finite numbers")
    return rows


def _gold(rows: list[np.ndarray], y: Any) -> np.ndarray:
    """Index of the right option of each row, int64."""
    gold = np.asarray(y)
    if gold.shape != (len(rows),):
        raise InputError(f"y: has shape {gold.shape}; must have one index for each of {len(rows)} questions")
    for i, (row, index) in enumerate(zip(rows, gold.tolist(), strict=True)):
        if index is None or index != index or int(index) != index or not 0 <= index < len(row):
            raise InputError(f"y[{i}]={index}: must be the index of an option, 0 to {len(row) - 1}")
    return gold.astype(np.int64)
