"""The attention monitor in transformers' Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from transformers import TrainerCallback

from practicum.language.aitchison.monitor import AttentionMonitor
from practicum.toolbox.errors import InputError

if TYPE_CHECKING:
    from transformers import Trainer


class AitchisonCallback(TrainerCallback):
    """Log how well attention tells tokens apart while a model trains, and stop when it collapses.

    Every ``every`` steps the training forward passes of that step are watched, on the batches that are trained on
    anyway. The scalars ``aitchison_mean``, ``aitchison_max`` and ``aitchison_layer1``... (and so for the other metrics)
    go into the Trainer's own logs, from where TensorBoard and the other integrations show them as
    ``train/aitchison_mean``.

    Parameters
    ----------
    every : int
        Steps from one watched step to the next.
    metrics : sequence of str
        As of `AttentionMonitor`.
    layers : int or sequence of int, optional
        From 1; all by default.
    sample_rows : int
        Rows of each sequence for metrics other than "aitchison", whose cost is quadratic else.
    stop_at : float, optional
        Stop training when a head's Aitchison norm is more than so many standard deviations from its own mean over the
        first ``calibration`` watched steps.
    calibration : int
        Watched steps that `stop_at` compares with, two at least.

    Attributes
    ----------
    history : list of (step, dict from metric to Tensor of shape (layers, heads))
        One entry a watched step.
    alarms : list of (step, layer, head, z-score)
        What stopped the training, if anything did.

    Raises
    ------
    InputError
        A ValueError that names the argument.

    Notes
    -----
    The Trainer calls integrations such as TensorBoard's before the callbacks that it is given, so what a callback adds
    to the logs would come too late for them. `attach` puts this one first. Given as ``callbacks=[...]`` it still writes
    to ``trainer.state.log_history`` and to the callbacks after it.

    Examples
    --------
    >>> import tempfile
    >>> from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    ... )
    >>> rows = [{"input_ids": list(range(i, i + 12)), "labels": list(range(i, i + 12))} for i in range(8)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     arguments = TrainingArguments(
    ...         folder, max_steps=2, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
    ...     )
    ...     trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)
    ...     callback = AitchisonCallback(every=1).attach(trainer)
    ...     _ = trainer.train()
    {...}
    >>> sorted(name for name in trainer.state.log_history[0] if "aitchison" in name)
    ['aitchison_layer1', 'aitchison_layer2', 'aitchison_max', 'aitchison_mean']
    >>> [step for step, _ in callback.history], callback.history[0][1]["aitchison"].shape
    ([1, 2], torch.Size([2, 2]))
    """

    def __init__(
        self,
        every: int = 50,
        metrics: Sequence[str] = ("aitchison",),
        layers: int | Sequence[int] | None = None,
        sample_rows: int = 64,
        stop_at: float | None = None,
        calibration: int = 10,
    ) -> None:
        if every < 1:
            raise InputError(f"every={every}: must be at least 1")
        if stop_at is not None and (not stop_at > 0 or "aitchison" not in metrics):
            raise InputError(f"stop_at={stop_at}: must be above 0, and metrics must have 'aitchison'")
        if calibration < 2:
            raise InputError(f"calibration={calibration}: must be at least 2, for a standard deviation")
        self.every = every
        self.metrics = tuple(metrics)
        self.layers = layers
        self.sample_rows = sample_rows
        self.stop_at = stop_at
        self.calibration = calibration
        self.history: list[tuple[int, dict[str, Tensor]]] = []
        self.alarms: list[tuple[int, int, int, float]] = []
        self._monitor: AttentionMonitor | None = None
        self._watching = False
        self._unlogged: dict[str, float] = {}

    def attach(self, trainer: Trainer) -> Self:
        """Give this callback to a trainer, before its integrations.

        Parameters
        ----------
        trainer : transformers.Trainer

        Returns
        -------
        AitchisonCallback
            Itself.
        """
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)
        return self

    def figure(self, metric: str = "aitchison") -> Any:
        """A line per layer over the watched steps.

        Parameters
        ----------
        metric : str

        Returns
        -------
        plotly.graph_objects.Figure

        Raises
        ------
        InputError
            A ValueError: for a metric that was not measured, or before any watched step.
        """
        from plotly import graph_objects as go

        if metric not in self.metrics or not self.history:
            raise InputError(f"metric={metric!r}: nothing of it was measured; metrics are {', '.join(self.metrics)}")
        steps = [step for step, _ in self.history]
        values = torch.stack([found[metric].nanmean(1) for _, found in self.history])
        figure = go.Figure()
        for i in range(values.shape[1]):
            figure.add_trace(go.Scatter(x=steps, y=values[:, i].tolist(), name=f"layer {self._layer(i)}"))
        figure.update_layout(template="plotly_white", xaxis_title="step", yaxis_title=metric)
        return figure

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Make the monitor of the model that is trained.

        Parameters
        ----------
        args, state, control : objects of transformers
        model : transformers.PreTrainedModel
        **kwargs
            What else the Trainer gives to its callbacks.
        """
        self._monitor = AttentionMonitor(
            model,
            self.layers,
            self.metrics,
            sample_rows=self.sample_rows,
            keep=max(1, args.gradient_accumulation_steps),
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch this step if it is its turn.

        Parameters
        ----------
        args, state, control : objects of transformers
        **kwargs
            What else the Trainer gives to its callbacks.
        """
        if self._monitor is not None and not self._watching and state.global_step % self.every == 0:
            self._monitor.reset()
            self._monitor.__enter__()
            self._watching = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the result of a watched step, and stop the training if it is far off.

        Parameters
        ----------
        args, state, control : objects of transformers
        **kwargs
            What else the Trainer gives to its callbacks.
        """
        if self._monitor is None or not self._watching:
            return
        self._stop_watching()
        found = self._monitor.result()
        self.history.append((state.global_step, found))
        for metric, values in found.items():
            self._unlogged[f"{metric}_mean"] = float(values.nanmean())
            self._unlogged[f"{metric}_max"] = float(values.nan_to_num(-torch.inf).max())
            for i, mean in enumerate(values.nanmean(1).tolist()):
                self._unlogged[f"{metric}_layer{self._layer(i)}"] = mean
        if self.stop_at is not None and len(self.history) > self.calibration:
            self._compare(state.global_step, found["aitchison"])
            control.should_training_stop = control.should_training_stop or bool(self.alarms)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Add the last watched step to what the Trainer logs.

        Parameters
        ----------
        args, state, control : objects of transformers
        logs : dict
        **kwargs
            What else the Trainer gives to its callbacks.
        """
        if logs is None or not self._unlogged or "loss" not in logs:
            return
        logs.update(self._unlogged)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(self._unlogged)
        self._unlogged = {}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model as it was.

        Parameters
        ----------
        args, state, control : objects of transformers
        **kwargs
            What else the Trainer gives to its callbacks.
        """
        self._stop_watching()

    def _stop_watching(self) -> None:
        if self._watching and self._monitor is not None:
            self._watching = False
            self._monitor.__exit__(None, None, None)

    def _layer(self, index: int) -> int:
        return self._monitor.layers[index] if self._monitor is not None else index + 1

    def _compare(self, step: int, found: Tensor) -> None:
        clean = torch.stack([each["aitchison"] for _, each in self.history[: self.calibration]])
        scores = (found - clean.mean(0)) / clean.std(0).clamp_min(1e-6)
        for i, head in torch.nonzero(scores.abs() > (self.stop_at or 0)).tolist():
            self.alarms.append((step, self._layer(i), head, float(scores[i, head])))
