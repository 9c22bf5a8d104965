"""A press: it prefills a prompt, keeps a part of it layer by layer, and lets go of generated tokens meanwhile."""

from __future__ import annotations

import functools
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from practicum.serving.shotkv.cache import ShotKVCache, ShotKVLayer, ShotKVReport
from practicum.serving.shotkv.units import Unit, checked_units
from practicum.toolbox.errors import InputError
from practicum.toolbox.kv import AttentionCall, AttentionTap, ReceivedAttention, received_attention
from practicum.toolbox.kv_cache import Rotary, clone, full_attention_layers, held
from practicum.toolbox.taps import n_layers

MIN_WINDOW = 8


@dataclass(frozen=True)
class Prompt:
    """What a press chooses from: a prompt of n tokens, of B equal sequences.

    Attributes
    ----------
    n : int
        Tokens.
    units : tuple of Unit
    budget : int
        Tokens of units that may be kept in each layer.
    received : dict of int to Tensor of shape (B, H, n), float32
        For each layer of full attention, what the keys receive of attention from the queries that are looked at;
        empty where the press asks for none.
    rows : int
        How many queries that is.
    n_kv_heads : dict of int to int
        H_kv of each layer of full attention.

    Examples
    --------
    >>> Prompt(6, (Unit(1, 3), Unit(3, 5)), 2, {}, 0, {1: 1}).candidates.tolist()
    [1, 2, 3, 4]
    """

    n: int
    units: tuple[Unit, ...]
    budget: int
    received: Mapping[int, Tensor]
    rows: int
    n_kv_heads: Mapping[int, int]

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of full attention, from 1."""
        return tuple(self.n_kv_heads)

    @property
    def candidates(self) -> Tensor:
        """Tokens of units: int64, ascending."""
        return torch.cat([torch.arange(unit.start, unit.end) for unit in self.units])

    def by_kv_head(self, layer: int) -> Tensor:
        """What is received from the mean query head of each key head: shape (B, H_kv, n)."""
        received = self.received[layer]
        b, heads, n = received.shape
        kv_heads = self.n_kv_heads[layer]
        return received.reshape(b, kv_heads, heads // kv_heads, n).mean(2)


@dataclass
class Reading:
    """A prompt of n tokens that a model has read, whole.

    Attributes
    ----------
    cache : transformers.DynamicCache
        With keys of shape (B, H_kv, n, d).
    input_ids : Tensor of int64, shape (B, n)
    received : dict of int to Tensor of shape (B, H, n), or None
        For each layer, what keys receive of attention from the last queries.
    rows : int
        How many queries that is.
    accumulated : dict of int to Tensor of shape (B, H, n), or None
        The same from all queries.

    Examples
    --------
    >>> Reading(DynamicCache(), torch.zeros(1, 4, dtype=torch.int64), None, 0, None).rows
    0
    """

    cache: Cache
    input_ids: Tensor
    received: dict[int, Tensor] | None
    rows: int
    accumulated: dict[int, Tensor] | None


@torch.no_grad()
def read(
    model: nn.Module,
    input_ids: Tensor,
    *,
    window: int | None = None,
    accumulated: bool = False,
    chunk_size: int | None = None,
    before: Reading | None = None,
) -> Reading:
    """Read a prompt once, for any number of presses.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model in eval mode.
    input_ids : Tensor of int64, shape (B, n)
    window : int, optional
        Sum the attention of so many of the last queries.
    accumulated : bool
        Sum that of all queries as well.
    chunk_size : int, optional
        Read in parts of so many tokens, for memory.
    before : Reading, optional
        Of the beginning of the same prompt, which is not read again and stays as it is.

    Returns
    -------
    Reading
        With keys of shape (B, H_kv, n, d).

    Raises
    ------
    InputError
        A ValueError that names the argument: for ids of another shape, a model in training mode, a beginning that is
        another, and a window that reaches into it.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ... )
    >>> model, ids = LlamaForCausalLM(config).eval(), torch.arange(1, 13)[None]
    >>> first = read(model, ids[:, :8], accumulated=True)
    >>> whole = read(model, ids, window=3, accumulated=True, before=first)
    >>> whole.cache.get_seq_length(), tuple(whole.received[1].shape), tuple(whole.accumulated[1].shape)
    (12, (1, 2, 12), (1, 2, 12))
    """
    if model.training:
        raise InputError("model: is in training mode; call model.eval() first")
    n = _checked_ids(input_ids).shape[1]
    done = 0 if before is None else before.input_ids.shape[1]
    if before is not None and (done >= n or not torch.equal(before.input_ids, input_ids[:, :done])):
        raise InputError("before: is not the beginning of input_ids")
    if window is not None and window > n - done:
        raise InputError(f"window={window}: must be at most the tokens that are read now, {n - done}")
    if accumulated and before is not None and before.accumulated is None:
        raise InputError("before: has no sums over all queries; read it with accumulated=True")
    last, total = ReceivedAttention(model, window or 1), ReceivedAttention(model)
    cache: Cache = DynamicCache(config=model.config) if before is None else clone(before.cache)  # type: ignore[arg-type]
    if before is not None and accumulated:
        total.received = dict(before.accumulated or {})
    size = chunk_size or n
    # The first part is the odd one: the last, whose queries are looked at, is whole.
    stops = list(range(done + ((n - done) % size or min(size, n - done)), n + 1, size))
    with ExitStack() as undo:
        for watcher in [last] * (window is not None) + [total] * accumulated:
            undo.enter_context(watcher)
        for start, stop in zip([done, *stops], stops, strict=False):
            if stop == n:
                # Sliding windows must give the last token back, which `generate` reads again.
                cache.activate_past_recording()
            model(input_ids[:, start:stop], cache=cache, use_cache=True, logits_to_keep=1)
    return Reading(
        cache,
        input_ids,
        last.received if window is not None else None,
        last.rows if window is not None else 0,
        total.received if accumulated else None,
    )


def _checked_ids(input_ids: Tensor) -> Tensor:
    if input_ids.ndim != 2:
        raise InputError(f"input_ids: has shape {tuple(input_ids.shape)}; must be (B, n)")
    return input_ids


class Press(ABC):
    """Keep a part of a prompt, and a part of what is generated.

    The prompt's preamble, its question and special tokens (what lies outside units) are always kept. A press says which
    tokens of units are kept in each layer, in `choose`; everything else is done here, the same for all.

    Inside ``with press(model):`` generated tokens are let go of as well, if ``decode_ratio`` is below 1, and
    ``model.generate`` checks that it continues the prompt its cache was made for.

    Parameters
    ----------
    prefill_ratio : float
        Share of the tokens of units (of the whole prompt with ``budget_over="prefill"``) that is kept, in (0, 1].
    decode_ratio : float
        Share of the generated tokens that is kept, in (0, 1]; 1 keeps all.
    window : int, optional
        Queries that are looked at: so many of the last ones. By default those behind the last unit, 8 at least.
    budget_over : {"units", "prefill"}
    decode_interval : int
        Generated tokens are let go of every so many steps.
    recent : int
        The last generated tokens, which are never let go of.
    min_decode : int
        Generated tokens that are kept whatever the ratio.
    decay : float, optional
        In (0, 1): what generated tokens have received counts that much less with each step. By default it is summed.
    reposition : bool
        Whether keys that are kept move together, by turning their rotary embeddings: for prompts that are longer than
        the model was made for. `generate` must then be given ``cache.input_ids``, which has as many tokens as seem to
        have gone by.

    Raises
    ------
    InputError
        A ValueError that names the argument.
    """

    uses_attention = True
    uses_window = True

    def __init__(
        self,
        prefill_ratio: float = 0.4,
        decode_ratio: float = 1.0,
        *,
        window: int | None = None,
        budget_over: str = "units",
        decode_interval: int = 32,
        recent: int = 16,
        min_decode: int = 64,
        decay: float | None = None,
        reposition: bool = False,
    ) -> None:
        for name, ratio in (("prefill_ratio", prefill_ratio), ("decode_ratio", decode_ratio)):
            if not 0 < ratio <= 1:
                raise InputError(f"{name}={ratio}: must be above 0 and at most 1")
        if window is not None and window < 1:
            raise InputError(f"window={window}: must be 1 or more")
        if budget_over not in ("units", "prefill"):
            raise InputError(f"budget_over={budget_over!r}: must be 'units' or 'prefill'")
        if decode_interval < 1:
            raise InputError(f"decode_interval={decode_interval}: must be 1 or more")
        if not 0 <= recent <= min_decode:
            raise InputError(f"recent={recent}: must be from 0 to min_decode, {min_decode}")
        if decay is not None and not 0 < decay < 1:
            raise InputError(f"decay={decay}: must be between 0 and 1, or None to sum")
        self.prefill_ratio = prefill_ratio
        self.decode_ratio = decode_ratio
        self.window = window
        self.budget_over = budget_over
        self.decode_interval = decode_interval
        self.recent = recent
        self.min_decode = min_decode
        self.decay = decay
        self.reposition = reposition

    @abstractmethod
    def choose(self, prompt: Prompt) -> dict[int, Tensor]:
        """Which tokens of units are kept.

        Parameters
        ----------
        prompt : Prompt

        Returns
        -------
        dict of int to Tensor of int64
            For each layer of ``prompt.layers`` ascending tokens: shape (T,), or (B or 1, H_kv, T) where heads differ.
        """

    def prefill(
        self,
        model: nn.Module,
        input_ids: Tensor,
        units: Sequence[Unit | tuple[int, int]],
        *,
        attention_mask: Tensor | None = None,
        chunk_size: int | None = None,
    ) -> ShotKVCache:
        """Read a prompt and keep a part of it.

        Parameters
        ----------
        model : transformers.PreTrainedModel
            A causal language model whose attention goes through transformers' AttentionInterface; in eval mode.
        input_ids : Tensor of int64, shape (B, n)
            The prompt; several have the same units, and share what is kept.
        units : sequence of Unit or (int, int)
            Spans of tokens, ascending, such as `split_units` finds.
        attention_mask : Tensor, shape (B, n), optional
            Only ones: padding is refused.
        chunk_size : int, optional
            Read the prompt in parts of so many tokens, for memory. The result is the same.

        Returns
        -------
        ShotKVCache
            For ``model.generate(input_ids, cache=cache)``. Keys and values have shape (B, H_kv, T, d) in each layer.

        Raises
        ------
        InputError
            A ValueError that names the argument: for padding, units that overlap or lie outside the prompt, a chunk
            that is smaller than the window, a model in training mode or without the registry.
        """
        if attention_mask is not None and not bool(attention_mask.all()):
            raise InputError("attention_mask: a batch must be pad-free: prompts of one length with the same units")
        spans = checked_units(units, _checked_ids(input_ids).shape[1])
        window = self.window_of(spans, input_ids.shape[1])
        if chunk_size is not None and chunk_size < (window or 1):
            raise InputError(f"chunk_size={chunk_size}: must be at least the window that is looked at, {window} tokens")
        accumulated = self.uses_attention and not self.uses_window
        reading = read(model, input_ids, window=window, accumulated=accumulated, chunk_size=chunk_size)
        return self.apply(model, reading, spans)

    def apply(self, model: nn.Module, reading: Reading, units: Sequence[Unit | tuple[int, int]]) -> ShotKVCache:
        """Keep a part of a prompt that was read already; the reading stays whole, for other presses.

        Parameters
        ----------
        model : transformers.PreTrainedModel
            The one that read it.
        reading : Reading
            With the sums of attention that this press looks at.
        units : sequence of Unit or (int, int)

        Returns
        -------
        ShotKVCache
            Keys and values have shape (B, H_kv, T, d) in each layer.

        Raises
        ------
        InputError
            A ValueError: for units that are wrong, and a reading without the sums that are needed.
        """
        n = reading.input_ids.shape[1]
        spans = checked_units(units, n)
        cache = clone(reading.cache)
        able = full_attention_layers(cache)
        layers: list[Any] = cache.layers
        prompt = Prompt(
            n,
            spans,
            self._budget(spans, n),
            self._received(reading, spans),
            reading.rows if self.uses_window else n,
            {layer: layers[layer - 1].keys.shape[1] for layer in able},
        )
        chosen = self.choose(prompt) if self.prefill_ratio < 1 else dict.fromkeys(able, prompt.candidates)
        return self._pressed(model, cache, prompt, chosen, reading.input_ids)

    def _received(self, reading: Reading, units: Sequence[Unit]) -> Mapping[int, Tensor]:
        if not self.uses_attention or self.prefill_ratio == 1:
            return {}
        if not self.uses_window:
            if reading.accumulated is None:
                raise InputError("reading: has no sums over all queries; read with accumulated=True")
            return reading.accumulated
        wanted = self.window_of(units, reading.input_ids.shape[1])
        if reading.received is None or reading.rows != wanted:
            raise InputError(f"reading: has sums over {reading.rows} queries; must have them over {wanted}")
        return reading.received

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator[Self]:
        """Let go of generated tokens, and see that caches are used with their prompts, while the block runs.

        Parameters
        ----------
        model : transformers.PreTrainedModel

        Yields
        ------
        Press
            Itself. Caches that it prefills keep of g generated tokens ``max(min_decode, decode_ratio * g)``, shape
            (B, H_kv, T, d).
        """
        with ExitStack() as undo:
            undo.enter_context(_checked_generate(model))
            # Masks are fitted to layers of different lengths inside a tap, whether or not it looks at anything.
            watcher = _Decoding(self) if self.decode_ratio < 1 else None
            observe: Callable[[AttentionCall], None] = _see_nothing if watcher is None else watcher.observe
            undo.enter_context(AttentionTap(model, observe, on_forward=None if watcher is None else watcher.step))
            if watcher is not None:
                undo.enter_context(watcher.following(model))
            yield self

    def window_of(self, units: Sequence[Unit], n: int) -> int | None:
        """How many of the last queries are looked at.

        Parameters
        ----------
        units : sequence of Unit
        n : int
            Tokens of the prompt, whose ids have shape (B, n).

        Returns
        -------
        int or None
            None for a press that looks at none, or at all.
        """
        if not self.uses_attention or not self.uses_window:
            return None
        return min(n, self.window or max(MIN_WINDOW, n - units[-1].end))

    def _budget(self, units: Sequence[Unit], n: int) -> int:
        in_units = sum(unit.end - unit.start for unit in units)
        if self.budget_over == "units":
            return int(self.prefill_ratio * in_units)
        return max(0, min(in_units, int(self.prefill_ratio * n) - (n - in_units)))

    def _pressed(
        self, model: nn.Module, cache: Cache, prompt: Prompt, chosen: Mapping[int, Tensor], input_ids: Tensor
    ) -> ShotKVCache:
        full = held(cache)
        inside = torch.zeros(prompt.n, dtype=torch.bool)
        inside[prompt.candidates] = True
        protected = torch.nonzero(~inside).flatten()
        layers: list[Any] = cache.layers
        for layer in prompt.layers:
            pressed = ShotKVLayer.of(layers[layer - 1])
            # The layer that was read goes before the next is copied.
            layers[layer - 1] = pressed
            kept = chosen[layer].to(torch.int64)
            together = torch.cat([protected.expand(*kept.shape[:-1], -1), kept], dim=-1).sort(dim=-1).values
            if together.shape[-1] < prompt.n:
                pressed.keep(together)
        after = held(cache)
        kept_tokens = {layer: int(chosen[layer].shape[-1]) for layer in prompt.layers}
        report = ShotKVReport(
            n_tokens=prompt.n,
            protected=len(protected),
            budget=prompt.budget,
            kept_tokens=kept_tokens,
            units_by_layer={layer: _whole_units(prompt.units, chosen[layer]) for layer in prompt.layers},
            overrun_tokens=max(0, -(-sum(kept_tokens.values()) // len(kept_tokens)) - prompt.budget),
            untouched_layers=tuple(i for i in range(1, n_layers(model) + 1) if i not in prompt.layers),
            nbytes=after.nbytes,
            full_nbytes=full.nbytes,
        )
        if report.overrun_tokens:
            warnings.warn(
                f"no unit fits into the budget of {prompt.budget} tokens: the shortest was kept, "
                f"{report.overrun_tokens} tokens more than that",
                stacklevel=3,
            )
        made = ShotKVCache(layers, report, input_ids)
        if self.reposition:
            _move_together(model, made, input_ids)
        made.crop(-1)
        for each in layers:
            each.record_past = False
        return made


def _see_nothing(call: AttentionCall) -> None:
    return None


def _whole_units(units: Sequence[Unit], kept: Tensor) -> tuple[int, ...]:
    """Units all of whose tokens are kept, by every head."""
    if kept.shape[-1] == 0:
        return ()
    rows = kept.reshape(-1, kept.shape[-1])
    held_by_all = set(rows[0].tolist()).intersection(*(set(row.tolist()) for row in rows[1:]))
    return tuple(i for i, unit in enumerate(units) if held_by_all.issuperset(range(unit.start, unit.end)))


def _move_together(model: nn.Module, cache: ShotKVCache, input_ids: Tensor) -> None:
    """Put the keys of each layer at the last positions of the longest, so that all layers have seen as much."""
    rotary = Rotary(model)
    layers = [(i, layer) for i, layer in enumerate(cache.layers, start=1) if isinstance(layer, ShotKVLayer)]
    if len(layers) < len(cache.layers):
        raise InputError("reposition=True: the model has layers with sliding windows, whose keys stay where they are")
    longest = max(layer.keys.shape[-2] for _, layer in layers)
    for number, layer in layers:
        if layer.positions.shape[:2] != (1, 1):
            raise InputError("reposition=True: must keep the same tokens in all heads of a layer")
        t = layer.keys.shape[-2]
        at = torch.arange(longest - t, longest, device=layer.keys.device)
        layer.keys = rotary.move(layer.keys, at - layer.positions[0, 0], number)
        layer.positions, layer.seen, layer.n_prompt = at[None, None], longest, longest
    cache.input_ids = input_ids[:, -longest:]  # type: ignore[attr-defined]
    cache.fingerprint = ShotKVCache([], cache.report, cache.input_ids).fingerprint  # type: ignore[attr-defined]


class _Decoding:
    """Counts what generated tokens receive, and lets go of those that received the least."""

    def __init__(self, press: Press) -> None:
        self.press = press
        self.cache: ShotKVCache | None = None
        self.steps: weakref.WeakKeyDictionary[ShotKVCache, int] = weakref.WeakKeyDictionary()

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """See which cache each pass goes into."""

        def find(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
            given: Iterable[Any] = (*args, *kwargs.values())
            self.cache = next((x for x in given if isinstance(x, ShotKVCache)), None)

        decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else model  # type: ignore[operator]
        hook = decoder.register_forward_pre_hook(find, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    @torch.no_grad()
    def observe(self, call: AttentionCall) -> None:
        layer: Any = None if self.cache is None else self.cache.layers[call.layer - 1]
        if not isinstance(layer, ShotKVLayer):
            return
        if self.press.decay is not None:
            layer.received *= self.press.decay
        layer.received += received_attention(call).sum(1)

    def step(self) -> None:
        """After a pass: every so many of them, evict."""
        cache, self.cache = self.cache, None
        if cache is None:
            return
        taken = self.steps[cache] = self.steps.get(cache, 0) + 1
        if taken % self.press.decode_interval == 0:
            for layer in cache.layers:
                if isinstance(layer, ShotKVLayer):
                    self._evict(layer)

    def _evict(self, layer: ShotKVLayer) -> None:
        mine = layer.generated()
        gone_by = layer.seen - layer.n_prompt
        keep = max(self.press.min_decode, int(self.press.decode_ratio * gone_by))
        if len(mine) <= keep:
            return
        frozen = layer.keys.shape[-2] - len(mine)
        scores = layer.received[:, mine].clone()
        if self.press.recent:
            scores[:, -self.press.recent :] = torch.inf
        # The earlier of two that received the same.
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, :keep].sort(dim=1).values
        before = torch.arange(frozen, device=best.device).expand(len(best), -1)
        layer.keep(torch.cat([before, best + frozen], dim=1)[:, None])


@contextmanager
def _checked_generate(model: nn.Module) -> Iterator[None]:
    """While the block runs, the model's `generate` refuses a cache of another prompt, and repeats one for its beams."""
    inner: Any = model.generate
    had = vars(model).get("generate")

    @functools.wraps(inner)
    def generate(inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache")
        given = kwargs.get("input_ids") if inputs is None else inputs
        if isinstance(cache, ShotKVCache) and given is not None:
            if not cache.covers(given):
                raise InputError("cache: was made for another prompt; prefill this one")
            _repeat_for_beams(model, cache, given, kwargs)
        elif cache is not None and not isinstance(cache, DynamicCache):
            raise InputError(f"cache: is a {type(cache).__name__}; must be what press.prefill returns, or grow")
        return inner(inputs, *args, **kwargs)

    model.generate = generate  # type: ignore[assignment]
    try:
        yield
    finally:
        if had is None:
            del model.generate
        else:
            model.generate = had


def _repeat_for_beams(model: Any, cache: ShotKVCache, given: Tensor, options: Mapping[str, Any]) -> None:
    config = options.get("generation_config") or model.generation_config
    beams = options.get("num_beams") or getattr(config, "num_beams", None) or 1
    samples = options.get("num_return_sequences") or getattr(config, "num_return_sequences", None) or 1
    rows = len(given) * (beams if beams > 1 else samples)
    layers: list[Any] = cache.layers
    present = len(layers[0].keys)
    if rows > present:
        cache.batch_repeat_interleave(rows // present)
