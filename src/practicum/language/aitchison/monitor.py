"""A monitor of attention that needs no probabilities: at inference, in training, per layer, head and length."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from practicum.language.aitchison.linear import METRICS, attention_statistics, norms
from practicum.toolbox.errors import InputError
from practicum.toolbox.kv import AttentionCall, AttentionTap

# Rows that see 2^b to 2^(b+1) - 1 keys are counted together.
LENGTH_BINS = 24
# A head whose norm did not vary in the calibration is not compared with exactly 0.
LEAST_SD = 1e-6

NAMES = {
    "aitchison": "normalised Aitchison norm",
    "entropy": "entropy (nats)",
    "max_logit": "largest logit",
    "max_prob": "largest probability",
    "effective_tokens": "effective number of tokens",
    "participation": "participation ratio",
}


class AttentionMonitor:
    r"""Watch how well attention tells tokens apart, in every head of any causal language model.

    Within the ``with`` block every forward pass, each step of `generate` included, is measured from queries and keys
    just before the model's own attention function, which runs as it did: outputs are the same to the bit. With
    ``metrics=("aitchison",)`` nothing quadratic in the context is computed. The normalised Aitchison norm is the
    standard deviation of a row's logits; near 0 a head does not tell its keys apart, and where it explodes the softmax
    has saturated and entropy, stuck at 0, no longer moves. The other metrics need all logits of a row; ``sample_rows``
    bounds their cost. No n x n matrix is ever kept.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model whose attention goes through transformers' `AttentionInterface`, also wrapped by PEFT.
    layers : int or sequence of int, optional
        From 1; all by default.
    metrics : sequence of str
        Of "aitchison", "entropy", "max_logit", "max_prob", "effective_tokens" and "participation".
    exclude_first : int
        Keys left out of the Aitchison norm at the beginning of each sequence (attention sinks).
    reduce : {"mean", "max"}
        Over the rows.
    chunk_size : int
        Of `causal_aitchison`.
    sample_rows : int, optional
        For metrics other than "aitchison": as many rows of each sequence, evenly spaced, the last among them.
    keep : int
        Forward passes that ``history`` keeps.

    Attributes
    ----------
    history : deque of dict from metric to Tensor of shape (layers, heads)
        The last forward passes, one entry each.
    n_rows : int
        Rows measured since the monitor began (one sequence's token in one layer, padding not counted), of the first
        layer.

    Raises
    ------
    InputError
        A ValueError that names the argument: as `AttentionTap`, and for an unknown metric.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    ... )
    >>> model, ids = LlamaForCausalLM(config).eval(), torch.arange(40).reshape(2, 20)
    >>> with AttentionMonitor(model, metrics=("aitchison", "entropy")) as monitor:
    ...     monitor.calibrate([ids[:, :10], ids[:, 5:15], ids[:, 10:]])
    ...     with torch.no_grad():
    ...         _ = model(ids)
    >>> monitor.result()["aitchison"].shape, monitor.n_rows
    (torch.Size([3, 2]), 40)
    >>> type(monitor.alarms(z=4.0))
    <class 'list'>
    """

    def __init__(
        self,
        model: nn.Module,
        layers: int | Sequence[int] | None = None,
        metrics: Sequence[str] = ("aitchison", "entropy", "max_logit", "max_prob"),
        exclude_first: int = 0,
        reduce: Literal["mean", "max"] = "mean",
        chunk_size: int = 128,
        sample_rows: int | None = None,
        keep: int = 1000,
    ) -> None:
        self.metrics = tuple([metrics] if isinstance(metrics, str) else metrics)
        for metric in self.metrics:
            if metric not in METRICS:
                raise InputError(f"metrics: {metric!r} must be among {', '.join(METRICS)}")
        if not self.metrics:
            raise InputError("metrics=(): must have one at least")
        if reduce not in ("mean", "max"):
            raise InputError(f"reduce={reduce!r}: must be 'mean' or 'max'")
        for name, value, least in (
            ("exclude_first", exclude_first, 0),
            ("chunk_size", chunk_size, 1),
            ("keep", keep, 1),
            ("sample_rows", 1 if sample_rows is None else sample_rows, 1),
        ):
            if value < least:
                raise InputError(f"{name}={value}: must be at least {least}")
        self.model = model
        self.exclude_first = exclude_first
        self.reduce = reduce
        self.chunk_size = chunk_size
        self.sample_rows = sample_rows
        self._tap = AttentionTap(model, self._observe, layers, self._forward_ended)
        self.layers = self._tap.layers
        self.history: deque[dict[str, Tensor]] = deque(maxlen=keep)
        self._calibration: dict[str, tuple[Tensor, Tensor]] | None = None
        self._active = False
        self._passing: dict[int, dict[str, Tensor]] = {}
        self._totals: dict[int, dict[str, Tensor]] = {}

    def __enter__(self) -> Self:
        """Begin to watch."""
        if self._active:
            raise RuntimeError("monitor: is active already; make another AttentionMonitor to nest them")
        self._tap.__enter__()
        self._active = True
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop watching; the model has its attention function back, results stay."""
        self._active = False
        self._passing.clear()
        self._tap.__exit__(*exception)

    @property
    def n_rows(self) -> int:
        """Rows measured since the monitor began."""
        first = self._totals.get(self.layers[0]) or next(iter(self._totals.values()), None)
        return 0 if first is None else int(first["rows"])

    def reset(self) -> None:
        """Forget what was measured; the calibration stays."""
        self.history.clear()
        self._totals.clear()

    def result(self) -> dict[str, Tensor]:
        """What was measured since the monitor began, was calibrated or was reset.

        Returns
        -------
        dict from metric to Tensor of shape (layers, heads)
            Means over all rows that see a key, or the largest with ``reduce="max"``. nan for blocks without attention.

        Raises
        ------
        InputError
            A ValueError: before a forward pass.
        """
        return self._reduced(self._totals)

    def by_length(self, metric: str = "aitchison") -> tuple[Tensor, Tensor]:
        """Means over the rows by how many keys they see.

        Parameters
        ----------
        metric : str
            One of those that are measured.

        Returns
        -------
        lengths : Tensor of int64, shape (bins,)
            The bin of length l has the rows that see l to 2 l - 1 keys.
        means : Tensor of shape (layers, heads, bins)

        Raises
        ------
        InputError
            A ValueError.
        """
        self._require_metric(metric)
        means = self._stacked({layer: t[f"{metric}/sums"] / t[f"{metric}/counts"] for layer, t in self._totals.items()})
        filled = torch.nonzero(~means.isnan().all(0).all(0))[:, 0]
        return 2**filled, means[..., filled]

    def calibrate(self, batches: Iterable[Mapping[str, Any] | Tensor]) -> None:
        """Run the model over clean batches, and keep each head's mean and standard deviation over them for `alarms`.

        The batches should be as long as those that are to be watched, for the norm depends on the length.

        Parameters
        ----------
        batches : iterable of mapping or Tensor
            Arguments of the model, or its input ids of shape (B, n); two at least.

        Raises
        ------
        InputError
            A ValueError: with fewer than two batches.
        """
        if not self._active:
            with self:
                return self.calibrate(batches)
        seen: list[dict[str, Tensor]] = []
        for batch in batches:
            self.reset()
            with torch.no_grad():
                _ = self.model(batch) if isinstance(batch, Tensor) else self.model(**batch)
            seen.append(self.result())
        self.reset()
        if len(seen) < 2:
            raise InputError(f"batches: has {len(seen)}; must have two at least, for a standard deviation")
        stacked = {metric: torch.stack([each[metric] for each in seen]) for metric in self.metrics}
        self._calibration = {metric: (values.mean(0), values.std(0)) for metric, values in stacked.items()}
        return None

    def z_scores(self, metric: str = "aitchison") -> Tensor:
        """How many standard deviations of the calibration each head is from its mean there.

        Parameters
        ----------
        metric : str

        Returns
        -------
        Tensor of shape (layers, heads)

        Raises
        ------
        InputError
            A ValueError: without `calibrate`, or before a forward pass.
        """
        self._require_metric(metric)
        if self._calibration is None:
            raise InputError("monitor: is not calibrated; call calibrate(batches) with clean batches first")
        mean, sd = self._calibration[metric]
        return (self.result()[metric] - mean) / sd.clamp_min(LEAST_SD * mean.abs().clamp_min(1))

    def alarms(self, z: float = 4.0, metric: str = "aitchison") -> list[tuple[int, int, float]]:
        """Heads that are far from their calibration.

        Parameters
        ----------
        z : float
            Standard deviations, above 0.
        metric : str

        Returns
        -------
        list of (layer, head, z-score)
            Layers from 1 and heads from 0; the farthest first. Shape (n, 3).

        Raises
        ------
        InputError
            A ValueError, as `z_scores`.
        """
        if not z > 0:
            raise InputError(f"z={z}: must be above 0")
        scores = self.z_scores(metric)
        far = [(self.layers[i], h, float(scores[i, h])) for i, h in torch.nonzero(scores.abs() > z).tolist()]
        return sorted(far, key=lambda each: -abs(each[2]))

    def figure(self, metric: str = "aitchison") -> Any:
        """A plot of what was measured: a line per layer over the number of keys, and the layers by heads.

        Parameters
        ----------
        metric : str

        Returns
        -------
        plotly.graph_objects.Figure
            ``figure.write_html(path)`` makes a page of it.

        Raises
        ------
        InputError
            A ValueError: before a forward pass.
        """
        from plotly import graph_objects as go
        from plotly.subplots import make_subplots

        lengths, means = self.by_length(metric)
        by_head = self.result()[metric]
        figure = make_subplots(1, 2, column_widths=[0.58, 0.42], horizontal_spacing=0.14)
        shades = _shades(len(self.layers))
        for layer, line, shade in zip(self.layers, means.nanmean(1).tolist(), shades, strict=True):
            trace = go.Scatter(x=lengths.tolist(), y=line, name=f"layer {layer}", mode="lines+markers")
            figure.add_trace(trace.update(line={"color": shade}), row=1, col=1)
        heat = go.Heatmap(
            z=by_head.tolist(),
            x=list(range(by_head.shape[1])),
            y=[str(layer) for layer in self.layers],
            colorscale="Viridis",
            colorbar={"title": {"text": NAMES[metric], "side": "right"}},
            hovertemplate="layer %{y}, head %{x}: %{z:.3f}<extra></extra>",
        )
        figure.add_trace(heat, row=1, col=2)
        figure.update_xaxes(title_text="keys that a row sees, from", type="log", row=1, col=1)
        figure.update_yaxes(title_text=NAMES[metric], rangemode="tozero", row=1, col=1)
        figure.update_xaxes(title_text="head", dtick=max(1, by_head.shape[1] // 10), row=1, col=2)
        figure.update_yaxes(title_text="layer", type="category", row=1, col=2)
        figure.update_layout(
            title=f"Attention: {NAMES[metric]}",
            template="plotly_white",
            legend={"x": 0.52, "y": 1, "xanchor": "center"},
        )
        return figure

    def _observe(self, call: AttentionCall) -> None:
        if not self._tap.in_forward:  # a block computed again for the backward pass
            return
        with torch.no_grad():
            found: dict[str, tuple[Tensor, Tensor]] = {}
            seen = call.keys_seen()
            if "aitchison" in self.metrics:
                D = norms(call, chunk_size=self.chunk_size, exclude_first=self.exclude_first)
                found["aitchison"] = (D, seen)
            others = [metric for metric in self.metrics if metric != "aitchison"]
            if others:
                rows = self._sampled(seen)
                for metric, values in attention_statistics(call, others, rows=rows).items():
                    found[metric] = (values, seen if rows is None else seen[:, rows])
            self._passing[call.layer] = _summed(found)

    def _sampled(self, seen: Tensor) -> Tensor | None:
        m = seen.shape[1]
        if self.sample_rows is None or m <= self.sample_rows:
            return None
        return torch.linspace(0, m - 1, self.sample_rows + 1, device=seen.device)[1:].round().long()

    def _forward_ended(self) -> None:
        if not self._passing:
            return
        for layer, sums in self._passing.items():
            old = self._totals.get(layer)
            new = {name: x.cpu() for name, x in sums.items()}
            self._totals[layer] = new if old is None else {name: _joined(name, old[name], x) for name, x in new.items()}
        self.history.append(self._reduced(self._passing))
        self._passing = {}

    def _reduced(self, sums: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
        if not sums:
            raise InputError("monitor: has measured nothing; run the model within the with block")
        if self.reduce == "max":
            return {m: self._stacked({layer: t[f"{m}/max"] for layer, t in sums.items()}) for m in self.metrics}
        return {
            m: self._stacked({layer: t[f"{m}/sums"].sum(-1) / t[f"{m}/counts"].sum(-1) for layer, t in sums.items()})
            for m in self.metrics
        }

    def _stacked(self, by_layer: dict[int, Tensor]) -> Tensor:
        if not by_layer:
            raise InputError("monitor: has measured nothing; run the model within the with block")
        heads = max(len(x) for x in by_layer.values())
        shape = next(iter(by_layer.values())).shape[1:]
        out = torch.full((len(self.layers), heads, *shape), torch.nan)
        for i, layer in enumerate(self.layers):
            if layer in by_layer:
                out[i, : len(by_layer[layer])] = by_layer[layer].float().cpu()
        return out

    def _require_metric(self, metric: str) -> None:
        if metric not in self.metrics:
            raise InputError(f"metric={metric!r}: must be among those that are measured, {', '.join(self.metrics)}")


def _summed(found: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Sums and numbers of rows by head and length, and the largest by head."""
    out: dict[str, Tensor] = {}
    for metric, (values, seen) in found.items():
        heads = values.shape[1]
        real = ~values.isnan()
        x = torch.where(real, values, 0).movedim(1, 0).reshape(heads, -1)
        bins = seen.clamp_min(1).log2().floor().long().clamp_max(LENGTH_BINS - 1).reshape(-1)
        zeros = torch.zeros(heads, LENGTH_BINS, device=x.device, dtype=torch.float32)
        counted = real.movedim(1, 0).reshape(heads, -1).float()
        out[f"{metric}/sums"] = zeros.index_add(1, bins, x.float())
        out[f"{metric}/counts"] = zeros.index_add(1, bins, counted)
        out[f"{metric}/max"] = torch.where(real, values, -torch.inf).movedim(1, 0).reshape(heads, -1).amax(1)
        # Of the metric that has the most rows: others may be sampled.
        rows = counted[0].sum()
        out["rows"] = torch.maximum(out["rows"], rows) if "rows" in out else rows
    return out


def _joined(name: str, old: Tensor, new: Tensor) -> Tensor:
    return torch.maximum(old, new) if name.endswith("/max") else old + new


def _shades(n: int) -> list[str]:
    """From dark to light blue-green, in the order of the layers."""
    steps = [0.5] if n == 1 else [i / (n - 1) for i in range(n)]
    return [f"hsl({250 - 110 * t:.0f}, 60%, {28 + 32 * math.sqrt(t):.0f}%)" for t in steps]
