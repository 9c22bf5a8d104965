"""Beliefs along a chain, whoever holds them: a probe, the model that is made to answer, or a reader of the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import clone

from practicum.language.theater.traces import Trace
from practicum.toolbox.errors import InputError

Beliefs = NDArray[np.float64]
TOLERANCE = 1e-3


class ProbeBelief:
    """What a fitted probe reads from the activations at every cut of a chain.

    Parameters
    ----------
    probe : AttentionProbe
        Fitted on the activations of ``layer``, with the answers as classes. Anything with ``classes_`` and
        ``predict_prefixes`` will do.
    layer : int

    Examples
    --------
    >>> from practicum.language.theater import AttentionProbe, Trace
    >>> def trace(answer, seed):
    ...     t = Trace("?", ("A", "B"), [1], [2, 3], [2], answer, None, "Hm.", [3])
    ...     noise = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    ...     t.hidden[1] = noise + (2.0 if answer == "A" else -2.0)
    ...     return t
    >>> traces = [trace("AB"[i % 2], i) for i in range(40)]
    >>> probe = AttentionProbe(lr=1e-2, epochs=20, random_state=0)
    >>> probe = probe.fit([t.hidden[1] for t in traces], [t.answer for t in traces], start=[1] * 40)
    >>> belief = ProbeBelief(probe, layer=1)(traces[0])
    >>> belief.shape, bool(belief[-1, 0] > 0.9)
    ((2, 2), True)
    """

    def __init__(self, probe: Any, layer: int) -> None:
        self.probe = probe
        self.layer = layer

    def __call__(self, trace: Trace) -> Beliefs:
        """Read one trace.

        Parameters
        ----------
        trace : Trace
            With ``hidden[layer]``; see `record`.

        Returns
        -------
        array of shape (S + 1, K), float64
            Over the options of the trace, in their order.
        """
        return self.beliefs([trace])[0]

    def beliefs(self, traces: Sequence[Trace]) -> list[Beliefs]:
        """Read many traces.

        Parameters
        ----------
        traces : sequence of Trace
            Shape (N,).

        Returns
        -------
        list of array of shape (S + 1, K), float64

        Raises
        ------
        InputError
            A ValueError: for traces without the activations of the layer.
        """
        for i, trace in enumerate(traces):
            if self.layer not in trace.hidden:
                raise InputError(f"traces[{i}]: has no activations of layer {self.layer}; call record first")
        prefixes = self.probe.predict_prefixes([trace.hidden[self.layer] for trace in traces])
        found = []
        for trace, read in zip(traces, prefixes, strict=True):
            at_cuts = np.asarray(torch.as_tensor(read), dtype=np.float64)[np.array(trace.cuts) + trace.start - 1]
            found.append(among(at_cuts, self.probe.classes_, trace.options))
        return found


def choose_depth(
    probe: Any, traces: Sequence[Trace], layers: Sequence[int], *, validation: float = 0.2, random_state: int = 0
) -> int:
    """Return the layer at which a probe reads the final answer best, over all cuts of held-out questions.

    Parameters
    ----------
    probe : AttentionProbe
        A copy of it is fitted for every layer.
    traces : sequence of Trace
        Shape (N,), with the activations of all layers. Not those of the test.
    layers : sequence of int
        The paper tries every layer, a few depths will do.
    validation : float
        Share of the questions that are held out.
    random_state : int
        Of the split.

    Returns
    -------
    int
        The first of equally good ones.

    Raises
    ------
    InputError
        A ValueError: for no layers, a share outside (0, 1), fewer than two questions.

    Examples
    --------
    >>> from practicum.language.theater import AttentionProbe, Trace
    >>> def trace(answer, seed):
    ...     t = Trace(f"{seed}?", ("A", "B"), [1], [2, 3], [2], answer, None, "Hm.", [3])
    ...     t.hidden[1] = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    ...     t.hidden[2] = t.hidden[1] + (2.0 if answer == "A" else -2.0)
    ...     return t
    >>> traces = [trace("AB"[i % 2], i) for i in range(40)]
    >>> choose_depth(AttentionProbe(lr=1e-2, epochs=10, random_state=0), traces, layers=[1, 2])
    2
    """
    if not layers:
        raise InputError("layers: is empty; must have one at least")
    if not 0 < validation < 1:
        raise InputError(f"validation={validation!r}: must be above 0 and below 1")
    keys = sorted({trace.key for trace in traces})
    if len(keys) < 2:
        raise InputError(f"traces: are of {len(keys)} questions; must be of two or more, to hold some out")
    order = np.random.default_rng(random_state).permutation(len(keys))
    held = {keys[i] for i in order[: max(1, round(validation * len(keys)))]}
    learnt = [trace for trace in traces if trace.key not in held]
    rest = [trace for trace in traces if trace.key in held]
    scores = []
    for layer in layers:
        fitted = clone(probe).fit(
            [trace.hidden[layer] for trace in learnt],
            [trace.answer for trace in learnt],
            start=[trace.start for trace in learnt],
            options=[trace.options for trace in learnt],
            groups=[trace.key for trace in learnt],
        )
        read = ProbeBelief(fitted, layer).beliefs(rest)
        scores.append(np.mean([accuracies(rows, trace).mean() for rows, trace in zip(read, rest, strict=True)]))
    return int(layers[int(np.argmax(scores))])


def among(probabilities: Beliefs, classes: Any, options: Sequence[str]) -> Beliefs:
    """Restrict probabilities (..., classes) to some of the classes; an option the probe has never seen gets none.

    Examples
    --------
    >>> among(np.array([[0.5, 0.3, 0.2]]), ["a", "b", "c"], ["c", "b"])
    array([[0.4, 0.6]])
    """
    places = {str(label): i for i, label in enumerate(classes)}
    chosen = np.zeros((*probabilities.shape[:-1], len(options)))
    for k, option in enumerate(options):
        if option in places:
            chosen[..., k] = probabilities[..., places[option]]
    total = chosen.sum(-1, keepdims=True)
    return np.where(total > 0, chosen / np.where(total > 0, total, 1), 1 / len(options))


def beliefs_of(source: Any, traces: Sequence[Trace], name: str = "belief") -> list[Beliefs]:
    """Ask an instrument for its beliefs, or check those that are given.

    Parameters
    ----------
    source : object
        Something with ``beliefs(traces)``, such as `ProbeBelief` and `ForcedAnswer`; a monitor, called with question,
        prefix and options; or the beliefs themselves, N arrays of shape (S + 1, K).
    traces : sequence of Trace
        Shape (N,).
    name : str
        What it is called in errors.

    Returns
    -------
    list of array of shape (S + 1, K), float64

    Raises
    ------
    InputError
        A ValueError: for no traces, for beliefs of another shape or that are no probabilities, by trace and cut.

    Examples
    --------
    >>> trace = Trace("?", ("A", "B"), [1], [2, 3], [2], "A", None, "So A.", [5])
    >>> beliefs_of(lambda question, prefix, options: [1.0, 0.0] if prefix else None, [trace])
    [array([[0.5, 0.5],
           [1. , 0. ]])]
    """
    if not traces:
        raise InputError("traces: is empty; must have one at least")
    if hasattr(source, "beliefs"):
        found = source.beliefs(traces)
    elif callable(source):
        found = [_read(source, trace) for trace in traces]
    else:
        found = list(source)
    if len(found) != len(traces):
        raise InputError(f"{name}: has {len(found)} entries; must have {len(traces)}, one a trace")
    return [_checked(given, trace, f"{name}[{i}]") for i, (given, trace) in enumerate(zip(found, traces, strict=True))]


def _read(monitor: Any, trace: Trace) -> list[Any]:
    return [monitor(trace.question, prefix, trace.options) for prefix in trace.prefixes]


def _checked(given: Any, trace: Trace, name: str) -> Beliefs:
    n_options = len(trace.options)
    uniform = np.full(n_options, 1 / n_options)
    try:
        rows = np.array([uniform if row is None else np.asarray(row, dtype=np.float64) for row in given])
    except ValueError:
        raise InputError(f"{name}: rows differ in length; must have {n_options}, one an option") from None
    wanted = (len(trace.cuts), n_options)
    if rows.shape != wanted:
        raise InputError(f"{name}: has shape {rows.shape}; must be {wanted}, cuts by options")
    wrong = ~np.isfinite(rows).all(-1) | (rows < -TOLERANCE).any(-1) | (abs(rows.sum(-1) - 1) > TOLERANCE)
    if wrong.any():
        cut = int(wrong.argmax())
        raise InputError(
            f"{name}: at cut {cut}: {np.round(rows[cut], 4).tolist()} sums to {rows[cut].sum():.4g}; must be "
            "probabilities that sum to 1, or None"
        )
    return rows


def accuracies(belief: Beliefs, trace: Trace) -> NDArray[np.float64]:
    """Whether the answer is the likeliest option at every cut, shape (S + 1,); a tie of m counts 1 / m."""
    target = belief[:, trace.options.index(trace.answer)]
    highest = belief >= belief.max(-1, keepdims=True) - 1e-9
    return np.where(target >= belief.max(-1) - 1e-9, 1 / highest.sum(-1), 0.0)
