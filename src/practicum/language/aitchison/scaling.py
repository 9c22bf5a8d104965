"""Attention logits scaled with the length of the context: fixed laws, one measured on a sample, and a learned one."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from practicum.language.aitchison.geometry import sharpening_inverse_temperature
from practicum.language.aitchison.linear import attention_statistics
from practicum.toolbox.errors import InputError
from practicum.toolbox.kv import AttentionCall, AttentionTap
from practicum.toolbox.taps import decoder_blocks

Law = Literal["none", "sqrt_log", "log", "yarn", "auto"]
LAWS = ("none", "sqrt_log", "log", "yarn")
# Rows of a sequence that the measured law looks at.
SAMPLED_ROWS = 64
HIGHEST_EXPONENT = 4.0


def length_scale(n_keys: Tensor, law: str = "sqrt_log", train_length: int = 2048) -> Tensor:
    r"""Factor on the logits of rows that see n keys, 1 up to the training length :math:`n_0`.

    "sqrt_log": :math:`\sqrt{\log n / \log n_0}`, the least rate that can keep a row sharp (a lower bound, which need
    not suffice); "log": :math:`\log n / \log n_0`, as SSMax; "yarn": :math:`(0.1 \ln(n / n_0) + 1)^2`; "none": 1.

    Parameters
    ----------
    n_keys : Tensor of shape (...)
    law : {"none", "sqrt_log", "log", "yarn"}
    train_length : int
        :math:`n_0`, at least 2.

    Returns
    -------
    Tensor of float32, shape (...)

    Raises
    ------
    InputError
        A ValueError.

    References
    ----------
    "sqrt_log": S. Hilton-Jones, T. J. Norman, Z. Zhu, ICML 2026. "log": K. M. Nakanishi, "Scalable-Softmax Is Superior
    for Attention", arXiv:2501.19399. "yarn": B. Peng et al., arXiv:2309.00071.

    Examples
    --------
    >>> length_scale(torch.tensor([8, 16, 256]), "sqrt_log", train_length=16)
    tensor([1.0000, 1.0000, 1.4142])
    """
    _require_train_length(train_length)
    if law not in LAWS:
        raise InputError(f"law={law!r}: must be one of {', '.join(LAWS)}")
    n = n_keys.clamp_min(train_length).float()
    if law == "none":
        return torch.ones_like(n)
    if law == "yarn":
        return (0.1 * torch.log(n / train_length) + 1) ** 2
    growth = _growth(n_keys, train_length)
    return growth if law == "log" else growth.sqrt()


class LengthExponents(nn.Module):
    r"""A learned law: each head scales its logits by :math:`(\log n / \log n_0)^{\gamma}` beyond the training length.

    :math:`\gamma = 1/2` is "sqrt_log" and 1 is "log". The exponents are parameters: train them with the model frozen or
    not, on texts longer than :math:`n_0`, while `LengthScaledAttention` is active with this as its law.

    Parameters
    ----------
    n_layers, n_heads : int
    train_length : int
        :math:`n_0`, at least 2.
    exponent : float or Tensor of shape (n_layers, n_heads)
        To begin with.

    Attributes
    ----------
    exponent : torch.nn.Parameter of shape (n_layers, n_heads)

    Raises
    ------
    InputError
        A ValueError.

    Examples
    --------
    >>> law = LengthExponents(n_layers=2, n_heads=4, train_length=16)
    >>> law(torch.tensor([[16, 256]]), layer=1)[0, :, 1]
    tensor([1.4142, 1.4142, 1.4142, 1.4142], grad_fn=<SelectBackward0>)
    """

    def __init__(self, n_layers: int, n_heads: int, train_length: int, exponent: float | Tensor = 0.5) -> None:
        super().__init__()
        _require_train_length(train_length)
        if n_layers < 1 or n_heads < 1:
            raise InputError(f"n_layers={n_layers}, n_heads={n_heads}: must be at least 1")
        begin = torch.as_tensor(exponent, dtype=torch.float32)
        if begin.shape not in ((), (n_layers, n_heads)) or not bool(torch.isfinite(begin).all()):
            raise InputError(f"exponent: has shape {tuple(begin.shape)}; must be finite, ({n_layers}, {n_heads})")
        self.train_length = train_length
        self.exponent = nn.Parameter(begin.expand(n_layers, n_heads).clone())

    def forward(self, n_keys: Tensor, layer: int) -> Tensor:
        """The factor of each head.

        Parameters
        ----------
        n_keys : Tensor of shape (B, m)
        layer : int
            From 1.

        Returns
        -------
        Tensor of shape (B, H, m)
        """
        growth = _growth(n_keys, self.train_length)[:, None]
        return growth ** self.exponent[layer - 1].to(growth.device)[None, :, None]

    def save(self, path: Path | str) -> None:
        """Write the exponents and the training length to a safetensors file.

        Parameters
        ----------
        path : pathlib.Path or str
        """
        facts = {"law": "length-exponents", "train_length": json.dumps(self.train_length)}
        save_file({"exponent": self.exponent.detach().cpu().contiguous()}, str(path), metadata=facts)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read what `save` wrote.

        Parameters
        ----------
        path : pathlib.Path or str

        Returns
        -------
        LengthExponents

        Raises
        ------
        InputError
            A ValueError: when the file is not there or holds something else.
        """
        try:
            with safe_open(str(path), framework="pt") as stored:
                facts = stored.metadata() or {}
                exponent = stored.get_tensor("exponent")
            train_length = int(json.loads(facts["train_length"]))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise InputError(f"path={str(path)!r}: is not a file that LengthExponents.save wrote ({error})") from error
        if exponent.ndim != 2:
            raise InputError(f"path={str(path)!r}: exponent has shape {tuple(exponent.shape)}; must be (layers, heads)")
        return cls(exponent.shape[0], exponent.shape[1], train_length, exponent)


