"""The learned map: queries and documents to one vector each, whose inner product estimates MaxSim."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import nn

from practicum.retrieval.lemur.maxsim import blocks_of_maxima, sum_by_set
from practicum.retrieval.lemur.multivectors import MultiVectors, as_multivectors

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "identity": nn.Identity,
}
HIGHEST_RIDGE = 1e-2
VALIDATION_TOKENS = 32_000
TOKENS_AT_A_TIME = 4096
FORMAT = 1


class LemurEncoder(BaseEstimator):
    r"""Turn late-interaction queries and documents into single vectors, for one corpus.

    Late interaction scores a document by MaxSim, the sum over query tokens x of ``g_j(x)``, the highest inner product
    of x with a token of document j. That sum over tokens is linear in anything ``g_j`` is linear in. LEMUR therefore
    learns features psi of a *token* in which all ``g_j`` are nearly linear, ``g_j(x) ~ <w_j, psi(x)>``; then

    .. math::
        \mathrm{MaxSim}(X, C_j) \approx \langle w_j, \Psi(X) \rangle, \quad \Psi(X) = \sum_{x \in X} \psi(x)

    and searching is maximum inner product search over the vectors :math:`w_j`, one a document. psi is a linear map, a
    LayerNorm and an activation, trained together with the w of a sample of documents to predict standardised ``g_j``
    of a sample of tokens; that w is then thrown away, and every document of the corpus, and every later one, gets its
    own by least squares. With ``epochs=0`` nothing is trained: psi is then a random map, an activation and a LayerNorm.

    Parameters
    ----------
    n_features : int
        Length d' of the vectors; 2048 in the paper.
    hidden_layers : int
        Layers of psi.
    hidden_dim : int, optional
        Width of all but the last layer; ``n_features`` by default.
    activation : {"gelu", "relu", "silu", "mish", "identity"}
    epochs : int
        Passes over the training tokens. 0 for random features, which need 2 to 4 times the candidates for the
        same recall according to the authors.
    learning_rate, batch_size, grad_clip
        Of Adam; the norm of the gradient is clipped. ``grad_clip=None`` does not clip.
    n_train_docs, n_train_tokens : int
        Documents and tokens of the training sample; all of them where there are fewer. Their targets take
        ``4 * n_train_docs * n_train_tokens`` bytes while training.
    n_solve_tokens : int
        Tokens of the least squares.
    ridge : float
        Added to the diagonal of the least squares, as a part of its mean. It is doubled up to 0.01 while the
        factorisation fails; then the pseudo-inverse by singular values is taken.
    random_state : int, RandomState or None
    device : str or torch.device, optional
        Where to compute; the CPU by default.

    Attributes
    ----------
    n_features_in_ : int
        Length d of a token vector.
    features_ : torch.nn.Module
        psi, from (n, d) to (n, d').
    mean_, scale_ : float
        Mean and standard deviation of ``g_j(x)`` over the training sample.
    loss_curve_ : list of float
        Of each epoch: the mean squared error on the validation queries, or on the training tokens without those. The
        weights of the best epoch are kept.
    solver_ : str
        How the least squares was solved.
    solve_tokens_ : tensor of shape (n_s, d)
        Its sample of tokens.

    References
    ----------
    Jääsaari, Hyvönen and Roos, "LEMUR: Learned Multi-Vector Retrieval", ICML 2026, arXiv:2601.21853.

    Examples
    --------
    >>> from practicum.datasets import synthetic_multivectors
    >>> from practicum.retrieval.lemur import maxsim
    >>> pairs = synthetic_multivectors(200, 5, 16, random_state=0)
    >>> documents = MultiVectors(pairs.documents.vectors, pairs.documents.lengths)
    >>> queries = MultiVectors(pairs.queries.vectors, pairs.queries.lengths)
    >>> encoder = LemurEncoder(n_features=64, epochs=3, random_state=0).fit(documents)
    >>> encoder.encode_query(queries).shape, encoder.encode_document(documents).shape
    (torch.Size([5, 64]), torch.Size([200, 64]))
    >>> estimated, exact = encoder.estimate(queries, documents), maxsim(queries, documents)
    >>> bool(np.corrcoef(estimated.ravel(), exact.ravel())[0, 1] > 0.9)
    True
    """

    def __init__(
        self,
        n_features: int = 2048,
        *,
        hidden_layers: int = 1,
        hidden_dim: int | None = None,
        activation: str = "gelu",
        epochs: int = 10,
        learning_rate: float = 3e-3,
        batch_size: int = 512,
        grad_clip: float | None = 0.5,
        n_train_docs: int = 8192,
        n_train_tokens: int = 100_000,
        n_solve_tokens: int = 16_384,
        ridge: float = 1e-6,
        random_state: Any = None,
        device: Any = None,
    ) -> None:
        self.n_features = n_features
        self.hidden_layers = hidden_layers
        self.hidden_dim = hidden_dim
        self.activation = activation
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.grad_clip = grad_clip
        self.n_train_docs = n_train_docs
        self.n_train_tokens = n_train_tokens
        self.n_solve_tokens = n_solve_tokens
        self.ridge = ridge
        self.random_state = random_state
        self.device = device

    def fit(self, documents: Any, queries: Any = None, *, validation_queries: Any = None) -> LemurEncoder:
        """Learn the features, and the least squares that gives documents their vectors.

        Parameters
        ----------
        documents : MultiVectors, list of (n_i, d) arrays or tensors, or (N, L, d) block
            The corpus.
        queries : the same forms, optional
            A sample of queries, whose tokens are learned from; by default those of the documents are.
        validation_queries : the same forms, optional
            Queries by whose loss the best epoch is chosen.

        Returns
        -------
        LemurEncoder
            Itself.

        Raises
        ------
        ValueError
            When a parameter is out of range, the data are malformed, dimensions differ, or all targets are equal.
        """
        self._validate_parameters()
        documents = as_multivectors(documents, "documents")
        d = documents.dimension
        learn = documents
        if queries is not None:
            learn = as_multivectors(queries, "queries", dimension=d, expected="documents")
        if validation_queries is not None:
            validation_queries = as_multivectors(
                validation_queries, "validation_queries", dimension=d, expected="documents"
            )
        device = torch.device(self.device or "cpu")
        generator = torch.Generator().manual_seed(int(check_random_state(self.random_state).randint(2**31)))

        chosen = torch.randperm(len(documents), generator=generator)[: self.n_train_docs]
        sample = documents[chosen].to(device)
        tokens = _sample_tokens(learn, self.n_train_tokens, generator).to(device)
        targets = _targets(tokens, sample)
        self.mean_, self.scale_ = _mean_and_deviation(targets)
        if not self.scale_ > 1e-6 * max(1.0, abs(self.mean_)):
            raise ValueError(
                "targets have no variance: every document has the same highest inner product with every token"
            )

        self.n_features_in_ = d
        self.loss_curve_: list[float] = []
        if self.epochs == 0:
            self.features_ = self._random_features(d, generator).to(device)
        else:
            held_out = None
            if validation_queries is not None:
                unseen = _sample_tokens(validation_queries, VALIDATION_TOKENS, generator).to(device)
                held_out = (unseen, _targets(unseen, sample).sub_(self.mean_).div_(self.scale_))
            self.features_ = self._layers(d, generator).to(device)
            self._train(tokens, targets.sub_(self.mean_).div_(self.scale_), held_out, generator)
        del targets

        self.solve_tokens_ = _sample_tokens(learn, self.n_solve_tokens, generator).to(device)
        self._prepare_solver()
        return self

    def encode_query(self, queries: Any) -> torch.Tensor:
        """Return Psi of each query, the sum of its tokens' features.

        Parameters
        ----------
        queries : MultiVectors, list of (n_i, d) arrays or tensors, (N, L, d) block, or one query (n, d)

        Returns
        -------
        tensor of shape (Q, n_features), float32

        Raises
        ------
        ValueError
            When d is not that of the corpus, or the queries are malformed.
        """
        check_is_fitted(self)
        queries = as_multivectors(queries, "queries", dimension=self.n_features_in_, expected="the encoder")
        out = torch.empty(len(queries), self.n_features, device=self._device)
        for part in _runs_of_tokens(queries.lengths, TOKENS_AT_A_TIME):
            tokens = queries.vectors[int(queries.offsets[part.start]) : int(queries.offsets[part.stop])]
            out[part] = sum_by_set(self._psi(tokens), queries.lengths[part])
        return out

    def encode_document(self, documents: Any) -> torch.Tensor:
        """Return the vector w_j of each document, by least squares on the documents' tokens alone.

        Documents that were not there when the encoder was fitted need no retraining.

        Parameters
        ----------
        documents : MultiVectors, list of (n_i, d) arrays or tensors, (N, L, d) block, or one document (n, d)

        Returns
        -------
        tensor of shape (N, n_features), float32

        Raises
        ------
        ValueError
            When d is not that of the corpus, or the documents are malformed.
        """
        check_is_fitted(self)
        documents = as_multivectors(documents, "documents", dimension=self.n_features_in_, expected="the encoder")
        if not hasattr(self, "_pseudo_inverse"):
            self._prepare_solver()
        weights = torch.empty(len(documents), self.n_features, device=self._device)
        for chosen, maxima in blocks_of_maxima(self.solve_tokens_, documents.to(self._device)):
            standardised = maxima.sub_(self.mean_).div_(self.scale_)
            weights[chosen.to(self._device)] = standardised @ self._pseudo_inverse
        return weights

    def estimate(self, queries: Any, documents_or_W: Any) -> torch.Tensor:
        """Estimate MaxSim of every query with every document, in the units of MaxSim.

        Parameters
        ----------
        queries : MultiVectors, list of (n_i, d) arrays or tensors, (N, L, d) block, or one query (n, d)
        documents_or_W : the same forms, or tensor of shape (N, n_features)
            Documents, or what `encode_document` returned for them: a float32 tensor with ``n_features`` columns is
            taken for the latter unless the token vectors have that length too.

        Returns
        -------
        tensor of shape (Q, N), float32
        """
        check_is_fitted(self)
        queries = as_multivectors(queries, "queries", dimension=self.n_features_in_, expected="the encoder")
        given = documents_or_W
        if (
            isinstance(given, torch.Tensor)
            and given.ndim == 2
            and given.shape[1] == self.n_features
            and self.n_features != self.n_features_in_
        ):
            weights = given.to(self._device)
        else:
            weights = self.encode_document(given)
        inner = self.encode_query(queries) @ weights.T
        return inner * self.scale_ + queries.lengths[:, None].to(inner) * self.mean_

    def fingerprint(self) -> str:
        """Name what makes up the fitted map, so that vectors of one encoder are never searched with another.

        Returns
        -------
        str
            A hash of the dimensions, the activation, the scale of the targets and all weights.
        """
        check_is_fitted(self)
        shape = [self.n_features_in_, self.n_features, self.activation, self.mean_, self.scale_]
        digest = hashlib.sha256(json.dumps(shape).encode())
        for name, tensor in sorted(self._state().items()):
            digest.update(name.encode())
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted encoder to a folder, as ``encoder.safetensors`` and ``encoder.json``; nothing is pickled.

        Parameters
        ----------
        path : path
            The folder; it is made if need be.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        parameters = self.get_params(deep=False)
        parameters["device"] = None if self.device is None else str(self.device)
        if not isinstance(self.random_state, (int, np.integer, type(None))):
            parameters["random_state"] = None
        described = {
            "format": FORMAT,
            "fingerprint": self.fingerprint(),
            "parameters": {k: v.item() if isinstance(v, np.generic) else v for k, v in parameters.items()},
            "n_features_in": self.n_features_in_,
            "mean": self.mean_,
            "scale": self.scale_,
            "loss_curve": self.loss_curve_,
            "solver": self.solver_,
        }
        write_whole(folder / "encoder.safetensors", safetensors.torch.save(self._state()))
        write_whole(folder / "encoder.json", json.dumps(described, indent=1).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: Any = None) -> LemurEncoder:
        """Read an encoder that `save` wrote.

        Parameters
        ----------
        path : path
            The folder.
        device : str or torch.device, optional
            Where to compute; by default where it was fitted.

        Returns
        -------
        LemurEncoder
            Fitted.

        Raises
        ------
        FileNotFoundError
            When the folder has no encoder.
        ValueError
            When its two files do not belong together, or were written by a newer version.
        """
        folder = Path(path)
        described = read_description(folder / "encoder.json", FORMAT)
        encoder = cls(**described["parameters"])
        if device is not None:
            encoder.device = device
        encoder.n_features_in_ = described["n_features_in"]
        encoder.mean_, encoder.scale_ = described["mean"], described["scale"]
        encoder.loss_curve_, encoder.solver_ = described["loss_curve"], described["solver"]
        state = safetensors.torch.load_file(folder / "encoder.safetensors")
        on = torch.device(encoder.device or "cpu")
        encoder.solve_tokens_ = state.pop("solve_tokens").to(on)
        generator = torch.Generator()
        make = encoder._random_features if encoder.epochs == 0 else encoder._layers
        encoder.features_ = make(encoder.n_features_in_, generator)
        encoder.features_.load_state_dict(state)
        encoder.features_.to(on).eval().requires_grad_(False)
        if encoder.fingerprint() != described["fingerprint"]:
            raise ValueError(f"{folder}: encoder.safetensors does not belong to encoder.json; save the encoder again")
        return encoder

    @property
    def _device(self) -> torch.device:
        return self.solve_tokens_.device

    def _state(self) -> dict[str, torch.Tensor]:
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.features_.state_dict().items()}
        return {**state, "solve_tokens": self.solve_tokens_.cpu()}

    def _validate_parameters(self) -> None:
        least = {
            "n_features": 1,
            "hidden_layers": 1,
            "epochs": 0,
            "batch_size": 1,
            "n_train_docs": 1,
            "n_train_tokens": 1,
            "n_solve_tokens": 1,
        }
        for name, lowest in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < lowest:
                raise ValueError(f"{name}={value!r}: must be an integer of at least {lowest}")
        if self.hidden_dim is not None and self.hidden_dim < 1:
            raise ValueError(f"hidden_dim={self.hidden_dim!r}: must be at least 1, or None")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r}: must be one of {', '.join(ACTIVATIONS)}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate!r}: must be above 0")
        if not self.ridge >= 0:
            raise ValueError(f"ridge={self.ridge!r}: must be at least 0")
        if self.grad_clip is not None and not self.grad_clip > 0:
            raise ValueError(f"grad_clip={self.grad_clip!r}: must be above 0, or None")

    def _widths(self, d: int) -> list[int]:
        return [d, *[self.hidden_dim or self.n_features] * (self.hidden_layers - 1), self.n_features]

    def _layers(self, d: int, generator: torch.Generator) -> nn.Sequential:
        """Build psi as it is trained: linear map, LayerNorm, activation in every layer."""
        widths, layers = self._widths(d), []
        for before, after in pairwise(widths):
            layers += [_linear(before, after, generator), nn.LayerNorm(after), ACTIVATIONS[self.activation]()]
        return nn.Sequential(*layers)

    def _random_features(self, d: int, generator: torch.Generator) -> nn.Sequential:
        """Build psi as it stays: normal random map, activation, LayerNorm without parameters in every layer."""
        widths, layers = self._widths(d), []
        for before, after in pairwise(widths):
            linear = nn.utils.skip_init(nn.Linear, before, after, bias=False)
            with torch.no_grad():
                linear.weight.normal_(generator=generator)
            scaled = _Scale((2.0 / after) ** 0.5)
            layers += [linear, ACTIVATIONS[self.activation](), scaled, nn.LayerNorm(after, elementwise_affine=False)]
        return nn.Sequential(*layers).requires_grad_(False)

    def _train(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        held_out: tuple[torch.Tensor, torch.Tensor] | None,
        generator: torch.Generator,
    ) -> None:
        readout = _linear(self.n_features, targets.shape[1], generator, bias=False).to(tokens.device)
        parameters = [*self.features_.parameters(), *readout.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=self.learning_rate)
        best, kept = float("inf"), None
        for _ in range(self.epochs):
            total = torch.zeros((), dtype=torch.float64, device=tokens.device)
            order = torch.randperm(len(tokens), generator=generator).to(tokens.device)
            for rows in order.split(self.batch_size):
                error = readout(self.features_(tokens[rows])) - targets[rows]
                loss = error.square().mean()
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                if self.grad_clip is not None:
                    nn.utils.clip_grad_norm_(parameters, self.grad_clip)
                optimizer.step()
                total += loss.detach() * len(rows)
            value = float(total) / len(tokens)
            if held_out is not None:
                value = self._loss(readout, *held_out)
            self.loss_curve_.append(value)
            if value < best:
                best = value
                kept = {name: tensor.clone() for name, tensor in self.features_.state_dict().items()}
        if kept is not None:
            self.features_.load_state_dict(kept)
        self.features_.eval().requires_grad_(False)

    def _loss(self, readout: nn.Linear, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        total = 0.0
        with torch.inference_mode():
            for part, wanted in zip(tokens.split(TOKENS_AT_A_TIME), targets.split(TOKENS_AT_A_TIME), strict=True):
                total += float((readout(self.features_(part)) - wanted).square().sum(dtype=torch.float64))
        return total / targets.numel()

    def _psi(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.features_(tokens.to(device=self._device, dtype=torch.float32))

    def _prepare_solver(self) -> None:
        """Factorise the least squares once for all documents.

        With Z the features of the sample (n_s, d'), documents with targets y get ``w = y P`` with
        ``P = Z (Z'Z + ridge)^-1``. Working out P in double precision keeps more digits than solving for each w, as
        the error is then divided by the least singular value of Z once, not twice.
        """
        features = torch.cat([self._psi(part) for part in self.solve_tokens_.split(TOKENS_AT_A_TIME)])
        if len(features) < self.n_features:
            warnings.warn(
                f"n_solve_tokens: {len(features)} tokens determine less than n_features={self.n_features}; "
                "the ridge decides the rest",
                stacklevel=3,
            )
        gram = torch.zeros(self.n_features, self.n_features, dtype=torch.float64, device=features.device)
        for part in features.split(TOKENS_AT_A_TIME):
            gram.addmm_(part.double().T, part.double())
        factor, ridge = _factorise(gram, self.ridge)
        inverse = torch.empty(features.shape, device=features.device)
        if factor is None:
            inverse.copy_(torch.linalg.pinv(features.double()).T)
            self.solver_ = "svd"
        else:
            for start in range(0, len(features), TOKENS_AT_A_TIME):
                part = features[start : start + TOKENS_AT_A_TIME].double()
                inverse[start : start + len(part)] = torch.cholesky_solve(part.T, factor).T
            self.solver_ = f"cholesky, ridge {ridge:g}"
        self._pseudo_inverse = inverse


class _Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def _linear(before: int, after: int, generator: torch.Generator, bias: bool = True) -> nn.Linear:
    """A linear layer as torch initialises it, from a generator of its own."""
    layer = nn.utils.skip_init(nn.Linear, before, after, bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-(before**-0.5), before**-0.5, generator=generator)
    return layer


def _sample_tokens(sets: MultiVectors, n: int, generator: torch.Generator) -> torch.Tensor:
    rows = torch.randperm(len(sets.vectors), generator=generator)[:n]
    return sets.vectors[rows.to(sets.vectors.device)].float()


def _targets(tokens: torch.Tensor, documents: MultiVectors) -> torch.Tensor:
    """The highest inner product of each token with each document, shape (n, m)."""
    targets = torch.empty(len(tokens), len(documents), device=tokens.device)
    for chosen, maxima in blocks_of_maxima(tokens, documents):
        targets[:, chosen.to(tokens.device)] = maxima.T
    return targets


def _mean_and_deviation(targets: torch.Tensor) -> tuple[float, float]:
    mean = float(targets.sum(dtype=torch.float64) / targets.numel())
    total = sum(float((part - mean).square().sum(dtype=torch.float64)) for part in targets.split(TOKENS_AT_A_TIME))
    return mean, (total / targets.numel()) ** 0.5


def _factorise(gram: torch.Tensor, ridge: float) -> tuple[torch.Tensor | None, float]:
    """Cholesky factor with the least ridge that works, or None beyond the highest."""
    diagonal = gram.diagonal().mean()
    if bool(torch.isfinite(diagonal)) and float(diagonal) > 0:
        while ridge <= HIGHEST_RIDGE:
            ridged = gram.clone()
            ridged.diagonal().add_(ridge * diagonal)
            factor, failed = torch.linalg.cholesky_ex(ridged)
            if not int(failed):
                return factor, ridge
            ridge = max(2 * ridge, 1e-12)
    return None, ridge


def _runs_of_tokens(lengths: torch.Tensor, limit: int) -> Iterator[slice]:
    """Cut sets into runs of about so many tokens; a set is never cut."""
    first, total = 0, 0
    for at, length in enumerate(lengths.tolist()):
        if total and total + length > limit:
            yield slice(first, at)
            first, total = at, 0
        total += length
    yield slice(first, len(lengths))


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file in one step: it holds the old content or all of the new."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as stream:
            stream.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_description(path: Path, newest: int) -> dict[str, Any]:
    """Read the JSON beside saved tensors. Raises ValueError for a file of a newer version, or no such JSON."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file; `save` writes it")
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        written = int(described["format"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: is not what `save` writes: {error}") from error
    if written > newest:
        raise ValueError(f"{path}: has format {written}; this version reads up to {newest}: upgrade")
    return described
