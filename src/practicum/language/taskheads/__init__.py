"""Lexical task heads: attention heads that say what the task is, found, measured and patched on any causal model.

Decoded with the model's own unembedding, the output of some heads holds words that name the task of the prompt: "city"
for country to capital. The same heads speak whether the task is given by examples or by an instruction, and how many
of them do tells which prompts will work.
"""

from practicum.toolbox.extras import requires

with requires("language", "taskheads"):
    from practicum.datasets.tasks import Task, load_tasks, read_tasks
    from practicum.language.taskheads.figures import head_figure, write_task_page
    from practicum.language.taskheads.heads import (
        Diagnosis,
        LexicalTaskHeads,
        Sharing,
        overlap,
        retrieval_heads,
        sharing,
    )
    from practicum.language.taskheads.lens import HeadLens, head_lens
    from practicum.language.taskheads.patching import (
        Ablation,
        HeadPatch,
        PatchScores,
        ablate_heads,
        head_scan,
        mean_head_outputs,
        patch_scores,
        path_patch,
    )
    from practicum.language.taskheads.prompts import build_prompts

__all__ = [
    "Ablation",
    "Diagnosis",
    "HeadLens",
    "HeadPatch",
    "LexicalTaskHeads",
    "PatchScores",
    "Sharing",
    "Task",
    "ablate_heads",
    "build_prompts",
    "head_figure",
    "head_lens",
    "head_scan",
    "load_tasks",
    "mean_head_outputs",
    "overlap",
    "patch_scores",
    "path_patch",
    "read_tasks",
    "retrieval_heads",
    "sharing",
    "write_task_page",
]
