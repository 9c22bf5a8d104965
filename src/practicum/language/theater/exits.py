"""Stop thinking when a probe is sure: a stopping criterion for ``generate``, and the answer that is then forced."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import StoppingCriteria, StoppingCriteriaList

from practicum.datasets.questions import MCQuestion, require_questions
from practicum.language.theater.beliefs import among
from practicum.language.theater.forced import answer_distributions, option_tokens
from practicum.language.theater.traces import (
    STEP,
    Draw,
    Pieces,
    ReasoningFormat,
    Sampling,
    decoded,
    format_of,
    generate,
)
from practicum.toolbox import taps
from practicum.toolbox.errors import InputError

# Enough of the text before the newest token for any separator of steps.
TAIL = 64


class ProbeEarlyExit(StoppingCriteria):
    """Ends a chain of thought at the first step after which a probe is sure of the answer.

    Arm it with `attach`, which taps the layer, and hand it to ``generate``. It looks at a cut when the token after it
    has been drawn, for then the activations of the cut are there; that token is no part of the chain any more. In a
    batch every sequence has its own exit, and padding on the left is no part of what the probe sees.

    Parameters
    ----------
    probe : AttentionProbe
        Fitted on ``layer``. Its temperature should be fitted too, since ``tau`` is a probability.
    layer : int
    tokenizer : transformers.PreTrainedTokenizerBase
    tau : float
        In (0, 1]. At 1 it never exits.
    patience : int
        So many cuts in a row must be sure.
    min_tokens : int
        No exit before so many tokens of the chain.
    boundary : str
        Regular expression of what stands between steps.
    end_of_thinking : str or None
        From this mark on it does not look any more.
    options : sequence of sequence of str, optional
        For every sequence of the batch, the answers to which the probe's belief is restricted.

    Attributes
    ----------
    n_tokens_ : list of int or None
        For every sequence, shape (batch,): tokens of the chain before the exit; None where there was none.
    curves_ : list of list
        For every sequence its cuts: pairs of tokens and probabilities, shape (K,).

    Raises
    ------
    InputError
        A ValueError: for ``tau`` outside (0, 1], ``patience`` below 1, a ``boundary`` that cannot be read, and for a
        ``generate`` without `attach` or with several beams.

    References
    ----------
    Boppana et al., "Reasoning Theater", arXiv:2603.05488.

    Examples
    --------
    >>> from practicum.language.theater import (
    ...     AttentionProbe, collect_traces, load_reasoner, reasoner_questions, record)
    >>> reasoner = load_reasoner()
    >>> traces = collect_traces(*reasoner, reasoner_questions("recall", 40), max_new_tokens=48, format=reasoner.format)
    >>> record(reasoner.model, traces, layers=[3])
    >>> probe = AttentionProbe(lr=1e-2, epochs=5, random_state=0).fit(
    ...     [t.hidden[3] for t in traces], [t.answer for t in traces], start=[t.start for t in traces])
    >>> early = ProbeEarlyExit(probe, 3, reasoner.tokenizer, tau=1e-6)
    >>> inputs = torch.tensor([traces[0].prompt_ids])
    >>> with early.attach(reasoner.model):
    ...     output = reasoner.model.generate(inputs, max_new_tokens=40, stopping_criteria=[early])
    >>> early.n_tokens_
    [0]
    """

    def __init__(
        self,
        probe: Any,
        layer: int,
        tokenizer: Any,
        tau: float = 0.95,
        patience: int = 1,
        min_tokens: int = 0,
        boundary: str = STEP,
        end_of_thinking: str | None = "</think>",
        options: Sequence[Sequence[str]] | None = None,
    ) -> None:
        if not 0 < tau <= 1:
            raise InputError(f"tau={tau!r}: must be above 0 and at most 1")
        if patience < 1:
            raise InputError(f"patience={patience!r}: must be 1 or more")
        if min_tokens < 0:
            raise InputError(f"min_tokens={min_tokens!r}: must be 0 or more")
        try:
            re.compile(boundary)
        except re.error as error:
            raise InputError(f"boundary={boundary!r}: is no regular expression: {error}") from None
        self.probe = probe
        self.layer = layer
        self.tokenizer = tokenizer
        self.tau = tau
        self.patience = patience
        self.min_tokens = min_tokens
        self.boundary = boundary
        self.end_of_thinking = end_of_thinking
        self.options = options
        self._watched: list[_Watched] | None = None
        self._mask: torch.Tensor | None = None
        self._attached = False

    @property
    def n_tokens_(self) -> list[int | None]:
        """Tokens of the chain before the exit, shape (batch,); None where there was none."""
        return [sequence.exited for sequence in self._watched or ()]

    @property
    def curves_(self) -> list[list[tuple[int, NDArray[np.float64]]]]:
        """For every sequence its cuts, as pairs of tokens and probabilities, shape (K,)."""
        return [sequence.curve for sequence in self._watched or ()]

    @contextmanager
    def attach(self, model: Any) -> Iterator[ProbeEarlyExit]:
        """Tap the layer inside the block; the hooks are gone after it, whatever happens in it.

        Parameters
        ----------
        model : transformers.PreTrainedModel
            The one that will generate, with activations of shape (batch, n, d).

        Yields
        ------
        ProbeEarlyExit
            This one, ready for one or several calls of ``generate``.
        """
        if self._attached:
            raise InputError("attach: this exit is attached already")
        self._watched, self._mask, self._attached = None, None, True
        handle = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        try:
            with taps.Taps(model, [self.layer], on_forward=self._after_forward):
                yield self
        finally:
            handle.remove()
            self._attached = False
            self._mask = None

    def _before_forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        self._mask = mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None

    def _after_forward(self, read: dict[int, torch.Tensor]) -> None:
        hidden = read[self.layer].detach()
        batch, n, _ = hidden.shape
        if self._watched is None or (n > 1 and self._watched[0].ends):
            # A pass over a prompt, which may come in pieces, begins a new generation.
            self._watched = [_Watched(self, i) for i in range(batch)]
        if len(self._watched) != batch:
            raise InputError(f"generate: the batch has become {batch} from {len(self._watched)}; use num_beams=1")
        mask = None if self._mask is None else self._mask[:, -n:].bool()
        for i, sequence in enumerate(self._watched):
            if not sequence.done:
                rows = hidden[i] if mask is None or bool(mask[i].all()) else hidden[i][mask[i].to(hidden.device)]
                sequence.see(rows)

    def __call__(self, input_ids: torch.LongTensor, scores: Any = None, **kwargs: Any) -> torch.BoolTensor:
        """Say which sequences shall stop.

        Parameters
        ----------
        input_ids : tensor of shape (batch, n)
        scores : object
            Not read.
        **kwargs
            What else ``generate`` hands to its criteria; not read.

        Returns
        -------
        tensor of shape (batch,), bool
        """
        if not self._attached or self._watched is None:
            raise InputError("generate: arm the exit first, `with exit.attach(model): model.generate(...)`")
        if len(input_ids) != len(self._watched):
            raise InputError(f"generate: {len(input_ids)} sequences, but the layer gave {len(self._watched)}")
        newest = input_ids[:, -1].tolist()
        stop = [sequence.drawn(token) for sequence, token in zip(self._watched, newest, strict=True)]
        return torch.tensor(stop, device=input_ids.device)  # type: ignore[return-value]


class _Watched:
    """One sequence of the batch: the probe's state, the text, and whether it is over."""

    def __init__(self, early: ProbeEarlyExit, place: int) -> None:
        self.early = early
        self.stream = early.probe.stream()
        self.pieces = Pieces(early.tokenizer)
        self.options = early.options[place] if early.options is not None else None
        self.text = ""
        self.ends: list[int] = []
        self.seen = 0
        self.run = 0
        self.belief: NDArray[np.float64] | None = None
        self.curve: list[tuple[int, NDArray[np.float64]]] = []
        self.exited: int | None = None
        self.done = False

    def see(self, hidden: torch.Tensor) -> None:
        for row in hidden:
            self.belief = self.stream.update(row)
        self.seen += len(hidden)

    def drawn(self, token: int) -> bool:
        """Take the next token; the activations up to the one before it have been seen."""
        if self.done:
            return self.exited is not None
        n_tokens = len(self.ends)
        self.text += self.pieces.add(token)
        self.ends.append(len(self.text))
        mark = self.early.end_of_thinking
        # Where the model ends the chain itself there is nothing left to stop.
        self.done = mark is not None and mark in self.text[-len(mark) - TAIL :]
        if n_tokens and not self._is_boundary(n_tokens):
            return False
        probabilities = self._restricted()
        self.curve.append((n_tokens, probabilities))
        self.run = self.run + 1 if probabilities.max() >= self.early.tau else 0
        if self.done or self.early.tau == 1 or self.run < self.early.patience or n_tokens < self.early.min_tokens:
            return False
        self.exited, self.done = n_tokens, True
        return True

    def _is_boundary(self, n_tokens: int) -> bool:
        """Whether a step ends at this token, now that the next one is there: where a separator begins."""
        first = max(0, self.ends[n_tokens - 1] - TAIL)
        low, high = self.ends[n_tokens - 2] if n_tokens > 1 else 0, self.ends[n_tokens - 1]
        starts = (match.start() + first for match in re.finditer(self.early.boundary, self.text[first:]))
        return any(low < start <= high for start in starts)

    def _restricted(self) -> NDArray[np.float64]:
        belief = np.asarray(torch.as_tensor(self.belief), dtype=np.float64)
        return belief if self.options is None else among(belief, self.early.probe.classes_, self.options)


