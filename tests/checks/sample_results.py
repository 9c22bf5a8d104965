"""Results such as real checks leave behind: a retrieval method, a clustering method, and one with hostile strings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from practicum.checks.check import Comparison
from practicum.checks.results import ClaimResult, Result, Row
from practicum.checks.verdict import judge_claim

RUN = {
    "started": "2026-11-29T09:14:02+00:00",
    "finished": "2026-11-29T09:31:47+00:00",
    "seconds": 1065.2,
    "practicum": "0.1.0",
    "git": "3f2c9a1",
    "backend": "loky",
    "machine": {
        "system": "Linux 6.1.0",
        "architecture": "x86_64",
        "processor": "AMD EPYC 9354 32-Core Processor",
        "cores": 2,
        "python": "3.11.9",
        "memory_bytes": 16 * 2**30,
    },
    "versions": {"numpy": "2.3.4", "scipy": "1.16.2", "torch": "2.13.0", "faiss": "1.12.0", "scikit-learn": "1.9.0"},
}

RECALLS = ("0.80", "0.90", "0.95", "0.99")
QUERIES_PER_SECOND = {
    "lemur": (2977, 2112, 1456, 456),
    "muvera-10240": (504, 434, 357, 259),
    "token-ann": (612, 471, 388, 231),
    "mean-pooling": (2707, 1402, 717, None),
    "exact-torch": (38.4, 38.4, 38.4, 38.4),
}
PEARSON = {"lemur": 0.945, "muvera-10240": 0.821, "mean-pooling": 0.732}


def retrieval(seeds: int = 3) -> Result:
    """A retrieval method: two claims hold, one does not, one is inconclusive; one arm is unavailable, one failed."""
    rng = np.random.default_rng(7)
    rows: list[Row] = []
    for seed in range(seeds):
        rows += [_searched(arm, seed, rng) for arm in QUERIES_PER_SECOND]
        rows.append(
            Row(
                seed,
                "fast-plaid",
                "unavailable",
                error={"message": "fast-plaid is not installed: pip install fast-plaid"},
            )
        )
        rows.append(
            Row(
                seed,
                "muvera-2048",
                "failed",
                error={
                    "type": "RuntimeError",
                    "message": "expected 2048 dimensions, found 2560",
                    "traceback": 'Traceback (most recent call last):\n  File "fde.py", line 71, in encode\n'
                    "    raise RuntimeError(message)\nRuntimeError: expected 2048 dimensions, found 2560",
                },
            )
        )
    rivals = ("muvera-10240", "token-ann")
    claims = [
        _judged(
            Comparison(
                "faster-at-equal-recall",
                metric="queries_per_second@0.80",
                arm="lemur",
                against=rivals,
                ratio_at_least=3.0,
                timed=True,
            ),
            "At 80 % recall, several times faster than earlier multi-vector search.",
            rows,
        ),
        _judged(
            Comparison("compact", metric="recall@k=5000", arm="lemur", against="muvera-10240", difference_at_least=0.0),
            "With 1024 dimensions or fewer, finds at least as much as MUVERA with 10240.",
            rows,
        ),
        _judged(
            Comparison("accurate-estimate", metric="pearson", arm="lemur", value_at_least=0.96),
            "Its estimate follows exact MaxSim closely over the whole corpus.",
            rows,
        ),
        _judged(
            Comparison("incremental", metric="recall_added@10", arm="lemur", against="exact-torch", within=0.02),
            "Documents added later are found as well as after a full refit.",
            rows,
        ),
    ]
    return Result(
        method="lemur",
        field="retrieval",
        title="LEMUR: Learned Multi-Vector Retrieval",
        scale="full",
        request={"scale": "full", "model": None, "data": None, "device": "cpu", "options": {}},
        seeds=list(range(seeds)),
        arms=[*QUERIES_PER_SECOND, "muvera-2048", "fast-plaid"],
        claims=claims,
        rows=rows,
        trade_offs=[[f"queries_per_second@{r}", f"recall@{r}"] for r in RECALLS],
        curves=[{"name": "reliability", "x": "estimated recall", "y": "recall", "diagonal": True}],
        remarks=[
            "The encoder was trained with mean pooling, so pooling to one vector is a strong rival here: "
            "lemur is 1.10 times as fast at 80 % recall and 2.03 times at 95 %.",
            "At 1,500 documents re-scoring is the whole cost, and the first stage hardly counts at 99 % recall.",
        ],
        run=RUN,
    )


def _searched(arm: str, seed: int, rng: np.random.Generator) -> Row:
    row = Row(seed, arm)
    row.curves["reliability"] = [[0.2, 0.3 + seed / 100], [None, None], [0.6, 0.5 if seed else None], [0.9, 0.8]]
    for recall, speed in zip(RECALLS, QUERIES_PER_SECOND[arm], strict=True):
        if speed is None:
            row.missing[f"queries_per_second@{recall}"] = f"recall {recall} was not reached with 400 candidates"
            row.missing[f"recall@{recall}"] = f"recall {recall} was not reached with 400 candidates"
            continue
        row.metrics[f"queries_per_second@{recall}"] = float(speed * rng.normal(1, 0.03))
        reached = 1.0 if arm == "exact-torch" else float(recall) + abs(rng.normal(0.004, 0.002))
        row.metrics[f"recall@{recall}"] = min(1.0, reached)
        row.metrics[f"candidates@{recall}"] = float(rng.integers(20, 400))
    for width in (100, 200, 500, 1000, 2000, 5000):
        strength = {"lemur": 0.9, "muvera-10240": 0.8, "exact-torch": 1.0}.get(arm, 0.75)
        row.metrics[f"recall@k={width}"] = float(1 - (1 - strength) * (100 / width) ** 0.4 * rng.normal(1, 0.02))
    if arm in PEARSON:
        row.metrics["pearson"] = float(PEARSON[arm] + rng.normal(0, 0.002))
    row.metrics["recall_added@10"] = float(0.92 + rng.normal(0, 0.012))
    row.metrics["index_seconds"] = float(rng.uniform(2, 30))
    row.metrics["bytes_per_document"] = float({"muvera-10240": 40960, "lemur": 4096}.get(arm, 32768))
    row.notes = {"exact-torch": ["maxsim-cpu 0.1.0 was slower here: torch counts as exact"]}.get(arm, [])
    row.resources = {
        "seconds": float(rng.uniform(8, 40)),
        "cpu_seconds": float(rng.uniform(8, 40)),
        "peak_memory_bytes": float(rng.integers(6e8, 3e9)),
        "added_memory_bytes": float(rng.integers(1e7, 6e8)),
    }
    return row


def clustering() -> Result:
    """A clustering method run on one seed without labels: one claim could not be measured, one has no bounds."""
    rows = []
    for arm, entropy, seconds in (("lmbc", 0.998, 5.31), ("kmeans", 0.941, 0.912), ("spectral", 0.913, 27.3)):
        metrics = {"entropy": entropy, "seconds@n=5000": seconds / 2, "seconds@n=10000": seconds, "inertia": 4.1723e9}
        row = Row(
            0, arm, metrics=metrics, missing={"ari": "the data has no labels", "accuracy": "the data has no labels"}
        )
        row.resources = {
            "seconds": seconds,
            "cpu_seconds": seconds,
            "peak_memory_bytes": 3.1e8,
            "added_memory_bytes": None,
        }
        rows.append(row)
    claims = [
        _judged(
            Comparison("more-accurate", metric="ari", arm="lmbc", against="kmeans", difference_above=0.0),
            "Finds the true groups better than k-means.",
            rows,
        ),
        _judged(
            Comparison(
                "fast", metric="seconds@n=10000", arm="lmbc", against="spectral", ratio_at_most=1 / 3, timed=True
            ),
            "At 10,000 rows takes at most a third of the time of spectral clustering.",
            rows,
        ),
    ]
    return Result(
        method="lmbc",
        field="clustering",
        title="LMBC: Landmark-based Balanced Clustering",
        scale="quick",
        request={
            "scale": "quick",
            "model": None,
            "data": "customers.csv",
            "device": "cpu",
            "options": {"clusters": "8"},
        },
        seeds=[0],
        arms=["lmbc", "kmeans", "spectral"],
        claims=claims,
        rows=rows,
        trade_offs=[["seconds@n=10000", "entropy"]],
        run=RUN | {"started": "2026-11-30T20:02:11+00:00", "finished": "2026-11-30T20:02:58+00:00"},
    )


HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"> & {{ 7 * 7 }} %{x}"
)


def hostile() -> Result:
    """Mark-up in every string, and numbers that are none."""
    pairs: list[dict[str, Any]] = [
        {"seed": 0, "arm": 1.0, "against": 2.0, "baseline": HOSTILE},
        {"seed": 1, "arm": math.nan, "against": 2.0, "baseline": HOSTILE},
        {"seed": 2, "arm": 1.5, "against": None, "baseline": None},
    ]
    claim = ClaimResult(HOSTILE, HOSTILE, HOSTILE, HOSTILE, [HOSTILE], "ratio_at_least", 1.0, False, "inconclusive")
    claim.effect, claim.low, claim.high, claim.n, claim.interval = 0.5, -math.inf, math.inf, 1, HOSTILE
    claim.reason, claim.pairs = HOSTILE, pairs
    numberless = ClaimResult(
        "n", "No number.", "m", "a", ["b"], "difference_at_least", math.nan, False, "does not hold"
    )
    numberless.effect = numberless.low = numberless.high = math.nan
    rows = [
        Row(
            0,
            HOSTILE,
            metrics={HOSTILE: math.inf, "m": math.nan, "q": 1e-9},
            missing={HOSTILE: HOSTILE},
            notes=[HOSTILE],
        ),
        Row(1, HOSTILE, "failed", error={"type": HOSTILE, "message": HOSTILE, "traceback": HOSTILE}),
        Row(0, "b", "unavailable", error={"message": HOSTILE}),
        Row(0, "t", metrics={"m": 2.0, "q": 1e12}, resources={"seconds": math.nan, "peak_memory_bytes": None}),
    ]
    return Result(
        method=HOSTILE,
        field=HOSTILE,
        title=HOSTILE,
        scale=HOSTILE,
        request={"model": HOSTILE, "options": {HOSTILE: HOSTILE}},
        seeds=[0, 1],
        arms=[HOSTILE, "b", "t"],
        claims=[claim, numberless],
        rows=rows,
        trade_offs=[["m", "q"], ["q", "q"]],
        remarks=[HOSTILE],
        run={"finished": HOSTILE, "machine": {HOSTILE: HOSTILE}, "versions": {}},
    )


def _judged(comparison: Comparison, text: str, rows: list[Row]) -> ClaimResult:
    return judge_claim(comparison, text, "full", rows)
