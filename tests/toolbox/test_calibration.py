import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.calibration import _TemperatureScaling
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score
from torchmetrics.classification import BinaryCalibrationError

from practicum.toolbox.calibration import (
    IsotonicCalibration,
    TemperatureScaling,
    auroc,
    brier,
    brier_decomposition,
    debiased_ece,
    ece,
    nll,
    reliability_curve,
    reliability_diagram,
)
from practicum.toolbox.errors import InputError


def overconfident(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    confidence = rng.uniform(0.2, 1.0, n)
    return confidence, (rng.random(n) < confidence**2).astype(int)


def ragged(n: int, seed: int = 0, scale: float = 3.0) -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = [scale * rng.normal(size=rng.integers(2, 6)) for _ in range(n)]
    right = [rng.choice(len(row), p=np.exp(row / scale) / np.exp(row / scale).sum()) for row in logits]
    return logits, np.array(right)


def soft(rows: list[np.ndarray]) -> list[np.ndarray]:
    return [np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in rows]


answers = st.integers(1, 60).flatmap(
    lambda n: st.tuples(
        hnp.arrays(np.float64, n, elements=st.floats(0, 1)), hnp.arrays(np.int64, n, elements=st.integers(0, 1))
    )
)


class TestCalibrationError:
    def test_five_points_by_hand(self):
        # Bins of a fifth: (.2, .4] has .3 and .4, 1 of 2 right; (.6, .8] has .7, wrong; (.8, 1] has .9 and 1, right.
        confidence, correct = [0.3, 0.4, 0.7, 0.9, 1.0], [0, 1, 0, 1, 1]
        curve = reliability_curve(confidence, correct, n_bins=5)
        np.testing.assert_array_equal(curve.upper, [0.4, 0.8, 1.0])
        np.testing.assert_array_equal(curve.count, [2, 1, 2])
        np.testing.assert_allclose(curve.accuracy, [0.5, 0.0, 1.0])
        assert ece(confidence, correct, n_bins=5) == pytest.approx(0.4 * 0.15 + 0.2 * 0.7 + 0.4 * 0.05)

    @pytest.mark.parametrize("edge", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    def test_bins_are_closed_on_the_right(self, edge: float):
        curve = reliability_curve([edge, edge - 0.05], [1, 0])
        assert (curve.count.tolist(), curve.upper.tolist()) == ([2], [edge])

    def test_ends_of_the_range(self):
        curve = reliability_curve([0.0, 1.0], [0, 1])
        assert (curve.lower.tolist(), curve.upper.tolist()) == ([0.0, 0.9], [0.1, 1.0])

    def test_a_bin_for_each_mass(self):
        rng = np.random.default_rng(0)
        confidence = rng.random(1000) ** 4
        curve = reliability_curve(confidence, rng.integers(0, 2, 1000), 10, "mass")
        np.testing.assert_array_equal(curve.count, [100] * 10)

    def test_equal_confidences_stay_together(self):
        curve = reliability_curve([0.5] * 7 + [0.9] * 3, [1, 0] * 5, 5, "mass")
        assert curve.count.tolist() == [7, 3]

    def test_mass_does_not_depend_on_the_order(self):
        confidence = np.repeat([0.2, 0.5, 0.7, 0.9], 25)
        correct = np.random.default_rng(0).integers(0, 2, 100)
        order = np.random.default_rng(1).permutation(100)
        assert ece(confidence, correct, 7, "mass") == pytest.approx(ece(confidence[order], correct[order], 7, "mass"))

    @pytest.mark.parametrize("n_bins", [1, 7, 15])
    @pytest.mark.parametrize("seed", range(3))
    def test_as_torchmetrics(self, n_bins: int, seed: int):
        confidence, correct = overconfident(500, seed)
        reference = BinaryCalibrationError(n_bins=n_bins, norm="l1")
        expected = reference(torch.tensor(confidence), torch.tensor(correct)).item()
        assert ece(confidence, correct, n_bins) == pytest.approx(expected, abs=1e-6)

    def test_the_closed_form_of_the_bias(self):
        confidence, correct = overconfident(400)
        curve = reliability_curve(confidence, correct)
        rng = np.random.default_rng(0)
        again = rng.normal(
            curve.accuracy,
            np.sqrt(curve.accuracy * (1 - curve.accuracy) / curve.count),
            (200_000, len(curve.count)),
        )
        bias = (np.abs(again - curve.confidence) @ curve.weight).mean() - ece(confidence, correct)
        assert debiased_ece(confidence, correct) == pytest.approx(ece(confidence, correct) - bias, abs=2e-4)

    def test_less_bias_where_there_is_nothing_to_find(self):
        rng = np.random.default_rng(0)
        plain, debiased = [], []
        for _ in range(200):
            confidence = rng.uniform(0.2, 1, 350)
            correct = rng.random(350) < confidence
            plain.append(ece(confidence, correct))
            debiased.append(debiased_ece(confidence, correct))
        assert np.mean(plain) > 0.03
        assert abs(np.mean(debiased)) < 0.7 * np.mean(plain)

    def test_the_truth_where_there_is_much(self):
        rng = np.random.default_rng(0)
        confidence = rng.uniform(0.6, 1, 4000)
        assert debiased_ece(confidence, rng.random(4000) < confidence - 0.3) == pytest.approx(0.3, abs=0.02)

    @given(answers, st.integers(1, 20), st.sampled_from(["width", "mass"]))
    @settings(max_examples=60, deadline=None)
    def test_bounds(self, pair, n_bins: int, scheme: str):
        confidence, correct = pair
        error = ece(confidence, correct, n_bins, scheme)
        assert abs(confidence.mean() - correct.mean()) - 1e-12 <= error <= 1
        assert debiased_ece(confidence, correct, n_bins, scheme) <= error + 1e-12
        assert reliability_curve(confidence, correct, n_bins, scheme).count.sum() == len(correct)


class TestBrier:
    @pytest.mark.parametrize("seed", range(3))
    def test_as_scikit_learn(self, seed: int):
        confidence, correct = overconfident(300, seed)
        assert brier(confidence, correct) == pytest.approx(brier_score_loss(correct, confidence))
        assert nll(confidence, correct) == pytest.approx(log_loss(correct, confidence))
        rng = np.random.default_rng(seed)
        p = rng.dirichlet(np.ones(4), 300)
        y = rng.integers(0, 4, 300)
        expected = brier_score_loss(y, p, scale_by_half=False, labels=[0, 1, 2, 3])
        assert brier(p, y) == pytest.approx(expected)
        assert nll(list(p), y) == pytest.approx(log_loss(y, p, labels=[0, 1, 2, 3]))

    def test_two_options_count_twice(self):
        confidence, correct = overconfident(50)
        assert brier(np.stack([confidence, 1 - confidence], axis=1), 1 - correct) == pytest.approx(
            2 * brier(confidence, correct)
        )

    def test_what_was_impossible(self):
        assert nll([[0.0, 1.0]], [0]) == math.inf

    @given(answers, st.sampled_from([None, 1, 3, 10]), st.sampled_from(["width", "mass"]))
    @settings(max_examples=60, deadline=None)
    def test_the_parts_add_up(self, pair, n_bins, scheme: str):
        confidence, correct = pair
        parts = brier_decomposition(confidence, correct, n_bins, scheme)
        assert parts.brier == pytest.approx(brier(confidence, correct), abs=1e-12)
        assert min(parts.reliability, parts.resolution, parts.uncertainty) >= 0
        if n_bins is None:
            assert parts.within_bin == pytest.approx(0, abs=1e-12)

    @pytest.mark.parametrize("n_bins", [None, 10])
    def test_the_parts_of_options_add_up(self, n_bins):
        logits, y = ragged(200)
        parts = brier_decomposition(soft(logits), y, n_bins)
        assert parts.brier == pytest.approx(brier(soft(logits), y))

    def test_murphy_by_hand(self):
        # .8 comes true 3 of 4 times, .3 once in 4; half of all come true.
        parts = brier_decomposition([0.8] * 4 + [0.3] * 4, [1, 1, 1, 0, 1, 0, 0, 0], None)
        assert (parts.reliability, parts.resolution, parts.uncertainty) == pytest.approx((0.0025, 0.0625, 0.25))


class TestAuroc:
    @given(answers)
    @settings(max_examples=60, deadline=None)
    def test_as_scikit_learn_with_ties(self, pair):
        confidence, correct = np.round(pair[0], 1), pair[1]
        if correct.min() == correct.max():
            assert math.isnan(auroc(confidence, correct))
        else:
            assert auroc(confidence, correct) == pytest.approx(roc_auc_score(correct, confidence))

    def test_any_scores(self):
        assert auroc([-3.0, 7.0, 2.0], [0, 1, 1]) == 1.0


class TestTemperature:
    @pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
    def test_as_scikit_learn(self, scale: float):
        rng = np.random.default_rng(0)
        logits = rng.normal(size=(400, 4))
        y = np.array([rng.choice(4, p=p) for p in soft(list(logits))])
        reference = _TemperatureScaling().fit(scale * logits, y)
        scaling = TemperatureScaling().fit(scale * logits, y)
        assert scaling.temperature_ == pytest.approx(1 / reference.beta_, rel=1e-5)
        np.testing.assert_allclose(scaling.predict_proba(scale * logits), reference.predict(scale * logits), atol=1e-6)

    def test_ragged_logits(self):
        logits, y = ragged(1500, scale=3.0)
        scaling = TemperatureScaling().fit(logits, y)
        assert scaling.temperature_ == pytest.approx(3.0, rel=0.1)
        best = nll(scaling.predict_proba(logits), y)
        for factor in (0.98, 1.02):
            assert nll(soft([row / (factor * scaling.temperature_) for row in logits]), y) > best
        for p, row in zip(scaling.predict_proba(logits), logits, strict=True):
            assert p.sum() == pytest.approx(1)
            assert p.argmax() == row.argmax()

    def test_shifted_logits_are_the_same(self):
        logits, y = ragged(100)
        shifted = [row + 1e4 * i for i, row in enumerate(logits)]
        assert TemperatureScaling().fit(shifted, y).temperature_ == pytest.approx(
            TemperatureScaling().fit(logits, y).temperature_, rel=1e-6
        )

    def test_ends_of_the_range(self):
        sure = [np.array([5.0, 0.0])] * 4
        assert TemperatureScaling().fit(sure, [0] * 4).temperature_ == 1e-2
        assert TemperatureScaling().fit(sure, [1] * 4).temperature_ == 1e2
        assert all(np.isfinite(p).all() for p in TemperatureScaling().fit(sure, [0] * 4).predict_proba(sure))


class TestIsotonic:
    def test_as_scikit_learn(self):
        confidence, correct = overconfident(300)
        confidence = np.round(confidence, 2)
        reference = IsotonicRegression(out_of_bounds="clip").fit(confidence, correct)
        asked = np.linspace(0, 1, 101)
        np.testing.assert_allclose(
            IsotonicCalibration().fit(confidence, correct).predict_proba(asked), reference.predict(asked), atol=1e-12
        )

    def test_options(self):
        logits, y = ragged(2000)
        p = soft(logits)
        calibrated = IsotonicCalibration().fit(p, y).predict_proba(p)
        assert all(row.sum() == pytest.approx(1) for row in calibrated)
        assert [len(row) for row in calibrated] == [len(row) for row in p]
        assert brier(calibrated, y) < brier(p, y)

    def test_a_row_of_zeros_becomes_uniform(self):
        calibration = IsotonicCalibration().fit([[0.3, 0.7], [0.4, 0.6]], [1, 1])
        assert calibration.predict_proba([[0.25, 0.25, 0.25, 0.25]])[0].tolist() == [0.25] * 4


class TestDiagram:
    def test_what_is_drawn(self):
        confidence, correct = overconfident(300)
        figure = reliability_diagram({"base": (confidence, correct), "ours": (confidence**2, correct)}, title="test")
        curve = reliability_curve(confidence, correct)
        line = next(trace for trace in figure.data if (trace.name or "").startswith("base"))
        np.testing.assert_allclose(line.x, curve.confidence)
        np.testing.assert_allclose(line.y, curve.accuracy)
        assert f"{ece(confidence, correct):.3f}" in line.name
        assert json.loads(figure.to_json())["layout"]["title"]["text"] == "test"
        assert "<div" in figure.to_html(include_plotlyjs=False, full_html=False)


class TestBadInput:
    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: ece([0.5, 1.2], [1, 0]), r"confidence\[1\]=1.2: must be a probability"),
            (lambda: ece([0.5, float("nan")], [1, 0]), r"confidence\[1\]=nan"),
            (lambda: ece([0.5], [1, 0]), "correct: has 2 values; confidence has 1"),
            (lambda: ece([0.5], [2]), r"correct\[0\]=2.0: must be 0 or 1"),
            (lambda: ece([], []), "confidence: is empty"),
            (lambda: ece([[0.5]], [1]), r"confidence: has shape \(1, 1\)"),
            (lambda: ece(["x"], [1]), "confidence: must be a vector of numbers"),
            (lambda: ece([0.5], [1], n_bins=0), "n_bins=0: must be a whole number, at least 1"),
            (lambda: ece([0.5], [1], n_bins=2.5), "n_bins=2.5"),
            (lambda: ece([0.5], [1], scheme="area"), "scheme='area': must be one of 'width', 'mass'"),
            (lambda: auroc([float("inf"), 1], [1, 0]), r"confidence\[0\]=inf: must be a finite number"),
            (lambda: brier([[0.5, 0.4]], [0]), r"probabilities\[0\]: sum to 0.9; must sum to 1"),
            (lambda: brier([[1.5, -0.5]], [0]), r"probabilities\[0\]\[0\]=1.5"),
            (lambda: brier([[0.5, 0.5]], [2]), r"y\[0\]=2: must be the index of an option, 0 to 1"),
            (lambda: brier([[0.5, 0.5]], [None]), r"y\[0\]=None"),
            (lambda: brier([[0.5, 0.5]], [0, 1]), "y: has shape"),
            (lambda: nll([[1.0]], [0]), r"probabilities\[0\]: has shape \(1,\)"),
            (lambda: TemperatureScaling().fit([[1.0, float("nan")]], [0]), r"logits\[0\]: has nan"),
            (lambda: TemperatureScaling().fit([], []), "logits: is empty"),
            (lambda: reliability_diagram({}), "answers"),
        ],
    )
    def test_one_line_that_says_what_is_wrong(self, call, message: str):
        with pytest.raises(InputError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
