"""TRIM: the samples of a pool whose tokens match what the tokens of a few target samples look like."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from practicum.language.trim.budget import Allocation, select_coreset
from practicum.language.trim.fingerprints import (
    Fingerprints,
    input_embeddings,
    mean_states,
    sample_scores,
    token_saliency,
)
from practicum.language.trim.samples import (
    SCOPES,
    Format,
    SampleTokenizer,
    Scope,
    TokenizedSample,
    target_of,
)
from practicum.language.trim.shards import Scored, score_in_shards
from practicum.language.trim.states import Hidden, Saliency, StateReader, TokenStates
from practicum.toolbox.errors import InputError
from practicum.toolbox.taps import fingerprint
from practicum.toolbox.trunk import FrozenTrunk

# Numbers that a sample's mean state is projected to: cosines are kept to about 0.06.
SKETCH = 256
OnEmpty = Literal["raise", "skip"]
Floats = NDArray[np.float32]


class CoresetSelector(BaseEstimator):
    """What every selector does: learn from target samples, score a pool in one pass, choose within a budget.

    A child gives ``fit`` and ``_score_block``. Cloning shares the model, which is not copied.

    Examples
    --------
    Scores have shape (N,):

    >>> from practicum.language.trim import RandomSelector
    >>> pool = [{"prompt": str(i), "response": "."} for i in range(4)]
    >>> RandomSelector(random_state=0).fit(pool[:1]).select(pool, n=2)
    array([0, 1])
    """

    shard_size: int = 4096

    def __sklearn_clone__(self) -> Self:
        return type(self)(**self.get_params(deep=False))

    def fit(self, target: Iterable[Mapping[str, Any]]) -> Self:
        """Look at the target samples.

        Parameters
        ----------
        target : iterable of mapping
            Shape (n_target,).

        Returns
        -------
        CoresetSelector
            Itself.
        """
        raise NotImplementedError

    def score_samples(
        self,
        pool: Iterable[Mapping[str, Any]],
        *,
        store: Path | str | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Floats:
        """Score the samples of a pool, higher for those that are more like the target.

        Parameters
        ----------
        pool : sequence of mapping, datasets.Dataset, datasets.IterableDataset or any iterable of mappings
            Gone through once, and never held whole.
        store : pathlib.Path or str, optional
            A folder for the scores of each ``shard_size`` samples. A run that was interrupted goes on from there when
            it is called again; a folder of another model, target, setting or pool is refused.
        progress : callable, optional
            Told the number of samples that are done, after each ``shard_size``.

        Returns
        -------
        array of shape (N,), float32
            With several tasks the largest of a sample's scores; -inf for a sample that was skipped as empty.

        Raises
        ------
        InputError
            A ValueError that names the sample and the field.
        sklearn.exceptions.NotFittedError
            Before `fit`.
        """
        return self._pass(pool, store, progress).scores.max(1)

    def score_tasks(
        self,
        pool: Iterable[Mapping[str, Any]],
        *,
        store: Path | str | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Floats:
        """Score the samples of a pool for each task of the target.

        Parameters
        ----------
        pool, store, progress
            As of `score_samples`.

        Returns
        -------
        array of shape (N, T), float32
            In the order of ``tasks_``.
        """
        return self._pass(pool, store, progress).scores

    def select(
        self,
        pool: Iterable[Mapping[str, Any]],
        *,
        fraction: float | None = None,
        n: int | None = None,
        tokens: int | None = None,
        allocation: Allocation = "max",
        diversity: float = 0.0,
        store: Path | str | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> NDArray[np.int64]:
        """Score a pool and choose its best samples within a budget.

        Parameters
        ----------
        pool, store, progress
            As of `score_samples`.
        fraction, n, tokens, allocation, diversity
            As of `select_coreset`. Without any budget, ``token_budget`` where the selector has one.

        Returns
        -------
        array of int64, shape (n,)
            Indices into the pool, the best first: for ``datasets.Dataset.select`` or `take`.

        Raises
        ------
        InputError
            A ValueError that names the argument.
        """
        if fraction is None and n is None and tokens is None:
            tokens = getattr(self, "token_budget", None)
        # What the pool's size does not decide is refused before the pass.
        if not 0 <= diversity <= 1:
            raise InputError(f"diversity={diversity}: must be from 0 to 1")
        if sum(value is not None for value in (fraction, n, tokens)) != 1:
            raise InputError("fraction, n, tokens: give exactly one")
        if fraction is not None and not 0 < fraction <= 1:
            raise InputError(f"fraction={fraction}: must be above 0 and at most 1")
        found = self._pass(pool, store, progress)
        if diversity > 0 and not found.sketches.shape[1]:
            raise InputError(f"diversity={diversity}: {type(self).__name__} reads no token states; must be 0")
        if tokens is not None and (found.lengths < 0).any():
            raise InputError(f"tokens={tokens}: {type(self).__name__} has no tokenizer to count them with")
        return select_coreset(
            found.scores,
            fraction=fraction,
            n=n,
            tokens=tokens,
            lengths=found.lengths,
            allocation=allocation,
            diversity=diversity,
            states=found.sketches if diversity > 0 else None,
        )

    def _pass(
        self, pool: Iterable[Mapping[str, Any]], store: Path | str | None, progress: Callable[[int], object] | None
    ) -> Scored:
        self._require_fitted()
        settings = None if store is None else self._settings()
        found = score_in_shards(pool, self._score_block, self.shard_size, store, settings, progress)
        self._finish(found)
        return found

    def _require_fitted(self) -> None:
        check_is_fitted(self, "tasks_")

    def _score_block(self, samples: Sequence[Mapping[str, Any]], first: int) -> Scored:
        raise NotImplementedError

    def _settings(self) -> dict[str, Any]:
        """What the scores depend on, as JSON."""
        raise InputError(f"store: {type(self).__name__} scores without a store")

    def _finish(self, found: Scored) -> None:
        """Look at the scores of the whole pool."""


class TokenSelector(CoresetSelector):
    """What selectors share that read tokens: the chat format, and which samples have none in scope.

    Examples
    --------
    `LengthSelector` is one; its scores have shape (N,).

    >>> from practicum.language.confidence.tiny import character_tokenizer
    >>> from practicum.language.trim import LengthSelector
    >>> issubclass(LengthSelector, TokenSelector)
    True
    """

    tokenizer: Any
    scope: Scope
    max_length: int
    format: Format | None
    on_empty: OnEmpty

    def _tokenizer_of_samples(self) -> SampleTokenizer:
        if self.scope not in SCOPES:
            raise InputError(f"scope={self.scope!r}: must be one of {', '.join(SCOPES)}")
        if self.on_empty not in ("raise", "skip"):
            raise InputError(f"on_empty={self.on_empty!r}: must be 'raise' or 'skip'")
        return SampleTokenizer(self.tokenizer, self.format, self.max_length)

    def _tokenized(
        self, samples: Sequence[Mapping[str, Any]], name: str = "pool", first: int = 0
    ) -> list[TokenizedSample]:
        """Tokens of samples; raises on one without any in scope, unless it may be skipped."""
        found = self._tokenizer_of_samples().tokenize(samples, name, first)
        if self.on_empty == "raise" or name == "target":
            for i, sample in enumerate(found, start=first):
                if not sample.in_scope(self.scope):
                    field = {"prompt": "prompt", "response": "response"}.get(self.scope, "messages")
                    remedy = "" if name == "target" else "; or pass on_empty='skip'"
                    raise InputError(
                        f"{name}[{i}]: field {field!r}: has no token in scope {self.scope!r}; must have text{remedy}"
                    )
        return found


class TrimSelector(TokenSelector):
    r"""Choose instruction samples for a task from 5 to 10 examples of it, by forward passes alone.

    Methods that rank whole samples by one gradient or one mean vector miss that few of their tokens say what the task
    is. TRIM [1]_ keeps one direction for each token that occurs in the target, its *fingerprint*: the mean of the last
    states that the token has there, weighted by how much attention says of it,

    .. math::
        f_t = \frac{\sum \alpha_{v,i} \hat h_{v,i}}{\lVert \sum \alpha_{v,i} \hat h_{v,i} \rVert},
        \qquad \alpha_i = \tfrac12 Q_i + \tfrac12 K_i,

    over the target tokens of class :math:`t`, with :math:`Q` and :math:`K` of `attention_saliency`. A token of a
    candidate scores :math:`s_j = \cos(\hat h_j, f_{t_j})`; where the target has no such token, the fingerprint of the
    class with the nearest input embedding stands in and the cosine counts :math:`\lambda` times. A sample scores
    :math:`S = (1 - w) \operatorname{mean}_j s_j + w \max_j s_j`.

    Attention is read when fitting, from the last ``n_layers`` layers, by an attention function that is registered with
    transformers and leaves the model's own as it is. Scoring needs no attention and no logits: one pass through the
    decoder.

    Parameters
    ----------
    model : transformers.PreTrainedModel or peft.PeftModel
        Any causal language model whose decoder transformers knows. The paper scores with one that was fine-tuned for a
        moment on a part of the pool: see `warm_up`.
    tokenizer : transformers.PreTrainedTokenizerBase
        A fast one, with a chat template or else with ``format``.
    n_layers : int
        L, the last layers whose attention is read. Our choice; the paper's is not known to us.
    scope : {"response", "prompt", "all"}
        Which tokens count. What the chat template writes never does. Prompt tokens that many tasks share can hide the
        task; "response" is the paper's advice for mathematics.
    unseen_penalty : float
        :math:`\lambda` from 0 to 1; 0.5 is our choice.
    max_weight : float
        w from 0, the mean alone, to 1, the maximum alone.
    saliency : {"attention", "uniform"}
        Whether target tokens are weighted; "uniform" also serves models whose attention cannot be read.
    token_budget : int, optional
        What `select` takes, in tokens, when it is given no other budget.
    batch_size : int
        Sequences in a forward pass. Memory grows with it and with the longest sequence.
    max_length : int
        Tokens that are kept of a sample: the first or, where these have none of the response, the last.
    hidden : {"last_hidden_state", "pre_norm"}
        States after the final normalisation or before. The paper does not say which.
    format : callable, optional
        ``format(sample) -> [(text, part), ...]`` in place of the chat template, see `SampleTokenizer`.
    on_empty : {"raise", "skip"}
        What to do with a sample of the pool that has no token in scope; a skipped one scores -inf.
    shard_size : int
        Samples that are read, sorted by length, scored and stored together.
    random_state : int
        Of the projection in which `select` compares samples for ``diversity``; scores do not depend on it.

    Attributes
    ----------
    fingerprint_ids_ : Tensor of int64, shape (m,)
        Token classes, task by task.
    fingerprints_ : Tensor of shape (m, d), float32
    fingerprint_tasks_ : Tensor of int64, shape (m,)
    tasks_ : list of str
        Values of the target's field "task"; ``["target"]`` where it has none.
    saliency_ : list of Tensor
        Of each target sample the weights alpha of its tokens in scope, shape (n_tokens,).
    n_truncated_ : int
        Samples longer than ``max_length`` in the last call of `fit`, `score_samples` or `select`.

    References
    ----------
    .. [1] M. Nagaraj, S. Choudhary, U. Saxena, D. Ravikumar, K. Roy, "TRIM: Token-wise Attention-Derived Saliency for
       Data-Efficient Instruction Tuning", arXiv:2510.07118, ICML 2026.

    Examples
    --------
    >>> from practicum.language.confidence.tiny import tiny_model
    >>> model, tokenizer = tiny_model()
    >>> tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
    >>> target = [{"prompt": "2+2", "response": "2+2=4"}, {"prompt": "1+3", "response": "1+3=4"}]
    >>> pool = [{"prompt": "dog", "response": "Hund"}, {"prompt": "3+1", "response": "3+1=4"}]
    >>> selector = TrimSelector(model, tokenizer, n_layers=2).fit(target)
    >>> tokenizer.decode(selector.fingerprint_ids_), selector.fingerprints_.shape
    ('1234+=', torch.Size([6, 32]))
    >>> selector.select(pool, n=1)
    array([1])
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        n_layers: int = 4,
        scope: Scope = "response",
        unseen_penalty: float = 0.5,
        max_weight: float = 0.5,
        saliency: Saliency = "attention",
        token_budget: int | None = None,
        batch_size: int = 8,
        max_length: int = 2048,
        hidden: Hidden = "last_hidden_state",
        format: Format | None = None,
        on_empty: OnEmpty = "raise",
        shard_size: int = 4096,
        random_state: int = 0,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.n_layers = n_layers
        self.scope = scope
        self.unseen_penalty = unseen_penalty
        self.max_weight = max_weight
        self.saliency = saliency
        self.token_budget = token_budget
        self.batch_size = batch_size
        self.max_length = max_length
        self.hidden = hidden
        self.format = format
        self.on_empty = on_empty
        self.shard_size = shard_size
        self.random_state = random_state

    def fit(self, target: Iterable[Mapping[str, Any]]) -> Self:
        """Make the fingerprints of the target.

        Parameters
        ----------
        target : iterable of mapping
            Shape (n_target,), 5 to 10 samples in the paper: ``{"prompt", "response"}`` or ``{"messages"}``, a list or a
            datasets.Dataset. With a field "task" each task has its own fingerprints.

        Returns
        -------
        TrimSelector
            Itself.

        Raises
        ------
        InputError
            A ValueError that names the argument, or the sample and the field.
        """
        self._validate()
        samples, self.tasks_, tasks = target_of(target)
        tokenized = self._tokenized(samples, "target")
        reader = self._reader()
        try:
            states = reader.read(tokenized, self.saliency == "attention", "target")
        except InputError as error:
            if "AttentionInterface" not in str(error):
                raise
            raise InputError(f"{error}; or pass saliency='uniform'") from error
        self.n_truncated_ = sum(sample.truncated for sample in tokenized)
        return self.fit_states(states, tasks)

    def fit_states(self, states: TokenStates, tasks: Sequence[int] | None = None) -> Self:
        """Make fingerprints from states that are at hand: several settings from one pass.

        Parameters
        ----------
        states : TokenStates
            Of the target samples, from `read_states`.
        tasks : sequence of int, optional
            The task of each sample, shape (n_target,); by default one.

        Returns
        -------
        TrimSelector
            Itself.
        """
        self._validate()
        scoped = states.scoped(self.scope)
        if self.saliency == "uniform":
            scoped = TokenStates(scoped.ids, scoped.states, scoped.owner, scoped.places, scoped.roles, scoped.n_samples)
        elif scoped.rows is None:
            raise InputError("states: have no saliency; read them with saliency=True, or pass saliency='uniform'")
        of_sample = torch.tensor(tasks or [0] * states.n_samples)
        n_tasks = int(of_sample.max()) + 1
        if not hasattr(self, "tasks_") or len(self.tasks_) != n_tasks:
            self.tasks_ = ["target"] if n_tasks == 1 else [str(task) for task in range(n_tasks)]
        embeddings = input_embeddings(self.model)
        self._prints = [
            Fingerprints.of(scoped.take(torch.nonzero(of_sample == task)[:, 0].tolist()), embeddings)
            for task in range(n_tasks)
        ]
        weights = token_saliency(scoped)
        self.saliency_ = [weights[scoped.owner == i] for i in range(states.n_samples)]
        self.fingerprint_ids_ = torch.cat([prints.ids for prints in self._prints])
        self.fingerprints_ = torch.cat([prints.vectors for prints in self._prints])
        sizes = torch.tensor([len(prints.ids) for prints in self._prints])
        self.fingerprint_tasks_ = torch.arange(n_tasks).repeat_interleave(sizes)
        return self

    def score_states(self, states: TokenStates) -> Floats:
        """Score samples whose states are at hand.

        Parameters
        ----------
        states : TokenStates
            Of N samples, from `read_states`.

        Returns
        -------
        array of shape (N, T), float32
            For each task; -inf for a sample without a token in scope.
        """
        self._require_fitted()
        scoped = states.scoped(self.scope)
        found = [
            sample_scores(
                prints.token_scores(scoped, self.unseen_penalty), scoped.owner, states.n_samples, self.max_weight
            )
            for prints in self._prints
        ]
        return torch.stack(found, dim=1).cpu().numpy()

    def explain(self, sample: Mapping[str, Any], task: str | None = None) -> list[tuple[str, float, bool]]:
        """The score of each token of one sample.

        Parameters
        ----------
        sample : mapping
        task : str, optional
            Of ``tasks_``; by default the first.

        Returns
        -------
        list of (token, score, class_seen)
            Of the tokens in scope, shape (n_tokens,); ``class_seen`` says whether the target has this token.

        Raises
        ------
        InputError
            A ValueError: for a task that the target has not.
        """
        self._require_fitted()
        if task is not None and task not in self.tasks_:
            raise InputError(f"task={task!r}: must be one of {', '.join(self.tasks_)}")
        prints = self._prints[0 if task is None else self.tasks_.index(task)]
        scoped = self._reader().read(self._tokenized([sample], "sample")).scoped(self.scope)
        scores = prints.token_scores(scoped, self.unseen_penalty).tolist()
        seen = prints.seen[scoped.ids].tolist()
        texts = [self.tokenizer.decode([token]) for token in scoped.ids.tolist()]
        return list(zip(texts, scores, seen, strict=True))

    def _require_fitted(self) -> None:
        check_is_fitted(self, "fingerprints_")

    def _validate(self) -> None:
        for name in ("unseen_penalty", "max_weight"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise InputError(f"{name}={value}: must be from 0 to 1")
        if self.saliency not in ("attention", "uniform"):
            raise InputError(f"saliency={self.saliency!r}: must be 'attention' or 'uniform'")
        if self.token_budget is not None and self.token_budget < 1:
            raise InputError(f"token_budget={self.token_budget}: must be at least 1")
        self._tokenizer_of_samples()

    def _reader(self, trunk: FrozenTrunk | None = None) -> StateReader:
        return StateReader(self.model, self.n_layers, self.hidden, self.batch_size, trunk)

    def _score_block(self, samples: Sequence[Mapping[str, Any]], first: int) -> Scored:
        tokenized = self._tokenized(samples, first=first)
        n, projection = len(tokenized), self._projection()
        scores = np.full((n, len(self.tasks_)), -np.inf, np.float32)
        sketches = np.zeros((n, projection.shape[1]), np.float16)
        n_seen = 0
        # An empty text cannot go through the model.
        usable = [i for i in range(n) if tokenized[i].ids]
        for chosen, states in self._reader().batches([tokenized[i] for i in usable], first=first):
            at = [usable[i] for i in chosen]
            scoped = states.scoped(self.scope)
            scores[at] = self.score_states(scoped)
            sketches[at] = (mean_states(scoped) @ projection.to(states.states)).cpu().numpy()
            n_seen += sum(int(prints.seen[scoped.ids].sum()) for prints in self._prints)
        lengths = np.array([len(sample.ids) for sample in tokenized])
        return Scored(scores, lengths, sketches, sum(sample.truncated for sample in tokenized), n_seen)

    def _projection(self) -> Tensor:
        """What mean states are multiplied by, shape (d, s)."""
        d = self.fingerprints_.shape[1]
        if d <= SKETCH:
            return torch.eye(d)
        generator = torch.Generator().manual_seed(self.random_state)
        return torch.randn(d, SKETCH, generator=generator) / SKETCH**0.5

    def _settings(self) -> dict[str, Any]:
        prints = hashlib.sha256(self.fingerprint_ids_.cpu().numpy().tobytes())
        prints.update(self.fingerprint_tasks_.numpy().tobytes())
        # Rounded: the last bits may differ between machines.
        prints.update((self.fingerprints_.cpu() * 1e3).round().to(torch.int16).numpy().tobytes())
        template = self.format.__qualname__ if self.format is not None else str(self.tokenizer.chat_template)
        return {
            "model": fingerprint(self.model),
            "target": prints.hexdigest()[:16],
            "tasks": list(self.tasks_),
            "template": hashlib.sha256(template.encode()).hexdigest()[:16],
            "scope": self.scope,
            "unseen_penalty": self.unseen_penalty,
            "max_weight": self.max_weight,
            "hidden": self.hidden,
            "max_length": self.max_length,
            "on_empty": self.on_empty,
            "random_state": self.random_state,
        }

    def _finish(self, found: Scored) -> None:
        self.n_truncated_ = found.n_truncated
        if not found.n_seen:
            warnings.warn(
                f"pool: has no token of the target in scope {self.scope!r}; all scores go by the nearest tokens",
                stacklevel=4,
            )


def read_states(
    model: Any,
    tokenizer: Any,
    samples: Iterable[Mapping[str, Any]],
    *,
    saliency: bool = False,
    n_layers: int = 4,
    hidden: Hidden = "last_hidden_state",
    batch_size: int = 8,
    max_length: int = 2048,
    format: Format | None = None,
    trunk: FrozenTrunk | None = None,
) -> TokenStates:
    """Read the last states of samples once, to score them with several settings.

    Parameters
    ----------
    model : transformers.PreTrainedModel or peft.PeftModel
    tokenizer : transformers.PreTrainedTokenizerBase
    samples : iterable of mapping
        Shape (n_samples,); all of them are held.
    saliency : bool
        Whether attention is read too, which the target needs.
    n_layers, hidden, batch_size, max_length, format
        As of `TrimSelector`.
    trunk : FrozenTrunk, optional
        Where the states of the lower layers come from.

    Returns
    -------
    TokenStates
        With states of shape (n_tokens, d).

    Examples
    --------
    >>> from practicum.language.confidence.tiny import tiny_model
    >>> model, tokenizer = tiny_model()
    >>> tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
    >>> read_states(model, tokenizer, [{"prompt": "2+2", "response": "4"}], n_layers=2).states.shape
    torch.Size([4, 32])
    """
    found = SampleTokenizer(tokenizer, format, max_length).tokenize(list(samples), "samples")
    if not found:
        raise InputError("samples: has no samples; must have one at least")
    return StateReader(model, n_layers, hidden, batch_size, trunk).read(found, saliency)
