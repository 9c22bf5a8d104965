"""Probes: equivalences, known values, planted signals, files, and scikit-learn's own battery."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from scipy.special import softmax
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss
from sklearn.utils.estimator_checks import estimator_checks_generator
from transformers import GPT2Config, GPT2LMHeadModel

from practicum.toolbox.errors import InputError
from practicum.toolbox.probes import AttentionProbe, LinearProbe, WeightDecayMLP, choose_layer, load_probe, save_probe
from practicum.toolbox.taps import fingerprint

PROBES = [WeightDecayMLP(epochs=5), LinearProbe(), AttentionProbe(lr=3e-2, epochs=12)]
# Those of the array API skip themselves where it is not switched on.
BATTERY = [
    (probe, check)
    for probe in PROBES
    for _, check in estimator_checks_generator(probe)
    if "array_api" not in check.func.__name__
]


@pytest.mark.parametrize(
    ("probe", "check"), BATTERY, ids=[f"{type(p).__name__}-{c.func.__name__}-{i}" for i, (p, c) in enumerate(BATTERY)]
)
def test_battery_of_scikit_learn(probe, check):
    check(clone(probe))


def random_traces(n=12, d=6, n_classes=3, longest=14, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % n_classes
    return [rng.normal(size=(rng.integers(3, longest + 1), d)).astype(dtype) for _ in y], y


def with_weights(probe, seed=0, scale=1.0):
    """A fitted probe with random weights, so that nothing rests on what training finds."""
    rng = np.random.default_rng(seed)
    if probe.pooling == "attention":
        probe.query_ = (scale * rng.normal(size=probe.query_.shape)).astype(np.float32)
    probe.value_ = rng.normal(size=probe.value_.shape).astype(np.float32)
    return probe


# WeightDecayMLP -------------------------------------------------------------------------------------------------------


def regression(n=300, d=10, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d)) * rng.uniform(0.1, 20, size=d) + 5
    return X, 0.3 * np.tanh(X[:, 0] - 5) + 0.05 * rng.normal(size=n)


@pytest.mark.parametrize(("n", "d"), [(60, 8), (20, 40)])
@pytest.mark.parametrize("penalty", [0.1, 10.0])
def test_without_a_hidden_layer_it_is_ridge(n, d, penalty):
    X, y = regression(n, d)
    probe = WeightDecayMLP(hidden=0, weight_decay=penalty).fit(X, y)
    standardised = (X - X.mean(0)) / (X.std(0) + 1e-4)
    ridge = Ridge(alpha=penalty).fit(standardised, y)
    np.testing.assert_allclose(probe.predict(X), ridge.predict(standardised), rtol=1e-8, atol=1e-10)


def test_untrained_it_is_zero_and_under_a_large_decay_near_it():
    X, y = regression()
    barely = WeightDecayMLP(lr=1e-12, epochs=1, random_state=0).fit(X, y)
    assert np.abs(barely.predict(X)).max() < 1e-8
    heavy = WeightDecayMLP(weight_decay=400.0, random_state=0).fit(X, y)
    light = WeightDecayMLP(weight_decay=0.0, random_state=0).fit(X, y)
    assert np.abs(heavy.predict(X)).max() < 0.05
    assert light.score(X, y) > 0.6


def test_the_biases_are_decayed_too():
    X, y = regression()
    shifted = y + 3
    free = WeightDecayMLP(weight_decay=0.0, lr=2e-2, epochs=30, random_state=0).fit(X, shifted)
    decayed = WeightDecayMLP(weight_decay=100.0, lr=2e-2, epochs=30, random_state=0).fit(X, shifted)
    assert abs(free.predict(X).mean() - 3) < 0.2
    assert abs(decayed.predict(X).mean()) < 0.6 * abs(free.predict(X).mean())


def test_the_loss_is_that_of_the_steered_probability():
    rng = np.random.default_rng(0)
    X, p, onehot = rng.normal(size=(100, 4)), rng.uniform(size=100), rng.integers(2, size=100)
    probe = WeightDecayMLP(epochs=3, batch_size=100, lr=1e-9, random_state=0).fit(X, onehot - p)
    assert probe.loss_curve_[-1] == pytest.approx(np.mean((p + probe.predict(X) - onehot) ** 2), rel=1e-5)


def test_features_are_standardised_and_constant_ones_do_nothing():
    X, y = regression()
    probe = WeightDecayMLP(epochs=5, random_state=0).fit(np.c_[X, np.full(len(X), 0.1)], y)
    other = probe.predict(np.c_[X, np.full(len(X), 1e6)])
    np.testing.assert_array_equal(probe.predict(np.c_[X, np.full(len(X), 0.1)]), other)
    plain, scaled = (WeightDecayMLP(epochs=5, random_state=0).fit(Z, y).predict(Z) for Z in (X, 64 * X - 3))
    np.testing.assert_allclose(plain, scaled, atol=1e-3)


def test_it_fits_where_gradients_are_off():
    X, y = regression(60)
    wanted = WeightDecayMLP(epochs=2, random_state=0).fit(X, y).predict(X)
    with torch.inference_mode():
        assert np.array_equal(WeightDecayMLP(epochs=2, random_state=0).fit(X, y).predict(X), wanted)
    traces, labels = random_traces()
    with torch.no_grad():
        AttentionProbe(epochs=1).fit(traces, labels)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"weight_decay": -1}, "weight_decay=-1: must be a number of 0 or more"),
        ({"hidden": -1}, "hidden=-1: must be a whole number, 0 or more"),
        ({"epochs": 0}, "epochs=0: must be a whole number, 1 or more"),
        ({"batch_size": 2.5}, "batch_size=2.5: must be a whole number, 1 or more"),
        ({"lr": 0.0}, "lr=0.0: must be a number above 0"),
        ({"lr": float("nan")}, "lr=nan: must be a number above 0"),
    ],
)
def test_bad_parameters_of_the_mlp(parameters, message):
    with pytest.raises(InputError, match=message):
        WeightDecayMLP(**parameters).fit(*regression(20))


# AttentionProbe: equivalences -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["attention", "mean", "last"])
@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_prefixes_stream_and_batch_agree(pooling, rank, scale):
    X, y = random_traces(longest=90)
    probe = with_weights(AttentionProbe(pooling=pooling, rank=rank, epochs=2, random_state=0).fit(X, y))
    X = [scale * trace for trace in X]
    for trace, rows in zip(X, probe.predict_prefixes(X), strict=True):
        stream = probe.stream()
        for t, row in enumerate(rows):
            np.testing.assert_allclose(row, probe.predict_proba([trace[: t + 1]])[0], atol=1e-5)
            np.testing.assert_allclose(stream.update(torch.from_numpy(trace[t])), row, atol=1e-5)
        np.testing.assert_allclose(rows.sum(1), 1)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 100), st.floats(0.01, 1e4), st.lists(st.floats(0, 1.5), min_size=2, max_size=2))
def test_prefixes_are_what_the_formula_says(n, scale, slopes):
    X, y = random_traces(d=3)
    probe = FITTED.setdefault("two", AttentionProbe(n_heads=2, epochs=1, random_state=0).fit(X, y))
    with_weights(probe, scale=scale).slopes_ = np.array(slopes, np.float32)
    trace = np.random.default_rng(n).normal(size=(n, 3))
    h = (trace - probe.mean_) * probe.scale_
    logits = probe.bias_.astype(np.float64)
    for j in range(2):
        scores = h @ probe.query_[j].astype(np.float64) + probe.slopes_[j].astype(np.float64) * np.arange(n)
        logits = logits + softmax(scores) @ (h @ probe.value_[j].T.astype(np.float64))
    np.testing.assert_allclose(probe.predict_prefixes([trace])[0][-1], softmax(logits / probe.temperature_), atol=1e-6)


FITTED = {}


def test_padding_and_the_other_traces_do_not_matter():
    X, y = random_traces()
    probe = with_weights(AttentionProbe(epochs=2, random_state=0).fit(X, y))
    together = probe.predict_proba(X)
    for trace, row in zip(X, together, strict=True):
        assert np.array_equal(probe.predict_proba([trace])[0], row)


def test_a_query_of_zero_is_mean_pooling():
    X, y = random_traces()
    probe = with_weights(AttentionProbe(n_heads=1, recency=False, epochs=2, random_state=0).fit(X, y))
    probe.query_[:] = 0
    for trace, rows in zip(X, probe.predict_prefixes(X), strict=True):
        h = (trace - probe.mean_) * probe.scale_
        means = np.cumsum(h, 0) / np.arange(1, len(h) + 1)[:, None]
        logits = means @ probe.value_[0].T + probe.bias_
        np.testing.assert_allclose(rows, softmax(logits / probe.temperature_, axis=1), atol=1e-10)


def test_the_loss_and_its_gradient_are_those_of_the_formula():
    """The hand-written backward pass against autograd on the formula, in traces of different lengths."""
    from practicum.toolbox.probes import _PrefixPooling

    generator = torch.Generator().manual_seed(0)
    scores = (8 * torch.randn(9, 2, 3, generator=generator).double()).requires_grad_()
    values = torch.randn(9, 2, 4, 3, generator=generator, requires_grad=True)
    weight = torch.randn(9, 4, 3, generator=generator)
    wanted = torch.stack(
        [torch.einsum("sjb,sjcb->cb", scores[: t + 1].softmax(0).float(), values[: t + 1]) for t in range(9)]
    )
    found = _PrefixPooling.apply(scores, values)
    torch.testing.assert_close(found, wanted)
    for one, other in zip(
        torch.autograd.grad((found * weight).sum(), (scores, values)),
        torch.autograd.grad((wanted * weight).sum(), (scores, values)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_training_survives_long_traces_and_large_scores():
    rng = np.random.default_rng(0)
    y = np.arange(8) % 2
    X = [1e3 * rng.normal(size=(900, 3)) + 5e3 * label for label in y]
    probe = AttentionProbe(lr=1e-1, epochs=20, random_state=0).fit(X, y)
    assert np.isfinite(probe.loss_curve_).all()
    assert all(np.isfinite(rows).all() for rows in probe.predict_prefixes(X))
    assert (probe.predict(X) == y).all()


@pytest.mark.parametrize("pooling", ["last", "mean", "attention"])
def test_one_token_a_trace_is_logistic_regression(pooling):
    rng = np.random.default_rng(0)
    y = rng.integers(3, size=300)
    X = rng.normal(size=(300, 5)) + np.eye(5)[y]
    probe = AttentionProbe(
        pooling=pooling, n_heads=1, lr=3e-2, epochs=60, weight_decay=0.0, temperature=1.0, random_state=0
    ).fit(X, y)
    logistic = LogisticRegression(C=np.inf).fit(X, y)
    assert log_loss(y, probe.predict_proba(X)) == pytest.approx(log_loss(y, logistic.predict_proba(X)), abs=1e-2)


# AttentionProbe: what it learns ---------------------------------------------------------------------------------------


def planted(n, seed):
    """The class stands in one token at a random place, marked by another feature."""
    rng = np.random.default_rng(seed)
    y = rng.integers(3, size=n)
    X = [rng.normal(size=(rng.integers(12, 20), 8)) for _ in y]
    for trace, label in zip(X, y, strict=True):
        place = rng.integers(len(trace) - 1)
        trace[place, 0] += 8
        trace[place, 1 + label] += 4
    return X, y


def test_attention_finds_a_planted_token_and_the_baselines_do_not():
    X, y = planted(400, 0)
    tests, labels = planted(200, 1)
    scores = {
        pooling: AttentionProbe(pooling=pooling, lr=2e-2, epochs=30, random_state=0).fit(X, y).score(tests, labels)
        for pooling in ("attention", "mean", "last")
    }
    assert scores["attention"] >= 0.95
    assert scores["mean"] < scores["attention"]
    assert scores["last"] == pytest.approx(1 / 3, abs=0.1)


def test_recency_finds_the_last_token():
    rng = np.random.default_rng(0)
    y = rng.integers(3, size=300)
    X = [3 * rng.normal(size=(rng.integers(12, 20), 4)) for _ in y]
    for trace, label in zip(X, y, strict=True):
        trace[-1] = [6, 0, 0, 0] if label == 0 else [0, 6, 0, 0] if label == 1 else [0, 0, 6, 0]
    start = [len(trace) - 1 for trace in X]
    fit = {"y": y[:200], "start": start[:200]}
    found = {
        recency: AttentionProbe(recency=recency, lr=1e-2, random_state=0).fit(X[:200], **fit).score(X[200:], y[200:])
        for recency in (True, False)
    }
    assert found[True] > found[False]
    probe = AttentionProbe(lr=1.0, epochs=3, random_state=0).fit(X, y)
    assert (probe.slopes_ >= 0).all()
    assert (probe.slopes_ <= 1.5).all()


def test_labels_without_a_signal_are_not_learned():
    X, y = random_traces(200)
    probe = AttentionProbe(lr=1e-3, epochs=5, random_state=0).fit(X, y)
    held_out, labels = random_traces(200, seed=1)
    assert probe.score(held_out, labels) == pytest.approx(1 / 3, abs=0.12)


def test_start_says_which_prefixes_count():
    rng = np.random.default_rng(0)
    y = np.arange(80) % 2
    # The question says the opposite of what comes after it.
    X = [np.r_[np.full((3, 1), 1.0 - label), np.full((3, 1), label)] + 0.1 * rng.normal(size=(6, 1)) for label in y]
    early = AttentionProbe(pooling="last", lr=1e-1, random_state=0).fit(X, y, start=[5] * 80)
    assert (early.predict(X) == y).all()
    rows = np.stack(early.predict_prefixes(X))
    assert (rows[:, 0].argmax(1) != y).all()


def test_options_mask_the_other_classes():
    X, _ = random_traces(40, n_classes=4)
    y = np.array(list("abcd"))[np.arange(40) % 4]
    options = [[label, "e" if i % 3 else "a" if label != "a" else "b"] for i, label in enumerate(y)]
    probe = AttentionProbe(epochs=3, random_state=0).fit(X, y, options=options)
    assert probe.classes_.tolist() == list("abcde")
    for rows in (probe.predict_proba(X, options), np.stack([r[-1] for r in probe.predict_prefixes(X, options)])):
        for row, allowed in zip(rows, options, strict=True):
            assert set(probe.classes_[row > 0]) == set(allowed)
            assert row.sum() == pytest.approx(1)
    stream = probe.stream(options[1])
    row = [stream.update(token) for token in X[1]][-1]
    np.testing.assert_allclose(row, probe.predict_proba(X[1:2], options[1:2])[0], atol=1e-12)


def test_temperature_makes_held_out_traces_likelier():
    X, y = planted(120, 0)
    tests, labels = planted(200, 3)
    rng = np.random.default_rng(0)
    y = np.where(rng.uniform(size=len(y)) < 0.3, rng.integers(3, size=len(y)), y)
    probe = AttentionProbe(lr=3e-2, epochs=60, random_state=0).fit(X, y)
    labels = np.where(rng.uniform(size=len(labels)) < 0.3, rng.integers(3, size=len(labels)), labels)
    fitted = log_loss(labels, probe.predict_proba(tests))
    assert probe.temperature_ > 1
    probe.temperature_ = 1.0
    assert fitted < log_loss(labels, probe.predict_proba(tests))
    assert AttentionProbe(temperature=2.5, epochs=1).fit(X, y).temperature_ == 2.5


def test_groups_are_held_out_together():
    X, y = random_traces(40)
    groups = np.repeat(np.arange(4), 10)
    learnt, held = AttentionProbe()._split(40, groups, np.random.RandomState(0))
    assert len(held) > 0
    assert not set(groups[learnt]) & set(groups[held])
    AttentionProbe(epochs=1).fit(X, y, groups=groups)


def test_half_precision_memory_mapped_and_tensors_are_taken(tmp_path):
    X, y = random_traces(dtype=np.float16)
    np.save(tmp_path / "x.npy", np.concatenate(X))
    flat = np.load(tmp_path / "x.npy", mmap_mode="c")
    ends = np.cumsum([len(trace) for trace in X])
    mapped = [flat[end - len(trace) : end] for end, trace in zip(ends, X, strict=True)]
    wanted = AttentionProbe(epochs=2, random_state=0).fit(X, y).predict_proba(X)
    for taken in (mapped, [torch.from_numpy(trace) for trace in X]):
        assert np.array_equal(AttentionProbe(epochs=2, random_state=0).fit(taken, y).predict_proba(taken), wanted)
    cube = np.stack([trace[:3] for trace in X])
    assert AttentionProbe(epochs=1).fit(cube, y).predict_proba(cube).shape == (12, 3)


# AttentionProbe: bad input --------------------------------------------------------------------------------------------

TRACES, LABELS = random_traces(6, n_classes=2)
NAN = [*TRACES[:3], np.where(np.arange(4)[:, None] == 2, np.nan, TRACES[3][:1]), *TRACES[4:]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"X": []}, "X: is empty"),
        ({"y": [1] * 6}, r"y: has 1 class \(1\); must have 2 classes or more"),
        ({"y": [0, 1]}, "y: has 2 labels; must have one for each of 6 traces"),
        ({"X": [*TRACES[:5], np.zeros((3, 7))]}, r"X\[5\]: has 7 features; must have 6"),
        ({"X": [*TRACES[:5], np.zeros(6)]}, r"X\[5\]: has shape \(6,\)"),
        ({"X": [*TRACES[:5], np.zeros((0, 6))]}, r"X\[5\]: has shape \(0, 6\)"),
        ({"X": NAN}, r"X\[3\]: is not finite at position 2"),
        ({"start": [0, 1, len(TRACES[2]), 0, 0, 0]}, r"start\[2\]=\d+: must be from 0 to \d+"),
        ({"start": [0]}, "start: has 1 entries; must have one for each of 6 traces"),
        ({"options": [[0, 1]] * 5 + [[0]]}, r"y\[5\]=.*1.*: must be among its options \[0\]"),
        ({"options": [[0, 1]] * 5 + [[]]}, r"options\[5\]=\[\]: must have one of the classes"),
        ({"options": [[0, 1]]}, "options: has 1 entries"),
        ({"groups": [1, 2]}, "groups: has 2 entries"),
    ],
)
def test_bad_data(arguments, message):
    with pytest.raises(InputError, match=message):
        AttentionProbe(epochs=1).fit(**{"X": TRACES, "y": LABELS, **arguments})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"n_heads": 0}, "n_heads=0: must be a whole number, 1 or more"),
        ({"rank": 0}, "rank=0: must be a whole number, 1 or more"),
        ({"pooling": "max"}, "pooling='max': must be 'attention', 'mean' or 'last'"),
        ({"temperature": 0.0}, "temperature=0.0: must be a number above 0"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0: must be a number of 0 or more"),
    ],
)
def test_bad_parameters_of_the_attention_probe(parameters, message):
    with pytest.raises(InputError, match=message):
        AttentionProbe(epochs=1).set_params(**parameters).fit(TRACES, LABELS)


def test_bad_input_when_it_predicts():
    with pytest.raises(NotFittedError):
        AttentionProbe().stream()
    probe = AttentionProbe(epochs=1).fit(TRACES, LABELS)
    with pytest.raises(InputError, match=r"X\[0\]: has 7 features; must have 6"):
        probe.predict_prefixes([np.zeros((3, 7))])
    with pytest.raises(InputError, match=r"h: has shape \(5,\); must be \(6,\)"):
        probe.stream().update(np.zeros(5))
    with pytest.raises(InputError, match="h: is not finite"):
        probe.stream().update(np.full(6, np.inf))


# LinearProbe and the choice of a layer --------------------------------------------------------------------------------


@pytest.mark.parametrize("n_classes", [2, 3])
def test_the_linear_probe_is_logistic_regression(n_classes):
    rng = np.random.default_rng(0)
    y = rng.integers(n_classes, size=200)
    X = rng.normal(size=(200, 5)) * 30 + 40 * np.eye(5)[y]
    standardised = (X - X.mean(0)) / (X.std(0) + 1e-4)
    peer = LogisticRegression(C=0.5, max_iter=1000).fit(standardised, y)
    probe = LinearProbe(C=0.5).fit(X, y)
    np.testing.assert_allclose(probe.predict_proba(X), peer.predict_proba(standardised), atol=1e-9)
    assert np.array_equal(probe.predict(X), peer.predict(standardised))


def test_the_layer_with_the_signal_is_chosen():
    X, y = planted(90, 0)
    noise = [np.random.default_rng(i).normal(size=trace.shape) for i, trace in enumerate(X)]
    estimator = AttentionProbe(lr=1e-2, temperature=1.0, random_state=0)
    start = [1] * len(X)
    choice = choose_layer(estimator, {3: noise, 7: X}, y, cv=3, fit_params={"start": start})
    assert choice.layer == 7
    assert {layer: len(scores) for layer, scores in choice.scores.items()} == {3: 3, 7: 3}
    flat = {layer: np.stack([trace[0] for trace in of_layer]) for layer, of_layer in {3: noise, 7: noise}.items()}
    assert choose_layer(LinearProbe(), flat, y).layer == 3


def test_groups_never_straddle_and_scoring_is_used():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), 4)
    X, y = rng.normal(size=(80, 3)), rng.normal(size=80)
    X[:, 0] = groups
    seen = []

    def scoring(probe, X, y):
        seen.append(set(X[:, 0]))
        return -float(np.mean((probe.predict(X) - y) ** 2))

    choose_layer(WeightDecayMLP(epochs=1), {0: X}, y, groups=groups, scoring=scoring)
    assert len(seen) == 5
    assert sum(map(len, seen)) == 20
    with pytest.raises(InputError, match="activations_by_layer: is empty"):
        choose_layer(LinearProbe(), {}, y)
    with pytest.raises(InputError, match=r"activations_by_layer\[1\]: has 79 rows; y has 80"):
        choose_layer(LinearProbe(), {1: X[1:]}, y)


# Seeds and files ------------------------------------------------------------------------------------------------------


def fitted_probes():
    X, y = regression(60)
    traces, labels = random_traces(30)
    names = np.array(["no", "yes", "perhaps"])[labels]
    return {
        "mlp": (WeightDecayMLP(epochs=2, random_state=3).fit(X, y), X),
        "ridge": (WeightDecayMLP(hidden=0).fit(X, y), X),
        "linear": (LinearProbe().fit(X, y > 0), X),
        "attention": (AttentionProbe(epochs=2, random_state=3).fit(traces, names), traces),
        "rank": (AttentionProbe(rank=2, epochs=2, random_state=np.random.RandomState(0)).fit(traces, labels), traces),
    }


def predictions(probe, X):
    return probe.predict_proba(X) if hasattr(probe, "predict_proba") else probe.predict(X)


def test_the_same_seed_gives_the_same_bits_and_no_global_state_is_touched():
    state = torch.random.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
    threads = torch.get_num_threads()
    first, second = fitted_probes(), fitted_probes()
    for name, (probe, X) in first.items():
        assert np.array_equal(predictions(probe, X), predictions(second[name][0], X)), name
    traces, labels = random_traces(30)
    other = AttentionProbe(epochs=2, random_state=4).fit(traces, labels)
    assert not np.array_equal(other.value_, first["attention"][0].value_)
    assert torch.equal(torch.random.get_rng_state(), state[0])
    assert np.array_equal(np.random.get_state()[1], state[1])  # noqa: NPY002
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("name", ["mlp", "ridge", "linear", "attention", "rank"])
def test_a_file_gives_back_the_same_bits(name, tmp_path):
    probe, X = fitted_probes()[name]
    save_probe(probe, tmp_path / "probe", fingerprint="abc")
    assert [file.name for file in tmp_path.iterdir()] == ["probe.safetensors"]
    read = load_probe(tmp_path / "probe")
    assert type(read) is type(probe)
    assert np.array_equal(predictions(read, X), predictions(probe, X))
    assert np.array_equal(read.predict(X), probe.predict(X))
    if name != "rank":
        assert read.get_params() == probe.get_params()
    for attribute, value in vars(probe).items():
        if isinstance(value, np.ndarray):
            assert getattr(read, attribute).dtype == value.dtype, attribute
    if name == "attention":
        stream, other = probe.stream(), read.stream()
        assert np.array_equal(stream.update(X[0][0]), other.update(X[0][0]))


def test_a_file_is_refused_on_another_model(tmp_path):
    config = GPT2Config(vocab_size=20, n_embd=8, n_layer=2, n_head=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, other = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
    probe, _ = fitted_probes()["linear"]
    save_probe(probe, tmp_path / "p.safetensors", fingerprint=fingerprint(model))
    assert load_probe(tmp_path / "p.safetensors", model=model).classes_.tolist() == [False, True]
    with pytest.raises(InputError, match=r"model: has fingerprint \w{16}; the probe in .* was fitted on \w{16}"):
        load_probe(tmp_path / "p.safetensors", model=other)
    save_probe(probe, tmp_path / "q")
    with pytest.raises(InputError, match="does not say which model it is for"):
        load_probe(tmp_path / "q", model=model)


def test_files_that_are_no_probes(tmp_path):
    with pytest.raises(InputError, match="there is no such file"):
        load_probe(tmp_path / "p")
    (tmp_path / "p.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match="is not a probe"):
        load_probe(tmp_path / "p")
    save_file({"a": np.zeros(2)}, tmp_path / "q.safetensors")
    with pytest.raises(InputError, match="is not a probe"):
        load_probe(tmp_path / "q")
    header = {"format": 99, "kind": "LinearProbe", "parameters": {}, "fitted": {}, "fingerprint": None}
    save_file({"a": np.zeros(2)}, tmp_path / "r.safetensors", metadata={"probe": json.dumps(header)})
    with pytest.raises(InputError, match="has format 99; must be 1"):
        load_probe(tmp_path / "r")
    with pytest.raises(InputError, match="probe=Ridge: must be one of WeightDecayMLP, LinearProbe, AttentionProbe"):
        save_probe(Ridge().fit([[0.0], [1.0]], [0, 1]), tmp_path / "s")
    with pytest.raises(NotFittedError):
        save_probe(LinearProbe(), tmp_path / "s")
    assert not (tmp_path / "s.safetensors").exists()
