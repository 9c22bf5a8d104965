"""Reading and writing the activations of any transformers causal language model, at chosen layers and positions."""

from __future__ import annotations

import errno
import hashlib
import inspect
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from practicum.toolbox.errors import InputError

Site = Literal["residual", "attention", "mlp", "heads"]
Positions = Literal["last", "all"]

SITES = ("residual", "attention", "mlp", "heads")
# What the modules of a block are called, by their names in the block and by their classes.
MODULE_NAMES = {
    "attention": ("attn", "attention"),
    "mlp": ("mlp", "feed_forward", "feedforward", "ffn", "moe"),
}
# What the projection that joins the heads of an attention is called.
PROJECTION_NAMES = ("o_proj", "c_proj", "out_proj", "dense", "wo", "o")
# What may say "attention" or "mlp" in a block and is neither.
OTHER_NAMES = ("norm", "ln_", "dropout", "cross")
# What a configuration adds to the weights: with the same weights and another of these, activations differ.
FINGERPRINTED = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rope_parameters",
    "sliding_window",
)
SAMPLES_PER_WEIGHT = 64
STORE_VERSION = 1
# Work that a killed recording has to do again.
SECONDS_BETWEEN_SAVES = 5.0


class Taps:
    r"""Read activations while a model runs, and leave it as it was found.

    Layer 0 is what enters the first block; layer l is what block l of L puts out: the residual stream after l blocks,
    before the final norm, equal to ``output_hidden_states[l]`` of transformers for l < L. ``site`` "attention" and
    "mlp" are what these modules of block l return, before a norm or a dropout that the block may apply to it, and
    before it is added to the residual stream. "heads" is what goes into the output projection of the attention of
    block l: what each head gives, one head after the other, as wide as `head_shape` says. Blocks and modules are
    found by structure: any causal language model of transformers will do, also quantised, wrapped by PEFT or spread
    over devices.

    Only forward hooks are used. They are gone when the ``with`` block ends, by an exception or Ctrl-C as well. Every
    forward pass replaces what was read before, so within `generate` it is the step that was last. Several taps and
    `Steering` may be active at once; those that were entered later see what the earlier ones changed.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, or one wrapped by PEFT.
    layers : int or sequence of int
        0..L for the residual stream, 1..L for attention, MLP and heads.
    site : {"residual", "attention", "mlp", "heads"}
    positions : None or "last"
        All positions, or the last token of each row that the attention mask does not hide, whichever side is padded.
        The mask is (batch, tokens), or (batch, 1, positions, tokens) in which a real token attends to itself.
    on_forward : callable, optional
        ``on_forward(activations)`` is called after the blocks of every forward pass, each step of `generate` included,
        with the dictionary from layer to tensor.

    Raises
    ------
    InputError
        A ValueError that names the argument: for a layer that the model has not, an unknown site, or a model in which
        the blocks or their modules cannot be told.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    ... )
    >>> model = LlamaForCausalLM(config).eval()
    >>> with torch.no_grad(), Taps(model, [0, 2]) as taps:
    ...     output = model(torch.tensor([[5, 6, 7, 8]]), output_hidden_states=True)
    >>> taps[2].shape, torch.equal(taps[2], output.hidden_states[2])
    (torch.Size([1, 4, 16]), True)
    >>> with torch.no_grad(), Taps(model, 3, "mlp", positions="last") as taps:
    ...     _ = model(torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]]), attention_mask=torch.tensor([[1] * 4, [1, 1, 0, 0]]))
    >>> taps[3].shape
    torch.Size([2, 16])
    """

    def __init__(
        self,
        model: nn.Module,
        layers: int | Sequence[int],
        site: Site = "residual",
        positions: Literal["last"] | None = None,
        on_forward: Callable[[dict[int, Tensor]], object] | None = None,
    ) -> None:
        if positions not in (None, "last"):
            raise InputError(f"positions={positions!r}: must be None (all of them) or 'last'")
        self._anatomy = _Anatomy.of(model)
        self.layers = _checked_layers(layers, site, len(self._anatomy.blocks))
        self.site = site
        self.positions = positions
        self.on_forward = on_forward
        self._places = {layer: self._anatomy.place(layer, site) for layer in self.layers}
        self._hooks: ExitStack | None = None
        # What the forward pass that runs now has put out, None between passes; and what the last whole one had.
        self._running: dict[int, Tensor] | None = None
        self._read: dict[int, Tensor] | None = None
        self._mask: Tensor | None = None
        self._last: Tensor | None = None

    def __enter__(self) -> Self:
        """Register the hooks."""
        if self._hooks is not None:
            raise InputError("taps: are active already; make another Taps to nest them")
        with ExitStack() as hooks:
            decoder = self._anatomy.decoder
            # The taps' first and last hook enclose the others, which may be of the decoder's first and last module.
            hooks.callback(decoder.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
            for layer, place in self._places.items():
                hooks.callback(place.on_value(partial(self._keep, layer)).remove)
            hooks.callback(decoder.register_forward_hook(self._end).remove)
            self._hooks = hooks.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove the hooks; what was read stays."""
        hooks, self._hooks = self._hooks, None
        self._running = self._mask = self._last = None
        if hooks is not None:
            hooks.close()

    def __getitem__(self, layer: int) -> Tensor:
        """What the last whole forward pass had at a layer.

        Parameters
        ----------
        layer : int
            One of those that are tapped.

        Returns
        -------
        Tensor of shape (batch, positions, d), or (batch, d) where ``positions="last"``
            Of the model's type and on the layer's device. It belongs to the autograd graph where one was built.

        Raises
        ------
        InputError
            A ValueError: for another layer, or before a forward pass.
        """
        if layer not in self._places:
            raise InputError(f"layer={layer!r}: the tapped layers are {', '.join(map(str, self.layers))}")
        if self._read is None:
            raise InputError("taps: have read nothing; run the model within the with block")
        return self._read[layer]

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running = {}
        if self.positions == "last":
            self._last = None
            self._mask = _argument(module, "attention_mask", args, kwargs)

    def _keep(self, layer: int, hidden: Tensor) -> None:
        if self._running is None:  # a block that is called alone, as gradient checkpointing does in the backward pass
            return
        if self.positions == "last":
            hidden = self._at_last(hidden)
        elif not hidden.requires_grad:
            # Some models add to a module's output in place.
            hidden = hidden.clone()
        self._running[layer] = hidden

    def _at_last(self, hidden: Tensor) -> Tensor:
        n = hidden.shape[1]
        if self._mask is None or n == 1:
            return hidden[:, -1].clone()
        if self._last is None:
            self._last = _last_real(self._mask, n)
        rows = torch.arange(len(hidden), device=hidden.device)
        return hidden[rows, self._last.to(hidden.device).expand(len(rows))]

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running is None:
            return
        self._read, self._running = self._running, None
        self._mask = self._last = None
        if self.on_forward is not None:
            self.on_forward(dict(self._read))


class Steering:
    r"""Write activations while a model runs: each layer's :math:`h` becomes :math:`f(h)`.

    Layers and sites are those of `Taps`. The hooks are gone when the ``with`` block ends, however it ends.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, or one wrapped by PEFT.
    functions : mapping from int to callable
        ``function(hidden) -> hidden``, from and to (batch, positions, d), called in every forward pass. Under
        `generate` with a cache, positions are those of the step: the prompt first, then one token at a time.
    site : {"residual", "attention", "mlp", "heads"}
    positions : None, "last" or int
        All positions; or of each row a single one, so that functions go from and to (batch, d): the last token that
        the attention mask does not hide, which is -1 as well, the one before it, -2, and so on.

    Raises
    ------
    InputError
        A ValueError that names the argument: as `Taps`; and, when the model runs, for a function that returns anything
        but a tensor of the shape, type and device that it was given, or a row that is too short for its position.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    ... )
    >>> model = LlamaForCausalLM(config).eval()
    >>> ids, direction = torch.tensor([[5, 6, 7]]), torch.ones(16)
    >>> with torch.no_grad(), Taps(model, 2) as plain:
    ...     _ = model(ids)
    >>> with torch.no_grad(), Steering(model, {2: lambda hidden: hidden + direction}), Taps(model, 2) as steered:
    ...     _ = model(ids)
    >>> torch.equal(steered[2], plain[2] + 1)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        functions: Mapping[int, Callable[[Tensor], Tensor]],
        site: Site = "residual",
        positions: Literal["last"] | int | None = None,
    ) -> None:
        whole = isinstance(positions, int | np.integer) and not isinstance(positions, bool)
        if not (positions is None or positions == "last" or (whole and int(positions) < 0)):
            raise InputError(f"positions={positions!r}: must be None (all of them), 'last' or a whole number below 0")
        anatomy = _Anatomy.of(model)
        self.positions = positions
        # Distance of the position from the last one.
        self._back = 0 if positions in (None, "last") else -1 - int(positions)
        self._decoder = anatomy.decoder
        self._mask: Any = None
        layers = _checked_layers(list(functions), site, len(anatomy.blocks), "functions")
        for layer in layers:
            if not callable(functions[layer]):
                raise InputError(f"functions[{layer}]={functions[layer]!r}: must be a function of the activations")
        self.functions = {layer: functions[layer] for layer in layers}
        self._places = {layer: anatomy.place(layer, site) for layer in layers}
        self._hooks: ExitStack | None = None

    def __enter__(self) -> Self:
        """Register the hooks."""
        if self._hooks is not None:
            raise InputError("steering: is active already; make another Steering to nest them")
        with ExitStack() as hooks:
            if self.positions is not None:
                hooks.callback(self._decoder.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
            steer = self._steer if self.positions is None else self._steer_one
            for layer, place in self._places.items():
                hooks.callback(place.on_value(partial(steer, layer)).remove)
            self._hooks = hooks.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove the hooks."""
        hooks, self._hooks = self._hooks, None
        self._mask = None
        if hooks is not None:
            hooks.close()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._mask = _argument(module, "attention_mask", args, kwargs)

    def _steer_one(self, layer: int, hidden: Tensor) -> Tensor:
        """One position of each row through the function, the others as they are."""
        n, rows = hidden.shape[1], torch.arange(len(hidden), device=hidden.device)
        if self._mask is None or n == 1:
            last = torch.full_like(rows, n - 1)
        else:
            last = _last_real(self._mask, n).to(hidden.device).expand(len(rows))
        places = last - self._back
        if bool((places < 0).any()):
            raise InputError(f"positions={self.positions}: row {int(places.argmin())} has {int(last.min()) + 1} tokens")
        steered = hidden.clone()
        steered[rows, places] = self._steer(layer, hidden[rows, places])
        return steered

    def _steer(self, layer: int, hidden: Tensor) -> Tensor:
        steered = self.functions[layer](hidden)
        if not isinstance(steered, Tensor):
            raise InputError(f"functions[{layer}]: returned {type(steered).__name__}; must return a tensor")
        for what in ("shape", "dtype", "device"):
            given, got = getattr(hidden, what), getattr(steered, what)
            if got != given:
                raise InputError(f"functions[{layer}]: returned {what} {got}; must be {given}, as it was given")
        return steered


@dataclass(frozen=True)
class Activations(Mapping[int, "NDArray[Any] | Ragged"]):
    """What `record` read: a mapping from layer to the activations of N prompts.

    Attributes
    ----------
    arrays : dict from int to ndarray
        Of shape (N, d) for ``positions="last"``, else (tokens of all prompts, d), prompts one after the other.
    offsets : ndarray of int64, shape (N + 1,), or None
        Where each prompt begins among the tokens; None for ``positions="last"``.
    """

    arrays: dict[int, NDArray[Any]]
    offsets: NDArray[np.int64] | None

    def __getitem__(self, layer: int) -> NDArray[Any] | Ragged:
        """The activations of a layer: an array (N, d), or a sequence of N arrays (n_i, d)."""
        if layer not in self.arrays:
            raise InputError(f"layer={layer!r}: the recorded layers are {', '.join(map(str, self.arrays))}")
        array = self.arrays[layer]
        return array if self.offsets is None else Ragged(array, self.offsets)

    def __iter__(self) -> Iterator[int]:
        """The layers."""
        return iter(self.arrays)

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.arrays)


@dataclass(frozen=True)
class Ragged(Sequence["NDArray[Any]"]):
    """Arrays (n_i, d) of different lengths that lie one after the other in one; taking one out copies nothing.

    Attributes
    ----------
    flat : ndarray of shape (n_1 + .. + n_N, d)
    offsets : ndarray of int64, shape (N + 1,)

    Examples
    --------
    >>> two = Ragged(np.arange(6).reshape(3, 2), np.array([0, 1, 3]))
    >>> len(two), two[-1].tolist()
    (2, [[2, 3], [4, 5]])
    """

    flat: NDArray[Any]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        """N."""
        return len(self.offsets) - 1

    def __getitem__(self, i: Any) -> Any:
        """Array i, or the list of those of a slice."""
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(f"{i} is not among {len(self)} arrays")
        i = i % len(self)
        return self.flat[self.offsets[i] : self.offsets[i + 1]]


def record(
    model: nn.Module,
    input_ids: Sequence[Sequence[int]],
    layers: int | Sequence[int],
    *,
    positions: Positions = "last",
    site: Site = "residual",
    batch_size: int = 16,
    padding_side: Literal["left", "right"] = "right",
    dtype: torch.dtype = torch.float16,
    store: Path | str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Activations:
    """Run prompts through a model and keep activations, in memory or in files.

    Prompts are batched with others of their length, the longest first. The forward pass ends after the last layer
    that is asked for, so neither the blocks above it nor the language-model head are computed (on a model that is
    spread over devices they are). Dropout is off meanwhile.

    With ``store`` the activations are written to memory-mapped files as they come, so that memory holds a batch only.
    The folder takes its name when it is complete. A recording that was killed goes on where it was when it is called
    again with the same arguments, and one that is complete is opened without running the model.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, or one wrapped by PEFT.
    input_ids : sequence of sequence of int
        Token ids of N prompts, without padding.
    layers, site
        See `Taps`.
    positions : {"last", "all"}
        The last token of each prompt, or all tokens.
    batch_size : int
        Prompts a forward pass.
    padding_side : {"left", "right"}
        It makes no difference but for rounding, in models that take position ids or place tokens by the mask.
    dtype : {torch.float16, torch.float32}
        Of what is kept.
    store : pathlib.Path or str, optional
        The folder to write.
    progress : callable, optional
        Called as ``progress(prompts done, prompts in all)`` after each batch.

    Returns
    -------
    Activations
        ``activations[layer]`` is an array of shape (N, d), or a sequence of N arrays of shape (n_i, d). With ``store``
        they are memory-mapped; changing them changes a private copy.

    Raises
    ------
    InputError
        A ValueError that names the argument; for an activation that is not finite or too large for ``dtype``, naming
        layer, prompt and position; for a ``store`` that holds something else, or that another process writes.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    ... )
    >>> model = LlamaForCausalLM(config).eval()
    >>> record(model, [[5, 6, 7], [8, 9]], layers=[1, 2])[2].shape
    (2, 16)
    >>> [one.shape for one in record(model, [[5, 6, 7], [8, 9]], layers=2, positions="all")[2]]
    [(3, 16), (2, 16)]
    """
    _check_choice("positions", positions, ("last", "all"))
    _check_choice("padding_side", padding_side, ("left", "right"))
    if dtype not in (torch.float16, torch.float32):
        raise InputError(f"dtype={dtype!r}: must be torch.float16 or torch.float32")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InputError(f"batch_size={batch_size!r}: must be a whole number, 1 or more")
    anatomy = _Anatomy.of(model)
    chosen = _checked_layers(layers, site, len(anatomy.blocks))
    for layer in chosen:
        anatomy.place(layer, site)
    lengths = _checked_ids(input_ids, anatomy.vocabulary)
    offsets = np.concatenate([[0], np.cumsum(lengths)]) if positions == "all" else None
    n_rows = int(offsets[-1]) if offsets is not None else len(lengths)
    numpy_dtype = np.dtype(np.float16 if dtype == torch.float16 else np.float32)
    shape = (n_rows, anatomy.width_of(chosen[0], site))
    reader = _Reader(anatomy, input_ids, lengths, chosen, site, padding_side, offsets, dtype)
    order = np.argsort(-lengths, kind="stable")
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    if store is None:
        arrays = {layer: np.empty(shape, numpy_dtype) for layer in chosen}
        reader.read(batches, arrays, progress)
        return Activations(arrays, offsets)
    facts = {
        "version": STORE_VERSION,
        "model": fingerprint(model),
        "prompts": _hash_of_ids(input_ids),
        "layers": list(chosen),
        "site": site,
        "positions": positions,
        "batch_size": batch_size,
        "padding_side": padding_side,
        "dtype": numpy_dtype.name,
        "shape": list(shape),
    }
    written = _Store(Path(store), facts)
    written.fill(lambda arrays, start, save: reader.read(batches, arrays, progress, start, save))
    return Activations(written.open(), offsets)


def decoder_blocks(model: nn.Module) -> nn.ModuleList:
    """Return the blocks of a causal language model, found by structure.

    They are the outermost `torch.nn.ModuleList` of the decoder with as many members as the configuration has hidden
    layers.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Also wrapped by PEFT.

    Returns
    -------
    torch.nn.ModuleList
        The model's own.

    Raises
    ------
    InputError
        A ValueError: when there is none, or more than one, or the model is an encoder with a decoder.

    Examples
    --------
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2))
    >>> decoder_blocks(model) is model.transformer.h
    True
    """
    return _Anatomy.of(model).blocks


def output_projection(model: nn.Module, layer: int) -> nn.Module:
    """Return the module that joins the heads of a block's attention: the last of the attention, found by its name.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, or one wrapped by PEFT.
    layer : int
        From 1 to L.

    Returns
    -------
    torch.nn.Module
        The model's own; it takes (batch, positions, heads * width of a head).

    Raises
    ------
    InputError
        A ValueError: for a layer that the model has not, or where no such module can be told.

    Examples
    --------
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2))
    >>> output_projection(model, 2) is model.transformer.h[1].attn.c_proj
    True
    """
    anatomy = _Anatomy.of(model)
    (chosen,) = _checked_layers([layer], "heads", len(anatomy.blocks), "layer")
    return anatomy.projection(chosen)


def head_shape(model: nn.Module) -> tuple[int, int, int]:
    """Return the number of layers, of query heads in each, and the width of what a head gives.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, or one wrapped by PEFT.

    Returns
    -------
    tuple of int, of shape (3,)

    Raises
    ------
    InputError
        A ValueError: where the configuration does not state the number of heads, or layers differ.

    Examples
    --------
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> head_shape(GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2)))
    (3, 2, 8)
    """
    anatomy = _Anatomy.of(model)
    name, n = type(model).__name__, len(anatomy.blocks)
    heads = getattr(anatomy.config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise InputError(f"model={name}: its configuration must state num_attention_heads; got {heads!r}")
    widths = {anatomy.width_of(layer, "heads") for layer in range(1, n + 1)}
    if len(widths) != 1 or min(widths) % heads:
        found = ", ".join(map(str, sorted(widths)))
        raise InputError(f"model={name}: output projections take {found}; must be a multiple of {heads} heads, alike")
    return n, heads, widths.pop() // heads


def n_layers(model: nn.Module) -> int:
    """Return L, the number of blocks of a causal language model; its layers are 0..L.

    Examples
    --------
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> n_layers(GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2)))
    3
    """
    return len(decoder_blocks(model))


def fingerprint(model: nn.Module) -> str:
    """Return 16 hexadecimal digits that stand for a model's decoder: its architecture and its weights.

    The names and shapes of all weights and 64 values of each are hashed, rounded to bfloat16, with what the
    configuration says of layers, heads and positions. So it is the same on every device, for weights kept as float32 or
    bfloat16, and with or without a language-model head; fine-tuning changes it.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, or one wrapped by PEFT. Weights that accelerate keeps on disk are read.

    Returns
    -------
    str

    Examples
    --------
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> config = GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2)
    >>> model = GPT2LMHeadModel(config)
    >>> fingerprint(model) == fingerprint(model.transformer.bfloat16()), fingerprint(model) == fingerprint(
    ...     GPT2LMHeadModel(config)
    ... )
    (True, False)
    """
    anatomy = _Anatomy.of(model)
    config = anatomy.config
    facts = {name: getattr(config, name, None) for name in FINGERPRINTED}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    samples: list[Tensor] = []
    for name, module in anatomy.decoder.named_modules():
        for key, shape, values in _own_samples(module):
            digest.update(f"{name}.{key} {shape}\n".encode())
            samples.append(values)
    read = _to_cpu(samples)
    digest.update(read.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class _Anatomy:
    """Where the parts of a causal language model are."""

    model: nn.Module
    config: Any
    decoder: nn.Module
    blocks: nn.ModuleList

    @classmethod
    def of(cls, model: nn.Module) -> _Anatomy:
        name = type(model).__name__
        config = getattr(model, "config", None)
        if config is None or not isinstance(model, nn.Module):
            raise InputError(f"model={name}: must be a causal language model of transformers")
        if getattr(config, "is_encoder_decoder", False):
            raise InputError(f"model={name}: is an encoder with a decoder; must be a causal language model")
        if hasattr(config, "get_text_config"):
            config = config.get_text_config(decoder=True)
        n = getattr(config, "num_hidden_layers", None)
        if not isinstance(n, int):
            raise InputError(f"model={name}: its configuration must state num_hidden_layers; got {n!r}")
        root: Any = model.get_decoder() if hasattr(model, "get_decoder") else model  # type: ignore[operator]
        found = [
            (path, owner, child)
            for path, owner in root.named_modules()
            for child in owner.children()
            if isinstance(child, nn.ModuleList) and len(child) == n
        ]
        outermost = min((_depth(path) for path, _, _ in found), default=0)
        found = [each for each in found if _depth(each[0]) == outermost]
        if len(found) != 1:
            raise InputError(
                f"model={name}: must have one outermost ModuleList of {n} blocks, its num_hidden_layers; "
                f"found {len(found)}"
            )
        _, decoder, blocks = found[0]
        return cls(model, config, decoder, blocks)

    @property
    def width(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocabulary(self) -> int:
        return int(self.config.vocab_size)

    def width_of(self, layer: int, site: Site) -> int:
        """Values of an activation."""
        if site != "heads":
            return self.width
        projection: Any = self.projection(layer)
        width = getattr(projection, "in_features", None)
        # A Conv1D of transformers keeps its weight as (in, out).
        return int(projection.weight.shape[0] if width is None else width)

    def projection(self, layer: int) -> nn.Module:
        """What joins the heads of a layer."""
        attention = _module_of(self.blocks[layer - 1], layer, "heads")
        named: dict[str, nn.Module] = {}
        for path, module in attention.named_modules():
            # The outermost of a name: an adapter has another one inside.
            named.setdefault(path.rpartition(".")[2], module)
        name = next((name for name in PROJECTION_NAMES if name in named), None)
        if name is None:
            seen = ", ".join(name for name, _ in attention.named_children())
            wanted = ", ".join(PROJECTION_NAMES)
            raise InputError(
                f"site='heads': the attention of block {layer} must have an output projection named one of {wanted}; "
                f"it has {seen}"
            )
        return named[name]

    def place(self, layer: int, site: Site) -> _Place:
        """Where a layer's activation can be seen."""
        if site == "residual":
            return _Place(self.blocks[0], True) if layer == 0 else _Place(self.blocks[layer - 1], False)
        if site == "heads":
            return _Place(self.projection(layer), True)
        return _Place(_module_of(self.blocks[layer - 1], layer, site), False)


