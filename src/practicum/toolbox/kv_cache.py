"""Surgery on the KV caches of transformers: keep some tokens, cut, join, and move keys to other positions."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import BaseQuantizedLayer, DynamicLayer

from practicum.toolbox.errors import InputError
from practicum.toolbox.taps import _Anatomy

# The largest difference that float32 rotations of the model and of ours may have, relative to the keys.
ROTATION_TOLERANCE = 1e-3


class SelectedLayer(DynamicLayer):
    """A layer of a cache that holds some of the tokens it has seen, and says that it has seen them all.

    Its logical length, `get_seq_length`, counts every token that went by, so that `generate` and the model give the
    next token the position after them; its physical length is how many it holds. Layers of one cache may hold
    different tokens and different numbers of them. It grows, and is cropped, reordered and repeated, like the
    `DynamicLayer` that it replaces. Keys stay where rotary embeddings have put them.

    Parameters
    ----------
    keys, values : Tensor of shape (B, H_kv, T, d)
        Of the T tokens that are held, T >= 1.
    positions : Tensor of int64, shape (T,) or (B or 1, H_kv or 1, T)
        Where the tokens stood, ascending; may differ between heads.
    seen : int
        How many tokens went by: more than the last position.

    Raises
    ------
    InputError
        A ValueError that names the argument, for shapes that do not fit, no token at all, positions that do not
        ascend, and ``seen`` at or below the last position.

    Notes
    -----
    A forward pass of several tokens makes one mask for all layers of a kind. Where layers differ in length it must run
    inside an `AttentionTap`, which fits the mask to each layer; steps of one token with sdpa need no mask.

    Examples
    --------
    >>> x = torch.arange(5.0).reshape(1, 1, 5, 1)
    >>> layer = SelectedLayer(x, x, torch.arange(5), seen=5)
    >>> layer.keep(torch.tensor([0, 3, 4]))
    >>> layer.keys.flatten().tolist(), layer.positions.flatten().tolist(), layer.get_seq_length()
    ([0.0, 3.0, 4.0], [0, 3, 4], 5)
    >>> layer.crop(-1)
    >>> layer.positions.flatten().tolist(), layer.get_seq_length()
    ([0, 3], 4)
    """

    # Of its own, so that it does not take the place of the layers that a configuration asks for.
    _layer_type = None
    keys: Any
    values: Any

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor, seen: int) -> None:
        super().__init__()
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
            raise InputError(
                f"values: has shape {tuple(values.shape)}; must be (B, H_kv, T, d) with the first three sizes of "
                f"keys, {tuple(keys.shape)}"
            )
        positions = positions.to(torch.int64)
        positions = positions[None, None] if positions.ndim == 1 else positions
        b, h, t = keys.shape[:3]
        if positions.ndim != 3 or positions.shape[0] not in (1, b) or positions.shape[1] not in (1, h):
            raise InputError(
                f"positions: has shape {tuple(positions.shape)}; must be ({t},) or ({b} or 1, {h} or 1, {t})"
            )
        if positions.shape[2] != t or t == 0:
            raise InputError(f"positions: are {positions.shape[2]}; must be as many as keys, {t}, and one at least")
        if bool((positions.diff(dim=-1) <= 0).any()) or int(positions.min()) < 0:
            raise InputError("positions: must ascend from 0 or more")
        if seen <= int(positions.max()):
            raise InputError(f"seen={seen}: must be above the last position, {int(positions.max())}")
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self.positions = positions.to(keys.device)
        self.seen = seen

    @classmethod
    def of(cls, layer: DynamicLayer) -> SelectedLayer:
        """All tokens of an ordinary layer, its tensors shared.

        Parameters
        ----------
        layer : transformers.cache_utils.DynamicLayer
            One that is not empty.

        Returns
        -------
        SelectedLayer
            With keys of the layer's shape (B, H_kv, n, d).

        Raises
        ------
        InputError
            A ValueError: for a layer of another kind (static, quantised, sliding) and for an empty one.
        """
        if isinstance(layer, cls):
            return layer
        if type(layer) is not DynamicLayer:
            raise InputError(f"layer: is a {type(layer).__name__}; must be a DynamicLayer")
        n = layer.get_seq_length()
        if n == 0:
            raise InputError("layer: is empty; must hold one token at least")
        assert layer.keys is not None
        assert layer.values is not None
        return cls(layer.keys, layer.values, torch.arange(n, device=layer.keys.device), n)

    def __repr__(self) -> str:
        """How much of what it holds."""
        return (
            f"SelectedLayer({self.keys.shape[-2]} of {self.seen} tokens)" if self.is_initialized else "SelectedLayer()"
        )

    def keep(self, tokens: Tensor) -> None:
        """Let go of all tokens but these.

        Parameters
        ----------
        tokens : Tensor of int64, shape (T',) or (B or 1, H_kv or 1, T')
            Indices of what is held, not positions, ascending; one at least.

        Raises
        ------
        InputError
            A ValueError: for none, one out of range, or an order that does not ascend.
        """
        held = self.keys.shape[-2]
        tokens = tokens.to(self.keys.device, torch.int64)
        tokens = tokens[None, None] if tokens.ndim == 1 else tokens
        if tokens.shape[-1] == 0:
            raise InputError("tokens: are none; a layer must keep one token at least")
        if int(tokens.min()) < 0 or int(tokens.max()) >= held or bool((tokens.diff(dim=-1) <= 0).any()):
            raise InputError(f"tokens: must ascend and be within [0, {held})")
        if tokens.shape[:2] == (1, 1):
            index = tokens[0, 0]
            self.keys, self.values = self.keys.index_select(2, index), self.values.index_select(2, index)
            self.positions = self.positions.index_select(2, index)
            return
        b, h = self.keys.shape[:2]
        wide = tokens.expand(b, h, -1)
        self.keys = self.keys.gather(2, wide[..., None].expand(-1, -1, -1, self.keys.shape[-1]))
        self.values = self.values.gather(2, wide[..., None].expand(-1, -1, -1, self.values.shape[-1]))
        self.positions = self.positions.expand(b, h, -1).gather(2, wide)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take up new tokens; as in `DynamicLayer`."""
        added = key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.positions = torch.zeros(1, 1, 0, dtype=torch.int64, device=key_states.device)
            self.seen = 0
        new = torch.arange(self.seen, self.seen + added, device=self.positions.device)
        self.positions = torch.cat([self.positions, new.expand(*self.positions.shape[:2], added)], dim=-1)
        self.seen += added
        return super().update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        """How many tokens went by."""
        return self.seen if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the next attention has, and where the first of them stands as masks count."""
        held = self.keys.shape[-2] if self.is_initialized else 0
        return held + query_length, self.get_seq_length() - held

    def crop(self, tokens_to_remove: int) -> None:
        """Forget that the last ``-tokens_to_remove`` tokens went by, and let go of those of them that are held.

        Raises
        ------
        InputError
            A ValueError: where heads hold different numbers of the tokens that remain, or nothing would remain.
        """
        if tokens_to_remove > 0:
            raise InputError(f"tokens_to_remove={tokens_to_remove}: must be negative: so many are taken off the end")
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        seen = self.seen + tokens_to_remove
        staying = (self.positions < seen).sum(-1)
        held = int(staying.min())
        if held != int(staying.max()):
            raise InputError(
                f"tokens_to_remove={tokens_to_remove}: heads would hold {held} to {int(staying.max())} tokens"
            )
        if held == 0:
            raise InputError(f"tokens_to_remove={tokens_to_remove}: the layer would hold no token of {self.seen} seen")
        self.keys, self.values = self.keys[..., :held, :], self.values[..., :held, :]
        self.positions, self.seen = self.positions[..., :held], seen

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.seen = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the sequences of the batch in another order."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._batch(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch."""
        super().batch_repeat_interleave(repeats)
        if self.is_initialized and len(self.positions) > 1:
            self.positions = self.positions.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences of the batch."""
        super().batch_select_indices(indices)
        self._batch(indices)

    def _batch(self, chosen: Tensor) -> None:
        if self.is_initialized and len(self.positions) > 1:
            self.positions = self.positions[chosen.to(self.positions.device)]


def full_attention_layers(cache: Cache) -> list[int]:
    """Which layers of a cache can hold a selection: those that are neither sliding windows nor recurrent.

    Parameters
    ----------
    cache : transformers.Cache
        After a forward pass.

    Returns
    -------
    list of int
        From 1, as everywhere in the toolbox; its length is at most L.

    Raises
    ------
    InputError
        A ValueError: for a static or quantised cache, and for one without such a layer.

    Examples
    --------
    >>> x = torch.zeros(1, 1, 3, 2)
    >>> full_attention_layers(DynamicCache([(x, x), (x, x)]))
    [1, 2]
    """
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise InputError(f"cache: is a {type(cache).__name__}; must be a DynamicCache")
    found = [i for i, layer in enumerate(layers, start=1) if type(layer) in (DynamicLayer, SelectedLayer)]
    strange = [type(layer).__name__ for layer in layers if not isinstance(layer, DynamicLayer) or _packs(layer)]
    if not found:
        kinds = ", ".join(sorted(set(strange or (type(layer).__name__ for layer in layers)))) or "nothing"
        raise InputError(f"cache: has no layer of full attention that grows; has {kinds}. It must be a DynamicCache")
    return found


def _packs(layer: Any) -> bool:
    """Quantised layers inherit from the dynamic one."""
    return isinstance(layer, BaseQuantizedLayer)


def select(cache: Cache, tokens: Mapping[int, Tensor] | Tensor) -> Cache:
    """Keep some tokens of a cache, layer by layer; in place, and one layer's copy at a time.

    Parameters
    ----------
    cache : transformers.Cache
        A `DynamicCache` after a forward pass, or one that was selected from before.
    tokens : mapping of int to Tensor, or Tensor
        For each layer, from 1, the indices of what it holds that stay: int64, ascending, shape (T,) or
        (B or 1, H_kv or 1, T). Layers that are not named keep everything. A Tensor stands for all layers of full
        attention; sliding windows are left alone.

    Returns
    -------
    transformers.Cache
        ``cache``, its layers replaced by `SelectedLayer`.

    Raises
    ------
    InputError
        A ValueError that names the layer: for one that cannot hold a selection, and as `SelectedLayer.keep`.

    Examples
    --------
    >>> x = torch.zeros(1, 1, 6, 2)
    >>> cache = select(DynamicCache([(x, x), (x, x)]), {2: torch.tensor([0, 4, 5])})
    >>> [layer.keys.shape[-2] for layer in cache.layers], cache.get_seq_length(1)
    ([6, 3], 6)
    """
    able = full_attention_layers(cache)
    chosen = dict.fromkeys(able, tokens) if isinstance(tokens, Tensor) else dict(tokens)
    strange = sorted(set(chosen) - set(able))
    if strange:
        raise InputError(
            f"tokens: layer {strange[0]} has no full attention that grows; the layers that have are {able}"
        )
    layers: list[Any] = cache.layers
    for layer in able:
        selected = SelectedLayer.of(layers[layer - 1])
        if layer in chosen:
            try:
                selected.keep(chosen[layer])
            except InputError as error:
                raise InputError(f"layer {layer}: {error}") from None
        layers[layer - 1] = selected
    return cache


def clone(cache: Cache) -> Cache:
    """A copy of a cache that grows on its own; what is held so far is shared, and never written to.

    Parameters
    ----------
    cache : transformers.Cache
        A `DynamicCache`; layers may be `SelectedLayer`.

    Returns
    -------
    transformers.Cache
        With tensors of the same shapes (B, H_kv, T, d).

    Examples
    --------
    >>> x = torch.zeros(1, 1, 6, 2)
    >>> one = DynamicCache([(x, x)])
    >>> other = clone(one)
    >>> _ = other.update(x, x, 0)
    >>> one.get_seq_length(), other.get_seq_length()
    (6, 12)
    """
    made = copy.copy(cache)
    # Growing replaces a layer's tensors by longer ones: to copy what points to them is enough.
    made.layers = [copy.copy(layer) for layer in cache.layers]
    return made


def cut(cache: Cache, start: int, stop: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of a span of tokens, as views.

    Parameters
    ----------
    cache : transformers.Cache
        Every layer must hold the whole span.
    start, stop : int
        Positions, ``start < stop``.

    Returns
    -------
    list of (Tensor, Tensor)
        For each layer keys and values, shape (B, H_kv, stop - start, d).

    Raises
    ------
    InputError
        A ValueError: for a span that is empty or that a layer does not hold whole.

    Examples
    --------
    >>> x = torch.arange(6.0).reshape(1, 1, 6, 1)
    >>> [(keys, values)] = cut(DynamicCache([(x, x)]), 2, 5)
    >>> keys.flatten().tolist()
    [2.0, 3.0, 4.0]
    """
    if not 0 <= start < stop:
        raise InputError(f"start={start}, stop={stop}: must be a span that is not empty")
    parts = []
    layers: list[Any] = cache.layers
    for number, layer in enumerate(layers, start=1):
        held = getattr(layer, "positions", None)
        if held is None:
            n = 0 if layer.keys is None else layer.keys.shape[-2]
            held = torch.arange(layer.get_seq_length() - n, layer.get_seq_length())[None, None]
        first = int((held[0, 0] < start).sum())
        found = held[..., first : first + stop - start].cpu()
        if found.shape[-1] < stop - start or bool((found != torch.arange(start, stop)).any()):
            raise InputError(f"start={start}, stop={stop}: layer {number} does not hold the whole span")
        parts.append(
            (layer.keys[..., first : first + stop - start, :], layer.values[..., first : first + stop - start, :])
        )
    return parts


