"""A MemoryLLM that begins with the embeddings and the attention of an existing model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from practicum.language.memoryllm.config import MemoryLMConfig
from practicum.language.memoryllm.model import MemoryLMForCausalLM
from practicum.toolbox.errors import InputError
from practicum.toolbox.taps import Taps

# Weights of a Llama that a MemoryLLM has no place for.
LEFT_BEHIND = (".mlp.", ".post_attention_layernorm.")


def memory_lm_from_dense(
    model: nn.Module,
    flex_beta: float = 0.0,
    *,
    compute: str = "swiglu",
    memory_intermediate_size: int | None = None,
    random_state: int = 0,
) -> MemoryLMForCausalLM:
    """Make a MemoryLLM with the embeddings, the attention, the norms and the head of a dense model.

    The memories are new, as are the networks on the residual stream of a Flex-MemoryLLM; the latter begin as 0. The
    paper trains from scratch: this start, with `fit_memory` and training on text after it, is ours.

    Parameters
    ----------
    model : transformers.LlamaForCausalLM
        Or any model whose configuration is Llama's and whose weights have the names of Llama's.
    flex_beta : float, default=0.0
        See `MemoryLMConfig`.
    compute : {"swiglu", "linear"}
    memory_intermediate_size : int, optional
        With ``flex_beta=0``: the width of the memories; by default that of the model's own networks. Else it follows
        from beta.
    random_state : int
        Of the new weights, of shape (K_M, h) and (h, K_M).

    Returns
    -------
    MemoryLMForCausalLM
        On the device and in the type of ``model``, in evaluation mode.

    Raises
    ------
    ValueError
        For a model of another architecture, and as `MemoryLMConfig`.

    Examples
    --------
    >>> from transformers import LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2
    ... )
    >>> dense = LlamaForCausalLM(config)
    >>> student = memory_lm_from_dense(dense)
    >>> student.config.memory_intermediate_size, torch.equal(student.lm_head.weight, dense.lm_head.weight)
    (40, True)
    """
    config = getattr(model, "config", None)
    if not isinstance(config, LlamaConfig) or isinstance(config, MemoryLMConfig):
        found = type(config).__name__ if config is not None else type(model).__name__
        raise InputError(f"model: must be a Llama model, whose attention a MemoryLLM has; got {found}")
    given = config.to_dict()
    for name in ("model_type", "intermediate_size", "architectures", "transformers_version"):
        given.pop(name, None)
    width = (
        config.intermediate_size if memory_intermediate_size is None and flex_beta == 0 else memory_intermediate_size
    )
    new = MemoryLMConfig(**given, flex_beta=flex_beta, compute=compute, memory_intermediate_size=width)
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(random_state)
        student = MemoryLMForCausalLM(new)
    state = {
        name: weight for name, weight in model.state_dict().items() if not any(part in name for part in LEFT_BEHIND)
    }
    report = student.load_state_dict(state, strict=False)
    lacking = [name for name in report.missing_keys if not _is_new(name)]
    if new.tie_word_embeddings:
        lacking = [name for name in lacking if name != "lm_head.weight"]
    if report.unexpected_keys or lacking:
        wrong = (report.unexpected_keys or lacking)[0]
        raise InputError(f"model: {type(model).__name__} is not built like Llama: {wrong}")
    with torch.no_grad():
        for layer in student.model.layers:
            if layer.mlp is not None:
                _last_linear(layer.mlp).weight.zero_()
    weight = next(model.parameters())
    student.to(device=weight.device, dtype=weight.dtype)  # type: ignore[call-arg]
    return student.eval()


def _is_new(name: str) -> bool:
    return ".memory." in name or "memory_norm" in name or any(part in name for part in LEFT_BEHIND)


def _last_linear(network: nn.Module) -> nn.Linear:
    down = getattr(network, "down_proj", None)
    found = down if isinstance(down, nn.Linear) else [m for m in network.modules() if isinstance(m, nn.Linear)][-1]
    return found


def fit_memory(
    student: MemoryLMForCausalLM,
    teacher: nn.Module,
    input_ids: Tensor,
    *,
    steps: int = 200,
    learning_rate: float = 3e-3,
    batch_size: int = 8,
    token_batch_size: int = 1024,
    random_state: int = 0,
) -> dict[str, list[float]]:
    r"""Train the memories to give what the teacher's networks give for a token on average over its contexts.

    For the layers L and the tokens v of a text, the target is the mean of the teacher's feed-forward outputs at the
    positions of v: no function of the token alone comes nearer to them in squared error. The rest of the student does
    not change; train it on text afterwards.

    Parameters
    ----------
    student : MemoryLMForCausalLM
        With memory weights; changed in place.
    teacher : transformers.PreTrainedModel
        Of as many layers and the same hidden size and vocabulary.
    input_ids : int64 Tensor of shape (n, positions)
        Of the text; without padding.
    steps : int
        Of AdamW.
    learning_rate : float
    batch_size : int
        Rows of ``input_ids`` that the teacher reads at a time.
    token_batch_size : int
        Tokens a step; they are drawn by how often they occur.
    random_state : int
        Of the draw.

    Returns
    -------
    dict of str to list of float
        ``"explained"``: by layer, the share of the targets' second moment that the memory explains, tokens weighted by
        how often they occur; ``"explainable"``: the share of the teacher's outputs' second moment that the means
        explain.

    Raises
    ------
    ValueError
        When the sizes of the two differ, when ids are not of shape (n, positions), or memory weights have been freed.

    Examples
    --------
    >>> from transformers import LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=20, hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2
    ... )
    >>> dense = LlamaForCausalLM(config).eval()
    >>> student = memory_lm_from_dense(dense)
    >>> report = fit_memory(student, dense, torch.arange(60).reshape(6, 10) % 20, steps=5)
    >>> len(report["explained"])
    2
    """
    if not student.config.memory_weights:
        raise InputError("student: its memory weights have been freed")
    if input_ids.ndim != 2 or not input_ids.numel():
        raise InputError(f"input_ids: must have shape (n, positions); got {tuple(input_ids.shape)}")
    config: Any = teacher.config
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if getattr(student.config, name) != getattr(config, name):
            raise InputError(
                f"teacher: has {name}={getattr(config, name)}; the student {getattr(student.config, name)}"
            )
    tokens, counts, targets, explainable = _mean_outputs(teacher, input_ids, batch_size)
    device = student.model.embed_tokens.weight.device
    tokens, counts = tokens.to(device), counts.to(device)
    scale = targets.float().pow(2).mean(dim=(0, 2)).sqrt().clamp_min(1e-12).to(device)
    targets = targets.to(device)
    with torch.no_grad():
        rows = student.model.embed_tokens(tokens)
        if student.model.memory_norm is not None:
            rows = student.model.memory_norm(rows)
    weights = [
        weight
        for layer in student.model.layers
        for part in (layer.memory, layer.memory_norm)
        if part is not None
        for weight in part.parameters()
    ]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    generator = torch.Generator().manual_seed(random_state)
    for _ in range(steps):
        chosen = torch.multinomial(counts.float().cpu(), token_batch_size, replacement=True, generator=generator)
        chosen = chosen.to(device)
        loss = torch.zeros((), device=device)
        for i, layer in enumerate(student.model.layers):
            error = (layer.recall(rows[chosen]) - targets[chosen, i]) / scale[i]
            loss = loss + error.pow(2).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        share = counts.float() / counts.sum()
        explained = []
        for i, layer in enumerate(student.model.layers):
            left = (layer.recall(rows) - targets[:, i]).float().pow(2).mean(1) @ share
            explained.append(float(1 - left / (targets[:, i].float().pow(2).mean(1) @ share).clamp_min(1e-30)))
    return {"explained": explained, "explainable": explainable}


@torch.no_grad()
def _mean_outputs(teacher: nn.Module, input_ids: Tensor, batch_size: int) -> tuple[Tensor, Tensor, Tensor, list[float]]:
    """Tokens, how often they occur, the teacher's mean outputs (tokens, layers, h), and what the means explain."""
    config: Any = teacher.config
    n_layers = config.num_hidden_layers
    device = next(teacher.parameters()).device
    tokens, place = torch.unique(input_ids, return_inverse=True)
    counts = torch.bincount(place.reshape(-1), minlength=len(tokens))
    sums = torch.zeros(len(tokens), n_layers, config.hidden_size)
    moment = torch.zeros(n_layers, dtype=torch.float64)
    for ids, where in zip(input_ids.split(batch_size), place.split(batch_size), strict=True):
        with Taps(teacher, range(1, n_layers + 1), "mlp") as taps:
            teacher(ids.to(device), use_cache=False)
        for layer in range(n_layers):
            out = taps[layer + 1].reshape(-1, config.hidden_size).float().cpu()
            sums[:, layer].index_add_(0, where.reshape(-1), out)
            moment[layer] += out.double().pow(2).sum()
    means = sums / counts[:, None, None]
    of_means = torch.einsum("nlh,n->l", means.double().pow(2), counts.double())
    dtype = next(teacher.parameters()).dtype
    return tokens, counts, means.to(dtype), (of_means / moment.clamp_min(1e-30)).tolist()
