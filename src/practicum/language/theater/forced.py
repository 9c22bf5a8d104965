"""Early forced answering: what a model would answer if its chain of thought ended here."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from practicum.language.theater.traces import ReasoningFormat, Trace, left_padded, pad_token
from practicum.toolbox.errors import InputError

Beliefs = NDArray[np.float64]


class ForcedAnswer:
    r"""Cut the chain, say "the final answer is", and read which option the model would name.

    The chain goes through the model once. The stub is then put after the last cut, the cache is cropped, the stub is
    put after the cut before it, and so on: a chain costs one pass and a few tokens a cut.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model.
    tokenizer : transformers.PreTrainedTokenizerBase
    stub : str
        What follows the cut chain, so that the next token names an option. The default suits models that end their
        thinking with ``</think>``; the paper does not give its words.
    batch_size : int
        Cut chains at a time in `beliefs`.

    References
    ----------
    Boppana et al., "Reasoning Theater", arXiv:2603.05488.

    Examples
    --------
    >>> from practicum.language.theater import collect_traces, load_reasoner, reasoner_questions
    >>> reasoner = load_reasoner()
    >>> traces = collect_traces(*reasoner, reasoner_questions("recall", 1), max_new_tokens=48, format=reasoner.format)
    >>> forced = ForcedAnswer(*reasoner, stub=reasoner.format.stub)
    >>> belief = forced(traces[0])
    >>> belief.shape == (len(traces[0].cuts), 4)
    True
    >>> traces[0].options[belief[0].argmax()] == traces[0].answer
    True
    """

    def __init__(self, model: Any, tokenizer: Any, stub: str = ReasoningFormat.stub, batch_size: int = 64) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.stub = stub
        self.batch_size = batch_size

    @torch.no_grad()
    def __call__(self, trace: Trace) -> Beliefs:
        """Force an answer at every cut of one trace, with a cropped cache.

        Parameters
        ----------
        trace : Trace

        Returns
        -------
        array of shape (S + 1, K), float64
            Softmax over the options, in their order: first after the question alone, then at every boundary.
        """
        stub, options = option_tokens(self.tokenizer, self.stub, trace.options)
        device = self.model.device
        # Without the configuration, so that layers with a sliding window keep all, and can be cropped.
        cache = DynamicCache()
        chain = torch.tensor([[*trace.prompt_ids, *trace.cot_ids]], device=device)
        run_cached(self.model, chain[:, :-1], cache)
        beliefs = []
        for cut in reversed(trace.cuts):
            # One token of the prefix is run again with the stub, since a crop to a whole prefix may leave no token.
            kept = trace.start + cut - 1
            crop(cache, kept)
            tail = torch.cat([chain[:, kept : kept + 1], torch.tensor([stub], device=device)], dim=1)
            logits = run_cached(self.model, tail, cache)
            beliefs.append(logits[0, -1, options].double().softmax(-1).cpu().numpy())
        return np.stack(beliefs[::-1])

    @torch.no_grad()
    def beliefs(self, traces: Sequence[Trace]) -> list[Beliefs]:
        """Force an answer at every cut of many traces, each cut chain encoded anew, many at a time.

        The numbers are those of calling it trace by trace. For short chains of a small model this is faster, for
        long ones much slower: then call it.

        Parameters
        ----------
        traces : sequence of Trace
            Shape (N,).

        Returns
        -------
        list of array of shape (S + 1, K), float64
        """
        rows: list[list[int]] = []
        wanted: list[list[int]] = []
        for trace in traces:
            stub, options = option_tokens(self.tokenizer, self.stub, trace.options)
            rows += [[*trace.prompt_ids, *trace.cot_ids[:cut], *stub] for cut in trace.cuts]
            wanted += [options] * len(trace.cuts)
        found = answer_distributions(self.model, self.tokenizer, rows, wanted, self.batch_size)
        ends = np.cumsum([len(trace.cuts) for trace in traces])
        return [np.stack(found[end - len(t.cuts) : end]) for t, end in zip(traces, ends, strict=True)]


@torch.no_grad()
def answer_distributions(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Sequence[int]],
    options: Sequence[Sequence[int]],
    batch_size: int = 64,
) -> list[Beliefs]:
    """Softmax over some next tokens after each row, shape (K,) each; rows of like length go together."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    found: dict[int, Beliefs] = {}
    known = inspect.signature(model.forward).parameters
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        input_ids, mask = left_padded([rows[i] for i in batch], pad_token(tokenizer), model.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        given: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1}
        given = {name: value for name, value in given.items() if name in known}
        logits = model(input_ids=input_ids, attention_mask=mask, use_cache=False, **given).logits[:, -1]
        for row, i in zip(logits, batch, strict=True):
            found[i] = row[list(options[i])].double().softmax(-1).cpu().numpy()
    return [found[i] for i in range(len(rows))]


def option_tokens(tokenizer: Any, stub: str, labels: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return the tokens of a stub, and of each label the token with which it goes on.

    Stub and label are encoded together, since a tokenizer may join the space between them to either; what all have in
    common at the start is the stub.

    Raises
    ------
    InputError
        A ValueError: where two labels go on with the same token.

    Examples
    --------
    >>> from practicum.language.theater import reasoner_tokenizer
    >>> option_tokens(reasoner_tokenizer(), " </think> answer ", ["v0", "v3"])
    ([4, 9], [70, 73])
    """
    encoded = [list(tokenizer.encode(stub + label, add_special_tokens=False)) for label in labels]
    n = 0
    while all(len(ids) > n for ids in encoded) and len({ids[n] for ids in encoded}) == 1:
        n += 1
    following = [ids[n] for ids in encoded if len(ids) > n]
    if len(set(following)) < len(labels):
        raise InputError(
            f"options={tuple(labels)!r}: after the stub {stub!r} some go on with the same token; use labels='letters'"
        )
    return encoded[0][:n], following


def run_cached(model: Any, input_ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits of a forward pass that adds to the cache, shape (batch, n, vocabulary); none are made for no tokens."""
    if input_ids.shape[1] == 0:
        return input_ids.new_zeros(len(input_ids), 0, 1)
    # transformers calls it `cache` from 5.20 or so on, `past_key_values` before.
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(input_ids=input_ids, use_cache=True, **{named: cache}).logits


def crop(cache: Any, length: int) -> None:
    """Shorten a cache to so many tokens."""
    extra = cache.get_seq_length() - length
    if extra > 0:
        cache.crop(-extra)