def join(
    parts: Sequence[Sequence[tuple[Tensor, Tensor]]], starts: Sequence[int] | None = None, rotary: Rotary | None = None
) -> DynamicCache:
    """One cache of several spans, put one after another.

    Parameters
    ----------
    parts : sequence of what `cut` returns
        Of the same model and batch.
    starts : sequence of int, optional
        The position where each part's keys stand now. With it, and with ``rotary``, keys are moved to where the part
        comes to stand; without, they stay as they are.
    rotary : Rotary, optional

    Returns
    -------
    transformers.DynamicCache
        With keys of shape (B, H_kv, n, d), n the sum of the parts' lengths.

    Raises
    ------
    InputError
        A ValueError: for no part, numbers of layers that differ, or ``starts`` without ``rotary``.

    Examples
    --------
    >>> x = torch.arange(6.0).reshape(1, 1, 6, 1)
    >>> cache = DynamicCache([(x, x)])
    >>> join([cut(cache, 4, 6), cut(cache, 0, 1)]).layers[0].keys.flatten().tolist()
    [4.0, 5.0, 0.0]
    """
    if not parts:
        raise InputError("parts: are none; must be one at least")
    sizes = {len(part) for part in parts}
    if len(sizes) > 1:
        raise InputError(f"parts: have {sorted(sizes)} layers; must have the same number")
    if (starts is None) != (rotary is None):
        raise InputError("starts and rotary: must be given together")
    if starts is not None and len(starts) != len(parts):
        raise InputError(f"starts: are {len(starts)}; must be as many as parts, {len(parts)}")
    data = []
    for index in range(len(parts[0])):
        keys, at = [], 0
        for number, part in enumerate(parts):
            key = part[index][0]
            if rotary is not None and starts is not None:
                key = rotary.move(key, at - starts[number], index + 1)
            keys.append(key)
            at += key.shape[-2]
        data.append((torch.cat(keys, dim=-2), torch.cat([part[index][1] for part in parts], dim=-2)))
    return DynamicCache(data)


