"""The claims of the Aitchison geometry of attention, measured beside entropy, the largest logit and other gauges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from practicum.checks import CannotMeasure, Check, Comparison, Curve, Metrics, Request, arm
from practicum.datasets import DataFileError, docstrings, read_jsonl
from practicum.language.aitchison import (
    AttentionMonitor,
    LengthExponents,
    aitchison_norm,
    attention_statistics,
    expected_aitchison_norm,
    length_scale,
    min_inverse_temperature,
    sharpening_inverse_temperature,
)
from practicum.language.aitchison.linear import METRICS, statistics_of_logits
from practicum.models import load_language_model
from practicum.toolbox.kv import AttentionCall, AttentionTap
from practicum.toolbox.taps import n_layers

SHORT_BIN = (33, 64)
# Rows of a window that are measured see as many keys at least.
FEWEST_KEYS = 32
FEWEST_WINDOWS = 8
BETAS = (0.1, 0.3, 1.0, 3.0, 10.0)
TAUS = (0.1, 0.5, 0.9)
BITS = (4, 3, 2)
FAULTS = ("tail noise", "temperature", *(f"keys {bits} bit" for bits in BITS))
TRAINED_LENGTH = 16
ITEMS_AT_ONCE = 2**17
LAWS = ("none", "sqrt_log", "log", "yarn", "adaptive", "auto", "learned")
CLASSES = 10
HEALTHY, COLLAPSED = 6e-3, 5e-2
WATCHED_EVERY = 10
NOT_YOURS = "is about generated rows and networks trained here; not measured on your own model or data"


@dataclass(frozen=True)
class Sizes:
    """What a scale changes."""

    gaussian: tuple[int, ...]
    rows: int
    windows: int
    window: int
    layers: int
    length: int
    train_layers: int
    train_steps: int
    batch: int
    retrieval_steps: int
    retrieval_lengths: tuple[int, ...]
    tests: int


class AitchisonCheck(Check):
    """Gaussian rows, rows of a language model with and without faults, and two networks trained on the spot."""

    comparisons = (
        Comparison("finite-limit", metric="limit gap", arm="aitchison", value_at_most=1.0),
        Comparison("probabilities-vanish", metric="shrinks by", arm="max_prob", value_at_least=10.0),
        Comparison("model-keeps-telling-apart", metric="long over short", arm="aitchison", value_at_least=0.8),
        Comparison("model-probabilities-fall", metric="long over short", arm="max_prob", value_at_most=1.0),
        Comparison("bound-holds", metric="violations", arm="aitchison", value_at_most=0.0),
        Comparison("bound-grows-like-sqrt-log", metric="bound rate off 0.475", arm="aitchison", value_at_most=0.125),
        Comparison("sqrt-log-keeps-gaussian-rows-sharp", metric="p_max kept", arm="sqrt_log", value_at_least=0.6),
        Comparison("no-scale-loses-sharpness", metric="p_max kept", arm="none", value_at_most=0.5),
        Comparison("linear-in-temperature", metric="linearity error", arm="aitchison", value_at_most=1e-5),
        Comparison("entropy-saturates", metric="movement at the ends", arm="entropy", value_at_most=0.1),
        Comparison(
            "sees-the-tail", metric="auroc tail noise", arm="aitchison", against="entropy", difference_above=0.0
        ),
        Comparison(
            "sees-the-temperature",
            metric="auroc temperature",
            arm="aitchison",
            against="entropy",
            difference_at_least=0.0,
        ),
        Comparison(
            "sees-quantised-keys",
            metric="auroc quantised keys",
            arm="aitchison",
            against="entropy",
            difference_at_least=0.0,
        ),
        Comparison("moves-in-collapse", metric="last over step 50", arm="aitchison", value_at_least=10.0),
        Comparison("entropy-stuck-in-collapse", metric="moved since step 50", arm="entropy", value_at_most=0.1),
        Comparison("agrees-in-health", metric="agreement with negative entropy", arm="aitchison", value_at_least=0.8),
        Comparison(
            "scale-helps-length", metric="accuracy at 16x", arm="sqrt_log", against="none", difference_above=0.0
        ),
    )
    seeds = {"quick": 3, "full": 5, "paper": 5}
    curves = (
        Curve("over length", x="log2 of the keys that a row sees", y="relative to rows that see 32 to 63"),
        Curve("gaussian rows", x="log2 of the keys", y="largest probability"),
        Curve("retrieval", x="log2 of the items", y="accuracy"),
    )

    def prepare(self, request: Request) -> Work:
        """Read the model's queries and keys, and train the networks."""
        sizes = request.pick(
            quick=Sizes(
                gaussian=(64, 256, 1024, 4096, 16384),
                rows=128,
                windows=24,
                window=128,
                layers=3,
                length=1024,
                train_layers=1,
                train_steps=250,
                batch=8,
                retrieval_steps=350,
                retrieval_lengths=(16, 64, 256),
                tests=600,
            ),
            full=Sizes(
                gaussian=(256, 1024, 4096, 16384, 65536),
                rows=400,
                windows=48,
                window=256,
                layers=7,
                length=4096,
                train_layers=2,
                train_steps=400,
                batch=16,
                retrieval_steps=2000,
                retrieval_lengths=(16, 64, 256, 1024, 4096),
                tests=4000,
            ),
        )
        own = request.model is not None or request.data is not None
        tokens, limit = _texts(request, sizes)
        return Work(request, sizes, own, tokens, limit)

    @arm("aitchison")
    def aitchison(self, work: Work) -> Metrics:
        """The normalised Aitchison norm."""
        values, missing, curves = work.gauge("aitchison")
        values |= {"violations": float(work.violations), "rows of the bound": float(work.bounded_rows)}
        values["linearity error"] = work.linearity_error
        if work.own:
            missing |= dict.fromkeys(("limit gap", "bound rate off 0.475"), NOT_YOURS)
        else:
            rate = work.bound_rate
            values |= {"limit gap": work.limit_gap, "bound rate": rate, "bound rate off 0.475": abs(rate - 0.475)}
        return Metrics(values, missing=missing, curves=curves)

    @arm("entropy")
    def entropy(self, work: Work) -> Metrics:
        """Shannon entropy of the row: what people watch today."""
        values, missing, curves = work.gauge("entropy")
        values["movement at the ends"] = work.entropy_at_ends
        return Metrics(values, missing=missing, curves=curves)

    @arm("max_logit")
    def max_logit(self, work: Work) -> Metrics:
        """The largest logit: the strongest simple peer, and what clipping schemes watch."""
        values, missing, curves = work.gauge("max_logit")
        return Metrics(values, missing=missing, curves=curves)

    @arm("max_prob")
    def max_prob(self, work: Work) -> Metrics:
        """The largest probability."""
        values, missing, curves = work.gauge("max_prob")
        if work.own:
            missing["shrinks by"] = NOT_YOURS
        else:
            peaks = work.gaussian_norms[1]
            values["shrinks by"] = peaks[work.sizes.gaussian[0]] / peaks[work.sizes.gaussian[-1]]
        return Metrics(values, missing=missing, curves=curves)

    @arm("effective_tokens")
    def effective_tokens(self, work: Work) -> Metrics:
        """The exponential of entropy."""
        values, missing, curves = work.gauge("effective_tokens")
        return Metrics(values, missing=missing, curves=curves)

    @arm("participation")
    def participation(self, work: Work) -> Metrics:
        """One over the sum of squared probabilities."""
        values, missing, curves = work.gauge("participation")
        return Metrics(values, missing=missing, curves=curves)

    @arm("none")
    def none(self, work: Work) -> Metrics:
        """Logits as they are."""
        return work.scaled("none")

    @arm("sqrt_log")
    def sqrt_log(self, work: Work) -> Metrics:
        """The rate of the paper's lower bound."""
        return work.scaled("sqrt_log")

    @arm("log")
    def log(self, work: Work) -> Metrics:
        """SSMax: in proportion to log n."""
        return work.scaled("log")

    @arm("yarn")
    def yarn(self, work: Work) -> Metrics:
        """YaRN's attention factor."""
        return work.scaled("yarn")

    @arm("adaptive")
    def adaptive(self, work: Work) -> Metrics:
        """Adaptive temperature: a polynomial of the row's entropy, fitted to this network on longer inputs."""
        return work.scaled("adaptive")

    @arm("auto")
    def auto(self, work: Work) -> Metrics:
        """The exponent of log n that holds the largest probability in longer inputs, measured without labels."""
        return work.scaled("auto")

    @arm("learned")
    def learned(self, work: Work) -> Metrics:
        """The exponent of log n trained on longer inputs with labels."""
        return work.scaled("learned")

    def remarks(self, means: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
        """The strongest simple peer, and what a lower bound says and does not say."""
        ours, peer, entropy = (means.get(name, {}) for name in ("aitchison", "max_logit", "entropy"))
        faults = [f"auroc {fault}" for fault in FAULTS if f"auroc {fault}" in ours and f"auroc {fault}" in peer]
        if faults:
            told = "; ".join(
                f"{m.removeprefix('auroc ')} {ours[m]:.2f} / {peer[m]:.2f} / {entropy[m]:.2f}" for m in faults
            )
            yield f"AUROC of the Aitchison norm / the largest logit / entropy: {told}."
        none, root, log = (means.get(name, {}).get("accuracy at 16x") for name in ("none", "sqrt_log", "log"))
        if none is not None and root is not None and log is not None:
            yield (
                "The rate sqrt(log n) is a lower bound on the scale: with less, long rows cannot stay sharp. It is not "
                f"a law that suffices: the retrieval network has accuracy {none:.3f} without a scale at 16 times its "
                f"training length, {root:.3f} with sqrt(log n) and {log:.3f} with log n."
            )


class Work:
    """The work of one seed; what several arms look at is computed once.

    Parameters
    ----------
    request : Request
    sizes : Sizes
    own : bool
        Whether the model or the texts are the user's.
    tokens : Tensor of shape (n,)
        Of the texts, one after the other.
    limit : int
        The longest context that is measured.
    """

    def __init__(self, request: Request, sizes: Sizes, own: bool, tokens: Tensor, limit: int) -> None:
        self.request, self.sizes, self.own = request, sizes, own
        self.tokens, self.limit = tokens, limit

    def generator(self, purpose: int) -> torch.Generator:
        """Random numbers that do not depend on what else was drawn."""
        return torch.Generator().manual_seed(1_000_003 * self.request.seed + purpose)

    def gauge(self, metric: str) -> tuple[dict[str, float], dict[str, str], dict[str, list[tuple[float, float]]]]:
        """Everything that each gauge is measured by."""
        short, long = self.over_length[metric]
        values = {"short": short, "long": long, "long over short": long / short}
        values |= {f"auroc {fault}": auroc for fault, auroc in self.detection(metric).items()}
        values["auroc quantised keys"] = float(np.mean([values[f"auroc keys {bits} bit"] for bits in BITS]))
        missing = {}
        if self.own:
            names = ["agreement with negative entropy", "last over step 50", "moved since step 50", "first alarm"]
            missing = dict.fromkeys(names, NOT_YOURS)
        else:
            values |= self.in_training(metric)
        bins = self.length_curve[metric]
        curves = {"over length": [(math.log2(n), y / bins[0][1]) for n, y in bins]}
        return values, missing, curves

    # Gaussian rows ----------------------------------------------------------------------------------------------------

    @cached_property
    def gaussian_norms(self) -> tuple[dict[tuple[int, int], tuple[float, float]], dict[int, float]]:
        """Mean of the norm over sqrt(L - 1) and its standard error by (d, L); the mean largest probability by L."""
        generator = self.generator(1)
        norms, peaks = {}, {}
        for d in (8, 64, 128):
            for n in self.sizes.gaussian:
                found, tops = [], []
                for _ in range(8):
                    keys = torch.randn(n, d, generator=generator)
                    queries = torch.randn(self.sizes.rows // 8, d, generator=generator)
                    z = queries @ keys.T / math.sqrt(d)
                    found.append(aitchison_norm(z, normalized=False) / math.sqrt(n - 1))
                    if d == 64:
                        tops.append(torch.exp(z.amax(1) - z.logsumexp(1)))
                norm = torch.cat(found).double()
                norms[d, n] = (float(norm.mean()), float(norm.std() / math.sqrt(len(norm))))
                if d == 64:
                    peaks[n] = float(torch.cat(tops).double().mean())
        return norms, peaks

    @property
    def limit_gap(self) -> float:
        """The largest distance from the limit, in units of what is allowed: 3 standard errors or 1 %."""
        gaps = []
        for (d, _), (mean, error) in self.gaussian_norms[0].items():
            # With two keys it is the limit times the mean of the absolute value of a standard normal.
            limit = expected_aitchison_norm(2, d, normalized=False) / math.sqrt(2 / math.pi)
            gaps.append(abs(mean - limit) / max(3 * error, 0.01 * limit))
        return max(gaps)

    @cached_property
    def normal_rows(self) -> dict[int, Tensor]:
        """Rows of standard normal logits by length."""
        generator = self.generator(2)
        return {n: torch.randn(self.sizes.rows, n, generator=generator) for n in self.sizes.gaussian}

    @property
    def bound_rate(self) -> float:
        """The slope of the logarithm of the bound over log log n."""
        bounds = {n: float(min_inverse_temperature(z).double().mean()) for n, z in self.normal_rows.items()}
        return float(np.polyfit([math.log(math.log(n)) for n in bounds], np.log(list(bounds.values())), 1)[0])

    def gaussian_peaks(self, law: str) -> list[tuple[int, float]]:
        """The mean largest probability by length, at the critical temperature of the shortest."""
        shortest = self.sizes.gaussian[0]
        critical = math.sqrt(2 * math.log(shortest))
        out = []
        for n, z in self.normal_rows.items():
            z = critical * float(length_scale(torch.tensor(n), law, shortest)) * z
            out.append((n, float(torch.exp(z.amax(1) - z.logsumexp(1)).double().mean())))
        return out

    # The bound --------------------------------------------------------------------------------------------------------

    @cached_property
    def _bound(self) -> tuple[int, int]:
        generator, rows = self.generator(3), self.sizes.rows
        real = self.real_rows
        kinds = [real.reshape(-1, real.shape[-1])]
        if not self.own:
            for n in (2, 16, 256):
                normal = torch.randn(rows, n, generator=generator)
                uniform = torch.rand(rows, n, generator=generator)
                kinds += [normal, -torch.log(uniform.clamp_min(1e-30)), torch.tan(3.1 * (uniform - 0.5))]
                kinds += [normal.round(), (uniform > 0.5).float(), torch.eye(n).repeat(rows // n + 1, 1)[:rows]]
        violations = count = 0
        for z in kinds:
            for tau in TAUS:
                least = min_inverse_temperature(z.double(), tau, mask=torch.isfinite(z))
                exact = sharpening_inverse_temperature(z, tau, mask=torch.isfinite(z))
                # The equality case is met to the rounding of float64.
                violations += int((exact < least * (1 - 1e-9)).sum())
                count += len(z)
        return violations, count

    @property
    def violations(self) -> int:
        """Rows whose exact inverse temperature is below the bound."""
        return self._bound[0]

    @property
    def bounded_rows(self) -> int:
        """Rows and taus that were looked at."""
        return self._bound[1]

    # A real model -----------------------------------------------------------------------------------------------------

    @cached_property
    def _layers(self) -> list[int]:
        n = n_layers(_language_model(self.request.model, self.request.device).model)
        return (list(range(2, max(n - 2, 3), 4)) or [1])[: self.sizes.layers]

    @cached_property
    def windows(self) -> list[AttentionCall]:
        """Queries and keys of all windows, a call for each layer."""
        w = self.sizes.window
        n = min(self.sizes.windows, len(self.tokens) // w)
        start = len(self.tokens) - n * w
        ids = self.tokens[start:].reshape(n, w)
        model = _language_model(self.request.model, self.request.device).model
        recorded: dict[int, list[AttentionCall]] = {}
        for batch in ids.split(8):
            for call in _recorded(model, batch, self._layers):
                recorded.setdefault(call.layer, []).append(call)
        return [_joined(calls) for calls in recorded.values()]

    @cached_property
    def over_length(self) -> dict[str, tuple[float, float]]:
        """Of each gauge, the mean over rows that see 33 to 64 keys, and over those of the second half."""
        return {metric: (short, long) for metric, (short, long, _) in self._long_context.items()}

    @property
    def length_curve(self) -> dict[str, list[tuple[int, float]]]:
        """Means by the number of keys, from 32."""
        return {metric: bins for metric, (_, _, bins) in self._long_context.items()}

    @cached_property
    def _long_context(self) -> dict[str, tuple[float, float, list[tuple[int, float]]]]:
        ids = self.tokens[None, : self.limit]
        model = _language_model(self.request.model, self.request.device).model
        found: dict[str, list[Tensor]] = {metric: [] for metric in METRICS}
        # Half of the rows and a few for each of the shorter bins would do; every fourth keeps the bins comparable.
        rows = torch.cat([torch.arange(31, 64), torch.arange(64, self.limit, max(1, self.limit // 256))])
        for call in _recorded(model, ids, self._layers):
            for metric, values in attention_statistics(call, METRICS, rows=rows).items():
                found[metric].append(values[0].double().mean(0))
        out = {}
        seen = rows + 1
        short = (seen >= SHORT_BIN[0]) & (seen <= SHORT_BIN[1])
        long = seen > self.limit // 2
        for metric, parts in found.items():
            values = torch.stack(parts).mean(0)
            bins = []
            for b in range(5, int(math.log2(self.limit)) + 1):
                inside = (seen >= 2**b) & (seen < 2 ** (b + 1))
                if inside.any():
                    bins.append((2**b, float(values[inside].mean())))
            out[metric] = (float(values[short].mean()), float(values[long].mean()), bins)
        return out

    @cached_property
    def real_rows(self) -> Tensor:
        """Some rows of the windows' logits, with -inf for keys that they do not see: (layers, rows, window)."""
        w, generator = self.sizes.window, self.generator(4)
        rows = []
        for call in self.windows:
            z = call.logits(torch.tensor([w // 2, w - 1])).reshape(-1, w)
            rows.append(z[torch.randperm(len(z), generator=generator)[:400]])
        return torch.stack(rows)

    @property
    def linearity_error(self) -> float:
        """The largest error of the norm of log-probabilities against beta times that of the logits, relative to it."""
        z = self.real_rows.double()
        seen = torch.isfinite(z)
        base = aitchison_norm(z, mask=seen)
        worst = 0.0
        for beta in BETAS:
            logs = (beta * z).log_softmax(-1)
            error = (aitchison_norm(logs, mask=seen) - beta * base).abs() / (beta * base)
            worst = max(worst, float(error.max()))
        return worst

    @property
    def entropy_at_ends(self) -> float:
        """How much entropy moves with log beta at 0.1 and 10, over its largest movement: mean over the rows."""
        z = self.real_rows.double()
        moves = []
        for beta in np.geomspace(BETAS[0], BETAS[-1], 21):
            p = (beta * z).softmax(-1)
            finite = z.masked_fill(z == -torch.inf, 0)
            mean = (p * finite).sum(-1)
            moves.append(float(beta**2 * ((p * finite**2).sum(-1) - mean**2).mean()))
        return max(moves[0], moves[-1]) / max(moves)

    @cached_property
    def _gauged(self) -> dict[str, dict[str, NDArray[np.float64]]]:
        """By fault and gauge, the mean over rows of each head in each window: (windows, layers * heads)."""
        generator = self.generator(5)
        out: dict[str, dict[str, list[Tensor]]] = {}
        for call in self.windows:
            for batch in torch.arange(len(call.query)).split(8):
                part = _some(call, batch)
                rows = slice(FEWEST_KEYS - 1, None)
                clean = part.logits(rows)
                cases = {"clean": clean, "tail noise": _tail_noise(clean, generator), "temperature": 1.05 * clean}
                for bits in BITS:
                    cases[f"keys {bits} bit"] = part.replace(key=_quantised(part.key, bits)).logits(rows)
                for fault, z in cases.items():
                    for metric, values in statistics_of_logits(z, z).items():
                        out.setdefault(fault, {}).setdefault(metric, []).append(values.mean(2))
        n = len(self.windows)
        joined: dict[str, dict[str, NDArray[np.float64]]] = {}
        for fault, by_metric in out.items():
            joined[fault] = {}
            for metric, parts in by_metric.items():
                size = len(parts) // n
                layers = [torch.cat(parts[i * size : (i + 1) * size]) for i in range(n)]
                joined[fault][metric] = torch.cat(layers, dim=1).double().numpy()
        return joined

    def detection(self, metric: str) -> dict[str, float]:
        """AUROC of faulty against clean windows by the root mean square of the heads' z-scores."""
        clean = self._gauged["clean"][metric]
        order = torch.randperm(len(clean), generator=self.generator(6)).numpy()
        calibration, test = order[: len(order) // 2], order[len(order) // 2 :]
        mean, sd = clean[calibration].mean(0), clean[calibration].std(0, ddof=1)
        sd = np.maximum(sd, 1e-9 * np.abs(mean) + 1e-12)

        def score(values: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.sqrt((((values[test] - mean) / sd) ** 2).mean(1))

        labels = np.repeat([0, 1], len(test))
        return {
            fault: float(roc_auc_score(labels, np.concatenate([score(clean), score(self._gauged[fault][metric])])))
            for fault in FAULTS
        }

    # Training ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _runs(self) -> dict[float, dict[str, NDArray[np.float64]]]:
        return {rate: self._train(rate) for rate in (HEALTHY, COLLAPSED)}

    def _train(self, rate: float) -> dict[str, NDArray[np.float64]]:
        """Each gauge of the first layer at the watched steps of a small character model."""
        from transformers import LlamaConfig, LlamaForCausalLM

        text = "\n".join(docstrings(400, random_state=self.request.seed).documents).encode("ascii", "ignore")
        ids = torch.tensor(list(text))
        config = LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=self.sizes.train_layers,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
        with torch.random.fork_rng(devices=[]):
            torch.random.manual_seed(self.request.seed)
            model = LlamaForCausalLM(config).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
        generator = self.generator(7)
        found: dict[str, list[float]] = {metric: [] for metric in METRICS}
        for step in range(1, self.sizes.train_steps + 1):
            starts = torch.randint(0, len(ids) - 64, (self.sizes.batch,), generator=generator)
            batch = ids[starts[:, None] + torch.arange(64)]
            if step % WATCHED_EVERY == 0 or step == 1:
                with AttentionMonitor(model, layers=1, metrics=METRICS) as monitor:
                    loss = model(batch, labels=batch, use_cache=False).loss
                for metric, values in monitor.result().items():
                    found[metric].append(float(values.mean()))
                found.setdefault("loss", []).append(float(loss.detach()))
            else:
                loss = model(batch, labels=batch, use_cache=False).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        return {metric: np.array(values) for metric, values in found.items()}

    def in_training(self, metric: str) -> dict[str, float]:
        """How a gauge moves in the healthy run and in the one whose attention collapses."""
        healthy, collapsed = self._runs[HEALTHY], self._runs[COLLAPSED]
        at_50 = 50 // WATCHED_EVERY
        agreement = spearmanr(healthy[metric], -healthy["entropy"]).statistic
        values = {
            "agreement with negative entropy": float(agreement),
            "last over step 50": float(collapsed[metric][-1] / collapsed[metric][at_50]),
            "moved since step 50": float(abs(collapsed[metric][-1] - collapsed[metric][at_50])),
            "loss, healthy": float(healthy["loss"][-1]),
            "loss, collapsed": float(collapsed["loss"][-1]),
        }
        settled = healthy[metric][2:]
        z = np.abs(collapsed[metric] - settled.mean()) / max(float(settled.std(ddof=1)), 1e-12)
        steps = np.array([1, *range(WATCHED_EVERY, self.sizes.train_steps + 1, WATCHED_EVERY)])
        # Both runs begin at the same place, which is not yet where a healthy one settles.
        alarms = steps[2:][z[2:] > 4]
        values["first alarm"] = float(alarms[0]) if len(alarms) else float(self.sizes.train_steps)
        return values

    # Length scaling ---------------------------------------------------------------------------------------------------

    def scaled(self, law: str) -> Metrics:
        """Gaussian rows and the retrieval network under a law."""
        if self.own:
            return Metrics(missing=dict.fromkeys(("p_max kept", "accuracy at 16x"), NOT_YOURS))
        values: dict[str, float] = {}
        curves: dict[str, list[tuple[float, float]]] = {}
        if law in ("none", "sqrt_log", "log", "yarn"):
            peaks = self.gaussian_peaks(law)
            values["p_max kept"] = peaks[-1][1] / peaks[0][1]
            curves["gaussian rows"] = [(math.log2(n), peak) for n, peak in peaks]
        accuracies = list(self.retrieval.accuracies[law].items())
        values |= {f"accuracy at {n}": accuracy for n, accuracy in accuracies}
        values["accuracy at 16x"] = dict(accuracies)[16 * TRAINED_LENGTH]
        curves["retrieval"] = [(math.log2(n), accuracy) for n, accuracy in accuracies]
        return Metrics(values, curves=curves)

    @cached_property
    def retrieval(self) -> Retrieval:
        """The retrieval network, trained."""
        return Retrieval(self)


class Retrieval:
    """One attention head that finds the item of the highest priority among items, trained on up to 16 of them.

    Parameters
    ----------
    work : Work
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        with torch.random.fork_rng(devices=[]):
            torch.random.manual_seed(work.request.seed)
            self.net = _Finder()
        optimizer = torch.optim.Adam(self.net.parameters(), lr=3e-3)
        generator = work.generator(8)
        for step in range(work.sizes.retrieval_steps):
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * 0.5 * (1 + math.cos(math.pi * step / work.sizes.retrieval_steps))
            n = int(torch.randint(2, TRAINED_LENGTH + 1, (1,), generator=generator))
            items, answer = _items(128, n, generator)
            loss = nn.functional.cross_entropy(self.net(items), answer)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        self.net.requires_grad_(False)

    @cached_property
    def accuracies(self) -> dict[str, dict[int, float]]:
        """Share of right answers by law and number of items, of the same inputs for every law."""
        out: dict[str, dict[int, float]] = {law: {} for law in LAWS}
        for n in self.work.sizes.retrieval_lengths:
            generator = self.work.generator(100 + n)
            right, left = dict.fromkeys(LAWS, 0), self.work.sizes.tests
            while left > 0:
                size = min(left, max(1, ITEMS_AT_ONCE // n))
                left -= size
                items, answer = _items(size, n, generator)
                z, votes = self.net.parts(items)
                for law in LAWS:
                    chosen = self.net.read(z * self._factor(law)(z).reshape(-1, 1), votes).argmax(1)
                    right[law] += int((chosen == answer).sum())
            for law in LAWS:
                out[law][n] = right[law] / self.work.sizes.tests
        return out

    def _factor(self, law: str) -> Any:
        if law == "adaptive":
            return self._adaptive
        if law in ("auto", "learned"):
            exponents = self._auto if law == "auto" else self._learned
            return lambda z: exponents(torch.full((1, 1), z.shape[-1]), 1)[0, 0].detach()
        return lambda z: length_scale(torch.tensor(z.shape[-1]), law, TRAINED_LENGTH)

    def _longer(self, purpose: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs up to 16 times longer that are not those of the test."""
        generator = self.work.generator(purpose)
        for n in (32, 64, 128, 256):
            yield _items(500, n, generator)

    @cached_property
    def _polynomial(self) -> NDArray[np.float64]:
        """Of the entropy: the inverse temperature with the best likelihood in each tenth of the rows."""
        grid = torch.linspace(1, 6, 26)
        entropies, losses = [], []
        for items, answer in self._longer(9):
            z, votes = self.net.parts(items)
            entropies.append(_entropy(z))
            tried = [self.net.read(beta * z, votes) for beta in grid.tolist()]
            losses.append(torch.stack([nn.functional.cross_entropy(x, answer, reduction="none") for x in tried], dim=1))
        entropy, loss = torch.cat(entropies), torch.cat(losses)
        order = entropy.argsort().chunk(10)
        x = [float(entropy[rows].mean()) for rows in order]
        y = [float(grid[loss[rows].mean(0).argmin()]) for rows in order]
        return np.polyfit(x, y, 3)

    def _adaptive(self, z: Tensor) -> Tensor:
        entropy = _entropy(z)
        beta = torch.from_numpy(np.polyval(self._polynomial, entropy.numpy())).float().clamp_min(1)
        # Below the entropies that it is fitted to, the method leaves a row alone.
        return torch.where(entropy > 0.5, beta, 1.0)[:, None]

    @cached_property
    def _auto(self) -> LengthExponents:
        generator = self.work.generator(10)
        short = [self.net.parts(_items(200, n, generator)[0])[0] for n in range(9, TRAINED_LENGTH + 1)]
        near = torch.cat([z.softmax(1).amax(1) for z in short])
        x, y = [], []
        for items, _ in self._longer(11):
            n = items.shape[1]
            needed = sharpening_inverse_temperature(self.net.parts(items)[0], float(near.median()))
            x.append(math.log(math.log(n) / math.log(TRAINED_LENGTH)))
            y.append(math.log(float(needed.median())))
        slope = float(np.dot(x, y) / np.dot(x, x))
        return LengthExponents(1, 1, TRAINED_LENGTH, max(0.0, slope))

    @cached_property
    def _learned(self) -> LengthExponents:
        law = LengthExponents(1, 1, TRAINED_LENGTH)
        optimizer = torch.optim.Adam(law.parameters(), lr=0.05)
        generator = self.work.generator(12)
        for _ in range(100):
            n = int(torch.randint(TRAINED_LENGTH + 1, 16 * TRAINED_LENGTH + 1, (1,), generator=generator))
            items, answer = _items(128, n, generator)
            z, votes = self.net.parts(items)
            loss = nn.functional.cross_entropy(self.net.read(z * law(torch.tensor([[n]]), 1)[0], votes), answer)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        return law


class _Finder(nn.Module):
    """A learned query attends to embedded items, and what it gets is classified."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(CLASSES + 1, width), nn.GELU(), nn.Linear(width, width))
        self.query = nn.Parameter(torch.randn(width))
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, CLASSES)

    def parts(self, items: Tensor) -> tuple[Tensor, Tensor]:
        """Attention logits (B, n), and what each item says of the classes, (B, n, classes)."""
        embedded = self.embed(items)
        return self.key(embedded) @ self.query / math.sqrt(len(self.query)), self.out(self.value(embedded))

    @staticmethod
    def read(z: Tensor, votes: Tensor) -> Tensor:
        """Classes by attention, (B, classes)."""
        return (z.softmax(1)[:, None] @ votes)[:, 0]

    def forward(self, items: Tensor) -> Tensor:
        return self.read(*self.parts(items))


def _items(batch: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Classes and uniform priorities of n items, (B, n, classes + 1); the class of the highest, (B,)."""
    classes = torch.randint(0, CLASSES, (batch, n), generator=generator)
    priorities = torch.rand(batch, n, generator=generator)
    items = torch.cat([nn.functional.one_hot(classes, CLASSES).float(), priorities[..., None]], dim=2)
    return items, classes.gather(1, priorities.argmax(1, keepdim=True))[:, 0]


def _entropy(z: Tensor) -> Tensor:
    return torch.special.entr(z.softmax(-1)).sum(-1)


@lru_cache(maxsize=1)
def _language_model(name: str | None, device: str) -> Any:
    return load_language_model(name, device=device)


def _texts(request: Request, sizes: Sizes) -> tuple[Tensor, int]:
    """Tokens of the texts, and the length of the long context."""
    length = _length(request.options.get("length"))
    loaded = _language_model(request.model, request.device)
    most = getattr(loaded.model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 10**9
    wanted = length or sizes.length
    if wanted > most:
        raise CannotMeasure(f"--length {wanted}: the model has positions for {most} tokens")
    needed = sizes.windows * sizes.window + wanted
    if request.data is None:
        texts = docstrings(random_state=request.seed).documents
        order = np.random.default_rng(request.seed).permutation(len(texts))
        texts = [texts[i] for i in order[: needed // 50 + 200]]
    else:
        texts = _read(Path(request.data))
    ids: list[int] = []
    end = loaded.tokenizer.eos_token_id
    for text in texts:
        ids += loaded.tokenizer(text, add_special_tokens=False)["input_ids"] + ([end] if end is not None else [])
        if len(ids) >= needed:
            break
    least = FEWEST_WINDOWS * sizes.window + 2 * SHORT_BIN[1]
    if len(ids) < least:
        raise CannotMeasure(f"--data {request.data}: has {len(ids)} tokens; must have {least} at least")
    limit = min(wanted, len(ids) - FEWEST_WINDOWS * sizes.window)
    return torch.tensor(ids[:needed]), limit


def _length(given: str | None) -> int | None:
    if given is None:
        return None
    if not given.isdecimal() or int(given) < 2 * SHORT_BIN[1]:
        raise CannotMeasure(f"--length {given}: must be a whole number of {2 * SHORT_BIN[1]} at least")
    return int(given)


def _read(path: Path) -> list[str]:
    if path.suffix.lower() == ".jsonl":
        return [row["text"] for row in read_jsonl(path, "text")]
    if not path.is_file():
        raise DataFileError(path, "there is no such file")
    if path.suffix.lower() != ".txt":
        raise DataFileError(path, "its name must end in .jsonl or .txt")
    try:
        return [path.read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        raise DataFileError(path, "cannot be read: must be UTF-8 text") from error


class _Enough(Exception):
    """The last layer that is wanted has been seen; the blocks after it need not run."""


def _recorded(model: nn.Module, ids: Tensor, layers: Sequence[int]) -> list[AttentionCall]:
    """The attention calls of some layers, on the CPU in float32."""
    calls: list[AttentionCall] = []

    def keep(call: AttentionCall) -> None:
        q, k = (x.detach().to("cpu", torch.float32) for x in (call.query, call.key))
        band = call.band()
        # The windows have no padding, so that a mask is the same for all of them.
        mask = None if band is not None else call.attention_mask[:1].cpu()
        options = {"softcap": call.softcap, "sliding_window": None if band is None else band.window}
        options = {name: value for name, value in options.items() if value is not None}
        calls.append(AttentionCall(call.layer, nn.Identity(), q, k, k, mask, call.scaling, True, "flash", options))
        if call.layer == max(layers):
            raise _Enough

    try:
        with torch.no_grad(), AttentionTap(model, keep, layers):
            model(ids.to(next(model.parameters()).device), use_cache=False)
    except _Enough:
        pass
    return calls


def _joined(calls: list[AttentionCall]) -> AttentionCall:
    q, k = torch.cat([c.query for c in calls]), torch.cat([c.key for c in calls])
    return replace(calls[0], query=q, key=k, value=k, memo={})


def _some(call: AttentionCall, which: Tensor) -> AttentionCall:
    q, k = call.query[which], call.key[which]
    return replace(call, query=q, key=k, value=k, memo={})


def _tail_noise(z: Tensor, generator: torch.Generator) -> Tensor:
    """Logits below the row's median with noise of standard deviation 1, kept below the median."""
    median = z.masked_fill(z == -torch.inf, torch.nan).nanmedian(-1, keepdim=True).values
    noisy = torch.minimum(z + torch.randn(z.shape, generator=generator), median)
    return torch.where(z < median, noisy, z)


def _quantised(key: Tensor, bits: int) -> Tensor:
    """Keys rounded to 2^bits levels between the least and the largest value of each token and head."""
    low, high = key.amin(-1, keepdim=True), key.amax(-1, keepdim=True)
    step = (high - low).clamp_min(1e-12) / (2**bits - 1)
    return ((key - low) / step).round() * step + low
