"""CORAL: a probe of what the model's own option probabilities miss, and its addition to them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.model_selection import GroupKFold, KFold, LeaveOneGroupOut
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from practicum.toolbox.calibration import TemperatureScaling
from practicum.toolbox.choices import ChoiceScores, Mode
from practicum.toolbox.errors import InputError
from practicum.toolbox.probes import WeightDecayMLP, load_probe, save_probe
from practicum.toolbox.taps import Taps, fingerprint

CoralProbe = WeightDecayMLP
"""The probe g, a regressor from activations to residual correctness: the toolbox's MLP under strong weight decay."""

FLOOR = 1e-4
DIRECTION_PENALTY = 1.0
ALPHAS = (0.0, 0.25, 0.5, 1.0)
# At p near 1/2 a logit has a slope of 1/4, so that 4 in logits moves a probability by what 1 does in probabilities.
BETAS = (0.0, 1.0, 2.0, 4.0, 8.0)
WEIGHT_DECAYS = (1.0, 3.0, 10.0, 30.0)
FOLDS = 5
# With more groups than this a fit for each of them is not worth its time.
MOST_LEFT_OUT_ONE_BY_ONE = 20

FORMAT = 1
DESCRIPTION = "coral.json"
FITTED = (
    "layer_",
    "weight_decay_",
    "alpha_",
    "temperature_",
    "nll_temperature_",
    "n_features_in_",
    "n_letters_",
    "fingerprint_",
)

Floats = NDArray[np.float64]


def steer(
    probabilities: ArrayLike,
    residual: ArrayLike,
    alpha: float = 1.0,
    space: Literal["prob", "logit"] = "prob",
) -> Floats:
    r"""Add a predicted residual to the option probabilities of one question.

    .. math:: u_i = p_i + \alpha g_i, \qquad p'_i = \frac{\max(u_i, \epsilon_i)}{\sum_j \max(u_j, \epsilon_j)}

    with :math:`\epsilon_i = \min(10^{-4}, p_i)`, or in logits :math:`p' = \mathrm{softmax}(\log p + \alpha g)`.

    The paper adds the probe's output to the probabilities and does not say, where we could read it, how what leaves
    [0, 1] is brought back; the floor and the sum are our choice. An option that the model itself gives less than
    :math:`10^{-4}` has that for a floor, so that ``alpha=0`` is the identity.

    Parameters
    ----------
    probabilities : array-like of shape (K,)
        p, which sums to 1.
    residual : array-like of shape (K,)
        g, the predicted y - p.
    alpha : float
        Strength; 0 leaves the probabilities as they are.
    space : {"prob", "logit"}
        Where the residual is added.

    Returns
    -------
    ndarray of shape (K,), float64
        p', which sums to 1.

    Raises
    ------
    InputError
        A ValueError, when the two differ in shape or ``space`` is neither.

    Examples
    --------
    >>> steer([0.7, 0.3], [-0.3, 0.3])
    array([0.4, 0.6])
    >>> steer([0.05, 0.95], [-0.2, 0.2]).round(6)
    array([8.70000e-05, 9.99913e-01])
    """
    p, g = np.asarray(probabilities, dtype=np.float64), np.asarray(residual, dtype=np.float64)
    if p.ndim != 1 or p.shape != g.shape:
        raise InputError(f"residual: has shape {g.shape}; must have one number for each of {p.shape} probabilities")
    _one_of("space", space, ("prob", "logit"))
    return _steer_flat(p, g, np.zeros(1, dtype=np.intp), alpha, space)


