"""What a confidence taught on one kind of task is worth on another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from practicum.language.confidence.format import ConfidenceFormat
from practicum.language.confidence.items import ConfItem, LabeledItem
from practicum.language.confidence.verbal import VerbalConfidence, linear_lora
from practicum.toolbox.calibration import (
    ReliabilityCurve,
    auroc,
    brier,
    debiased_ece,
    ece,
    reliability_curve,
    reliability_diagram,
)
from practicum.toolbox.errors import InputError
from practicum.toolbox.extras import requires
from practicum.toolbox.taps import decoder_blocks
from practicum.toolbox.trunk import FrozenTrunk

MIXTURE = "mixture"
N_RESAMPLES = 2000
ASK = "How sure are you that this answer is right, as one digit from 0 (it is wrong) to 9 (it is right)?"


@dataclass(frozen=True)
class CalibrationReport:
    """How far a confidence can be believed.

    Attributes
    ----------
    ece, ece_debiased : float
        Expected calibration error, and less its bias in small samples.
    brier : float
    auroc : float
        nan where all answers are right or all wrong.
    accuracy : float
    reliability : ReliabilityCurve
        With arrays of shape (n_bins,), empty bins left out.
    n, n_missing : int
        Answers that count, and those without a confidence.

    Examples
    --------
    >>> calibration_report([0.9, 0.2], [1, 0]).brier
    0.025
    """

    ece: float
    ece_debiased: float
    brier: float
    auroc: float
    accuracy: float
    reliability: ReliabilityCurve
    n: int
    n_missing: int


def calibration_report(conf: ArrayLike, correct: ArrayLike, n_bins: int = 10) -> CalibrationReport:
    """Judge confidences by which answers were right.

    Parameters
    ----------
    conf : array_like of shape (n,)
        From 0 to 1; nan, where nothing could be read, is left out and counted.
    correct : array_like of shape (n,)
        Whether each answer is right.
    n_bins : int
        Bins of equal width.

    Returns
    -------
    CalibrationReport

    Raises
    ------
    InputError
        A ValueError: on confidences out of range, or when none is left.

    Examples
    --------
    >>> report = calibration_report([0.9, 0.8, 0.2, float("nan")], [1, 1, 0, 1])
    >>> report.auroc, report.n, report.n_missing
    (1.0, 3, 1)
    """
    confidence, right = np.asarray(conf, dtype=float), np.asarray(correct, dtype=bool)
    if confidence.shape != right.shape or confidence.ndim != 1:
        raise InputError(f"conf and correct must have one shape (n,); got {confidence.shape} and {right.shape}")
    there = ~np.isnan(confidence)
    if not there.any():
        raise InputError(f"conf has no number among {len(confidence)} values")
    c, y = confidence[there], right[there]
    return CalibrationReport(
        ece=ece(c, y, n_bins),
        ece_debiased=debiased_ece(c, y, n_bins),
        brier=brier(c, y.astype(int)),
        auroc=auroc(c, y),
        accuracy=float(y.mean()),
        reliability=reliability_curve(c, y, n_bins),
        n=int(there.sum()),
        n_missing=int((~there).sum()),
    )


@dataclass(frozen=True)
class Cell:
    """One model on one test: what it was trained on, on what it is tested, and how sure it was of which answers.

    Attributes
    ----------
    train, arm, test : str
        Where nothing was trained, ``train`` is ``"none"``.
    seed : int
    confidence : array of shape (n_items,), float64
    correct : array of shape (n_items,), bool

    Examples
    --------
    >>> cell = Cell("copy", "scalar", "reasoning", 0, np.array([0.9, 0.2]), np.array([True, False]))
    >>> calibration_report(cell.confidence, cell.correct).auroc
    1.0
    """

    train: str
    arm: str
    test: str
    seed: int
    confidence: NDArray[np.float64]
    correct: NDArray[np.bool_]


def split(
    labeled: Sequence[LabeledItem], n_train: int, n_test: int, seed: int
) -> tuple[list[LabeledItem], list[LabeledItem]]:
    """Draw items to train on and others to test on.

    Raises
    ------
    InputError
        A ValueError: when there are fewer.
    """
    if n_train + n_test > len(labeled):
        raise InputError(
            f"{n_train} items to train on and {n_test} to test on were asked for; there are {len(labeled)}"
        )
    order = np.random.default_rng(seed).permutation(len(labeled))
    return [labeled[i] for i in order[:n_train]], [labeled[i] for i in order[n_train : n_train + n_test]]


def mixture(families: Mapping[str, Sequence[LabeledItem]], n: int, seed: int) -> list[LabeledItem]:
    """``n`` items in all, as many of each family as of every other to within one, in a random order."""
    names = list(families)
    taken = [item for k, name in enumerate(names) for item in families[name][: (n + k) // len(names)]]
    return [taken[i] for i in np.random.default_rng(seed).permutation(len(taken))]


def transfer_cells(
    model: Any,
    tokenizer: Any,
    families: Mapping[str, Sequence[LabeledItem]],
    arms: Mapping[str, ConfidenceFormat],
    seeds: Iterable[int] = (0,),
    *,
    held_out: Mapping[str, Sequence[LabeledItem]] | None = None,
    n_train: int = 160,
    n_test: int = 80,
    n_blocks: int | None = 4,
    lr: float = 5e-4,
    epochs: int = 8,
    batch_size: int = 16,
) -> Iterator[Cell]:
    """Train on every family and on their mixture, and test on every family and every task that is held out.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase
    families : mapping of str to sequence of LabeledItem
        Shape (n_items,) each, ``n_train + n_test`` at least.
    arms : mapping of str to ConfidenceFormat
        What is stated, such as ``{"scalar": ConfidenceFormat("scalar")}``.
    seeds : iterable of int
        Each draws other items to train and to test on, and another adapter.
    held_out : mapping of str to sequence of LabeledItem, optional
        Tasks to test on alone.
    n_train, n_test : int
        The same number of items for every training set, the mixture too.
    n_blocks : int or None
        Upper blocks that get an adapter; None is all.
    lr, epochs, batch_size
        As in `VerbalConfidence`.

    Yields
    ------
    Cell

    Examples
    --------
    >>> from practicum.language.confidence.labels import ConfidenceLabeler
    >>> from practicum.language.confidence.tasks import families
    >>> from practicum.language.confidence.tiny import tiny_model
    >>> model, tokenizer = tiny_model()
    >>> items = {name: families(name, 12) for name in ("reasoning", "copy")}
    >>> labeled = {name: ConfidenceLabeler(model, tokenizer).label(of) for name, of in items.items()}
    >>> cells = list(transfer_cells(model, tokenizer, labeled, {"scalar": ConfidenceFormat()}, n_train=8, n_test=4,
    ...                             n_blocks=1, epochs=1))
    >>> len(cells), cells[-1].train, cells[-1].test, cells[-1].confidence.shape
    (8, 'mixture', 'copy', (4,))
    """
    trunk = None
    if n_blocks is not None:
        trunk = top_trunk(model, n_blocks)
    for seed in seeds:
        parts = {name: split(labeled, n_train, n_test, seed) for name, labeled in families.items()}
        tests = {name: part[1] for name, part in parts.items()}
        tests |= {
            name: split(labeled, 0, min(n_test, len(labeled)), seed)[1] for name, labeled in (held_out or {}).items()
        }
        trains = {name: part[0] for name, part in parts.items()}
        if len(trains) > 1:
            trains[MIXTURE] = mixture(trains, n_train, seed)
        some = next(iter(arms.values()))
        asking = ConfidenceFormat("scalar", some.levels, template=some.template, ask=ASK, fallback="percent")
        untrained = VerbalConfidence(model, tokenizer, asking, trunk=trunk)
        yield from cells_of(untrained, "none", "untrained", tests, seed)
        for arm, form in arms.items():
            for train, labeled in trains.items():
                verbal = VerbalConfidence(
                    model,
                    tokenizer,
                    form,
                    lora=linear_lora(model, n_blocks),
                    lr=lr,
                    epochs=epochs,
                    batch_size=batch_size,
                    trunk=trunk,
                    random_state=seed,
                )
                try:
                    verbal.fit(labeled)
                    yield from cells_of(verbal, train, arm, tests, seed)
                finally:
                    verbal.unload()


def top_trunk(model: Any, n_blocks: int) -> FrozenTrunk | None:
    """The trunk below the upper ``n_blocks`` blocks, None where these are all."""
    below = len(decoder_blocks(model)) - n_blocks
    return FrozenTrunk(model, below) if below > 0 else None


def cells_of(
    verbal: VerbalConfidence, train: str, arm: str, tests: Mapping[str, Sequence[LabeledItem]], seed: int
) -> Iterator[Cell]:
    """Test a model on every task."""
    for test, labeled in tests.items():
        items: list[ConfItem] = [one.item for one in labeled]
        result = verbal.predict(items)
        yield Cell(train, arm, test, seed, result.confidence, result.correct(items))


def transfer_matrix(
    model: Any,
    tokenizer: Any,
    families: Mapping[str, Sequence[LabeledItem]],
    arms: Mapping[str, ConfidenceFormat],
    seeds: Iterable[int] = (0,),
    **options: Any,
) -> Any:
    """The scores of `transfer_cells` as a table.

    Parameters
    ----------
    model, tokenizer, families, arms, seeds
        As in `transfer_cells`.
    **options
        The other arguments of `transfer_cells`.

    Returns
    -------
    pandas.DataFrame
        Shape (n_cells, 14): a row for each training set, arm, test and seed, with the Brier score and its 95 %
        interval by resampling items.

    Raises
    ------
    MissingExtra
        When pandas is not installed.

    Examples
    --------
    >>> from practicum.language.confidence.labels import ConfidenceLabeler
    >>> from practicum.language.confidence.tasks import families
    >>> from practicum.language.confidence.tiny import tiny_model
    >>> model, tokenizer = tiny_model()
    >>> labeled = {"reasoning": ConfidenceLabeler(model, tokenizer).label(families("reasoning", 12))}
    >>> sizes = {"n_train": 8, "n_test": 4, "n_blocks": 1, "epochs": 1}
    >>> table = transfer_matrix(model, tokenizer, labeled, {"scalar": ConfidenceFormat()}, **sizes)
    >>> table[["train", "arm", "test"]].to_numpy().tolist()
    [['none', 'untrained', 'reasoning'], ['reasoning', 'scalar', 'reasoning']]
    """
    with requires("embedded", "transfer_matrix"):
        import pandas as pd

    return pd.DataFrame([scores(cell) for cell in transfer_cells(model, tokenizer, families, arms, seeds, **options)])


def scores(cell: Cell) -> dict[str, Any]:
    """A row of the transfer matrix."""
    report = calibration_report(cell.confidence, cell.correct)
    numbers = {name: value for name, value in asdict(report).items() if name != "reliability"}
    low, high = brier_interval(cell)
    return {
        "train": cell.train,
        "arm": cell.arm,
        "test": cell.test,
        "seed": cell.seed,
        **numbers,
        "brier_low": low,
        "brier_high": high,
    }


def brier_interval(cell: Cell, level: float = 0.95) -> tuple[float, float]:
    """Interval of the Brier score by resampling the items."""
    there = ~np.isnan(cell.confidence)
    errors = (cell.confidence[there] - cell.correct[there]) ** 2
    drawn = np.random.default_rng(0).integers(len(errors), size=(N_RESAMPLES, len(errors)))
    low, high = np.quantile(errors[drawn].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def write_page(path: Path | str, cells: Sequence[Cell], title: str) -> None:
    """Write the transfer matrix and a reliability diagram of each of its cells as one HTML page.

    Parameters
    ----------
    path : pathlib.Path or str
    cells : sequence of Cell
        Shape (n_cells,). Cells that differ in their seed alone are put together.
    title : str

    Examples
    --------
    >>> import tempfile
    >>> cell = Cell("none", "untrained", "copy", 0, np.array([0.9, 0.2, 0.6]), np.array([True, False, True]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_page(Path(folder, "page.html"), [cell], "Transfer")
    ...     page = Path(folder, "page.html").read_text()
    >>> page.count("class='diagram'"), "untrained" in page
    (1, True)
    """
    joined = pooled(cells)
    tests = list(dict.fromkeys(cell.test for cell in joined))
    rows = list(dict.fromkeys((cell.arm, cell.train) for cell in joined))
    by_place = {(cell.arm, cell.train, cell.test): cell for cell in joined}
    head = "".join(f"<th>{escape(test)}</th>" for test in tests)
    body: list[str] = []
    for arm, train in rows:
        columns: list[str] = []
        for test in tests:
            cell = by_place[arm, train, test]
            there = ~np.isnan(cell.confidence)
            figure = reliability_diagram({f"{arm}, {train}": (cell.confidence[there], cell.correct[there])})
            figure.update_layout(width=420, height=380, margin={"l": 50, "r": 10, "t": 40, "b": 40})
            html = figure.to_html(full_html=False, include_plotlyjs=not body and not columns)
            columns.append(f"<td><p>{escape(words(cell))}</p><div class='diagram'>{html}</div></td>")
        body.append(f"<tr><th>{escape(arm)}<br>trained on: {escape(train)}</th>{''.join(columns)}</tr>")
    Path(path).write_text(
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{escape(title)}</title><style>body{{font-family:sans-serif;margin:1.5rem}}"
        "th{text-align:left;vertical-align:top}td{vertical-align:top}td p{font-size:.85rem;margin:.2rem}</style></head>"
        f"<body><h1>{escape(title)}</h1><p>Rows: what was trained, on what. Columns: on what it is tested. Brier "
        f"scores with 95 % intervals over items.</p><table><tr><th></th>{head}</tr>{''.join(body)}</table></body>"
        "</html>",
        encoding="utf-8",
    )


def pooled(cells: Sequence[Cell]) -> list[Cell]:
    """Cells of several seeds as one, with the answers of all."""
    places: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        places.setdefault((cell.arm, cell.train, cell.test), []).append(cell)
    return [
        replace(
            of[0],
            confidence=np.concatenate([cell.confidence for cell in of]),
            correct=np.concatenate([cell.correct for cell in of]),
        )
        for of in places.values()
    ]


def words(cell: Cell) -> str:
    """The scores of a cell in a line."""
    row = scores(cell)
    missing = f", {row['n_missing']} unreadable" if row["n_missing"] else ""
    return (
        f"Brier {row['brier']:.3f} [{row['brier_low']:.3f}, {row['brier_high']:.3f}], ECE {row['ece']:.3f}, "
        f"AUROC {row['auroc']:.2f}, accuracy {row['accuracy']:.2f}{missing}"
    )
