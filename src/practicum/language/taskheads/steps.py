"""Running prompts up to their last token once, and the last token as often as it is patched.

A patch at the last token changes nothing at the tokens before it. So their keys and values are computed once, and each
patch costs the forward pass of a single token; many patches of many prompts go through the model side by side.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from practicum.toolbox.errors import InputError
from practicum.toolbox.taps import Steering, Taps, head_shape

Head = tuple[int, int]
# A step has one token a row, so that more rows fit into it than prompts into a forward pass.
STEPS_PER_PROMPT = 4


@dataclass(frozen=True)
class Edit:
    """New outputs of some heads at the last token.

    Parameters
    ----------
    heads : sequence of (layer, head)
        From 0.
    values : Tensor of shape (layers, heads, d_head) or (n_prompts, layers, heads, d_head)
        Only those of ``heads`` are read.
    scale : float
        What values are multiplied by.

    Examples
    --------
    >>> Edit([(0, 1)], torch.zeros(2, 2, 8)).scale
    1.0
    """

    heads: Sequence[Head]
    values: Tensor
    scale: float = 1.0

    def of(self, prompts: Sequence[int]) -> Edit:
        """The same for some of the prompts."""
        values = self.values if self.values.ndim == 3 else self.values[list(prompts)]
        return Edit(self.heads, values, self.scale)


class PromptBatch:
    """A few prompts, padded on the left; all their tokens but the last are computed when `step` is first called.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, in eval mode.
    rows : sequence of sequence of int
        Token ids.

    Examples
    --------
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2)).eval()
    >>> prompts = PromptBatch(model, [[5, 6, 7], [8]])
    >>> torch.allclose(prompts.step(), prompts.whole()[0], atol=1e-5)
    True
    """

    def __init__(self, model: Any, rows: Sequence[Sequence[int]]) -> None:
        self.model = model
        device = model.get_input_embeddings().weight.device
        longest = max(map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, longest - len(row) :] = torch.as_tensor(row)
            mask[i, longest - len(row) :] = 1
        self._ids, self._mask = ids.to(device), mask.to(device)
        self._positions = (self._mask.cumsum(1) - 1).clamp_min(0)
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._keep = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        # transformers calls it `cache` from 5.20 or so on, `past_key_values` before.
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._cache: Any = None

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self._ids)

    def whole(
        self, contexts: Sequence[AbstractContextManager[Any]] = (), *, surprise: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute all tokens.

        Parameters
        ----------
        contexts : sequence of context managers
            Entered meanwhile, such as `Taps` and `Steering`.
        surprise : bool
            Whether to measure how likely the prompts themselves are, which needs logits at all their tokens.

        Returns
        -------
        logits : Tensor of shape (n, vocabulary), float32
            Of the next token.
        surprise : Tensor of shape (n,), float32
            Mean negative log-probability of a prompt's tokens from the second on; NaN where it was not asked for.
        """
        with torch.no_grad(), ExitStack() as entered:
            for context in contexts:
                entered.enter_context(context)
            kept = {} if surprise else self._keep
            logits = self._run(slice(None), self._mask, 1, kept, use_cache=False).logits
            found = self._surprise(logits) if surprise else torch.full((len(self),), torch.nan)
        return logits[:, -1].float(), found

    def step(self, repeat: int = 1, contexts: Sequence[AbstractContextManager[Any]] = ()) -> Tensor:
        """Compute the last token.

        Parameters
        ----------
        repeat : int
            Copies of each prompt: row ``i * n + j`` is copy i of prompt j.
        contexts : sequence of context managers
            Entered meanwhile, such as `Taps` and `Steering`.

        Returns
        -------
        Tensor of shape (repeat * n, vocabulary), float32
            Logits of the next token.
        """
        n = self._ids.shape[1]
        with torch.no_grad():
            if self._cache is None and n > 1:
                computed = self._run(slice(0, n - 1), self._mask[:, :-1], 1, self._keep, use_cache=True)
                self._cache = getattr(computed, self._cache_name)
            # The step writes into the cache.
            cache = copy.deepcopy(self._cache)
            if repeat > 1 and cache is not None:
                cache.reorder_cache(torch.arange(len(self), device=self._ids.device).repeat(repeat))
            with ExitStack() as entered:
                for context in contexts:
                    entered.enter_context(context)
                given = {**self._keep, self._cache_name: cache}
                logits: Tensor = self._run(slice(n - 1, None), self._mask, repeat, given, use_cache=True).logits
        return logits[:, -1].float()

    def _surprise(self, logits: Tensor) -> Tensor:
        # Logits at padding say nothing of the prompt.
        real = self._mask[:, :-1].bool()
        rows = zip(logits[:, :-1], self._ids[:, 1:], strict=True)
        losses = torch.stack([nn.functional.cross_entropy(x.float(), y, reduction="none") for x, y in rows])
        return (losses.masked_fill(~real, 0).sum(1) / real.sum(1)).cpu()

    def _run(self, tokens: slice, mask: Tensor, repeat: int, given: Mapping[str, Any], *, use_cache: bool) -> Any:
        inputs: dict[str, Any] = {
            "input_ids": self._ids[:, tokens].repeat(repeat, 1),
            "attention_mask": mask.repeat(repeat, 1),
            **given,
        }
        if self._takes_positions:
            inputs["position_ids"] = self._positions[:, tokens].repeat(repeat, 1)
        return self.model(**inputs, use_cache=use_cache)