class Coral(BaseEstimator):
    r"""Correctness-optimised residual activation lens for multiple-choice answers.

    A language model's probabilities :math:`p = \mathrm{softmax}(s/T)` over the K options of a question are often wrong
    and too sure, although the residual stream :math:`h_i` at the end of option i knows more. CORAL fits one small
    regressor g on frozen activations to what the probabilities miss,

    .. math:: \min_g \frac{1}{NK} \sum_{n,i} \bigl( y_{n,i} - p_{n,i} - g(x_{n,i}) \bigr)^2,

    the Brier score of p + g, and adds its prediction at inference (`steer`). No weight of the model changes.
    Activations have many more dimensions than there are questions: what makes g transfer is a weight decay far above
    the usual.

    In ``continuation`` scores, :math:`x_i` is :math:`h_i` less its mean over the options of the question. In ``letter``
    scores all options share one h, and :math:`x_i` is h with the letter as a one-hot vector; the options of the
    training questions must then have been permuted (`CoralForMultipleChoice` does), lest the letter alone be learned.

    The paper gives the Brier loss, mid-layer activations, frozen, and strong weight decay. Width, depth, optimiser and
    the values below are ours. Two defaults depart from its plain form, after measurements on a small model:
    ``temperature="fit"`` (the paper adds to the model's own p, ``"none"``), and ``weight_decay=10`` for some thousand
    option rows; with many more, 3 does, and ``tune="cv"`` finds out.

    Parameters
    ----------
    mode : {"continuation", "letter"}, default="continuation"
        What the scores are, as `practicum.toolbox.choices.ChoiceScorer` was told.
    layer : "auto", int or sequence of int, default="auto"
        Layer of the activations, 0 (embeddings) to the number of blocks; of several the activations are concatenated.
        ``"auto"`` takes, of the layers that the scores have, the one of the lowest Brier score in cross-validation.
    hidden : int, default=128
        Width of the probe's hidden layer. 0 removes it: g is then linear, fitted by ridge regression in closed form
        with ``weight_decay`` as its penalty.
    weight_decay : float, default=10.0
        Decoupled (AdamW), on biases too.
    alpha : float, default=1.0
        Strength of the steering, in logits where ``space="logit"``.
    center : {"question", None}, default="question"
        Whether the mean over a question's options is taken off. Ignored for letter scores.
    target : {"residual", "correctness"}, default="residual"
        What the probe learns: y - p, or y itself. The latter is there to compare with; its residual is what it
        predicts less p.
    temperature : {"fit", "none"}, default="fit"
        Whether p is tempered by the T of the highest likelihood on the training questions, or T is 1.
    space : {"prob", "logit"}, default="prob"
        Where the residual is added. In probabilities, options pushed to the floor cost likelihood when they turn out
        right; the logit form has no such floor.
    tune : {None, "cv"}, default=None
        ``"cv"`` chooses ``weight_decay`` of 1, 3, 10, 30 and ``alpha`` of 0, 0.25, 0.5, 1 (in logits 0, 1, 2, 4, 8) by
        the Brier score when each group is left out, in place of those given. Ties go to the larger decay and the
        smaller strength. With 0 among them, a probe that does not transfer leaves the tempered model as it is.
    epochs : int, default=60
    lr : float, default=2e-3
    random_state : int, RandomState or None, default=None

    Attributes
    ----------
    layer_ : int or tuple of int
    weight_decay_, alpha_, temperature_ : float
        As used.
    nll_temperature_ : float
        The temperature of highest likelihood on the training questions, used or not.
    probe_ : CoralProbe
        g, on n_features_in_ features.
    n_features_in_ : int
    n_letters_ : int
        Largest K seen in letter scores, else 0.
    cv_brier_ : dict
        Brier score of what cross-validation compared: layers, and (weight decay, strength). Empty without it.
    fingerprint_ : str or None
        Of the model whose scores it was fitted on, where `CoralForMultipleChoice` fitted it.

    See Also
    --------
    CoralForMultipleChoice : From questions to steered answers, with the model.
    practicum.language.coral.lm_eval_model.CoralLM : The steered model for the evaluation harness ``lm-eval``.

    References
    ----------
    M. M. Miao, Y.-M. Cho, L. Ungar, "Correctness-Optimized Residual Activation Lens (CORAL): Transferrable and
    Calibration-Aware Inference-Time Steering", ICML 2026, arXiv:2602.06022.

    Examples
    --------
    Activations that know the answer, beside scores that do not:

    >>> from practicum.toolbox.choices import ChoiceScores, Mode
    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(3, size=300)
    >>> logits = [rng.normal(size=3) for _ in y]
    >>> hidden = [np.eye(3)[i][:, None] * np.ones(8) + rng.normal(size=(3, 8)) for i in y]
    >>> scores = ChoiceScores(logits, {5: [h.astype(np.float16) for h in hidden]})
    >>> coral = Coral(epochs=10, random_state=0).fit(scores.take(range(200)), y[:200])
    >>> before = np.mean([s.argmax() == i for s, i in zip(logits[200:], y[200:])])
    >>> after = np.mean(coral.predict(scores.take(range(200, 300))) == y[200:])
    >>> bool(before < 0.45), bool(after > 0.85)
    (True, True)
    """

    def __init__(
        self,
        *,
        mode: Mode = "continuation",
        layer: Literal["auto"] | int | Sequence[int] = "auto",
        hidden: int = 128,
        weight_decay: float = 10.0,
        alpha: float = 1.0,
        center: Literal["question"] | None = "question",
        target: Literal["residual", "correctness"] = "residual",
        temperature: Literal["fit", "none"] = "fit",
        space: Literal["prob", "logit"] = "prob",
        tune: Literal["cv"] | None = None,
        epochs: int = 60,
        lr: float = 2e-3,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.mode = mode
        self.layer = layer
        self.hidden = hidden
        self.weight_decay = weight_decay
        self.alpha = alpha
        self.center = center
        self.target = target
        self.temperature = temperature
        self.space = space
        self.tune = tune
        self.epochs = epochs
        self.lr = lr
        self.random_state = random_state

    def fit(self, scores: ChoiceScores, y: ArrayLike, groups: ArrayLike | None = None) -> Self:
        """Fit temperature and probe, and choose what is to be chosen, on these questions alone.

        Parameters
        ----------
        scores : ChoiceScores
            Option scores and activations of N questions; K may differ between questions.
        y : array-like of shape (N,)
            Index of the right option.
        groups : array-like of shape (N,), optional
            Topic or data set of each question. With 3 to 20 of them, each is left out in turn wherever
            cross-validation is asked for; with more, folds keep groups together; with fewer, there are 5 folds of
            questions.

        Returns
        -------
        Coral
            Itself.

        Raises
        ------
        InputError
            A ValueError that names the argument: a parameter out of range, ``y`` that is not an option's index, a
            layer that the scores do not have, activations that are not finite.
        """
        self._validate()
        options = _Options.of(scores)
        gold = _gold(options, y)
        ids = _group_ids(groups, len(gold))
        layers = self._layers(scores)
        self.n_letters_ = int(options.sizes.max()) if self.mode == "letter" else 0
        self.fingerprint_: str | None = None
        self.cv_brier_: dict[Any, float] = {}
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        work = _Work(options, gold, ids, seed)
        self.layer_ = layers[0] if len(layers) == 1 else self._best_layer(scores, layers, work)
        X = self._features(scores, options)
        self.weight_decay_, self.alpha_ = float(self.weight_decay), float(self.alpha)
        if self.tune == "cv":
            self.weight_decay_, self.alpha_ = self._best_strength(X, work)
        everything = np.arange(len(gold))
        self.nll_temperature_ = _fitted_temperature(options, gold, everything)
        self.temperature_ = self.nll_temperature_ if self.temperature == "fit" else 1.0
        self.probe_ = self._fit_probe(X, work, everything, self.temperature_, self.weight_decay_)
        self.n_features_in_ = X.shape[1]
        return self

    def predict_proba(self, scores: ChoiceScores) -> list[Floats]:
        """Return the steered probabilities.

        Parameters
        ----------
        scores : ChoiceScores
            Of N questions, scored as those of `fit` were.

        Returns
        -------
        list of ndarray of shape (K,), float64
            Each sums to 1.

        Raises
        ------
        InputError
            A ValueError, when layer, width or mode of the scores is not that of `fit`.
        """
        options, p, g = self._parts(scores)
        return options.split(_steer_flat(p, g, options.starts, self.alpha_, self.space))

    def predict(self, scores: ChoiceScores) -> NDArray[np.int64]:
        """Return the index of the option with the highest steered probability.

        Parameters
        ----------
        scores : ChoiceScores
            Of N questions.

        Returns
        -------
        ndarray of shape (N,), int64
        """
        return np.array([int(row.argmax()) for row in self.predict_proba(scores)], dtype=np.int64)

    def residual(self, scores: ChoiceScores) -> list[Floats]:
        """Return the predicted residuals g(x_i) that are added to the probabilities.

        Parameters
        ----------
        scores : ChoiceScores
            Of N questions.

        Returns
        -------
        list of ndarray of shape (K,), float64
        """
        options, _, g = self._parts(scores)
        return options.split(g)

    def direction(self, scores: ChoiceScores) -> Floats:
        """Return the direction in which predicted correctness rises: the straight line nearest to the probe.

        Parameters
        ----------
        scores : ChoiceScores
            Of the N questions on which it is to be near.

        Returns
        -------
        ndarray of shape (d,), float64
            Coefficients of the ridge regression of g on the features.
        """
        options, _, g = self._parts(scores)
        line = CoralProbe(hidden=0, weight_decay=DIRECTION_PENALTY).fit(self._features(scores, options), g)
        return line.coefs_[0][:, 0] * line.scale_

    def base_proba(self, scores: ChoiceScores, *, temperature: float | None = None) -> list[Floats]:
        """Return the probabilities p that are steered.

        Parameters
        ----------
        scores : ChoiceScores
            Of N questions.
        temperature : float, optional
            By default the one used; 1 gives the model's own probabilities.

        Returns
        -------
        list of ndarray of shape (K,), float64
        """
        check_is_fitted(self)
        options = _Options.of(scores)
        return options.split(options.softmax(self.temperature_ if temperature is None else temperature))

    @contextmanager
    def attach(self, model: Any) -> Iterator[Self]:
        """Watch the residual stream of a model, for `CoralLogitsProcessor` to steer the answer that it generates.

        One forward hook a layer keeps the last position's activation. Nothing that the model computes changes, and the
        hooks are gone when the block ends, however it ends.

        Parameters
        ----------
        model : transformers.PreTrainedModel
            The model that the letter scores of `fit` came from.

        Yields
        ------
        Coral
            Itself.

        Raises
        ------
        InputError
            A ValueError, when it was fitted on continuation scores or on another model.

        Examples
        --------
        ``with coral.attach(model): model.generate(**inputs, logits_processor=[CoralLogitsProcessor(coral, ids)])``
        """
        check_is_fitted(self)
        if self.mode != "letter":
            raise InputError("mode='continuation': must be 'letter' for an answer that is generated to be steered")
        self.require_model(model)
        before, watch = self.watch, Watch()
        try:
            with Taps(model, list(_as_tuple(self.layer_)), on_forward=watch):
                self.watch = watch
                yield self
        finally:
            self.watch = before

    # What the hooks of `attach` see; None outside of it.
    watch: Watch | None = None

    def require_model(self, model: Any) -> None:
        """Raise for a model that is known not to be the one that the probe was fitted on.

        Parameters
        ----------
        model : transformers.PreTrainedModel

        Raises
        ------
        InputError
            A ValueError.
        """
        check_is_fitted(self)
        if self.fingerprint_ is not None and fingerprint(model) != self.fingerprint_:
            raise InputError("model: is not the one that the probe was fitted on")

    def save(self, path: Path | str) -> None:
        """Write it into a folder: ``coral.json`` and the probe's weights as safetensors.

        Parameters
        ----------
        path : pathlib.Path or str
            The folder, made if need be.
        """
        check_is_fitted(self)
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        save_probe(self.probe_, folder / "probe", fingerprint=self.fingerprint_)
        seed = self.random_state if isinstance(self.random_state, (int, np.integer)) else None
        content = {
            "format": FORMAT,
            "parameters": {**self.get_params(), "random_state": seed},
            "fitted": {name: getattr(self, name) for name in FITTED},
        }
        (folder / DESCRIPTION).write_text(json.dumps(content, indent=1, default=_plain) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str, model: Any = None) -> Self:
        """Read what `save` wrote; nothing is unpickled.

        Parameters
        ----------
        path : pathlib.Path or str
            The folder.
        model : transformers.PreTrainedModel, optional
            The model it is to be used with; another than that of `fit` is refused.

        Returns
        -------
        Coral
            Fitted.

        Raises
        ------
        InputError
            A ValueError, when the folder does not hold what `save` writes, or for another model.
        """
        folder = Path(path)
        try:
            content = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise InputError(f"path={str(path)!r}: has format {content['format']}; this version reads {FORMAT}")
            coral = cls(**{name: _unlisted(value) for name, value in content["parameters"].items()})
            for name in FITTED:
                setattr(coral, name, _unlisted(content["fitted"][name]))
            coral.cv_brier_ = {}
            coral.probe_ = load_probe(folder / "probe")
        except OSError as error:
            raise InputError(f"path={str(path)!r}: cannot be read: {error.strerror or error}") from error
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise InputError(f"path={str(path)!r}: is not what Coral.save writes: {error}") from error
        if model is not None:
            coral.require_model(model)
        return coral

    # Parameters and features --------------------------------------------------------------------------------------

    def _validate(self) -> None:
        _one_of("mode", self.mode, ("continuation", "letter"))
        _one_of("center", self.center, ("question", None))
        _one_of("target", self.target, ("residual", "correctness"))
        _one_of("temperature", self.temperature, ("fit", "none"))
        _one_of("space", self.space, ("prob", "logit"))
        _one_of("tune", self.tune, (None, "cv"))
        for name in ("weight_decay", "alpha"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not np.isfinite(float(value)) or value < 0:
                raise InputError(f"{name}={value!r}: must be a number, 0 or more")
        if not isinstance(self.hidden, (int, np.integer)) or self.hidden < 0:
            raise InputError(f"hidden={self.hidden!r}: must be a whole number, 0 (a linear probe) or more")
        if not isinstance(self.epochs, (int, np.integer)) or self.epochs < 1:
            raise InputError(f"epochs={self.epochs!r}: must be a whole number, 1 or more")
        if not isinstance(self.lr, Real) or not self.lr > 0:
            raise InputError(f"lr={self.lr!r}: must be a number above 0")

    def _layers(self, scores: ChoiceScores) -> list[int | tuple[int, ...]]:
        """The layers to choose from, as they are in the scores."""
        there = sorted(scores.hidden)
        if not there:
            raise InputError("scores: have no activations; score with layers=")
        if isinstance(self.layer, str):
            _one_of("layer", self.layer, ("auto",))
            return list(there)
        wanted = _as_tuple(self.layer)
        for layer in wanted:
            if layer not in scores.hidden:
                raise InputError(f"layer={self.layer!r}: the scores have the layers {', '.join(map(str, there))}")
        if not wanted:
            raise InputError("layer=(): must have one layer at least")
        return [int(wanted[0]) if len(wanted) == 1 else tuple(int(layer) for layer in wanted)]

    def _features(self, scores: ChoiceScores, options: _Options, layer: Any = None) -> NDArray[np.float32]:
        """Features x of every option, of shape (sum of K, d)."""
        parts = []
        for each in _as_tuple(self.layer_ if layer is None else layer):
            if each not in scores.hidden:
                there = ", ".join(map(str, sorted(scores.hidden)))
                raise InputError(f"scores: lack layer {each}; they have {there or 'none'}")
            h = options.rows_of(scores.hidden[each], each)
            if self.mode == "continuation" and self.center == "question":
                h -= np.repeat(options.sums(h) / options.sizes[:, None], options.sizes, axis=0)
            if self.mode == "continuation" and not _any_apart(h, options):
                raise InputError(
                    f"mode='continuation': the options of each question share one activation at layer {each}; "
                    "must be 'letter' for letter scores"
                )
            parts.append(h)
        if self.mode == "letter":
            if options.sizes.max() > self.n_letters_:
                raise InputError(
                    f"scores: a question has {options.sizes.max()} options; fitted on {self.n_letters_} at most"
                )
            parts.append(np.eye(self.n_letters_, dtype=np.float32)[options.places])
        return np.concatenate(parts, axis=1)

    def _parts(self, scores: ChoiceScores) -> tuple[_Options, Floats, Floats]:
        check_is_fitted(self)
        options = _Options.of(scores)
        X = self._features(scores, options)
        if X.shape[1] != self.n_features_in_:
            raise InputError(f"scores: have {X.shape[1]} features; fitted on {self.n_features_in_}")
        p = options.softmax(self.temperature_)
        g = np.asarray(self.probe_.predict(X), dtype=np.float64)
        return options, p, g - p if self.target == "correctness" else g

    # Fitting and choosing -----------------------------------------------------------------------------------------

    def _fit_probe(self, X: NDArray[np.float32], work: _Work, chosen: NDArray, temperature: float, decay: float) -> Any:
        rows = work.options.rows(chosen)
        target = work.y[rows]
        if self.target == "residual":
            target = target - work.options.softmax(temperature)[rows]
        # Beyond 1/lr a step would turn the weights round instead of taking them to nothing.
        most = 1 / self.lr if self.hidden else np.inf
        probe = CoralProbe(
            hidden=self.hidden, weight_decay=min(decay, most), lr=self.lr, epochs=self.epochs, random_state=work.seed
        )
        return probe.fit(X[rows], target)

    def _best_layer(self, scores: ChoiceScores, layers: Sequence[Any], work: _Work) -> Any:
        folds = _folds(work, one_by_one=False)
        for layer in layers:
            X = self._features(scores, work.options, layer)
            briers = self._held_out_brier(X, work, folds, float(self.weight_decay), [float(self.alpha)])
            self.cv_brier_[layer] = briers[float(self.alpha)]
        return min(layers, key=lambda layer: self.cv_brier_[layer])

    def _best_strength(self, X: NDArray[np.float32], work: _Work) -> tuple[float, float]:
        folds = _folds(work, one_by_one=True)
        strengths = ALPHAS if self.space == "prob" else BETAS
        for decay in WEIGHT_DECAYS:
            for strength, score in self._held_out_brier(X, work, folds, decay, strengths).items():
                self.cv_brier_[decay, strength] = score
        # Ties to the larger decay and the smaller strength.
        pairs = [(decay, strength) for strength in strengths for decay in reversed(WEIGHT_DECAYS)]
        return min(pairs, key=lambda pair: self.cv_brier_[pair])

    def _held_out_brier(
        self, X: NDArray[np.float32], work: _Work, folds: Sequence[Any], decay: float, strengths: Sequence[float]
    ) -> dict[float, float]:
        """Brier score over all questions, each with temperature and probe of the folds that it is not in."""
        options = work.options
        p, g = np.zeros(len(X)), np.zeros(len(X))
        for inside, outside in folds:
            fitted = _fitted_temperature(options, work.gold, inside) if self.temperature == "fit" else 1.0
            probe = self._fit_probe(X, work, inside, fitted, decay)
            rows = options.rows(outside)
            p[rows] = options.softmax(fitted)[rows]
            g[rows] = probe.predict(X[rows])
        if self.target == "correctness":
            g -= p
        n = len(options.starts)
        return {
            strength: float(((_steer_flat(p, g, options.starts, strength, self.space) - work.y) ** 2).sum() / n)
            for strength in strengths
        }


class Watch:
    """Keeps what the hooks of `Coral.attach` saw last, of shape (batch, d) a layer, and how many tokens went in."""

    def __init__(self) -> None:
        self.last: dict[int, Any] = {}
        self.n_tokens = 0

    def __call__(self, activations: dict[int, Any]) -> None:
        """Called after every forward pass with activations of shape (batch, tokens, d)."""
        self.n_tokens = next(iter(activations.values())).shape[1]
        # The prompt is padded on the left, as generation asks for: its last token is the last position.
        self.last = {layer: h[:, -1].detach() for layer, h in activations.items()}


@dataclass(frozen=True)
class _Options:
    """Options of all questions one after the other: M in all, of N questions."""

    logits: Floats
    starts: NDArray[np.intp]
    sizes: NDArray[np.intp]

    @classmethod
    def of(cls, scores: ChoiceScores) -> _Options:
        rows = [np.asarray(row, dtype=np.float64) for row in scores.logits]
        if not rows:
            raise InputError("scores: are empty; must have one question at least")
        for i, row in enumerate(rows):
            if row.ndim != 1 or len(row) < 2:
                raise InputError(
                    f"scores.logits[{i}]: has shape {row.shape}; must have a score for each of 2 options or more"
                )
            if not np.isfinite(row).all():
                raise InputError(f"scores.logits[{i}]: has {row[~np.isfinite(row)][0]}; must be finite")
        sizes = np.array([len(row) for row in rows])
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        return cls(np.concatenate(rows), starts, sizes)

    @property
    def places(self) -> NDArray[np.intp]:
        """Place of each option in its question, from 0."""
        return np.arange(len(self.logits)) - np.repeat(self.starts, self.sizes)

    def sums(self, values: NDArray) -> NDArray:
        """Sum over the options of each question."""
        return np.add.reduceat(values, self.starts, axis=0)

    def softmax(self, temperature: float) -> Floats:
        z = self.logits / temperature
        z = np.exp(z - np.repeat(np.maximum.reduceat(z, self.starts), self.sizes))
        return z / np.repeat(self.sums(z), self.sizes)

    def split(self, values: Floats) -> list[Floats]:
        return np.split(values, self.starts[1:])

    def rows(self, questions: NDArray) -> NDArray[np.intp]:
        """Rows of the options of these questions."""
        chosen = np.zeros(len(self.starts), dtype=bool)
        chosen[questions] = True
        return np.flatnonzero(np.repeat(chosen, self.sizes))

    def rows_of(self, hidden: Sequence[ArrayLike], layer: int) -> NDArray[np.float32]:
        """Activations of all options, of shape (M, d)."""
        if len(hidden) != len(self.starts):
            raise InputError(f"scores.hidden[{layer}]: has {len(hidden)} questions; must have {len(self.starts)}")
        parts = [np.asarray(h, dtype=np.float32) for h in hidden]
        for i, (part, size) in enumerate(zip(parts, self.sizes, strict=True)):
            if part.ndim != 2 or len(part) != size:
                raise InputError(f"scores.hidden[{layer}][{i}]: has shape {part.shape}; must be ({size}, d)")
        h = np.concatenate(parts)
        if not np.isfinite(h).all():
            raise InputError(
                f"scores.hidden[{layer}]: activations of layer {layer} are not finite (they overflow float16); "
                "choose another layer"
            )
        return h


@dataclass(frozen=True)
class _Work:
    """What every fit looks at: options, gold index and group of each question, and the seed of the probe."""

    options: _Options
    gold: NDArray[np.int64]
    groups: NDArray[np.int64] | None
    seed: int

    @property
    def y(self) -> Floats:
        """1 for the right option of each question, else 0; of shape (M,)."""
        hits = np.zeros(len(self.options.logits))
        hits[self.options.starts + self.gold] = 1.0
        return hits


def _steer_flat(p: Floats, g: Floats, starts: NDArray, alpha: float, space: str) -> Floats:
    if alpha == 0:
        return p
    sizes = np.diff(np.append(starts, len(p)))
    if space == "prob":
        steered = np.maximum(p + alpha * g, np.minimum(FLOOR, p))
    else:
        with np.errstate(divide="ignore"):
            z = np.log(p) + alpha * g
        steered = np.exp(z - np.repeat(np.maximum.reduceat(z, starts), sizes))
    return steered / np.repeat(np.add.reduceat(steered, starts), sizes)


def _any_apart(centred: NDArray[np.float32], options: _Options) -> bool:
    """Whether any two options of a question differ in their activations."""
    firsts = np.repeat(centred[options.starts], options.sizes, axis=0)
    return bool((centred != firsts).any())


def _fitted_temperature(options: _Options, gold: NDArray[np.int64], chosen: NDArray) -> float:
    rows = options.split(options.logits)
    return TemperatureScaling().fit([rows[i] for i in chosen], gold[chosen]).temperature_


def _folds(work: _Work, *, one_by_one: bool) -> list[tuple[NDArray, NDArray]]:
    """Pairs of questions to fit on and questions left out."""
    n = len(work.gold)
    questions = np.arange(n)
    n_groups = 0 if work.groups is None else len(np.unique(work.groups))
    if n_groups >= 3:
        alone = one_by_one and n_groups <= MOST_LEFT_OUT_ONE_BY_ONE
        splitter = LeaveOneGroupOut() if alone else GroupKFold(min(FOLDS, n_groups))
        return list(splitter.split(questions, groups=work.groups))
    if n < FOLDS:
        raise InputError(f"scores: have {n} questions; cross-validation needs {FOLDS} at least")
    return list(KFold(FOLDS, shuffle=True, random_state=work.seed).split(questions))


def _gold(options: _Options, y: ArrayLike) -> NDArray[np.int64]:
    values = list(np.asarray(y, dtype=object).ravel())
    if len(values) != len(options.sizes):
        raise InputError(f"y: has {len(values)} answers; must have one for each of {len(options.sizes)} questions")
    for i, (value, size) in enumerate(zip(values, options.sizes, strict=True)):
        if value is None:
            raise InputError(f"y[{i}]=None: every question must have its answer when fitting")
        if isinstance(value, bool) or value != value or int(value) != value or not 0 <= value < size:
            raise InputError(f"y[{i}]={value!r}: must be the index of an option, 0 to {size - 1}")
    return np.array(values, dtype=np.int64)


def _group_ids(groups: ArrayLike | None, n: int) -> NDArray[np.int64] | None:
    if groups is None:
        return None
    names = [str(group) for group in np.asarray(groups, dtype=object).ravel()]
    if len(names) != n:
        raise InputError(f"groups: has {len(names)} values; must have one for each of {n} questions")
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def _one_of(name: str, value: Any, known: Sequence[Any]) -> None:
    if not any(value is each or value == each for each in known):
        raise InputError(f"{name}={value!r}: must be {' or '.join(repr(each) for each in known)}")


def _plain(value: Any) -> Any:
    """A NumPy number as JSON has it."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} cannot be saved")


def _unlisted(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_tuple(layer: Any) -> tuple[int, ...]:
    return tuple(layer) if isinstance(layer, (tuple, list, range, np.ndarray)) else (layer,)
