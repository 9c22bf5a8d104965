"""MemoryLLM and Flex-MemoryLLM as transformers models, built of the parts of Llama."""

from __future__ import annotations

import copy
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import AutoModel, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from practicum.language.memoryllm.config import MemoryLMConfig
from practicum.language.memoryllm.lookups import BATCH, ROW_TYPES, Layout, TokenLookups, write_rows
from practicum.toolbox.errors import InputError

# Rows of one matrix product in inference. Kernels round differently for other numbers of rows and for other places
# among them: computed outputs equal the table to the last bit because every token has its place in such a block.
BLOCK = 32
# Above this share of distinct tokens, evaluating each of them once does not pay for bringing the rows to their places.
MOST_DISTINCT = 0.8


class MemoryDecoderLayer(GradientCheckpointingLayer):
    """Attention on the residual stream, a memory that reads the token's embedding, and what is left of a network on it.

    Parameters
    ----------
    config : MemoryLMConfig
    layer_idx : int
    """

    def __init__(self, config: MemoryLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.self_attn = LlamaAttention(config=config, layer_idx=layer_idx)
        self.input_layernorm = _norm(config)
        self.mlp: nn.Module | None = None
        self.post_attention_layernorm: nn.Module | None = None
        if config.flex_beta > 0:
            self.mlp = _context_network(config)
            self.post_attention_layernorm = _norm(config)
        self.memory: LlamaMLP | None = None
        self.memory_norm: nn.Module | None = None
        if config.memory_weights:
            self.memory = _mlp(config, config.memory_intermediate_size)
            self.memory_norm = None if config.shared_memory_norm else _norm(config)

    def forward(self, hidden_states: Tensor, memory: _Memory, **kwargs: Any) -> Tensor:
        """Equation 2.6 of the paper, with the network on the residual stream where there is one."""
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        # The memory reads the embeddings: nothing of this block's hidden states reaches it.
        recalled = memory.output(self)
        if self.mlp is not None and self.post_attention_layernorm is not None:
            hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states if recalled is None else hidden_states + recalled

    def query(self, embeddings: Tensor) -> Tensor:
        """What the memory's matrices meet: the embeddings, normed by this layer unless one norm serves all."""
        return embeddings if self.memory_norm is None else self.memory_norm(embeddings)

    def recall(self, embeddings: Tensor) -> Tensor:
        """The memory's output for embeddings of any shape (..., h)."""
        if self.memory is None:
            raise InputError("the model has no memory weights: attach_lookups with the table that belongs to it")
        return self.memory(self.query(embeddings))


def _norm(config: MemoryLMConfig) -> LlamaRMSNorm:
    return LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


def _mlp(config: MemoryLMConfig, width: int | None) -> LlamaMLP:
    sized = copy.copy(config)
    sized.intermediate_size = width
    return LlamaMLP(sized)


def _context_network(config: MemoryLMConfig) -> nn.Module:
    if config.compute == "swiglu":
        return _mlp(config, config.intermediate_size)
    h, bias = config.hidden_size, config.mlp_bias
    if config.flex_beta == 1:
        return nn.Linear(h, h, bias=bias)
    width = int(config.intermediate_size or 1)
    return nn.Sequential(nn.Linear(h, width, bias=bias), nn.Linear(width, h, bias=bias))


class _Memory(ABC):
    """What the memories of all layers give for the tokens of one forward pass."""

    scales: Sequence[float]

    def output(self, layer: MemoryDecoderLayer) -> Tensor | None:
        """Of one layer, (batch, positions, h); None where its scale is 0."""
        scale = self.scales[layer.layer_idx]
        if scale == 0:
            return None
        recalled = self.unscaled(layer)
        return recalled if scale == 1 else scale * recalled

    @abstractmethod
    def unscaled(self, layer: MemoryDecoderLayer) -> Tensor:
        """The memory's output of one layer."""


class _Computed(_Memory):
    """Computed from embeddings: of every position, or of distinct tokens whose results are brought to their places."""

    def __init__(self, embeddings: Tensor, place: Tensor | None, in_blocks: bool, scales: Sequence[float]) -> None:
        self.embeddings, self.place, self.in_blocks, self.scales = embeddings, place, in_blocks, scales

    def unscaled(self, layer: MemoryDecoderLayer) -> Tensor:
        recalled = _by_blocks(layer, self.embeddings) if self.in_blocks else layer.recall(self.embeddings)
        return recalled if self.place is None else embedding(self.place, recalled)


class _LookedUp(_Memory):
    """Read from a table when the first layer asks, while its attention may have hidden the time of reading."""

    def __init__(self, lookups: TokenLookups, ids: Tensor, like: Tensor, scales: Sequence[float]) -> None:
        self.lookups, self.ids, self.like, self.scales = lookups, ids, like, scales
        self._rows: Tensor | None = None

    def unscaled(self, layer: MemoryDecoderLayer) -> Tensor:
        if self._rows is None:
            self._rows = self.lookups.gather(self.ids).to(self.like.device, self.like.dtype)
        return self._rows[..., layer.layer_idx, :]


def _by_blocks(layer: MemoryDecoderLayer, embeddings: Tensor) -> Tensor:
    parts = [layer.recall(block) for block in embeddings.split(BLOCK)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _block_places(distinct: Tensor) -> Tensor:
    """Where sorted distinct tokens go in blocks: token v into row v mod `BLOCK` of one of them."""
    slot = distinct % BLOCK
    order = torch.argsort(slot, stable=True)
    first = torch.cumsum(torch.bincount(slot, minlength=BLOCK), 0) - torch.bincount(slot, minlength=BLOCK)
    block = torch.empty_like(distinct)
    block[order] = torch.arange(len(distinct), device=distinct.device) - first[slot[order]]
    return block * BLOCK + slot


class MemoryLMModel(LlamaModel):
    """The decoder of a MemoryLLM, without a head: token embeddings, attention, memories.

    Distinct tokens are evaluated once, and their results brought to the positions; that is exact, as a memory's output
    depends on the token alone.

    Parameters
    ----------
    config : MemoryLMConfig

    Examples
    --------
    >>> config = MemoryLMConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    >>> MemoryLMModel(config)(torch.tensor([[3, 4, 5]])).last_hidden_state.shape
    torch.Size([1, 3, 16])
    """

    config_class = MemoryLMConfig
    config: MemoryLMConfig
    _no_split_modules = ["MemoryDecoderLayer"]
    _can_record_outputs = {"hidden_states": MemoryDecoderLayer, "attentions": LlamaAttention}

    def __init__(self, config: MemoryLMConfig) -> None:
        # Not LlamaModel's own: that would make Llama's layers first.
        super(LlamaModel, self).__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(MemoryDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.memory_norm = _norm(config) if config.shared_memory_norm and config.memory_weights else None
        self.norm = _norm(config)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.lookups: TokenLookups | None = None
        self.memory_scales = [1.0] * config.num_hidden_layers
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **kwargs: Any) -> Any:
        """As `LlamaModel.forward`.

        Parameters
        ----------
        input_ids : int64 Tensor of shape (batch, positions)
        inputs_embeds : Tensor of shape (batch, positions, h), optional
            In place of ``input_ids``, while no lookups are attached.
        **kwargs
            Mask, positions, cache and outputs, as `LlamaModel` takes them.

        Returns
        -------
        BaseModelOutputWithPast

        Raises
        ------
        ValueError
            For embeddings where ids are needed, for a table of another vocabulary, for ids that it has not.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is not None:
            if self.lookups is not None:
                raise InputError("inputs_embeds: a table is looked up by token; give input_ids, or detach_lookups()")
            memory: _Memory = _Computed(self._queries(inputs_embeds), None, False, self.memory_scales)
        else:
            memory, inputs_embeds = self._read(input_ids)  # type: ignore[arg-type]
        return super().forward(inputs_embeds=inputs_embeds, memory=memory, **kwargs)

    def _read(self, ids: Tensor) -> tuple[_Memory, Tensor]:
        """The memory, and the embeddings of all positions."""
        if self.lookups is not None:
            vocabulary = self.embed_tokens.num_embeddings
            if self.lookups.shape[0] != vocabulary:
                raise InputError(
                    f"lookups: the table has {self.lookups.shape[0]} tokens and the model {vocabulary}, since its "
                    "embeddings were resized; detach_lookups() and precompute_lookups() again"
                )
            self.lookups.prefetch(ids)
            embedded = self.embed_tokens(ids)
            return _LookedUp(self.lookups, ids, embedded, self.memory_scales), embedded
        distinct, place = torch.unique(ids, return_inverse=True)
        if not torch.is_grad_enabled():
            row = _block_places(distinct)
            blocks = self.embed_in_blocks(distinct, row)
            return _Computed(blocks, row[place], True, self.memory_scales), self.embed_tokens(ids)
        if len(distinct) > MOST_DISTINCT * ids.numel():
            embedded = self.embed_tokens(ids)
            return _Computed(self._queries(embedded), None, False, self.memory_scales), embedded
        rows = self.embed_tokens(distinct)
        return _Computed(self._queries(rows), place, False, self.memory_scales), embedding(place, rows)

    def embed_in_blocks(self, distinct: Tensor, row: Tensor) -> Tensor:
        """Queries of distinct tokens in their rows, the other rows zero, up to whole blocks.

        Parameters
        ----------
        distinct, row : int64 Tensor of shape (n,)

        Returns
        -------
        Tensor of shape (blocks * 32, h)
        """
        n_rows = BLOCK * (int(row.max()) // BLOCK + 1) if len(row) else 0
        weight = self.embed_tokens.weight
        blocks = torch.zeros(n_rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
        blocks[row] = self.embed_tokens(distinct)
        if self.memory_norm is None:
            return blocks
        return torch.cat([self.memory_norm(block) for block in blocks.split(BLOCK)]) if n_rows else blocks

    def _queries(self, embedded: Tensor) -> Tensor:
        return embedded if self.memory_norm is None else self.memory_norm(embedded)


class MemoryLMForCausalLM(LlamaForCausalLM):
    r"""A language model whose feed-forward networks are memories over the vocabulary.

    .. math:: X_{L+1} = X_L + \mathrm{Attn}_L(\mathrm{LN}(X_L)) + \mathrm{FFN}_L(\mathrm{LN}_L(X_0)),

    with :math:`X_0` the token embeddings (MemoryLLM), or with a smaller network on the residual stream beside
    (Flex-MemoryLLM; see `MemoryLMConfig`). It is trained like any model of transformers. Then `precompute_lookups`
    tabulates all memories, and `attach_lookups` replaces them by the table, in memory or in a file.

    Attention, norms, rotary positions and gated networks are Llama's. The norm that the paper's equations leave out
    stands before the attention and before the network on the residual stream, as in Llama. Gradients flow into the
    embeddings from every memory. In inference the networks are evaluated on blocks of 32 rows in which a token has
    always the same row: so computed and looked-up outputs are equal to the last bit in one type on one device.

    Parameters
    ----------
    config : MemoryLMConfig

    References
    ----------
    A. Jaiswal, L. Hannah, H.-B. Kim, D. Hoang, A. Kundu, M. Farajtabar, M. Cho, "MemoryLLM: Plug-n-Play Interpretable
    Feed-Forward Memory for Transformers", ICML 2026, arXiv:2602.00398. No code was released.

    Examples
    --------
    >>> config = MemoryLMConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, flex_beta=1)
    >>> model = MemoryLMForCausalLM(config).eval()
    >>> ids = torch.tensor([[3, 4, 5, 3]])
    >>> with torch.no_grad():
    ...     computed = model(ids).logits
    ...     model.attach_lookups(model.precompute_lookups(), free_memory_weights=True)
    ...     print(computed.shape, torch.equal(computed, model(ids).logits))
    torch.Size([1, 4, 50]) True
    >>> model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0).shape
    torch.Size([1, 6])
    """

    config_class = MemoryLMConfig
    config: MemoryLMConfig
    _no_split_modules = ["MemoryDecoderLayer"]

    def __init__(self, config: MemoryLMConfig) -> None:
        super(LlamaForCausalLM, self).__init__(config)
        self.model = MemoryLMModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    # Tables -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def precompute_lookups(
        self, dtype: torch.dtype | None = None, batch_size: int = BATCH, path: Path | str | None = None
    ) -> TokenLookups:
        """Tabulate the memory of every layer for every token.

        Parameters
        ----------
        dtype : torch.dtype, optional
            float32, float16 or bfloat16; by default that of the weights.
        batch_size : int
            Tokens at a time: memory needed beside the table is that of one layer of one batch.
        path : Path or str, optional
            Write the table to this safetensors file as it is computed, and return it mapped from there.

        Returns
        -------
        TokenLookups
            Of shape (V, N, h), in memory unless ``path`` is given.

        Raises
        ------
        ValueError
            When memory weights have been freed, for another type, for values that float16 cannot hold.
        """
        self._require_memory("precompute_lookups")
        chosen = self.model.embed_tokens.weight.dtype if dtype is None else dtype
        if chosen not in ROW_TYPES:
            raise InputError(f"dtype={chosen}: must be torch.float32, torch.float16 or torch.bfloat16")
        if batch_size < 1:
            raise InputError(f"batch_size={batch_size}: must be at least 1")
        n_layers, h = self.config.num_hidden_layers, self.config.hidden_size
        n_tokens = self.model.embed_tokens.num_embeddings
        layout = Layout(n_tokens, n_layers, h, chosen, tuple(range(n_layers)), fingerprint=self.memory_fingerprint())
        batches = (
            self._tabulated(start, min(start + batch_size, n_tokens), chosen)
            for start in range(0, n_tokens, batch_size)
        )
        if path is not None:
            write_rows(Path(path), layout, batches)
            return TokenLookups.load(path, backend="mmap")
        table = torch.empty(n_tokens, n_layers, h, dtype=chosen)
        done = 0
        for batch in batches:
            table[done : done + len(batch)] = batch
            done += len(batch)
        return TokenLookups(table, layout.fingerprint)

    def _tabulated(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        ids = torch.arange(start, stop, device=self.model.embed_tokens.weight.device)
        row = _block_places(ids)
        queries = self.model.embed_in_blocks(ids, row)
        out = torch.empty(len(ids), self.config.num_hidden_layers, self.config.hidden_size, dtype=dtype)
        for i, layer in enumerate(self.model.layers):
            rows = _by_blocks(layer, queries)[row]
            out[:, i] = rows
            if dtype == torch.float16 and not bool(torch.isfinite(out[:, i]).all() | ~torch.isfinite(rows).all()):
                largest = float(rows.abs().max())
                raise InputError(f"dtype=torch.float16: cannot hold {largest:.3g}, of layer {i}; take torch.bfloat16")
        return out

    def attach_lookups(self, lookups: TokenLookups, free_memory_weights: bool = False, *, strict: bool = True) -> None:
        """Read memories from a table from now on.

        With a table in a file, reading begins with the forward pass, and the first layer's attention runs meanwhile.

        Parameters
        ----------
        lookups : TokenLookups
        free_memory_weights : bool
            Give up the memory networks, to save their memory. The model cannot be trained any more; `save_pretrained`
            keeps it without them, and ``from_pretrained`` gives a model that needs `attach_lookups`.
        strict : bool
            Refuse a table whose fingerprint is not that of these weights.

        Raises
        ------
        ValueError
            For a table of another shape, or of other weights.
        """
        shape = (self.model.embed_tokens.num_embeddings, self.config.num_hidden_layers, self.config.hidden_size)
        if lookups.shape != shape:
            raise InputError(f"lookups: must have (tokens, layers, hidden size) = {shape}; got {lookups.shape}")
        expected = self.memory_fingerprint()
        if strict and lookups.fingerprint != expected:
            raise InputError(
                f"lookups: were computed from other weights (fingerprint {lookups.fingerprint or 'none'}, the model's "
                f"is {expected}); precompute_lookups() again, or give strict=False"
            )
        self.model.lookups = lookups
        if free_memory_weights:
            for layer in self.model.layers:
                layer.memory = layer.memory_norm = None
            self.model.memory_norm = None
            self.config.memory_weights = False
            self.config.memory_fingerprint = expected
            self.eval()

    def detach_lookups(self) -> TokenLookups | None:
        """Compute memories again.

        Returns
        -------
        TokenLookups or None
            The table, whose first dimension has shape (V,), that was attached.
        """
        lookups, self.model.lookups = self.model.lookups, None
        return lookups

    def memory_fingerprint(self) -> str:
        """Stands for the embeddings and the memory weights: all their values, rounded to bfloat16.

        Returns
        -------
        str
            16 hexadecimal digits, the same for weights kept as float32 or bfloat16.
        """
        if self.config.memory_fingerprint is not None and not self.config.memory_weights:
            return self.config.memory_fingerprint
        digest = hashlib.sha256(f"{self.config.rms_norm_eps} {self.config.hidden_act}".encode())
        for name, weight in self._memory_parameters():
            digest.update(f"{name} {tuple(weight.shape)}".encode())
            digest.update(weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:16]

    def _memory_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.model.named_parameters():
            if name == "embed_tokens.weight" or _is_memory(name):
                yield name, weight

    def _require_memory(self, what: str) -> None:
        if not self.config.memory_weights:
            raise InputError(f"{what}: the memory weights have been freed; load the model that was saved with them")

    def train(self, mode: bool = True) -> Self:
        """Set the mode, as `torch.nn.Module.train` does.

        Parameters
        ----------
        mode : bool

        Returns
        -------
        MemoryLMForCausalLM
            The model itself.

        Raises
        ------
        RuntimeError
            When memory weights have been freed: there is nothing to train in the memory.
        """
        if mode and not self.config.memory_weights:
            raise RuntimeError(
                "train: the memory weights have been freed (attach_lookups(free_memory_weights=True)); train the model "
                "that was saved with them"
            )
        return super().train(mode)

    # Probes -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def memory_scale(self, alpha: float, layers: int | Sequence[int] | None = None) -> Iterator[None]:
        """Multiply the memory's output within a ``with`` block; blocks within blocks multiply.

        Parameters
        ----------
        alpha : float
            1 changes nothing, 0 drops the memory.
        layers : int or sequence of int, optional
            From 0; all by default.

        Yields
        ------
        None

        Raises
        ------
        ValueError
            For an alpha that is not finite, or a layer that is not there.
        """
        if not math.isfinite(alpha):
            raise InputError(f"alpha={alpha}: must be finite")
        chosen = self._layers(layers)
        before = list(self.model.memory_scales)
        self.model.memory_scales = [s * alpha if i in chosen else s for i, s in enumerate(before)]
        try:
            yield
        finally:
            self.model.memory_scales = before

    def drop_memory(self, layers: int | Sequence[int] | None = None) -> Any:
        """`memory_scale` with alpha 0.

        Parameters
        ----------
        layers : int or sequence of int, optional
            From 0; all by default, which leaves attention (and the network on the residual stream).

        Returns
        -------
        context manager
        """
        return self.memory_scale(0.0, layers)

    def _layers(self, layers: int | Sequence[int] | None) -> set[int]:
        n = self.config.num_hidden_layers
        chosen = range(n) if layers is None else [layers] if isinstance(layers, int) else layers
        for layer in chosen:
            if not 0 <= layer < n:
                raise InputError(f"layers: there are layers 0 to {n - 1}; got {layer}")
        return set(chosen)

    @torch.no_grad()
    def key_coefficients(self, layer: int, token_ids: Sequence[int] | Tensor | None = None) -> Tensor:
        r"""How strongly each key of a memory answers to tokens.

        .. math:: q = \mathrm{LN}_L(E[v]), \qquad c = (q W_{up}^\top) \odot \mathrm{SiLU}(q W_{gate}^\top),

        so that the memory's output is :math:`\sum_k c_k W_{down}[:, k]`.

        Parameters
        ----------
        layer : int
            From 0.
        token_ids : sequence of int or Tensor, optional
            All tokens by default.

        Returns
        -------
        Tensor of shape (n, K)

        Raises
        ------
        ValueError
            When memory weights have been freed; for a layer or a token that is not there.
        """
        self._require_memory("key_coefficients")
        self._layers(layer)
        weight = self.model.embed_tokens.weight
        ids = torch.arange(len(weight)) if token_ids is None else torch.as_tensor(token_ids, dtype=torch.long)
        ids = ids.reshape(-1)
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= len(weight)):
            raise InputError(f"token_ids: the model has tokens 0 to {len(weight) - 1}; got {ids.tolist()}")
        block = self.model.layers[layer]
        parts = []
        for batch in ids.to(weight.device).split(BATCH):
            rows = self.model.embed_tokens(batch)
            if self.model.memory_norm is not None:
                rows = self.model.memory_norm(rows)
            q = block.query(rows)
            parts.append(block.memory.act_fn(block.memory.gate_proj(q)) * block.memory.up_proj(q))
        return torch.cat(parts) if parts else weight.new_empty(0, int(self.config.memory_intermediate_size or 0))

    def num_parameters(
        self, only_trainable: bool = False, exclude_embeddings: bool = False, active: bool = False
    ) -> int:
        """Count parameters.

        Parameters
        ----------
        only_trainable, exclude_embeddings : bool
            As in transformers.
        active : bool
            Leave out the memories and their norms, which the table replaces.

        Returns
        -------
        int
        """
        total = super().num_parameters(only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)
        if not active:
            return int(total)
        memory = sum(
            weight.numel()
            for name, weight in self.model.named_parameters()
            if _is_memory(name) and (weight.requires_grad or not only_trainable)
        )
        return int(total) - memory


def _is_memory(name: str) -> bool:
    return any(part in ("memory", "memory_norm") for part in name.split("."))


AutoModel.register(MemoryLMConfig, MemoryLMModel, exist_ok=True)
AutoModelForCausalLM.register(MemoryLMConfig, MemoryLMForCausalLM, exist_ok=True)