def batches(rows: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[int]]:
    """Places of the prompts of each batch: those of like length together, the longest first."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


@dataclass(frozen=True)
class Readings:
    """What a model makes of prompts.

    Attributes
    ----------
    z : Tensor of shape (n, layers, heads, d_head), float32
        Outputs of the heads at the last token.
    rank : Tensor of shape (n,), int64
        Tokens that are likelier than the answer; 0 where it is the likeliest.
    log_prob : Tensor of shape (n,), float32
        Of the answer.
    log_max : Tensor of shape (n,), float32
        Of the likeliest token.
    surprise : Tensor of shape (n,), float32
        Mean negative log-probability of the prompt's own tokens from the second on; NaN where it was not asked for.
    """

    z: Tensor
    rank: Tensor
    log_prob: Tensor
    log_max: Tensor
    surprise: Tensor

    @property
    def correct(self) -> Tensor:
        """Whether the answer is the likeliest token, (n,)."""
        return self.rank == 0

    @property
    def accuracy(self) -> float:
        """Share of prompts that are answered."""
        return float(self.correct.float().mean())

    def __getitem__(self, places: Any) -> Readings:
        """Those of some prompts."""
        parts = (self.z, self.rank, self.log_prob, self.log_max, self.surprise)
        return Readings(*(part[places] for part in parts))


def read(
    model: Any, rows: Sequence[Sequence[int]], answers: Tensor, batch_size: int, *, surprise: bool = False
) -> Readings:
    """Run prompts, and keep what heads give at the last token and how the answer fares.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    rows : sequence of sequence of int
        Token ids of n prompts.
    answers : Tensor of shape (n,), int64
        The token of each answer.
    batch_size : int
    surprise : bool
        Whether to measure that of the prompts, which needs logits at all their tokens.

    Returns
    -------
    Readings
    """
    layers, heads, width = head_shape(model)
    z = torch.empty(len(rows), layers, heads, width)
    scores = torch.empty(3, len(rows))
    surprises = torch.full((len(rows),), torch.nan)
    for places in batches(rows, batch_size):
        taps = Taps(model, range(1, layers + 1), "heads", positions="last")
        prompts = PromptBatch(model, [rows[i] for i in places])
        logits, surprises[places] = prompts.whole([taps], surprise=surprise)
        for layer in range(layers):
            z[places, layer] = taps[layer + 1].float().cpu().reshape(len(places), heads, width)
        scores[:, places] = score(logits, answers[places])
    return Readings(z, scores[0].long(), scores[1], scores[2], surprises)


def score(logits: Tensor, answers: Tensor) -> Tensor:
    """Rank and log-probability of each answer, and the largest log-probability, (3, n)."""
    log_probs = logits.log_softmax(1)
    of_answer = log_probs.gather(1, answers.to(logits.device)[:, None])
    rank = (log_probs > of_answer).sum(1)
    return torch.stack([rank.float(), of_answer[:, 0], log_probs.amax(1)]).cpu()


def prompt_batches(
    model: Any, rows: Sequence[Sequence[int]], batch_size: int
) -> Iterator[tuple[list[int], PromptBatch]]:
    """The prompts in batches, with the places of each."""
    for places in batches(rows, batch_size):
        yield places, PromptBatch(model, [rows[i] for i in places])


def run_edits(
    model: Any,
    batched: Iterable[tuple[list[int], PromptBatch]],
    answers: Tensor,
    edits: Sequence[Edit],
    batch_size: int,
) -> Tensor:
    """Run prompts under every edit.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    batched : iterable of (places, PromptBatch)
        The prompts, as `prompt_batches` gives them.
    answers : Tensor of shape (n,), int64
    edits : sequence of Edit
    batch_size : int
        A pass over last tokens has up to four times as many rows.

    Returns
    -------
    Tensor of shape (2, n_edits, n)
        Ranks and log-probabilities of the answers.
    """
    out = torch.empty(2, len(edits), len(answers))
    for places, prompts in batched:
        at_once = max(1, STEPS_PER_PROMPT * batch_size // len(places))
        for start in range(0, len(edits), at_once):
            some = [edit.of(places) for edit in edits[start : start + at_once]]
            logits = prompts.step(len(some), [steering(model, some, len(places))])
            found = score(logits, answers[places].repeat(len(some)))[:2]
            out[:, start : start + len(some), places] = found.reshape(2, len(some), len(places))
    return out


def steering(model: Any, edits: Sequence[Edit], n: int) -> Steering | ExitStack:
    """What writes edit i into the rows ``i * n`` to ``i * n + n - 1`` of a step."""
    _, n_heads, width = head_shape(model)
    by_layer: dict[int, list[tuple[int, list[int], Tensor]]] = {}
    for i, edit in enumerate(edits):
        for layer in sorted({layer for layer, _ in edit.heads}):
            heads = sorted({head for l, head in edit.heads if l == layer})
            values = edit.scale * edit.values[..., layer, heads, :]
            by_layer.setdefault(layer, []).append((i, heads, values))

    def writer(changes: list[tuple[int, list[int], Tensor]]) -> Callable[[Tensor], Tensor]:
        def write(hidden: Tensor) -> Tensor:
            by_head = hidden.clone().reshape(len(edits), n, n_heads, width)
            for i, heads, values in changes:
                by_head[i, :, heads] = values.to(hidden.device, hidden.dtype)
            return by_head.reshape(hidden.shape)

        return write

    functions = {layer + 1: writer(changes) for layer, changes in by_layer.items()}
    return Steering(model, functions, "heads", positions="last") if functions else ExitStack()


def token_rows(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of prompts, one token at least each."""
    if isinstance(prompts, str) or not len(prompts):
        raise InputError(f"prompts={prompts!r:.60}: must be a list of prompts, one at least")
    rows = [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    for i, row in enumerate(rows):
        if not row:
            raise InputError(f"prompts[{i}]={prompts[i]!r:.60}: has no token")
    return rows


def require_eval(model: Any) -> None:
    """Raise for a model in training mode: dropout would change what heads give."""
    if getattr(model, "training", False):
        raise InputError("model: is in training mode; call model.eval() first")
