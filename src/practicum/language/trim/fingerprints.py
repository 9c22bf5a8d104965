"""One direction for each token class of the target, and how well the tokens of a candidate match theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import normalize

from practicum.language.trim.saliency import aggregate
from practicum.language.trim.states import TokenStates
from practicum.toolbox.errors import InputError

# Rows of the embedding matrix that are compared with those of the classes at a time.
EMBEDDINGS_AT_ONCE = 8192
ALMOST_ZERO = 1e-12


@dataclass(frozen=True)
class Fingerprints:
    r"""Fingerprints of the token classes of one task.

    A class is a token of the vocabulary. Its fingerprint is the direction of the saliency-weighted sum of the unit
    states that it has in the target, :math:`f_t = \sum \alpha_{v,i} \hat h_{v,i} / \lVert \cdot \rVert`; of their plain
    sum where no weight is above zero.

    Attributes
    ----------
    ids : Tensor of int64, shape (m,)
        The classes, ascending.
    vectors : Tensor of shape (m, d), float32
        Of unit length.
    nearest : Tensor of int64, shape (V,)
        For every token of the vocabulary the row of its own class or, where the target has none, of the class whose
        input embedding is nearest by cosine.
    seen : Tensor of bool, shape (V,)
        Whether the target has the token.

    Examples
    --------
    >>> states = TokenStates(
    ...     torch.tensor([2, 0, 2]), torch.tensor([[1.0, 0.0], [0.0, 3.0], [0.0, 1.0]]), torch.zeros(3).long(),
    ...     torch.arange(3), torch.full((3,), 2, dtype=torch.uint8), 1,
    ... )
    >>> prints = Fingerprints.of(states, torch.eye(4))
    >>> prints.ids.tolist(), [[round(x, 2) for x in row] for row in prints.vectors.tolist()]
    ([0, 2], [[0.0, 1.0], [0.71, 0.71]])
    >>> prints.seen.tolist()
    [True, False, True, False]
    """

    ids: Tensor
    vectors: Tensor
    nearest: Tensor
    seen: Tensor

    @classmethod
    def of(cls, tokens: TokenStates, embeddings: Tensor) -> Self:
        """The fingerprints of some target tokens.

        Parameters
        ----------
        tokens : TokenStates
            Those in scope. Without saliency all weigh the same.
        embeddings : Tensor of shape (V, e)
            The model's input embeddings.

        Returns
        -------
        Fingerprints
        """
        units = normalize(tokens.states, dim=-1)
        ids, owner = tokens.ids.unique(return_inverse=True)
        weight = token_saliency(tokens)
        plain = units.new_zeros(len(ids), units.shape[1]).index_add(0, owner, units)
        weighted = torch.zeros_like(plain).index_add(0, owner, weight[:, None] * units)
        is_zero = weighted.norm(dim=-1, keepdim=True) < ALMOST_ZERO
        vectors = normalize(torch.where(is_zero, plain, weighted), dim=-1)
        nearest = torch.empty(len(embeddings), dtype=torch.long, device=ids.device)
        classes = normalize(embeddings[ids.to(embeddings.device)].float(), dim=-1)
        for start in range(0, len(embeddings), EMBEDDINGS_AT_ONCE):
            # The length of a row does not change which class is nearest to it.
            block = embeddings[start : start + EMBEDDINGS_AT_ONCE].float()
            nearest[start : start + EMBEDDINGS_AT_ONCE] = (block @ classes.T).argmax(-1).to(ids.device)
        nearest[ids] = torch.arange(len(ids), device=ids.device)
        seen = torch.zeros(len(embeddings), dtype=torch.bool, device=ids.device)
        seen[ids] = True
        return cls(ids, vectors, nearest, seen)

    def token_scores(self, tokens: TokenStates, unseen_penalty: float) -> Tensor:
        """How well each token matches: the cosine of its state with the fingerprint of its class.

        Parameters
        ----------
        tokens : TokenStates
        unseen_penalty : float
            What the cosine is multiplied by where the target has no such token and the nearest class stands in.

        Returns
        -------
        Tensor of shape (n_tokens,), float32
        """
        ids = tokens.ids.to(self.nearest.device)
        cosine = (normalize(tokens.states, dim=-1) * self.vectors[self.nearest[ids]]).sum(-1)
        return torch.where(self.seen[ids], cosine, unseen_penalty * cosine)


def token_saliency(tokens: TokenStates) -> Tensor:
    """Saliency alpha of target tokens, shape (n_tokens,); 1 where none was read."""
    if tokens.rows is None or tokens.columns is None:
        return torch.ones_like(tokens.states[:, 0])
    return aggregate(tokens.rows, tokens.columns, tokens.owner, tokens.n_samples, tokens.places == 0)


def sample_scores(token_scores: Tensor, owner: Tensor, n_samples: int, max_weight: float) -> Tensor:
    r"""Scores of samples, :math:`S = (1 - w) \operatorname{mean}_j s_j + w \max_j s_j`; -inf for those without tokens.

    Parameters
    ----------
    token_scores : Tensor of shape (n_tokens,)
    owner : Tensor of int64, shape (n_tokens,)
    n_samples : int
    max_weight : float

    Returns
    -------
    Tensor of shape (n_samples,), float32

    Examples
    --------
    >>> sample_scores(torch.tensor([0.0, 1.0, 0.5]), torch.tensor([0, 0, 2]), 3, 0.5).tolist()
    [0.75, -inf, 0.5]
    """
    exact = token_scores.double()
    count = torch.bincount(owner, minlength=n_samples)
    mean = exact.new_zeros(n_samples).index_add(0, owner, exact) / count.clamp_min(1)
    top = exact.new_full((n_samples,), -torch.inf).scatter_reduce(0, owner, exact, "amax")
    score = (1 - max_weight) * mean + max_weight * torch.where(count > 0, top, 0)
    return torch.where(count > 0, score, -torch.inf).float()


def mean_states(tokens: TokenStates) -> Tensor:
    """The mean of the unit states of each sample, shape (n_samples, d), float32; zeros for a sample without tokens."""
    units = normalize(tokens.states, dim=-1)
    total = units.new_zeros(tokens.n_samples, units.shape[1]).index_add(0, tokens.owner, units)
    return total / torch.bincount(tokens.owner, minlength=tokens.n_samples).clamp_min(1)[:, None]


def input_embeddings(model: Any) -> Tensor:
    """The input embeddings of a model, shape (V, e)."""
    layer = model.get_input_embeddings()
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise InputError(f"model={type(model).__name__}: must have input embeddings, a matrix of tokens by dimensions")
    return weight.detach()
