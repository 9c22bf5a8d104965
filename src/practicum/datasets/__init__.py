"""Embedded data, generated or taken from installed packages, and the reading of the user's own files."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "docstring_corpus": ["TextPairs", "docstrings"],
        "token_vectors": [
            "TokenVectorPairs",
            "TokenVectors",
            "docstring_vectors",
            "encode_texts",
            "synthetic_multivectors",
        ],
        "tables": ["Table", "digits", "mfeat", "mnist_5k", "mnist_shifted", "noisy_moons"],
        "tasks": ["Task", "load_tasks", "read_tasks"],
        "questions": ["MCQTopics", "MCQuestion", "mcq_topics", "read_questions"],
        "files": [
            "DataFileError",
            "read_jsonl",
            "read_multivectors_npz",
            "read_table",
            "read_text_pairs",
            "read_texts",
        ],
    },
)
