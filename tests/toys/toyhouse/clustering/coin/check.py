"""Known answers: heads of a fair and of a bent coin."""

import os
import time
from pathlib import Path

import numpy as np

from practicum.checks import CannotMeasure, Check, Comparison, Metrics, arm


class CoinCheck(Check):
    comparisons = (
        Comparison("fairer", metric="heads", arm="fair", against="bent", ratio_at_least=1.2),
        Comparison("same", metric="heads", arm="fair", against="again", within=1e-12),
        Comparison("half", metric="heads", arm="fair", value_at_least={"quick": 0.4, "full": 0.45}),
    )
    seeds = {"quick": 4, "full": 6}

    def prepare(self, request):
        try:
            self.pause = float(request.options.get("pause", 0))
        except ValueError:
            raise CannotMeasure(f"--pause must be a number; got {request.options['pause']!r}") from None
        if request.data:
            lines = Path(request.data).read_text().split()
            return np.array([float(line) for line in lines])
        if log := os.environ.get("TOY_LOG"):
            with Path(log).open("a") as stream:
                stream.write(f"prepare {request.seed}\n")
        return np.random.default_rng(request.seed).random(request.pick(quick=500, full=5000))

    def _count(self, sample, threshold):
        time.sleep(self.pause)
        head = sample[:40]
        spectrum = np.linalg.svd(np.outer(head, head) + np.eye(head.size), compute_uv=False)
        return Metrics({"heads": float(np.mean(sample < threshold)), "spectrum": float(spectrum.sum())})

    @arm("fair")
    def fair(self, sample):
        return self._count(sample, 0.5)

    @arm("bent")
    def bent(self, sample):
        return self._count(sample, 0.3)

    @arm("again")
    def again(self, sample):
        return self._count(sample, 0.5)
