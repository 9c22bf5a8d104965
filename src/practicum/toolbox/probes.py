"""Probes of activations: linear, a strongly regularised MLP, and attention over a growing prefix."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize_scalar
from scipy.special import erf, log_softmax, softmax
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone, is_classifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, GroupShuffleSplit, check_cv
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor
from torch.nn import functional

from practicum.toolbox.errors import InputError
from practicum.toolbox.taps import fingerprint as fingerprint_of

Floats = NDArray[np.float64]

# Added to standard deviations: a feature that hardly varies is not blown up.
DEVIATION_FLOOR = 1e-4
# Traces a step of the attention probe's optimiser.
TRACES_PER_STEP = 64
# Where the recency slopes of four heads begin, and the most they may be.
FIRST_SLOPES = (0.0, 0.1, 0.3, 1.0)
LARGEST_SLOPE = 1.5
# For the temperature: the share of traces that is held out, and how many there must be to hold any out.
HELD_OUT = 0.2
FEWEST_TO_HOLD_OUT = 20
TEMPERATURES = (0.05, 20.0)
# Positions whose prefixes are summed at once: their cost grows with it, the number of steps falls.
BLOCK = 32
FORMAT_VERSION = 1


class WeightDecayMLP(RegressorMixin, BaseEstimator):
    r"""An MLP with one hidden layer under strong decoupled weight decay.

    .. math:: g(x) = w_2^\top \mathrm{GELU}(W_1 x + b_1) + b_2

    fitted to least squares by AdamW. The decay, which also takes in the biases, is far beyond what is usual for
    networks: it is what makes a probe of activations transfer [1]_. The last layer begins at zero, so that g is 0
    before training, and under a large decay stays near it. Features are standardised inside, by the training data; one
    that does not vary in it contributes nothing.

    Parameters
    ----------
    hidden : int
        Width of the hidden layer. 0 removes it: then g is linear and fitted in closed form, and ``weight_decay`` is the
        penalty of ridge regression on the standardised features, whose intercept is not penalised.
    weight_decay : float
        :math:`\lambda` of AdamW: every step takes off the share lr :math:`\lambda` of each weight.
    lr : float
    epochs : int
    batch_size : int
    random_state : int, RandomState or None
        Of the first weights and the order of rows.

    Attributes
    ----------
    coefs_, intercepts_ : list of ndarray of float32
        Of each layer, for the standardised features: shapes (d, hidden), (hidden, 1) and (hidden,), (1,).
    mean_, scale_ : ndarray of float64, shape (d,)
        Standardised features are ``(X - mean_) * scale_``.
    loss_curve_ : list of float
        Mean squared error in each epoch, while the weights change.
    n_features_in_ : int

    References
    ----------
    .. [1] M. M. Miao, Y.-M. Cho, L. Ungar: Correctness-Optimized Residual Activation Lens (CORAL). arXiv:2602.06022.
       ICML 2026. The paper's width, optimiser and decay are not known to us; the defaults are our measured choice.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(400, 8))
    >>> y = 0.3 * X[:, 0]
    >>> probe = WeightDecayMLP(weight_decay=1.0, random_state=0).fit(X, y)
    >>> bool(probe.score(X, y) > 0.9)
    True
    >>> bool(np.abs(WeightDecayMLP(weight_decay=400.0, random_state=0).fit(X, y).predict(X)).max() < 0.05)
    True
    """

    def __init__(
        self,
        hidden: int = 128,
        weight_decay: float = 10.0,
        lr: float = 2e-3,
        epochs: int = 60,
        batch_size: int = 256,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.hidden = hidden
        self.weight_decay = weight_decay
        self.lr = lr
        self.epochs = epochs
        self.batch_size = batch_size
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to least squares.

        Parameters
        ----------
        X : array-like of float, shape (n, d)
        y : array-like of float, shape (n,)

        Returns
        -------
        WeightDecayMLP
            Itself.

        Raises
        ------
        ValueError
            When X is not a finite dense matrix or y not a finite vector of its length, or a parameter is out of range;
            the message names it.
        """
        X, y = validate_data(self, X, y, dtype=(np.float64, np.float32), y_numeric=True, ensure_min_samples=2)
        _check_whole("hidden", self.hidden, 0)
        _check_whole("epochs", self.epochs, 1)
        _check_whole("batch_size", self.batch_size, 1)
        _check_number("weight_decay", self.weight_decay)
        _check_number("lr", self.lr, above=True)
        self.mean_, self.scale_ = _standardisation(X)
        standardised = (X - self.mean_) * self.scale_
        if self.hidden == 0:
            self._solve(standardised, np.asarray(y, dtype=np.float64))
        else:
            self._descend(standardised.astype(np.float32), np.asarray(y, dtype=np.float32))
        return self

    def predict(self, X: Any) -> Floats:
        """Return g of each row.

        Parameters
        ----------
        X : array-like of float, shape (n, d)

        Returns
        -------
        ndarray of float64, shape (n,)

        Raises
        ------
        sklearn.exceptions.NotFittedError
            Before `fit`.
        ValueError
            When X is not a finite dense matrix with the columns of the training data.
        """
        check_is_fitted(self)
        X = validate_data(self, X, dtype=(np.float64, np.float32), reset=False)
        out: Floats = (X - self.mean_) * self.scale_
        for k, (coefficients, intercepts) in enumerate(zip(self.coefs_, self.intercepts_, strict=True)):
            if k:
                out = 0.5 * out * (1.0 + erf(out / np.sqrt(2.0)))
            out = out @ coefficients.astype(np.float64) + intercepts
        return out[:, 0]

    def _solve(self, X: Floats, y: Floats) -> None:
        """Ridge regression; X is centred."""
        n, d = X.shape
        centred = y - y.mean()
        if d <= n:
            gram = X.T @ X + self.weight_decay * np.eye(d)
            weights = np.linalg.lstsq(gram, X.T @ centred, rcond=None)[0]
        else:
            weights = X.T @ np.linalg.lstsq(X @ X.T + self.weight_decay * np.eye(n), centred, rcond=None)[0]
        self.coefs_, self.intercepts_ = [weights[:, None]], [np.array([y.mean()])]
        self.loss_curve_ = [float(np.mean((X @ weights - centred) ** 2))]

    def _descend(self, X: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        generator = _generator(self.random_state)
        rows, targets = torch.from_numpy(X), torch.from_numpy(y)
        with _gradients():
            first = _uniform((X.shape[1], self.hidden), X.shape[1], generator)
            first_bias = _uniform((self.hidden,), X.shape[1], generator)
            weights = [first, first_bias, torch.zeros(self.hidden, 1), torch.zeros(1)]
            for each in weights:
                each.requires_grad_()
            optimizer = torch.optim.AdamW(weights, lr=self.lr, weight_decay=self.weight_decay, foreach=True)
            self.loss_curve_ = []
            for _ in range(self.epochs):
                total = 0.0
                for batch in torch.randperm(len(rows), generator=generator).split(self.batch_size):
                    hidden = functional.gelu(torch.addmm(weights[1], rows[batch], weights[0]))
                    loss = ((torch.addmm(weights[3], hidden, weights[2])[:, 0] - targets[batch]) ** 2).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    total += float(loss.detach()) * len(batch)
                self.loss_curve_.append(total / len(rows))
        arrays = [each.detach().numpy() for each in weights]
        self.coefs_, self.intercepts_ = arrays[0::2], arrays[1::2]

    def __sklearn_tags__(self) -> Any:
        """A probe that is regularised to predict small residuals does not fit the data of the battery well."""
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True
        return tags


class LinearProbe(ClassifierMixin, BaseEstimator):
    r"""Multinomial logistic regression on standardised activations.

    Parameters
    ----------
    C : float
        Inverse of the L2 penalty, as in scikit-learn's `LogisticRegression`.
    max_iter : int

    Attributes
    ----------
    classes_ : ndarray of shape (K,)
    coef_ : ndarray of float64, shape (1 or K, d)
        For the standardised features; one row for two classes.
    intercept_ : ndarray of float64, shape (1 or K,)
    mean_, scale_ : ndarray of float64, shape (d,)
        Standardised features are ``(X - mean_) * scale_``; one that does not vary has a scale of 0.
    n_iter_ : ndarray of int, shape (1,)
        Iterations of the solver.
    n_features_in_ : int

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> y = np.array(["no", "yes"])[rng.integers(2, size=200)]
    >>> X = rng.normal(size=(200, 8)) + 3 * (y == "yes")[:, None]
    >>> probe = LinearProbe().fit(X[:100], y[:100])
    >>> probe.score(X[100:], y[100:]) > 0.95, probe.predict_proba(X[:3]).shape
    (True, (3, 2))
    """

    def __init__(self, C: float = 1.0, max_iter: int = 1000) -> None:
        self.C = C
        self.max_iter = max_iter

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to the classes of y.

        Parameters
        ----------
        X : array-like of float, shape (n, d)
        y : array-like of shape (n,)

        Returns
        -------
        LinearProbe
            Itself.

        Raises
        ------
        ValueError
            When X is not a finite dense matrix or y has fewer than two classes, or a parameter is out of range; the
            message names it.
        """
        X, y = validate_data(self, X, y, dtype=(np.float64, np.float32))
        check_classification_targets(y)
        _check_number("C", self.C, above=True)
        _check_whole("max_iter", self.max_iter, 1)
        self.classes_ = _two_or_more(np.unique(y))
        self.mean_, self.scale_ = _standardisation(X)
        standardised = ((X - self.mean_) * self.scale_).astype(X.dtype)
        model = LogisticRegression(C=self.C, max_iter=self.max_iter).fit(standardised, y)
        self.coef_, self.intercept_, self.n_iter_ = model.coef_, model.intercept_, model.n_iter_
        return self

    def decision_function(self, X: Any) -> Floats:
        """Return the logits: of the second class, shape (n,), for two classes; else of all, shape (n, K)."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=(np.float64, np.float32), reset=False)
        logits = ((X - self.mean_) * self.scale_) @ self.coef_.T + self.intercept_
        return logits[:, 0] if len(self.classes_) == 2 else logits

    def predict_proba(self, X: Any) -> Floats:
        """Return probabilities of shape (n, K).

        Parameters
        ----------
        X : array-like of float, shape (n, d)

        Raises
        ------
        sklearn.exceptions.NotFittedError
            Before `fit`.
        ValueError
            When X is not a finite dense matrix with the columns of the training data.
        """
        logits = self.decision_function(X)
        if logits.ndim == 1:
            logits = np.stack([np.zeros_like(logits), logits], axis=1)
        return softmax(logits, axis=1)

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable class of each row, of shape (n,)."""
        logits = self.decision_function(X)
        return self.classes_[(logits > 0).astype(int) if logits.ndim == 1 else logits.argmax(axis=1)]


class AttentionProbe(ClassifierMixin, BaseEstimator):
    r"""Classify a growing prefix of activations by attention pooling: one probe for prefixes of every length.

    For activations :math:`h_0, .., h_t` of one trace and head j,

    .. math:: \alpha^j_s = \mathrm{softmax}_{s \le t}(q_j^\top h_s + m_j s), \qquad
              \mathrm{logits}_t = \sum_j \sum_{s \le t} \alpha^j_s V_j h_s + b

    Features are standardised by the training tokens. The loss is the cross-entropy of the class, averaged over all
    prefixes of a trace that include its question, then over traces. :math:`q_j` begins at zero: mean pooling.

    The recency slopes :math:`0 \le m_j \le 1.5` are our addition to the paper's probe [1]_, whose exact form is not
    known to us; they range from the mean over content to the last token. Only differences of positions count, so the
    state of a stream stays as small as without them.

    Prefixes are summed with a running maximum in float64: no activation overflows, and every prefix of n tokens costs
    O(n d) once.

    Parameters
    ----------
    n_heads : int
        J. Only attention has heads.
    recency : bool
        Whether slopes are learned; else they are 0, which is the paper's form.
    rank : int, optional
        r: :math:`V_j = W U_j` with :math:`U_j` of shape (r, d) and W common to the heads.
    weight_decay : float
        Decoupled; of q, V, U and W.
    lr : float
        1e-2 suits models of width 64, 1e-3 those of billions of weights.
    epochs : int
    pooling : {"attention", "mean", "last"}
        The latter two are baselines: the mean of the prefix, or its last token, into a linear layer.
    temperature : "fit" or float
        "fit" holds out a fifth of the traces, or of their groups, and divides the logits by the temperature at which
        they are likeliest; with fewer than 20 traces it is 1.
    random_state : int, RandomState or None

    Attributes
    ----------
    classes_ : ndarray of shape (K,)
        Labels and options of the training data.
    query_ : ndarray of float32, shape (J, d)
    slopes_ : ndarray of float32, shape (J,)
    value_ : ndarray of float32, shape (J, K or r, d)
    output_ : ndarray of float32, shape (K, r), or None
        W.
    bias_ : ndarray of float32, shape (K,)
    mean_, scale_ : ndarray of float64, shape (d,)
    temperature_ : float
    loss_curve_ : list of float
    n_features_in_ : int

    References
    ----------
    .. [1] S. Boppana et al.: Reasoning Theater: Disentangling Model Beliefs from Chain-of-Thought. arXiv:2603.05488.
       ICML 2026.

    Examples
    --------
    The class is written in one token of each trace:

    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(2, size=60)
    >>> X = [rng.normal(size=(rng.integers(5, 9), 4)) for _ in y]
    >>> for trace, label in zip(X, y):
    ...     trace[2] += [8, 8 * label, 0, 0]
    >>> probe = AttentionProbe(lr=1e-2, random_state=0).fit(X[:40], y[:40])
    >>> bool((probe.predict(X[40:]) == y[40:]).mean() > 0.9)
    True
    >>> prefixes = probe.predict_prefixes(X[:1])[0]
    >>> stream = probe.stream()
    >>> bool(np.allclose([stream.update(token) for token in X[0]], prefixes))
    True
    """

    n_features_in_: int

    def __init__(
        self,
        n_heads: int = 4,
        recency: bool = True,
        rank: int | None = None,
        weight_decay: float = 1e-2,
        lr: float = 1e-3,
        epochs: int = 50,
        pooling: Literal["attention", "mean", "last"] = "attention",
        temperature: float | Literal["fit"] = "fit",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.n_heads = n_heads
        self.recency = recency
        self.rank = rank
        self.weight_decay = weight_decay
        self.lr = lr
        self.epochs = epochs
        self.pooling = pooling
        self.temperature = temperature
        self.random_state = random_state

    def fit(
        self,
        X: Sequence[Any] | ArrayLike,
        y: ArrayLike,
        start: Sequence[int] | None = None,
        options: Sequence[Sequence[Any]] | None = None,
        groups: ArrayLike | None = None,
    ) -> Self:
        """Fit to the classes of all prefixes.

        Parameters
        ----------
        X : sequence of N tensors or arrays of float, shape (n_i, d)
            A trace each. A matrix (N, d) is N traces of one token.
        y : array-like of shape (N,)
            The class of each trace.
        start : sequence of int, shape (N,), optional
            Tokens of the question, which every prefix has in it: prefixes of ``max(start, 1)`` to n_i tokens count. By
            default 0.
        options : sequence of N sequences of labels, optional
            The classes that are possible for each trace; the others are left out of its softmax.
        groups : array-like of shape (N,), optional
            Traces of one group, such as of one question, are held out together.

        Returns
        -------
        AttentionProbe
            Itself.

        Raises
        ------
        ValueError
            When y has fewer than two classes, X is empty, traces differ in d or have values that are not finite, start
            leaves no token, or a label is not among its options; the message names the argument and index.
        """
        self._check_parameters()
        traces = self._traces(X, reset=True)
        labels = column_or_1d(y, warn=True)
        if len(labels) != len(traces):
            raise InputError(f"y: has {len(labels)} labels; must have one for each of {len(traces)} traces")
        check_classification_targets(labels)
        _two_or_more(np.unique(labels))
        starts = _checked_starts(start, traces)
        known = labels if options is None else np.concatenate([labels, *[np.asarray(o) for o in options]])
        self.classes_ = np.unique(known)
        possible = _possible(options, self.classes_, len(traces))
        targets = np.searchsorted(self.classes_, labels)
        if possible is not None:
            for i, (row, target) in enumerate(zip(possible, targets, strict=True)):
                if not row[target]:
                    raise InputError(f"y[{i}]={labels[i]!r}: must be among its options {list(options[i])!r}")  # type: ignore[index]
        data = _Data(traces, targets, starts, possible)
        random_state = check_random_state(self.random_state)
        learnt, held = self._split(len(traces), groups, random_state)
        self.mean_, self.scale_ = _standardisation_of([traces[i] for i in learnt])
        self._descend(data, learnt, _generator(random_state))
        self.temperature_ = 1.0 if self.temperature == "fit" else float(self.temperature)
        if len(held):
            self.temperature_ = self._likeliest_temperature(data, held)
        return self

    def predict_proba(self, X: Sequence[Any] | ArrayLike, options: Sequence[Sequence[Any]] | None = None) -> Floats:
        """Return the probabilities of the classes, after all tokens of each trace.

        Parameters
        ----------
        X : sequence of N tensors or arrays of float, shape (n_i, d); or a matrix (N, d)
        options : sequence of N sequences of labels, optional
            As in `fit`; classes that are left out have probability 0.

        Returns
        -------
        ndarray of float64, shape (N, K)

        Raises
        ------
        sklearn.exceptions.NotFittedError
            Before `fit`.
        ValueError
            As `fit`, and when d is not that of the training data.
        """
        traces, possible = self._given(X, options)
        logits = np.stack([self._logits_at_end(trace) for trace in traces])
        return _masked_softmax(logits / self.temperature_, possible)

    def predict_prefixes(
        self, X: Sequence[Any] | ArrayLike, options: Sequence[Sequence[Any]] | None = None
    ) -> list[Floats]:
        """Return the probabilities of the classes after every token, in one pass.

        Parameters
        ----------
        X, options
            As in `predict_proba`.

        Returns
        -------
        list of N ndarray of float64, shape (n_i, K)
            Row t is for the prefix of t + 1 tokens.
        """
        traces, possible = self._given(X, options)
        return [
            _masked_softmax(self._logits(trace) / self.temperature_, None if possible is None else possible[i])
            for i, trace in enumerate(traces)
        ]

    def predict(self, X: Sequence[Any] | ArrayLike, options: Sequence[Sequence[Any]] | None = None) -> NDArray[Any]:
        """Return the most probable class after all tokens of each trace.

        Parameters
        ----------
        X, options
            As in `predict_proba`.

        Returns
        -------
        ndarray of shape (N,)
            Labels, of the type of ``classes_``.
        """
        probabilities = self.predict_proba(X, options)
        return self.classes_[probabilities.argmax(axis=1)]

    def stream(self, options: Sequence[Any] | None = None) -> ProbeStream:
        """Return the state of one trace that comes token by token.

        Parameters
        ----------
        options : sequence of labels, optional
            The classes that are possible.

        Returns
        -------
        ProbeStream
        """
        check_is_fitted(self)
        possible = _possible(None if options is None else [options], self.classes_, 1)
        return ProbeStream(self, None if possible is None else possible[0])

    def _check_parameters(self) -> None:
        _check_whole("n_heads", self.n_heads, 1)
        _check_whole("epochs", self.epochs, 1)
        if self.rank is not None:
            _check_whole("rank", self.rank, 1)
        _check_number("weight_decay", self.weight_decay)
        _check_number("lr", self.lr, above=True)
        if self.pooling not in ("attention", "mean", "last"):
            raise InputError(f"pooling={self.pooling!r}: must be 'attention', 'mean' or 'last'")
        if self.temperature != "fit":
            _check_number("temperature", self.temperature, above=True)

    def _given(self, X: Any, options: Sequence[Sequence[Any]] | None) -> tuple[list[Tensor], NDArray[np.bool_] | None]:
        check_is_fitted(self)
        traces = self._traces(X, reset=False)
        return traces, _possible(options, self.classes_, len(traces))

    def _traces(self, X: Any, *, reset: bool) -> list[Tensor]:
        """The traces as tensors on the CPU that share memory with what was given, where they can."""
        if not _is_ragged(X):
            matrix = validate_data(self, X, dtype=(np.float64, np.float32), reset=reset)
            return list(torch.from_numpy(np.ascontiguousarray(matrix))[:, None])
        traces: list[Tensor] = []
        for i, given in enumerate(X):
            trace = given.detach().cpu() if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given))
            if trace.ndim != 2 or not trace.is_floating_point() or not len(trace):
                raise InputError(
                    f"X[{i}]: has shape {tuple(trace.shape)} of {trace.dtype}; must be floats (n, d), n >= 1"
                )
            width = len(traces[0][0]) if traces else trace.shape[1] if reset else int(self.n_features_in_)
            if trace.shape[1] != width:
                raise InputError(f"X[{i}]: has {trace.shape[1]} features; must have {width}, as the others")
            finite = torch.isfinite(trace).all(1)
            if not finite.all():
                raise InputError(f"X[{i}]: is not finite at position {int((~finite).nonzero()[0, 0])}")
            traces.append(trace)
        if reset:
            self.n_features_in_ = int(traces[0].shape[1])
            self.__dict__.pop("feature_names_in_", None)
        return traces

    def _split(
        self, n: int, groups: ArrayLike | None, random_state: np.random.RandomState
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        members = np.arange(n) if groups is None else column_or_1d(groups)
        if len(members) != n:
            raise InputError(f"groups: has {len(members)} entries; must have one for each of {n} traces")
        if self.temperature != "fit" or n < FEWEST_TO_HOLD_OUT or len(np.unique(members)) < 2:
            return np.arange(n), np.arange(0)
        splitter = GroupShuffleSplit(1, test_size=HELD_OUT, random_state=random_state)
        return next(splitter.split(np.empty(n), groups=members))

    def _descend(self, data: _Data, rows: NDArray[np.intp], generator: torch.Generator) -> None:
        d, K = self.n_features_in_, len(self.classes_)
        heads = self.n_heads if self.pooling == "attention" else 1
        attends = self.pooling == "attention"
        with _gradients():
            network = _Network(
                query=torch.zeros(heads, d),
                slopes=_first_slopes(heads) if attends and self.recency else torch.zeros(heads),
                value=_uniform((heads, self.rank or K, d), d, generator) / heads,
                output=None if self.rank is None else _uniform((K, self.rank), self.rank, generator),
                bias=torch.zeros(K),
                pooling=self.pooling,
            )
            decayed = [network.value, *([] if network.output is None else [network.output])]
            free = [network.bias]
            if attends:
                decayed.append(network.query)
                free += [network.slopes] if self.recency else []
            for each in decayed + free:
                each.requires_grad_()
            optimizer = torch.optim.AdamW(
                [{"params": decayed, "weight_decay": self.weight_decay}, {"params": free, "weight_decay": 0.0}],
                lr=self.lr,
                foreach=True,
            )
            mean, scale = (torch.from_numpy(each.astype(np.float32)) for each in (self.mean_, self.scale_))
            self.loss_curve_ = []
            for _ in range(self.epochs):
                total = 0.0
                for batch in torch.randperm(len(rows), generator=generator).split(TRACES_PER_STEP):
                    loss = network.loss(data, rows[batch.numpy()], mean, scale)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    with torch.no_grad():
                        network.slopes.clamp_(0.0, LARGEST_SLOPE)
                    total += float(loss.detach()) * len(batch)
                self.loss_curve_.append(total / len(rows))
        self.query_, self.slopes_ = network.query.detach().numpy(), network.slopes.detach().numpy()
        self.value_, self.bias_ = network.value.detach().numpy(), network.bias.detach().numpy()
        self.output_ = None if network.output is None else network.output.detach().numpy()

    def _projected(self, trace: Tensor) -> tuple[Floats, Floats]:
        """Scores of shape (n, J) and values of shape (n, J, K) of every token."""
        tokens = (trace.double().numpy() - self.mean_) * self.scale_
        scores = tokens @ self.query_.T.astype(np.float64)
        values = tokens @ self.value_.reshape(-1, self.n_features_in_).T.astype(np.float64)
        values = values.reshape(len(tokens), *self.value_.shape[:2])
        return scores, values if self.output_ is None else values @ self.output_.T.astype(np.float64)

    def _logits_at_end(self, trace: Tensor) -> Floats:
        if self.pooling == "last":
            return self._projected(trace[-1:])[1][0, 0] + self.bias_
        scores, values = self._projected(trace)
        weights = softmax(scores + np.arange(len(scores))[:, None] * self.slopes_.astype(np.float64), axis=0)
        return np.einsum("sj,sjk->k", weights, values) + self.bias_

    def _logits(self, trace: Tensor) -> Floats:
        scores, values = self._projected(trace)
        if self.pooling == "last":
            return values[:, 0] + self.bias_
        state = _State.empty(scores.shape[1], values.shape[2])
        slopes = self.slopes_.astype(np.float64)
        parts = [
            state.extend(scores[begin : begin + BLOCK], values[begin : begin + BLOCK], slopes)
            for begin in range(0, len(scores), BLOCK)
        ]
        return np.concatenate(parts) + self.bias_

    def _likeliest_temperature(self, data: _Data, rows: NDArray[np.intp]) -> float:
        logits, targets, weights = [], [], []
        for i in rows:
            of_trace = self._logits(data.traces[i])[max(data.starts[i] - 1, 0) :]
            if data.possible is not None:
                of_trace = np.where(data.possible[i], of_trace, -np.inf)
            logits.append(of_trace)
            targets.append(np.full(len(of_trace), data.targets[i]))
            weights.append(np.full(len(of_trace), 1 / len(of_trace)))
        every, target, weight = np.concatenate(logits), np.concatenate(targets), np.concatenate(weights)
        chosen = np.arange(len(every))

        def loss(log_temperature: float) -> float:
            return -float(weight @ log_softmax(every / np.exp(log_temperature), axis=1)[chosen, target])

        found = minimize_scalar(loss, bounds=np.log(TEMPERATURES), method="bounded", options={"xatol": 1e-3})
        return float(np.exp(found.x))


class ProbeStream:
    """The probabilities of an `AttentionProbe` while a trace grows; its state is J (K + 2) numbers.

    Made by `AttentionProbe.stream`, where there is an example.
    """

    def __init__(self, probe: AttentionProbe, possible: NDArray[np.bool_] | None = None) -> None:
        self._probe = probe
        self._possible = possible
        heads, n_classes = len(probe.query_), len(probe.classes_)
        self._state = _State.empty(heads, n_classes)
        self._slopes = probe.slopes_.astype(np.float64)

    def update(self, h: ArrayLike | Tensor) -> Floats:
        """Take the next token.

        Parameters
        ----------
        h : tensor or array-like of float, shape (d,)

        Returns
        -------
        ndarray of float64, shape (K,)
            The probabilities after it.

        Raises
        ------
        InputError
            A ValueError, when it has another shape or is not finite.
        """
        token = h.detach().cpu() if isinstance(h, Tensor) else torch.as_tensor(np.asarray(h))
        if tuple(token.shape) != (self._probe.n_features_in_,):
            raise InputError(f"h: has shape {tuple(token.shape)}; must be ({self._probe.n_features_in_},)")
        if not torch.isfinite(token).all():
            raise InputError("h: is not finite")
        scores, values = self._probe._projected(token[None])
        pooled = values[:, 0] if self._probe.pooling == "last" else self._state.extend(scores, values, self._slopes)
        return _masked_softmax((pooled[0] + self._probe.bias_) / self._probe.temperature_, self._possible)


@dataclass(frozen=True)
class LayerChoice:
    """What `choose_layer` found.

    Attributes
    ----------
    layer : int
        With the highest mean score; the lower one of a tie.
    scores : dict from int to ndarray of float64, shape (folds,)
    """

    layer: int
    scores: dict[int, Floats]


def choose_layer(
    estimator: Any,
    activations_by_layer: Mapping[int, Any],
    y: ArrayLike,
    groups: ArrayLike | None = None,
    cv: Any = 5,
    scoring: Callable[[Any, Any, NDArray[Any]], float] | None = None,
    fit_params: Mapping[str, Sequence[Any]] | None = None,
) -> LayerChoice:
    """Choose the layer on whose activations a probe does best in cross-validation.

    Parameters
    ----------
    estimator : estimator
        Of scikit-learn's kind; clones of it are fitted.
    activations_by_layer : mapping from int to array of shape (N, d), or sequence of N arrays of shape (n_i, d)
        Such as what `practicum.toolbox.taps.record` returns.
    y : array-like of shape (N,)
    groups : array-like of shape (N,), optional
        Rows of one group, such as the options of one question, never straddle a split.
    cv : int, splitter or iterable of pairs of index arrays
        An int is that many folds: of groups where there are any, else stratified for a classifier.
    scoring : callable, optional
        ``scoring(estimator, X, y) -> float``, higher is better. By default the estimator's ``score``.
    fit_params : mapping from str to sequence of length N, optional
        Given to ``fit``, the entries of each fold.

    Returns
    -------
    LayerChoice

    Raises
    ------
    ValueError
        When there are no layers, or a layer has another number of rows than y; the message names it.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(2, size=60)
    >>> noise, signal = rng.normal(size=(60, 4)), rng.normal(size=(60, 4)) + 2 * y[:, None]
    >>> choose_layer(LinearProbe(), {1: noise, 2: signal}, y).layer
    2
    """
    if not activations_by_layer:
        raise InputError("activations_by_layer: is empty; must have one layer at least")
    labels = column_or_1d(y)
    for layer, X in activations_by_layer.items():
        if len(X) != len(labels):
            raise InputError(f"activations_by_layer[{layer}]: has {len(X)} rows; y has {len(labels)}")
    whole = isinstance(cv, Integral) and not isinstance(cv, bool)
    if groups is not None and whole:
        members = column_or_1d(groups)
        splitter: Any = GroupKFold(min(int(cv), len(np.unique(members))))
    else:
        splitter = check_cv(cv, labels, classifier=is_classifier(estimator))
    folds = list(splitter.split(np.zeros(len(labels)), labels, groups))
    scores = {}
    for layer, X in sorted(activations_by_layer.items()):
        of_layer = []
        for train, test in folds:
            given = {name: _rows(values, train) for name, values in (fit_params or {}).items()}
            fitted = clone(estimator).fit(_rows(X, train), labels[train], **given)
            score = fitted.score if scoring is None else lambda X, y, fitted=fitted: scoring(fitted, X, y)
            of_layer.append(score(_rows(X, test), labels[test]))
        scores[int(layer)] = np.array(of_layer, dtype=np.float64)
    return LayerChoice(max(scores, key=lambda layer: scores[layer].mean()), scores)


def save_probe(probe: Any, path: Path | str, *, fingerprint: str | None = None) -> None:
    """Write a fitted probe as one safetensors file, whose header has its parameters as JSON.

    Parameters
    ----------
    probe : WeightDecayMLP, LinearProbe or AttentionProbe
    path : pathlib.Path or str
        ``.safetensors`` is added where it has no suffix.
    fingerprint : str, optional
        Of the model that the activations are from, by `practicum.toolbox.taps.fingerprint`.

    Raises
    ------
    InputError
        A ValueError: for another kind of probe.
    sklearn.exceptions.NotFittedError
        When it is not fitted.

    Examples
    --------
    >>> import tempfile
    >>> X, y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20) % 2
    >>> probe = LinearProbe().fit(X, y)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_probe(probe, Path(folder, "probe"))
    ...     read = load_probe(Path(folder, "probe"))
    >>> bool((read.predict_proba(X) == probe.predict_proba(X)).all())
    True
    """
    from safetensors.numpy import save

    kind = type(probe).__name__
    if type(probe) is not KINDS.get(kind):
        raise InputError(f"probe={kind}: must be one of {', '.join(KINDS)}")
    check_is_fitted(probe)
    arrays: dict[str, NDArray[Any]] = {}
    others: dict[str, Any] = {}
    for name, value in vars(probe).items():
        if not name.endswith("_") or name.startswith("_"):
            continue
        if name in ("classes_", "feature_names_in_"):
            others[name] = {"values": value.tolist(), "dtype": value.dtype.str if value.dtype != object else "object"}
        elif isinstance(value, np.ndarray):
            arrays[name] = np.ascontiguousarray(value)
        elif name in ("coefs_", "intercepts_"):
            arrays |= {f"{name}.{k}": np.ascontiguousarray(each) for k, each in enumerate(value)}
        else:
            others[name] = value
    parameters = probe.get_params()
    if not isinstance(parameters.get("random_state"), Integral | None):
        parameters["random_state"] = None
    header = {
        "format": FORMAT_VERSION,
        "kind": kind,
        "parameters": {name: _plain(value) for name, value in parameters.items()},
        "fitted": {name: _plain(value) for name, value in others.items()},
        "fingerprint": fingerprint,
    }
    file = _probe_file(path)
    beside = file.with_name(f".{file.name}.tmp")
    beside.write_bytes(save(arrays, metadata={"probe": json.dumps(header)}))
    beside.replace(file)


def load_probe(path: Path | str, model: Any = None) -> Any:
    """Read what `save_probe` wrote; nothing is unpickled.

    Parameters
    ----------
    path : pathlib.Path or str
    model : transformers.PreTrainedModel, optional
        The model it is to be used with; another than the one it was fitted on is refused.

    Returns
    -------
    WeightDecayMLP, LinearProbe or AttentionProbe
        Predicts the same bits as the one that was saved.

    Raises
    ------
    InputError
        A ValueError: when there is no such file, it is not a probe, or it is of another model or of none that is known.
    """
    from safetensors import SafetensorError, safe_open

    file = _probe_file(path)
    if not file.is_file():
        raise InputError(f"path={str(file)!r}: there is no such file")
    try:
        with safe_open(file, framework="numpy") as content:
            header = json.loads((content.metadata() or {})["probe"])
            arrays = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        if header["format"] != FORMAT_VERSION:
            raise InputError(f"path={str(file)!r}: has format {header['format']}; must be {FORMAT_VERSION}")
        probe = KINDS[header["kind"]](**header["parameters"])
        fitted = dict(header["fitted"])
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise InputError(f"path={str(file)!r}: is not a probe ({type(error).__name__}: {error})") from error
    if model is not None:
        _require_model(file, header.get("fingerprint"), model)
    for name, value in fitted.items():
        if isinstance(value, dict) and "dtype" in value:
            value = np.array(value["values"], dtype=value["dtype"])
        setattr(probe, name, value)
    listed: dict[str, dict[int, NDArray[Any]]] = {}
    for name, array in arrays.items():
        base, _, place = name.partition(".")
        if place:
            listed.setdefault(base, {})[int(place)] = array
        else:
            setattr(probe, name, array)
    for name, entries in listed.items():
        setattr(probe, name, [entries[k] for k in sorted(entries)])
    return probe


KINDS: dict[str, Any] = {each.__name__: each for each in (WeightDecayMLP, LinearProbe, AttentionProbe)}


@dataclass(frozen=True)
class _Data:
    """What an attention probe is fitted to."""

    traces: list[Tensor]
    targets: NDArray[np.intp]
    starts: NDArray[np.intp]
    possible: NDArray[np.bool_] | None


@dataclass(frozen=True)
class _Network:
    """The weights of an attention probe while they are learned."""

    query: Tensor
    slopes: Tensor
    value: Tensor
    output: Tensor | None
    bias: Tensor
    pooling: str

    def loss(self, data: _Data, rows: NDArray[np.intp], mean: Tensor, scale: Tensor) -> Tensor:
        """Cross-entropy, averaged over the prefixes of each trace and then over traces."""
        traces = [data.traces[i] for i in rows]
        lengths = np.array([len(trace) for trace in traces])
        batch, longest, heads = len(traces), int(lengths.max()), len(self.query)
        tokens = (torch.cat([trace.float() for trace in traces]) - mean) * scale
        # The weights are applied to tokens that lie one after the other, so that padding costs nothing of size d.
        traces_of = np.repeat(np.arange(batch), lengths)
        positions = np.arange(len(tokens)) - np.repeat(lengths.cumsum() - lengths, lengths)
        places = torch.from_numpy(positions * batch + traces_of)

        def padded(of_tokens: Tensor) -> Tensor:
            laid = of_tokens.new_zeros(longest * batch, of_tokens.shape[1]).index_copy(0, places, of_tokens)
            # Traces come last: what is done to all of them at a position then lies side by side.
            return laid.unflatten(0, (longest, batch)).transpose(1, 2).contiguous()

        values = padded(tokens @ self.value.reshape(-1, tokens.shape[1]).T)
        if self.pooling == "last":
            pooled = values
        else:
            scores = padded(tokens @ self.query.T).double()
            scores = scores + torch.arange(longest)[:, None, None] * self.slopes.double()[:, None]
            pooled = _PrefixPooling.apply(scores, values.unflatten(1, (heads, -1)))
        logits = (pooled if self.output is None else self.output @ pooled) + self.bias[:, None]
        if data.possible is not None:
            logits = logits.masked_fill(torch.from_numpy(~data.possible[rows].T), -torch.inf)
        # Each prefix weighs one over the number of those of its trace.
        firsts = np.maximum(data.starts[rows] - 1, 0)
        counted = (np.arange(longest)[:, None] >= firsts) & (np.arange(longest)[:, None] < lengths)
        weights = torch.from_numpy((counted / (batch * counted.sum(0))).astype(np.float32))
        targets = torch.from_numpy(data.targets[rows]).expand(longest, 1, batch)
        likelihoods = logits.log_softmax(1).gather(1, targets)[:, 0]
        return -(likelihoods * weights).sum()


class _PrefixPooling(torch.autograd.Function):
    """Attention pooling of all prefixes at once: scores (n, J, B) and values (n, J, C, B) to (n, C, B).

    Sums run over positions with the largest score so far as their unit, so that nothing overflows or underflows however
    long the traces are: the recurrences are N_t = c_t N_{t-1} + w_t v_t and, backwards, R_t = a_t + c_{t+1} R_{t+1}.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, values: Tensor) -> Tensor:
        n, heads, n_values, batch = values.shape
        largest = scores.cummax(0).values
        weights = (scores - largest).exp().float()[:, :, None]
        kept = (largest[:-1] - largest[1:]).exp().float()[:, :, None]
        # The last of the sums is that of the weights.
        sums = values.new_empty(n, heads, n_values + 1, batch)
        torch.mul(weights, values, out=sums[:, :, :-1])
        sums[:, :, -1:] = weights
        rows = sums.unbind(0)
        for before, row, factor in zip(rows, rows[1:], kept.unbind(0), strict=False):
            row.addcmul_(before, factor)
        denominators = sums[:, :, -1:].contiguous()
        pooled = sums[:, :, :-1] / denominators
        ctx.save_for_backward(weights, values, kept, denominators, pooled)
        return pooled.sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weights, values, kept, denominators, pooled = ctx.saved_tensors
        n, heads, n_values, batch = values.shape
        of_sums = values.new_empty(n, heads, n_values + 1, batch)
        of_numerators = of_sums[:, :, :-1]
        torch.div(gradients[0][:, None], denominators, out=of_numerators)
        of_sums[:, :, -1] = -(of_numerators * pooled).sum(2)
        rows = of_sums.unbind(0)
        for t in range(n - 2, -1, -1):
            rows[t].addcmul_(rows[t + 1], kept[t])
        of_weights = (of_numerators * values).sum(2) + of_sums[:, :, -1]
        return (of_weights * weights[:, :, 0]).double(), of_numerators * weights


