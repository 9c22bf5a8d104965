"""The check of lexical task heads: its arms, its statistics, and what users may give it."""

import json

import numpy as np
import pytest
import torch

from practicum.checks import CannotMeasure, Request
from practicum.checks.check import as_metrics
from practicum.datasets import Task, load_tasks
from practicum.language.taskheads.check import (
    QUICK_TASKS,
    Sizes,
    TaskHeadsCheck,
    Work,
    _chosen,
    _interval,
    _shuffled,
    _tasks,
)
from practicum.language.taskheads.tiny import tiny_model

WORDS = "up down in out hot cold big small wet dry left right near far day night opposite same The of is Not but"
PAIRS = [("up", "down"), ("in", "out"), ("hot", "cold"), ("big", "small"), ("wet", "dry"), ("left", "right")]
PAIRS += [("near", "far"), ("day", "night"), *((b, a) for a, b in PAIRS)]
TASKS = {
    "antonym": {
        "pairs": PAIRS,
        "words": ["opposite"],
        "instructions": ["The opposite of {input} is", "Not {input} but"],
    },
    "echo": {"pairs": [(a, a) for a, _ in PAIRS], "words": ["same", "of"], "instructions": ["The {input} is"]},
}
SIZES = Sizes(7, 7, (1, 2, 3), 2, 2)


@pytest.fixture(scope="module")
def own_model(tmp_path_factory):
    """A small random model as a user's folder."""
    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = tiny_model(WORDS)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def work(own_model):
    tasks = {name: Task(name, **fields) for name, fields in TASKS.items()}
    return Work(Request(scale="full", seed=1, model=own_model), SIZES, tasks)


def test_every_claim_has_its_arms():
    check = TaskHeadsCheck()
    check.validate()
    assert {"random", "related task", "retrieval", "function vector", "task vector"} <= set(check.arms())


def test_heads_are_found_and_measured_on_different_queries(work):
    for name, (found, measured) in work.queries.items():
        assert len(found) == len(measured) == 7
        assert not set(found) & set(measured)
        assert set(work.finder.queries_[name]["examples"]) <= set(found)


def test_all_arms_give_numbers(work):
    check = TaskHeadsCheck()
    found = {name: as_metrics(arm(work)) for name, arm in check.arms().items()}
    for comparison in check.comparisons:
        for name in (comparison.arm, *comparison.baselines):
            values, missing = found[name].values, found[name].missing
            assert (comparison.metric in values) != (comparison.metric in missing), (comparison.claim, name)
    assert 0 <= found["function vector"].values["repaired"] <= 1
    assert found["answer probability"].values["auroc"] > 0.6
    assert len(found["lexical"].notes) == 3
    assert all("speak in its prompts" in note for note in found["lexical"].notes[:2])
    assert [x for x, _ in found["lexical"].curves["shots"]] == [1, 2, 3]


def test_repairs_are_those_of_the_patch(work):
    from practicum.language.taskheads import HeadPatch, build_prompts
    from practicum.language.taskheads.check import SCALES

    task = next(iter(work.failing))
    heads = work.random_heads[task][2] or [(1, 1)]
    mean = work.finder.readings_[task]["examples"].z.mean(0)
    prompts = build_prompts(work.tasks[task], n_shots=1, indices=work.failing[task])
    _, answers = work._to_repair(task)
    for s, scale in enumerate(SCALES):
        for j, prompt in enumerate(prompts):
            with torch.no_grad(), HeadPatch(work.model, heads, mean, scale):
                logits = work.model(torch.tensor([work.tokenizer(prompt)["input_ids"]])).logits[0, -1]
            rank = int((logits > logits[answers[j]]).sum())
            assert abs(rank - work._ranks(task)["random"][2, s, j]) <= 1


def test_random_heads_are_of_the_same_layers(work):
    for task, sets in work.random_heads.items():
        layers = sorted(layer for layer, _ in work.heads(task))
        assert all(sorted(layer for layer, _ in heads) == layers for heads in sets)


def test_one_task_alone(own_model):
    alone = Work(Request(model=own_model), SIZES, {"antonym": Task("antonym", **TASKS["antonym"])})
    found = {name: as_metrics(arm(alone)) for name, arm in TaskHeadsCheck().arms().items()}
    assert found["other prompts"].missing["heads that speak"] == "needs two tasks at least"
    assert found["share"].missing["auroc"] == found["related task"].missing["repaired"] == "needs two tasks at least"
    assert "heads that speak" in found["lexical"].values