@dataclass(frozen=True)
class _Place:
    """The first input or the first output of a module."""

    module: nn.Module
    is_input: bool

    def on_value(self, function: Callable[[Tensor], Tensor | None]) -> Any:
        """Call the function on the value in every forward pass; what it returns, unless None, replaces the value."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name = None if args else next(iter(inspect.signature(module.forward).parameters))
            new = function(args[0] if name is None else kwargs[name])
            if new is None:
                return None
            return ((new, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: new})

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            new = function(output if isinstance(output, Tensor) else output[0])
            if new is None or isinstance(output, Tensor):
                return new
            return (new, *output[1:])

        if self.is_input:
            return self.module.register_forward_pre_hook(before, with_kwargs=True)
        return self.module.register_forward_hook(after)


def _depth(path: str) -> int:
    return path.count(".") + 1 if path else 0


def _module_of(block: nn.Module, layer: int, site: Site) -> nn.Module:
    """The attention or the MLP of a block."""
    found = {}
    kind = "attention" if site == "heads" else site
    for name, module in block.named_children():
        # A module's name in the block counts before that of its class, which may have a family's name in it.
        if _kind_of(name) == kind or (_kind_of(name) is None and _kind_of(type(module).__name__) == kind):
            found[name] = module
    if len(found) != 1:
        seen = ", ".join(name for name, _ in block.named_children())
        what = "no module" if not found else f"{len(found)} modules ({', '.join(found)})"
        raise InputError(f"site={site!r}: {what} of block {layer} can be told to be it, among {seen}")
    (name, module), *_ = found.items()
    if site != "heads" and "residual" in inspect.signature(module.forward).parameters:
        raise InputError(f"site={site!r}: {name} of block {layer} adds the residual stream to its output itself")
    return module


def _kind_of(name: str) -> str | None:
    """What a name says that a module of a block is; "other" for norms and the like, whatever they are named after."""
    name = name.lower()
    if any(word in name for word in OTHER_NAMES):
        return "other"
    return next((kind for kind, words in MODULE_NAMES.items() if any(word in name for word in words)), None)


def _checked_layers(layers: Any, site: Any, n: int, name: str = "layers") -> tuple[int, ...]:
    _check_choice("site", site, SITES)
    first = 0 if site == "residual" else 1
    chosen = list(layers) if isinstance(layers, Sequence | np.ndarray | range | set | frozenset) else [layers]
    if not chosen:
        raise InputError(f"{name}={layers!r}: must have one layer at least")
    for layer in chosen:
        whole = isinstance(layer, int | np.integer) and not isinstance(layer, bool)
        if not whole or not first <= layer <= n:
            raise InputError(f"{name}: {layer!r} must be from {first} to {n}, the blocks of this model")
    return tuple(sorted({int(layer) for layer in chosen}))


def _check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InputError(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}")


def _argument(module: nn.Module, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if name in kwargs or not args:
        return kwargs.get(name)
    names = list(inspect.signature(module.forward).parameters)
    place = names.index(name) if name in names else len(args)
    return args[place] if place < len(args) else None


def _last_real(mask: Any, n: int) -> Tensor:
    """The last of n positions in each row that the mask does not hide."""
    if isinstance(mask, Mapping):  # one for each kind of layer: they hide the same padding
        mask = next(each for each in mask.values() if each is not None)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        real = mask[:, -n:] != 0
    elif isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[2] == n:
        allowed = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > torch.finfo(mask.dtype).min / 2
        # A real token attends to itself. After a cache, the newest key that any attends to is of the last position.
        newest = int(allowed.any(1).any(0).nonzero().max())
        real = allowed.diagonal(max(newest - n + 1, 0), 1, 2)
    else:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            f"attention_mask: has shape {shape}; for positions='last' it must be (batch, tokens) or "
            f"(batch, 1, {n}, tokens)"
        )
    return n - 1 - real.flip(1).to(torch.int8).argmax(dim=1)


class _Enough(Exception):
    """All that is wanted of a forward pass has been seen."""


@dataclass(frozen=True)
class _Reader:
    """Runs batches of prompts and puts their activations in their places."""

    anatomy: _Anatomy
    input_ids: Sequence[Sequence[int]]
    lengths: NDArray[np.int64]
    layers: tuple[int, ...]
    site: Site
    padding_side: str
    offsets: NDArray[np.int64] | None
    dtype: torch.dtype

    def read(
        self,
        batches: Sequence[NDArray[np.intp]],
        arrays: Mapping[int, NDArray[Any]],
        progress: Callable[[int, int], None] | None,
        start: int = 0,
        save: Callable[[int], None] | None = None,
    ) -> None:
        """Read the batches from ``start`` on; ``save(batches done)`` is called after each."""
        done = sum(map(len, batches[:start]))
        with _evaluating(self.anatomy.model), self._watching() as seen:
            for k in range(start, len(batches)):
                self._forward(batches[k])
                self._put(batches[k], arrays, seen)
                done += len(batches[k])
                if save is not None:
                    save(k + 1)
                if progress is not None:
                    progress(done, len(self.lengths))

    @contextmanager
    def _watching(self) -> Iterator[dict[int, Tensor]]:
        """Within it forward passes leave what the layers put out in what is yielded, and end with `_Enough`."""
        seen: dict[int, Tensor] = {}

        def keep(layer: int, hidden: Tensor) -> None:
            seen[layer] = hidden.clone()
            if layer == self.layers[-1] and self._may_stop:
                raise _Enough

        with ExitStack() as hooks:
            for layer in self.layers:
                place = self.anatomy.place(layer, self.site)
                hooks.callback(place.on_value(partial(keep, layer)).remove)
            yield seen

    @property
    def _may_stop(self) -> bool:
        """Whether nothing is undone by a forward pass that does not end: accelerate puts weights back at the end."""
        return not any(hasattr(module, "_hf_hook") for module in (self.anatomy.model, self.anatomy.decoder))

    def _forward(self, rows: NDArray[np.intp]) -> None:
        model, decoder = self.anatomy.model, self.anatomy.decoder
        longest = int(self.lengths[rows].max())
        # Any token will do for padding: the mask hides it.
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for n, row in enumerate(rows):
            ids[n, self._span(int(row), longest)] = torch.as_tensor(self.input_ids[row], dtype=torch.int64)
            mask[n, self._span(int(row), longest)] = 1
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if "position_ids" in inspect.signature(decoder.forward).parameters:
            given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        device = _input_device(model)
        given = {name: tensor.to(device) for name, tensor in given.items()}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            given["logits_to_keep"] = 1
        try:
            # Not the inference mode: weights that accelerate loads within it could not be used outside of it.
            with torch.no_grad():
                model(**given, use_cache=False)
        except _Enough:
            pass

    def _put(self, rows: NDArray[np.intp], arrays: Mapping[int, NDArray[Any]], seen: dict[int, Tensor]) -> None:
        longest = int(self.lengths[rows].max())
        for layer in self.layers:
            hidden = seen.pop(layer)
            if hidden.shape[1] != longest:
                raise InputError(
                    f"model: layer {layer} has {hidden.shape[1]} positions for {longest} tokens; they must agree"
                )
            if self.offsets is None:
                ends = [self._span(int(row), longest).stop - 1 for row in rows]
                hidden = hidden[torch.arange(len(rows)), ends].unsqueeze(1)
            kept = hidden.to(device="cpu", dtype=self.dtype).numpy()
            for n, row in enumerate(rows):
                one = kept[n] if self.offsets is None else kept[n, self._span(int(row), longest)]
                if not np.isfinite(one).all():
                    self._refuse(layer, int(row), one)
                if self.offsets is None:
                    arrays[layer][row] = one[0]
                else:
                    arrays[layer][self.offsets[row] : self.offsets[row + 1]] = one

    def _span(self, row: int, longest: int) -> slice:
        length = int(self.lengths[row])
        return slice(0, length) if self.padding_side == "right" else slice(longest - length, longest)

    def _refuse(self, layer: int, row: int, one: NDArray[Any]) -> None:
        position = int(np.argwhere(~np.isfinite(one))[0, 0])
        position = int(self.lengths[row]) - 1 if self.offsets is None else position
        remedy = "; dtype=torch.float32 holds larger values" if self.dtype == torch.float16 else ""
        raise InputError(
            f"layer {layer}: input_ids[{row}] has an activation that is not finite at position {position}{remedy}"
        )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def _input_device(model: nn.Module) -> torch.device:
    embeddings: Any = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else model  # type: ignore[operator]
    device = next(iter(embeddings.parameters())).device
    # Weights that accelerate keeps elsewhere come when they are needed, and it moves what goes in.
    return torch.device("cpu") if device.type == "meta" else device


def _checked_ids(input_ids: Any, vocabulary: int) -> NDArray[np.int64]:
    """The lengths."""
    if isinstance(input_ids, str) or not hasattr(input_ids, "__len__"):
        raise InputError(f"input_ids={input_ids!r}: must be a sequence of sequences of token ids")
    if not len(input_ids):
        raise InputError("input_ids: is empty; must have one prompt at least")
    lengths = np.empty(len(input_ids), np.int64)
    for i, row in enumerate(input_ids):
        ids = np.asarray(row)
        if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
            raise InputError(f"input_ids[{i}]={row!r:.60}: must be a sequence of token ids, one at least")
        if ids.min() < 0 or ids.max() >= vocabulary:
            wrong = ids[(ids < 0) | (ids >= vocabulary)][0]
            raise InputError(f"input_ids[{i}]: has token {wrong}; must be from 0 to {vocabulary - 1}")
        lengths[i] = len(ids)
    return lengths


def _hash_of_ids(input_ids: Sequence[Sequence[int]]) -> str:
    digest = hashlib.sha256()
    for row in input_ids:
        digest.update(np.int64(len(row)).tobytes())
        digest.update(np.asarray(row, dtype=np.int64).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class _Store:
    """A folder of one array a layer that takes its name when it is complete."""

    path: Path
    facts: dict[str, Any]

    def fill(self, read: Callable[[dict[int, NDArray[Any]], int, Callable[[int], None]], None]) -> None:
        """Make the folder if it is not there, by ``read(arrays, batches already done, save)``."""
        if self.path.exists():
            self._require_same()
            return
        try:
            self._partial.mkdir(parents=True, exist_ok=True)
            with _only_writer(self._partial, self.path):
                if self.path.exists():  # another process has just finished
                    self._require_same()
                    return
                self._write(read)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR):
                raise
            message = f"store={str(self.path)!r}: {self._bytes / 1e9:.3g} GB cannot be written: {error.strerror}"
            raise InputError(message) from error

    def open(self) -> dict[int, NDArray[Any]]:
        """The arrays, memory-mapped: what is written into them is not written to the files."""
        try:
            return {layer: np.load(self._file(self.path, layer), mmap_mode="c") for layer in self.facts["layers"]}
        except (OSError, ValueError) as error:
            raise InputError(f"store={str(self.path)!r}: is damaged ({error}); delete it and record again") from error

    @property
    def _partial(self) -> Path:
        return self.path.with_name(f".{self.path.name}.partial")

    @property
    def _bytes(self) -> int:
        return len(self.facts["layers"]) * int(np.prod(self.facts["shape"])) * np.dtype(self.facts["dtype"]).itemsize

    @staticmethod
    def _file(folder: Path, layer: int) -> Path:
        return folder / f"layer-{layer}.npy"

    def _require_same(self) -> None:
        try:
            found = json.loads((self.path / "index.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict):
            raise InputError(f"store={str(self.path)!r}: is there and is no recording; give another path")
        other = [name for name, value in self.facts.items() if found.get(name) != value]
        if other:
            raise InputError(
                f"store={str(self.path)!r}: holds a recording of other {', '.join(other)}; "
                "give another path or delete it"
            )

    def _write(self, read: Callable[[dict[int, NDArray[Any]], int, Callable[[int], None]], None]) -> None:
        arrays, done = self._resumed() or self._begun()
        saved = monotonic()

        def save(n_batches: int) -> None:
            nonlocal saved
            if monotonic() - saved < SECONDS_BETWEEN_SAVES:
                return
            for array in arrays.values():
                array.flush()
            _write_json(self._partial / "progress.json", n_batches)
            saved = monotonic()

        try:
            read(arrays, done, save)
            for array in arrays.values():
                array.flush()
        finally:
            arrays.clear()
        (self._partial / "progress.json").unlink(missing_ok=True)
        self._partial.replace(self.path)

    def _resumed(self) -> tuple[dict[int, Any], int] | None:
        try:
            if json.loads((self._partial / "index.json").read_text(encoding="utf-8")) != self.facts:
                return None
            done = json.loads((self._partial / "progress.json").read_text(encoding="utf-8"))
            layers = self.facts["layers"]
            return {layer: np.load(self._file(self._partial, layer), mmap_mode="r+") for layer in layers}, int(done)
        except (OSError, ValueError):
            return None

    def _begun(self) -> tuple[dict[int, Any], int]:
        for entry in self._partial.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        arrays = {}
        for layer in self.facts["layers"]:
            file = self._file(self._partial, layer)
            arrays[layer] = np.lib.format.open_memmap(file, "w+", self.facts["dtype"], tuple(self.facts["shape"]))
            _reserve(file)
        _write_json(self._partial / "index.json", self.facts)
        return arrays, 0


@contextmanager
def _only_writer(folder: Path, store: Path) -> Iterator[None]:
    """Hold the folder against other processes; one that dies lets go of it."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"store={str(store)!r}: another process is writing it") from error
        except OSError:  # some network file systems have no locks
            pass
        yield
    finally:
        os.close(descriptor)