class LengthScaledAttention:
    r"""Scale the attention logits of any causal language model with the number of keys that a row sees.

    The query of a row with n visible keys is multiplied by b(n), after rotary embeddings and before the model's own
    attention function, whichever it is. Rows within the training length are left alone, to the bit. Keys and values are
    not touched, so caches stay valid and generation with a cache equals computing everything anew.

    Use it as a context manager, or call `apply` and `remove`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        As of `AttentionTap`.
    law : {"none", "sqrt_log", "log", "yarn", "auto"}, callable or LengthExponents
        As of `length_scale`; "auto" is measured by `calibrate`, per head. A callable gets the numbers of keys, a Tensor
        (B, m), and returns factors of that shape.
    train_length : int, optional
        :math:`n_0`; by default ``max_position_embeddings`` of the model's configuration.
    layers : int or sequence of int, optional
        From 1; all by default.

    Raises
    ------
    InputError
        A ValueError that names the argument.

    Warns
    -----
    UserWarning
        When the model caps its logits: the scale acts before the cap.

    Notes
    -----
    With gradient checkpointing keep it active during the backward pass.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    ... )
    >>> model, ids = LlamaForCausalLM(config).eval(), torch.arange(40)[None]
    >>> with torch.no_grad(), LengthScaledAttention(model, law="sqrt_log", train_length=16):
    ...     scaled = model(ids).logits
    >>> plain = model(ids).logits
    >>> torch.equal(scaled[:, :16], plain[:, :16]), torch.equal(scaled[:, 16:], plain[:, 16:])
    (True, False)
    """

    def __init__(
        self,
        model: nn.Module,
        law: str | Callable[[Tensor], Tensor] | LengthExponents = "sqrt_log",
        train_length: int | None = None,
        layers: int | Sequence[int] | None = None,
    ) -> None:
        if isinstance(law, str) and law not in (*LAWS, "auto"):
            raise InputError(f"law={law!r}: must be one of {', '.join((*LAWS, 'auto'))}, a function or LengthExponents")
        if not isinstance(law, str) and not callable(law):
            raise InputError(f"law={law!r}: must be one of {', '.join((*LAWS, 'auto'))}, a function or LengthExponents")
        self._tap = AttentionTap(model, self._scale, layers)
        if isinstance(law, LengthExponents):
            self._require_fit(law, model, train_length)
            train_length = law.train_length
        self.model = model
        self.train_length = _train_length(model) if train_length is None else train_length
        _require_train_length(self.train_length)
        self.law = law
        self._measured: LengthExponents | None = None
        self._warned = False

    def __enter__(self) -> Self:
        """Begin to scale."""
        if self.law == "auto" and self._measured is None:
            raise InputError("law='auto': call calibrate(batches) with texts longer than train_length first")
        self._tap.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop scaling; the model is as it was."""
        self._tap.__exit__(*exception)

    def apply(self) -> Self:
        """Scale until `remove` is called.

        Returns
        -------
        LengthScaledAttention
            Itself.
        """
        return self.__enter__()

    def remove(self) -> None:
        """Stop scaling; the model is as it was."""
        self.__exit__()

    @property
    def exponents(self) -> LengthExponents | None:
        """The measured or learned law, or None."""
        return self.law if isinstance(self.law, LengthExponents) else self._measured

    def calibrate(
        self, batches: Iterable[Mapping[str, Any] | Tensor], hold: Literal["max_prob", "aitchison"] = "max_prob"
    ) -> LengthExponents:
        r"""Measure, for each head, the least growth that holds its sharpness at the value it has at the training
        length.

        For rows beyond :math:`n_0` it is the inverse temperature at which the largest probability is what it is, in the
        median, for rows that see :math:`n_0/2` to :math:`n_0` keys; the exponent of each head is the least-squares fit
        of its logarithm to that of :math:`\log n / \log n_0`, and at least 0.

        Parameters
        ----------
        batches : iterable of mapping or Tensor
            Arguments of the model, or its input ids of shape (B, n), longer than ``train_length``.
        hold : {"max_prob", "aitchison"}
            What is held: the largest probability or the normalised Aitchison norm.

        Returns
        -------
        LengthExponents
            Which law "auto" uses from now on; train it further, or `LengthExponents.save` it.

        Raises
        ------
        InputError
            A ValueError: when no row sees more than ``train_length`` keys.
        """
        if hold not in ("max_prob", "aitchison"):
            raise InputError(f"hold={hold!r}: must be 'max_prob' or 'aitchison'")
        near: dict[int, list[Tensor]] = {}
        beyond: dict[int, list[tuple[Tensor, AttentionCall]]] = {}

        def measure(call: AttentionCall) -> None:
            seen = call.keys_seen()
            within = torch.nonzero(((seen > self.train_length // 2) & (seen <= self.train_length)).any(0))[:, 0]
            longer = torch.nonzero((seen > self.train_length).any(0))[:, 0]
            if len(within):
                near.setdefault(call.layer, []).append(_sharpness(call, _spread(within), hold).cpu())
            if len(longer):
                beyond.setdefault(call.layer, []).append((_spread(longer), call))

        fitted: dict[int, Tensor] = {}
        points: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for batch in batches:
            beyond.clear()
            with torch.no_grad(), AttentionTap(self.model, measure, self._tap.layers):
                _ = self.model(batch) if isinstance(batch, Tensor) else self.model(**batch)
            for layer, calls in beyond.items():
                if layer not in near:
                    continue
                target = torch.cat([x.flatten(1) for x in near[layer]], dim=1).nanmedian(1).values
                for rows, call in calls:
                    points.setdefault(layer, []).append(_needed(call, rows, target, hold, self.train_length))
        if not points:
            raise InputError(f"batches: no row sees more than train_length={self.train_length} keys; give longer texts")
        heads = 0
        for layer, found in points.items():
            x, y = (torch.cat([pair[i] for pair in found], dim=1) for i in (0, 1))
            usable = torch.isfinite(y) & (x > 0)
            x, y = torch.where(usable, x, 0), torch.where(usable, y, 0)
            slope = (x * y).sum(1) / x.square().sum(1).clamp_min(1e-12)
            fitted[layer] = slope.clamp(0, HIGHEST_EXPONENT)
            heads = max(heads, len(slope))
        exponent = torch.zeros(len(decoder_blocks(self.model)), heads)
        for layer, slope in fitted.items():
            exponent[layer - 1, : len(slope)] = slope
        self._measured = LengthExponents(len(exponent), heads, self.train_length, exponent)
        return self._measured

    def _scale(self, call: AttentionCall) -> AttentionCall | None:
        n = call.keys_seen()
        if self.law == "none" or (not self._is_custom and int(n.max()) <= self.train_length):
            return None
        if call.softcap is not None and not self._warned:
            self._warned = True
            warnings.warn("model: caps its attention logits; the length scale acts before the cap", stacklevel=2)
        exponents = self.exponents
        if exponents is not None:
            factor = exponents(n, call.layer)
        elif isinstance(self.law, str):
            factor = length_scale(n, self.law, self.train_length)[:, None]
        else:
            factor = self._custom(n)[:, None]
        return call.replace(query=(call.query * factor[..., None].to(call.query.dtype)))

    @property
    def _is_custom(self) -> bool:
        return not isinstance(self.law, str | LengthExponents)

    def _custom(self, n: Tensor) -> Tensor:
        factor: Any = cast(Callable[[Tensor], Any], self.law)(n)
        if not isinstance(factor, Tensor) or factor.shape != n.shape:
            got = f"a tensor of shape {tuple(factor.shape)}" if isinstance(factor, Tensor) else type(factor).__name__
            raise InputError(f"law: returned {got}; must return a tensor of shape {tuple(n.shape)}")
        return factor

    def _require_fit(self, law: LengthExponents, model: nn.Module, train_length: int | None) -> None:
        n = len(decoder_blocks(model))
        if len(law.exponent) != n:
            raise InputError(f"law: has exponents for {len(law.exponent)} layers; the model has {n}")
        if train_length not in (None, law.train_length):
            raise InputError(f"train_length={train_length}: the law was made for {law.train_length}; leave it out")


def _growth(n_keys: Tensor, train_length: int) -> Tensor:
    return (n_keys.clamp_min(train_length).float().log() / math.log(train_length)).clamp_min(1)


def _require_train_length(train_length: int) -> None:
    if train_length < 2:
        raise InputError(f"train_length={train_length}: must be at least 2")


def _train_length(model: nn.Module) -> int:
    config: Any = model.config
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise InputError("train_length=None: the model's configuration has no max_position_embeddings; state it")
    return length


def _spread(rows: Tensor) -> Tensor:
    """Some of the rows, evenly spaced."""
    if len(rows) <= SAMPLED_ROWS:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, SAMPLED_ROWS, device=rows.device).round().long()]


def _sharpness(call: AttentionCall, rows: Tensor, hold: str) -> Tensor:
    """What is held, of each head: (H, B, r)."""
    return attention_statistics(call, [hold], rows=rows)[hold].movedim(1, 0)


def _needed(call: AttentionCall, rows: Tensor, target: Tensor, hold: str, train_length: int) -> tuple[Tensor, Tensor]:
    """Logarithms of the growth of log n, and of the factor that would hold the target: each (H, B r)."""
    heads = call.query.shape[1]
    n = call.keys_seen()[:, rows]
    x = _growth(n, train_length).log().expand(heads, *n.shape).reshape(heads, -1)
    if hold == "aitchison":
        y = (target[:, None].to(call.query.device) / _sharpness(call, rows, hold).reshape(heads, -1)).log()
        return x.cpu(), y.cpu()
    factors = []
    # On the CPU, for the solver needs float64, which not every device has.
    for z, tau in zip(call.logits(rows).cpu().unbind(1), target.tolist(), strict=True):
        solved = sharpening_inverse_temperature(z, min(max(tau, 1e-6), 1 - 1e-6), mask=z > -torch.inf)
        factors.append(solved.reshape(-1).log())
    return x.cpu(), torch.stack(factors).float().cpu()