@dataclass(frozen=True)
class ExitOutput:
    """What a model said whose thinking was cut short.

    Attributes
    ----------
    text : str
        The chain, as far as it went.
    answer : str
        One of the options.
    n_cot_tokens : int
        Tokens of the chain.
    exited : bool
        Whether the probe ended it.
    belief : list
        Pairs of tokens and the probe's probabilities over the options, shape (K,), one for every cut seen.

    Examples
    --------
    >>> ExitOutput("hmm .", "v3", 2, True, []).n_cot_tokens
    2
    """

    text: str
    answer: str
    n_cot_tokens: int
    exited: bool
    belief: list[tuple[int, NDArray[np.float64]]]


def generate_with_exit(
    model: Any,
    tokenizer: Any,
    question: MCQuestion | Sequence[MCQuestion],
    early: ProbeEarlyExit,
    stub: str | None = None,
    *,
    max_new_tokens: int = 512,
    sampling: Sampling | None = None,
    format: ReasoningFormat | None = None,
    answer_from: str = "model",
    random_state: int = 0,
) -> Any:
    """Let a model think until the probe is sure, then make it answer.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase
    question : MCQuestion, or a sequence of them
        Several, shape (N,), think as one batch.
    early : ProbeEarlyExit
        Its ``options`` are set to those of the questions meanwhile.
    stub : str, optional
        As in `ForcedAnswer`; by default that of the format.
    max_new_tokens : int
        A chain that is longer is cut there, and answered from there.
    sampling : Sampling, optional
    format : ReasoningFormat, optional
        By default `format_of` the tokenizer.
    answer_from : {"model", "probe"}
        Who answers where the probe ended the chain.
    random_state : int

    Returns
    -------
    ExitOutput, or a list of them
        A model that ended its chain by itself keeps the answer it gave, if it gave one.

    Raises
    ------
    InputError
        A ValueError: for questions that are not sound, and another ``answer_from``.

    Examples
    --------
    >>> from practicum.language.theater import (
    ...     AttentionProbe, collect_traces, load_reasoner, reasoner_questions, record)
    >>> reasoner = load_reasoner()
    >>> questions = reasoner_questions("recall", 40)
    >>> traces = collect_traces(*reasoner, questions, max_new_tokens=48, format=reasoner.format)
    >>> record(reasoner.model, traces, layers=[3])
    >>> probe = AttentionProbe(lr=1e-2, epochs=5, random_state=0).fit(
    ...     [t.hidden[3] for t in traces], [t.answer for t in traces], start=[t.start for t in traces])
    >>> early = ProbeEarlyExit(probe, 3, reasoner.tokenizer, tau=1e-6)
    >>> said = generate_with_exit(*reasoner, questions[0], early, format=reasoner.format)
    >>> said.n_cot_tokens, said.answer == traces[0].answer
    (0, True)
    """
    if answer_from not in ("model", "probe"):
        raise InputError(f"answer_from={answer_from!r}: must be 'model' or 'probe'")
    single = isinstance(question, MCQuestion)
    questions = require_questions([question] if single else question)  # type: ignore[list-item]
    chosen = format or format_of(tokenizer)
    prompts = [chosen.prompt_ids(tokenizer, asked) for asked in questions]
    labels = [chosen.labels_of(asked) for asked in questions]
    before = early.options
    early.options = labels
    try:
        with early.attach(model):
            replies = generate(
                model,
                tokenizer,
                prompts,
                max_new_tokens,
                Draw(sampling or Sampling(), random_state),
                stopping_criteria=StoppingCriteriaList([early]),
            )
    finally:
        early.options = before
    chains, stated = [], []
    for reply, exited in zip(replies, early.n_tokens_, strict=True):
        text, ends = decoded(tokenizer, reply)
        end, label = chosen.split(text)
        chains.append(reply[:exited] if exited is not None else reply[: sum(stop <= end for stop in ends)])
        stated.append(label if exited is None else None)
    forced = _forced(model, tokenizer, prompts, chains, labels, chosen.stub if stub is None else stub)
    outputs = []
    for i, chain in enumerate(chains):
        exited, curve = early.n_tokens_[i] is not None, early.curves_[i]
        belief = curve[-1][1] if exited and answer_from == "probe" else forced[i]
        label = stated[i]
        answer = label if label is not None and label in labels[i] else labels[i][int(belief.argmax())]
        outputs.append(ExitOutput(decoded(tokenizer, chain)[0], answer, len(chain), exited, curve))
    return outputs[0] if single else outputs


def _forced(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    chains: Sequence[list[int]],
    labels: Sequence[Sequence[str]],
    stub: str,
) -> list[NDArray[np.float64]]:
    rows, wanted = [], []
    for prompt, chain, names in zip(prompts, chains, labels, strict=True):
        stub_ids, options = option_tokens(tokenizer, stub, names)
        rows.append([*prompt, *chain, *stub_ids])
        wanted.append(options)
    return answer_distributions(model, tokenizer, rows, wanted)
