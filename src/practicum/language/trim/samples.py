"""Instruction samples as people keep them, and which of their tokens are prompt, response or template."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from practicum.datasets.files import DataFileError, json_lines, kind_of
from practicum.toolbox.errors import InputError

Scope = Literal["prompt", "response", "all"]
SCOPES: tuple[Scope, ...] = ("prompt", "response", "all")
Part = Literal["template", "prompt", "response"]
PARTS: tuple[Part, ...] = ("template", "prompt", "response")
TEMPLATE, PROMPT, RESPONSE = range(3)
IN_SCOPE = {"prompt": (PROMPT,), "response": (RESPONSE,), "all": (PROMPT, RESPONSE)}

Format = Callable[[Mapping[str, Any]], Sequence[tuple[str, Part]]]
REMEDY = "pass format=, a function of a sample that returns [(text, 'template' | 'prompt' | 'response'), ...]"
# Stand for the contents of messages while the template is looked at; no text has these characters.
MARK = "\ue0ff{}\ue0fe"


@dataclass(frozen=True)
class TokenizedSample:
    """The tokens of one sample, shape (n_tokens,), and for each whether it is 0 template, 1 prompt or 2 response."""

    ids: tuple[int, ...]
    roles: tuple[int, ...]
    truncated: bool = False

    def in_scope(self, scope: Scope) -> list[int]:
        """Places of the tokens of a scope."""
        return [i for i, role in enumerate(self.roles) if role in IN_SCOPE[scope]]

    @property
    def trained(self) -> list[int]:
        """Places of the tokens that fine-tuning predicts: those of responses, and the one that ends each."""
        of_response = [role == RESPONSE for role in self.roles]
        ends = [False, *of_response[:-1]]
        return [i for i in range(1, len(self.ids)) if of_response[i] or ends[i]]


class SampleTokenizer:
    r"""Tokens of instruction samples, and to which part of the sample each belongs.

    By default the tokenizer's own chat template makes the text. Where its messages stand in it is found by rendering
    the same conversation with marks in their place, so that role headers, a default system prompt and whatever else the
    template writes are told from what the sample says, for any template that writes messages as they are. A template
    that changes them needs ``{% generation %}`` marks, which tell responses alone, or a ``format``.

    A token is prompt or response when all of it but surrounding space lies in that part. Special tokens belong to the
    template wherever they stand.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        A fast one.
    format : callable, optional
        ``format(sample) -> [(text, part), ...]`` in place of the chat template; parts are "template", "prompt" and
        "response".
    max_length : int
        Tokens that are kept of a sample: the first or, where these have no token of the response, the last.

    Raises
    ------
    InputError
        A ValueError that names the argument: for a tokenizer without offsets, or with neither template nor format.

    Examples
    --------
    Token ids have shape (n_tokens,).

    >>> from practicum.language.confidence.tiny import character_tokenizer
    >>> tokenizer = character_tokenizer()
    >>> tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<end>{% endfor %}"
    >>> (sample,) = SampleTokenizer(tokenizer).tokenize([{"prompt": "2+2", "response": "4"}])
    >>> tokenizer.decode(sample.ids), sample.roles
    ('u:2+2<end>a:4<end>', (0, 0, 1, 1, 1, 0, 0, 0, 2, 0))
    """

    def __init__(self, tokenizer: Any, format: Format | None = None, max_length: int = 2048) -> None:
        if max_length < 1:
            raise InputError(f"max_length={max_length}: must be at least 1")
        if format is not None and not callable(format):
            raise InputError(f"format={format!r}: must be a function of a sample")
        if not getattr(tokenizer, "is_fast", False):
            raise InputError(
                f"tokenizer={type(tokenizer).__name__}: must be a fast one, which tells where tokens stand"
            )
        if format is None and not getattr(tokenizer, "chat_template", None):
            raise InputError(f"tokenizer: has no chat template; {REMEDY}")
        self.tokenizer = tokenizer
        self.format = format
        self.max_length = max_length
        self._special = set(tokenizer.all_special_ids)
        self._pieces: dict[tuple[str, ...], list[str] | None] = {}

    def tokenize(
        self, samples: Sequence[Mapping[str, Any]], name: str = "pool", first: int = 0
    ) -> list[TokenizedSample]:
        """Tokens of some samples.

        Parameters
        ----------
        samples : sequence of mapping
            Shape (n_samples,). ``{"prompt", "response"}`` (or TRL's "completion"), as text or as lists of messages, or
            ``{"messages"}``.
        name : str
            What the samples are called in an error.
        first : int
            Index of the first sample in an error.

        Returns
        -------
        list of TokenizedSample
            Shape (n_samples,).

        Raises
        ------
        InputError
            A ValueError that names index and field.
        """
        texts, parts = [], []
        for i, sample in enumerate(samples, start=first):
            text, part = self._text(sample, f"{name}[{i}]")
            texts.append(text)
            parts.append(part)
        if not texts:
            return []
        encoded = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        return [
            self._cut(ids, self._roles(text, part, ids, offsets))
            for text, part, ids, offsets in zip(
                texts, parts, encoded["input_ids"], encoded["offset_mapping"], strict=True
            )
        ]

    def _text(self, sample: Any, where: str) -> tuple[str, NDArray[np.uint8]]:
        """The text of a sample and the part of each character."""
        if not isinstance(sample, Mapping):
            raise InputError(f"{where}: is {kind_of(sample)}; must be a mapping with prompt and response, or messages")
        if self.format is not None:
            return _joined(_checked_pieces(self.format(sample), where))
        messages = messages_of(sample, where)
        contents = [str(message["content"]) for message in messages]
        parts: list[Part] = ["response" if message["role"] == "assistant" else "prompt" for message in messages]
        text = self._render(messages, where)
        between = self._between(messages, where)
        if between is not None:
            for told in (contents, [content.strip() for content in contents]):
                pieces: list[tuple[str, Part]] = [(between[0], "template")]
                for content, part, after in zip(told, parts, between[1:], strict=True):
                    pieces += [(content, part), (after, "template")]
                if "".join(piece for piece, _ in pieces) == text:
                    return _joined(pieces)
        return text, self._generated(messages, text, where)

    def _render(self, messages: Sequence[Mapping[str, Any]], where: str) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:  # a template raises what it likes
            raise InputError(f"{where}: the chat template refuses it: {error}") from error

    def _between(self, messages: Sequence[Mapping[str, Any]], where: str) -> list[str] | None:
        """What the template writes before, between and after the messages; None where it changes them."""
        key = tuple(str(message["role"]) for message in messages)
        if key not in self._pieces:
            marks = [MARK.format(i) for i in range(len(messages))]
            marked = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
            try:
                rest = self._render(marked, where)
            except InputError:
                rest = ""
            found: list[str] | None = []
            for mark in marks:
                before, there, rest = rest.partition(mark)
                if not there or mark in rest:
                    found = None
                    break
                found = [*(found or []), before]
            self._pieces[key] = None if found is None else [*found, rest]
        return self._pieces[key]

    def _generated(self, messages: Sequence[Mapping[str, Any]], text: str, where: str) -> NDArray[np.uint8]:
        """Parts of the characters by the template's own marks of what the assistant says."""
        if "generation" not in str(self.tokenizer.chat_template):
            raise InputError(
                f"{where}: the tokenizer's chat template changes the text of messages and has no {{% generation %}} "
                f"marks, so that the response cannot be told from the rest; {REMEDY}"
            )
        encoded = self.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        parts = np.zeros(len(text), np.uint8)
        for (start, end), said in zip(offsets, encoded["assistant_masks"], strict=True):
            if said:
                parts[start:end] = RESPONSE
        return parts

    def _roles(
        self, text: str, parts: NDArray[np.uint8], ids: Sequence[int], offsets: Sequence[tuple[int, int]]
    ) -> list[int]:
        roles = []
        for token, (start, end) in zip(ids, offsets, strict=True):
            while start < end - 1 and text[start].isspace():
                start += 1
            while start < end - 1 and text[end - 1].isspace():
                end -= 1
            part = int(parts[start]) if start < end and token not in self._special else TEMPLATE
            roles.append(part if part == TEMPLATE or bool((parts[start:end] == part).all()) else TEMPLATE)
        return roles

    def _cut(self, ids: Sequence[int], roles: Sequence[int]) -> TokenizedSample:
        n = self.max_length
        if len(ids) <= n:
            return TokenizedSample(tuple(ids), tuple(roles))
        kept = slice(0, n) if RESPONSE in roles[:n] or RESPONSE not in roles else slice(len(ids) - n, None)
        return TokenizedSample(tuple(ids[kept]), tuple(roles[kept]), truncated=True)


def messages_of(sample: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The conversation of a sample.

    >>> messages_of({"prompt": "2+2", "response": "4"}, "pool[0]")
    [{'role': 'user', 'content': '2+2'}, {'role': 'assistant', 'content': '4'}]
    """
    if "messages" in sample:
        return _checked_messages(sample["messages"], f"{where}: field 'messages'")
    answer = "completion" if "completion" in sample and "response" not in sample else "response"
    found: list[dict[str, Any]] = []
    for field, role in (("prompt", "user"), (answer, "assistant")):
        if field not in sample:
            raise InputError(f"{where}: field {field!r}: is missing; must be text or a list of messages")
        content = sample[field]
        if isinstance(content, str):
            found.append({"role": role, "content": content})
        elif isinstance(content, Sequence):
            found += _checked_messages(content, f"{where}: field {field!r}")
        else:
            raise InputError(f"{where}: field {field!r}: is {kind_of(content)}; must be text or a list of messages")
    return found


def _checked_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InputError(f"{where}: must be a list of messages with role and content, one at least")
    for i, message in enumerate(messages):
        for field in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(field), str):
                raise InputError(f"{where}: message {i}: must have {field!r}, as text")
    return [dict(message) for message in messages]


def _checked_pieces(pieces: Any, where: str) -> list[tuple[str, Part]]:
    wrong = f"{where}: format: must return [(text, part), ...] with parts {', '.join(PARTS)}; got {pieces!r}"
    try:
        found = [(text, part) for text, part in pieces]
    except (TypeError, ValueError):
        raise InputError(wrong) from None
    if not all(isinstance(text, str) and part in PARTS for text, part in found):
        raise InputError(wrong)
    return found


def _joined(pieces: Sequence[tuple[str, Part]]) -> tuple[str, NDArray[np.uint8]]:
    parts = [np.full(len(text), PARTS.index(part), np.uint8) for text, part in pieces]
    return "".join(text for text, _ in pieces), np.concatenate([*parts, np.zeros(0, np.uint8)])


def text_of(sample: Any, where: str, scope: Scope = "all") -> str:
    r"""What a sample says, as plain text without a template.

    >>> text_of({"prompt": "2+2", "response": "4"}, "pool[0]")
    '2+2\n4'
    """
    if not isinstance(sample, Mapping):
        raise InputError(f"{where}: is {kind_of(sample)}; must be a mapping with prompt and response, or messages")
    said = [
        message["content"]
        for message in messages_of(sample, where)
        if scope == "all" or (message["role"] == "assistant") == (scope == "response")
    ]
    return "\n".join(said)


def target_of(target: Iterable[Any]) -> tuple[list[Mapping[str, Any]], list[str], list[int]]:
    """Target samples, the names of their tasks, and the number of each one's task.

    >>> target_of([{"task": "sum"}, {"task": "capital"}, {"task": "sum"}])[1:]
    (['sum', 'capital'], [0, 1, 0])
    """
    samples = [sample for _, block in in_blocks(target, 1024, "target") for sample in block]
    if not samples:
        raise InputError("target: has no samples; give 5 to 10 of the task")
    named = [sample.get("task") if isinstance(sample, Mapping) else None for sample in samples]
    if all(task is None for task in named):
        return samples, ["target"], [0] * len(samples)
    if None in named:
        raise InputError(f"target[{named.index(None)}]: field 'task': is missing; others have one")
    tasks = list(dict.fromkeys(map(str, named)))
    return samples, tasks, [tasks.index(str(task)) for task in named]


def in_blocks(pool: Iterable[Any], size: int, name: str = "pool") -> Iterator[tuple[int, list[Any]]]:
    """Samples in blocks, each with the index of its first.

    >>> list(in_blocks("abcde", 2))
    [(0, ['a', 'b']), (2, ['c', 'd']), (4, ['e'])]
    """
    if isinstance(pool, Mapping) or not isinstance(pool, Iterable):
        raise InputError(
            f"{name}: is {type(pool).__name__}; must be samples one after the other: a list, a datasets.Dataset or any "
            "iterable of them; of a DatasetDict, give one split"
        )
    samples, first = iter(pool), 0
    while block := list(itertools.islice(samples, size)):
        yield first, block
        first += len(block)


def take(pool: Any, indices: Sequence[int] | NDArray[np.int64]) -> Any:
    """The chosen samples, in the pool's own kind.

    Parameters
    ----------
    pool : sequence, datasets.Dataset or iterable
        What the indices were selected from. A stream is read once more, and no more of it is held than what is chosen.
    indices : sequence of int
        Shape (n,), as `select` gives them.

    Returns
    -------
    datasets.Dataset or list
        The samples in the order of ``indices``: a Dataset of a Dataset, else a list.

    Raises
    ------
    InputError
        A ValueError: for an index that the pool has not.

    Examples
    --------
    >>> take([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}], [2, 0])
    [{'prompt': 'c'}, {'prompt': 'a'}]
    """
    wanted = [int(i) for i in indices]
    size = len(pool) if hasattr(pool, "__len__") else None
    if wanted and (min(wanted) < 0 or (size is not None and max(wanted) >= size)):
        raise InputError(f"indices: must be from 0 to {'the last of the pool' if size is None else size - 1}")
    if hasattr(pool, "select") and hasattr(pool, "__getitem__"):
        return pool.select(wanted)
    if isinstance(pool, Sequence):
        return [pool[i] for i in wanted]
    places, found = set(wanted), {}
    for i, sample in enumerate(pool):
        if i in places:
            found[i] = sample
    if len(found) < len(places):
        raise InputError(f"indices: the pool has no sample {min(places - found.keys())}")
    return [found[i] for i in wanted]


class SampleFile:
    r"""Samples of a JSON Lines file, read anew each time that they are gone through.

    Parameters
    ----------
    path : pathlib.Path or str
        One object a line: prompt and response (or completion), or messages, and perhaps task.

    Raises
    ------
    DataFileError
        A ValueError that names line and field, when the file is gone through; at once when it is not there.

    Examples
    --------
    Any number of samples, shape (n,), without holding them:

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "pool.jsonl")
    ...     _ = file.write_text('{"prompt": "2+2", "response": "4"}\n')
    ...     list(SampleFile(file))
    [{'prompt': '2+2', 'response': '4'}]
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise DataFileError(self.path, "there is no such file")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Go through the samples."""
        empty = True
        for line, sample in json_lines(self.path):
            empty = False
            if not isinstance(sample, dict):
                reason = f"is {kind_of(sample)}; must be an object with prompt and response, or messages"
                raise DataFileError(self.path, reason, line=line)
            try:
                messages_of(sample, "sample")
            except InputError as error:
                field, _, reason = str(error).removeprefix("sample: field ").partition(": ")
                raise DataFileError(self.path, reason, line=line, field=field.strip("'")) from None
            yield sample
        if empty:
            raise DataFileError(self.path, "is empty; must have one JSON object a line")
