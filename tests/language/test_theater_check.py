"""The check of Reasoning Theater: on the tiny model, on a user's own chains and questions, and the example."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from practicum.catalog import Catalog
from practicum.checks import Request, run_check
from practicum.checks.check import as_metrics
from practicum.checks.results import Row
from practicum.checks.verdict import judge_all
from practicum.datasets import mcq_topics
from practicum.language.theater import (
    AttentionProbe,
    ForcedAnswer,
    HFMonitor,
    ProbeEarlyExit,
    Sampling,
    collect_traces,
    format_of,
    generate_with_exit,
    load_reasoner,
    reasoner_questions,
    record,
    trace_of,
    write_traces,
)
from practicum.language.theater.check import TheaterCheck, _default_questions, _given
from practicum.models import load_language_model
from practicum.toolbox.errors import InputError

EXAMPLE = Path(__file__).parents[2] / "examples" / "theater.py"


class SmallCheck(TheaterCheck):
    """The same with fewer questions."""

    n_questions = {"quick": 160, "full": 160}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows_of(check, seeds, arms, **request):
    rows = []
    for seed in range(seeds):
        work = check.prepare(Request(scale="quick", seed=seed, **request))
        for name in arms:
            metrics = as_metrics(check.arms()[name](work))
            rows.append(Row(seed, name, metrics=dict(metrics.values), missing=dict(metrics.missing)))
    return rows


def verdicts(check, rows):
    return {claim.claim: claim.verdict for claim in judge_all(check, dict.fromkeys(CLAIMS, ""), "quick", rows)}


CLAIMS = [claim.id for claim in Catalog()["theater"].claims]
PEERS = ["deer", "answer-consistency", "entropy-stopping", "fixed-budget"]


def test_a_probe_of_shuffled_answers_is_at_chance_and_its_claims_do_not_hold():
    check = SmallCheck()
    arms = ["attention-probe", "last-token-probe", "full-chain", *PEERS]
    rows = rows_of(check, 2, arms, options={"shuffle": "yes"})
    ours = [row.metrics for row in rows if row.arm == "attention-probe"]
    # Chains of one fact are right or wrong together, and there are some 50 facts in a test.
    assert abs(np.mean([values["prefix accuracy (recall)"] for values in ours]) - 0.25) < 0.13
    assert all(values["saved (recall)"] < 0.1 for values in ours)
    told = verdicts(check, rows)
    for claim in ("recall-saves-half", "recall-saves-more"):
        assert told[claim] == "does not hold", told
    for claim in ("recall-is-theatre", "attention-beats-last-token", "inflections-follow-shifts"):
        assert told[claim] != "holds", told


def test_nothing_of_a_question_is_on_both_sides():
    work = SmallCheck().prepare(Request(scale="quick", seed=1))
    learnt = {trace.question for trace in work.train}
    for traces in work.test.values():
        assert not learnt & {trace.question for trace in traces}
    facts = {question.split(" ", 1)[1] for question in learnt if question.startswith(("recall", "act"))}
    for group in ("recall", "theatrical"):
        assert not facts & {trace.question.split(" ", 1)[1] for trace in work.test[group]}
    assert work.answers == [trace.answer for trace in work.train]
    assert any(trace.answer != trace.gold for trace in work.train)


# Someone's own --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A model in a folder, and a file of chains that it wrote."""
    folder = tmp_path_factory.mktemp("own")
    reasoner = load_reasoner()
    reasoner.model.save_pretrained(folder / "model")
    reasoner.tokenizer.save_pretrained(folder / "model")
    traces = []
    for kind in ("recall", "multi-hop"):
        questions = reasoner_questions(kind, 40, 3)
        traces += collect_traces(
            *reasoner, questions, max_new_tokens=56, sampling=Sampling(1.0, 1.0), format=reasoner.format, batch_size=40
        )
    write_traces(folder / "chains.jsonl", traces)
    return folder


@pytest.fixture
def check(tmp_path):
    catalog = Catalog()

    def run(**options):
        card = catalog["theater"]
        given = {"seeds": 1, "jobs": 1, "out": tmp_path, **options}
        return run_check(card, catalog.load_check(card), **given)

    return run


def changed(source, target, **fields):
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    lines = [{**line, **{name: value(line) for name, value in fields.items()}} for line in lines]
    target.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return target


def test_chains_that_were_written_elsewhere_get_their_verdicts(check, own):
    result = check(model=str(own / "model"), data=str(own / "chains.jsonl"), options={"layer": "3"})
    assert not [row.error for row in result.rows if row.status == "failed"]
    told = {claim.claim: claim for claim in result.claims}
    assert told["theatrical-waits-do-not"].verdict == "could not measure"
    assert "no chains with inflections put in at random" in told["theatrical-waits-do-not"].reason
    measured = [claim for name, claim in told.items() if name != "theatrical-waits-do-not"]
    assert all(claim.verdict != "could not measure" for claim in measured), [claim.reason for claim in measured]


def test_groups_may_have_names_of_their_own(check, own, tmp_path):
    names = {"recall": "trivia", "multi-hop": "puzzles"}
    data = changed(own / "chains.jsonl", tmp_path / "named.jsonl", group=lambda line: names[line["group"]])
    given = {"model": str(own / "model"), "data": str(data)}
    with pytest.raises(InputError, match="--easy riddles: there is no such group; there are trivia, puzzles"):
        check(options={"easy": "riddles"}, **given)
    result = check(options={"easy": "trivia", "hard": "puzzles", "layer": "2"}, **given)
    assert "performativity gap" in result.means()["attention-probe"]


