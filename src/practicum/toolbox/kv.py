"""Seeing and changing what goes into the attention of any transformers causal language model."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from practicum.toolbox.errors import InputError
from practicum.toolbox.taps import _Anatomy, _checked_layers

# Rows of a mask that are looked at together.
ROWS_AT_ONCE = 512


class AttentionTap:
    r"""Call a function on the queries, keys and values of every attention, just before they meet.

    The model's present attention function is wrapped, whichever it is, through the registries of transformers
    (`AttentionInterface` and `AttentionMaskInterface`): rotary embeddings are applied, the cache is joined, and heads
    are not yet repeated. With nothing replaced the model's outputs are the same to the bit. Several taps may be active
    at once and may end in any order; those entered later see what the earlier ones changed. When the last one ends, by
    an exception or Ctrl-C as well, the model has its attention function back.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model whose class uses the registry, or one wrapped by PEFT.
    observe : callable
        ``observe(call) -> AttentionCall or None``, called with an `AttentionCall` for each layer of every forward pass,
        each step of `generate` included. Return None to change nothing, or ``call.replace(query=...)``.
    layers : int or sequence of int, optional
        From 1, the first block, to L. All of them by default; blocks without attention are passed over.
    on_forward : callable, optional
        ``on_forward()`` after the blocks of every forward pass.

    Raises
    ------
    InputError
        A ValueError that names the argument: for a layer that the model has not, or a model class that does not use the
        registry; and, when the model runs, for an ``observe`` that returns anything else.

    Notes
    -----
    While a tap is active, ``config._attn_implementation`` is a name of its own, which contains the original one: the
    few model classes that compare it with a literal outside the registry take the branch of a custom implementation.
    Where gradient checkpointing computes a block again in the backward pass, ``observe`` is called again, and the tap
    must still be active if it replaces anything; ``tap.in_forward`` is False then.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    ...     num_key_value_heads=2,
    ... )
    >>> model, ids = LlamaForCausalLM(config).eval(), torch.tensor([[5, 6, 7]])
    >>> with torch.no_grad(), AttentionTap(model, lambda call: print(call.layer, *call.query.shape, *call.key.shape)):
    ...     tapped = model(ids)
    1 1 4 3 4 1 2 3 4
    2 1 4 3 4 1 2 3 4
    >>> torch.equal(tapped.logits, model(ids).logits)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        observe: Callable[[AttentionCall], AttentionCall | None],
        layers: int | Sequence[int] | None = None,
        on_forward: Callable[[], object] | None = None,
    ) -> None:
        if not callable(observe):
            raise InputError(f"observe={observe!r}: must be a function of an AttentionCall")
        self._switch = _Switch.of(model)
        n = len(self._switch.anatomy.blocks)
        self.layers = _checked_layers(range(1, n + 1) if layers is None else layers, "attention", n)
        self.observe = observe
        self.on_forward = on_forward
        self.in_forward = False
        self._undo: ExitStack | None = None

    def __enter__(self) -> Self:
        """Wrap the attention function."""
        if self._undo is not None:
            raise InputError("tap: is active already; make another AttentionTap to nest them")
        with ExitStack() as undo:
            decoder = self._switch.anatomy.decoder
            undo.callback(self._ended)
            undo.callback(decoder.register_forward_pre_hook(self._begin).remove)
            undo.callback(decoder.register_forward_hook(self._end).remove)
            undo.callback(self._switch.remove, self)
            self._switch.add(self)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        """Give the model its attention function back."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.close()

    def _begin(self, module: nn.Module, args: Any) -> None:
        self.in_forward = True
        self._switch.memo.clear()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._ended()
        if self.on_forward is not None:
            self.on_forward()

    def _ended(self) -> None:
        self.in_forward = False
        self._switch.memo.clear()


@dataclass(frozen=True)
class AttentionCall:
    """What one attention layer is about to compute: q and k of B sequences, with n keys for the m rows of queries.

    Attributes
    ----------
    layer : int
        From 1.
    module : torch.nn.Module
        The attention module.
    query : Tensor of shape (B, H, m, d)
    key, value : Tensor of shape (B, H_kv, n, d)
        Those of the cache included. Query head h has the key and value head ``h // (H // H_kv)``.
    attention_mask : Tensor, BlockMask or None
        As the model made it for its attention function.
    scaling : float
        What q.k is multiplied by.
    is_causal : bool
    implementation : str
        Name of the model's attention function, such as "sdpa".
    options : mapping
        Everything else that the function is given: ``sliding_window``, ``softcap``, ``s_aux``, ``position_bias``...
    """

    layer: int
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    attention_mask: Any
    scaling: float
    is_causal: bool
    implementation: str
    options: Mapping[str, Any] = field(default_factory=dict)
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def replace(self, *, query: Tensor | None = None, key: Tensor | None = None, value: Tensor | None = None) -> Self:
        """The same call with other tensors, which must have the shapes of those they replace.

        Parameters
        ----------
        query, key, value : Tensor, optional

        Returns
        -------
        AttentionCall

        Raises
        ------
        InputError
            A ValueError: for another shape, type or device.
        """
        new: dict[str, Any] = {
            name: x for name, x in (("query", query), ("key", key), ("value", value)) if x is not None
        }
        for name, x in new.items():
            for what in ("shape", "dtype", "device"):
                given, got = getattr(getattr(self, name), what), getattr(x, what)
                if got != given:
                    raise InputError(f"{name}: has {what} {got}; must have {given}, as the model's own")
        return replace(self, **new)

    @property
    def softcap(self) -> float | None:
        """Where the logits are capped by a tanh, or None."""
        return self.options.get("softcap")

    @property
    def sinks(self) -> Tensor | None:
        """A learned logit a head, shape (H,), that takes part in the softmax without being a key, or None."""
        return self.options.get("s_aux")

    def band(self) -> Band | None:
        """Which keys are seen, where that is what a causal mask, a window and hidden keys amount to.

        Returns
        -------
        Band or None
            None for any other mask: bidirectional, packed, one that differs between heads, or with a bias.
        """
        key = (id(self.attention_mask), self.is_causal, self._sizes, self.options.get("sliding_window"))
        if self.options.get("position_bias") is not None:
            return None
        if key not in self.memo:
            # The mask is kept with what was found, so that its id stays its own.
            self.memo[key] = (self.attention_mask, self._band())
        return self.memo[key][1]

    def keys_seen(self) -> Tensor:
        """How many keys each row sees.

        Returns
        -------
        Tensor of int64, shape (B, m)
            Where heads differ, that of the first.
        """
        band = self.band()
        if band is not None:
            return band.keys_seen(len(self.query), self.query.shape[2], self.query.device)
        parts = [self.visible(rows)[:, 0].sum(-1) for rows in self._blocks()]
        return torch.cat(parts, dim=1).expand(len(self.query), -1)

    def visible(self, rows: slice | Tensor, keys: slice = slice(None)) -> Tensor:
        """Which keys some rows see.

        Parameters
        ----------
        rows : slice or Tensor of int64, shape (r,)
            Rows of the query.
        keys : slice
            The keys that are asked about; all n by default.

        Returns
        -------
        Tensor of bool, shape (B or 1, H or 1, r, keys)
        """
        mask, (m, n), device = self.attention_mask, self._sizes, self.query.device
        if isinstance(mask, Tensor) and mask.ndim == 4:
            part = mask[..., rows, :][..., :n][..., keys]
            return part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2
        chosen = torch.arange(m, device=device)[rows]
        at = torch.arange(n, device=device)[keys][None]
        last = chosen[:, None] + self._offset
        if mask is None or isinstance(mask, Tensor):
            seen = at <= last if self.is_causal or self._flash_window is not None else torch.ones_like(at <= last)
            if self._flash_window is not None:
                seen = seen & (at > last - self._flash_window)
            return seen[None, None] if mask is None else seen[None, None] & mask[:, None, None, -n:][..., keys].bool()
        batch = torch.arange(len(self.query), device=device)[:, None, None, None]
        seen = mask.mask_mod(batch, torch.zeros_like(batch), chosen[None, None, :, None], at[None, None])
        return seen.expand(len(self.query), 1, len(chosen), at.shape[1])

    def logits(self, rows: slice | Tensor, keys: slice = slice(None)) -> Tensor:
        """Attention logits of some rows, in float32 at least; what a row does not see has -inf.

        Parameters
        ----------
        rows : slice or Tensor of int64, shape (r,)
            Rows of the query.
        keys : slice
            The keys that are wanted; all n by default.

        Returns
        -------
        Tensor of shape (B, H, r, keys)
            Scaled, capped, and with the bias that the mask or the model adds. A sink is not among the keys.
        """
        (b, heads, _, d), kv_heads = self.query.shape, self.key.shape[1]
        dtype = torch.float64 if self.query.dtype == torch.float64 else torch.float32
        q = self.query[:, :, rows].to(dtype) * self.scaling
        k = self.key[:, :, keys].to(dtype)
        z = (q.reshape(b, kv_heads, -1, d) @ k.mT).reshape(b, heads, q.shape[2], k.shape[2])
        if self.softcap is not None:
            z = torch.tanh(z / self.softcap) * self.softcap
        for bias in (self.options.get("position_bias"), self.attention_mask):
            if isinstance(bias, Tensor) and bias.ndim == 4 and bias.dtype != torch.bool:
                z = z + bias[..., rows, :][..., : self.key.shape[2]][..., keys].to(dtype)
        return z.masked_fill(~self.visible(rows, keys), -torch.inf)

    def _blocks(self) -> list[slice]:
        m = self.query.shape[2]
        return [slice(i, min(i + ROWS_AT_ONCE, m)) for i in range(0, m, ROWS_AT_ONCE)]

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.query.shape[2], self.key.shape[2]

    @property
    def _offset(self) -> int:
        """Keys before the first row's own, where the mask does not say."""
        m, n = self._sizes
        # torch's scaled_dot_product_attention counts from the first key: an empty static cache has more keys than rows.
        return 0 if self.attention_mask is None and m > 1 and "sdpa" in self.implementation else n - m

    @property
    def _flash_window(self) -> int | None:
        # Other functions are given windows within the mask.
        return self.options.get("sliding_window") if "flash" in self.implementation else None

    def _band(self) -> Band | None:
        mask, (m, n) = self.attention_mask, self._sizes
        if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
            keys = None if mask is None or bool(mask.all()) else mask[:, -n:].bool()
            if m > 1 and not self.is_causal:
                return None
            return Band(self._offset, keys, self._flash_window)
        if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[1] != 1:
            return None
        seen_by_any = torch.zeros(len(mask), n, dtype=torch.bool, device=mask.device)
        for rows in self._blocks():
            seen = self.visible(rows)
            if mask.dtype != torch.bool and bool((mask[..., rows, :n].masked_fill(~seen, 0) != 0).any()):
                return None
            seen_by_any |= seen[:, 0].any(1)
        last = torch.nonzero(self.visible(slice(m - 1, m))[:, 0, 0].any(0))
        offsets = {n - m, int(last.max()) + 1 - m if len(last) else 0}
        windows = dict.fromkeys((None, self.options.get("sliding_window")))
        for offset, window in itertools.product(sorted(o for o in offsets if o >= 0), windows):
            band = Band(offset, None if bool(seen_by_any.all()) else seen_by_any, window)
            if self._is(band):
                return band
        return None

    def _is(self, band: Band) -> bool:
        n = self.key.shape[2]
        for rows in self._blocks():
            seen = self.visible(rows)[:, 0]
            expected = band.visible(rows.start, rows.stop, n, seen.device)
            if not torch.equal(seen, expected.expand_as(seen)):
                return False
        return True


