"""What heads say: their outputs decoded with the model's own final norm and unembedding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from practicum.toolbox.errors import InputError
from practicum.toolbox.taps import decoder_blocks, head_shape, output_projection

# Tokens of the vocabulary that are looked at first, and next. Any subset gives the same result; these cost least.
SUBSETS = (1024, 8192)
ROWS_AT_ONCE = 4096
ELEMENTS_AT_ONCE = 2**25
UNIT_ROUNDOFF = 2.0**-24


class HeadLens:
    r"""Decode the outputs of single heads: :math:`W_U\,\mathrm{norm}_f(W_O^{l,h} z_{l,h})`.

    What a head writes into the residual stream goes through the model's final norm and unembedding as if it were alone
    there. Where the block norms the attention's output before it adds it (Gemma 2 and 3, OLMo 2), the head's share of
    the normed output is decoded: its weights, and the scale of the whole output. Norms are found by running the model
    on one token, not by class names. A soft cap on the logits changes no rank and is not applied; nor is the bias of
    the output projection, which belongs to no head.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, in eval mode.

    Attributes
    ----------
    n_layers, n_heads, d_head : int

    Raises
    ------
    InputError
        A ValueError: for a model in training mode, or in which the output projections, the final norm or the
        unembedding cannot be told or used; it says what is needed.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    ... )
    >>> lens = HeadLens(LlamaForCausalLM(config).eval())
    >>> z = torch.randn(5, 3, 2, 8)
    >>> lens.logits(lens.normed(z)).shape
    torch.Size([5, 3, 2, 50])
    """

    def __init__(self, model: Any) -> None:
        if getattr(model, "training", False):
            raise InputError("model: is in training mode; call model.eval() first")
        self.n_layers, self.n_heads, self.d_head = head_shape(model)
        self._projections = [output_projection(model, layer) for layer in range(1, self.n_layers + 1)]
        unembedding = model.get_output_embeddings()
        weight = getattr(unembedding, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
            raise InputError(
                f"model={type(model).__name__}: its output embeddings must have a weight (vocabulary, width) of "
                "floating-point numbers; a quantised one must be de-quantised first"
            )
        self._unembedding = unembedding
        self.vocabulary, self.width = weight.shape
        norms = _find_norms(model)
        self._final_norm = norms.final
        self._post = [None if norm is None else _post_weight(norm, self.width) for norm in norms.post]

    @property
    def device(self) -> torch.device:
        """Where decoding runs: with the unembedding."""
        device: torch.device = self._unembedding.weight.device
        return device

    def written(self, z: Tensor, layer: int) -> Tensor:
        """What the heads of a layer write into the residual stream.

        Parameters
        ----------
        z : Tensor of shape (..., heads, d_head)
        layer : int
            From 0.

        Returns
        -------
        Tensor of shape (..., heads, d), float32
        """
        w_o = self._w_o[layer]
        written = torch.einsum("...he,hed->...hd", z.to(w_o.device, torch.float32), w_o)
        weight = self._post[layer]
        if weight is None:
            return written
        whole = written.sum(-2, keepdim=True)
        bias = getattr(self._projections[layer], "bias", None)
        if isinstance(bias, Tensor):
            whole = whole + bias.float()
        return written * weight.to(written.device) / whole.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)

    def normed(self, z: Tensor, layers: Sequence[int] | None = None) -> Tensor:
        """Outputs of heads behind the final norm, where the unembedding reads them.

        Parameters
        ----------
        z : Tensor of shape (..., layers, heads, d_head)
        layers : sequence of int, optional
            Which those are, from 0; all by default.

        Returns
        -------
        Tensor of shape (..., layers, heads, d), float32
        """
        chosen = range(self.n_layers) if layers is None else layers
        with torch.no_grad():
            written = [self.written(z[..., i, :, :], layer).to(self.device) for i, layer in enumerate(chosen)]
            return self._norm(torch.stack(written, dim=-3))

    def logits(self, normed: Tensor) -> Tensor:
        """Logits of the whole vocabulary.

        Parameters
        ----------
        normed : Tensor of shape (..., d)
            From `normed`.

        Returns
        -------
        Tensor of shape (..., vocabulary), float32
        """
        with torch.no_grad():
            return self._logits(normed.to(self.device), slice(None))

    def hits(
        self, normed: Tensor, words: Sequence[Tensor], k: int = 10, n_match: int = 1, *, shortcut: bool = True
    ) -> Tensor:
        r"""Whether at least ``n_match`` of the k tokens with the largest logits are among some words.

        A word is among the k largest when fewer than k logits are above its own (so that ties count for it; a head that
        writes nothing at all says nothing). Most heads say nothing of the words, which a part of the vocabulary shows
        already: as soon as k of 1024 random tokens are above the best word, the head is out. A few per cent are decoded
        in full. The result is the same, bit by bit: what rounding could decide is computed again in float64.

        Parameters
        ----------
        normed : Tensor of shape (..., d)
            From `normed`.
        words : sequence of Tensor of shape (n_words,), int64
            Sets of token ids.
        k, n_match : int
        shortcut : bool
            False decodes every head in full, which is slower.

        Returns
        -------
        Tensor of shape (n_sets, ...), bool, on the CPU

        Examples
        --------
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> lens = HeadLens(GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2)).eval())
        >>> u = lens.normed(torch.randn(3, 2, 2, 8))
        >>> best = lens.logits(u[0, 0, 0]).argmax()
        >>> bool(lens.hits(u, [best[None]], k=1)[0, 0, 0, 0])
        True
        """
        check_k(k, n_match)
        rows = normed.reshape(-1, normed.shape[-1])
        with torch.no_grad():
            parts = [self._hits(part.to(self.device), words, k, n_match, shortcut) for part in rows.split(ROWS_AT_ONCE)]
        found = torch.cat(parts, dim=1) if parts else torch.zeros(len(words), 0, dtype=torch.bool)
        return found.reshape(len(words), *normed.shape[:-1])

    def says_own(self, normed: Tensor, tokens: Tensor, k: int = 10) -> Tensor:
        """Whether each row has its own token among the k tokens with the largest logits, as `hits` has words.

        Parameters
        ----------
        normed : Tensor of shape (n, ..., d)
            From `normed`.
        tokens : Tensor of shape (n,), int64
        k : int

        Returns
        -------
        Tensor of shape (n, ...), bool, on the CPU

        Examples
        --------
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> lens = HeadLens(GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2)).eval())
        >>> u = lens.normed(torch.randn(3, 2, 2, 8))
        >>> bool(lens.says_own(u, lens.logits(u[:, 0, 0]).argmax(1).cpu(), k=1)[:, 0, 0].all())
        True
        """
        check_k(k, 1)
        own = tokens.reshape(-1, *[1] * (normed.ndim - 2)).expand(normed.shape[:-1]).reshape(-1)
        rows = normed.reshape(-1, normed.shape[-1])
        found = torch.zeros(len(rows), dtype=torch.bool)
        for places in torch.arange(len(rows)).split(ROWS_AT_ONCE):
            part, ids = rows[places.to(rows.device)].to(self.device), own[places].to(self.device)
            with torch.no_grad():
                least = (part * self._unembedding.weight[ids].float()).sum(1)
                least = least if self._bias is None else least + self._bias[ids].float()
                decided = self._decide(part, least[None], k, lambda _, row, ids=ids: ids[row, None], 1, True)  # type: ignore[misc]
            found[places] = decided[0].cpu()
        return found.reshape(normed.shape[:-1])

    def _hits(self, rows: Tensor, words: Sequence[Tensor], k: int, n_match: int, shortcut: bool) -> Tensor:
        hits = torch.zeros(len(words), len(rows), dtype=torch.bool)
        usable = [words[i].to(rows.device) for i, ids in enumerate(words) if len(ids) >= n_match]
        if usable and len(rows):
            # The n_match-th largest logit of the words: it is among the k largest iff n_match of the words are.
            least = torch.stack([self._logits(rows, ids).topk(n_match, dim=1).values[:, -1] for ids in usable])
            decided = self._decide(rows, least, k, lambda i, _: usable[i], n_match, shortcut)
            hits[[len(ids) >= n_match for ids in words]] = decided.cpu()
        return hits

    def _decide(
        self,
        rows: Tensor,
        least: Tensor,
        k: int,
        ids_of: Callable[[int, int], Tensor],
        n_match: int,
        shortcut: bool,
    ) -> Tensor:
        """Whether fewer than k logits of each row are above each of its targets: (targets, rows) from the same."""
        slack = self._rounding * rows.norm(dim=1) + self._bias_rounding
        # The k largest so far of each row, and the rows and targets that are still in question.
        top = torch.full((len(rows), k), -torch.inf, device=rows.device)
        # A head that writes nothing says nothing, although all tokens tie.
        asked = (rows != 0).any(1).expand(least.shape).clone()
        for weight, bias in self._subsets if shortcut else []:
            alive = asked.any(0).nonzero()[:, 0]
            self._raise(top, rows, alive, weight, bias)
            asked &= ~(top[:, -1] > least + slack)
        alive = asked.any(0).nonzero()[:, 0]
        top[alive] = -torch.inf
        for some in alive.split(max(1, ELEMENTS_AT_ONCE // self.vocabulary)):
            self._raise(top, rows, some, self._unembedding.weight, self._bias)
        asked &= ~(top[:, -1] > least + slack)
        hits = asked & (top[:, -1] < least - slack)
        for i, row in (asked & ~hits).nonzero().tolist():
            hits[i, row] = self._exact(rows[row], ids_of(i, row), k, n_match, float(slack[row]))
        return hits

    def _raise(self, top: Tensor, rows: Tensor, some: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Take the logits of some tokens into the k largest of some rows."""
        if not len(some):
            return
        logits = nn.functional.linear(rows[some].float(), weight.float(), None if bias is None else bias.float())
        largest = logits.topk(min(top.shape[1], logits.shape[1]), dim=1).values
        top[some] = torch.cat([top[some], largest], dim=1).topk(top.shape[1], dim=1).values

    def _exact(self, row: Tensor, ids: Tensor, k: int, n_match: int, slack: float) -> bool:
        """Decide a row in float64 for the tokens whose order float32 does not tell."""
        logits = self._logits(row[None], slice(None))[0].double()
        ids = ids.to(row.device)
        near = float(self._logits(row[None], ids)[0].topk(n_match).values[-1])
        close = ((logits - near).abs() <= 2 * slack).nonzero()[:, 0]
        # In one call, so that tokens with the same weights get the same logit.
        exact = self._exact_logits(row, torch.cat([ids, close]))
        target = exact[: len(ids)].topk(n_match).values[-1]
        above = int((logits > near + 2 * slack).sum()) + int((exact[len(ids) :] > target).sum())
        return above < k

    def _exact_logits(self, row: Tensor, ids: Tensor) -> Tensor:
        products = self._unembedding.weight[ids].double() * row.double()
        bias = self._bias
        return products.sum(1) if bias is None else products.sum(1) + bias[ids].double()

    def _logits(self, rows: Tensor, tokens: Any) -> Tensor:
        bias = self._bias
        return nn.functional.linear(
            rows.float(), self._unembedding.weight[tokens].float(), None if bias is None else bias[tokens].float()
        )

    def _norm(self, written: Tensor) -> Tensor:
        norm = self._final_norm
        if norm is None:
            return written
        weight = next(iter(norm.parameters()), None)
        return norm(written if weight is None else written.to(weight.dtype)).float()

    @property
    def _bias(self) -> Tensor | None:
        bias = getattr(self._unembedding, "bias", None)
        return bias if isinstance(bias, Tensor) else None

    @cached_property
    def _subsets(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weights of random tokens, others in each part; kept, as gathering them costs more than decoding."""
        order = torch.randperm(self.vocabulary, generator=torch.Generator().manual_seed(0))
        bounds = [0, *(size for size in SUBSETS if size < self.vocabulary)]
        parts = [order[a:b].to(self.device) for a, b in pairwise(bounds)]
        weight, bias = self._unembedding.weight.detach(), self._bias
        return [(weight[ids].float(), None if bias is None else bias[ids].detach().float()) for ids in parts]

    @cached_property
    def _rounding(self) -> float:
        """Bound on the error of the difference of two logits in float32, by the length of the row."""
        longest = max(float(part.float().norm(dim=1).max()) for part in self._unembedding.weight.detach().split(8192))
        return 4 * self.width * UNIT_ROUNDOFF * longest

    @cached_property
    def _bias_rounding(self) -> float:
        bias = self._bias
        return 0.0 if bias is None else 4 * UNIT_ROUNDOFF * float(bias.detach().abs().max())

    @cached_property
    def _w_o(self) -> list[Tensor]:
        """The output projection of every layer by heads, (heads, d_head, d), float32."""
        with torch.no_grad():
            return [self._by_heads(projection) for projection in self._projections]

    def _by_heads(self, projection: Any) -> Tensor:
        n = self.n_heads * self.d_head
        weight = getattr(projection, "weight", None)
        if type(projection) is nn.Linear and isinstance(weight, Tensor) and weight.is_floating_point():
            joined = weight.detach().float().T
        else:  # transposed, adapted or quantised: what it does to the axes says what it is
            device = next((p.device for p in projection.parameters()), self.device)
            dtype = next((p.dtype for p in projection.parameters() if p.is_floating_point()), torch.float32)
            axes = torch.cat([torch.zeros(1, n), torch.eye(n)]).to(device, dtype)
            out = projection(axes)
            joined = (out[1:] - out[:1]).float()
        if joined.shape != (n, self.width):
            raise InputError(
                f"model: an output projection gives {joined.shape[1]} values, the unembedding reads {self.width}; "
                "they must be as many"
            )
        return joined.reshape(self.n_heads, self.d_head, self.width)


def head_lens(model: Any, z: Tensor, layer: int) -> Tensor:
    """Decode the outputs of a layer's heads with the model's final norm and unembedding.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, in eval mode.
    z : Tensor of shape (..., heads, d_head)
        What heads give, before the output projection. For a model that norms the attention's output: of all heads.
    layer : int
        From 0.

    Returns
    -------
    Tensor of shape (..., heads, vocabulary), float32
        Logits. `HeadLens` decodes in parts where that is too much at once.

    Raises
    ------
    InputError
        A ValueError: as `HeadLens`; for a layer that the model has not, or another shape.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    ... )
    >>> head_lens(LlamaForCausalLM(config).eval(), torch.randn(4, 2, 8), layer=1).shape
    torch.Size([4, 2, 50])
    """
    lens = HeadLens(model)
    if not 0 <= layer < lens.n_layers:
        raise InputError(f"layer={layer}: must be from 0 to {lens.n_layers - 1}")
    if z.shape[-2:] != (lens.n_heads, lens.d_head):
        raise InputError(f"z: has shape {tuple(z.shape)}; must end in ({lens.n_heads}, {lens.d_head})")
    return lens.logits(lens.normed(z[..., None, :, :], [layer])[..., 0, :, :]).cpu()


def check_k(k: Any, n_match: Any) -> None:
    """Raise for a number of tokens or of words among them that makes no sense."""
    for name, value in (("k", k), ("n_match", n_match)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name}={value!r}: must be a whole number, 1 or more")
    if n_match > k:
        raise InputError(f"n_match={n_match}: must be at most k, which is {k}")


@dataclass(frozen=True)
class _Norms:
    final: nn.Module | None
    post: list[nn.Module | None]


def _find_norms(model: Any) -> _Norms:
    """Run one token, and see which norm follows the blocks, and which takes the output of an attention."""
    blocks = decoder_blocks(model)
    decoder = next(owner for owner in model.modules() if any(child is blocks for child in owner.children()))
    after: list[nn.Module] = []
    given: dict[int, Any] = {}
    post: list[nn.Module | None] = [None] * len(blocks)
    with ExitStack() as hooks:

        def on_norm(module: nn.Module, args: Any) -> None:
            after.append(module)

        def forget(module: nn.Module, args: Any, output: Any) -> None:
            after.clear()

        for child in decoder.children():
            if _is_norm(child):
                hooks.callback(child.register_forward_pre_hook(on_norm).remove)
        hooks.callback(blocks[-1].register_forward_hook(forget).remove)
        for i, block in enumerate(blocks):
            attention = _attention_of(block, output_projection(model, i + 1))
            if "residual" in inspect.signature(attention.forward).parameters:
                continue  # it adds the residual stream itself: what follows norms the stream

            def keep(module: nn.Module, args: Any, output: Any, i: int = i) -> None:
                given[i] = output if isinstance(output, Tensor) else output[0]

            def compare(module: nn.Module, args: Any, i: int = i) -> None:
                if args and args[0] is given.get(i):
                    post[i] = module

            hooks.callback(attention.register_forward_hook(keep).remove)
            for child in block.children():
                if _is_norm(child):
                    hooks.callback(child.register_forward_pre_hook(compare).remove)
        device = model.get_input_embeddings().weight.device
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False)
    return _Norms(after[-1] if after else None, post)


def _attention_of(block: nn.Module, projection: nn.Module) -> nn.Module:
    return next(child for child in block.children() if any(module is projection for module in child.modules()))


def _is_norm(module: nn.Module) -> bool:
    return not any(True for _ in module.children()) and "norm" in type(module).__name__.lower()


def _post_weight(norm: nn.Module, width: int) -> Tensor:
    """The weights of an RMS norm, whatever its class adds to them."""
    parameter = next(iter(norm.parameters()), None)
    device = "cpu" if parameter is None else parameter.device
    dtype = torch.float32 if parameter is None else parameter.dtype
    with torch.no_grad():
        weight = norm(torch.ones(1, width, device=device, dtype=dtype)).float()[0]
        zero = norm(torch.zeros(1, width, device=device, dtype=dtype)).float()[0]
    if bool((zero != 0).any()) or float(weight.abs().max()) < 1e-3:
        raise InputError(
            f"model: {type(norm).__name__} follows an attention and is no RMS norm; a head's share of it is not defined"
        )
    return weight
