"""What the check does: language models trained side by side on the same tokens, and what is taken from them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import prune
from transformers import LlamaConfig, LlamaForCausalLM

from practicum.language.memoryllm.config import MemoryLMConfig
from practicum.language.memoryllm.lookups import TokenLookups
from practicum.language.memoryllm.model import MemoryLMForCausalLM

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
WARM_UP = 0.05
LAST_RATE = 0.1
LONGEST_GRADIENT = 1.0
EVALUATED_AT_ONCE = 16
# Rows of windows that Wanda measures activations on.
CALIBRATION_WINDOWS = 32


@dataclass(frozen=True)
class Recipe:
    """How every arm is trained: AdamW with warm-up and a cosine to a tenth, on the same windows in the same order."""

    steps: int
    batch: int
    rate: float
    seed: int
    device: str = "cpu"


@dataclass(frozen=True)
class Corpus:
    """Windows of tokens: to train on, (n, T), and to evaluate, (m, T); how often each token occurs in the former."""

    train: Tensor
    validation: Tensor
    counts: NDArray[np.int64]


def build(kind: str, sizes: dict[str, Any], seed: int) -> Any:
    """A model with fresh weights.

    Parameters
    ----------
    kind : {"dense", "memory"}
    sizes : dict
        Arguments of its configuration.
    seed : int
    """
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(seed)
        if kind == "dense":
            return LlamaForCausalLM(LlamaConfig(**sizes))
        return MemoryLMForCausalLM(MemoryLMConfig(**sizes))


def dense_sizes(sizes: dict[str, Any], hidden_size: int | None = None) -> dict[str, Any]:
    """Sizes of the dense model with as many parameters, of this hidden size."""
    h = hidden_size or sizes["hidden_size"]
    names = ("vocab_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "tie_word_embeddings")
    kept = {name: sizes[name] for name in names if name in sizes}
    return {**kept, "hidden_size": h, "intermediate_size": round(8 * h / 3)}


def active_sizes(sizes: dict[str, Any]) -> dict[str, Any]:
    """Sizes of the dense model that comes nearest to the active parameters of the MemoryLLM, by its hidden size."""
    wanted = count("memory", sizes, active=True)
    heads = sizes["num_attention_heads"]
    # Rotary positions need an even size of a head.
    candidates = range(2 * heads, sizes["hidden_size"] + 1, 2 * heads)
    return min(
        (dense_sizes(sizes, h) for h in candidates),
        key=lambda dense: abs(count("dense", dense) - wanted),
    )


def count(kind: str, sizes: dict[str, Any], active: bool = False) -> int:
    """Parameters of a model, which is not made."""
    with torch.device("meta"):
        model = build(kind, sizes, 0)
    return int(model.num_parameters(active=True) if active else model.num_parameters())


def train(model: Any, corpus: Corpus, recipe: Recipe, watched: int = 0) -> list[tuple[int, float]]:
    """Train, and give the loss on the first ``watched`` validation windows at each quarter of the steps.

    Distinct tokens of a batch are evaluated once by the memories, which is exact.
    """
    model.to(recipe.device).train()
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.rate, betas=BETAS, fused=True)
    generator = torch.Generator().manual_seed(recipe.seed)
    curve: list[tuple[int, float]] = []
    batches = _batches(len(corpus.train), recipe, generator)
    for step in range(1, recipe.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate * _schedule(step, recipe.steps)
        ids = corpus.train[next(batches)].to(recipe.device)
        logits = model(ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), LONGEST_GRADIENT)
        optimizer.step()
        if watched and step % max(1, recipe.steps // 4) == 0:
            curve.append((step, float(losses(model, corpus.validation[:watched]).mean())))
            model.train()
    optimizer.zero_grad(set_to_none=True)
    model.eval()
    return curve


def _batches(n: int, recipe: Recipe, generator: torch.Generator) -> Iterator[Tensor]:
    """Rows of windows, every window once before any comes again."""
    left = torch.empty(0, dtype=torch.long)
    while True:
        while len(left) < recipe.batch:
            left = torch.cat([left, torch.randperm(n, generator=generator)])
        yield left[: recipe.batch]
        left = left[recipe.batch :]


def _schedule(step: int, steps: int) -> float:
    warm = max(1, round(WARM_UP * steps))
    if step <= warm:
        return step / warm
    done = (step - warm) / max(1, steps - warm)
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def losses(model: Any, windows: Tensor) -> Tensor:
    """Negative log-likelihood of every token but the first of each window, (n, T - 1)."""
    model.eval()
    device = next(model.parameters()).device
    out = []
    for ids in windows.to(device).split(EVALUATED_AT_ONCE):
        logits = model(ids, use_cache=False).logits[:, :-1].float()
        loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        out.append(loss.reshape(len(ids), -1).cpu())
    return torch.cat(out)


@contextmanager
def scaled(model: Any, alpha: float, layers: Sequence[int] | None = None) -> Iterator[None]:
    """Multiply feed-forward outputs, of a MemoryLLM those of its memories."""
    if isinstance(model, MemoryLMForCausalLM):
        with model.memory_scale(alpha, layers):
            yield
        return
    with ExitStack() as hooks:
        for i, layer in enumerate(model.model.layers):
            if layers is None or i in layers:
                hooks.callback(layer.mlp.register_forward_hook(lambda module, args, out: alpha * out).remove)
        yield


def copyable(windows: Tensor) -> Tensor:
    """Targets whose bigram with the token before occurred earlier in the window, (n, T - 1)."""
    width = int(windows.max()) + 1
    pairs = (windows[:, :-1] * width + windows[:, 1:]).numpy()
    again = np.ones(pairs.shape, dtype=bool)
    for row, seen in zip(pairs, again, strict=True):
        seen[np.unique(row, return_index=True)[1]] = False
    return torch.from_numpy(again)


def pruned(model: LlamaForCausalLM, kept: int, how: str, calibration: Tensor) -> Any:
    """A copy of a dense model with so many weights left in the matrices of its blocks, an equal share in each.

    Parameters
    ----------
    model : LlamaForCausalLM
    kept : int
        Weights that are not set to 0, of all matrices of the blocks together.
    how : {"magnitude", "wanda"}
        By absolute value in each matrix; or, in each row of a matrix, by absolute value times the norm of the input
        (Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", 2024), block after block,
        with the activations that the pruned blocks before give.
    calibration : int64 Tensor of shape (n, T)
    """
    copied = copy.deepcopy(model).eval()
    blocks = [[m for m in block.modules() if isinstance(m, nn.Linear)] for block in copied.model.layers]
    share = 1 - kept / sum(m.weight.numel() for block in blocks for m in block)
    for block in blocks:
        norms = _input_norms(copied, block, calibration) if how == "wanda" else {}
        for module in block:
            if how == "magnitude":
                prune.l1_unstructured(module, "weight", amount=share)
            else:
                score = module.weight.detach().abs() * norms[module]
                dropped = round(share * score.shape[1])
                lowest = score.topk(dropped, dim=1, largest=False).indices
                prune.custom_from_mask(module, "weight", torch.ones_like(score).scatter_(1, lowest, 0.0))
            prune.remove(module, "weight")
    return copied


@torch.no_grad()
def _input_norms(model: Any, modules: Sequence[nn.Linear], windows: Tensor) -> dict[nn.Linear, Tensor]:
    """The norm of each input feature over all tokens of the windows."""
    squares: dict[nn.Linear, Tensor] = {}

    def add(module: nn.Linear, args: tuple[Tensor, ...]) -> None:
        found = args[0].reshape(-1, args[0].shape[-1]).pow(2).sum(0)
        squares[module] = squares.get(module, torch.zeros_like(found)) + found

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(add).remove)
        for ids in windows.to(next(model.parameters()).device).split(EVALUATED_AT_ONCE):
            model(ids, use_cache=False)
    return {module: found.sqrt() for module, found in squares.items()}


@dataclass(frozen=True)
class Decode:
    """Greedy decoding with random weights, which cost as much as others.

    Attributes
    ----------
    what : {"dense", "memory", "attention"}
        A dense model; a MemoryLLM with its table in memory; the same without any memory, the limit.
    hidden_size, layers, heads, vocabulary : int
    batch, tokens : int
    device : str
    """

    what: str
    hidden_size: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    tokens: int
    device: str = "cpu"

    @property
    def sizes(self) -> dict[str, Any]:
        """Arguments of a MemoryLLM's configuration."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "tie_word_embeddings": True,
        }

    def __call__(self) -> Tensor:
        """Generate; the models are made by the first call."""
        model = _decoder(self.what == "dense", tuple(self.sizes.items()), self.device)
        first = torch.arange(1, self.batch + 1, device=self.device)[:, None]
        with model.drop_memory() if self.what == "attention" else nullcontext():
            return model.generate(
                first,
                attention_mask=torch.ones_like(first),
                max_new_tokens=self.tokens,
                do_sample=False,
                pad_token_id=0,
            )


@lru_cache(maxsize=2)
def _decoder(dense: bool, sizes: tuple[tuple[str, Any], ...], device: str) -> Any:
    given = dict(sizes)
    if dense:
        model = build("dense", dense_sizes(given), 0)
        model.generation_config.eos_token_id = None
        return model.to(device).eval()
    model = build("memory", {**given, "memory_weights": False}, 0)
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(0)
    shape = given["vocab_size"], given["num_hidden_layers"], given["hidden_size"]
    table = torch.empty(shape).uniform_(-0.02, 0.02, generator=generator)
    model.attach_lookups(TokenLookups(table), strict=False)
    return model.to(device).eval()