@dataclass(frozen=True)
class Held:
    """What a cache holds.

    Attributes
    ----------
    nbytes : int
        Of keys and values.
    full_nbytes : int
        What they would take had nothing been let go of; as many for sliding windows as they hold.
    tokens : tuple of int
        Held by each layer.
    seen : int
        Tokens that went by.

    Examples
    --------
    >>> x = torch.zeros(1, 2, 8, 4)
    >>> held(select(DynamicCache([(x, x)]), torch.tensor([0, 7])))
    Held(nbytes=128, full_nbytes=512, tokens=(2,), seen=8)
    """

    nbytes: int
    full_nbytes: int
    tokens: tuple[int, ...]
    seen: int


def held(cache: Cache) -> Held:
    """Count what a cache holds.

    Parameters
    ----------
    cache : transformers.Cache

    Returns
    -------
    Held
        In bytes and tokens; ``tokens`` has shape (L,).

    Examples
    --------
    >>> x = torch.zeros(1, 2, 8, 4)
    >>> held(DynamicCache([(x, x)])).nbytes
    512
    """
    nbytes, full, tokens = 0, 0, []
    layers: list[Any] = cache.layers
    for layer in layers:
        if layer.keys is None:
            tokens.append(0)
            continue
        size = sum(x.numel() * x.element_size() for x in (layer.keys, layer.values))
        n = layer.keys.shape[-2]
        nbytes += size
        full += size * layer.get_seq_length() // n if isinstance(layer, SelectedLayer) and n else size
        tokens.append(n)
    return Held(nbytes, full, tuple(tokens), cache.get_seq_length())


