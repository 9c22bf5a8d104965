"""A timed comparison whose outcome is not in doubt."""

import os
from pathlib import Path

import numpy as np

from practicum.checks import Check, Comparison, Curve, Metrics, Workload, arm


class RaceCheck(Check):
    comparisons = (
        Comparison("faster", metric="sums_per_second", arm="numpy", against="python", ratio_at_least=2.0, timed=True),
        Comparison("same-sum", metric="sum", arm="numpy", against="python", within=1e-6),
    )
    trade_offs = (("sums_per_second", "sum"),)
    curves = (Curve("partial sums", x="numbers", y="sum"),)
    seeds = {"quick": 3, "full": 3}

    def prepare(self, request):
        self.log = os.environ.get("TOY_LOG")
        self._note(f"prepare {request.seed}")
        return np.random.default_rng(request.seed).random(20_000)

    def _note(self, text):
        if self.log:
            with Path(self.log).open("a") as stream:
                stream.write(text + "\n")

    def _timed(self, name, total, sample):
        def call():
            self._note(name)
            return total(sample)

        return Metrics({"sum": float(total(sample))}, timed={"sums_per_second": Workload(call, units=1, repeats=3)})

    @arm("numpy")
    def numpy(self, sample):
        return self._timed("numpy", np.sum, sample)

    @arm("python")
    def python(self, sample):
        return self._timed("python", sum, sample)

    @arm("length")
    def length(self, sample):
        return Metrics({"length": float(sample.size)}, curves={"partial sums": [(0, 0.0), (1, float("nan"))]})

    def derive(self, arm, metrics):
        return {"seconds": 1 / metrics["sums_per_second"]} if "sums_per_second" in metrics else {}

    def remarks(self, means):
        yield f"numpy made {means['numpy']['sum']:.0f}"