@dataclass
class _State:
    """Running maximum, denominator and numerator of each head."""

    largest: Floats
    denominator: Floats
    numerator: Floats

    @classmethod
    def empty(cls, heads: int, n_classes: int) -> _State:
        return cls(np.full(heads, -np.inf), np.zeros(heads), np.zeros((heads, n_classes)))

    def extend(self, scores: Floats, values: Floats, slopes: Floats) -> Floats:
        """Take c tokens, scores (c, J) and values (c, J, K); return what is pooled after each, of shape (c, K).

        Scores count from the token before: those that were taken fall by the slope with every token.
        """
        c = len(scores)
        scores = (scores + (np.arange(c) - c + 1)[:, None] * slopes).T
        before = self.largest - c * slopes
        largest = np.maximum(np.maximum.accumulate(scores, axis=1), before[:, None])
        future = np.triu(np.ones((c, c), dtype=bool), 1)
        weights = np.exp(np.where(future, -np.inf, scores[:, None] - largest[..., None]))
        kept = np.exp(before[:, None] - largest)
        denominators = weights.sum(2) + kept * self.denominator[:, None]
        numerators = weights @ values.transpose(1, 0, 2) + kept[..., None] * self.numerator[:, None]
        self.largest, self.denominator, self.numerator = largest[:, -1], denominators[:, -1], numerators[:, -1]
        return (numerators / denominators[..., None]).sum(0)


