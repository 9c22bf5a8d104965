"""Verbalized confidence: a model learns to say how sure it is, as one number or as two.

A confidence that is taught on one kind of task does not carry over to another. The two numbers are how sure the model
is to have found the evidence in its context, and how sure it is of its reasoning given that evidence; their product is
its confidence. Labels come from the model's own answers, training is LoRA on the confidence tokens alone.
"""

from practicum.toolbox.extras import requires

with requires("language", "confidence"):
    from practicum.language.confidence.format import ConfidenceFormat
    from practicum.language.confidence.items import ConfItem, LabeledItem, read_items, read_labels, write_labels
    from practicum.language.confidence.labels import ConfidenceLabeler
    from practicum.language.confidence.tasks import families, task_items
    from practicum.language.confidence.transfer import (
        CalibrationReport,
        Cell,
        calibration_report,
        transfer_cells,
        transfer_matrix,
        write_page,
    )
    from practicum.language.confidence.verbal import ConfResult, VerbalConfidence, linear_lora
    from practicum.toolbox.trunk import FrozenTrunk

__all__ = [
    "CalibrationReport",
    "Cell",
    "ConfItem",
    "ConfResult",
    "ConfidenceFormat",
    "ConfidenceLabeler",
    "FrozenTrunk",
    "LabeledItem",
    "VerbalConfidence",
    "calibration_report",
    "families",
    "linear_lora",
    "read_items",
    "read_labels",
    "task_items",
    "transfer_cells",
    "transfer_matrix",
    "write_labels",
    "write_page",
]
