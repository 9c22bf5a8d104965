"""Serving language models: caches that are smaller, and used again."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "shotkv": [
            "ChunkKV",
            "H2O",
            "PyramidKV",
            "RandomUnits",
            "ShotKV",
            "SnapKV",
            "StreamingLLM",
            "split_units",
        ],
    },
)
