"""What a language model believes and how it attends: read out, corrected, watched."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "aitchison": [
            "AitchisonCallback",
            "AttentionMonitor",
            "LengthExponents",
            "LengthScaledAttention",
            "aitchison_distance",
            "aitchison_norm",
        ],
        "confidence": [
            "ConfItem",
            "ConfResult",
            "ConfidenceFormat",
            "ConfidenceLabeler",
            "VerbalConfidence",
            "calibration_report",
            "transfer_matrix",
        ],
        "coral": ["Coral", "CoralForMultipleChoice", "CoralLogitsProcessor", "ResidualSteering"],
        "memoryllm": [
            "MemoryBlock",
            "MemoryLMConfig",
            "MemoryLMForCausalLM",
            "TokenLookups",
            "cluster_tokens",
            "memory_lm_from_dense",
            "nearest_tokens",
        ],
        "taskheads": ["HeadPatch", "LexicalTaskHeads", "build_prompts", "head_scan", "path_patch", "retrieval_heads"],
        "theater": [
            "AttentionProbe",
            "ForcedAnswer",
            "HFMonitor",
            "ProbeBelief",
            "ProbeEarlyExit",
            "RegexMonitor",
            "TextProbeMonitor",
            "Trace",
            "collect_traces",
            "generate_with_exit",
            "inflections",
            "performativity",
        ],
        "trim": ["GradientSelector", "RepresentationSelector", "TrimSelector", "select_coreset", "warm_up"],
    },
)
