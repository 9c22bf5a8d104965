"""TRIM: choose the few instruction samples that teach a task, from a handful of examples of it.

Each token that occurs in the target gets a fingerprint, the mean of its last states there weighted by attention, and a
sample of the pool is scored by how well its tokens match theirs. Only forward passes are needed. What people choose by
otherwise stands beside it behind the same interface.
"""

from practicum.toolbox.extras import requires

with requires("language", "trim"):
    from practicum.language.trim.baselines import (
        BM25Selector,
        EmbeddingSelector,
        LengthSelector,
        PerplexitySelector,
        RandomSelector,
        RepresentationSelector,
    )
    from practicum.language.trim.budget import select_coreset
    from practicum.language.trim.gradients import GradientSelector
    from practicum.language.trim.saliency import attention_saliency
    from practicum.language.trim.samples import SampleFile, SampleTokenizer, take
    from practicum.language.trim.selector import TrimSelector, read_states
    from practicum.language.trim.states import TokenStates
    from practicum.language.trim.training import Checkpoint, warm_up

__all__ = [
    "BM25Selector",
    "Checkpoint",
    "EmbeddingSelector",
    "GradientSelector",
    "LengthSelector",
    "PerplexitySelector",
    "RandomSelector",
    "RepresentationSelector",
    "SampleFile",
    "SampleTokenizer",
    "TokenStates",
    "TrimSelector",
    "attention_saliency",
    "read_states",
    "select_coreset",
    "take",
    "warm_up",
]
