"""What is kept of a prompt: whole worked examples, or tokens and chunks as the methods before it choose them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from practicum.serving.shotkv.press import Press, Prompt
from practicum.serving.shotkv.units import Unit
from practicum.toolbox.errors import InputError

CHUNK = 10
SINKS = 4
POOL = 5


class ShotKV(Press):
    r"""Keep or let go of worked examples as wholes, layer by layer, and of generated tokens one by one.

    A unit s of k tokens scores, in layer l,

    .. math:: \mathrm{Score}^l(s) = \frac{1}{k} \sum_{t \in s} \sum_h \alpha^l_{h,t}

    where :math:`\alpha^l_{h,t}` is the attention that token t receives in head h. Units are taken in the order of their
    scores as long as they fit into the budget; one that does not fit is passed over. If none fits the shortest is kept.
    What is kept of the prompt is frozen from then on; of the generated tokens those that have received the most
    attention are kept.

    The paper leaves open which queries the attention comes from, what happens to a unit that does not fit, and how
    often generated tokens are let go of. Ours are those of the question (``scoring="window"``, the better of the two),
    greedy filling, and every 32 steps.

    Parameters
    ----------
    prefill_ratio : float
        Share of the tokens of units that is kept, in (0, 1].
    decode_ratio : float
        Share of the generated tokens that is kept, in (0, 1].
    scoring : {"window", "accumulated"}
        Attention from the question's queries, or from all queries.
    window : int, optional
        With ``scoring="window"``: so many of the last queries; by default those behind the last unit, 8 at least.
    layerwise : bool
        Whether each layer chooses for itself; otherwise the scores of all layers are summed and one choice is made.
        Where fewer than two units fit, one choice is better.
    budget_over : {"units", "prefill"}
        What the ratio is of: the tokens of units, or the whole prompt, whose protected tokens count then.
    decode_interval, recent, min_decode, decay, reposition
        As in `Press`.

    Raises
    ------
    InputError
        A ValueError that names the argument.

    References
    ----------
    *Semantic Integrity Matters: Benchmarking and Preserving High-Density Reasoning in KV Cache Compression*, ICML 2026,
    arXiv:2502.01941.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    ...     num_key_value_heads=2,
    ... )
    >>> model, ids = LlamaForCausalLM(config).eval(), torch.arange(1, 21)[None]
    >>> press = ShotKV(prefill_ratio=0.5)
    >>> with press(model):
    ...     cache = press.prefill(model, ids, [(1, 5), (5, 9), (9, 13), (13, 17)])
    ...     written = model.generate(ids, cache=cache, max_new_tokens=3, do_sample=False, pad_token_id=0)
    >>> written.shape, cache.report.kept_tokens  # keys (1, 2, T, 4) in each layer
    (torch.Size([1, 23]), {1: 8, 2: 8})
    """

    def __init__(
        self,
        prefill_ratio: float = 0.4,
        decode_ratio: float = 1.0,
        *,
        scoring: Literal["window", "accumulated"] = "window",
        window: int | None = None,
        layerwise: bool = True,
        budget_over: Literal["units", "prefill"] = "units",
        decode_interval: int = 32,
        recent: int = 16,
        min_decode: int = 64,
        decay: float | None = None,
        reposition: bool = False,
    ) -> None:
        if scoring not in ("window", "accumulated"):
            raise InputError(f"scoring={scoring!r}: must be 'window' or 'accumulated'")
        super().__init__(
            prefill_ratio,
            decode_ratio,
            window=window,
            budget_over=budget_over,
            decode_interval=decode_interval,
            recent=recent,
            min_decode=min_decode,
            decay=decay,
            reposition=reposition,
        )
        self.scoring = scoring
        self.layerwise = layerwise

    @property
    def uses_window(self) -> bool:  # type: ignore[override]
        """Whether only the last queries are looked at."""
        return self.scoring == "window"

    def choose(self, prompt: Prompt) -> dict[int, Tensor]:
        """Take whole units by their scores.

        Parameters
        ----------
        prompt : Prompt

        Returns
        -------
        dict of int to Tensor of int64, shape (T,)
        """
        scores = {layer: unit_scores(prompt.received[layer].sum((0, 1)), prompt.units) for layer in prompt.layers}
        if not self.layerwise:
            together = torch.stack([scores[layer] for layer in prompt.layers]).sum(0)
            scores = dict.fromkeys(prompt.layers, together)
        return {layer: tokens_of(prompt.units, fill(scores[layer], prompt.units, prompt.budget)) for layer in scores}


class RandomUnits(Press):
    """Keep whole units at random, the same in all layers: what a score must beat.

    Parameters
    ----------
    prefill_ratio, decode_ratio : float
        As in `ShotKV`.
    random_state : int
        Seed of the draw.
    options
        As in `Press`.

    Examples
    --------
    >>> prompt = Prompt(9, (Unit(0, 4), Unit(4, 8)), 4, {}, 0, {1: 1})
    >>> len(RandomUnits(0.5, random_state=0).choose(prompt)[1])  # shape (4,)
    4
    """

    uses_attention = False

    def __init__(
        self, prefill_ratio: float = 0.4, decode_ratio: float = 1.0, *, random_state: int = 0, **options: Any
    ) -> None:
        super().__init__(prefill_ratio, decode_ratio, **options)
        self.random_state = random_state

    def choose(self, prompt: Prompt) -> dict[int, Tensor]:
        """Take whole units in an order drawn at random.

        Parameters
        ----------
        prompt : Prompt

        Returns
        -------
        dict of int to Tensor of int64, shape (T,)
        """
        order = torch.rand(len(prompt.units), generator=torch.Generator().manual_seed(self.random_state))
        return dict.fromkeys(prompt.layers, tokens_of(prompt.units, fill(order, prompt.units, prompt.budget)))


class SnapKV(Press):
    """Keep the tokens that the question attends to, each key head its own, smoothed over neighbours (SnapKV).

    Parameters
    ----------
    prefill_ratio, decode_ratio : float
        As in `ShotKV`.
    pool : int
        Odd: scores are averaged over so many neighbours.
    options
        As in `Press`.

    References
    ----------
    Y. Li et al., *SnapKV: LLM Knows What You are Looking for Before Generation*, NeurIPS 2024.

    Examples
    --------
    >>> received = torch.tensor([[[0.0, 9, 0, 0, 0, 0, 5, 0]]])
    >>> SnapKV(0.5, pool=1).choose(Prompt(8, (Unit(0, 8),), 2, {1: received}, 1, {1: 1}))[1].tolist()  # (1, 1, 2)
    [[[1, 6]]]
    """

    def __init__(
        self, prefill_ratio: float = 0.4, decode_ratio: float = 1.0, *, pool: int = POOL, **options: Any
    ) -> None:
        if pool < 1 or pool % 2 == 0:
            raise InputError(f"pool={pool}: must be odd and positive")
        super().__init__(prefill_ratio, decode_ratio, **options)
        self.pool = pool

    def choose(self, prompt: Prompt) -> dict[int, Tensor]:
        """Take single tokens by what the question gives them.

        Parameters
        ----------
        prompt : Prompt

        Returns
        -------
        dict of int to Tensor of int64, shape (B, H_kv, T)
        """
        budgets = self.budgets(prompt)
        return {layer: best_tokens(self._smooth(prompt.by_kv_head(layer)), prompt, budgets[layer]) for layer in budgets}

    def budgets(self, prompt: Prompt) -> dict[int, int]:
        """How many tokens each layer keeps: the same.

        Parameters
        ----------
        prompt : Prompt

        Returns
        -------
        dict of int to int
            L numbers, shape (L,).
        """
        return dict.fromkeys(prompt.layers, prompt.budget)

    def _smooth(self, scores: Tensor) -> Tensor:
        return F.avg_pool1d(scores, self.pool, stride=1, padding=self.pool // 2)


class PyramidKV(SnapKV):
    """SnapKV with more tokens for lower layers and fewer for upper ones, on a straight line, with the same sum.

    Parameters
    ----------
    prefill_ratio, decode_ratio : float
        As in `ShotKV`.
    beta : float
        Above 1: the topmost layer keeps the mean divided by beta.
    pool : int
        As in `SnapKV`.
    options
        As in `Press`.

    References
    ----------
    Z. Cai et al., *PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling*, 2024.

    Examples
    --------
    >>> prompt = Prompt(100, (Unit(0, 100),), 30, {}, 0, {1: 1, 2: 1, 3: 1})
    >>> PyramidKV(0.3, beta=3).budgets(prompt)  # shape (3,)
    {1: 50, 2: 30, 3: 10}
    """

    def __init__(
        self,
        prefill_ratio: float = 0.4,
        decode_ratio: float = 1.0,
        *,
        beta: float = 20.0,
        pool: int = POOL,
        **options: Any,
    ) -> None:
        if beta <= 1:
            raise InputError(f"beta={beta}: must be above 1")
        super().__init__(prefill_ratio, decode_ratio, pool=pool, **options)
        self.beta = beta

    def budgets(self, prompt: Prompt) -> dict[int, int]:
        """How many tokens each layer keeps: fewer from layer to layer, and all together as many as otherwise.

        Parameters
        ----------
        prompt : Prompt

        Returns
        -------
        dict of int to int
            L numbers, shape (L,).
        """
        n, mean, most = len(prompt.layers), prompt.budget, len(prompt.candidates)
        low = mean / self.beta
        # Neither more than there are, nor so steep that the sum would change.
        high = min(2 * mean - low, most)
        low = 2 * mean - high
        line = [high + (low - high) * i / max(1, n - 1) for i in range(n)] if n > 1 else [float(mean)]
        sizes = [round(x) for x in line]
        # What rounding adds or takes is spread over the middle.
        for step in range(abs(n * mean - sum(sizes))):
            sizes[(n // 2 + step) % n] += 1 if n * mean > sum(sizes) else -1
        return dict(zip(prompt.layers, sizes, strict=True))


class H2O(Press):
    """Keep the tokens that have received the most attention from all queries, each key head its own (H2O).

    The original also keeps as many recent tokens as heavy ones; here the question, which is always kept, is recent.

    Parameters
    ----------
    prefill_ratio, decode_ratio : float
        As in `ShotKV`.
    options
        As in `Press`.

    References
    ----------
    Z. Zhang et al., *H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models*, NeurIPS
    2023.

    Examples
    --------
    >>> received = torch.tensor([[[1.0, 9, 0, 3]]])
    >>> H2O(0.5).choose(Prompt(4, (Unit(0, 4),), 2, {1: received}, 4, {1: 1}))[1].tolist()  # (1, 1, 2)
    [[[1, 3]]]
    """

    uses_window = False

    def choose(self, prompt: Prompt) -> dict[int, Tensor]:
        """Take single tokens by what all queries give them.

        Parameters
        ----------
        prompt : Prompt

        Returns
        -------
        dict of int to Tensor of int64, shape (B, H_kv, T)
        """
        return {layer: best_tokens(prompt.by_kv_head(layer), prompt, prompt.budget) for layer in prompt.layers}


class StreamingLLM(Press):
    """Keep the first tokens and the last (StreamingLLM).

    Parameters
    ----------
    prefill_ratio, decode_ratio : float
        As in `ShotKV`.
    options
        As in `Press`.

    References
    ----------
    G. Xiao et al., *Efficient Streaming Language Models with Attention Sinks*, ICLR 2024.

    Examples
    --------
    >>> StreamingLLM(0.5).choose(Prompt(12, (Unit(0, 12),), 6, {}, 0, {1: 1}))[1].tolist()  # shape (6,)
    [0, 1, 2, 3, 10, 11]
    """

    uses_attention = False

    def choose(self, prompt: Prompt) -> dict[int, Tensor]:
        """Take the first four tokens of the prompt, if they are in units, and the last of the rest.

        Parameters
        ----------
        prompt : Prompt

        Returns
        -------
        dict of int to Tensor of int64, shape (T,)
        """
        candidates = prompt.candidates
        sinks = candidates[candidates < SINKS][: prompt.budget]
        recent = candidates[len(candidates) - (prompt.budget - len(sinks)) :]
        return dict.fromkeys(prompt.layers, torch.cat([sinks, recent]).unique())


class ChunkKV(Press):
    """Keep chunks of tokens by what the question attends to, layer by layer (ChunkKV).

    Parameters
    ----------
    prefill_ratio, decode_ratio : float
        As in `ShotKV`.
    chunk : int
        Tokens of a chunk; the last chunk that is taken may be cut to keep to the budget.
    options
        As in `Press`.

    References
    ----------
    X. Liu et al., *ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference*, 2025.

    Examples
    --------
    >>> received = torch.tensor([[[0.0, 1, 9, 9, 0, 0]]])
    >>> ChunkKV(0.5, chunk=2).choose(Prompt(6, (Unit(0, 6),), 3, {1: received}, 1, {1: 1}))[1].tolist()  # (3,)
    [0, 2, 3]
    """

    def __init__(
        self, prefill_ratio: float = 0.4, decode_ratio: float = 1.0, *, chunk: int = CHUNK, **options: Any
    ) -> None:
        if chunk < 1:
            raise InputError(f"chunk={chunk}: must be 1 or more")
        super().__init__(prefill_ratio, decode_ratio, **options)
        self.chunk = chunk

    def choose(self, prompt: Prompt) -> dict[int, Tensor]:
        """Take chunks by their mean score, and as much of the last as fits.

        Parameters
        ----------
        prompt : Prompt

        Returns
        -------
        dict of int to Tensor of int64, shape (T,)
        """
        candidates = prompt.candidates
        chunks = candidates.split(self.chunk)
        found = {}
        for layer in prompt.layers:
            scores = prompt.received[layer].sum((0, 1))
            order = torch.stack([scores[chunk].mean() for chunk in chunks]).sort(descending=True, stable=True).indices
            found[layer] = torch.cat([chunks[i] for i in order.tolist()])[: prompt.budget].sort().values
        return found


def unit_scores(received: Tensor, units: Sequence[Unit]) -> Tensor:
    """Mean over each unit's tokens of what they receive.

    Parameters
    ----------
    received : Tensor of shape (n,)
        Summed over heads.
    units : sequence of Unit

    Returns
    -------
    Tensor of shape (m,)
        For m units.

    Examples
    --------
    >>> unit_scores(torch.tensor([0.0, 2.0, 4.0, 1.0]), [Unit(1, 3), Unit(3, 4)]).tolist()
    [3.0, 1.0]
    """
    sums = F.pad(received.double().cumsum(0), (1, 0))
    starts = torch.tensor([unit.start for unit in units], device=received.device)
    ends = torch.tensor([unit.end for unit in units], device=received.device)
    return (sums[ends] - sums[starts]) / (ends - starts)


def fill(scores: Tensor, units: Sequence[Unit], budget: int) -> list[int]:
    """Take whole units in the order of their scores while they fit; one that does not fit is passed over.

    Parameters
    ----------
    scores : Tensor of shape (m,)
        Of two that are equal the earlier unit comes first.
    units : sequence of Unit
    budget : int
        Tokens.

    Returns
    -------
    list of int
        Units, ascending; the shortest one where none fits.

    Examples
    --------
    >>> fill(torch.tensor([1.0, 3.0, 2.0]), [Unit(0, 2), Unit(2, 7), Unit(7, 10)], 5)
    [1]
    >>> fill(torch.tensor([1.0, 3.0, 2.0]), [Unit(0, 2), Unit(2, 7), Unit(7, 10)], 4)
    [2]
    >>> fill(torch.tensor([1.0, 3.0, 2.0]), [Unit(0, 2), Unit(2, 7), Unit(7, 10)], 1)
    [0]
    """
    taken, room = [], budget
    sizes = [unit.end - unit.start for unit in units]
    for index in scores.sort(descending=True, stable=True).indices.tolist():
        if sizes[index] <= room:
            taken.append(index)
            room -= sizes[index]
    return sorted(taken) if taken else [min(range(len(sizes)), key=sizes.__getitem__)]


def tokens_of(units: Sequence[Unit], chosen: Sequence[int]) -> Tensor:
    """The tokens of some units.

    Parameters
    ----------
    units : sequence of Unit
    chosen : sequence of int
        Ascending.

    Returns
    -------
    Tensor of int64, shape (T,)

    Examples
    --------
    >>> tokens_of([Unit(0, 2), Unit(2, 4), Unit(4, 5)], [0, 2]).tolist()
    [0, 1, 4]
    """
    return torch.cat([torch.arange(units[i].start, units[i].end) for i in chosen])


def best_tokens(scores: Tensor, prompt: Prompt, budget: int) -> Tensor:
    """The tokens of units with the highest scores, for each head.

    Parameters
    ----------
    scores : Tensor of shape (B, H_kv, n)
    prompt : Prompt
    budget : int
        Tokens, one at least is taken where there is a budget.

    Returns
    -------
    Tensor of int64, shape (B, H_kv, T)
        Ascending; of two that are equal the earlier.

    Examples
    --------
    >>> prompt = Prompt(5, (Unit(1, 5),), 2, {}, 0, {1: 1})
    >>> best_tokens(torch.tensor([[[9.0, 1.0, 2.0, 2.0, 0.0]]]), prompt, 2).tolist()
    [[[2, 3]]]
    """
    candidates = prompt.candidates.to(scores.device)
    order = scores[..., candidates].sort(dim=-1, descending=True, stable=True).indices[..., :budget]
    return candidates[order].sort(dim=-1).values