def _reserve(file: Path) -> None:
    """Take the space on disk now: a full disk would kill the process when a memory-mapped page is written."""
    if not hasattr(os, "posix_fallocate"):
        return
    descriptor = os.open(file, os.O_RDWR)
    try:
        os.posix_fallocate(descriptor, 0, file.stat().st_size)
    finally:
        os.close(descriptor)


def _write_json(path: Path, content: Any) -> None:
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(content), encoding="utf-8")
    beside.replace(path)


def _own_samples(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """Name, shape and some values of each weight that a module has itself."""
    persistent = {k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set}
    own = {name: v for name, v in {**module._parameters, **persistent}.items() if v is not None}
    if not any(values.is_meta for values in own.values()):
        yield from ((name, tuple(values.shape), _sample(values)) for name, values in own.items())
        return
    if not hasattr(module, "_hf_hook"):
        raise InputError(f"model: has weights on the meta device, in {type(module).__name__}; load them first")
    from accelerate.utils import align_module_device

    with align_module_device(module, torch.device("cpu")):
        for name in own:
            values = getattr(module, name)
            yield name, tuple(values.shape), _sample(values)


def _to_cpu(samples: Sequence[Tensor]) -> Tensor:
    """All values in order, by one transfer a device."""
    parts: list[Tensor] = list(samples)
    for device in {values.device for values in samples}:
        of_device = [i for i, values in enumerate(samples) if values.device == device]
        moved = torch.cat([samples[i] for i in of_device]).to("cpu").split([len(samples[i]) for i in of_device])
        for i, values in zip(of_device, moved, strict=True):
            parts[i] = values
    return torch.cat(parts)


def _sample(values: Tensor) -> Tensor:
    flat = values.detach().reshape(-1)
    places = torch.linspace(0, max(len(flat) - 1, 0), min(SAMPLES_PER_WEIGHT, len(flat)), dtype=torch.float64)
    return flat[places.long().to(flat.device)].to(torch.bfloat16)
