"""Steering of the residual stream itself: a vector added at one block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator

from practicum.language.coral.estimator import Coral
from practicum.toolbox.choices import ChoiceScores
from practicum.toolbox.errors import InputError
from practicum.toolbox.taps import Steering


class ResidualSteering(BaseEstimator):
    r"""Add to the residual stream, at every position after one block, the direction of right answers.

    .. math:: h \leftarrow h + \text{strength} \cdot v, \qquad
              v = \frac{1}{N} \sum_n \Bigl( h_{n, y_n} - \frac{1}{K_n - 1} \sum_{i \ne y_n} h_{n, i} \Bigr)

    This is contrastive activation addition [1]_, the steering by a proxy that CORAL [2]_ is compared with: one vector
    for all questions, not a correction for each option. `from_coral` takes the direction of CORAL's probe for v
    instead, scaled to the length of the mean difference.

    Parameters
    ----------
    layer : int
        The block after which the vector is added, as layers are counted in scores: 1 to the number of blocks.
    strength : float, default=1.0
        Choose it on training questions; negative numbers steer away.

    Attributes
    ----------
    vector_ : ndarray of shape (d,), float32

    References
    ----------
    .. [1] N. Rimsky et al., "Steering Llama 2 via Contrastive Activation Addition", ACL 2024.
    .. [2] M. M. Miao, Y.-M. Cho, L. Ungar, "Correctness-Optimized Residual Activation Lens (CORAL)", ICML 2026.

    Examples
    --------
    >>> hidden = [np.array([[1.0, 0.0], [0.0, 3.0]]), np.array([[0.0, 1.0], [1.0, 0.0], [3.0, 2.0]])]
    >>> scores = ChoiceScores([np.zeros(2), np.zeros(3)], {1: [h.astype(np.float16) for h in hidden]})
    >>> ResidualSteering(layer=1).fit(scores, [0, 0]).vector_
    array([-0.5, -1.5], dtype=float32)
    """

    def __init__(self, layer: int, strength: float = 1.0) -> None:
        self.layer = layer
        self.strength = strength

    def fit(self, scores: ChoiceScores, y: ArrayLike) -> Self:
        """Take the mean difference between the activations of right and wrong options.

        Parameters
        ----------
        scores : ChoiceScores
            Continuation scores of N questions.
        y : array-like of shape (N,)
            Index of the right option.

        Returns
        -------
        ResidualSteering
            Itself.

        Raises
        ------
        InputError
            A ValueError, for letter scores, whose options share one activation, or a layer that is not there.
        """
        self.vector_: NDArray[np.float32] = mean_difference(scores, y, self.layer)
        return self

    @classmethod
    def from_coral(cls, coral: Coral, scores: ChoiceScores, y: ArrayLike, strength: float = 1.0) -> Self:
        """Steer along `Coral.direction`, in which predicted correctness rises.

        Parameters
        ----------
        coral : Coral
            Fitted on continuation scores at one layer.
        scores : ChoiceScores
            Of the N questions to average over, those of its fit for example.
        y : array-like of shape (N,)
        strength : float

        Returns
        -------
        ResidualSteering
            Fitted.
        """
        if coral.mode != "continuation":
            raise InputError("coral: was fitted on letter scores; a direction needs continuation scores")
        if not isinstance(coral.layer_, int):
            raise InputError(f"coral: looks at layers {coral.layer_}; a direction needs one")
        steering = cls(coral.layer_, strength)
        length = np.linalg.norm(mean_difference(scores, y, coral.layer_))
        direction = coral.direction(scores)
        steering.vector_ = (direction * (length / max(float(np.linalg.norm(direction)), 1e-12))).astype(np.float32)
        return steering

    @contextmanager
    def attach(self, model: Any) -> Iterator[Self]:
        """Steer a model until the block ends, however it ends.

        Parameters
        ----------
        model : transformers.PreTrainedModel

        Yields
        ------
        ResidualSteering
            Itself.
        """
        vector = torch.from_numpy(np.asarray(self.strength * self.vector_, dtype=np.float32))
        with Steering(model, {self.layer: lambda hidden: hidden + vector.to(hidden)}):
            yield self


def mean_difference(scores: ChoiceScores, y: ArrayLike, layer: int) -> NDArray[np.float32]:
    """Mean over questions of the right option's activation less the mean of the wrong ones, of shape (d,)."""
    if layer not in scores.hidden:
        raise InputError(f"layer={layer}: the scores have the layers {', '.join(map(str, sorted(scores.hidden)))}")
    gold = np.asarray(y, dtype=np.int64)
    if len(gold) != len(scores.logits):
        raise InputError(f"y: has {len(gold)} answers; must have one for each of {len(scores.logits)} questions")
    differences = []
    for h, right in zip(scores.hidden[layer], gold, strict=True):
        wide = np.asarray(h, dtype=np.float64)
        differences.append(wide[right] - np.delete(wide, right, axis=0).mean(axis=0))
    vector = np.mean(differences, axis=0)
    if not vector.any():
        raise InputError(
            f"scores: the options of each question share one activation at layer {layer}; must be continuation scores"
        )
    return vector.astype(np.float32)