def _is_ragged(X: Any) -> bool:
    if isinstance(X, np.ndarray | Tensor):
        return X.ndim == 3 and len(X) > 0
    if isinstance(X, Sequence) and not isinstance(X, str):
        if not len(X):
            raise InputError("X: is empty; must have one trace at least")
        return isinstance(X[0], np.ndarray | Tensor) and X[0].ndim == 2
    return False


def _checked_starts(start: Sequence[int] | None, traces: Sequence[Tensor]) -> NDArray[np.intp]:
    if start is None:
        return np.zeros(len(traces), np.intp)
    if len(start) != len(traces):
        raise InputError(f"start: has {len(start)} entries; must have one for each of {len(traces)} traces")
    for i, (first, trace) in enumerate(zip(start, traces, strict=True)):
        if not isinstance(first, Integral) or not 0 <= first < len(trace):
            raise InputError(
                f"start[{i}]={first!r}: must be from 0 to {len(trace) - 1}, as X[{i}] has {len(trace)} tokens"
            )
    return np.asarray(start, dtype=np.intp)


def _possible(options: Sequence[Sequence[Any]] | None, classes: NDArray[Any], n: int) -> NDArray[np.bool_] | None:
    """Which classes each trace has among its options."""
    if options is None:
        return None
    if len(options) != n:
        raise InputError(f"options: has {len(options)} entries; must have one for each of {n} traces")
    possible = np.stack([np.isin(classes, np.asarray(each)) for each in options])
    for i, row in enumerate(possible):
        if not row.any():
            raise InputError(f"options[{i}]={list(options[i])!r}: must have one of the classes at least")
    return possible


