"""Aitchison geometry of attention: how well a head tells tokens apart, at any context length.

Single attention probabilities vanish as the context grows; the ratios between them need not. Their Aitchison norm is
linear in the logits, needs queries and keys only, and still moves where entropy has saturated. Here it is a monitor for
inference and training, beside any attention kernel, and a scale of the logits that grows with the context.
"""

from practicum.toolbox.extras import requires

with requires("language", "aitchison"):
    from practicum.language.aitchison.callback import AitchisonCallback
    from practicum.language.aitchison.geometry import (
        aitchison_distance,
        aitchison_norm,
        clr,
        critical_inverse_temperature,
        expected_aitchison_norm,
        mean_squared_aitchison_norm,
        min_inverse_temperature,
        sharpening_inverse_temperature,
    )
    from practicum.language.aitchison.linear import AitchisonState, attention_statistics, causal_aitchison
    from practicum.language.aitchison.monitor import AttentionMonitor
    from practicum.language.aitchison.scaling import LengthExponents, LengthScaledAttention, length_scale

__all__ = [
    "AitchisonCallback",
    "AitchisonState",
    "AttentionMonitor",
    "LengthExponents",
    "LengthScaledAttention",
    "aitchison_distance",
    "aitchison_norm",
    "attention_statistics",
    "causal_aitchison",
    "clr",
    "critical_inverse_temperature",
    "expected_aitchison_norm",
    "length_scale",
    "mean_squared_aitchison_norm",
    "min_inverse_temperature",
    "sharpening_inverse_temperature",
]
