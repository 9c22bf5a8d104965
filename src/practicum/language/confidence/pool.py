"""The generated questions of the check with the labels of the embedded model, which are shipped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from practicum.language.confidence.format import ConfidenceFormat
from practicum.language.confidence.items import ConfItem, LabeledItem
from practicum.language.confidence.labels import ConfidenceLabeler
from practicum.language.confidence.tasks import families, task_items
from practicum.toolbox.errors import InputError

SHIPPED = "labels.json"
SHIPPED_MODEL = "SmolLM2-135M-Instruct"
TEMPLATE = "Question: {question}\nAnswer:"
N_POOL, N_HELD_OUT = 520, 120
RESOLUTION = 10_000


def pool_items() -> dict[str, list[ConfItem]]:
    """The questions of the check.

    Returns
    -------
    dict of str to list of ConfItem
        The families ``"reasoning"`` and ``"copy"``, shape (520,) each, and of each a task that no model is trained
        on, ``"minus"`` and ``"letters"``, shape (120,).

    Examples
    --------
    >>> {name: len(items) for name, items in pool_items().items()}
    {'reasoning': 520, 'copy': 520, 'minus': 120, 'letters': 120}
    """
    return {
        "reasoning": families("reasoning", N_POOL),
        "copy": families("copy", N_POOL),
        "minus": task_items("minus", N_HELD_OUT),
        "letters": task_items("letters", N_HELD_OUT),
    }


def label_pool(model: Any, tokenizer: Any) -> dict[str, list[list[float]]]:
    """Label the questions of the check with a model.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase

    Returns
    -------
    dict of str to list of list of float
        For every question the probabilities of the four choices, and where there is a context that of the right one
        with the evidence alone; shape (n_items, 4) or (n_items, 5). `labeled_pool` takes it.
    """
    labeler = ConfidenceLabeler(model, tokenizer, format=ConfidenceFormat(template=TEMPLATE), random_state=0)
    found = {}
    for name, items in pool_items().items():
        found[name] = [
            [round(p, 4) for p in (*one.probabilities, *([] if one.item.context is None else [one.reasoning or 0.0]))]
            for one in labeler.label(items)
        ]
    return found


def labeled_pool(
    labels: Mapping[str, Sequence[Sequence[float]]] | None = None, *, random_state: int = 0
) -> dict[str, list[LabeledItem]]:
    """The questions of the check with their labels.

    Parameters
    ----------
    labels : mapping, optional
        What `label_pool` found; by default the shipped labels of the embedded model.
    random_state : int
        Of the model's own answer that each training text says.

    Returns
    -------
    dict of str to list of LabeledItem
        As `pool_items`.

    Raises
    ------
    InputError
        A ValueError: when labels and questions do not go together.

    Examples
    --------
    >>> one = labeled_pool()["copy"][0]
    >>> len(one.probabilities), abs(one.evidence * one.reasoning - one.p_hat) < 1e-9 or one.evidence == 1
    (4, True)
    """
    items = pool_items()
    if labels is None:
        labels = shipped_labels()
    rng = np.random.default_rng(random_state)
    found = {}
    for name, questions in items.items():
        if len(labels[name]) != len(questions):
            raise InputError(f"labels of {name!r}: must be {len(questions)}; got {len(labels[name])}")
        found[name] = [_labeled(item, row, rng) for item, row in zip(questions, labels[name], strict=True)]
    return found


def shipped_labels() -> dict[str, list[list[float]]]:
    """The labels of the embedded model, as `label_pool` finds them.

    Returns
    -------
    dict of str to list of list of float
        Shape (n_items, 4) or (n_items, 5) for each task.

    Raises
    ------
    InputError
        A ValueError: when they were made for other questions.
    """
    raw = json.loads(resources.files("practicum.language.confidence").joinpath(SHIPPED).read_text(encoding="utf-8"))
    if raw["questions"] != digest(pool_items()):
        raise InputError("the shipped labels are for other questions: label them anew")
    return {name: (np.array(rows) / RESOLUTION).tolist() for name, rows in raw["labels"].items()}


def to_ship(labels: Mapping[str, Sequence[Sequence[float]]], provenance: str) -> str:
    """The labels as they are shipped.

    Parameters
    ----------
    labels : mapping
        What `label_pool` found, shape (n_items, 4) or (n_items, 5) for each task.
    provenance : str

    Returns
    -------
    str
        JSON.
    """
    rows = {name: [[round(p * RESOLUTION) for p in row] for row in of_task] for name, of_task in labels.items()}
    raw = {"model": provenance, "questions": digest(pool_items()), "labels": rows}
    return json.dumps(raw, separators=(",", ":")) + "\n"


def digest(items: Mapping[str, Sequence[ConfItem]]) -> str:
    """16 hexadecimal digits that stand for the questions."""
    texts = [[item.context, item.question, item.answer, *(item.choices or ())] for of in items.values() for item in of]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def _labeled(item: ConfItem, row: Sequence[float], rng: np.random.Generator) -> LabeledItem:
    choices = list(item.choices or ())
    probabilities = np.asarray(row[: len(choices)], dtype=float)
    probabilities = probabilities / probabilities.sum()
    share = float(probabilities[choices.index(item.answer)])
    reasoning = share if item.context is None else float(row[len(choices)])
    return LabeledItem(
        item,
        p_hat=share,
        evidence=1.0 if item.context is None or reasoning == 0 else min(share / reasoning, 1.0),
        reasoning=reasoning,
        answer=choices[int(rng.choice(len(choices), p=probabilities))],
        probabilities=tuple(map(float, probabilities)),
        greedy=choices[int(probabilities.argmax())],
    )