def _masked_softmax(logits: Floats, possible: NDArray[np.bool_] | None) -> Floats:
    return softmax(logits if possible is None else np.where(possible, logits, -np.inf), axis=-1)


def _rows(X: Any, chosen: NDArray[np.intp]) -> Any:
    return X[chosen] if isinstance(X, np.ndarray) else [X[i] for i in chosen]


def _standardisation(X: NDArray[Any]) -> tuple[Floats, Floats]:
    """Mean and inverse standard deviation of each feature; 0 for one that does not vary."""
    deviation = X.std(axis=0, dtype=np.float64)
    mean = X.mean(axis=0, dtype=np.float64)
    # Rounding gives a constant feature a deviation that is not quite 0.
    varies = deviation > 1e-7 * np.abs(mean)
    return mean, np.where(varies, 1 / (deviation + DEVIATION_FLOOR), 0.0)


def _standardisation_of(traces: Sequence[Tensor]) -> tuple[Floats, Floats]:
    """`_standardisation` of all tokens, a trace at a time."""
    n = sum(map(len, traces))
    mean = sum(trace.sum(0, dtype=torch.float64) for trace in traces) / n
    squares = sum(((trace.double() - mean) ** 2).sum(0) for trace in traces)
    deviation = np.sqrt(squares.numpy() / n)  # type: ignore[union-attr]
    centre: Floats = mean.numpy()  # type: ignore[union-attr]
    return centre, np.where(deviation > 1e-7 * np.abs(centre), 1 / (deviation + DEVIATION_FLOOR), 0.0)


