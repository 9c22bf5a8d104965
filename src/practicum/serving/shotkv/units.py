"""Where the worked examples, sentences or documents of a prompt begin and end, in tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from practicum.toolbox.errors import InputError

# A sentence ends at its mark and whatever closes it; what follows begins after white space.
SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+")


class Unit(NamedTuple):
    """Tokens that are kept or let go of together.

    Attributes
    ----------
    start, end : int
        The span [start, end) of the prompt's n tokens, as in ``input_ids`` of shape (1, n).
    label : str or None
        Of the unit, for the report.

    Examples
    --------
    >>> Unit(3, 7).end
    7
    """

    start: int
    end: int
    label: str | None = None


@dataclass(frozen=True)
class UnitSpans(Sequence):
    """The units of a prompt; a sequence of `Unit`.

    Attributes
    ----------
    units : tuple of Unit
    input_ids : Tensor of int64, shape (1, n)
        The prompt's tokens.
    torn : tuple of int
        Tokens that lie across a boundary; each is in the earlier unit.

    Examples
    --------
    >>> spans = UnitSpans((Unit(0, 2), Unit(2, 5)), torch.zeros(1, 6, dtype=torch.int64))
    >>> len(spans), spans[1].start
    (2, 2)
    """

    units: tuple[Unit, ...]
    input_ids: Tensor
    torn: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, index: Any) -> Any:
        return self.units[index]


def split_units(
    tokenizer: Any,
    text: str,
    *,
    separator: str | None = None,
    spans: Sequence[tuple[int, int]] | None = None,
    splitter: Literal["separator", "sentences"] = "separator",
    preamble: bool = True,
    question: bool = True,
    add_special_tokens: bool = True,
) -> UnitSpans:
    """Find the units of a prompt.

    The text is cut at a separator or behind sentences; the first piece is the preamble and the last one the question,
    which are no units and are always kept. Or the caller gives the units as spans of characters. Everything outside
    units (special tokens as well) is always kept.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        A fast one: it says which characters a token stands for.
    text : str
        The whole prompt, chat template included.
    separator : str, optional
        What stands between pieces, such as a blank line. It belongs to the piece before it.
    spans : sequence of (int, int), optional
        Instead: the units as spans [start, end) of characters.
    splitter : {"separator", "sentences"}
    preamble, question : bool
        Whether the first and the last piece are always kept, rather than units.
    add_special_tokens : bool
        As for the tokenizer, which must give the same tokens as the prompt that is prefilled.

    Returns
    -------
    UnitSpans
        With the prompt's tokens, shape (1, n).

    Raises
    ------
    InputError
        A ValueError that names the argument: for a separator that does not occur, spans that are empty, unsorted,
        overlapping or outside the text, no unit at all, a tokenizer that cannot say where tokens are.

    Examples
    --------
    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import PreTrainedTokenizerFast
    >>> words = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2, "c": 3, "d": 4}, unk_token="?"))
    >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    >>> found = split_units(tokenizer, "a b / c d / c / d", separator=" / ")
    >>> [(unit.start, unit.end) for unit in found]
    [(3, 6), (6, 8)]
    """
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"tokenizer: {type(tokenizer).__name__} does not say where its tokens are; must be a fast tokenizer"
        )
    if (spans is not None) + (separator is not None) + (splitter == "sentences") != 1:
        raise InputError("separator, spans and splitter='sentences': give exactly one of them")
    if splitter not in ("separator", "sentences"):
        raise InputError(f"splitter={splitter!r}: must be 'separator' or 'sentences'")
    if spans is None:
        pieces = _at_separator(text, separator) if separator is not None else _sentences(text)
        spans = pieces[preamble : len(pieces) - question]
        if not spans:
            what = f"separator={separator!r}" if separator is not None else "splitter='sentences'"
            raise InputError(f"{what}: leaves no unit between the preamble and the question of {len(pieces)} pieces")
    else:
        spans = [(int(start), int(end)) for start, end in spans]
        _require_spans(spans, len(text), "spans", "characters")
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=add_special_tokens)
    return _in_tokens(spans, encoded["offset_mapping"], encoded["input_ids"])


def checked_units(units: Sequence[Any], n: int) -> tuple[Unit, ...]:
    """The units of a prompt of n tokens, or an InputError that names the first that is wrong."""
    found = tuple(unit if isinstance(unit, Unit) else Unit(*unit) for unit in units)
    if not found:
        raise InputError("units: are none; must be one at least")
    _require_spans([(unit.start, unit.end) for unit in found], n, "units", "tokens")
    return found


def _require_spans(spans: Sequence[tuple[int, int]], n: int, name: str, of: str) -> None:
    before = 0
    for index, (start, end) in enumerate(spans):
        if end <= start:
            raise InputError(f"{name}[{index}]: is empty: [{start}, {end})")
        if start < 0 or end > n:
            raise InputError(f"{name}[{index}]: [{start}, {end}) is outside the prompt of {n} {of}")
        if start < before:
            raise InputError(f"{name}[{index}]: begins at {start}, before the end of the one before it, {before}")
        before = end


def _at_separator(text: str, separator: str) -> list[tuple[int, int]]:
    if not separator or separator not in text:
        raise InputError(f"separator={separator!r}: does not occur in the text")
    pieces, start = [], 0
    for piece in text.split(separator):
        end = min(len(text), start + len(piece) + len(separator))
        if end > start:
            pieces.append((start, end))
        start = end
    return pieces


def _sentences(text: str) -> list[tuple[int, int]]:
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    ends = [end for end in ends if end < len(text)] + [len(text)]
    return [(start, end) for start, end in zip([0, *ends], ends, strict=False) if end > start]


def _in_tokens(spans: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]], ids: Sequence[int]) -> UnitSpans:
    """Units in tokens: a token belongs to the span of its first character that is not white space before a boundary."""
    units, torn = [], []
    for first, last in spans:
        inside = [i for i, (a, b) in enumerate(offsets) if b > a and first <= a < last]
        # What lies across the beginning of a span belongs to what is before it.
        torn += [i for i in inside if offsets[i][1] > last]
        if inside:
            units.append(Unit(inside[0], inside[-1] + 1))
    if not units:
        raise InputError("spans: hold no token at all")
    return UnitSpans(tuple(units), torch.tensor([list(ids)]), tuple(torn))
