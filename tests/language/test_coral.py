"""CORAL: known values, planted data, what it refuses, and its places in transformers and lm-eval."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.utils.estimator_checks import check_estimator
from tokenizers import Tokenizer, models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from practicum.cli import main
from practicum.datasets.questions import MCQuestion, mcq_topics
from practicum.language.coral import (
    Coral,
    CoralForMultipleChoice,
    CoralLogitsProcessor,
    CoralProbe,
    ResidualSteering,
    evaluate_scores,
    steer,
)
from practicum.language.coral.estimator import WEIGHT_DECAYS
from practicum.toolbox.calibration import brier
from practicum.toolbox.choices import ChoiceScorer, ChoiceScores
from practicum.toolbox.errors import InputError
from practicum.toolbox.taps import Taps

SIZES = {"vocab_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 16}


def tiny(kind, seed=0):
    """A model of random weights, large enough that its answers differ."""
    configs = {
        "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, intermediate_size=32)),
        "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, intermediate_size=32, num_key_value_heads=1)),
        "gpt2": (GPT2LMHeadModel, GPT2Config(vocab_size=128, n_layer=4, n_head=2, n_embd=16)),
    }
    cls, config = configs[kind]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cls(config).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def tokenizer():
    """One token a character."""
    vocabulary = {chr(i): i for i in range(128)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocabulary, [], unk_token="?")),
        pad_token="\x00",
        eos_token="\x01",
        unk_token="?",
    )


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


@pytest.fixture(scope="module")
def questions():
    return list(mcq_topics(12, topics=["add", "mul", "http", "element"]).questions)


def planted(n=400, d=16, signal=1.5, sizes=(2, 3, 4), seed=0, layers=(1,)):
    """Activations that know the answer beside scores that do not."""
    rng = np.random.default_rng(seed)
    K = rng.choice(sizes, size=n)
    y = np.array([rng.integers(k) for k in K])
    direction = rng.normal(size=d)
    direction /= np.linalg.norm(direction)
    logits = [rng.normal(size=k) for k in K]
    hidden = {}
    for layer in layers:
        rows = []
        for k, gold in zip(K, y, strict=True):
            h = rng.normal(size=(k, d)) + rng.normal(size=d)
            h[gold] += signal * 2 * direction
            rows.append(h.astype(np.float16))
        hidden[layer] = rows
    return ChoiceScores(logits, hidden), y


def softmax(row):
    e = np.exp(row - np.max(row))
    return e / e.sum()


def same(one, other, atol=0.0):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


# Known values


def test_the_steering_of_one_question():
    np.testing.assert_allclose(steer([0.7, 0.3], [-0.3, 0.3]), [0.4, 0.6])
    np.testing.assert_allclose(steer([0.05, 0.95], [-0.2, 0.2]), np.array([1e-4, 1.15]) / 1.1501)
    np.testing.assert_allclose(steer([0.7, 0.3], [-0.3, 0.3], alpha=0.5), [0.55, 0.45])
    np.testing.assert_allclose(
        steer([0.7, 0.3], [-0.3, 0.3], alpha=2.0, space="logit"), softmax(np.log([0.7, 0.3]) + np.array([-0.6, 0.6]))
    )


@given(
    st.lists(st.floats(-30, 30), min_size=2, max_size=8),
    st.floats(0, 2),
    st.sampled_from(["prob", "logit"]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_steered_probabilities_sum_to_one_and_move_with_their_options(logits, alpha, space, seed):
    rng = np.random.default_rng(seed)
    p, g = softmax(np.array(logits)), rng.normal(scale=0.5, size=len(logits))
    steered = steer(p, g, alpha, space)
    assert abs(steered.sum() - 1) < 1e-12
    assert (steered >= 0).all()
    order = rng.permutation(len(p))
    np.testing.assert_allclose(steer(p[order], g[order], alpha, space), steered[order], rtol=1e-12)
    np.testing.assert_array_equal(steer(p, g, 0.0, space), p)
    np.testing.assert_allclose(steer(p, np.zeros_like(g), alpha, space), p, atol=1e-12)


def test_what_steer_refuses():
    with pytest.raises(InputError, match="residual: has shape"):
        steer([0.5, 0.5], [0.1])
    with pytest.raises(InputError, match="space='odds': must be 'prob' or 'logit'"):
        steer([0.5, 0.5], [0.1, -0.1], space="odds")


# The estimator


@pytest.mark.parametrize("space", ["prob", "logit"])
def test_without_strength_it_is_the_softmax(space):
    scores, y = planted(100)
    coral = Coral(alpha=0.0, temperature="none", space=space, epochs=1, random_state=0).fit(scores, y)
    same(coral.predict_proba(scores), [softmax(row) for row in scores.logits], atol=1e-7)


def test_an_untrained_probe_is_the_identity():
    scores, y = planted(60)
    coral = Coral(epochs=1, lr=1e-12, temperature="none", random_state=0).fit(scores, y)
    same(coral.predict_proba(scores), [softmax(row) for row in scores.logits], atol=1e-7)


def test_planted_correctness_is_found_where_probabilities_know_nothing():
    scores, y = planted(600)
    train, test = scores.take(range(400)), scores.take(range(400, 600))
    coral = Coral(random_state=0).fit(train, y[:400])
    base = np.mean([row.argmax() == gold for row, gold in zip(test.logits, y[400:], strict=True)])
    assert base < 0.5
    assert np.mean(coral.predict(test) == y[400:]) > 0.9
    assert brier(coral.predict_proba(test), y[400:]) < 0.25


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_noise_costs_nothing_when_tuned(seed):
    scores, y = planted(300, signal=0.0, seed=seed)
    coral = Coral(tune="cv", epochs=10, random_state=seed).fit(scores.take(range(200)), y[:200])
    test = scores.take(range(200, 300))
    assert brier(coral.predict_proba(test), y[200:]) < brier(coral.base_proba(test), y[200:]) + 0.01


def test_strong_decay_leaves_the_base():
    scores, y = planted(200)
    coral = Coral(weight_decay=1e3, temperature="none", random_state=0).fit(scores, y)
    assert max(np.abs(g).max() for g in coral.residual(scores)) < 0.02
    np.testing.assert_array_equal(coral.predict(scores), [row.argmax() for row in coral.base_proba(scores)])


def test_the_loss_is_the_brier_score_of_the_sum():
    scores, y = planted(100)
    coral = Coral(temperature="none", random_state=0).fit(scores, y)
    added = [p + g for p, g in zip(coral.base_proba(scores), coral.residual(scores), strict=True)]
    hits = [np.eye(len(p))[gold] for p, gold in zip(added, y, strict=True)]
    loss = np.mean(np.concatenate([(hit - p) ** 2 for hit, p in zip(hits, added, strict=True)]))
    X = np.concatenate([h.astype(np.float32) - h.astype(np.float32).mean(axis=0) for h in scores.hidden[1]])
    target = np.concatenate([hit - softmax(row) for hit, row in zip(hits, scores.logits, strict=True)])
    assert loss == pytest.approx(np.mean((target - coral.probe_.predict(X)) ** 2), rel=1e-5)


def test_without_a_hidden_layer_it_is_ridge_regression():
    scores, y = planted(150)
    coral = Coral(hidden=0, weight_decay=7.0, temperature="none").fit(scores, y)
    X = np.concatenate([h.astype(np.float64) - h.astype(np.float64).mean(axis=0) for h in scores.hidden[1]])
    Z = (X - X.mean(axis=0)) / (X.std(axis=0) + 1e-4)
    target = np.concatenate([np.eye(len(row))[gold] - softmax(row) for row, gold in zip(scores.logits, y, strict=True)])
    expected = Ridge(alpha=7.0).fit(Z, target).predict(Z)
    np.testing.assert_allclose(np.concatenate(coral.residual(scores)), expected, atol=1e-5)


def test_permuted_options_get_permuted_probabilities():
    scores, y = planted(120)
    coral = Coral(epochs=5, random_state=0).fit(scores, y)
    rng = np.random.default_rng(1)
    orders = [rng.permutation(len(row)) for row in scores.logits]
    moved = ChoiceScores(
        [row[order] for row, order in zip(scores.logits, orders, strict=True)],
        {1: [h[order] for h, order in zip(scores.hidden[1], orders, strict=True)]},
    )
    expected = [p[order] for p, order in zip(coral.predict_proba(scores), orders, strict=True)]
    same(coral.predict_proba(moved), expected, atol=1e-6)


def test_the_residual_is_the_default_target_and_correctness_another():
    scores, y = planted(200)
    assert Coral().target == "residual"
    other = Coral(target="correctness", temperature="none", random_state=0).fit(scores, y)
    summed = [p + g for p, g in zip(other.base_proba(scores), other.residual(scores), strict=True)]
    X = np.concatenate([h.astype(np.float32) - h.astype(np.float32).mean(axis=0) for h in scores.hidden[1]])
    np.testing.assert_allclose(np.concatenate(summed), other.probe_.predict(X), atol=1e-6)
    none = clone(other).set_params(alpha=0.0).fit(scores, y)
    same(none.predict_proba(scores), [softmax(row) for row in scores.logits], atol=1e-12)


def test_the_same_random_state_gives_the_same_probe():
    scores, y = planted(150)
    first, second, third = (Coral(epochs=5, random_state=s).fit(scores, y) for s in (3, 3, 4))
    same(first.predict_proba(scores), second.predict_proba(scores))
    assert any((a != b).any() for a, b in zip(first.residual(scores), third.residual(scores), strict=True))
    before = torch.get_rng_state()
    Coral(epochs=1, random_state=0).fit(scores, y)
    assert torch.equal(before, torch.get_rng_state())


def test_the_layer_that_knows_is_chosen():
    scores, y = planted(200, layers=(1, 2, 3))
    K = [len(row) for row in scores.logits]
    rng = np.random.default_rng(2)
    blind = [rng.normal(size=(k, 16)).astype(np.float16) for k in K]
    mixed = ChoiceScores(scores.logits, {4: blind, 9: scores.hidden[2], 12: blind})
    coral = Coral(epochs=5, random_state=0).fit(mixed, y)
    assert coral.layer_ == 9
    assert coral.cv_brier_[9] < min(coral.cv_brier_[4], coral.cv_brier_[12])
    both = Coral(layer=[4, 9], epochs=5, random_state=0).fit(mixed, y)
    assert (both.layer_, both.n_features_in_) == ((4, 9), 32)


def test_what_is_tuned_is_chosen_on_whole_groups(monkeypatch):
    scores, y = planted(120)
    groups = np.repeat(["a", "b", "c", "d"], 30)
    coral = Coral(tune="cv", epochs=2, random_state=0).fit(scores, y, groups)
    assert set(coral.cv_brier_) == {(decay, alpha) for decay in WEIGHT_DECAYS for alpha in (0.0, 0.25, 0.5, 1.0)}
    assert coral.weight_decay_ in WEIGHT_DECAYS
    seen = []
    original = Coral._fit_probe

    def spy(self, X, work, chosen, *rest):
        seen.append(set(groups[chosen]))
        return original(self, X, work, chosen, *rest)

    monkeypatch.setattr(Coral, "_fit_probe", spy)
    Coral(tune="cv", epochs=1, random_state=0).fit(scores, y, groups)
    assert len(seen) == 4 * len(WEIGHT_DECAYS) + 1
    assert [len(inside) for inside in seen] == [3] * (4 * len(WEIGHT_DECAYS)) + [4]


def test_ties_go_to_more_decay_and_less_strength():
    hidden = [np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float16)] * 40
    scores = ChoiceScores([np.array([60.0, 0.0])] * 40, {1: hidden})
    coral = Coral(tune="cv", temperature="none", epochs=1, random_state=0).fit(scores, np.zeros(40, int))
    assert (coral.weight_decay_, coral.alpha_) == (max(WEIGHT_DECAYS), 0.0)


@pytest.mark.parametrize("hidden", [0, 32])
@pytest.mark.parametrize("layer", ["auto", [1, 2]])
def test_saved_and_loaded_it_says_the_same_bit_by_bit(tmp_path, hidden, layer):
    scores, y = planted(100, layers=(1, 2))
    coral = Coral(hidden=hidden, layer=layer, epochs=3, random_state=0).fit(scores, y)
    coral.save(tmp_path / "coral")
    again = Coral.load(tmp_path / "coral")
    same(again.predict_proba(scores), coral.predict_proba(scores))
    assert again.get_params() == {**coral.get_params(), "layer": again.layer}
    assert again.layer_ == coral.layer_
    files = sorted(path.name for path in (tmp_path / "coral").rglob("*") if path.is_file())
    assert all(name.endswith((".json", ".safetensors")) for name in files), files


def test_what_is_not_a_saved_probe_is_refused(tmp_path):
    with pytest.raises(InputError, match="nowhere.*cannot be read"):
        Coral.load(tmp_path / "nowhere")
    (tmp_path / "coral.json").write_text('{"format": 1}')
    with pytest.raises(InputError, match="is not what Coral.save writes"):
        Coral.load(tmp_path)
    (tmp_path / "coral.json").write_text('{"format": 99}')
    with pytest.raises(InputError, match="has format 99"):
        Coral.load(tmp_path)


def test_scikit_learns_own_battery_on_the_probe():
    outcomes = check_estimator(CoralProbe(epochs=20), on_skip=None)
    left_out = {outcome["check_name"] for outcome in outcomes if outcome["status"] != "passed"}
    assert left_out <= {"check_array_api_input"}


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 7}, "layer=7: the scores have the layers 1"),
        ({"layer": "best"}, "layer='best': must be 'auto'"),
        ({"layer": []}, "layer=.*must have one layer at least"),
        ({"weight_decay": -1}, "weight_decay=-1: must be a number, 0 or more"),
        ({"weight_decay": float("nan")}, "weight_decay=nan: must be"),
        ({"alpha": -0.5}, "alpha=-0.5: must be a number, 0 or more"),
        ({"mode": "essay"}, "mode='essay': must be 'continuation' or 'letter'"),
        ({"center": "batch"}, "center='batch': must be 'question' or None"),
        ({"target": "truth"}, "target='truth': must be 'residual' or 'correctness'"),
        ({"temperature": 2.0}, "temperature=2.0: must be 'fit' or 'none'"),
        ({"space": "odds"}, "space='odds': must be"),
        ({"tune": "grid"}, "tune='grid': must be None or 'cv'"),
        ({"hidden": -1}, "hidden=-1: must be a whole number"),
        ({"epochs": 0}, "epochs=0: must be a whole number"),
        ({"lr": 0}, "lr=0: must be a number above 0"),
    ],
)
def test_an_argument_out_of_range_is_named(options, message):
    scores, y = planted(30)
    with pytest.raises(ValueError, match=message):
        Coral(**options).fit(scores, y)


def test_answers_that_cannot_be_are_named():
    scores, y = planted(30)
    answers = [int(gold) for gold in y]
    for wrong, message in (
        ([None, *answers[1:]], r"y\[0\]=None: every question must have its answer"),
        ([answers[0], 9, *answers[2:]], r"y\[1\]=9: must be the index of an option, 0 to"),
        ([-1, *answers[1:]], r"y\[0\]=-1"),
        ([0.5, *answers[1:]], r"y\[0\]=0.5"),
        (answers[1:], "y: has 29 answers; must have one for each of 30"),
    ):
        with pytest.raises(ValueError, match=message):
            Coral(epochs=1).fit(scores, wrong)
    with pytest.raises(ValueError, match="groups: has 2 values"):
        Coral(epochs=1).fit(scores, answers, groups=["a", "b"])


def test_scores_that_cannot_be_are_named():
    scores, y = planted(30)
    rows = list(scores.hidden[1])
    rows[3] = np.full_like(rows[3], np.inf)
    with pytest.raises(ValueError, match="activations of layer 1 are not finite"):
        Coral(epochs=1).fit(ChoiceScores(scores.logits, {1: rows}), y)
    with pytest.raises(ValueError, match=r"scores.hidden\[1\]: has 29 questions; must have 30"):
        Coral(epochs=1).fit(ChoiceScores(scores.logits, {1: scores.hidden[1][1:]}), y)
    logits = list(scores.logits)
    logits[2] = np.array([np.nan, 0.0])
    with pytest.raises(ValueError, match=r"scores.logits\[2\]: has nan"):
        Coral(epochs=1).fit(ChoiceScores(logits, scores.hidden), y)
    with pytest.raises(ValueError, match="scores: have no activations"):
        Coral(epochs=1).fit(ChoiceScores(scores.logits, {}), y)
    with pytest.raises(ValueError, match="scores: are empty"):
        Coral(epochs=1).fit(ChoiceScores([], {}), [])
    letters = {1: [np.repeat(h[:1], len(h), axis=0) for h in scores.hidden[1]]}
    with pytest.raises(ValueError, match="must be 'letter' for letter scores"):
        Coral(epochs=1).fit(ChoiceScores(scores.logits, letters), y)
    fitted = Coral(epochs=1).fit(scores, y)
    with pytest.raises(ValueError, match="scores: lack layer 1; they have 5"):
        fitted.predict(ChoiceScores(scores.logits, {5: scores.hidden[1]}))
    with pytest.raises(ValueError, match="scores: have 8 features; fitted on 16"):
        fitted.predict(ChoiceScores(scores.logits, {1: [h[:, :8] for h in scores.hidden[1]]}))


def test_certain_and_right_leaves_nothing_to_correct():
    rng = np.random.default_rng(0)
    y = rng.integers(3, size=60)
    logits = [np.where(np.arange(3) == gold, 40.0, 0.0) for gold in y]
    hidden = [rng.normal(size=(3, 8)).astype(np.float16) for _ in y]
    scores = ChoiceScores(logits, {1: hidden})
    coral = Coral(random_state=0).fit(scores, y)
    same(coral.predict_proba(scores), [softmax(row) for row in logits], atol=1e-3)


def test_features_that_do_not_vary_count_nothing():
    scores, y = planted(200)
    wider = {1: [np.hstack([h, np.full((len(h), 3), 5.0, dtype=np.float16)]) for h in scores.hidden[1]]}
    plain = ChoiceScores(scores.logits, wider)
    coral = Coral(hidden=0, center=None).fit(plain, y)
    np.testing.assert_allclose(coral.direction(plain)[-3:], 0, atol=1e-9)
    assert np.isfinite(np.concatenate(Coral(epochs=2, random_state=0).fit(plain, y).predict_proba(plain))).all()


# Questions and models


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_from_questions_to_answers_with_any_architecture(kind, tokenizer, questions):
    model = tiny(kind)
    ids = torch.tensor([[65, 66, 67]])
    with torch.no_grad():
        before = model(ids).logits
    steered = CoralForMultipleChoice(model, tokenizer, epochs=3, random_state=0).fit(questions)
    assert steered.coral_.layer_ in (1, 2, 3, 4)
    ragged = [replace(questions[0], choices=questions[0].choices[:2], answer=None), *questions[1:6]]
    p = steered.predict_proba(ragged)
    assert [len(row) for row in p] == [2, 4, 4, 4, 4, 4]
    assert all(abs(row.sum() - 1) < 1e-9 for row in p)
    np.testing.assert_array_equal(steered.predict(ragged), [row.argmax() for row in p])
    with torch.no_grad():
        assert torch.equal(before, model(ids).logits)


def test_the_whole_way_is_scorer_and_estimator(llama, tokenizer, questions):
    steered = CoralForMultipleChoice(llama, tokenizer, layer=3, epochs=3, random_state=0).fit(questions)
    scores = ChoiceScorer(llama, tokenizer, layers=[3])(questions)
    groups = [question.group for question in questions]
    y = [question.answer for question in questions]
    alone = Coral(layer=3, epochs=3, random_state=0).fit(scores, y, groups)
    same(steered.predict_proba(questions), alone.predict_proba(scores))


def test_bad_questions_are_named(llama, tokenizer, questions):
    steered = CoralForMultipleChoice(llama, tokenizer, layer=2, epochs=1)
    good = questions[0]
    for wrong, message in (
        (replace(good, choices=("one",), answer=0), r"questions\[1\]: has 1 choices"),
        (replace(good, choices=("a", "a"), answer=0), r"questions\[1\]: choice 'a' is there twice"),
        (replace(good, choices=("a", " "), answer=0), r"questions\[1\]: choices\[1\] is empty"),
        (replace(good, answer=7), r"questions\[1\]: answer=7"),
        (replace(good, answer=None), r"questions\[1\]: has no answer"),
    ):
        with pytest.raises(ValueError, match=message):
            steered.fit([good, wrong])
    with pytest.raises(ValueError, match="is not fitted"):
        steered.predict(questions)


def test_arguments_of_the_whole_way(llama, tokenizer):
    for options, message in (
        ({"layer": 5}, "layer=5: must be from 0 .* to 4"),
        ({"layer": -1}, "layer=-1: must be from 0"),
        ({"mode": "essay"}, "mode='essay'"),
        ({"n_permutations": 0}, "n_permutations=0"),
    ):
        with pytest.raises(ValueError, match=message):
            CoralForMultipleChoice(llama, tokenizer, **options)
    with pytest.raises(TypeError, match="weightdecay"):
        CoralForMultipleChoice(llama, tokenizer, weightdecay=1)


def test_evaluate_tells_base_and_steered_apart(llama, tokenizer, questions):
    scores, y = planted(300)
    coral = Coral(epochs=10, random_state=0).fit(scores.take(range(200)), y[:200])
    found = evaluate_scores(coral, scores.take(range(200, 300)), y[200:])
    assert list(found.metrics) == ["accuracy", "ece", "brier", "nll", "auroc"]
    accuracy = found.metrics["accuracy"]
    assert accuracy.difference == pytest.approx(accuracy.steered - accuracy.base)
    assert 0 < accuracy.low < accuracy.difference < accuracy.high
    assert found.metrics["brier"].high < 0
    assert "accuracy" in str(found)
    drawn = [trace.name for trace in found.figure().data if trace.showlegend]
    assert [name.split(" (")[0] for name in drawn] == ["base", "temperature", "CORAL"]


# Letters and generation


@pytest.fixture(scope="module")
def lettered(llama, tokenizer, questions):
    return CoralForMultipleChoice(
        llama, tokenizer, mode="letter", layer=3, temperature="none", epochs=20, weight_decay=0.0, random_state=0
    ).fit(questions)


def answer(model, tokenizer, prompts, processors=(), **options):
    """Scores and tokens of greedy generation, the prompts padded on the left."""
    rows = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return model.generate(
        input_ids=ids, attention_mask=mask, logits_processor=list(processors), max_new_tokens=3, do_sample=False,
        return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 2}], ids=["cache", "no cache", "beams"])
def test_the_generated_letter_has_the_steered_probability(llama, tokenizer, questions, lettered, options):
    asked = questions[:3]
    prompts = [lettered.prompt(question) for question in asked]
    processor = lettered.logits_processor("ABCD")
    plain = answer(llama, tokenizer, prompts, **options)
    with lettered.attach():
        steered = answer(llama, tokenizer, prompts, [processor], **options)
        again = answer(llama, tokenizer, prompts, [processor], **options)
    assert torch.equal(steered.scores[0], again.scores[0])
    n_beams = options.get("num_beams", 1)
    before, after = plain.scores[0][::n_beams], steered.scores[0][::n_beams]
    got = torch.softmax(after[:, processor.letter_ids].double(), dim=1).numpy()
    same(list(got), lettered.predict_proba(asked), atol=2e-3)
    untouched = [i for i in range(128) if i not in processor.letter_ids]
    torch.testing.assert_close(after[:, untouched], before[:, untouched])
    mass = [torch.logsumexp(scores[:, processor.letter_ids], dim=1) for scores in (before, after)]
    torch.testing.assert_close(*mass, rtol=0, atol=1e-4)
    base = torch.softmax(before[:, processor.letter_ids].double(), dim=1).numpy()
    assert np.abs(base - got).max() > 0.05
    if not options.get("num_beams"):
        # Later positions are the model's own, given what was generated before.
        row = torch.cat([torch.tensor(tokenizer(prompts[0])["input_ids"]), steered.sequences[0, -3:-2]])
        alone = answer(llama, tokenizer, prompts[:1])
        with torch.no_grad():
            logits = llama(row[None]).logits[0, -1]
        assert int(logits.argmax()) == int(steered.sequences[0, -2])
        assert alone.sequences.shape[1] == len(tokenizer(prompts[0])["input_ids"]) + 3


def test_with_strength_zero_generation_is_as_it_was(llama, tokenizer, questions):
    idle = CoralForMultipleChoice(
        llama, tokenizer, mode="letter", layer=2, alpha=0.0, temperature="none", epochs=1, random_state=0
    ).fit(questions)
    prompts = [idle.prompt(question) for question in questions[:4]]
    plain = answer(llama, tokenizer, prompts)
    with idle.attach():
        steered = answer(llama, tokenizer, prompts, [idle.logits_processor("ABCD")])
    assert torch.equal(plain.sequences, steered.sequences)
    torch.testing.assert_close(plain.scores[0], steered.scores[0], rtol=0, atol=1e-5)


def n_hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def stopped_inside(steered):
    with steered.attach():
        assert n_hooks(steered.model) > 0
        raise KeyError("stop")


def test_hooks_are_gone_whatever_happens(llama, lettered):
    ids = torch.tensor([[65, 66, 67]])
    with torch.no_grad():
        before = llama(ids).logits
    assert n_hooks(llama) == 0
    with pytest.raises(KeyError, match="stop"):
        stopped_inside(lettered)
    for _ in range(2):
        with lettered.attach(), lettered.attach():
            assert n_hooks(llama) > 0
    assert n_hooks(llama) == 0
    assert lettered.coral_.watch is None
    with torch.no_grad():
        assert torch.equal(before, llama(ids).logits)


def test_what_generation_refuses(llama, tokenizer, questions, lettered):
    with pytest.raises(RuntimeError, match="must run inside `with coral.attach"):
        answer(llama, tokenizer, ["Answer:"], [lettered.logits_processor("AB")])
    with pytest.raises(InputError, match="letters='XY': must be the letters from A on"):
        lettered.logits_processor("XY")
    with pytest.raises(InputError, match="the probe was fitted on 4 at most"):
        lettered.logits_processor("ABCDE")
    with pytest.raises(InputError, match="must be two different tokens at least"):
        CoralLogitsProcessor(lettered.coral_, [65, 65])
    with (
        pytest.raises(InputError, match="is not the one that the probe was fitted on"),
        lettered.attach(tiny("llama", 1)),
    ):
        pass
    told = CoralForMultipleChoice(llama, tokenizer, layer=2, epochs=1, random_state=0).fit(questions)
    with pytest.raises(InputError, match="must be 'letter'"), told.attach():
        pass
    with pytest.raises(InputError, match="fitted on continuation scores"):
        told.logits_processor("AB")


def test_a_letter_that_is_always_right_is_not_learned(llama, tokenizer, questions):
    always = []
    for question in questions:
        others = [choice for i, choice in enumerate(question.choices) if i != question.answer]
        always.append(replace(question, choices=(question.choices[question.answer], *others), answer=0))
    options = {"mode": "letter", "layer": 3, "random_state": 0}
    with pytest.warns(UserWarning, match="the right option of every question is A"):
        steered = CoralForMultipleChoice(llama, tokenizer, n_permutations=8, **options).fit(always)
    scores = steered.scorer(always)
    towards_a = np.mean([g - g.mean() for g in steered.coral_.residual(scores)], axis=0)[0]
    with pytest.warns(UserWarning, match="the right option of every question is A"):
        fooled = CoralForMultipleChoice(llama, tokenizer, n_permutations=1, **options).fit(always)
    learned = np.mean([g - g.mean() for g in fooled.coral_.residual(scores)], axis=0)[0]
    assert learned > 0.2
    assert abs(towards_a) < learned / 3


def test_copies_of_a_question_stay_on_one_side(llama, tokenizer, questions, monkeypatch):
    seen = []
    original = Coral.fit

    def spy(self, scores, y, groups=None):
        seen.append((len(y), list(groups)))
        return original(self, scores, y, groups)

    monkeypatch.setattr(Coral, "fit", spy)
    ungrouped = [replace(question, group=None) for question in questions]
    CoralForMultipleChoice(llama, tokenizer, mode="letter", layer=2, epochs=1, random_state=0).fit(ungrouped)
    n, groups = seen[0]
    assert n == 4 * len(questions)
    assert groups == list(range(len(questions))) * 4


def test_letters_that_are_no_tokens_are_named(llama, questions):
    lacking = {chr(i): i for i in range(128) if chr(i) != "C"}
    odd = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(lacking, [], unk_token="?")), pad_token="\x00", unk_token="?"
    )
    with pytest.raises(ValueError, match="letter C"):
        CoralForMultipleChoice(llama, odd, mode="letter", layer=2, epochs=1).fit(questions)
    many = [MCQuestion("Which?", [f"option {i}" for i in range(27)], i) for i in (0, 1)]
    with pytest.raises(ValueError, match=r"questions\[0\]: has 27 choices"):
        CoralForMultipleChoice(llama, odd, mode="letter", layer=2, epochs=1).fit(many)


# The residual stream


def test_a_vector_is_added_to_the_residual_stream_and_gone_again(llama, tokenizer, questions):
    scores = ChoiceScorer(llama, tokenizer, layers=[2])(questions)
    y = [question.answer for question in questions]
    steering = ResidualSteering(layer=2, strength=3.0).fit(scores, y)
    differences = [
        h[gold].astype(float) - np.delete(h, gold, axis=0).astype(float).mean(axis=0)
        for h, gold in zip(scores.hidden[2], y, strict=True)
    ]
    np.testing.assert_allclose(steering.vector_, np.mean(differences, axis=0), rtol=1e-5)
    ids = torch.tensor([[65, 66, 67]])
    with torch.no_grad(), Taps(llama, [2]) as taps:
        before, plain = llama(ids).logits, taps[2].clone()
        with steering.attach(llama), Taps(llama, [2]) as inner:
            llama(ids)
            moved = inner[2].clone()
        after = llama(ids).logits
    torch.testing.assert_close(
        moved - plain, torch.from_numpy(3.0 * steering.vector_).expand(1, 3, -1), atol=1e-5, rtol=1e-4
    )
    assert torch.equal(before, after)


def test_the_direction_of_the_probe_raises_what_the_probe_predicts():
    scores, y = planted(400, layers=(3,))
    coral = Coral(epochs=20, random_state=0).fit(scores, y)
    steering = ResidualSteering.from_coral(coral, scores, y)
    differing = ResidualSteering(layer=3).fit(scores, y)
    assert np.linalg.norm(steering.vector_) == pytest.approx(np.linalg.norm(differing.vector_), rel=1e-4)
    cosine = steering.vector_ @ differing.vector_ / np.linalg.norm(differing.vector_) ** 2
    assert cosine > 0.8
    with pytest.raises(InputError, match="a direction needs one"):
        ResidualSteering.from_coral(Coral(layer=[3, 3], epochs=1).fit(scores, y), scores, y)
    with pytest.raises(InputError, match="layer=8: the scores have the layers 3"):
        ResidualSteering(layer=8).fit(scores, y)


# lm-eval


@pytest.fixture(scope="module")
def task(questions, tmp_path_factory):
    """A multiple-choice task of lm-eval on local files, with the questions as its test set."""
    folder = tmp_path_factory.mktemp("task")
    rows = [{"question": q.question, "choices": list(q.choices), "answer": q.answer} for q in questions]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "task": "tiny_mcq",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "test.jsonl")}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": " ",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
    }


def evaluated(language_model, task):
    import lm_eval
    from lm_eval.api.task import ConfigurableTask

    tasks = {"tiny_mcq": ConfigurableTask(config=dict(task))}
    found = lm_eval.evaluate(lm=language_model, task_dict=tasks, bootstrap_iters=0, log_samples=True)
    return found["results"]["tiny_mcq"]["acc,none"], found["samples"]["tiny_mcq"]


def test_lm_eval_sees_the_steered_answers(llama, tokenizer, questions, task, tmp_path):
    from practicum.language.coral.lm_eval_model import CoralLM

    steered = CoralForMultipleChoice(llama, tokenizer, layer=3, epochs=30, weight_decay=0.0, random_state=0).fit(
        questions
    )
    steered.coral_.save(tmp_path / "coral")
    options = {"pretrained": llama, "tokenizer": tokenizer, "device": "cpu", "batch_size": 4}
    accuracy, samples = evaluated(CoralLM(coral=str(tmp_path / "coral"), **options), task)
    p = steered.predict_proba(questions)
    y = [question.answer for question in questions]
    assert accuracy == pytest.approx(np.mean([row.argmax() == gold for row, gold in zip(p, y, strict=True)]))
    by_document = {sample["doc_id"]: [float(log) for log, _ in sample["filtered_resps"]] for sample in samples}
    for i, row in enumerate(p):
        np.testing.assert_allclose(np.exp(by_document[i]), row, atol=5e-3)

    from lm_eval.models.huggingface import HFLM

    plain, _ = evaluated(HFLM(**options), task)
    base = steered.coral_.base_proba(steered.scorer(questions), temperature=1.0)
    assert plain == pytest.approx(np.mean([row.argmax() == gold for row, gold in zip(base, y, strict=True)]))
    assert accuracy > plain + 0.1


def test_what_is_no_question_is_left_to_lm_eval(llama, tokenizer, questions):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from practicum.language.coral.lm_eval_model import CoralLM

    coral = CoralForMultipleChoice(llama, tokenizer, layer=2, epochs=1, random_state=0).fit(questions).coral_
    options = {"pretrained": llama, "tokenizer": tokenizer, "device": "cpu", "batch_size": 4}
    asked = [("Once upon", " a time"), ("", " yes"), ("", " no"), ("Is it?", " yes"), ("Is it?", " no")]
    documents = [0, 1, 1, 2, 2]
    requests = [
        Instance("loglikelihood", {}, pair, i, ("t", document, 1))
        for i, (pair, document) in enumerate(zip(asked, documents, strict=True))
    ]
    ours = CoralLM(coral=coral, **options).loglikelihood(requests, disable_tqdm=True)
    theirs = HFLM(**options).loglikelihood(requests, disable_tqdm=True)
    for i in range(3):
        assert ours[i] == pytest.approx(theirs[i])
    assert np.exp(ours[3][0]) + np.exp(ours[4][0]) == pytest.approx(1)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    with pytest.raises(InputError, match="is not the one that the probe was fitted on"):
        CoralLM(coral=coral, pretrained=tiny("llama", 1), tokenizer=tokenizer, device="cpu")


def test_letters_are_steered_in_lm_eval_too(llama, tokenizer, questions, lettered):
    from lm_eval.api.instance import Instance

    from practicum.language.coral.lm_eval_model import CoralLM

    language_model = CoralLM(coral=lettered.coral_, pretrained=llama, tokenizer=tokenizer, device="cpu")
    letter = tokenizer.decode(lettered.logits_processor("ABCD").letter_ids[0])
    requests = [
        Instance("loglikelihood", {}, (lettered.prompt(questions[0]), chr(ord(letter) + i)), i, ("t", 0, 1))
        for i in range(4)
    ]
    answers = language_model.loglikelihood(requests, disable_tqdm=True)
    np.testing.assert_allclose(np.exp([log for log, _ in answers]), lettered.predict_proba(questions[:1])[0], atol=5e-3)


def test_its_name_is_registered_where_it_is_imported():
    from lm_eval.api.registry import get_model

    import practicum.language.coral.lm_eval_model as room

    assert get_model("practicum-coral") is room.CoralLM


# The program


@pytest.fixture(scope="module")
def folder(llama, tokenizer, tmp_path_factory):
    """The tiny model as a user has it on disk."""
    path = tmp_path_factory.mktemp("model")
    llama.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def files(questions, tmp_path):
    """Questions to fit on in one field's name, and to apply to in the other, the last without an answer."""
    rows = [
        {"question": q.question, "options": list(q.choices), "answer": q.answer, "group": q.group} for q in questions
    ]
    rows[0]["options"] = [*rows[0]["options"], "none of these"]
    (tmp_path / "fit.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [{"question": q.question, "choices": list(q.choices), "answer": "ABCD"[q.answer]} for q in questions[:6]]
    asked[-1].pop("answer")
    (tmp_path / "apply.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    return tmp_path


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["run", "coral", *map(str, arguments)])
    return ended.value.code


def test_the_program_fits_and_applies(folder, files, questions, llama, tokenizer, capsys):
    code = run(
        "fit", "--data", files / "fit.jsonl", "--out", files / "probe", "--model", folder, "--layer", "2", "--no-tune"
    )
    told = capsys.readouterr().out
    assert code == 0, told
    assert f"fitted on {len(questions)} questions: layer 2" in told
    arguments = ("--coral", files / "probe", "--out", files / "answers.jsonl", "--html", files / "page.html")
    assert run("apply", "--data", files / "apply.jsonl", *arguments) == 0
    told = capsys.readouterr().out
    assert "5 questions" in told
    assert "accuracy" in told
    answers = [json.loads(line) for line in (files / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 6
    coral = Coral.load(files / "probe", llama)
    p = CoralForMultipleChoice.with_fitted(coral, llama, tokenizer).predict_proba(questions[:6])
    for told, row, question in zip(answers, p, questions, strict=False):
        np.testing.assert_allclose(told["probabilities"], row, atol=1e-4)
        assert told["choice"] == question.choices[told["index"]]
        assert sum(told["before"]) == pytest.approx(1, abs=1e-4)
    page = (files / "page.html").read_text()
    assert all(name in page for name in ("base (ECE", "temperature (ECE", "CORAL (ECE"))
    assert 'src="http' not in page


def test_what_the_program_refuses(folder, files, capsys):
    (files / "bad.jsonl").write_text('{"question": "q", "options": ["a", "b"], "answer": 5}\n')
    for arguments, message in (
        (("fit", "--data", files / "bad.jsonl", "--model", folder), r"bad.jsonl: line 1: field 'answer'"),
        (("fit", "--data", files / "fit.jsonl", "--model", folder, "--mode", "essay"), "mode='essay'"),
        (("fit", "--data", files / "fit.jsonl", "--model", folder, "--layer", "x"), "--layer x: must be auto"),
        (("fit", "--data", files / "fit.jsonl", "--model", folder, "--layer", "9"), "layer=9: must be from 0"),
        (("apply", "--data", files / "apply.jsonl", "--coral", files / "none"), "none: cannot read scorer.json"),
        (
            ("apply", "--data", files / "nowhere.jsonl", "--coral", files / "none"),
            "nowhere.jsonl: there is no such file",
        ),
    ):
        assert run(*arguments) == 1
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1, lines
        assert message.replace(r"\.", ".") in lines[0]
