"""The cache that a press leaves behind, and the report of what it has kept."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from practicum.toolbox.kv_cache import Held, SelectedLayer, held


@dataclass(frozen=True)
class ShotKVReport:
    """What was kept of a prompt of n tokens.

    Attributes
    ----------
    n_tokens : int
        Tokens of the prompt.
    protected : int
        Those outside units, which are always kept.
    budget : int
        Tokens of units that could be kept.
    kept_tokens : dict of int to int
        For each layer, from 1, how many tokens of units were kept.
    units_by_layer : dict of int to tuple of int
        For each layer the units that were kept whole, from 0, in their order in the prompt.
    overrun_tokens : int
        By how much the budget was overrun, as a mean over layers, rounded up.
    untouched_layers : tuple of int
        Layers with sliding windows, which hold their window.
    nbytes, full_nbytes : int
        Of the keys and values, shape (B, H_kv, T, d) a layer, and what they would be with all tokens kept.

    Examples
    --------
    >>> ShotKVReport(10, 4, 3, {1: 3}, {1: (0,)}, 0, (), 700, 1000).kept_fraction
    0.7
    """

    n_tokens: int
    protected: int
    budget: int
    kept_tokens: dict[int, int]
    units_by_layer: dict[int, tuple[int, ...]]
    overrun_tokens: int
    untouched_layers: tuple[int, ...]
    nbytes: int
    full_nbytes: int

    @property
    def kept_fraction(self) -> float:
        """Bytes that are held, of those that the whole prompt would take."""
        return self.nbytes / self.full_nbytes


class ShotKVLayer(SelectedLayer):
    """A layer whose first tokens are frozen, and that keeps count of what the generated ones receive of attention.

    Attributes
    ----------
    received : Tensor of shape (B, T), float32
        For each token that is held; that of the prompt is not counted.
    n_prompt : int
        Tokens of the prompt, held or not: positions from here on are generated.

    Examples
    --------
    >>> x = torch.zeros(1, 1, 4, 2)
    >>> layer = ShotKVLayer(x, x, torch.arange(4), 4)
    >>> _ = layer.update(x, x)
    >>> layer.generated().tolist()
    [4, 5, 6, 7]
    """

    _layer_type = None

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor, seen: int) -> None:
        super().__init__(keys, values, positions, seen)
        self.n_prompt = seen
        self.received = torch.zeros(keys.shape[0], keys.shape[2], device=keys.device)

    def generated(self) -> Tensor:
        """Indices of the generated tokens among those held: int64, shape (g,)."""
        return torch.nonzero(self.positions[0, 0] >= self.n_prompt).flatten()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take up new tokens, which have received nothing yet."""
        new = torch.zeros(key_states.shape[0], key_states.shape[2], device=self.received.device)
        self.received = torch.cat([self.received, new], dim=1)
        return super().update(key_states, value_states, *args, **kwargs)

    def keep(self, tokens: Tensor) -> None:
        """Let go of all tokens but these, and of their counts.

        Parameters
        ----------
        tokens : Tensor of int64, shape (T',) or (B or 1, H_kv or 1, T')
        """
        super().keep(tokens)
        index = tokens[:, 0] if tokens.ndim == 3 else tokens[None]
        self.received = self.received.gather(1, index.expand(len(self.received), -1).to(self.received.device))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, and their counts."""
        super().crop(tokens_to_remove)
        self.received = self.received[:, : self.keys.shape[-2]]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch."""
        super().batch_repeat_interleave(repeats)
        self.received = self.received.repeat_interleave(repeats, dim=0)

    def _batch(self, chosen: Tensor) -> None:
        super()._batch(chosen)
        self.received = self.received[chosen.to(self.received.device)]


class ShotKVCache(DynamicCache):
    """The cache of a compressed prompt, for ``model.generate(input_ids, cache=cache)`` on the same ``input_ids``.

    It has seen all tokens of the prompt but the last, which `generate` reads again.

    Attributes
    ----------
    report : ShotKVReport
        What was kept; its counts include the last token.
    fingerprint : str
        Of the prompt's token ids, shape (B, n).

    Examples
    --------
    >>> x = torch.zeros(1, 1, 4, 2)
    >>> report = ShotKVReport(5, 4, 0, {1: 0}, {1: ()}, 0, (), 64, 64)
    >>> ids = torch.tensor([[1, 2, 3, 4, 5]])
    >>> cache = ShotKVCache([ShotKVLayer(x, x, torch.arange(4), 4)], report, ids)
    >>> cache.get_seq_length(), cache.covers(ids), cache.covers(ids.flip(1))
    (4, True, False)
    """

    def __init__(self, layers: Sequence[Any], report: ShotKVReport, input_ids: Tensor) -> None:
        super().__init__()
        # What `DynamicCache` would make by itself, layer by layer as keys come in.
        self.layer_class_to_replicate = None
        self.layers = list(layers)
        self.report = report
        self.fingerprint = _fingerprint(input_ids)

    def covers(self, input_ids: Tensor) -> bool:
        """Whether it was made for this prompt.

        Parameters
        ----------
        input_ids : Tensor of int64, shape (B, n)

        Returns
        -------
        bool
        """
        return _fingerprint(input_ids) == self.fingerprint

    def held(self) -> Held:
        """What it holds now, generated tokens included.

        Returns
        -------
        Held
            In bytes and tokens, of shape (L,).
        """
        return held(self)


def _fingerprint(input_ids: Tensor) -> str:
    # Beams repeat a prompt.
    rows = torch.unique_consecutive(input_ids.cpu().to(torch.int64), dim=0)
    return hashlib.sha256(f"{tuple(rows.shape)}".encode() + rows.numpy().tobytes()).hexdigest()[:16]
