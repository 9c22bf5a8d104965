"""What people choose instruction samples by today, behind the same interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from practicum.language.trim.samples import Format, SampleTokenizer, Scope, target_of, text_of
from practicum.language.trim.selector import CoresetSelector, OnEmpty, TokenSelector
from practicum.language.trim.shards import Scored
from practicum.language.trim.states import Hidden, StateReader, TokenStates
from practicum.language.trim.training import response_log_probs
from practicum.models import load_token_encoder
from practicum.toolbox.errors import InputError
from practicum.toolbox.extras import requires
from practicum.toolbox.trunk import Forward, FrozenTrunk, TokenRow

Pooling = Literal["last", "mean", "weighted"]
Prefer = Literal["target", "low", "high"]
Floats = NDArray[np.float32]


class RandomSelector(CoresetSelector):
    """Choose at random: what every method must beat.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase, optional
        To count tokens with, for a budget in tokens.
    random_state : int

    Attributes
    ----------
    tasks_ : list of str

    Examples
    --------
    Scores have shape (N,).

    >>> pool = [{"prompt": str(i), "response": "."} for i in range(4)]
    >>> RandomSelector(random_state=0).fit(pool[:1]).select(pool, n=2)
    array([0, 1])
    """

    def __init__(self, tokenizer: Any = None, random_state: int = 0) -> None:
        self.tokenizer = tokenizer
        self.random_state = random_state

    def fit(self, target: Iterable[Mapping[str, Any]]) -> Self:
        """Look at nothing.

        Parameters
        ----------
        target : iterable of mapping
            Shape (n_target,).

        Returns
        -------
        RandomSelector
            Itself.
        """
        self.tasks_ = ["target"]
        return self

    def _score_block(self, samples: Sequence[Mapping[str, Any]], first: int) -> Scored:
        scores = np.random.default_rng([self.random_state, first]).random((len(samples), 1), np.float32)
        return _scored(scores, _lengths(self.tokenizer, samples, first))

    def _settings(self) -> dict[str, Any]:
        return {"selector": "random", "random_state": self.random_state}


class LengthSelector(TokenSelector):
    """Choose the longest, which is hard to beat where pools are mixed.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    scope : {"response", "prompt", "all"}
        Whose tokens are counted.
    max_length, format, on_empty
        As of `TrimSelector`.

    Attributes
    ----------
    tasks_ : list of str

    Examples
    --------
    Scores have shape (N,).

    >>> from practicum.language.confidence.tiny import character_tokenizer
    >>> tokenizer = character_tokenizer()
    >>> tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
    >>> pool = [{"prompt": "a", "response": "short"}, {"prompt": "b", "response": "long enough"}]
    >>> LengthSelector(tokenizer).fit(pool[:1]).score_samples(pool)
    array([ 5., 11.], dtype=float32)
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        scope: Scope = "response",
        max_length: int = 2048,
        format: Format | None = None,
        on_empty: OnEmpty = "raise",
    ) -> None:
        self.tokenizer = tokenizer
        self.scope = scope
        self.max_length = max_length
        self.format = format
        self.on_empty = on_empty

    def fit(self, target: Iterable[Mapping[str, Any]]) -> Self:
        """Look at nothing.

        Parameters
        ----------
        target : iterable of mapping
            Shape (n_target,).

        Returns
        -------
        LengthSelector
            Itself.
        """
        self._tokenizer_of_samples()
        self.tasks_ = ["target"]
        return self

    def _score_block(self, samples: Sequence[Mapping[str, Any]], first: int) -> Scored:
        tokenized = self._tokenized(samples, first=first)
        counts = np.array([len(sample.in_scope(self.scope)) for sample in tokenized], np.float32)
        scores = np.where(counts > 0, counts, -np.inf).astype(np.float32)
        return _scored(scores[:, None], np.array([len(sample.ids) for sample in tokenized]))


