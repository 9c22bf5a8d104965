"""CORAL where text is generated: the letter that answers, steered in its logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import LogitsProcessor

from practicum.language.coral.estimator import Coral
from practicum.toolbox.choices import ChoiceScores
from practicum.toolbox.errors import InputError


class CoralLogitsProcessor(LogitsProcessor):
    r"""Steer the letter that ``generate`` answers a multiple-choice question with.

    At the first generated token the logits z of the K letters become

    .. math:: z'_i = z_i + \log p'_i - \log \frac{e^{z_i}}{\sum_j e^{z_j}},

    so that the letters keep the probability that they have together, and share it by the steered p'. All other tokens,
    and all later positions, are left alone. The activations come from `Coral.attach`.

    Parameters
    ----------
    coral : Coral
        Fitted on letter scores.
    letter_ids : sequence of int, of length K
        Tokens of the letters, in the order of the options; `CoralForMultipleChoice.logits_processor` finds them.

    Raises
    ------
    InputError
        A ValueError: for fewer than two letters, a letter twice, or more than the probe has seen.

    Examples
    --------
    >>> from practicum.toolbox.choices import ChoiceScores
    >>> rng = np.random.default_rng(0)
    >>> hidden = [np.repeat(rng.normal(size=(1, 8)), 2, axis=0).astype(np.float16) for _ in range(50)]
    >>> scores = ChoiceScores([rng.normal(size=2) for _ in hidden], {1: hidden})
    >>> coral = Coral(mode="letter", layer=1, epochs=2, random_state=0).fit(scores, rng.integers(2, size=50))
    >>> processor = CoralLogitsProcessor(coral, [65, 66])
    >>> processor(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 128))
    Traceback (most recent call last):
    RuntimeError: CoralLogitsProcessor: generate must run inside `with coral.attach(model)`
    """

    def __init__(self, coral: Coral, letter_ids: Sequence[int]) -> None:
        self.coral = coral
        self.letter_ids = [int(i) for i in letter_ids]
        n = len(self.letter_ids)
        if n < 2 or len(set(self.letter_ids)) < n:
            raise InputError(f"letter_ids={self.letter_ids}: must be two different tokens at least")
        if coral.mode != "letter":
            raise InputError("coral: was fitted on continuation scores; letters need mode='letter'")
        if n > coral.n_letters_:
            raise InputError(f"letter_ids: has {n} letters; the probe was fitted on {coral.n_letters_} at most")
        self._before: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the logits with those of the letters steered, where this is the answer's position.

        Parameters
        ----------
        input_ids : torch.Tensor of shape (batch, tokens)
        scores : torch.Tensor of shape (batch, n_vocabulary)
            Logits of the next token.

        Returns
        -------
        torch.Tensor of shape (batch, n_vocabulary)
            A new tensor where anything changed.

        Raises
        ------
        RuntimeError
            Outside of `Coral.attach`, or when the activations are of another batch.
        """
        watch = self.coral.watch
        if watch is None or not watch.last:
            raise RuntimeError("CoralLogitsProcessor: generate must run inside `with coral.attach(model)`")
        # A step goes on from the last with one token more, which is all that it reads where there is a cache.
        before, self._before = self._before, input_ids
        goes_on = (
            before is not None
            and input_ids.shape[1] == before.shape[1] + 1
            and (watch.n_tokens == 1 or torch.equal(input_ids[:, :-1], before))
        )
        return scores if goes_on else self._steered(scores, watch.last)

    def _steered(self, scores: torch.Tensor, last: dict[int, torch.Tensor]) -> torch.Tensor:
        n_rows, k = len(scores), len(self.letter_ids)
        hidden = {layer: h.to("cpu", torch.float16).numpy() for layer, h in last.items()}
        if any(len(h) != n_rows for h in hidden.values()):
            raise RuntimeError(
                f"CoralLogitsProcessor: logits of {n_rows} rows, activations of {len(hidden[next(iter(hidden))])}"
            )
        letters = scores[:, self.letter_ids].to("cpu", torch.float64)
        mass = torch.logsumexp(letters, dim=1, keepdim=True)
        asked = ChoiceScores(
            list(letters.numpy()),
            {layer: [np.broadcast_to(row, (k, row.size)) for row in h] for layer, h in hidden.items()},
        )
        p = torch.from_numpy(np.stack(self.coral.predict_proba(asked)))
        steered = scores.clone()
        steered[:, self.letter_ids] = (mass + p.log()).to(scores)
        return steered
