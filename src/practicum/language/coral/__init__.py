"""CORAL: a language model's answers to multiple-choice questions, corrected by what its activations know.

A small, strongly regularised probe of the residual stream predicts what the option probabilities miss, and its
prediction is added to them: more right answers, and confidences that can be trusted, with no weight changed. `Coral` is
the estimator on scores and activations, `CoralForMultipleChoice` the whole way from questions, `CoralLogitsProcessor`
the part for ``generate``, and `practicum.language.coral.lm_eval_model` the part for ``lm-eval``.
"""

from practicum.toolbox.extras import requires

with requires("language", "coral"):
    from practicum.language.coral.estimator import Coral, CoralProbe, steer
    from practicum.language.coral.multiple_choice import CoralForMultipleChoice, Evaluation, evaluate_scores
    from practicum.language.coral.serving import CoralLogitsProcessor
    from practicum.language.coral.steering import ResidualSteering

__all__ = [
    "Coral",
    "CoralForMultipleChoice",
    "CoralLogitsProcessor",
    "CoralProbe",
    "Evaluation",
    "ResidualSteering",
    "evaluate_scores",
    "steer",
]
