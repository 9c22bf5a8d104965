"""Measuring a claim: the harness behind ``practicum check``."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "check": [
            "CannotMeasure",
            "Check",
            "Comparison",
            "Curve",
            "Metrics",
            "Request",
            "Unavailable",
            "Workload",
            "arm",
        ],
        "runner": ["run_check"],
        "results": ["Result", "read_result"],
        "verdict": ["Verdict", "judge"],
    },
)
