"""Chains of thought with the answers they end on: how a model is asked, and what of its reply is chain and answer."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import LogitsProcessor, LogitsProcessorList, TopPLogitsWarper

from practicum.datasets.files import DataFileError
from practicum.datasets.questions import MCQuestion, require_questions
from practicum.toolbox import taps
from practicum.toolbox.errors import InputError

STEP = r"(?<=[.!?])\s+|\n+"
# As many tokens before the newest are decoded with it as may share a character or a word with it.
WINDOW = 6


@dataclass(frozen=True)
class ReasoningFormat:
    r"""How a model is asked, and how its chain and its answer are told apart.

    Parameters
    ----------
    prompt : str
        What the user says, with ``{question}`` and ``{options}``. It goes through the tokenizer's chat template where
        there is one.
    end_of_thinking : str or None
        What the model writes at the end of its chain. None for a model without such a mark: its chain ends where
        ``answer`` is found.
    stub : str
        What is put after a chain that is cut short so that the next token names the answer.
    answer : str
        Regular expression that finds the stated answer, a label being its first group. After ``end_of_thinking`` the
        last match counts; without that mark, the first.
    labels : {"letters", "choices"}
        Whether options are named A, B, ... or by their own text.
    step : str
        Regular expression of what stands between two steps of a chain (our default: ends of sentences and
        paragraphs; the authors' viewer splits at ``".\n\n"``).

    Raises
    ------
    InputError
        A ValueError: for a ``prompt`` without its two places, for expressions that cannot be read, and for an
        ``answer`` without a group.

    Examples
    --------
    >>> question = MCQuestion("Which is a fruit?", ("fig", "rose"), answer=0)
    >>> print(ReasoningFormat(prompt="{question}\n{options}").words(question))
    Which is a fruit?
    A. fig
    B. rose
    >>> ReasoningFormat().labels_of(question)
    ('A', 'B')
    """

    prompt: str = (
        "{question}\n\n{options}\n\nThink step by step, then say which is right: 'The final answer is' and its letter."
    )
    end_of_thinking: str | None = "</think>"
    stub: str = "\n</think>\n\nThe final answer is "
    answer: str = r"(?i:answer\W+(?:is\W+)?|\\boxed\{)(?:\\text\{)?\(?([A-Z])\b"
    labels: Literal["letters", "choices"] = "letters"
    step: str = STEP

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for place in ("{question}", "{options}"):
            if place not in self.prompt:
                raise InputError(f"prompt={self.prompt!r}: must have a place {place}")
        for name in ("answer", "step"):
            try:
                groups = re.compile(getattr(self, name)).groups
            except re.error as error:
                raise InputError(f"{name}={getattr(self, name)!r}: is no regular expression: {error}") from None
            if name == "answer" and groups != 1:
                raise InputError(f"answer={self.answer!r}: must have one group, the label; has {groups}")
        if self.labels not in ("letters", "choices"):
            raise InputError(f"labels={self.labels!r}: must be 'letters' or 'choices'")

    def labels_of(self, question: MCQuestion) -> tuple[str, ...]:
        """Name the options of a question.

        Parameters
        ----------
        question : MCQuestion

        Returns
        -------
        tuple of str
            Shape (K,).
        """
        if self.labels == "choices":
            return tuple(question.choices)
        if len(question.choices) > len(string.ascii_uppercase):
            raise InputError(f"question {question.question!r}: has {len(question.choices)} options; must be 26 at most")
        return tuple(string.ascii_uppercase[: len(question.choices)])

    def words(self, question: MCQuestion) -> str:
        """Write what the user says.

        Parameters
        ----------
        question : MCQuestion

        Returns
        -------
        str
        """
        if self.labels == "choices":
            options = " ".join(question.choices)
        else:
            labels = self.labels_of(question)
            options = "\n".join(f"{label}. {choice}" for label, choice in zip(labels, question.choices, strict=True))
        return self.prompt.replace("{question}", question.question).replace("{options}", options)

    def prompt_ids(self, tokenizer: Any, question: MCQuestion) -> list[int]:
        """Encode the prompt.

        Parameters
        ----------
        tokenizer : transformers.PreTrainedTokenizerBase
        question : MCQuestion

        Returns
        -------
        list of int
            Shape (n,).
        """
        words = self.words(question)
        if getattr(tokenizer, "chat_template", None):
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": words}], tokenize=False, add_generation_prompt=True
            )
            return list(tokenizer.encode(text, add_special_tokens=False))
        return list(tokenizer.encode(words))

    def split(self, text: str) -> tuple[int, str | None]:
        """Find where the chain ends in what a model wrote, and which answer it stated.

        Parameters
        ----------
        text : str

        Returns
        -------
        end : int
            Characters of the chain; all of them where it has not ended.
        label : str or None
            None where no answer is stated after the chain.
        """
        if self.end_of_thinking is None:
            match = re.search(self.answer, text)
            return (len(text), None) if match is None else (_sentence_start(text, match.start()), match.group(1))
        end = text.find(self.end_of_thinking)
        if end < 0:
            return len(text), None
        stated = re.findall(self.answer, text[end + len(self.end_of_thinking) :])
        return end, stated[-1] if stated else None


# For chat models that were not trained to think between marks.
PLAIN = ReasoningFormat(end_of_thinking=None, stub="\nThe final answer is ")


def format_of(tokenizer: Any) -> ReasoningFormat:
    """Choose the format by whether the tokenizer knows the mark at the end of thinking.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase

    Returns
    -------
    ReasoningFormat
        The default one where ``</think>`` is one token or stands in the chat template, else one without a mark.
        Options have K labels, shape (K,).

    Examples
    --------
    >>> from practicum.language.theater import reasoner_tokenizer
    >>> format_of(reasoner_tokenizer()).end_of_thinking
    '</think>'
    """
    template = getattr(tokenizer, "chat_template", None)
    known = "</think>" in tokenizer.get_vocab() or (isinstance(template, str) and "</think>" in template)
    return ReasoningFormat() if known else PLAIN


def _sentence_start(text: str, place: int) -> int:
    starts = [match.end() for match in re.finditer(STEP, text[:place])]
    return starts[-1] if starts else 0


@dataclass
class Trace:
    """A question, the chain of thought a model wrote, and the answer it then gave.

    Attributes
    ----------
    question : str
    options : tuple of str
        Shape (K,). What the model names them: letters, or the options themselves.
    prompt_ids, cot_ids : list of int
        Tokens of the prompt, shape (n,), and of the chain, shape (T,).
    boundaries : list of int
        Shape (S,). Tokens of the chain at the end of every step, the last being T; empty for an empty chain.
    answer : str
        The model's own, one of ``options``.
    gold : str or None
        The right one.
    text : str
        The chain.
    ends : list of int
        Shape (S,). Characters of ``text`` at every boundary.
    choices : tuple of str
        Shape (K,). What the options say.
    group : str or None
    hidden : dict of int to torch.Tensor
        Layer to activations of prompt and chain, shape (n + T, d), float16; filled by `record`.

    Examples
    --------
    >>> trace = Trace("2 + 2?", ("A", "B"), [5, 6], [7, 8, 9], [1, 3], "A", "A", "Hm. Four.", [3, 9])
    >>> trace.cuts, trace.prefixes, trace.start
    ([0, 1, 3], ['', 'Hm.', 'Hm. Four.'], 2)
    """

    question: str
    options: tuple[str, ...]
    prompt_ids: list[int]
    cot_ids: list[int]
    boundaries: list[int]
    answer: str
    gold: str | None
    text: str
    ends: list[int]
    choices: tuple[str, ...] = ()
    group: str | None = None
    hidden: dict[int, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Where nothing else is said, the options say what they are called."""
        self.choices = self.choices or self.options

    @property
    def cuts(self) -> list[int]:
        """Where the chain may be cut, in tokens, shape (S + 1,): at the question alone (0) and at every boundary."""
        return [0, *self.boundaries]

    @property
    def prefixes(self) -> list[str]:
        """The chain up to every cut, shape (S + 1,)."""
        return ["", *(self.text[:end] for end in self.ends)]

    @property
    def start(self) -> int:
        """Tokens of the prompt, n."""
        return len(self.prompt_ids)

    @property
    def key(self) -> str:
        """What tells the question from others, for splits and for the bootstrap: its text, whatever the options."""
        return self.question


class Traces(list[Trace]):
    """A list of N traces that also says how many were left out.

    Parameters
    ----------
    traces : iterable of Trace
        Shape (N,).
    n_truncated : int
        Left out because no answer was given within the tokens allowed.
    n_unanswered : int
        Left out because the model ended without an answer, or on one that is not among the options.

    Examples
    --------
    >>> traces = Traces([], n_truncated=2, n_unanswered=1)
    >>> traces.n_dropped_
    3
    """

    def __init__(self, traces: Sequence[Trace] = (), n_truncated: int = 0, n_unanswered: int = 0) -> None:
        super().__init__(traces)
        self.n_truncated = n_truncated
        self.n_unanswered = n_unanswered

    @property
    def n_dropped_(self) -> int:
        """All that were left out."""
        return self.n_truncated + self.n_unanswered


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Parameters
    ----------
    temperature : float
        0 takes the most likely token.
    top_p : float
        Of the next tokens, shape (vocabulary,), those stay that make up this share. The defaults are the authors'.

    Examples
    --------
    >>> Sampling(temperature=1.0, top_p=1.0)
    Sampling(temperature=1.0, top_p=1.0)
    """

    temperature: float = 0.6
    top_p: float = 0.9

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn from."""
        if not self.temperature >= 0:
            raise InputError(f"temperature={self.temperature!r}: must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p!r}: must be above 0 and at most 1")


class Draw(LogitsProcessor):
    """Draws tokens from a generator of its own, where ``generate`` would draw from the global one.

    To be used with ``do_sample=False``: the largest of scores / temperature + Gumbel noise is a draw from the softmax.

    Parameters
    ----------
    sampling : Sampling
    random_state : int

    Examples
    --------
    >>> scores = torch.zeros(1, 5)
    >>> first, second = (Draw(Sampling(1.0, 1.0), 0)(None, scores) for _ in range(2))
    >>> first.shape, torch.equal(first, second)
    (torch.Size([1, 5]), True)
    """

    def __init__(self, sampling: Sampling, random_state: int) -> None:
        self.sampling = sampling
        self.generator = torch.Generator().manual_seed(random_state)
        self.warper = TopPLogitsWarper(sampling.top_p) if sampling.top_p < 1 else None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Make the token that is drawn the most likely one.

        Parameters
        ----------
        input_ids : tensor of shape (batch, n)
        scores : tensor of shape (batch, vocabulary)

        Returns
        -------
        tensor of shape (batch, vocabulary)
        """
        if self.sampling.temperature == 0:
            return scores
        warm = scores.float() / self.sampling.temperature
        if self.warper is not None:
            warm = self.warper(input_ids, warm)
        uniform = torch.rand(warm.shape, generator=self.generator, dtype=torch.float64)
        noise = -torch.log(-torch.log(uniform.clamp(1e-300, 1 - 1e-16)))
        return warm + noise.to(warm)


def collect_traces(
    model: Any,
    tokenizer: Any,
    questions: Sequence[MCQuestion],
    *,
    max_new_tokens: int = 512,
    sampling: Sampling | None = None,
    format: ReasoningFormat | None = None,
    batch_size: int = 32,
    random_state: int = 0,
) -> Traces:
    """Let a model think about questions, through its own ``generate``.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model in inference mode.
    tokenizer : transformers.PreTrainedTokenizerBase
    questions : sequence of MCQuestion
        Shape (N,).
    max_new_tokens : int
        For chain and answer together.
    sampling : Sampling, optional
    format : ReasoningFormat, optional
        By default `format_of` the tokenizer.
    batch_size : int
    random_state : int

    Returns
    -------
    Traces
        In the order of the questions, without those that gave no answer, which are counted.

    Raises
    ------
    InputError
        A ValueError: for questions that are not sound, sizes below 1, and where no question got an answer.

    References
    ----------
    Boppana et al., "Reasoning Theater", arXiv:2603.05488.

    Examples
    --------
    >>> from practicum.language.theater import load_reasoner, reasoner_questions
    >>> reasoner = load_reasoner()
    >>> traces = collect_traces(*reasoner, reasoner_questions("recall", 4), max_new_tokens=48, format=reasoner.format)
    >>> len(traces), traces.n_dropped_, traces[0].text.split()[-1]
    (4, 0, '.')
    """
    listed = require_questions(questions)
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise InputError(f"{name}={value!r}: must be 1 or more")
    chosen = format or format_of(tokenizer)
    draw = Draw(sampling or Sampling(), random_state)
    prompts = [chosen.prompt_ids(tokenizer, question) for question in listed]
    order = sorted(range(len(listed)), key=lambda i: len(prompts[i]))
    written: dict[int, list[int]] = {}
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        replies = generate(model, tokenizer, [prompts[i] for i in batch], max_new_tokens, draw)
        written.update(zip(batch, replies, strict=True))
    traces, n_truncated, n_unanswered = [], 0, 0
    for i, question in enumerate(listed):
        trace = _trace(tokenizer, question, prompts[i], written[i], chosen)
        if trace is not None:
            traces.append(trace)
        elif len(written[i]) >= max_new_tokens:
            n_truncated += 1
        else:
            n_unanswered += 1
    if not traces:
        raise InputError(
            f"questions: none of {len(listed)} got an answer: {n_truncated} chains were cut at "
            f"max_new_tokens={max_new_tokens}, {n_unanswered} ended without one of the options"
        )
    return Traces(traces, n_truncated, n_unanswered)


@torch.no_grad()
def generate(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, draw: Draw, **options: Any
) -> list[list[int]]:
    """Continue prompts of any lengths, padded on the left; tokens from the end of the text on are cut off.

    Parameters
    ----------
    model, tokenizer
    prompts : sequence of sequence of int
        Shape (batch, n), n differing.
    max_new_tokens : int
    draw : Draw
    **options
        For the model's ``generate``.

    Returns
    -------
    list of list of int
        Shape (batch, T), T differing.
    """
    input_ids, attention_mask = left_padded(prompts, pad_token(tokenizer), model.device)
    ended = {pad_token(tokenizer)} if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    stated = model.generation_config.eos_token_id
    ended |= set(stated if isinstance(stated, list) else [] if stated is None else [stated])
    output = model.generate(
        input_ids=input_ids,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=pad_token(tokenizer),
        logits_processor=LogitsProcessorList([draw]),
        **options,
    )
    return [_until(row, ended) for row in output[:, input_ids.shape[1] :].tolist()]


def _until(row: list[int], ended: set[int]) -> list[int]:
    for i, token in enumerate(row):
        if token in ended:
            return row[:i]
    return row


def pad_token(tokenizer: Any) -> int:
    """The token that fills up a batch; it is masked, so any will do where the tokenizer names none."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def left_padded(rows: Sequence[Sequence[int]], pad: int, device: Any = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Put rows into one tensor, padded on the left.

    Returns
    -------
    input_ids, attention_mask : tensor of shape (batch, n), int64
    """
    n = max(len(row) for row in rows)
    input_ids = torch.tensor([[pad] * (n - len(row)) + list(row) for row in rows])
    attention_mask = torch.tensor([[0] * (n - len(row)) + [1] * len(row) for row in rows])
    return input_ids.to(device), attention_mask.to(device)


def _trace(
    tokenizer: Any, question: MCQuestion, prompt_ids: list[int], reply: list[int], format: ReasoningFormat
) -> Trace | None:
    text, ends = decoded(tokenizer, reply)
    end, label = format.split(text)
    options = format.labels_of(question)
    if label is None or label not in options:
        return None
    n_tokens = sum(stop <= end for stop in ends)
    return _cut_up(
        text[: ends[n_tokens - 1]] if n_tokens else "",
        ends[:n_tokens],
        format.step,
        question=question.question,
        options=options,
        prompt_ids=prompt_ids,
        cot_ids=reply[:n_tokens],
        answer=label,
        gold=None if question.answer is None else options[question.answer],
        choices=tuple(question.choices),
        group=question.group,
    )


def _cut_up(text: str, ends: list[int], step: str, **fields: Any) -> Trace:
    boundaries = step_boundaries(text, ends, step)
    return Trace(text=text, boundaries=boundaries, ends=[ends[t - 1] for t in boundaries], **fields)


def trace_of(
    tokenizer: Any,
    *,
    question: str,
    options: Sequence[str],
    prompt_ids: Sequence[int],
    cot_ids: Sequence[int],
    answer: str,
    gold: str | None = None,
    choices: Sequence[str] = (),
    group: str | None = None,
    step: str = STEP,
) -> Trace:
    """Make a trace of a chain that was written somewhere else.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    question : str
    options : sequence of str
        Shape (K,).
    prompt_ids, cot_ids : sequence of int
        Shapes (n,) and (T,).
    answer : str
        The model's own.
    gold, choices, group
        As in `Trace`.
    step : str
        As in `ReasoningFormat`.

    Returns
    -------
    Trace

    Raises
    ------
    InputError
        A ValueError: for fewer than two options, an answer that is none of them, an empty prompt.

    Examples
    --------
    >>> from practicum.language.theater import reasoner_tokenizer
    >>> tokenizer = reasoner_tokenizer()
    >>> ids = tokenizer.encode("hmm . so v3 .")
    >>> options = ("v3", "v4")
    >>> trace = trace_of(tokenizer, question="?", options=options, prompt_ids=[1], cot_ids=ids, answer="v3")
    >>> trace.boundaries, trace.prefixes
    ([2, 5], ['', 'hmm .', 'hmm . so v3 .'])
    """
    if len(options) < 2:
        raise InputError(f"options={options!r}: must be two or more")
    for name, label in (("answer", answer), ("gold", gold)):
        if label not in options and not (name == "gold" and label is None):
            raise InputError(f"{name}={label!r}: must be one of the options {', '.join(options)}")
    if len(prompt_ids) == 0:
        raise InputError("prompt_ids: is empty; must have a token at least")
    return _cut_up(
        *decoded(tokenizer, list(cot_ids)),
        step,
        question=question,
        options=tuple(options),
        prompt_ids=list(prompt_ids),
        cot_ids=list(cot_ids),
        answer=answer,
        gold=gold,
        choices=tuple(choices),
        group=group,
    )


def step_boundaries(text: str, ends: Sequence[int], step: str = STEP) -> list[int]:
    """Return the tokens at the end of every step, shape (S,): before each separator, and at the very end.

    Examples
    --------
    >>> step_boundaries("No. Yes.", [2, 3, 7, 8])
    [2, 4]
    """
    places = {len(ends)} if ends else set()
    token = 0
    for match in re.finditer(step, text):
        while token < len(ends) and ends[token] < match.start():
            token += 1
        if match.start() > 0 and token < len(ends):
            places.add(token + 1)
    return sorted(places)


def decoded(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[int]]:
    """Decode tokens one by one, so that the place of each in the text is known.

    Returns
    -------
    text : str
    ends : list of int
        Shape (T,). Characters up to and with each token. A token that is only part of a character ends where the
        one before it does.
    """
    pieces, ends, length = [], [], 0
    for piece in Pieces(tokenizer).read(ids):
        pieces.append(piece)
        length += len(piece)
        ends.append(length)
    return "".join(pieces), ends


class Pieces:
    """What every further token adds to the text, as it comes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.before = ""

    def add(self, token: int) -> str:
        """Return the characters that the token adds; none while it is only part of one."""
        self.ids.append(int(token))
        after = self._decode(self.ids)
        if after.endswith("\ufffd"):
            return ""
        piece = after[len(self.before) :]
        self.before = after
        if len(self.ids) >= 2 * WINDOW:
            self.ids = self.ids[-WINDOW:]
            self.before = self._decode(self.ids)
        return piece

    def read(self, ids: Sequence[int]) -> Iterator[str]:
        """Add tokens one by one."""
        for token in ids:
            yield self.add(token)

    def _decode(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)


def record(
    model: Any,
    traces: Sequence[Trace],
    layers: Sequence[int],
    *,
    batch_size: int = 16,
    store: Path | None = None,
) -> None:
    """Read the residual stream of every trace, at every token of prompt and chain, into ``trace.hidden[layer]``.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    traces : sequence of Trace
        Shape (N,).
    layers : sequence of int
        After which blocks: 1 to the number of blocks; 0 for the embeddings.
    batch_size : int
    store : pathlib.Path, optional
        A folder; the activations are then kept there, memory-mapped, and not in RAM. A chain of 2,000 tokens has
        16 MB a layer at width 4096.

    Raises
    ------
    InputError
        A ValueError: for no traces, layers that are not there, and activations that are not finite, by layer, trace
        (prompt) and position.

    Examples
    --------
    >>> from practicum.language.theater import load_reasoner, reasoner_questions
    >>> reasoner = load_reasoner()
    >>> traces = collect_traces(*reasoner, reasoner_questions("recall", 2), max_new_tokens=48, format=reasoner.format)
    >>> record(reasoner.model, traces, layers=[3])
    >>> n = len(traces[0].prompt_ids) + len(traces[0].cot_ids)
    >>> traces[0].hidden[3].shape == (n, 64)
    True
    """
    if not traces:
        raise InputError("traces: is empty; must have one at least")
    rows = [[*trace.prompt_ids, *trace.cot_ids] for trace in traces]
    read = taps.record(model, rows, list(layers), positions="all", batch_size=batch_size, store=store)
    for layer in layers:
        for trace, hidden in zip(traces, read[layer], strict=True):
            trace.hidden[layer] = torch.as_tensor(hidden)


def write_traces(path: Path | str, traces: Sequence[Trace]) -> None:
    """Write traces as a file with one JSON object a line, without their activations.

    Parameters
    ----------
    path : pathlib.Path or str
    traces : sequence of Trace
        Shape (N,).

    Examples
    --------
    >>> import tempfile
    >>> trace = Trace("2 + 2?", ("A", "B"), [5, 6], [7, 8, 9], [1, 3], "A", "A", "Hm. Four.", [3, 9])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_traces(Path(folder, "traces.jsonl"), [trace])
    ...     read_traces(Path(folder, "traces.jsonl")) == [trace]
    True
    """
    fields = [name for name in Trace.__dataclass_fields__ if name != "hidden"]
    lines = [json.dumps({name: getattr(trace, name) for name in fields}, ensure_ascii=False) for trace in traces]
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_traces(path: Path | str) -> Traces:
    """Read traces from a file with one JSON object a line, with the fields of `Trace`.

    Parameters
    ----------
    path : pathlib.Path or str

    Returns
    -------
    Traces
        Shape (N,), at least one.

    Raises
    ------
    DataFileError
        A ValueError naming line and field.

    Examples
    --------
    >>> read_traces("nowhere.jsonl")
    Traceback (most recent call last):
    practicum.datasets.files.DataFileError: nowhere.jsonl: there is no such file
    """
    path = Path(path)
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataFileError(path, "there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataFileError(path, f"cannot be read: {error}") from error
    traces = [_parsed(path, i, line) for i, line in enumerate(content.splitlines(), 1) if line.strip()]
    if not traces:
        raise DataFileError(path, "is empty; must have one JSON object a line")
    return Traces(traces)


def _parsed(path: Path, line: int, text: str) -> Trace:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataFileError(path, f"is not JSON: {error}", line=line) from None
    if not isinstance(found, dict):
        raise DataFileError(path, "must be an object with the fields of a trace", line=line)

    def taken(name: str, kind: str) -> Any:
        value = found.get(name, ...)
        if value is ...:
            raise DataFileError(path, f"is missing; must be {kind}", line=line, field=name)
        right = {
            "a text": lambda: isinstance(value, str) and (value != "" or name == "text"),
            "a text or null": lambda: value is None or isinstance(value, str),
            "a list of texts": lambda: isinstance(value, list) and all(isinstance(v, str) for v in value),
            "a list of whole numbers from 0": lambda: (
                isinstance(value, list)
                and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)
            ),
        }[kind]
        if not right():
            raise DataFileError(path, f"is {str(value)[:40]!r}; must be {kind}", line=line, field=name)
        return value

    numbers = "a list of whole numbers from 0"
    trace = Trace(
        question=taken("question", "a text"),
        options=tuple(taken("options", "a list of texts")),
        prompt_ids=taken("prompt_ids", numbers),
        cot_ids=taken("cot_ids", numbers),
        boundaries=taken("boundaries", numbers),
        answer=taken("answer", "a text"),
        gold=taken("gold", "a text or null") if "gold" in found else None,
        text=taken("text", "a text"),
        ends=taken("ends", numbers),
        choices=tuple(taken("choices", "a list of texts")) if "choices" in found else (),
        group=taken("group", "a text or null") if "group" in found else None,
    )
    for name, fault in _faults(trace):
        raise DataFileError(path, fault, line=line, field=name)
    return trace


def _faults(trace: Trace) -> Iterator[tuple[str, str]]:
    n_tokens = len(trace.cot_ids)
    if len(set(trace.options)) < 2 or len(set(trace.options)) < len(trace.options):
        yield "options", "must be two or more that differ"
    if len(trace.choices) != len(trace.options):
        yield "choices", f"has {len(trace.choices)} texts; must have {len(trace.options)}, as many as options"
    if not trace.prompt_ids:
        yield "prompt_ids", "is empty; must have a token at least"
    for name in ("answer", "gold"):
        label = getattr(trace, name)
        if label not in trace.options and not (name == "gold" and label is None):
            yield name, f"is {label!r}; must be one of the options {', '.join(trace.options)}"
    rising = all(a < b for a, b in zip(trace.cuts, trace.boundaries, strict=False))
    if not rising or (trace.boundaries or [0])[-1] != n_tokens:
        yield "boundaries", f"must rise from above 0 to {n_tokens}, the tokens of the chain"
    if len(trace.ends) != len(trace.boundaries) or sorted(trace.ends) != trace.ends:
        yield "ends", f"must be {len(trace.boundaries)} numbers that rise, one a boundary"