def _two_or_more(classes: NDArray[Any]) -> NDArray[Any]:
    if len(classes) < 2:
        raise InputError(f"y: has {len(classes)} class ({', '.join(map(str, classes))}); must have 2 classes or more")
    return classes


def _check_whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise InputError(f"{name}={value!r}: must be a whole number, {least} or more")


def _check_number(name: str, value: Any, *, above: bool = False) -> None:
    if not isinstance(value, Real) or not np.isfinite(float(value)) or value < 0 or (above and value == 0):
        raise InputError(f"{name}={value!r}: must be a number {'above 0' if above else 'of 0 or more'}")


def _first_slopes(heads: int) -> Tensor:
    places = np.linspace(0, 1, heads) if heads > 1 else np.zeros(1)
    return torch.tensor(np.interp(places, np.linspace(0, 1, len(FIRST_SLOPES)), FIRST_SLOPES), dtype=torch.float32)


def _uniform(shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> Tensor:
    return (torch.rand(shape, generator=generator) * 2 - 1) / fan_in**0.5


def _generator(random_state: Any) -> torch.Generator:
    return torch.Generator().manual_seed(int(check_random_state(random_state).randint(2**31 - 1)))


@contextmanager
def _gradients() -> Iterator[None]:
    """Autograd on, also where the caller has switched it off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _probe_file(path: Path | str) -> Path:
    file = Path(path)
    return file if file.suffix else file.with_suffix(".safetensors")


def _require_model(file: Path, saved: str | None, model: Any) -> None:
    if saved is None:
        raise InputError(f"path={str(file)!r}: does not say which model it is for; load it without model")
    found = fingerprint_of(model)
    if found != saved:
        raise InputError(f"model: has fingerprint {found}; the probe in {file} was fitted on {saved}")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
