"""Finding documents: parts for FAISS and for late-interaction encoders."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={"lemur": ["LemurEncoder", "LemurIndex", "MultiVectors", "maxsim", "maxsim_rerank"]},
)
