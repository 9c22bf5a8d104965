"""The check of CORAL on a user's own questions, its splits, its negative control, and the example."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from practicum.catalog import Catalog
from practicum.checks import CannotMeasure, Request, run_check
from practicum.checks.report import render_report
from practicum.checks.verdict import judge
from practicum.datasets.questions import MCQuestion, mcq_topics
from practicum.language.coral.check import (
    CoralCheck,
    Split,
    by_topic,
    correctness_probe,
    features_of,
    holding_out,
    in_orders,
    metrics_of,
    neuron_probe,
    predict_with,
    ridge_probe,
    softmax_rows,
    tempered,
)
from practicum.toolbox.calibration import TemperatureScaling
from practicum.toolbox.choices import ChoiceScores

EXAMPLE = Path(__file__).parents[2] / "examples" / "coral.py"
TOPICS = ["add", "mul", "http", "element"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model of random weights on disk, a token a character."""
    folder = tmp_path_factory.mktemp("tiny")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=128, hidden_size=16, intermediate_size=32, num_hidden_layers=8, num_attention_heads=2
        )
        tiny = LlamaForCausalLM(config)
        for parameter in tiny.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
        tiny.save_pretrained(folder)
    vocabulary = {chr(i): i for i in range(128)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocabulary, [], unk_token="?")), pad_token="\x00", unk_token="?"
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Questions of four topics, some with more options than others."""
    file = tmp_path_factory.mktemp("data") / "mine.jsonl"
    rows = []
    for i, q in enumerate(mcq_topics(15, topics=TOPICS).questions):
        options = [*q.choices, "none of these"] if i % 3 == 0 else list(q.choices)
        rows.append({"question": q.question, "options": options, "answer": q.answer, "group": q.group})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def check(tmp_path):
    catalog = Catalog()

    def run(seeds, **options):
        card = catalog["coral"]
        return run_check(card, catalog.load_check(card), seeds=seeds, jobs=1, out=tmp_path, **options)

    return run


def test_own_questions_of_any_number_of_options_get_every_verdict(check, model, data):
    result = check(seeds=1, model=model, data=data)
    assert {claim.verdict for claim in result.claims} <= {"holds", "does not hold", "inconclusive"}
    unavailable = {row.arm for row in result.rows if row.status == "unavailable"}
    assert unavailable == {"coral-tuned", "pmi", "activation-addition", "lora"}
    assert not [row for row in result.rows if row.status == "failed"]
    page = render_report([result])
    assert "reliability" in page


def test_at_the_full_scale_every_arm_runs(check, model, data):
    result = check(seeds=1, scale="full", model=model, data=data)
    assert {row.status for row in result.rows} == {"ok"}, [(row.arm, row.error) for row in result.rows]
    means = result.means()
    assert means["lora"]["accuracy"] > 0
    assert "strength" in means["activation-addition"]


def test_letters_are_scored_in_several_orders(check, model, data):
    result = check(seeds=1, model=model, data=data, options={"mode": "letter"})
    assert not [row.error for row in result.rows if row.status == "failed"]
    assert result.claims[0].pairs


def test_without_topics_only_transfer_is_not_measured(check, model, tmp_path):
    file = tmp_path / "plain.jsonl"
    rows = [
        {"question": q.question, "choices": list(q.choices), "answer": q.answer}
        for q in mcq_topics(50, ["add"]).questions
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = check(seeds=1, model=model, data=str(file))
    unmeasured = {claim.claim for claim in result.claims if claim.verdict == "could not measure"}
    assert unmeasured == {"weight-decay-transfers", "calibration-transfers", "accuracy-transfers"}
    reasons = {claim.reason for claim in result.claims if claim.claim in unmeasured}
    assert all("needs questions of 3 groups at least" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"mode": "essay"}, "--mode essay: must be"), ({"labels": "wrong"}, "--labels wrong: must be right or shuffled")],
)
def test_options_that_do_not_go_are_named(options, message):
    with pytest.raises(CannotMeasure, match=message):
        CoralCheck().prepare(Request(options=options))


def test_too_few_questions_are_refused(tmp_path):
    file = tmp_path / "few.jsonl"
    file.write_text('{"question": "2 + 2?", "options": ["3", "4"], "answer": 1}\n' * 5)
    with pytest.raises(CannotMeasure, match="has 5 questions; must have 40 at least"):
        CoralCheck().prepare(Request(data=str(file)))


# Splits


def test_no_question_is_on_both_sides_and_a_held_out_topic_is_not_fitted_on(model, data):
    work = CoralCheck().prepare(Request(seed=3, model=model, data=data))
    assert set(work.train).isdisjoint(work.test)
    assert sorted([*work.train, *work.test]) == list(range(len(work.questions)))
    topics = work.groups
    for topic in TOPICS:
        fitted, predicted = (int((topics[side] == topic).sum()) for side in (work.train, work.test))
        assert (fitted, predicted) == (8, 7)
    assert len(work.held_out) == 3
    for train, test in work.held_out:
        assert len(set(topics[test])) == 1
        assert set(topics[test]).isdisjoint(topics[train])
    again = CoralCheck().prepare(Request(seed=3, model=model, data=data))
    np.testing.assert_array_equal(work.train, again.train)
    other = CoralCheck().prepare(Request(seed=4, model=model, data=data))
    assert set(work.train) != set(other.train)
    for one, same in zip(work.scores.logits, other.scores.logits, strict=True):
        np.testing.assert_array_equal(one, same)


def test_copies_of_a_question_are_on_its_side(model, data):
    work = CoralCheck().prepare(Request(model=model, data=data, options={"mode": "letter"}))
    n = len(work.questions)
    split = work.in_distribution
    assert len(split.train) == 4 * len(work.train)
    assert len(split.test) == len(work.test)
    assert len(work.scores) == 4 * n
    assert list(split.groups[: len(work.train)]) == list(work.groups[work.train])


def test_shuffled_labels_are_for_fitting_alone(model, data):
    right = CoralCheck().prepare(Request(model=model, data=data))
    shuffled = CoralCheck().prepare(Request(model=model, data=data, options={"labels": "shuffled"}))
    np.testing.assert_array_equal(right.y, shuffled.y)
    np.testing.assert_array_equal(right.y, right.y_to_fit)
    assert 0.1 < np.mean(shuffled.y == shuffled.y_to_fit) < 0.5


def test_orders_of_options_keep_their_answers():
    questions = [MCQuestion("Which?", ("a", "b", "c"), 2)] * 5
    asked = in_orders(questions, 3)
    assert asked[:5] == questions
    assert all(question.choices[question.answer] == "c" for question in asked)
    assert len({question.choices for question in asked}) > 1
    assert holding_out(by_topic(questions), 3, np.random.default_rng(0)) == []


# Arms on planted data


def planted(seed, n=240, d=12, known=0.5):
    """Scores that are too sure and know something of the answer, beside activations that know more."""
    rng = np.random.default_rng(seed)
    y = rng.integers(4, size=n)
    logits = [4 * (rng.normal(size=4) + known * np.eye(4)[gold]) for gold in y]
    direction = rng.normal(size=d)
    direction *= 2.5 / np.linalg.norm(direction)
    hidden = [(rng.normal(size=(4, d)) + np.eye(4)[gold][:, None] * direction).astype(np.float16) for gold in y]
    scores = ChoiceScores(logits, {5: hidden})
    cut = n // 2
    train, test = scores.take(range(cut)), scores.take(range(cut, n))
    return Split(train, y[:cut], np.arange(cut), test, seed, 5, "continuation"), y[cut:]


def test_on_planted_data_the_arms_rank_as_they_must():
    split, y = planted(0)
    arms = {
        "base": lambda s: softmax_rows(s.test.logits),
        "temperature": tempered,
        "coral": predict_with(),
        "ridge": ridge_probe,
        "logistic": correctness_probe,
        "neuron": neuron_probe,
    }
    found = {name: metrics_of(predict(split), y) for name, predict in arms.items()}
    assert found["base"]["accuracy"] == found["temperature"]["accuracy"]
    assert found["temperature"]["ece"] < 0.5 * found["base"]["ece"]
    for name in ("coral", "ridge", "logistic"):
        assert found[name]["accuracy"] > found["base"]["accuracy"] + 0.2, name
    assert found["temperature"]["brier"] > found["neuron"]["brier"] > found["coral"]["brier"]


def test_the_single_neuron_is_the_best_line_through_one_activation():
    split, _ = planted(1)
    features = features_of(split.train, split)
    p = np.concatenate(TemperatureScaling().fit(split.train.logits, split.y).predict_proba(split.train.logits))
    hits = np.concatenate([np.eye(4)[gold] for gold in split.y])
    residual = hits - p
    losses = []
    for column in features.T:
        line = np.polyfit(column, residual, 1)
        losses.append(float(np.mean((residual - np.polyval(line, column)) ** 2)))
    best = int(np.argmin(losses))
    line = np.polyfit(features[:, best], residual, 1)
    ahead = np.polyval(line, features_of(split.test, split)[:, best])
    expected = [
        np.maximum(row + g, np.minimum(1e-4, row)) / np.maximum(row + g, np.minimum(1e-4, row)).sum()
        for row, g in zip(tempered(split), ahead.reshape(-1, 4), strict=True)
    ]
    np.testing.assert_allclose(np.concatenate(neuron_probe(split)), np.concatenate(expected), atol=1e-3)


def test_a_probe_of_shuffled_labels_does_not_hold():
    ours, base, shuffled = [], [], []
    for seed in range(5):
        split, y = planted(seed, known=1.5)
        drawn = np.random.default_rng(1000 + seed).integers(4, size=len(split.y))
        control = replace(split, y=drawn)
        base.append(metrics_of(softmax_rows(split.test.logits), y)["accuracy"])
        ours.append(metrics_of(predict_with()(split), y)["accuracy"])
        shuffled.append(metrics_of(predict_with()(control), y)["accuracy"])
    assert judge(ours, base, "difference_above", 0.0).verdict == "holds"
    assert judge(shuffled, base, "difference_above", 0.0).verdict == "does not hold"


def test_the_example_runs():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=600, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert "on a topic it has not seen:" in ran.stdout
    assert ran.stdout.splitlines()[-1].split()[-1] in "ABCD"
