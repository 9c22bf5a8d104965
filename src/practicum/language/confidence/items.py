"""Questions with what is known about them, their labels, and the reading of both from JSONL."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from practicum.datasets import DataFileError
from practicum.toolbox.errors import InputError


@dataclass(frozen=True)
class ConfItem:
    """A question whose answer is known, with the text it is asked about.

    Parameters
    ----------
    question : str
    answer : str
        The right answer.
    context : str, optional
        Text that the answer is to be found in.
    evidence : str or sequence of str, optional
        The parts of ``context`` that hold the answer, as they stand there.
    choices : sequence of str, optional
        The answers to choose from, ``answer`` among them. Without choices the model writes its answer.
    family : str, optional
        Kind of task, such as ``"reasoning"`` or ``"copy"``; by default told by whether there is a context.
    task : str, optional
        The task within the family.

    Raises
    ------
    InputError
        A ValueError: on an empty question or answer, evidence that is not in the context, or choices without the
        answer.

    Examples
    --------
    Shape of the ``choices``: (n_choices,).

    >>> item = ConfItem("What is Ann's code?", "123", context="Ann's code is 123. Bob's code is 456.",
    ...                 evidence="Ann's code is 123.", choices=["123", "456"])
    >>> item.kind, item.evidence_text
    ('copy', "Ann's code is 123.")
    >>> ConfItem("What is 2 + 2?", "4").kind
    'reasoning'
    """

    question: str
    answer: str
    context: str | None = None
    evidence: str | Sequence[str] | None = None
    choices: Sequence[str] | None = None
    family: str | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        for name in ("question", "answer"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise InputError(f"{name} must be text that is not blank; got {value!r}")
        if self.context is not None and (not isinstance(self.context, str) or not self.context.strip()):
            raise InputError(f"context must be text that is not blank; got {self.context!r} for {self.question!r}")
        for part in self._parts():
            if not isinstance(part, str) or not part.strip():
                raise InputError(f"evidence must be text or a list of texts; got {part!r} for {self.question!r}")
            if part not in (self.context or ""):
                raise InputError(f"evidence {part!r} is not in the context of {self.question!r}")
        if self.choices is not None:
            if isinstance(self.choices, str) or len(set(self.choices)) < 2:
                raise InputError(f"choices must be two different texts at least; got {self.choices!r}")
            if not all(isinstance(choice, str) and choice.strip() for choice in self.choices):
                raise InputError(f"choices must be texts that are not blank; got {self.choices!r}")
            if self.answer not in self.choices:
                raise InputError(f"answer {self.answer!r} is not among the choices {list(self.choices)!r}")

    def _parts(self) -> tuple[str, ...]:
        if self.evidence is None:
            return ()
        return (self.evidence,) if isinstance(self.evidence, str) else tuple(self.evidence)

    @property
    def evidence_text(self) -> str | None:
        """The evidence as one text, in the order given; None where there is none."""
        return " ".join(self._parts()) or None

    @property
    def kind(self) -> str:
        """The family; by default ``"copy"`` with a context and ``"reasoning"`` without."""
        return self.family or ("reasoning" if self.context is None else "copy")


@dataclass(frozen=True)
class LabeledItem:
    """A question with how sure the model ought to be, as `ConfidenceLabeler` finds it.

    Attributes
    ----------
    item : ConfItem
    p_hat : float
        Share of the model's answers that are right.
    evidence : float or None
        How sure it is to find the evidence, e; 1 without a context, None where the evidence is not known.
    reasoning : float or None
        How sure it is to answer rightly once it has the evidence, r; ``p_hat`` without a context.
    answer : str
        One of the model's own answers, right or wrong: what the training text says.
    samples : tuple of str
        The sampled answers, shape (n_samples,); empty in exact mode.
    probabilities : tuple of float
        In exact mode with choices, the model's probability of each, shape (n_choices,).
    greedy : str or None
        The model's most likely answer, where it is known.

    Examples
    --------
    >>> labeled = LabeledItem(ConfItem("What is 2 + 2?", "4"), p_hat=0.7, evidence=1.0, reasoning=0.7, answer="5")
    >>> labeled.evidence * labeled.reasoning == labeled.p_hat
    True
    """

    item: ConfItem
    p_hat: float
    evidence: float | None
    reasoning: float | None
    answer: str
    samples: tuple[str, ...] = field(default=())
    probabilities: tuple[float, ...] = field(default=())
    greedy: str | None = None


TEXTS = ("question", "answer")
OPTIONAL_TEXTS = ("context", "family", "task")


def read_items(path: Path | str) -> list[ConfItem]:
    r"""Read questions from a file with one JSON object a line.

    Parameters
    ----------
    path : pathlib.Path or str
        The fields are those of `ConfItem`; ``question`` and ``answer`` must be there.

    Returns
    -------
    list of ConfItem
        Shape (n_items,), one at least.

    Raises
    ------
    DataFileError
        Naming the line and the field.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "questions.jsonl")
    ...     _ = file.write_text('{"question": "What is 2 + 2?", "answer": "4", "choices": ["4", "5"]}\n')
    ...     read_items(file)[0].choices
    ['4', '5']
    """
    items = []
    for line, raw in _objects(Path(path)):
        items.append(_item(Path(path), line, raw))
    if not items:
        raise DataFileError(path, "has no questions; write one JSON object a line")
    return items


def write_labels(path: Path | str, labeled: Sequence[LabeledItem]) -> None:
    """Write labelled questions, one JSON object a line, as `read_labels` reads them.

    Parameters
    ----------
    path : pathlib.Path or str
    labeled : sequence of LabeledItem
        Shape (n_items,).

    Examples
    --------
    >>> import tempfile
    >>> labeled = [LabeledItem(ConfItem("What is 2 + 2?", "4"), 0.7, 1.0, 0.7, "5", samples=("4", "5"))]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_labels(Path(folder, "labels.jsonl"), labeled)
    ...     read_labels(Path(folder, "labels.jsonl")) == labeled
    True
    """
    lines = []
    for one in labeled:
        raw = {key: value for key, value in asdict(one).items() if key != "item" and value not in (None, ())}
        given = {key: value for key, value in asdict(one.item).items() if value is not None}
        lines.append(json.dumps({"item": given, **raw}, ensure_ascii=False))
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_labels(path: Path | str) -> list[LabeledItem]:
    """Read what `write_labels` wrote.

    Parameters
    ----------
    path : pathlib.Path or str

    Returns
    -------
    list of LabeledItem
        Shape (n_items,).

    Raises
    ------
    DataFileError
        Naming the line and the field.

    Examples
    --------
    >>> read_labels("nowhere.jsonl")
    Traceback (most recent call last):
    practicum.datasets.files.DataFileError: nowhere.jsonl: cannot be read: No such file or directory
    """
    labeled = []
    for line, raw in _objects(Path(path)):
        if not isinstance(raw.get("item"), dict):
            raise DataFileError(path, "must be an object with the question", line=line, field="item")
        numbers: dict[str, Any] = {}
        for name in ("p_hat", "evidence", "reasoning"):
            value = raw.get(name)
            if not (value is None and name != "p_hat") and not _share(value):
                raise DataFileError(path, f"must be a number from 0 to 1; got {value!r}", line=line, field=name)
            numbers[name] = value
        if not isinstance(raw.get("answer"), str):
            raise DataFileError(path, f"must be text; got {raw.get('answer')!r}", line=line, field="answer")
        labeled.append(
            LabeledItem(
                _item(Path(path), line, raw["item"]),
                **numbers,
                answer=raw["answer"],
                samples=tuple(raw.get("samples", ())),
                probabilities=tuple(raw.get("probabilities", ())),
                greedy=raw.get("greedy"),
            )
        )
    if not labeled:
        raise DataFileError(path, "has no questions; write one JSON object a line")
    return labeled


def _share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def _objects(path: Path) -> list[tuple[int, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataFileError(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataFileError(path, "is not UTF-8 text") from error
    found = []
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            raw = json.loads(content)
        except json.JSONDecodeError as error:
            raise DataFileError(path, f"is not JSON: {error.msg}", line=line) from error
        if not isinstance(raw, dict):
            raise DataFileError(path, f"must be a JSON object; got {type(raw).__name__}", line=line)
        found.append((line, raw))
    return found


def _item(path: Path, line: int, raw: dict[str, Any]) -> ConfItem:
    for name in TEXTS:
        if not isinstance(raw.get(name), str) or not raw[name].strip():
            found = f"got {raw[name]!r}" if name in raw else "it is missing"
            raise DataFileError(path, f"must be text that is not blank; {found}", line=line, field=name)
    for name in OPTIONAL_TEXTS:
        if raw.get(name) is not None and not isinstance(raw[name], str):
            raise DataFileError(path, f"must be text; got {raw[name]!r}", line=line, field=name)
    unknown = sorted(raw.keys() - {*TEXTS, *OPTIONAL_TEXTS, "evidence", "choices"})
    if unknown:
        raise DataFileError(path, "is not a field of a question", line=line, field=unknown[0])
    for name in ("evidence", "choices"):
        value = raw.get(name)
        texts = isinstance(value, list) and value and all(isinstance(part, str) and part.strip() for part in value)
        if not (value is None or texts or (name == "evidence" and isinstance(value, str))):
            raise DataFileError(path, f"must be a list of texts; got {value!r}", line=line, field=name)
    try:
        return ConfItem(**raw)
    except InputError as error:
        name = str(error).partition(" ")[0]
        raise DataFileError(path, str(error), line=line, field=name) from error
