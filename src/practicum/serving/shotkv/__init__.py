"""ShotKV: a KV cache that keeps or lets go of whole worked examples, sentences or documents.

A long few-shot prompt is cut into units; each layer keeps the units that the question attends to, as wholes, and lets
go of the others. What is kept is frozen, and the tokens that are generated afterwards are let go of one by one. The
token-wise methods before it stand beside it, on the same surgery.
"""

from practicum.toolbox.extras import requires

with requires("serving", "shotkv"):
    from practicum.serving.shotkv.bench import KVFundaBench, kvfundabench
    from practicum.serving.shotkv.cache import ShotKVCache, ShotKVLayer, ShotKVReport
    from practicum.serving.shotkv.policies import (
        H2O,
        ChunkKV,
        PyramidKV,
        RandomUnits,
        ShotKV,
        SnapKV,
        StreamingLLM,
    )
    from practicum.serving.shotkv.press import Press, Prompt, Reading, read
    from practicum.serving.shotkv.tasks import ShotItem, read_shot_items, shot_items
    from practicum.serving.shotkv.units import Unit, UnitSpans, split_units

__all__ = [
    "H2O",
    "ChunkKV",
    "KVFundaBench",
    "Press",
    "Prompt",
    "PyramidKV",
    "RandomUnits",
    "Reading",
    "ShotItem",
    "ShotKV",
    "ShotKVCache",
    "ShotKVLayer",
    "ShotKVReport",
    "SnapKV",
    "StreamingLLM",
    "Unit",
    "UnitSpans",
    "kvfundabench",
    "read",
    "read_shot_items",
    "shot_items",
    "split_units",
]
