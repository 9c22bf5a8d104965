"""Fine-tuning an adapter on instruction samples, for a moment: the warm-up of scorers, and the checkpoints of LESS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from practicum.language.trim.samples import Format, SampleTokenizer, TokenizedSample
from practicum.toolbox.errors import InputError
from practicum.toolbox.trunk import Forward, FrozenTrunk, TokenRow, first_trained_block

# What LESS trains its warm-up with.
RANK, ALPHA, DROPOUT = 128, 512, 0.1
LEARNING_RATE = 2e-5
LARGEST_GRADIENT = 1.0


@dataclass(frozen=True)
class Checkpoint:
    """An adapter as it was at some step of its training, with what Adam knew.

    Attributes
    ----------
    weights, means, squares : dict from name to Tensor
        Of each trained parameter its value, and Adam's running means of its gradient and of the square of that; each
        of the parameter's shape.
    learning_rate : float
        What the checkpoint counts for among others.

    Examples
    --------
    >>> one = Checkpoint({"a": torch.zeros(2)}, {"a": torch.zeros(2)}, {"a": torch.ones(2)}, 1e-4)
    >>> one.weights["a"].shape
    torch.Size([2])
    """

    weights: Mapping[str, Tensor]
    means: Mapping[str, Tensor]
    squares: Mapping[str, Tensor]
    learning_rate: float


def warm_up(
    model: Any,
    tokenizer: Any,
    pool: Iterable[Mapping[str, Any]],
    fraction: float = 0.05,
    lora_config: LoraConfig | None = None,
    epochs: int = 1,
    *,
    learning_rate: float = LEARNING_RATE,
    batch_size: int = 8,
    max_length: int = 2048,
    format: Format | None = None,
    trunk: FrozenTrunk | None = None,
    checkpoints: list[Checkpoint] | None = None,
    random_state: int = 0,
) -> PeftModel:
    """Fine-tune an adapter on a random part of the pool, so that the model's states know what the pool is like.

    The paper warms its scorer up on 5 % of the pool; its other settings are not known to us, and those here are of LESS
    [1]_, but for a single epoch. The learning rate falls linearly to zero.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        PEFT puts the adapter into it: undo that by ``unload()`` of what is returned.
    tokenizer : transformers.PreTrainedTokenizerBase
    pool : sequence, datasets.Dataset or iterable of mapping
        Of a stream, each sample is drawn with probability ``fraction``, and only those drawn are held.
    fraction : float
        Above 0 and at most 1; at least one sample is taken.
    lora_config : peft.LoraConfig, optional
        By default rank 128, alpha 512, dropout 0.1, on all linear layers.
    epochs : int
    learning_rate : float
    batch_size : int
    max_length, format
        As of `TrimSelector`.
    trunk : FrozenTrunk, optional
        Where the states of the layers below the adapter come from.
    checkpoints : list, optional
        The adapter at the end of every epoch is appended to it, which `GradientSelector` takes.
    random_state : int
        Of the samples, their order, the adapter and its dropout.

    Returns
    -------
    peft.PeftModel
        In inference mode.

    Raises
    ------
    InputError
        A ValueError that names the argument.

    References
    ----------
    .. [1] M. Xia, S. Malladi, S. Gururangan, S. Arora, D. Chen, "LESS: Selecting Influential Data for Targeted
       Instruction Tuning", ICML 2024.

    Examples
    --------
    The factors of a weight of shape (n, m) have shapes (r, m) and (n, r).

    >>> from practicum.language.confidence.tiny import tiny_model
    >>> model, tokenizer = tiny_model()
    >>> tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
    >>> pool = [{"prompt": f"{i}+1", "response": str(i + 1)} for i in range(9)]
    >>> warmed = warm_up(model, tokenizer, pool, fraction=0.3, lora_config=LoraConfig(target_modules=["q_proj"]))
    >>> type(warmed).__name__, sum(p.numel() for p in warmed.parameters() if p.requires_grad)
    ('PeftModel', 1536)
    """
    if not 0 < fraction <= 1:
        raise InputError(f"fraction={fraction}: must be above 0 and at most 1")
    if epochs < 1:
        raise InputError(f"epochs={epochs}: must be at least 1")
    chosen = _drawn(pool, fraction, np.random.default_rng(random_state))
    samples = SampleTokenizer(tokenizer, format, max_length).tokenize(chosen, "pool")
    config = lora_config or LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=DROPOUT, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return fine_tune(
        model,
        samples,
        config,
        steps=epochs * -(-len(samples) // batch_size),
        learning_rate=learning_rate,
        batch_size=batch_size,
        trunk=trunk,
        checkpoints=checkpoints,
        random_state=random_state,
    )


def _drawn(pool: Iterable[Mapping[str, Any]], fraction: float, rng: np.random.Generator) -> list[Mapping[str, Any]]:
    if hasattr(pool, "__len__") and hasattr(pool, "__getitem__"):
        known = cast(Sequence[Mapping[str, Any]], pool)
        if not len(known):
            raise InputError("pool: has no samples; must have one at least")
        n = max(1, int(fraction * len(known) + 1e-9))
        return [known[int(i)] for i in np.sort(rng.choice(len(known), n, replace=False))]
    found, first = [], None
    for sample in pool:
        first = sample if first is None else first
        if rng.random() < fraction:
            found.append(sample)
    if first is None:
        raise InputError("pool: has no samples; must have one at least")
    return found or [first]


def fine_tune(
    model: Any,
    samples: Sequence[TokenizedSample],
    config: LoraConfig,
    *,
    steps: int,
    learning_rate: float,
    batch_size: int,
    trunk: FrozenTrunk | None = None,
    checkpoints: list[Checkpoint] | None = None,
    random_state: int = 0,
) -> PeftModel:
    """Train an adapter on the responses of samples, gone through in random order as often as the steps take.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    samples : sequence of TokenizedSample
        Shape (n_samples,). Those without a response are passed over.
    config : peft.LoraConfig
    steps : int
    learning_rate : float
        At the first step; it falls linearly to zero.
    batch_size : int
    trunk : FrozenTrunk, optional
    checkpoints : list, optional
        As of `warm_up`.
    random_state : int

    Returns
    -------
    peft.PeftModel
        In inference mode.

    Raises
    ------
    InputError
        A ValueError: when no sample has a response, or a batch or the number of steps is empty.
    """
    if batch_size < 1 or steps < 1:
        raise InputError(f"batch_size={batch_size}, steps={steps}: both must be at least 1")
    usable = [sample for sample in samples if sample.trained]
    if not usable:
        raise InputError("samples: none has a response to train on")
    generator = torch.Generator().manual_seed(random_state)
    device = next(model.parameters()).device
    # PEFT draws the adapter, and its dropout, from torch's own generator.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(random_state)
        before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        tuned = get_peft_model(model, config)
        tuned.train()
        first = first_trained_block(tuned)
        if trunk is not None and trunk.first > first:
            tuned.unload()
            for parameter, was_trained in before:
                parameter.requires_grad_(was_trained)
            raise InputError(f"trunk: begins at block {trunk.first}, but block {first} is trained")
        forward = Forward(tuned, trunk)
        parameters = [p for p in tuned.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
        order: list[int] = []
        for step in range(steps):
            if not order:
                order = torch.randperm(len(usable), generator=generator).tolist()
            batch, order = [usable[i] for i in order[:batch_size]], order[batch_size:]
            rate = float(schedule.get_last_lr()[0])
            optimizer.zero_grad()
            response_loss(forward, batch).backward()
            nn.utils.clip_grad_norm_(parameters, LARGEST_GRADIENT)
            optimizer.step()
            schedule.step()
            if checkpoints is not None and (not order or step == steps - 1):
                checkpoints.append(_checkpoint(tuned, optimizer, rate))
    return tuned.eval()


def response_loss(forward: Forward, batch: Sequence[TokenizedSample]) -> Tensor:
    """Mean negative log-likelihood of the response tokens of a batch, and of the token that ends each response.

    Parameters
    ----------
    forward : Forward
    batch : sequence of TokenizedSample
        Shape (n,), each with a response.

    Returns
    -------
    Tensor of shape (), float32
    """
    return -torch.cat(response_log_probs(forward, batch)).mean()


def response_log_probs(forward: Forward, batch: Sequence[TokenizedSample]) -> list[Tensor]:
    """Log-probability of each token of the responses of a batch.

    Parameters
    ----------
    forward : Forward
    batch : sequence of TokenizedSample
        Shape (n,), each with a response.

    Returns
    -------
    list of Tensor of shape (n_tokens,), float32
        For every sample, in the order of `TokenizedSample.trained`.
    """
    return [
        -nn.functional.cross_entropy(logits, wanted, reduction="none")
        for logits, wanted in response_logits(forward, batch)
    ]


def response_logits(forward: Forward, batch: Sequence[TokenizedSample]) -> list[tuple[Tensor, Tensor]]:
    """What the model predicts for the responses of a batch, and what they say.

    Parameters
    ----------
    forward : Forward
    batch : sequence of TokenizedSample
        Shape (n,), each with a response.

    Returns
    -------
    list of (logits, ids)
        Of shapes (n_tokens, V) and (n_tokens,) for every sample, in the order of `TokenizedSample.trained`.
    """
    keep = max(len(sample.ids) - sample.trained[0] + 1 for sample in batch)
    logits = forward.logits([TokenRow(sample.ids) for sample in batch], keep)
    found = []
    for of_sample, sample in zip(logits, batch, strict=True):
        # The logits end at the sample's last token; those one place before a token predict it.
        before = [keep - len(sample.ids) + place - 1 for place in sample.trained]
        wanted = torch.tensor([sample.ids[place] for place in sample.trained], device=logits.device)
        found.append((of_sample[before], wanted))
    return found


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained of a model, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, learning_rate: float) -> Checkpoint:
    weights, means, squares = {}, {}, {}
    for name, parameter in trained_parameters(model).items():
        state = optimizer.state[parameter]
        weights[name] = parameter.detach().clone()
        means[name] = state["exp_avg"].clone()
        squares[name] = state["exp_avg_sq"].clone()
    return Checkpoint(weights, means, squares, learning_rate)
