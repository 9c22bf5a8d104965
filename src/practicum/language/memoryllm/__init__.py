"""MemoryLLM: language models whose feed-forward networks are tables over the vocabulary."""

from practicum.toolbox.extras import requires

with requires("language", "memoryllm"):
    from practicum.language.memoryllm.analysis import (
        ClusterReport,
        Retrieved,
        cluster_tokens,
        nearest_tokens,
        retrieve,
    )
    from practicum.language.memoryllm.block import MemoryBlock
    from practicum.language.memoryllm.config import MemoryLMConfig
    from practicum.language.memoryllm.convert import fit_memory, memory_lm_from_dense
    from practicum.language.memoryllm.lookups import LookupStats, TokenLookups
    from practicum.language.memoryllm.model import MemoryLMForCausalLM, MemoryLMModel

__all__ = [
    "ClusterReport",
    "LookupStats",
    "MemoryBlock",
    "MemoryLMConfig",
    "MemoryLMForCausalLM",
    "MemoryLMModel",
    "Retrieved",
    "TokenLookups",
    "cluster_tokens",
    "fit_memory",
    "memory_lm_from_dense",
    "nearest_tokens",
    "retrieve",
]
