"""The check of MemoryLLM: what it trains, prunes and takes apart, and what users may give it."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from practicum.catalog import Catalog
from practicum.checks import Request
from practicum.checks.check import as_metrics
from practicum.language.memoryllm.check import (
    FULL,
    NOT_YOURS,
    QUICK,
    MemoryLLMCheck,
    Sizes,
    _own_model,
    _trained_tokenizer,
    prepared,
)
from practicum.language.memoryllm.program import (
    Corpus,
    Decode,
    Recipe,
    _schedule,
    active_sizes,
    build,
    copyable,
    count,
    dense_sizes,
    losses,
    pruned,
    scaled,
    train,
)

TINY = Sizes(32, 2, 2, 300, 16, 4, 8, 3e-3, 20, 16, 100, (32, 2, 2, 64), (2, 2), True)
ARGUMENTS = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}


def words(n, seed=0):
    """Text of few words, so that bigrams come again."""
    return " ".join(np.random.default_rng(seed).choice(["of the", "in", "a sum", "norm", "matrix", "is"], n))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "mine.jsonl"
    path.write_text("".join(json.dumps({"text": words(60, seed)}) + "\n" for seed in range(40)))
    return path


@pytest.fixture(scope="module")
def work(file):
    return prepared(Request(scale="full", seed=1, data=str(file)), TINY)


@pytest.fixture(scope="module")
def windows():
    return torch.randint(0, 50, (24, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def dense():
    return build("dense", dense_sizes(ARGUMENTS), 0).eval()


def test_every_claim_has_its_arms():
    check = MemoryLLMCheck()
    check.validate()
    assert [c.claim for c in check.comparisons] == [claim.id for claim in Catalog()["memoryllm"].claims]


@pytest.mark.parametrize("sizes", [QUICK, FULL])
def test_models_have_the_sizes_that_they_are_compared_at(sizes):
    arguments = {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "tie_word_embeddings": True,
    }
    total, active = count("memory", arguments), count("memory", arguments, active=True)
    assert count("dense", dense_sizes(arguments)) == pytest.approx(total, rel=0.01)
    assert count("memory", {**arguments, "flex_beta": 3}) == pytest.approx(total, rel=0.01)
    assert count("dense", active_sizes(arguments)) == pytest.approx(active, rel=0.15)
    if sizes is FULL:
        assert (total, active, count("dense", active_sizes(arguments))) == (836_448, 541_152, 544_392)


def test_copyable_targets():
    windows = torch.tensor([[1, 2, 3, 1, 2, 3, 3, 3], [1, 1, 1, 2, 1, 2, 1, 3]])
    expected = [[0, 0, 0, 1, 1, 0, 1], [0, 1, 0, 0, 1, 1, 0]]
    assert copyable(windows).int().tolist() == expected


def test_scaling_a_dense_model_is_scaling_its_weights(dense, windows):
    plain = losses(dense, windows)
    with scaled(dense, 0.4, [1]):
        found = losses(dense, windows)
    assert torch.equal(losses(dense, windows), plain)
    with torch.no_grad():
        dense.model.layers[1].mlp.down_proj.weight.mul_(0.4)
        expected = losses(dense, windows)
        dense.model.layers[1].mlp.down_proj.weight.div_(0.4)
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(found, plain, atol=1e-5)


def test_losses_are_those_of_the_model(dense, windows):
    with torch.no_grad():
        expected = dense(windows, labels=windows).loss
    assert losses(dense, windows).shape == (24, 11)
    assert float(losses(dense, windows).mean()) == pytest.approx(float(expected), abs=1e-5)


def block_matrices(model):
    return [m for block in model.model.layers for m in block.modules() if isinstance(m, nn.Linear)]


@pytest.mark.parametrize("how", ["magnitude", "wanda"])
def test_pruned_models_keep_so_many_weights(dense, windows, how):
    all_weights = sum(m.weight.numel() for m in block_matrices(dense))
    kept = all_weights // 3
    found = pruned(dense, kept, how, windows)
    left = sum(int(m.weight.count_nonzero()) for m in block_matrices(found))
    assert left == pytest.approx(kept, rel=0.03)
    for ours, theirs in zip(block_matrices(found), block_matrices(dense), strict=True):
        survived = ours.weight != 0
        assert torch.equal(ours.weight[survived], theirs.weight[survived])
        if how == "magnitude":
            assert theirs.weight[survived].abs().min() >= theirs.weight[~survived].abs().max()
        else:
            assert len(set(survived.sum(1).tolist())) == 1
    assert torch.equal(found.lm_head.weight, dense.lm_head.weight)
    assert all(bool((m.weight != 0).all()) for m in block_matrices(dense))


def test_wanda_by_hand(dense, windows):
    """The first matrix of the first block meets the normed embeddings."""
    found = pruned(dense, sum(m.weight.numel() for m in block_matrices(dense)) // 2, "wanda", windows)
    block = dense.model.layers[0]
    with torch.no_grad():
        x = block.input_layernorm(dense.model.embed_tokens(windows)).reshape(-1, 32)
    score = block.self_attn.q_proj.weight.abs() * x.norm(dim=0)
    survived = found.model.layers[0].self_attn.q_proj.weight != 0
    for row, kept in zip(score, survived, strict=True):
        assert int(kept.sum()) == 16
        assert row[kept].min() >= row[~kept].max()


def test_training_goes_down_and_is_repeatable(windows):
    corpus = Corpus(windows[:16], windows[16:], np.ones(50, dtype=int))
    curves = []
    for _ in range(2):
        model = build("memory", ARGUMENTS, 0)
        before = float(losses(model, windows[:16]).mean())
        curves.append(train(model, corpus, Recipe(20, 8, 1e-2, 3), watched=8))
        assert float(losses(model, windows[:16]).mean()) < before - 0.3
        assert not model.training
    assert curves[0] == curves[1]
    assert [step for step, _ in curves[0]] == [5, 10, 15, 20]
    other = train(build("memory", ARGUMENTS, 0), corpus, Recipe(20, 8, 1e-2, 4), watched=8)
    assert other != curves[0]


def test_the_learning_rate():
    rates = [_schedule(step, 100) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[4] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_windows_and_counts(work):
    corpus = work.corpus
    assert corpus.train.shape[1] == corpus.validation.shape[1] == 16
    assert corpus.counts.sum() == corpus.train.numel()
    assert int(corpus.train.max()) < work.arguments["vocab_size"] == len(corpus.counts)
    ends = corpus.train.flatten() == 0
    assert 0 < int(ends.sum()) < 41
    tokenizer = _trained_tokenizer([words(60, seed) for seed in range(40)], TINY.vocabulary)
    assert tokenizer.decode(corpus.train[0]).startswith(words(60, 0)[:8])


@pytest.mark.parametrize("what", ["dense", "memory", "attention"])
def test_decoding(what):
    call = Decode(what, 32, 2, 2, 64, 3, 5)
    out = call()
    assert out.shape == (3, 6)
    assert torch.equal(out, call())


def test_all_arms_and_what_they_share(work):
    check = MemoryLLMCheck()
    metrics = {name: as_metrics(arm(work)) for name, arm in check.arms().items()}
    for comparison in check.comparisons:
        for name in (comparison.arm, *comparison.baselines):
            found = metrics[name]
            assert (comparison.metric in found.values) != (comparison.metric in found.timed), (comparison.claim, name)
    ours = metrics["memoryllm"]
    assert ours.values["largest logit difference"] == 0
    assert ours.values["perplexity ratio, int8"] == pytest.approx(1, abs=0.01)
    assert ours.values["active parameters"] == count("memory", work.arguments, active=True)
    assert metrics["pruned-wanda"].values["active parameters"] == pytest.approx(
        ours.values["active parameters"], rel=0.03
    )
    assert metrics["pruned-magnitude"].values["perplexity"] > metrics["dense-total"].values["perplexity"]
    rates = [rate for _, rate in ours.curves["hits"]]
    assert rates == sorted(rates)
    assert 0 < rates[0] < rates[-1] <= 1
    model = work.model("memoryllm")
    assert model.model.lookups is None
    with model.memory_scale(0.5):
        halved = float((losses(model, work.corpus.validation) - work.losses("memoryllm")).double().mean())
    assert dict(ours.curves["alpha"])[0.5] == pytest.approx(math.exp(halved), rel=1e-5)
    assert {name for name, found in metrics.items() if found.timed} == {"dense-total", "memoryllm", "attention-only"}
    assert work.model("dense-total") is work.model("dense-total")


def test_hit_rates_count_the_hot_tokens(work):
    table = work.model("memoryllm").precompute_lookups()
    tokens = work.corpus.validation.flatten()[: TINY.looked_up].numpy()
    for share, rate in work._hits(table):
        hot = np.argsort(-work.corpus.counts, kind="stable")[: max(1, round(share * 300))]
        assert rate == pytest.approx(np.isin(tokens, hot).mean())


def test_the_quick_scale_says_what_it_leaves_out(file):
    work = prepared(Request(data=str(file)), Sizes(*[*vars(TINY).values()][:-1], all_arms=False))
    check = MemoryLLMCheck()
    flex = check.arms()["flex-3"](work)
    assert "needs --scale full" in flex.missing["perplexity"]
    assert not flex.values
    assert "needs --scale full" in check.arms()["dense-active"](work).missing["perplexity (all tokens)"]


def test_on_ones_own_model(file, tmp_path):
    tokenizer = _trained_tokenizer([words(200)], 300)
    model = build("memory", {**ARGUMENTS, "vocab_size": len(tokenizer) + 5, "flex_beta": 1}, 0)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    work = prepared(Request(model=str(tmp_path / "model"), data=str(file)), TINY)
    check = MemoryLLMCheck()
    metrics = {name: as_metrics(arm(work)) for name, arm in check.arms().items()}
    ours = metrics["memoryllm"]
    assert {"perplexity ratio, int4", "largest logit difference", "first layer over the next"} <= ours.values.keys()
    assert ours.missing["perplexity (all tokens)"] == NOT_YOURS
    for name in ("dense-total", "dense-active", "flex-3", "pruned-wanda"):
        assert metrics[name].missing["perplexity"] == NOT_YOURS
        assert "perplexity" not in metrics[name].values
    model.attach_lookups(model.precompute_lookups(), free_memory_weights=True)
    model.save_pretrained(tmp_path / "slim")
    tokenizer.save_pretrained(tmp_path / "slim")
    _own_model.cache_clear()
    with pytest.raises(ValueError, match="slim: was saved without its memory weights"):
        prepared(Request(model=str(tmp_path / "slim"), data=str(file)), TINY)
    llama = build("dense", {**dense_sizes(ARGUMENTS), "vocab_size": 300}, 0)
    llama.save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="is a LlamaForCausalLM; must be a MemoryLMForCausalLM"):
        prepared(Request(model=str(tmp_path / "llama"), data=str(file)), TINY)
    own = prepared(Request(data=str(file), options={"tokenizer": str(tmp_path / "llama")}), TINY)
    assert own.arguments["vocab_size"] == len(tokenizer)


def test_own_sizes(file, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"hidden_size": 48, "num_hidden_layers": 1}))
    options = {"config": str(path), "tokens": "200"}
    work = prepared(Request(data=str(file), options=options), TINY)
    assert work.recipe.steps == 200 // 64
    assert work.model("memoryllm").config.hidden_size == 48
    assert "the model has one layer" in work.probes("memoryllm").missing["first layer over the next"]


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("short.txt", "a few words", {}, r"short.txt: has \d+ tokens; must have 512 at least"),
        ("table.csv", "a,b\n1,2\n", {}, "its name must end in .jsonl or .txt"),
        ("blank.txt", "  \n", {}, "is empty; must have text"),
        ("bad.jsonl", '{"texts": "x"}\n', {}, "line 1.*'text'"),
        ("any.txt", words(900), {"tokens": "many"}, "--tokens many: must be a whole number of at least 1"),
        ("any.txt", words(900), {"tokens": "20"}, "--tokens 20: must be at least 64, one step"),
        ("any.txt", words(900), {"config": "/nowhere.json"}, "--config /nowhere.json: cannot be read"),
        ("any.txt", words(900), {"config": "[1]"}, "must be an object with arguments of MemoryLMConfig"),
        ("any.txt", words(900), {"config": '{"flex_beta": 1}'}, "'flex_beta' is not one of hidden_size"),
        ("any.txt", words(900), {"config": '{"hidden_size": 30}'}, "config.json: .*even rotary dimension"),
        ("any.txt", words(900), {"config": '{"hidden_size": 31}'}, "not a multiple of the number of attention heads"),
        ("any.txt", words(900), {"tokenizer": "/nowhere/at/all"}, "--tokenizer /nowhere/at/all: cannot be loaded"),
    ],
)
def test_it_refuses(tmp_path, name, content, options, message):
    path = tmp_path / name
    path.write_text(content)
    options = dict(options)
    if "config" in options and not options["config"].startswith("/"):
        (tmp_path / "config.json").write_text(options["config"])
        options["config"] = str(tmp_path / "config.json")
    with pytest.raises(ValueError, match=message):
        prepared(Request(data=str(path), options=options), TINY)


def test_remarks_tell_the_crossing_and_the_limit():
    shares = (25, 50, 75, 100)
    ours = {f"perplexity at {share} %": 100.0 for share in shares} | {"decode tokens/s": 90.0}
    dense = {f"perplexity at {share} %": 200.0 - share for share in shares}
    means = {"memoryllm": ours, "dense-total": dense, "attention-only": {"decode tokens/s": 100.0}}
    crossing, limit = MemoryLLMCheck().remarks(means)
    assert "0.571 at 25 %" in crossing
    assert "the dense model is ahead from 100 % on" in crossing
    assert "0.90 of the speed" in limit
    dense["perplexity at 100 %"] = 120.0
    assert "have not crossed" in next(iter(MemoryLLMCheck().remarks(means)))
    assert list(MemoryLLMCheck().remarks({})) == []


def test_one_training_step_by_hand():
    """The loss that is minimised is that of the next token."""
    windows = torch.randint(0, 50, (4, 12), generator=torch.Generator().manual_seed(0))
    model, reference = build("memory", ARGUMENTS, 0), build("memory", ARGUMENTS, 0)
    train(model, Corpus(windows, windows, np.ones(50, dtype=int)), Recipe(1, 4, 1e-3, 0))
    logits = reference(windows).logits
    cross_entropy(logits[:, :-1].reshape(-1, 50), windows[:, 1:].reshape(-1)).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        moved = ours.detach() - theirs.detach()
        clear = theirs.grad.abs() > 0.05 * theirs.grad.abs().max()
        # The first step of Adam has the sign of the gradient, and the size of the rate.
        decay = 1 - 1e-3 * (0.1 if theirs.ndim > 1 else 0.0)
        step = (moved + (1 - decay) * theirs.detach())[clear]
        assert torch.allclose(step, -1e-3 * theirs.grad[clear].sign(), rtol=0.05)
