"""The configuration of a MemoryLLM, and its registration with transformers' auto classes."""

from __future__ import annotations

import inspect
import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, LlamaConfig

from practicum.toolbox.errors import InputError

COMPUTES = ("swiglu", "linear")
OWN_ARGUMENTS = (
    "flex_beta",
    "compute",
    "shared_memory_norm",
    "memory_intermediate_size",
    "intermediate_size",
    "memory_weights",
    "memory_fingerprint",
)
# The widths of the paper's table 5 are within this share of its formula.
WIDTH_TOLERANCE = 0.01


@strict
class MemoryLMConfig(LlamaConfig):
    r"""Configuration of MemoryLLM and Flex-MemoryLLM: that of Llama, with the feed-forward network split in two.

    A dense block of hidden size h has :math:`8 h^2` feed-forward parameters. Here :math:`(8 - \beta) h^2` of them are
    the memory, which reads the token's embedding alone, and :math:`\beta h^2` are a small network on the residual
    stream. With :math:`\beta = 0` that is MemoryLLM, with more Flex-MemoryLLM-:math:`\beta h^2`. Importing
    ``practicum.language`` and using any name of this method registers the model with ``AutoConfig``, ``AutoModel`` and
    ``AutoModelForCausalLM``.

    Attributes
    ----------
    flex_beta : float, default=0.0
        :math:`\beta` of at least 0 and below 8; the paper has 0, 1, 2 and 3.
    compute : {"swiglu", "linear"}
        The network on the residual stream. The paper calls it a linear dense module of :math:`\beta h^2` parameters and
        says no more. ``"swiglu"`` (our choice) is a gated network of width round(beta h / 3). ``"linear"`` is one h x h
        matrix where beta is 1, else two matrices through round(beta h / 2) dimensions without an activation.
    shared_memory_norm : bool, default=False
        One norm of the embeddings for all layers, instead of one for each: the paper's ablation.
    memory_intermediate_size : int, optional
        Width K_M of the memory's gated network, by default round((8 - beta) h / 3). With ``flex_beta=0`` any width is
        taken (the paper's 1B model has 5464 where the formula gives 5461); with more it must agree to 1 %.
    intermediate_size : int, optional
        Width K_C of the network on the residual stream, which follows from ``flex_beta`` and ``compute``.
    memory_weights : bool, default=True
        Whether the layers have their memory networks. A model that was saved after
        ``attach_lookups(free_memory_weights=True)`` has not: it runs on its table alone.
    memory_fingerprint : str, optional
        Which table belongs to a model without memory networks.
    kwargs : dict
        All others are those of `transformers.LlamaConfig`.

    Raises
    ------
    ValueError
        For a beta out of range, an unknown ``compute``, widths that disagree with beta, and as `LlamaConfig`.

    References
    ----------
    A. Jaiswal et al., "MemoryLLM: Plug-n-Play Interpretable Feed-Forward Memory for Transformers", arXiv:2602.00398.

    Examples
    --------
    The memory's matrices have shape (K_M, h):

    >>> config = MemoryLMConfig(hidden_size=960, num_attention_heads=16, flex_beta=3)
    >>> config.memory_intermediate_size, config.intermediate_size
    (1600, 960)
    >>> MemoryLMConfig(flex_beta=8)
    Traceback (most recent call last):
    practicum.toolbox.errors.InputError: flex_beta=8: must be at least 0 and below 8
    """

    model_type = "practicum_memorylm"
    # The parts of a layer are not those that Llama's plans for several devices name.
    base_model_tp_plan = None  # type: ignore[assignment]
    base_model_pp_plan = None  # type: ignore[assignment]

    intermediate_size: int | None = None  # type: ignore[assignment]
    flex_beta: float | int = 0.0
    compute: str = "swiglu"
    shared_memory_norm: bool = False
    memory_intermediate_size: int | None = None
    memory_weights: bool = True
    memory_fingerprint: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Derive the widths, and check what was given."""
        beta = self.flex_beta
        if not (math.isfinite(beta) and 0 <= beta < 8):
            raise InputError(f"flex_beta={beta}: must be at least 0 and below 8")
        if self.compute not in COMPUTES:
            raise InputError(f"compute={self.compute!r}: must be one of {', '.join(map(repr, COMPUTES))}")
        self._derive_memory_width(beta)
        self._derive_context_width(beta)
        super().__post_init__(**kwargs)

    def _derive_memory_width(self, beta: float) -> None:
        wanted = round((8 - beta) * self.hidden_size / 3)
        given = self.memory_intermediate_size
        if given is None:
            self.memory_intermediate_size = wanted
        elif given < 1:
            raise InputError(f"memory_intermediate_size={given}: must be at least 1")
        elif beta > 0 and abs(given - wanted) > WIDTH_TOLERANCE * wanted:
            raise InputError(
                f"memory_intermediate_size={given}: disagrees with flex_beta={beta}, which gives {wanted}; "
                "leave one of them out"
            )

    def _derive_context_width(self, beta: float) -> None:
        divisor = 3 if self.compute == "swiglu" else 2
        wanted = max(1, round(beta * self.hidden_size / divisor)) if beta > 0 else 0
        given = self.intermediate_size
        if given is None:
            self.intermediate_size = wanted
        elif beta == 0 and given != 0:
            raise InputError(
                f"intermediate_size={given}: with flex_beta=0 nothing but attention reads the residual stream; "
                "the memory's width is memory_intermediate_size"
            )
        elif abs(given - wanted) > WIDTH_TOLERANCE * wanted:
            raise InputError(f"intermediate_size={given}: disagrees with flex_beta={beta}, which gives {wanted}")


# What `help` shows are the arguments that are ours; the others depend on the version of transformers.
MemoryLMConfig.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        *(p for name, p in inspect.signature(MemoryLMConfig).parameters.items() if name in OWN_ARGUMENTS),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
)
AutoConfig.register(MemoryLMConfig.model_type, MemoryLMConfig, exist_ok=True)
