"""The check of the Aitchison geometry: its gauges, its faults, and what users may give it."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from practicum.checks import CannotMeasure, Request
from practicum.language.aitchison.check import (
    FAULTS,
    AitchisonCheck,
    Retrieval,
    Sizes,
    Work,
    _items,
    _language_model,
    _quantised,
    _recorded,
    _tail_noise,
)
from practicum.models import load_language_model

SIZES = Sizes((64, 256, 1024), 64, 16, 64, 2, 256, 1, 60, 4, 100, (16, 256), 200)


@pytest.fixture(scope="module")
def own_model(tmp_path_factory):
    """A small random model with a real tokenizer, as a user's folder."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = load_language_model().tokenizer
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=2048,
    )
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(0)
        model = LlamaForCausalLM(config)
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.data.mul_(12)
    model.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def work(own_model):
    """Generated rows and trained networks, and windows of the small model."""
    tokens = torch.randint(5, 1000, (16 * 64 + 256,), generator=torch.Generator().manual_seed(0))
    return Work(Request(seed=3, model=own_model), SIZES, False, tokens, 256)


def test_every_claim_has_its_arms():
    check = AitchisonCheck()
    check.validate()
    assert set(check.arms()) >= {"aitchison", "entropy", "max_logit", "none", "sqrt_log", "log", "adaptive", "learned"}


def test_tail_noise_leaves_the_upper_half_alone():
    z = torch.randn(2, 3, 5, 40, generator=torch.Generator().manual_seed(0))
    z[..., 30:] = -torch.inf
    noisy = _tail_noise(z, torch.Generator().manual_seed(1))
    median = z[..., :30].median(-1, keepdim=True).values
    upper = (z >= median) | (z == -torch.inf)
    assert torch.equal(noisy[upper], z[upper])
    assert bool((noisy <= torch.maximum(z, median)).all())
    assert float((noisy - z)[~upper].std()) > 0.3


@pytest.mark.parametrize("bits", [2, 4])
def test_quantised_keys_have_few_levels(bits):
    key = torch.randn(1, 2, 7, 64, generator=torch.Generator().manual_seed(0))
    rounded = _quantised(key, bits)
    assert all(len(torch.unique(row.round(decimals=4))) <= 2**bits for row in rounded.reshape(-1, 64))
    step = (key.amax(-1) - key.amin(-1)) / (2**bits - 1)
    assert bool(((rounded - key).abs().amax(-1) <= step / 2 + 1e-6).all())


def test_gaussian_rows(work):
    assert work.limit_gap < 1.5
    assert 0.3 < work.bound_rate < 0.65
    peaks = dict(work.gaussian_peaks("none"))
    assert peaks[64] > peaks[1024]
    assert dict(work.gaussian_peaks("sqrt_log"))[1024] > peaks[1024]
    assert dict(work.gaussian_peaks("sqrt_log"))[64] == peaks[64]


def test_the_bound_and_the_linearity_on_real_rows(work):
    assert work.real_rows.shape[0] == 1
    assert work.violations == 0
    assert work.bounded_rows > 3000
    assert work.linearity_error < 1e-10
    assert 0 < work.entropy_at_ends < 1


def test_recorded_calls_are_those_of_the_model(work, own_model):
    model = _language_model(own_model, "cpu").model
    ids = work.tokens[None, :64]
    (call,) = _recorded(model, ids, [2])
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    attention = model(ids, output_attentions=True).attentions[1]
    model.set_attn_implementation("sdpa")
    assert torch.allclose(call.logits(slice(None)).softmax(-1), attention, atol=1e-5)


def test_detection_finds_what_is_far_off_and_nothing_in_clean_windows(work):
    gauged = work._gauged
    clean = gauged["clean"]["aitchison"]
    assert clean.shape == (16, 4)
    assert work.detection("aitchison").keys() == set(FAULTS)
    kept = gauged["tail noise"], gauged["temperature"]
    gauged["tail noise"] = gauged["clean"]
    gauged["temperature"] = {"aitchison": clean + 30 * clean.std(0)}
    found = work.detection("aitchison")
    gauged["tail noise"], gauged["temperature"] = kept
    assert found["tail noise"] == 0.5
    assert found["temperature"] == 1.0
    exact = gauged["temperature"]["aitchison"] / clean
    assert np.allclose(exact, 1.05, rtol=1e-5)


