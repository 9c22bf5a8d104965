"""How a confidence stands in the text: writing it, and reading it back without guessing."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from practicum.language.confidence.items import ConfItem, LabeledItem
from practicum.toolbox.errors import InputError

Mode = Literal["scalar", "decomposed"]
Levels = Literal["digit", "percent"]

LABELS = {"confidence": "Confidence", "evidence": "Evidence confidence", "reasoning": "Reasoning confidence"}
TAGS = {"confidence": "confidence", "evidence": "evidence_confidence", "reasoning": "reasoning_confidence"}
PLAIN = "Question: {question}\nAnswer:"
# What an answer must not say in earnest: anything that reads as a confidence.
LINE = r"(?:Evidence c|Reasoning c|C)onfidence:"
TAG = r"</?(?:evidence_|reasoning_)?confidence>"
MARKER = rf"(?:^{LINE}|{TAG})"
ESCAPE = re.compile(rf"(?m)(?:^(?=\\*{LINE})|(?<!\\)(?=\\*{TAG}))")
UNESCAPE = re.compile(rf"(?m)(?:^\\(?=\\*{LINE})|\\(?={TAG}))")


class Segment(NamedTuple):
    """A piece of the completion that is tokenized by itself: an answer, what asks for a level, or a level."""

    text: str
    role: Literal["answer", "ask", "tag", "level"]


class ConfidenceFormat:
    r"""What the model is asked and how it says how sure it is.

    Parameters
    ----------
    mode : {"scalar", "decomposed"}
        One number, or two: how sure that the evidence was found, and how sure of the reasoning given the evidence.
    levels : {"digit", "percent"}
        ``"digit"`` is one of 0 to 9, a single token for tokenizers that split numbers or know single digits; digit d
        stands for (d + 0.5) / 10. ``"percent"`` is 0 %, 10 %, ... 100 %.
    tags : bool
        Whether levels stand in tags such as ``<confidence>7</confidence>``; the tags are trained too.
    template : str, optional
        The prompt, with ``{question}`` where the context and the question go; by default the chat template of the
        tokenizer, or ``"Question: {question}\nAnswer:"`` for a tokenizer that has none. After a template the answer
        begins with a blank.
    ask : str
        What to say before the confidence is stated. A model that was not trained needs to be told what is wanted.
    fallback : {None, "percent"}
        What to use where the tokenizer has no single tokens for digits; by default that is an error.

    Examples
    --------
    The levels of a digit have shape (10,):

    >>> form = ConfidenceFormat("decomposed")
    >>> labeled = LabeledItem(ConfItem("What is 2 + 2?", "4"), p_hat=0.7, evidence=1.0, reasoning=0.7, answer="5")
    >>> prompt, completion, spans = form.render(labeled)
    >>> print(completion)
     5
    Evidence confidence: 9
    Reasoning confidence: 7
    >>> [completion[start:end] for start, end in spans]
    ['9', '7']
    >>> form.parse(completion)
    {'answer': '5', 'evidence': 0.95, 'reasoning': 0.75}
    >>> form.parse("5, and I am rather sure") is None
    True
    """

    def __init__(
        self,
        mode: Mode = "scalar",
        levels: Levels = "digit",
        tags: bool = False,
        *,
        template: str | None = None,
        ask: str = "",
        fallback: Literal["percent"] | None = None,
    ) -> None:
        if mode not in ("scalar", "decomposed"):
            raise InputError(f"mode must be 'scalar' or 'decomposed'; got {mode!r}")
        if levels not in ("digit", "percent"):
            raise InputError(f"levels must be 'digit' or 'percent'; got {levels!r}")
        if template is not None and "{question}" not in template:
            raise InputError(f"template must have {{question}} in it; got {template!r}")
        if fallback not in (None, "percent"):
            raise InputError(f"fallback must be None or 'percent'; got {fallback!r}")
        self.mode = mode
        self.levels = levels
        self.tags = tags
        self.template = template
        self.ask = ask
        self.fallback = fallback

    @property
    def names(self) -> tuple[str, ...]:
        """The numbers that are stated, in their order."""
        return ("confidence",) if self.mode == "scalar" else ("evidence", "reasoning")

    @property
    def level_texts(self) -> list[str]:
        """What can be stated, from the least sure; shape (10,) or (11,)."""
        return [str(d) for d in range(10)] if self.levels == "digit" else [f"{10 * i}%" for i in range(11)]

    @property
    def level_values(self) -> NDArray[np.float64]:
        """The confidence that each level stands for, shape (10,) or (11,)."""
        return (np.arange(10) + 0.5) / 10 if self.levels == "digit" else np.arange(11) / 10

    def level(self, share: float) -> int:
        """Index of the level that a share of right answers gets: the next lower one on the grid of tenths.

        Parameters
        ----------
        share : float
            From 0 to 1.

        Returns
        -------
        int
            Into `level_texts`.

        Examples
        --------
        >>> ConfidenceFormat().level(0.7), ConfidenceFormat(levels="percent").level(1.0), ConfidenceFormat().level(1.0)
        (7, 10, 9)
        """
        if not 0 <= share <= 1:
            raise InputError(f"share must be from 0 to 1; got {share}")
        # The tolerance keeps 0.3 at level 3 although 10 * 0.29999999999999998 is below it.
        return min(int(np.floor(10 * share + 1e-9)), len(self.level_texts) - 1)

    def prompt(self, item: ConfItem, tokenizer: Any = None, *, context: str | None = None) -> str:
        """The text before the answer.

        Parameters
        ----------
        item : ConfItem
        tokenizer : transformers.PreTrainedTokenizerBase, optional
            Where there is no ``template``, its chat template is used.
        context : str, optional
            In place of the item's own.

        Returns
        -------
        str
        """
        text = item.context if context is None else context
        asked = item.question if text is None else f"{text}\n{item.question}"
        if self.uses_chat(tokenizer):
            return tokenizer.apply_chat_template(
                [{"role": "user", "content": asked}], add_generation_prompt=True, tokenize=False
            )
        return (self.template or PLAIN).replace("{question}", asked)

    def prompt_ids(self, item: ConfItem, tokenizer: Any, *, context: str | None = None) -> list[int]:
        """Token ids of the prompt.

        Parameters
        ----------
        item : ConfItem
        tokenizer : transformers.PreTrainedTokenizerBase
        context : str, optional
            In place of the item's own.

        Returns
        -------
        list of int
            Shape (n_tokens,).
        """
        # A chat template writes the special tokens itself.
        return tokenizer(
            self.prompt(item, tokenizer, context=context), add_special_tokens=not self.uses_chat(tokenizer)
        )["input_ids"]

    def answer_ids(self, answer: str, tokenizer: Any) -> list[int]:
        """Token ids of an answer as it stands after the prompt.

        Parameters
        ----------
        answer : str
        tokenizer : transformers.PreTrainedTokenizerBase

        Returns
        -------
        list of int
            Shape (n_tokens,).
        """
        return tokenizer(self.answer_text(answer, tokenizer), add_special_tokens=False)["input_ids"]

    def uses_chat(self, tokenizer: Any) -> bool:
        """Whether the prompt is written by the tokenizer's chat template.

        Parameters
        ----------
        tokenizer : transformers.PreTrainedTokenizerBase or None

        Returns
        -------
        bool
        """
        return self.template is None and bool(getattr(tokenizer, "chat_template", None))

    def answer_text(self, answer: str, tokenizer: Any = None) -> str:
        """The answer as it stands in the completion: escaped, and after a blank where no chat template is used.

        Parameters
        ----------
        answer : str
        tokenizer : transformers.PreTrainedTokenizerBase, optional

        Returns
        -------
        str
        """
        return ("" if self.uses_chat(tokenizer) else " ") + escape(answer)

    def asks(self, name: str) -> Segment:
        """What stands before the level of one number: after it the model states the level.

        Parameters
        ----------
        name : str
            Of `names`.

        Returns
        -------
        Segment
        """
        ask = f"\n{self.ask}" if self.ask and name == self.names[0] else ""
        if self.tags:
            return Segment(f"{ask}\n<{TAGS[name]}>", "tag")
        return Segment(f"{ask}\n{LABELS[name]}: ", "ask")

    def closes(self, name: str) -> list[Segment]:
        """What stands after the level of one number.

        Parameters
        ----------
        name : str
            Of `names`.

        Returns
        -------
        list of Segment
            Shape (0,), or (1,) with tags.
        """
        return [Segment(f"</{TAGS[name]}>", "tag")] if self.tags else []

    def segments(self, labeled: LabeledItem, tokenizer: Any = None) -> list[Segment]:
        """The completion in the pieces that are tokenized one by one.

        Parameters
        ----------
        labeled : LabeledItem
        tokenizer : transformers.PreTrainedTokenizerBase, optional

        Returns
        -------
        list of Segment
            Shape (n_segments,).

        Raises
        ------
        InputError
            A ValueError: in the decomposed mode, when the evidence is not known.
        """
        pieces = [Segment(self.answer_text(labeled.answer, tokenizer), "answer")]
        for name in self.names:
            share = labeled.p_hat if name == "confidence" else getattr(labeled, name)
            if share is None:
                raise InputError(
                    "mode 'decomposed' needs the evidence of every item with a context; "
                    f"{labeled.item.question!r} has none"
                )
            pieces += [self.asks(name), Segment(self.level_texts[self.level(share)], "level"), *self.closes(name)]
        return pieces

    def render(self, item: LabeledItem, tokenizer: Any = None) -> tuple[str, str, list[tuple[int, int]]]:
        """The training text of a labelled item.

        Parameters
        ----------
        item : LabeledItem
        tokenizer : transformers.PreTrainedTokenizerBase, optional

        Returns
        -------
        prompt, completion : str
        mask_spans : list of (int, int)
            Characters of ``completion`` that are trained: the levels, and the tags where there are any; shape (n, 2).
        """
        spans, text = [], ""
        for piece in self.segments(item, tokenizer):
            start = len(text) + (len(piece.text) - len(piece.text.lstrip("\n")) if piece.role == "tag" else 0)
            text += piece.text
            if piece.role in ("level", "tag"):
                spans.append((start, len(text)))
        return self.prompt(item.item, tokenizer), text, spans

    def parse(self, text: str) -> dict[str, Any] | None:
        """Read a completion.

        Nothing is guessed: the text must end with the stated numbers in their form and order, each once. A digit
        must be one digit; a percentage may be any whole number from 0 to 100.

        Parameters
        ----------
        text : str

        Returns
        -------
        dict or None
            ``answer`` and the confidence under each of `names`, or None where the text does not say them.
        """
        number = r"(\d)" if self.levels == "digit" else r"(\d{1,3}) ?%?"
        if self.tags:
            stated = r"\s*".join(rf"<{TAGS[name]}>\s*{number}\s*</{TAGS[name]}>" for name in self.names)
        else:
            stated = r"\s*\n".join(rf"{LABELS[name]}:[ ]*{number}" for name in self.names)
        asked = rf"(?:\n{re.escape(self.ask)})?" if self.ask else ""
        found = re.fullmatch(rf"(.*?){asked}\n{stated}\s*", text, re.DOTALL)
        if not found:
            return None
        if re.search(rf"(?m)(?<!\\){MARKER}", found.group(1)):
            return None
        values = [int(group) for group in found.groups()[1:]]
        if self.levels == "percent" and max(values) > 100:
            return None
        shares = [(v + 0.5) / 10 if self.levels == "digit" else v / 100 for v in values]
        return {"answer": unescape(found.group(1).strip()), **dict(zip(self.names, shares, strict=True))}

    def level_ids(self, tokenizer: Any) -> list[list[int]]:
        """Token ids of every level, shape (n_levels,), each of one token for digits.

        Parameters
        ----------
        tokenizer : transformers.PreTrainedTokenizerBase

        Returns
        -------
        list of list of int

        Raises
        ------
        InputError
            A ValueError: when the digits are not ten different single tokens.
        """
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in self.level_texts]
        if self.levels == "digit" and ({len(i) for i in ids} != {1} or len({i[0] for i in ids}) != 10):
            raise InputError(
                "levels='digit': this tokenizer has no single token for every digit; use levels='percent' or "
                "fallback='percent'"
            )
        return ids

    def suited(self, tokenizer: Any) -> ConfidenceFormat:
        """Return this format, or with ``fallback="percent"`` the one in percent where the digits are not single tokens.

        Parameters
        ----------
        tokenizer : transformers.PreTrainedTokenizerBase

        Returns
        -------
        ConfidenceFormat
        """
        try:
            self.level_ids(tokenizer)
        except InputError:
            if self.fallback is None:
                raise
            return ConfidenceFormat(self.mode, "percent", self.tags, template=self.template, ask=self.ask)
        return self


def escape(answer: str) -> str:
    r"""Put a backslash before what would read as a confidence.

    >>> escape("Confidence: 9")
    '\\Confidence: 9'
    """
    return ESCAPE.sub(lambda _: "\\", answer)


def unescape(answer: str) -> str:
    """Undo `escape`."""
    return UNESCAPE.sub("", answer)