class Rotary:
    r"""Move keys that rotary position embeddings have put at one position to another.

    A rotary embedding turns the i-th pair of a key at position p by the angle :math:`p f_i`; angles add, so that a key
    moves from p to p + delta when it is turned by :math:`\delta f_i` once more. The model's own module and function are
    used for it, in float32, whatever pairs they turn and however many; a scale of the embedding (YaRN) is in the keys
    already and is left alone. That turning a key on is the same as putting it there is tried on each kind of layer
    when the object is made.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model with rotary embeddings of a frequency that does not change with the length: default,
        linear, YaRN, Llama 3, proportional, or dynamic NTK as long as no sequence was longer than the model was made
        for.

    Raises
    ------
    InputError
        A ValueError that names the model: where it has no such embeddings, where they change with the length, and
        where the trial fails.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ... )
    >>> model = LlamaForCausalLM(config).eval()
    >>> rotary = Rotary(model)
    >>> keys = torch.randn(1, 2, 3, 8)
    >>> torch.allclose(rotary.move(rotary.move(keys, 5, 1), -5, 1), keys, atol=1e-5)
    True
    """

    def __init__(self, model: nn.Module) -> None:
        anatomy = _Anatomy.of(model)
        self._name = type(anatomy.model).__name__
        self._config = anatomy.config
        self._module = self._embedding(anatomy.decoder)
        self._function = self._turn_of(anatomy)
        self.n_layers = len(anatomy.blocks)
        types = list(getattr(self._config, "layer_types", None) or [])
        by_type = isinstance(getattr(self._module, "rope_type", None), dict)
        self._types = types if by_type and len(types) == self.n_layers else [None] * self.n_layers
        for kind in dict.fromkeys(self._types):
            self._require_constant(kind)
            self._try(kind)

    def move(self, keys: Tensor, delta: int | Tensor, layer: int) -> Tensor:
        """Keys as they would be, had their tokens stood ``delta`` positions later.

        Parameters
        ----------
        keys : Tensor of shape (B, H_kv, T, d)
            With rotary embeddings applied.
        delta : int or Tensor of int64, shape (T,)
            Negative moves them to the front.
        layer : int
            From 1: some models turn the keys of different layers at different frequencies.

        Returns
        -------
        Tensor of shape (B, H_kv, T, d)
            Of the type of ``keys``, computed in float32 and rounded once.

        Raises
        ------
        InputError
            A ValueError: for a layer that the model has not, or a dynamic embedding that has changed by now.
        """
        if not 1 <= layer <= self.n_layers:
            raise InputError(f"layer={layer}: must be from 1 to {self.n_layers}")
        kind = self._types[layer - 1]
        self._require_constant(kind)
        steps = torch.as_tensor(delta, device=keys.device)
        if steps.ndim == 0:
            if int(steps) == 0:
                return keys
            steps = steps.expand(keys.shape[-2])
        if steps.shape != keys.shape[-2:-1]:
            raise InputError(f"delta: has shape {tuple(steps.shape)}; must be a number or ({keys.shape[-2]},)")
        return self._turned(keys.float(), steps, kind, scaled=False).to(keys.dtype)

    @torch.no_grad()
    def _turned(self, keys: Tensor, steps: Tensor, kind: str | None, *, scaled: bool) -> Tensor:
        arguments = () if kind is None else (kind,)
        cos, sin = self._module(keys, steps[None], *arguments)
        scale = 1.0 if scaled else self._of(kind, "attention_scaling", 1.0)
        cos, sin = cos.float() / scale, sin.float() / scale
        return self._apply(keys, cos, sin)

    def _apply(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = cos.shape[-1]
        if width >= keys.shape[-1]:
            return self._function(keys, keys, cos, sin)[1]
        # The first values of a key are turned and the rest is passed on, by the function or by the attention module.
        turned = self._function(keys[..., :width], keys[..., :width], cos, sin)[1]
        return torch.cat([turned, keys[..., width:]], dim=-1)

    def _of(self, kind: str | None, what: str, default: Any) -> Any:
        prefix = "" if kind is None else f"{kind}_"
        return getattr(self._module, prefix + what, default)

    def _embedding(self, decoder: nn.Module) -> nn.Module:
        found = [module for path, module in decoder.named_modules() if path.rsplit(".", 1)[-1].startswith("rotary_emb")]
        found = [module for module in found if any("inv_freq" in name for name, _ in module.named_buffers())]
        if len(found) != 1:
            raise InputError(
                f"model={self._name}: must have one module of rotary position embeddings; has {len(found)}, so its "
                "keys cannot be moved to other positions"
            )
        return found[0]

    def _turn_of(self, anatomy: _Anatomy) -> Any:
        for module in (anatomy.blocks[0], *anatomy.blocks[0].modules()):
            function = getattr(sys.modules.get(type(module).__module__), "apply_rotary_pos_emb", None)
            if function is not None:
                return function
        raise InputError(f"model={self._name}: has no apply_rotary_pos_emb beside it, so its keys cannot be moved")

    def _require_constant(self, kind: str | None) -> None:
        types = getattr(self._module, "rope_type", "default")
        rope = types[kind] if isinstance(types, dict) else types
        if rope == "longrope":
            raise InputError(
                f"model={self._name}: its rotary embeddings (longrope) change with the length; keys cannot be moved"
            )
        if "dynamic" in str(rope):
            made_for = getattr(self._module, "original_max_seq_len", None)
            longest = self._of(kind, "max_seq_len_cached", made_for)
            if made_for is not None and int(longest) > int(made_for):
                raise InputError(
                    f"model={self._name}: its rotary embeddings (dynamic) have changed for a sequence of "
                    f"{int(longest)} tokens, more than the {int(made_for)} it was made for; keys cannot be moved"
                )

    def _try(self, kind: str | None) -> None:
        width = self._of(kind, "inv_freq", None)
        width = 2 * width.shape[-1] if width is not None else 8
        device = next(self._module.buffers()).device
        plain = torch.randn(1, 1, 3, width, generator=torch.Generator().manual_seed(0)).to(device)
        first, second = torch.tensor([0, 1, 7], device=device), torch.tensor([5, 0, 9], device=device)
        try:
            there = self._turned(plain, first, kind, scaled=True)
            moved = self._turned(there, second - first, kind, scaled=False)
            at_once = self._turned(plain, second, kind, scaled=True)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            raise InputError(
                f"model={self._name}: its rotary embeddings are of a kind that is not known: {error}"
            ) from error
        if float((moved - at_once).abs().max()) > ROTATION_TOLERANCE:
            raise InputError(
                f"model={self._name}: turning a key on is not the same as putting it there; keys cannot be moved"
            )
