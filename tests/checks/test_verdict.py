import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from practicum.checks.check import Comparison
from practicum.checks.results import Row
from practicum.checks.verdict import confidence_interval, judge, judge_claim

CASES = 2_000
numbers = st.floats(-1e6, 1e6, allow_nan=False)


@pytest.mark.parametrize("shift", [0.0, 0.7], ids=["null", "non-null"])
@pytest.mark.parametrize("seeds", [3, 5, 10, 30])
def test_the_interval_covers_the_truth_in_95_percent_of_cases(seeds, shift, monkeypatch):
    monkeypatch.setattr("practicum.checks.verdict.RESAMPLES", 999)
    samples = np.random.default_rng([seeds, int(10 * shift)]).normal(shift, 1.0, (CASES, seeds))
    covered = 0
    for sample in samples:
        interval = confidence_interval(sample)
        covered += interval.low <= shift <= interval.high
    assert 0.93 <= covered / CASES <= 0.97


@pytest.mark.parametrize("seeds", [5, 10])
def test_a_claim_on_its_margin_is_decided_wrongly_in_5_percent_of_cases_at_most(seeds, monkeypatch):
    monkeypatch.setattr("practicum.checks.verdict.RESAMPLES", 999)
    noise = np.random.default_rng(seeds).normal(0.0, 1.0, (600, seeds))
    verdicts = [judge(x, np.zeros(seeds), "difference_at_least", 0.0).verdict for x in noise]
    decided = sum(verdict != "inconclusive" for verdict in verdicts) / len(verdicts)
    assert 0.02 <= decided <= 0.08


def test_the_plain_bootstrap_of_five_values_is_as_short_as_the_docs_say():
    samples = np.random.default_rng(5).normal(0.0, 1.0, (800, 5))
    covered = 0
    for sample in samples:
        found = stats.bootstrap((sample,), np.mean, n_resamples=999, method="BCa", rng=np.random.default_rng(0))
        covered += found.confidence_interval.low <= 0 <= found.confidence_interval.high
    assert covered / len(samples) == pytest.approx(0.83, abs=0.03)


def test_few_seeds_get_students_interval():
    x = [0.3, 0.1, 0.4, 0.2]
    low, high = stats.t.interval(0.95, 3, loc=np.mean(x), scale=stats.sem(x))
    interval = confidence_interval(x)
    assert (interval.low, interval.high) == pytest.approx((low, high))
    assert interval.kind == "t"


def test_many_seeds_get_a_bootstrap_interval_that_follows_the_skew():
    x = np.random.default_rng(3).exponential(1.0, 25)
    interval = confidence_interval(x)
    assert interval.kind == "bootstrap (BCa)"
    assert interval.high - x.mean() > x.mean() - interval.low


@given(st.lists(numbers, min_size=2, max_size=30), st.randoms())
def test_the_interval_does_not_depend_on_the_order(sample, random):
    shuffled = list(sample)
    random.shuffle(shuffled)
    assert confidence_interval(shuffled) == confidence_interval(sample)


@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_a_constant_difference_is_a_point(value):
    verdict = judge(np.full(4, 1.0 + value), np.ones(4), "difference_at_least", value)
    assert (verdict.low, verdict.high, verdict.effect) == (value, value, value)
    assert verdict.verdict == "holds"


def test_one_seed_decides_nothing():
    verdict = judge([5.0], [1.0], "difference_above", 0.0)
    assert verdict.verdict == "inconclusive"
    assert (verdict.low, verdict.high) == (-math.inf, math.inf)


TIE = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])


@pytest.mark.parametrize(
    ("rule", "verdict"),
    [
        ("difference_at_least", "holds"),
        ("difference_above", "does not hold"),
        ("difference_at_most", "holds"),
        ("within", "holds"),
    ],
)
def test_ties(rule, verdict):
    assert judge(*TIE, rule, 0.0).verdict == verdict


