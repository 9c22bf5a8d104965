"""LESS: the samples whose gradients point where those of the target do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from practicum.language.trim.samples import Format, Scope, TokenizedSample, target_of
from practicum.language.trim.selector import OnEmpty, TokenSelector
from practicum.language.trim.shards import Scored
from practicum.language.trim.training import Checkpoint, response_loss, trained_parameters
from practicum.toolbox.errors import InputError
from practicum.toolbox.trunk import Forward, FrozenTrunk

BETAS = (0.9, 0.999)
EPSILON = 1e-8


class GradientSelector(TokenSelector):
    r"""LESS [1]_: choose samples by the cosine of their gradient with those of the target.

    For each checkpoint of a warm-up the gradient of every sample is taken with respect to what is trained, turned into
    the step that Adam would make of it, and projected to ``projection_dim`` numbers; gradients of the target are taken
    as they are. The score is the cosine, a mean over the target samples and over checkpoints, these weighted by their
    learning rates. It needs a forward and a backward pass for every sample and checkpoint.

    In place of LESS's dense random projection each coordinate is added, with a random sign, to one of the
    ``projection_dim``. That keeps inner products as well, to :math:`1 / \sqrt{k}` of the norms, for a fraction of the
    time.

    Parameters
    ----------
    model : peft.PeftModel or transformers.PreTrainedModel
        With something that is trained: `warm_up` gives such a model.
    tokenizer : transformers.PreTrainedTokenizerBase
    checkpoints : sequence of Checkpoint, optional
        What `warm_up` appended. Without any, the model's own weights count, and plain gradients.
    projection_dim : int
    max_length, format, on_empty
        As of `TrimSelector`.
    trunk : FrozenTrunk, optional
        Where the states of the layers below what is trained come from.
    random_state : int
        Of the projection.

    Attributes
    ----------
    target_gradients_ : Tensor of shape (C, n_target, projection_dim), float32
        Of unit length.
    tasks_ : list of str

    References
    ----------
    .. [1] M. Xia, S. Malladi, S. Gururangan, S. Arora, D. Chen, "LESS: Selecting Influential Data for Targeted
       Instruction Tuning", ICML 2024.

    Examples
    --------
    Scores have shape (N,). A sample of the target alone has a cosine of 1:

    >>> from practicum.language.confidence.tiny import tiny_model
    >>> model, tokenizer = tiny_model()
    >>> tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
    >>> pool = [{"prompt": "2+2", "response": "4"}, {"prompt": "dog", "response": "Hund"}]
    >>> GradientSelector(model, tokenizer).fit(pool[:1]).score_samples(pool).round(3)
    array([1.   , ...], dtype=float32)
    """

    scope: Scope = "response"

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        checkpoints: Sequence[Checkpoint] | None = None,
        projection_dim: int = 8192,
        max_length: int = 2048,
        format: Format | None = None,
        on_empty: OnEmpty = "raise",
        trunk: FrozenTrunk | None = None,
        random_state: int = 0,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.checkpoints = checkpoints
        self.projection_dim = projection_dim
        self.max_length = max_length
        self.format = format
        self.on_empty = on_empty
        self.trunk = trunk
        self.random_state = random_state

    def fit(self, target: Iterable[Mapping[str, Any]]) -> Self:
        """Take the gradients of the target.

        Parameters
        ----------
        target : iterable of mapping
            Shape (n_target,).

        Returns
        -------
        GradientSelector
            Itself.

        Raises
        ------
        InputError
            A ValueError that names the argument: where nothing of the model is trained, for instance.
        """
        if self.projection_dim < 1:
            raise InputError(f"projection_dim={self.projection_dim}: must be at least 1")
        parameters = trained_parameters(self.model)
        if not parameters:
            raise InputError("model: nothing of it is trained; give what warm_up returns")
        for checkpoint in self.checkpoints or ():
            if checkpoint.weights.keys() != parameters.keys():
                raise InputError("checkpoints: are of other parameters than those that the model trains")
        size = sum(p.numel() for p in parameters.values())
        generator = torch.Generator().manual_seed(self.random_state)
        self._bucket = torch.randint(0, self.projection_dim, (size,), generator=generator, dtype=torch.int32)
        self._sign = torch.randint(0, 2, (size,), generator=generator, dtype=torch.int8) * 2 - 1
        samples, self.tasks_, tasks = target_of(target)
        tokenized = self._tokenized(samples, "target")
        self._of_task = torch.tensor(tasks)
        self.target_gradients_ = self._gradients(tokenized, is_target=True)
        return self

    def _score_block(self, samples: Sequence[Mapping[str, Any]], first: int) -> Scored:
        tokenized = self._tokenized(samples, first=first)
        scores = np.full((len(samples), len(self.tasks_)), -np.inf, np.float32)
        usable = [i for i, sample in enumerate(tokenized) if sample.trained]
        if usable:
            gradients = self._gradients([tokenized[i] for i in usable], is_target=False)
            weights = torch.tensor([c.learning_rate for c in self.checkpoints or ()] or [1.0])
            cosines = torch.einsum("c,cik,cjk->ij", weights / weights.sum(), gradients, self.target_gradients_)
            for task in range(len(self.tasks_)):
                scores[usable, task] = cosines[:, self._of_task == task].mean(1).numpy()
        lengths = np.array([len(sample.ids) for sample in tokenized])
        truncated = sum(sample.truncated for sample in tokenized)
        return Scored(scores, lengths, np.zeros((len(samples), 0), np.float16), truncated)

    def _gradients(self, samples: Sequence[TokenizedSample], *, is_target: bool) -> Tensor:
        """Projected gradients at every checkpoint, of unit length: (C, n, projection_dim)."""
        parameters = trained_parameters(self.model)
        own = {name: p.detach().clone() for name, p in parameters.items()}
        forward = Forward(self.model, self.trunk)
        found = []
        try:
            for checkpoint in self.checkpoints or (None,):
                if checkpoint is not None:
                    self._load(parameters, checkpoint.weights)
                rows = []
                for sample in samples:
                    with torch.enable_grad():
                        loss = response_loss(forward, [sample])
                        gradients = torch.autograd.grad(loss, list(parameters.values()))
                    step = dict(zip(parameters, gradients, strict=True))
                    if checkpoint is not None and not is_target:
                        step = {name: _adam_step(checkpoint, name, g) for name, g in step.items()}
                    rows.append(self.project(torch.cat([g.flatten().float().cpu() for g in step.values()])))
                found.append(torch.nn.functional.normalize(torch.stack(rows), dim=-1))
        finally:
            self._load(parameters, own)
        return torch.stack(found)

    def project(self, gradient: Tensor) -> Tensor:
        """Project a gradient, keeping inner products in expectation.

        Parameters
        ----------
        gradient : Tensor of shape (P,)

        Returns
        -------
        Tensor of shape (projection_dim,), float32
        """
        return torch.zeros(self.projection_dim).index_add(0, self._bucket, gradient * self._sign)

    @staticmethod
    def _load(parameters: Mapping[str, torch.nn.Parameter], weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])


def _adam_step(checkpoint: Checkpoint, name: str, gradient: Tensor) -> Tensor:
    """What Adam would do after this gradient, up to its learning rate."""
    mean = BETAS[0] * checkpoint.means[name] + (1 - BETAS[0]) * gradient
    square = BETAS[1] * checkpoint.squares[name] + (1 - BETAS[1]) * gradient.square()
    return mean / (square + EPSILON).sqrt()