class PerplexitySelector(TokenSelector):
    """Choose by how likely the model finds the response.

    Parameters
    ----------
    model : transformers.PreTrainedModel or peft.PeftModel
    tokenizer : transformers.PreTrainedTokenizerBase
    prefer : {"target", "low", "high"}
        Responses whose mean log-likelihood is nearest to that of the target's, or those of low or high perplexity.
    batch_size, max_length, format, on_empty
        As of `TrimSelector`.
    trunk : FrozenTrunk, optional
        Where the states of the lower layers come from.

    Attributes
    ----------
    tasks_ : list of str
    target_ : array of shape (T,), float64
        Mean log-likelihood of a token of the target, for each task.

    Examples
    --------
    Scores have shape (N,). What is as likely as the target is nearest to it:

    >>> from practicum.language.confidence.tiny import tiny_model
    >>> model, tokenizer = tiny_model()
    >>> tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
    >>> pool = [{"prompt": "2+2", "response": "4"}, {"prompt": "dog", "response": "Hund"}]
    >>> PerplexitySelector(model, tokenizer).fit(pool[:1]).score_samples(pool).round(3)
    array([-0.   , ...], dtype=float32)
    """

    scope: Scope = "response"

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        prefer: Prefer = "target",
        batch_size: int = 8,
        max_length: int = 2048,
        format: Format | None = None,
        on_empty: OnEmpty = "raise",
        trunk: FrozenTrunk | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.prefer = prefer
        self.batch_size = batch_size
        self.max_length = max_length
        self.format = format
        self.on_empty = on_empty
        self.trunk = trunk

    def fit(self, target: Iterable[Mapping[str, Any]]) -> Self:
        """Measure how likely the target's responses are.

        Parameters
        ----------
        target : iterable of mapping
            Shape (n_target,).

        Returns
        -------
        PerplexitySelector
            Itself.
        """
        if self.prefer not in ("target", "low", "high"):
            raise InputError(f"prefer={self.prefer!r}: must be 'target', 'low' or 'high'")
        samples, self.tasks_, tasks = target_of(target)
        likely = self._log_likelihoods(samples, "target", 0)[0]
        self.target_ = np.array([likely[np.array(tasks) == task].mean() for task in range(len(self.tasks_))])
        return self

    def _score_block(self, samples: Sequence[Mapping[str, Any]], first: int) -> Scored:
        likely, lengths = self._log_likelihoods(samples, "pool", first)
        if self.prefer == "target":
            scores = -np.abs(likely[:, None] - self.target_)
        else:
            scores = np.repeat((likely if self.prefer == "low" else -likely)[:, None], len(self.tasks_), axis=1)
        scores[np.isnan(likely)] = -np.inf
        return _scored(scores.astype(np.float32), lengths)

    def _log_likelihoods(
        self, samples: Sequence[Mapping[str, Any]], name: str, first: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        tokenized = self._tokenized(samples, name, first)
        forward = Forward(self.model, self.trunk, self.batch_size)
        found = np.full(len(tokenized), np.nan)
        usable = [i for i, sample in enumerate(tokenized) if sample.trained]
        rows = [TokenRow(tokenized[i].ids) for i in usable]
        with torch.no_grad():
            for chosen in forward.batches(rows):
                at = [usable[i] for i in chosen]
                for i, log_probs in zip(at, response_log_probs(forward, [tokenized[i] for i in at]), strict=True):
                    found[i] = float(log_probs.double().mean())
        return found, np.array([len(sample.ids) for sample in tokenized])


class RepresentationSelector(TokenSelector):
    """RDS [1]_: choose by the cosine of one hidden vector per sample with those of the target.

    The score is a mean over the target samples of a task.

    Parameters
    ----------
    model : transformers.PreTrainedModel or peft.PeftModel
    tokenizer : transformers.PreTrainedTokenizerBase
    pool : {"last", "mean", "weighted"}
        The state of the last token in scope, the mean of all, or the mean with weights that grow with the place, as
        RDS+ [2]_ has it.
    scope, hidden, batch_size, max_length, format, on_empty
        As of `TrimSelector`.

    Attributes
    ----------
    vectors_ : Tensor of shape (n_target, d), float32
        Of unit length.
    tasks_ : list of str

    References
    ----------
    .. [1] R. Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric", CVPR 2018, and its
       use for instruction data in [2]_.
    .. [2] H. Ivison et al., "Large-Scale Data Selection for Instruction Tuning", arXiv:2503.01807.

    Examples
    --------
    Scores have shape (N,).

    >>> from practicum.language.confidence.tiny import tiny_model
    >>> model, tokenizer = tiny_model()
    >>> tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
    >>> pool = [{"prompt": "2+2", "response": "4"}, {"prompt": "dog", "response": "Hund"}]
    >>> RepresentationSelector(model, tokenizer).fit(pool[:1]).score_samples(pool).round(3)
    array([1.   , ...], dtype=float32)
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        pool: Pooling = "last",
        scope: Scope = "response",
        hidden: Hidden = "last_hidden_state",
        batch_size: int = 8,
        max_length: int = 2048,
        format: Format | None = None,
        on_empty: OnEmpty = "raise",
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.pool = pool
        self.scope = scope
        self.hidden = hidden
        self.batch_size = batch_size
        self.max_length = max_length
        self.format = format
        self.on_empty = on_empty

    def fit(self, target: Iterable[Mapping[str, Any]]) -> Self:
        """Read the vectors of the target.

        Parameters
        ----------
        target : iterable of mapping
            Shape (n_target,).

        Returns
        -------
        RepresentationSelector
            Itself.
        """
        samples, self.tasks_, tasks = target_of(target)
        return self.fit_states(self._reader().read(self._tokenized(samples, "target"), name="target"), tasks)

    def fit_states(self, states: TokenStates, tasks: Sequence[int] | None = None) -> Self:
        """Keep vectors of states that are at hand.

        Parameters
        ----------
        states : TokenStates
            Of the target samples, from `read_states`.
        tasks : sequence of int, optional
            The task of each sample, shape (n_target,); by default one.

        Returns
        -------
        RepresentationSelector
            Itself.
        """
        if self.pool not in ("last", "mean", "weighted"):
            raise InputError(f"pool={self.pool!r}: must be 'last', 'mean' or 'weighted'")
        self._of_task = torch.tensor(tasks or [0] * states.n_samples)
        n_tasks = int(self._of_task.max()) + 1
        if not hasattr(self, "tasks_") or len(self.tasks_) != n_tasks:
            self.tasks_ = ["target"] if n_tasks == 1 else [str(task) for task in range(n_tasks)]
        self.vectors_ = self._vectors(states.scoped(self.scope)).cpu()
        return self

    def score_states(self, states: TokenStates) -> Floats:
        """Score samples whose states are at hand.

        Parameters
        ----------
        states : TokenStates
            Of N samples.

        Returns
        -------
        array of shape (N, T), float32
            For each task; -inf for a sample without a token in scope.
        """
        self._require_fitted()
        scoped = states.scoped(self.scope)
        cosines = self._vectors(scoped).cpu() @ self.vectors_.T
        found = torch.stack([cosines[:, self._of_task == i].mean(1) for i in range(len(self.tasks_))], dim=1)
        found[torch.bincount(scoped.owner.cpu(), minlength=states.n_samples) == 0] = -torch.inf
        return found.numpy()

    def _vectors(self, tokens: TokenStates) -> Tensor:
        """One unit vector a sample, shape (n, d)."""
        if self.pool == "last":
            last = tokens.places.new_full((tokens.n_samples,), -1).scatter_reduce(
                0, tokens.owner, tokens.places, "amax"
            )
            weight = (tokens.places == last[tokens.owner]).float()
        elif self.pool == "mean":
            weight = torch.ones_like(tokens.states[:, 0])
        else:
            weight = (tokens.places + 1).float()
        total = tokens.states.new_zeros(tokens.n_samples, tokens.states.shape[1])
        return normalize(total.index_add(0, tokens.owner, weight[:, None] * tokens.states), dim=-1)

    def _reader(self) -> StateReader:
        return StateReader(self.model, 1, self.hidden, self.batch_size)

    def _score_block(self, samples: Sequence[Mapping[str, Any]], first: int) -> Scored:
        tokenized = self._tokenized(samples, first=first)
        scores = np.full((len(tokenized), len(self.tasks_)), -np.inf, np.float32)
        usable = [i for i, sample in enumerate(tokenized) if sample.ids]
        for chosen, states in self._reader().batches([tokenized[i] for i in usable], first=first):
            scores[[usable[i] for i in chosen]] = self.score_states(states)
        return _scored(scores, np.array([len(sample.ids) for sample in tokenized]))


class EmbeddingSelector(CoresetSelector):
    """Choose by the cosine of sentence embeddings, a mean over the target samples of a task.

    Parameters
    ----------
    encoder : sentence_transformers.SentenceTransformer or callable, optional
        ``encoder(texts)`` or ``encoder.encode(texts)`` gives an array of shape (n, d). By default all-MiniLM-L6-v2, its
        token vectors averaged.
    scope : {"all", "response", "prompt"}
        What of a sample is embedded.
    tokenizer : transformers.PreTrainedTokenizerBase, optional
        To count tokens with, for a budget in tokens.

    Attributes
    ----------
    vectors_ : array of shape (n_target, d)
        Of unit length.
    tasks_ : list of str

    Examples
    --------
    Scores have shape (N,).

    >>> pool = [{"prompt": "2+2", "response": "4"}, {"prompt": "dog", "response": "Hund"}]
    >>> encoder = lambda texts: [[float("2" in text), float("d" in text)] for text in texts]
    >>> EmbeddingSelector(encoder).fit([{"prompt": "2+3", "response": "5"}]).score_samples(pool)
    array([1., 0.], dtype=float32)
    """

    def __init__(self, encoder: Any = None, *, scope: Scope = "all", tokenizer: Any = None) -> None:
        self.encoder = encoder
        self.scope = scope
        self.tokenizer = tokenizer

    def fit(self, target: Iterable[Mapping[str, Any]]) -> Self:
        """Embed the target.

        Parameters
        ----------
        target : iterable of mapping
            Shape (n_target,).

        Returns
        -------
        EmbeddingSelector
            Itself.
        """
        samples, self.tasks_, of_task = target_of(target)
        self._of_task = np.array(of_task)
        self.vectors_ = self._embed([text_of(sample, f"target[{i}]", self.scope) for i, sample in enumerate(samples)])
        return self

    def _score_block(self, samples: Sequence[Mapping[str, Any]], first: int) -> Scored:
        texts = [text_of(sample, f"pool[{i}]", self.scope) for i, sample in enumerate(samples, start=first)]
        cosines = self._embed(texts) @ self.vectors_.T
        scores = np.stack([cosines[:, self._of_task == i].mean(1) for i in range(len(self.tasks_))], axis=1)
        return _scored(scores.astype(np.float32), _lengths(self.tokenizer, samples, first))

    def _embed(self, texts: list[str]) -> NDArray[np.float64]:
        encode = getattr(self._encoder, "encode", self._encoder)
        vectors = np.asarray(encode(texts), dtype=np.float64)
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

    @cached_property
    def _encoder(self) -> Any:
        if self.encoder is not None:
            return self.encoder
        encoder = load_token_encoder()
        return lambda texts: np.stack([vectors.mean(0) for vectors in encoder.encode(texts)])


class BM25Selector(CoresetSelector):
    """Choose by the words that samples share with the target: BM25, a mean over the target samples of a task.

    How much a word counts depends on the whole pool, whose texts are held.

    Parameters
    ----------
    scope : {"all", "response", "prompt"}
        What of a sample is read.
    tokenizer : transformers.PreTrainedTokenizerBase, optional
        To count tokens with, for a budget in tokens.

    Attributes
    ----------
    queries_ : list of str
        Texts of the target, shape (n_target,).
    tasks_ : list of str

    Examples
    --------
    Scores have shape (N,).

    >>> pool = [{"prompt": "add two numbers", "response": "4"}, {"prompt": "name a dog", "response": "Rex"}]
    >>> BM25Selector().fit([{"prompt": "two numbers", "response": "5"}]).select(pool, n=1)
    array([0])
    """

    def __init__(self, *, scope: Scope = "all", tokenizer: Any = None) -> None:
        self.scope = scope
        self.tokenizer = tokenizer

    def fit(self, target: Iterable[Mapping[str, Any]]) -> Self:
        """Keep the texts of the target.

        Parameters
        ----------
        target : iterable of mapping
            Shape (n_target,).

        Returns
        -------
        BM25Selector
            Itself.
        """
        samples, self.tasks_, of_task = target_of(target)
        self._of_task = np.array(of_task)
        self.queries_ = [text_of(sample, f"target[{i}]", self.scope) for i, sample in enumerate(samples)]
        return self

    def _pass(
        self, pool: Iterable[Mapping[str, Any]], store: Path | str | None, progress: Callable[[int], object] | None
    ) -> Scored:
        self._require_fitted()
        if store is not None:
            self._settings()
        with requires("peers", "BM25Selector"):
            import bm25s
        samples = list(pool)
        if not samples:
            raise InputError("pool: has no samples; must have one at least")
        texts = [text_of(sample, f"pool[{i}]", self.scope) for i, sample in enumerate(samples)]
        index = bm25s.BM25()
        index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
        words = bm25s.tokenize(self.queries_, show_progress=False, return_ids=False)
        found = np.stack([index.get_scores(query) if query else np.zeros(len(texts)) for query in words], axis=1)
        scores = np.stack([found[:, self._of_task == i].mean(1) for i in range(len(self.tasks_))], axis=1)
        if progress is not None:
            progress(len(samples))
        return _scored(scores.astype(np.float32), _lengths(self.tokenizer, samples, 0))


def _lengths(tokenizer: Any, samples: Sequence[Mapping[str, Any]], first: int) -> NDArray[np.int64]:
    if tokenizer is None:
        return np.full(len(samples), -1)
    return np.array([len(sample.ids) for sample in SampleTokenizer(tokenizer).tokenize(samples, "pool", first)])


def _scored(scores: Floats, lengths: NDArray[np.int64]) -> Scored:
    return Scored(scores, lengths, np.zeros((len(scores), 0), np.float16))