def test_training_collapses_where_it_should(work):
    ours, entropy = work.in_training("aitchison"), work.in_training("entropy")
    healthy, collapsed = (run["aitchison"] for run in work._runs.values())
    assert len(healthy) == 7
    assert healthy[0] == collapsed[0]
    assert collapsed[-1] > 5 * healthy[-1]
    assert ours["last over step 50"] == collapsed[-1] / collapsed[5]
    assert entropy["agreement with negative entropy"] == pytest.approx(-1)
    assert ours["first alarm"] in (20, 30, 40, 50, 60)
    assert all(math.isfinite(value) for value in ours.values())


def test_retrieval_learns_and_its_laws_differ(work):
    found = Retrieval(work)
    accuracy = found.accuracies
    assert accuracy["none"][16] > 0.2
    assert accuracy["none"][16] == accuracy["sqrt_log"][16] == accuracy["learned"][16]
    assert len({values[256] for values in accuracy.values()}) > 2
    items, answer = _items(50, 9, torch.Generator().manual_seed(0))
    best = items[..., -1].argmax(1)
    assert torch.equal(items[torch.arange(50), best, :-1].argmax(1), answer)
    with torch.no_grad():
        z, votes = found.net.parts(items)
        assert torch.allclose(found.net(items), found.net.read(z, votes))


def test_on_ones_own_model_and_texts(own_model, tmp_path):
    path = tmp_path / "mine.jsonl"
    words = np.random.default_rng(0).integers(0, 5000, 4000)
    path.write_text(
        "".join(json.dumps({"text": " ".join(map(str, words[i : i + 100]))}) + "\n" for i in range(0, 4000, 100))
    )
    check = AitchisonCheck()
    work = check.prepare(Request(model=own_model, data=str(path), options={"length": "300"}))
    assert work.limit == 300
    metrics = {name: arm(work) for name, arm in check.arms().items()}
    for comparison in check.comparisons:
        values, missing = metrics[comparison.arm].values, metrics[comparison.arm].missing
        assert (comparison.metric in values) != (comparison.metric in missing), comparison.claim
    assert "your own" in metrics["aitchison"].missing["limit gap"]
    assert {"long over short", "violations", "linearity error", "auroc tail noise"} <= metrics[
        "aitchison"
    ].values.keys()
    assert set(metrics["none"].missing) == {"p_max kept", "accuracy at 16x"}
    text = tmp_path / "mine.txt"
    text.write_text(" ".join(map(str, words)))
    assert check.prepare(Request(model=own_model, data=str(text))).own


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("short.txt", "a few words", {}, "has 6 tokens|has [0-9]+ tokens; must have 1152 at least"),
        ("table.csv", "a,b\n1,2\n", {}, "its name must end in .jsonl or .txt"),
        ("bad.jsonl", '{"texts": "x"}\n', {}, "line 1.*'text'"),
        ("any.txt", "x", {"length": "many"}, "--length many: must be a whole number"),
        ("any.txt", "x", {"length": "100"}, "--length 100"),
        ("any.txt", "x", {"length": "4096"}, "--length 4096: the model has positions for 2048"),
    ],
)
def test_it_refuses(own_model, tmp_path, name, content, options, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises((CannotMeasure, ValueError), match=message):
        AitchisonCheck().prepare(Request(model=own_model, data=str(path), options=options))
    with pytest.raises(ValueError, match="there is no such file"):
        AitchisonCheck().prepare(Request(model=own_model, data=str(tmp_path / "nowhere.txt")))


def test_remarks_name_the_peer_and_the_lower_bound():
    gauges = {f"auroc {fault}": 0.7 for fault in FAULTS}
    means = {"aitchison": gauges, "max_logit": gauges, "entropy": gauges}
    means |= {law: {"accuracy at 16x": 0.5} for law in ("none", "sqrt_log", "log")}
    peer, bound = AitchisonCheck().remarks(means)
    assert "largest logit" in peer
    assert "lower bound" in bound
    assert list(AitchisonCheck().remarks({})) == []
