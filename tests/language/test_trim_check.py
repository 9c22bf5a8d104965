"""The check of TRIM: its arms on a tiny model, what users may give it, and the example."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from practicum.checks import CannotMeasure, Request
from practicum.checks.measure import time_workloads
from practicum.language.confidence.tiny import tiny_model
from practicum.language.trim import SampleTokenizer
from practicum.language.trim.check import (
    NEEDS_FULL,
    Sizes,
    TrimCheck,
    Work,
    _half,
    _ways,
    chatml,
    plain,
)
from practicum.language.trim.tasks import WANTED, instruction_pool, wanted_samples
from practicum.toolbox.taps import fingerprint

EXAMPLE = Path(__file__).parents[2] / "examples" / "trim.py"
SIZES = Sizes(3, 3, 2, 2, 1e-2, 2, 2, 2, 20)
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"


def saved(folder, template):
    model, tokenizer = tiny_model(n_layers=4, scale=0.2)
    tokenizer.chat_template = template
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def own_model(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.fixture(scope="module")
def work(own_model):
    """All that the full scale does, in small."""
    wanted = wanted_samples(11, 0)
    request = Request(scale="full", model=own_model)
    return Work(request, SIZES, instruction_pool(SIZES.per_family, 0), wanted[:8], wanted[8:], SIZES.per_family)


@pytest.fixture(scope="module")
def metrics(work):
    before = fingerprint(work.model)
    found = {name: arm(work) for name, arm in TrimCheck().arms().items()}
    assert fingerprint(work.model) == before
    return found


def write(path, samples):
    path.write_text("\n".join(json.dumps(sample) for sample in samples) + "\n")
    return str(path)


def test_every_claim_has_its_arms():
    check = TrimCheck()
    check.validate()
    assert {"random", "length", "perplexity", "rds-last", "rds-mean", "minilm", "bm25", "less", "whole-pool"} <= set(
        check.arms()
    )


def test_every_claim_is_measured(metrics):
    for comparison in TrimCheck.comparisons:
        for name in (comparison.arm, *comparison.baselines):
            found = {**metrics[name].values, **metrics[name].timed}
            assert comparison.metric in found or "TRIM gained nothing" in metrics[name].missing[comparison.metric]


def test_the_same_seed_gives_the_same_numbers(metrics, own_model):
    again = TrimCheck()
    wanted = wanted_samples(11, 0)
    work = Work(Request(scale="full", model=own_model), SIZES, instruction_pool(3, 0), wanted[:8], wanted[8:], 3)
    for name in ("trim", "random", "less", "rds-last"):
        assert again.arms()[name](work).values == metrics[name].values


def test_metrics_are_what_they_say(work, metrics):
    scores = work.trim()
    chosen = work.chosen(scores)
    assert scores[list(chosen)].min() >= np.delete(scores, chosen).max()
    wanted = [work.pool[i]["family"] == WANTED for i in chosen]
    assert metrics["trim"].values["precision"] == np.mean(wanted)
    assert metrics["length"].values["length bias"] == pytest.approx(1)
    longest = metrics["length"].values["mean length"]
    assert all(found.values["mean length"] <= longest for found in metrics.values() if "mean length" in found.values)
    without = work._without_the_task(scores)
    assert not any(work.pool[i]["family"] == WANTED for i in work.chosen(without))
    assert work.draw(0).tolist() == work.draw(0).tolist() != work.draw(1).tolist()


def test_training_lowers_the_loss_and_is_not_repeated(work, metrics):
    plain_loss = metrics["untrained"].values["loss"]
    assert metrics["trim"].values["loss"] < plain_loss
    known = len(work._trained)
    work.trained(work.chosen(work.trim()))
    assert len(work._trained) == known
    assert work.loss_of(work.model)["loss"] == plain_loss


def test_a_model_without_a_chat_template(tmp_path):
    wanted = wanted_samples(11, 0)
    request = Request(scale="full", model=saved(tmp_path, None))
    work = Work(request, SIZES, instruction_pool(2, 0), wanted[:8], wanted[8:], 2)
    assert work.format is plain
    for name in ("trim", "trim-template", "rds-last"):
        assert TrimCheck().arms()[name](work).values["precision"] >= 0


def test_what_the_template_writes_counts_without_masking(work):
    counted = SampleTokenizer(work.tokenizer, work.format).tokenize(work.pool)
    assert work.unmasked.shape == work.trim().shape
    assert not np.allclose(work.unmasked, work.trim(), atol=1e-4)
    assert any(0 in sample.roles for sample in counted)


def test_half_of_the_model_shares_its_weights(work):
    half = _half(work.model)
    assert half.config.num_hidden_layers == 2
    assert len(half.model.layers) == 2
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        whole = work.model.model(ids, output_hidden_states=True).hidden_states[2]
        assert torch.allclose(half.model(ids).last_hidden_state, work.model.model.norm(whole), atol=1e-6)
    own = dict(work.model.named_parameters())
    assert all(p.data_ptr() == own[name].data_ptr() for name, p in half.named_parameters())


def test_the_stopwatch_gets_work_that_travels(work):
    import pickle

    loads = {name: pickle.loads(pickle.dumps(work.timed(name))) for name in ("trim", "forward", "less", "less-4")}
    timings, errors = time_workloads(loads)
    assert not errors
    assert timings["less"]["value"] > timings["trim"]["value"]
    assert timings["less-4"]["value"] > timings["less"]["value"]
    _ways.cache_clear()


def test_quick_says_what_it_has_no_time_for(own_model):
    wanted = wanted_samples(11, 0)
    quick = Work(Request(model=own_model), replace(SIZES, noisy_per_family=0), instruction_pool(3), wanted[:8], [], 3)
    check = TrimCheck()
    for name in ("less", "trim-template", "trim-warmed", "whole-pool", "trim-transfer", "less-pass-4"):
        missing = check.arms()[name](quick).missing
        assert missing
        assert set(missing.values()) == {NEEDS_FULL}
    assert check.arms()["trim"](quick).missing["loss (low overlap)"] == NEEDS_FULL


def test_on_ones_own_model_and_data(own_model, tmp_path):
    pool = [{"prompt": s["prompt"], "response": s["response"]} for s in instruction_pool(3)]
    samples = wanted_samples(9)
    options = {
        "target": write(tmp_path / "target.jsonl", samples[:6]),
        "test": write(tmp_path / "test.jsonl", samples[6:]),
        "fraction": "0.2",
    }
    check = TrimCheck()
    request = Request(model=own_model, data=write(tmp_path / "pool.jsonl", pool), options=options)
    work = check.prepare(request)
    assert work.n == 6
    found = check.arms()["trim"](work)
    assert "your own pool" in found.missing["precision"]
    assert {"loss", "exact", "length bias", "mean length"} <= found.values.keys()
    assert check.arms()["rds-last"](work).values["loss"] > 0
    del options["test"]
    untested = check.prepare(replace(request, options=options))
    assert "needs --test" in check.arms()["trim"](untested).missing["loss"]
    assert "needs --test" in check.arms()["untrained"](untested).missing["loss"]


def test_a_large_pool_of_ones_own_is_drawn_from(own_model, tmp_path):
    pool = [{"prompt": str(i), "response": f"{i}."} for i in range(80)]
    options = {"target": write(tmp_path / "target.jsonl", pool[:5])}
    request = Request(model=own_model, data=write(tmp_path / "pool.jsonl", pool), options=options)
    work = TrimCheck().prepare(request)
    assert len(work.pool) == 60
    assert work.n == 3
    assert work.pool == TrimCheck().prepare(request).pool != TrimCheck().prepare(replace(request, seed=1)).pool


@pytest.mark.parametrize(
    ("pool", "options", "message"),
    [
        (None, {"target": "x"}, "--target: goes with --data"),
        (None, {"fraction": "0.1"}, "--fraction: goes with --data"),
        (5, {}, "--target: is missing; must be a .jsonl file"),
        (4, {}, "has 4 samples; must have 5 at least"),
        (5, {"target": "nowhere.jsonl"}, "nowhere.jsonl: there is no such file"),
        (5, {"target": "good", "fraction": "most"}, "--fraction most: must be a number above 0 and at most 1"),
        (5, {"target": "good", "fraction": "0"}, "--fraction 0: must be a number above 0 and at most 1"),
        (5, {"target": "bad"}, "line 1: field 'response': is missing"),
        (5, {"target": "empty"}, r"target\[0\]: field 'response': has no tokens"),
    ],
)
def test_it_refuses(own_model, tmp_path, pool, options, message):
    data = None
    if pool is not None:
        data = write(tmp_path / "pool.jsonl", [{"prompt": str(i), "response": str(i)} for i in range(pool)])
    files = {"good": {"prompt": "a", "response": "b"}, "bad": {"prompt": "a"}, "empty": {"prompt": "a", "response": ""}}
    if options.get("target") in files:
        options = {**options, "target": write(tmp_path / "target.jsonl", [files[options["target"]]])}
    with pytest.raises((CannotMeasure, ValueError), match=message):
        TrimCheck().prepare(Request(model=own_model, data=data, options=options))


def test_formats_say_the_same():
    sample = {"prompt": "2+2", "response": "4"}
    assert "".join(text for text, _ in chatml(sample)) == (
        "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    )
    assert plain(sample) == [("2+2", "prompt"), ("\n", "template"), ("4", "response"), ("\n", "template")]


def test_remarks_tell_the_ablations():
    means = {
        "trim": {"precision": 0.9, "precision (noisy)": 0.5, "loss": 0.3},
        "trim-uniform": {"precision": 0.8, "precision (noisy)": 0.6},
        "trim-template": {"precision": 0.1},
        "random": {"precision": 0.1, "loss": 0.6},
    }
    told = " ".join(TrimCheck().remarks(means))
    assert "trim 0.90, trim-uniform 0.80" in told
    assert "by +0.100, and by -0.100" in told
    assert "the precision is 0.10 instead of 0.90" in told
    assert "trim 0.300, random 0.600" in told
    assert list(TrimCheck().remarks({})) == []


def test_the_example_runs(own_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), own_model])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    told = capsys.readouterr().out
    assert "chosen:" in told
    assert "by the nearest" in told or "seen" in told
