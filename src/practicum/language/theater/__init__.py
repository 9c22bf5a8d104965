"""Reasoning Theater: when a reasoning model knows its answer, and how long its chain of thought goes on after that.

Three instruments read the first part of a chain and return a distribution over the options: an attention probe on the
activations, the model itself when it is made to answer there, and a monitor that sees the text alone. Where probe and
monitor part, the chain is performed; where the probe is sure, it may end.
"""

from practicum.toolbox.extras import requires

with requires("language", "theater"):
    from practicum.language.theater.beliefs import ProbeBelief, beliefs_of, choose_depth
    from practicum.language.theater.curves import Performativity, performativity
    from practicum.language.theater.exits import ExitOutput, ProbeEarlyExit, generate_with_exit
    from practicum.language.theater.figures import belief_figure, curves_figure, exit_figure, write_page
    from practicum.language.theater.forced import ForcedAnswer
    from practicum.language.theater.monitors import HFMonitor, RegexMonitor, TextProbeMonitor
    from practicum.language.theater.reasoner import (
        Reasoner,
        load_reasoner,
        reasoner_questions,
        reasoner_tokenizer,
        train_reasoner,
    )
    from practicum.language.theater.shifts import Inflections, belief_shifts, inflections
    from practicum.language.theater.stopping import (
        ExitCurve,
        agreement_scores,
        budget_scores,
        certainty_scores,
        confidence_scores,
        exit_curve,
    )
    from practicum.language.theater.traces import (
        ReasoningFormat,
        Sampling,
        Trace,
        Traces,
        collect_traces,
        format_of,
        read_traces,
        record,
        trace_of,
        write_traces,
    )
    from practicum.toolbox.probes import AttentionProbe

__all__ = [
    "AttentionProbe",
    "ExitCurve",
    "ExitOutput",
    "ForcedAnswer",
    "HFMonitor",
    "Inflections",
    "Performativity",
    "ProbeBelief",
    "ProbeEarlyExit",
    "Reasoner",
    "ReasoningFormat",
    "RegexMonitor",
    "Sampling",
    "TextProbeMonitor",
    "Trace",
    "Traces",
    "agreement_scores",
    "belief_figure",
    "belief_shifts",
    "beliefs_of",
    "budget_scores",
    "certainty_scores",
    "choose_depth",
    "collect_traces",
    "confidence_scores",
    "curves_figure",
    "exit_curve",
    "exit_figure",
    "format_of",
    "generate_with_exit",
    "inflections",
    "load_reasoner",
    "performativity",
    "read_traces",
    "reasoner_questions",
    "reasoner_tokenizer",
    "record",
    "trace_of",
    "train_reasoner",
    "write_page",
    "write_traces",
]