class ReceivedAttention:
    r"""Sum what each key receives of attention, for the last rows of queries or for all of them.

    .. math:: a^{l}_{h,t} = \sum_{i \in I} \mathrm{softmax}_t(q_i \cdot k_t)

    with I the last ``window`` rows of the queries, or all. For a window of w rows and n keys that costs w n products a
    head and layer; for all rows it is the n^2 of attention once more, in blocks of rows: the whole matrix is never
    there. Passes that follow each other, with a cache between them, add up, as parts of one prompt do; with a window,
    each pass begins anew, so that the last pass counts.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        As for `AttentionTap`, which watches it.
    window : int, optional
        How many of the last rows of a pass; all by default.
    layers : int or sequence of int, optional
        From 1; all by default.

    Attributes
    ----------
    received : dict of int to Tensor of shape (B, H, n), float32
        For each layer, what the n keys of its last pass received from the queries of each head.
    rows : int
        How many rows the sums are over.

    Raises
    ------
    InputError
        A ValueError that names the argument: for a window below 1, and as `AttentionTap`.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    ...     num_key_value_heads=2,
    ... )
    >>> model, ids = LlamaForCausalLM(config).eval(), torch.tensor([[5, 6, 7, 8]])
    >>> with torch.no_grad(), ReceivedAttention(model, window=2) as seen:
    ...     _ = model(ids)
    >>> tuple(seen.received[1].shape), round(float(seen.received[1].sum()), 4)  # two rows of four heads
    ((1, 4, 4), 8.0)
    """

    def __init__(self, model: nn.Module, window: int | None = None, layers: int | Sequence[int] | None = None) -> None:
        if window is not None and window < 1:
            raise InputError(f"window={window}: must be 1 or more rows, or None for all")
        self.window = window
        self.received: dict[int, Tensor] = {}
        self.rows = 0
        self._tap = AttentionTap(model, self._observe, layers)

    def __enter__(self) -> Self:
        """Begin to watch."""
        self._tap.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the model as it was; what was summed stays."""
        self._tap.__exit__(*exception)

    @torch.no_grad()
    def _observe(self, call: AttentionCall) -> None:
        m = call.query.shape[2]
        first = 0 if self.window is None else max(0, m - self.window)
        found = received_attention(call, first)
        before = self.received.get(call.layer)
        if self.window is None and before is not None and before.shape[:2] == found.shape[:2]:
            # Keys that a cache has let go of since would be others: only one that has grown is the same prompt.
            if before.shape[2] + m != found.shape[2]:
                before = None
            else:
                found[..., : before.shape[2]] += before
        else:
            before = None
        self.received[call.layer] = found
        if call.layer == self._tap.layers[0]:
            self.rows = m - first + (self.rows if before is not None else 0)


def received_attention(call: AttentionCall, first: int = 0) -> Tensor:
    """What each key receives of attention from the rows of queries from ``first`` on, summed.

    Parameters
    ----------
    call : AttentionCall
    first : int
        Row from which on queries count.

    Returns
    -------
    Tensor of shape (B, H, n), float32
        Where the model has attention sinks, what they take is missing.
    """
    b, heads, m, _ = call.query.shape
    total = torch.zeros(b, heads, call.key.shape[2], device=call.query.device)
    for start in range(first, m, ROWS_AT_ONCE):
        z = call.logits(slice(start, min(start + ROWS_AT_ONCE, m)))
        if call.sinks is not None:
            sink = call.sinks.to(z.dtype)[None, :, None, None].expand(*z.shape[:3], 1)
            shares = torch.softmax(torch.cat([z, sink], dim=-1), dim=-1)[..., :-1]
        else:
            shares = torch.softmax(z, dim=-1)
        # A row of padding sees nothing at all.
        total += shares.nan_to_num(0.0).sum(2)
    return total


@dataclass(frozen=True)
class Band:
    """Row i sees key j when j <= i + offset, j > i + offset - window, and j is not hidden.

    Attributes
    ----------
    offset : int
        Keys before the first row's own.
    keys : Tensor of bool, shape (B, n), or None
        Those that are not hidden (padding); None where all can be seen.
    window : int or None
    """

    offset: int
    keys: Tensor | None
    window: int | None

    def visible(self, start: int, stop: int, n: int, device: Any) -> Tensor:
        """Which of n keys the rows ``start`` to ``stop`` see: bool, shape (B or 1, stop - start, n)."""
        rows = torch.arange(start, stop, device=device)[:, None] + self.offset
        keys = torch.arange(n, device=device)[None]
        seen = keys <= rows
        if self.window is not None:
            seen = seen & (keys > rows - self.window)
        return seen[None] if self.keys is None else seen[None] & self.keys[:, None]

    def keys_seen(self, batch: int, m: int, device: Any) -> Tensor:
        """How many keys each of m rows sees: int64, shape (batch, m)."""
        last = torch.arange(m, device=device) + self.offset
        first = (last - (self.window or 0)).clamp_min(-1) if self.window is not None else torch.full_like(last, -1)
        if self.keys is None:
            return (last - first).expand(batch, m)
        count = nn.functional.pad(self.keys.to(device).long().cumsum(1), (1, 0))
        return count[:, last + 1] - count[:, first + 1]


class _Switch:
    """The taps of one model, and the exchange of its attention function while there are any."""

    known: weakref.WeakKeyDictionary[nn.Module, _Switch] = weakref.WeakKeyDictionary()
    numbers = itertools.count(1)

    def __init__(self, anatomy: _Anatomy) -> None:
        self.anatomy = anatomy
        self.taps: list[AttentionTap] = []
        self.memo: dict[Any, Any] = {}
        self._layers: dict[int, int] = {}
        self._names: dict[str, str] = {}
        self._configs: list[tuple[Any, str]] = []

    @classmethod
    def of(cls, model: nn.Module) -> _Switch:
        anatomy = _Anatomy.of(model)
        _require_registry(anatomy)
        known = cls.known.get(anatomy.blocks)
        if known is None:
            known = cls.known[anatomy.blocks] = cls(anatomy)
        return known

    def add(self, tap: AttentionTap) -> None:
        if not self.taps:
            self._install()
        self.taps.append(tap)

    def remove(self, tap: AttentionTap) -> None:
        if tap in self.taps:
            self.taps.remove(tap)
        if not self.taps:
            self._uninstall()

    def _install(self) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        self._layers = {
            id(module): layer
            for layer, block in enumerate(self.anatomy.blocks, start=1)
            for module in block.modules()
            if not getattr(module, "is_cross_attention", False)
        }
        for config in self._all_configs():
            original = config._attn_implementation
            if original not in self._names:
                name = self._names[original] = f"practicum_tap_{next(self.numbers)}_{original}"
                AttentionInterface.register(name, self._function(original))
                mask_function = AttentionMaskInterface().get(original)
                if mask_function is not None:
                    AttentionMaskInterface.register(name, mask_function)
            config._attn_implementation_internal = self._names[original]
            self._configs.append((config, original))

    def _uninstall(self) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        for config, original in self._configs:
            # What someone else has set meanwhile stays.
            if config._attn_implementation == self._names[original]:
                config._attn_implementation_internal = original
        for name in self._names.values():
            AttentionInterface._global_mapping.pop(name, None)
            AttentionMaskInterface._global_mapping.pop(name, None)
        self._configs, self._names, self._layers = [], {}, {}

    def _all_configs(self) -> list[Any]:
        found = {id(self.anatomy.config): self.anatomy.config}
        for module in self.anatomy.decoder.modules():
            config = getattr(module, "config", None)
            if getattr(config, "_attn_implementation", None) is not None:
                found[id(config)] = config
        return [config for config in found.values() if config._attn_implementation is not None]

    def _function(self, original: str) -> Callable[..., Any]:
        from transformers import AttentionInterface

        registered = AttentionInterface().get(original)

        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
        ) -> Any:
            function = registered or _eager_function(module)
            layer = self._layers.get(id(module))
            if layer is not None:
                attention_mask = _fitted(attention_mask, query.shape[2], key.shape[2])
                call = self._call(layer, original, module, query, key, value, attention_mask, kwargs)
                query, key, value = self._observed(call)
            with _OriginalName(module, original):
                return function(module, query, key, value, attention_mask, *args, **kwargs)

        return attention

    def _call(
        self,
        layer: int,
        original: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        kwargs: dict[str, Any],
    ) -> AttentionCall:
        scaling, is_causal = kwargs.get("scaling"), kwargs.get("is_causal")
        return AttentionCall(
            layer=layer,
            module=module,
            query=query,
            key=key,
            value=value,
            attention_mask=attention_mask,
            scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            is_causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
            implementation=original,
            options={name: x for name, x in kwargs.items() if name not in ("scaling", "is_causal") and x is not None},
            memo=self.memo,
        )

    def _observed(self, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
        for tap in tuple(self.taps):
            if call.layer in tap.layers:
                answer = tap.observe(call)
                if answer is not None and not isinstance(answer, AttentionCall):
                    raise InputError(
                        f"observe: returned {type(answer).__name__}; must return None or call.replace(...)"
                    )
                call = answer or call
        return call.query, call.key, call.value


def _fitted(mask: Any, m: int, n: int) -> Any:
    """The mask for n keys; layers of a cache that differ in length share one, which hides no padding."""
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[-1] in (1, n) or n < m:
        return mask
    past = torch.ones if mask.dtype == torch.bool else torch.zeros
    before = past(*mask.shape[:-1], n - m, dtype=mask.dtype, device=mask.device)
    return torch.cat([before, mask[..., mask.shape[-1] - m :]], dim=-1)


class _OriginalName:
    """Flash attention looks its kernel up by the name in the configuration."""

    def __init__(self, module: nn.Module, original: str) -> None:
        self._config = getattr(module, "config", None) if "flash" in original else None
        self._original = original

    def __enter__(self) -> None:
        if self._config is not None:
            self._ours = self._config._attn_implementation
            self._config._attn_implementation_internal = self._original

    def __exit__(self, *exception: object) -> None:
        if self._config is not None:
            self._config._attn_implementation_internal = self._ours


def _require_registry(anatomy: _Anatomy) -> None:
    from transformers import PreTrainedModel

    owners = [m for m in (anatomy.decoder, *anatomy.decoder.modules()) if isinstance(m, PreTrainedModel)]
    owner = owners[0] if owners else anatomy.model
    name = type(owner).__name__
    if not isinstance(owner, PreTrainedModel) or not owner._can_set_attn_implementation():
        raise InputError(
            f"model={name}: its attention does not go through the AttentionInterface registry of transformers; "
            "must be a model class that does, such as LlamaForCausalLM"
        )


def _eager_function(module: nn.Module) -> Callable[..., Any]:
    """The registry has no "eager": each modeling file has its own."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise InputError(
        f"model: {type(module).__name__} has no eager_attention_forward beside it; set another implementation first, "
        "such as model.set_attn_implementation('sdpa')"
    )