@pytest.mark.parametrize(
    ("arm", "against", "rule", "margin", "verdict"),
    [
        ([3.0, 3.1, 2.9], [1.0, 1.0, 1.0], "ratio_at_least", 2.0, "holds"),
        ([3.0, 3.1, 2.9], [1.0, 1.0, 1.0], "ratio_at_least", 4.0, "does not hold"),
        ([3.0, 3.1, 2.9], [1.0, 1.0, 1.0], "ratio_at_least", 3.0, "inconclusive"),
        ([0.2, 0.21, 0.19], [1.0, 1.0, 1.0], "ratio_at_most", 1 / 3, "holds"),
        ([0.5, 0.51, 0.49], [1.0, 1.0, 1.0], "ratio_at_most", 1 / 3, "does not hold"),
        ([1.00, 1.01, 0.99], [1.0, 1.0, 1.0], "within", 0.1, "holds"),
        ([1.00, 1.01, 0.99], [1.0, 1.0, 1.0], "within", 0.01, "inconclusive"),
        ([2.00, 2.01, 1.99], [1.0, 1.0, 1.0], "within", 0.1, "does not hold"),
        ([0.0, 0.01, 0.01], [1.0, 1.0, 1.0], "within", 0.1, "does not hold"),
        ([1.10, 1.14, 1.12], None, "value_at_most", 1.15, "inconclusive"),
        ([1.01, 1.02, 1.00], None, "value_at_most", 1.15, "holds"),
        ([0.95, 0.96, 0.95], None, "value_at_least", 0.9, "holds"),
        ([0.80, 0.81, 0.80], None, "value_at_least", 0.9, "does not hold"),
    ],
)
def test_the_side_of_the_margin_decides(arm, against, rule, margin, verdict):
    assert judge(arm, against, rule, margin).verdict == verdict


def test_a_ratio_is_the_geometric_mean_of_the_pairs():
    verdict = judge([2.0, 8.0], [1.0, 1.0], "ratio_at_least", 1.0)
    assert verdict.effect == pytest.approx(4.0)


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=9), st.floats(0, 100))
def test_swapping_the_arms_swaps_the_verdict(pairs, margin):
    a, b = np.array(pairs).T
    forth, back = judge(a, b, "difference_at_least", margin), judge(b, a, "difference_at_most", -margin)
    assert forth.verdict == back.verdict


@pytest.mark.parametrize(
    ("arm", "against", "rule", "message"),
    [
        ([1.0, 2.0], [1.0], "difference_above", "not paired: 2 values against 1"),
        ([1.0, 0.0], [1.0, 1.0], "ratio_at_least", "a ratio needs positive numbers; got 0.0"),
        ([], [], "difference_above", "non-empty"),
        ([1.0, float("nan")], [1.0, 1.0], "difference_above", "finite"),
    ],
)
def test_what_cannot_be_judged_is_an_error(arm, against, rule, message):
    with pytest.raises(ValueError, match=message):
        judge(arm, against, rule, 0.0)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({}, "exactly one"),
        ({"against": "b", "within": 0.1, "ratio_at_least": 1.0}, "exactly one"),
        ({"within": 0.1}, "do not go together"),
        ({"against": "b", "value_at_least": 0.1}, "do not go together"),
        ({"against": ("b", "c"), "within": 0.1}, "one baseline"),
    ],
)
def test_a_comparison_states_one_rule_that_fits(rules, message):
    with pytest.raises(ValueError, match=message):
        Comparison("claim", metric="m", arm="a", **rules)


def rows_of(**values):
    return [Row(seed, arm, metrics={"m": v}) for arm, vs in values.items() for seed, v in enumerate(vs)]


def test_of_several_baselines_the_best_of_each_seed_counts():
    rows = rows_of(a=[3.0, 3.0, 3.0], b=[1.0, 2.0, 1.0], c=[2.0, 1.0, 1.5])
    higher = judge_claim(
        Comparison("k", metric="m", arm="a", against=("b", "c"), difference_above=0.0), "", "quick", rows
    )
    assert [pair["against"] for pair in higher.pairs] == [2.0, 2.0, 1.5]
    assert [pair["baseline"] for pair in higher.pairs] == ["c", "b", "c"]
    lower = judge_claim(Comparison("k", metric="m", arm="a", against=("b", "c"), ratio_at_most=1.0), "", "quick", rows)
    assert [pair["against"] for pair in lower.pairs] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        ({"missing": {"m": "not finite: the arm returned nan"}}, "returned nan"),
        ({"status": "failed", "error": {"message": "ValueError: no"}}, "ValueError: no"),
        ({}, "did not return m"),
    ],
)
def test_one_spoilt_value_makes_the_claim_unmeasured_and_is_never_left_out(spoilt, reason):
    rows = [*rows_of(a=[3.0, 3.0, 3.0], b=[1.0, 1.0], c=[1.0, 1.0, 1.0]), Row(2, "b", **spoilt)]
    for against in ("b", ("b", "c")):
        found = judge_claim(
            Comparison("k", metric="m", arm="a", against=against, difference_above=0.0), "", "quick", rows
        )
        assert found.verdict == "could not measure"
        assert reason in found.reason
        assert "seed 2" in found.reason
        assert found.effect is None


def test_the_margin_may_differ_by_scale():
    comparison = Comparison("k", metric="m", arm="a", against="b", ratio_at_least={"quick": 2.0, "full": 3.0})
    assert [comparison.margin(scale) for scale in ("quick", "full", "paper")] == [2.0, 3.0, 3.0]
