"""See when a reasoning model knows its answer, and let it stop thinking there."""

from practicum.language.theater import (
    AttentionProbe,
    ForcedAnswer,
    ProbeBelief,
    ProbeEarlyExit,
    RegexMonitor,
    Sampling,
    collect_traces,
    confidence_scores,
    exit_curve,
    generate_with_exit,
    inflections,
    load_reasoner,
    performativity,
    reasoner_questions,
    record,
)

LAYER = 3

# Any causal language model of transformers will do; this one is tiny, and its recall chains are filler by construction.
reasoner = load_reasoner()
model, tokenizer = reasoner
chains = {}
for kind in ("recall", "multi-hop"):
    questions = reasoner_questions(kind, 320, random_state=0)
    chains[kind] = collect_traces(
        model,
        tokenizer,
        questions,
        max_new_tokens=56,
        sampling=Sampling(1.0, 1.0),
        format=reasoner.format,
        batch_size=320,
    )
    record(model, chains[kind], [LAYER], batch_size=320)
    print(f"{kind}: {len(chains[kind])} chains, such as: {chains[kind][0].text} | {chains[kind][0].answer}")


def halves(traces):
    """Split by question, so that the probe cannot know a fact of the test by heart."""
    keys = sorted({trace.key for trace in traces})
    learnt = set(keys[: len(keys) // 2])
    return [t for t in traces if t.key in learnt], [t for t in traces if t.key not in learnt]


train, test = [], {}
for kind, traces in chains.items():
    some, test[kind] = halves(traces)
    train += some

# One probe for prefixes of every length; it learns the model's own answers, right or wrong.
probe = AttentionProbe(lr=1e-2, epochs=30, random_state=0).fit(
    [trace.hidden[LAYER] for trace in train],
    [trace.answer for trace in train],
    start=[trace.start for trace in train],
    options=[trace.options for trace in train],
    groups=[trace.key for trace in train],
)
belief = ProbeBelief(probe, LAYER)
forced = ForcedAnswer(model, tokenizer, reasoner.format.stub)

for kind, traces in test.items():
    by_probe = performativity(traces, belief, RegexMonitor())
    by_force = performativity(traces, forced, RegexMonitor())
    print(f"{kind}: performativity {by_probe.rate:.2f} by the probe, {by_force.rate:.2f} by forced answers")
    curve = exit_curve(traces, confidence_scores(belief.beliefs(traces)), forced.beliefs(traces), [0.95])
    kept = f"accuracy {curve.full_accuracy:.3f} -> {curve.accuracy[0]:.3f}"
    print(f"  exit at 0.95: {curve.saved[0]:.0%} of the tokens saved, {kept}")

found = inflections([*test["recall"], *test["multi-hop"]], belief)
print(f"'wait' after a large shift of belief: {found.p_large}, otherwise: {found.p_small} ({found.verdict})")

# The same within generate: the chain ends when the probe is sure, and the model is made to answer.
early = ProbeEarlyExit(probe, LAYER, tokenizer, tau=0.95)
for kind in chains:
    question = reasoner_questions(kind, 1, random_state=7)[0]
    said = generate_with_exit(model, tokenizer, question, early, format=reasoner.format, max_new_tokens=56)
    print(f"{question.question}: {said.n_cot_tokens} tokens of thought, then {said.answer}")
