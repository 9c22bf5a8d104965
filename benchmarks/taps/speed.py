"""Time taps and probes beside the model alone and scikit-learn; write results/benchmarks/taps.json.

Run from the checkout: ``python benchmarks/taps/speed.py``. It takes some minutes on one thread. Ratios are of CPU
time, of work that is done in turn in one run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from practicum.checks.check import Workload
from practicum.checks.measure import machine, time_workloads
from practicum.checks.results import write_json
from practicum.checks.store import versions
from practicum.models import load_language_model
from practicum.toolbox.probes import AttentionProbe, LinearProbe, WeightDecayMLP
from practicum.toolbox.taps import Taps, n_layers

OUT = Path(__file__).resolve().parents[2] / "results" / "benchmarks" / "taps.json"
PROMPT_TOKENS = 128
NEW_TOKENS = 16
WIDTH = 576


def main() -> None:
    """Measure and write."""
    ratios = [*overheads(), *fits(), prefixes()]
    content = {
        "method": "taps",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(("practicum", "torch", "transformers", "scikit-learn", "numpy")),
        "ratios": ratios,
    }
    write_json(OUT, content)
    for ratio in ratios:
        print(ratio)


def overheads() -> list[dict[str, Any]]:
    """CPU time of prefill and decoding with taps over that without."""
    model = load_language_model().model
    depth = n_layers(model)
    prompt = torch.randint(1000, 20_000, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))

    def prefill() -> None:
        with torch.no_grad():
            model(prompt, use_cache=False)

    def decode() -> None:
        model.generate(
            prompt[:, :8], attention_mask=torch.ones(1, 8), do_sample=False, min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
        )  # fmt: skip

    def tapped(run: Callable[[], None], layers: list[int]) -> None:
        with Taps(model, layers):
            run()

    rows = []
    for name, run in (("prefill of 128 tokens", prefill), ("decoding of 16 tokens", decode)):
        seconds = timed(
            {
                "plain": run,
                "one": partial(tapped, run, [depth // 2]),
                "all": partial(tapped, run, list(range(depth + 1))),
            },
            repeats=9,
        )
        for what, share in (("one", 1.05), ("all", 1.15)):
            layers = "one layer" if what == "one" else f"all {depth + 1} layers"
            rows.append(figure(f"{name} with taps on {layers} over without", seconds[what] / seconds["plain"], share))
    return rows


def fits() -> list[dict[str, Any]]:
    """CPU time of fitting our probes over that of scikit-learn's on the same 2,000 activations."""
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=2000)
    X = rng.normal(size=(2000, WIDTH)).astype(np.float32)
    X[:, :20] += 0.3 * (2 * y - 1)[:, None]
    # Ours standardise inside, so that theirs do too.
    standardised = partial(make_pipeline, StandardScaler())
    same = {"alpha": 0.0, "batch_size": 256, "max_iter": 60, "n_iter_no_change": 60, "learning_rate_init": 2e-3}
    # That the peer stops after as many epochs is meant.
    warnings.simplefilter("ignore", ConvergenceWarning)
    seconds = timed(
        {
            "linear": partial(LinearProbe().fit, X, y),
            "logistic": partial(standardised(LogisticRegression(max_iter=1000)).fit, X, y),
            "mlp": partial(WeightDecayMLP(random_state=0).fit, X, y - 0.5),
            "peer": partial(standardised(MLPClassifier(128, random_state=0, **same)).fit, X, y),
        },
        repeats=3,
    )
    return [
        figure("fit of LinearProbe over LogisticRegression", seconds["linear"] / seconds["logistic"], 1.5),
        figure("fit of WeightDecayMLP over MLPClassifier, 60 epochs each", seconds["mlp"] / seconds["peer"], 1.0),
    ]


def prefixes() -> dict[str, Any]:
    """CPU time of predicting every prefix of 512 tokens one by one over that of predict_prefixes."""
    rng = np.random.default_rng(0)
    X = [rng.normal(size=(512, WIDTH)).astype(np.float32) for _ in range(4)]
    probe = AttentionProbe(epochs=1, random_state=0).fit(X, [0, 1, 2, 3])
    trace = X[0]

    def again() -> None:
        for t in range(len(trace)):
            probe.predict_proba([trace[: t + 1]])

    seconds = timed({"once": partial(probe.predict_prefixes, [trace]), "again": again}, repeats=3)
    return figure("every prefix of 512 tokens anew over predict_prefixes", seconds["again"] / seconds["once"], least=10)


def timed(work: dict[str, Callable[[], Any]], *, repeats: int) -> dict[str, float]:
    """CPU seconds of each, the median of its repeats, taken in turn."""
    workload = partial(Workload, clock="cpu", threads=1, repeats=repeats)
    timings, errors = time_workloads({name: workload(run) for name, run in work.items()})
    if errors:
        raise next(iter(errors.values()))
    return {name: timings[name]["value"] for name in work}


def figure(what: str, value: float, at_most: float | None = None, least: float | None = None) -> dict[str, Any]:
    """A row of the table."""
    if least is not None:
        return {"what": what, "value": value, "target": f"at least {least:g}", "met": value >= least}
    return {"what": what, "value": value, "target": f"at most {at_most:g}", "met": value <= at_most}


if __name__ == "__main__":
    main()