def test_settings_are_chosen_on_the_other_half():
    ranks = np.array([[0, 0, 5, 5], [5, 5, 0, 0]])
    first, second = np.array([0, 1]), np.array([2, 3])
    assert _chosen(ranks, first, second) == (0.0, pytest.approx(1 / 6))
    assert _chosen(ranks, np.array([0, 2]), np.array([1, 3])) == (0.5, pytest.approx((1 + 1 / 6) / 2))


def test_the_interval_covers_the_difference():
    rng = np.random.default_rng(0)
    low, high = _interval(np.ones(40), np.zeros(50), rng)
    assert (low, high) == (1, 1)
    low, high = _interval(rng.normal(1, 1, 200), rng.normal(0, 1, 200), rng)
    assert 0.6 < low < 1 < high < 1.4


def test_shuffled_prompts_have_outputs_of_others():
    task = Task("antonym", **TASKS["antonym"])
    for i, prompt in enumerate(_shuffled(task, range(6), 4, np.random.default_rng(0))):
        assert prompt.endswith(f" {PAIRS[i][0]}:")
        outputs = [shot.split(": ")[1] for shot in prompt.split(";")[:-1]]
        assert len(outputs) == 4
        assert set(outputs) <= {b for _, b in PAIRS}


def test_on_ones_own_model_and_tasks(own_model, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"name": name, **fields}) + "\n" for name, fields in TASKS.items()))
    check = TaskHeadsCheck()
    work = check.prepare(Request(model=own_model, data=str(path), options={"tasks": "antonym"}))
    assert list(work.tasks) == ["antonym"]
    both = tmp_path / "mine.json"
    both.write_text(json.dumps(TASKS))
    work = check.prepare(Request(model=own_model, data=str(both)))
    assert list(work.tasks) == ["antonym", "echo"]
    assert set(work.cells["antonym"]) == {"1 examples", "5 examples", "instruction 0"}
    assert as_metrics(check.lexical(work)).values["shared heads"] >= 0


def test_tasks_by_scale_and_by_name():
    sizes = Sizes(1, 1, (1,), 1, 0)
    assert tuple(_tasks(Request(), sizes)) == QUICK_TASKS
    assert list(_tasks(Request(scale="full"), sizes)) == list(load_tasks())
    assert list(_tasks(Request(options={"tasks": "antonym, next-item"}), sizes)) == ["antonym", "next-item"]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ({"a": TASKS["antonym"]}, {"tasks": "b"}, "--tasks b: there is no 'b' in .*; there are a"),
        ({"a": TASKS["antonym"]}, {"tasks": " , "}, "must be names of tasks, separated by commas"),
        (
            {"a": {**TASKS["antonym"], "pairs": PAIRS[:7]}},
            {},
            "task 'a': has 7 pairs whose answer .* must have 8 at least",
        ),
        ({"a": {"pairs": PAIRS}}, {}, "field 'words'"),
    ],
)
def test_it_refuses(own_model, tmp_path, content, options, message):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    with pytest.raises((CannotMeasure, ValueError), match=message):
        TaskHeadsCheck().prepare(Request(model=own_model, data=str(path), options=options))
    with pytest.raises(ValueError, match="there is no task 'chess'; there are country-capital"):
        TaskHeadsCheck().prepare(Request(model=own_model, options={"tasks": "chess"}))


def test_remarks_name_tasks_that_fail_and_peers_that_win():
    means = {
        "lexical": {
            "repaired": 0.2,
            "a: own minus other prompts": 1.0,
            "b: own minus other prompts": 0.0,
            "a: repaired minus random": 0.1,
            "b: repaired minus random": 0.2,
        },
        "task vector": {"repaired": 0.3},
        "retrieval": {"repaired": 0.1},
    }
    own, repaired, peers = TaskHeadsCheck().remarks(means)
    assert own.endswith("for 1 of 2 tasks; not for b.")
    assert repaired.endswith("for 2 of 2 tasks.")
    assert peers == "More answers than by lexical heads are repaired by: task vector."
    assert list(TaskHeadsCheck().remarks({})) == []


def test_a_task_without_heads_is_repaired_by_none(own_model):
    tasks = {name: Task(name, **fields) for name, fields in TASKS.items()}
    bare = Work(Request(scale="full", seed=1, model=own_model), SIZES, tasks)
    name = next(iter(bare.failing))
    bare.finder.heads_[name] = {style: [] for style in bare.finder.heads_[name]}
    for arm in ("lexical", "retrieval", "whole layers", "function vector"):
        assert bare.edited_heads(arm, name) == [[]]
        assert bare.repair(arm, name)[0] == 0
