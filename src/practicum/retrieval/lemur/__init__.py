"""LEMUR: late-interaction (ColBERT-style) search as single-vector search in a learned space."""

from practicum.toolbox.extras import requires

with requires("retrieval", "lemur"):
    from practicum.retrieval.lemur.encoder import LemurEncoder
    from practicum.retrieval.lemur.index import LemurIndex
    from practicum.retrieval.lemur.maxsim import maxsim, maxsim_rerank
    from practicum.retrieval.lemur.multivectors import MultiVectors

__all__ = ["LemurEncoder", "LemurIndex", "MultiVectors", "maxsim", "maxsim_rerank"]
