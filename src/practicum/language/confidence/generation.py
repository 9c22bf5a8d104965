"""Answers written by the model: many for one prompt, whose cache is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from practicum.toolbox.trunk import forward_arguments


@dataclass
class Decoded:
    """What was written, one row a sample, the samples of one prompt side by side.

    ``ids`` are without what ended them. ``cache`` holds the prompts and all columns but the last, ``mask`` says which
    of its columns and of the last count, shape (n_rows, n_columns); ``last`` is the last column, shape (n_rows, 1).
    """

    ids: list[list[int]]
    cache: Any
    mask: Tensor
    last: Tensor


@torch.no_grad()
def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    n_samples: int = 1,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    stop: frozenset[int] = frozenset(),
    generator: torch.Generator | None = None,
) -> Decoded:
    """Continue every prompt ``n_samples`` times; greedily where ``temperature`` is 0.

    The prompts are computed once, and their cache is repeated.
    """
    device = next(model.parameters()).device
    length = max(map(len, prompts))
    ids = torch.zeros(len(prompts), length, dtype=torch.long, device=device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = torch.tensor(prompt, device=device)
        mask[row, length - len(prompt) :] = 1
    cache = DynamicCache(config=_text_config(model))
    logits = step(model, ids, mask, cache)[:, -1]
    if n_samples > 1:
        cache.batch_repeat_interleave(n_samples)
        mask = mask.repeat_interleave(n_samples, dim=0)
        logits = logits.repeat_interleave(n_samples, dim=0)
    ends = torch.tensor(sorted(stop), device=device, dtype=torch.long)
    written: list[Tensor] = []
    going = torch.ones(len(mask), dtype=torch.bool, device=device)
    token = ids[:, -1:]
    for number in range(max_new_tokens):
        token = _choose(logits, temperature, generator)
        going = going & ~torch.isin(token[:, 0], ends)
        written.append(torch.where(going, token[:, 0], -1))
        mask = torch.cat([mask, going[:, None].long()], dim=1)
        token = torch.where(going[:, None], token, 0)
        if number + 1 == max_new_tokens or not going.any():
            break
        logits = step(model, token, mask, cache)[:, -1]
    columns = torch.stack(written, dim=1).tolist()
    return Decoded([[t for t in row if t >= 0] for row in columns], cache, mask, token)


def step(model: Any, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
    """Logits of the last of the given tokens, shape (n_rows, 1, n_vocabulary), float32; the cache takes them up."""
    arguments = forward_arguments(model)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": True}
    inputs["cache" if "cache" in arguments else "past_key_values"] = cache
    if "position_ids" in arguments:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    if "logits_to_keep" in arguments:
        inputs["logits_to_keep"] = 1
    return model(**inputs).logits[:, -1:].float()


def stop_ids(model: Any, tokenizer: Any, *, at_newline: bool) -> frozenset[int]:
    """The tokens that end an answer: those that end the text, and those that begin with a line break."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(configured if isinstance(configured, (list, tuple)) else [configured])
    ids.add(tokenizer.eos_token_id)
    if at_newline:
        every = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        ids |= {i for i, text in enumerate(every) if text.startswith("\n")}
    return frozenset(i for i in ids if i is not None)


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)