def test_one_group_without_right_answers_leaves_out_what_needs_them(check, own, tmp_path):
    data = changed(own / "chains.jsonl", tmp_path / "plain.jsonl", group=lambda line: None, gold=lambda line: None)
    result = check(model=str(own / "model"), data=str(data), options={"layer": "3"})
    assert not [row.error for row in result.rows if row.status == "failed"]
    told = {claim.claim: claim for claim in result.claims}
    assert "needs two groups" in told["recall-is-theatre"].reason
    assert "needs the right answers" in told["saves-more-than-peers"].reason
    assert told["inflections-follow-shifts"].verdict != "could not measure"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": "x"}, "--layer must be a whole number; got 'x'"),
        ({"layer": "0"}, "--layer must be at least 1; got 0"),
        ({"layer": "4"}, "--layer must be from 1 to 3, the blocks of the embedded model; got 4"),
        ({"shuffle": "maybe"}, "--shuffle must be one of no, yes; got 'maybe'"),
        ({"monitor": "me"}, "--monitor goes with --model or --data"),
        ({"easy": "a"}, "--easy goes with --model or --data"),
    ],
)
def test_an_option_that_does_not_fit_is_named(check, options, message):
    with pytest.raises(InputError, match=message):
        check(options=options)


def test_options_of_another_kind_of_work_are_named(check, own):
    given = {"model": str(own / "model"), "data": str(own / "chains.jsonl")}
    with pytest.raises(InputError, match="--layer 9: the model has 3"):
        check(options={"layer": "9"}, **given)
    with pytest.raises(InputError, match="--retrain is of the embedded model"):
        check(options={"retrain": "1"}, **given)
    with pytest.raises(InputError, match="--monitor must be one of regex, model, embedded; got 'me'"):
        check(options={"monitor": "me"}, **given)


def test_too_few_chains_are_refused(check, own, tmp_path):
    lines = (own / "chains.jsonl").read_text().splitlines()
    (tmp_path / "few.jsonl").write_text("\n".join(lines[:12]) + "\n")
    with pytest.raises(InputError, match="group 'recall': 12 answered questions are too few"):
        check(model=str(own / "model"), data=str(tmp_path / "few.jsonl"))


def test_difficulty_stands_in_for_group(tmp_path):
    path = tmp_path / "mine.jsonl"
    question = {"question": "2 + 2?", "choices": ["3", "4"], "answer": 1}
    path.write_text("".join(json.dumps({**question, "difficulty": d}) + "\n" for d in ("easy", "hard")))
    assert [q.group for q in _given(str(path))] == ["easy", "hard"]
    path.write_text(json.dumps({**question, "difficulty": "easy"}) + "\n" + json.dumps({**question, "difficulty": 3}))
    with pytest.raises(InputError, match=r"line 2: field 'difficulty': must be a text"):
        _given(str(path))


def test_the_sums_have_one_right_answer():
    for question in _default_questions(30, seed=2)[30:]:
        a, b, c = map(int, re.findall(r"\d+", question.question))
        right = a + b - c
        assert question.choices[question.answer] == str(right)
        assert len(set(question.choices)) == 4


# A chat model ---------------------------------------------------------------------------------------------------------


def test_the_embedded_chat_model_goes_through_every_instrument():
    """SmolLM2: forced answers, its own monitor, recording, probe and exit, on short chains."""
    loaded = load_language_model()
    model, tokenizer = loaded.model, loaded.tokenizer
    format = format_of(tokenizer)
    assert format.end_of_thinking is None
    questions = mcq_topics(8, ["capital"]).questions
    traces = []
    for i, question in enumerate(questions):
        label = format.labels_of(question)[question.answer]
        words = f" I know this country. Its capital is {question.choices[question.answer]}. So it is {label}."
        traces.append(
            trace_of(
                tokenizer,
                question=format.words(question),
                options=format.labels_of(question),
                prompt_ids=format.prompt_ids(tokenizer, question),
                cot_ids=tokenizer.encode(words, add_special_tokens=False),
                answer=label,
                gold=label,
                choices=question.choices,
                group="ab"[i % 2],
            )
        )
    assert [len(trace.cuts) for trace in traces] == [4] * 8
    forced = ForcedAnswer(model, tokenizer, format.stub, batch_size=4)
    np.testing.assert_allclose(forced(traces[0]), forced.beliefs(traces[:1])[0], atol=1e-4)
    told = HFMonitor(model, tokenizer)(questions[0].question, traces[0].text, questions[0].choices)
    assert told is None or abs(told.sum() - 1) < 1e-9
    record(model, traces, [15], batch_size=4)
    probe = AttentionProbe(epochs=3, random_state=0).fit(
        [trace.hidden[15] for trace in traces],
        [trace.answer for trace in traces],
        start=[trace.start for trace in traces],
        options=[trace.options for trace in traces],
    )
    early = ProbeEarlyExit(probe, 15, tokenizer, tau=1e-6, min_tokens=1)
    said = generate_with_exit(model, tokenizer, questions[0], early, max_new_tokens=24, sampling=Sampling(0.0))
    assert said.answer in "ABCD"
    assert 0 < said.n_cot_tokens <= 24
    assert said.belief[0][0] == 0


def test_the_example_runs():
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parents[1] / "src")},
    )
    assert done.returncode == 0, done.stderr
    assert "saved" in done.stdout
