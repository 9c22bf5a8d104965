"""What a memory holds: what a token retrieves, which tokens lie near it, and clusters over the vocabulary."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.metrics import silhouette_score
from torch import Tensor

from practicum.language.memoryllm.lookups import TokenLookups
from practicum.language.memoryllm.model import MemoryLMForCausalLM
from practicum.toolbox.errors import InputError

OUTLYING = 3.0
SILHOUETTE_SAMPLE = 2000
EXAMPLES = 8


@dataclass(frozen=True)
class Retrieved:
    """What one token retrieves from one memory.

    Attributes
    ----------
    token_id : int
    keys : array of shape (n_keys,), int64
        Those that answer most strongly, by the absolute value of their coefficients.
    coefficients : array of shape (n_keys,)
    n_outlying : int
        Of all keys, those whose absolute coefficient is above the mean of the row by 3 standard deviations. The
        threshold is our choice.
    promoted, scores : arrays of shape (n_tokens,)
        Tokens that the memory's output points at: the highest logits that the final norm and the head make of it.

    Examples
    --------
    >>> Retrieved(5, np.array([1]), np.array([0.5]), 0, np.array([7]), np.array([2.0])).promoted.shape
    (1,)
    """

    token_id: int
    keys: NDArray[np.int64]
    coefficients: NDArray[np.float64]
    n_outlying: int
    promoted: NDArray[np.int64]
    scores: NDArray[np.float64]


@torch.no_grad()
def retrieve(
    model: MemoryLMForCausalLM, layer: int, token_ids: Sequence[int] | Tensor, n_keys: int = 10, n_tokens: int = 10
) -> list[Retrieved]:
    """What tokens retrieve from the memory of a layer: its keys that answer, and the tokens that the output promotes.

    Parameters
    ----------
    model : MemoryLMForCausalLM
        With its memory weights.
    layer : int
        From 0.
    token_ids : sequence of int or Tensor of shape (n,)
    n_keys, n_tokens : int
        How many of each, at most as many as there are.

    Returns
    -------
    list of Retrieved
        One for each token.

    Raises
    ------
    ValueError
        For a layer or a token that is not there, numbers below 1, or a model whose memory weights have been freed.

    Examples
    --------
    >>> from practicum.language.memoryllm import MemoryLMConfig
    >>> config = MemoryLMConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    >>> (found,) = retrieve(MemoryLMForCausalLM(config), 0, [5], n_keys=3)
    >>> found.token_id, found.keys.shape, found.promoted.shape
    (5, (3,), (10,))
    """
    _positive(n_keys=n_keys, n_tokens=n_tokens)
    coefficients = model.key_coefficients(layer, token_ids).float()
    block = model.model.layers[layer]
    logits = model.lm_head(model.model.norm(block.memory.down_proj(coefficients.to(model.dtype)))).float()
    strength = coefficients.abs()
    outlying = strength > strength.mean(1, keepdim=True) + OUTLYING * strength.std(1, keepdim=True)
    keys = strength.topk(min(n_keys, strength.shape[1])).indices
    scores, promoted = logits.topk(min(n_tokens, logits.shape[1]))
    chosen = coefficients.gather(1, keys)
    return [
        Retrieved(
            token_id=int(token),
            keys=keys[i].cpu().numpy(),
            coefficients=chosen[i].double().cpu().numpy(),
            n_outlying=int(outlying[i].sum()),
            promoted=promoted[i].cpu().numpy(),
            scores=scores[i].double().cpu().numpy(),
        )
        for i, token in enumerate(torch.as_tensor(token_ids).reshape(-1).tolist())
    ]


def nearest_tokens(
    lookups: TokenLookups, layer: int, token_ids: Sequence[int] | Tensor, n_tokens: int = 10
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens whose memory in a layer is most like that of given tokens, by the cosine of the outputs.

    Parameters
    ----------
    lookups : TokenLookups
        Of any backend; all rows of the layer are read once.
    layer : int
        From 0.
    token_ids : sequence of int or Tensor of shape (n,)
    n_tokens : int
        How many, the token itself not counted.

    Returns
    -------
    ids : array of shape (n, n_tokens), int64
        The nearest first.
    cosines : array of shape (n, n_tokens)
        Rows of zeros have cosine 0 with everything.

    Raises
    ------
    ValueError
        For a layer or a token that is not there, or ``n_tokens`` not from 1 to V - 1.

    Examples
    --------
    >>> table = torch.eye(4)[:, None] + 0.1 * torch.tensor([0.0, 1.0, 0.0, 0.0])
    >>> ids, cosines = nearest_tokens(TokenLookups(table), 0, [0], n_tokens=1)
    >>> ids
    array([[1]])
    """
    _positive(n_tokens=n_tokens)
    if n_tokens >= lookups.shape[0]:
        raise InputError(f"n_tokens={n_tokens}: there are {lookups.shape[0] - 1} other tokens")
    chosen = torch.as_tensor(token_ids).reshape(-1)
    rows = torch.nn.functional.normalize(lookups.layer(layer).float(), dim=1)
    mine = torch.nn.functional.normalize(lookups.layer(layer, chosen).float(), dim=1)
    cosines = mine @ rows.T
    cosines[torch.arange(len(chosen)), chosen] = -torch.inf
    best, ids = cosines.topk(n_tokens)
    return ids.numpy(), best.double().numpy()


@dataclass(frozen=True)
class ClusterReport:
    """What the clusters of a layer's tokens look like.

    Attributes
    ----------
    silhouette : float
        Mean silhouette of at most 2000 tokens, by the cosine.
    purity, purity_by_chance : float
        Share of the tokens that are of their cluster's most frequent class (number, punctuation, capitalised, start of
        a word, continuation of a word, other), and the share of the most frequent class of all.
    sizes : array of shape (n_clusters,), int64
    outlying_keys : float
        Mean share of keys whose absolute coefficient is above the mean of the token's by 3 standard deviations.
    examples : list of list of str
        For each cluster its tokens nearest to the centre.

    Examples
    --------
    >>> ClusterReport(0.1, 0.8, 0.5, np.array([3, 4]), 0.01, [["a"], ["b"]]).sizes.shape
    (2,)
    """

    silhouette: float
    purity: float
    purity_by_chance: float
    sizes: NDArray[np.int64]
    outlying_keys: float
    examples: list[list[str]]


def cluster_tokens(
    model: MemoryLMForCausalLM,
    layer: int,
    n_clusters: int,
    tokenizer: Any,
    random_state: int = 0,
    token_ids: Sequence[int] | Tensor | None = None,
) -> tuple[NDArray[np.int64], ClusterReport]:
    """Cluster tokens by the keys of a memory that answer to them.

    K-means over the rows of key coefficients. That they are brought to length 1 first is our choice, and so are
    silhouette and purity: the paper's clustering coefficient is not defined in its text.

    Parameters
    ----------
    model : MemoryLMForCausalLM
        With its memory weights.
    layer : int
        From 0.
    n_clusters : int
    tokenizer : transformers.PreTrainedTokenizerBase
        For the classes of tokens and the examples.
    random_state : int
    token_ids : sequence of int or Tensor of shape (n,), optional
        All tokens by default, for which n x K coefficients are held.

    Returns
    -------
    labels : array of shape (n,), int64
    report : ClusterReport

    Raises
    ------
    ValueError
        For fewer tokens than clusters, fewer than 2 clusters, and as `MemoryLMForCausalLM.key_coefficients`.

    Examples
    --------
    >>> from tokenizers import Tokenizer, models
    >>> from transformers import PreTrainedTokenizerFast
    >>> from practicum.language.memoryllm import MemoryLMConfig
    >>> vocabulary = {f"{word}{i}": 5 * i + j for i in range(8) for j, word in enumerate(["a", "B", "7", "?", "the"])}
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="a0")))
    >>> config = MemoryLMConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> labels, report = cluster_tokens(MemoryLMForCausalLM(config), 0, 3, tokenizer)
    >>> labels.shape, int(report.sizes.sum())
    ((40,), 40)
    """
    coefficients = model.key_coefficients(layer, token_ids).float().cpu()
    ids = list(range(len(coefficients))) if token_ids is None else torch.as_tensor(token_ids).reshape(-1).tolist()
    if not 2 <= n_clusters < len(ids):
        raise InputError(f"n_clusters={n_clusters}: must be at least 2 and below the {len(ids)} tokens")
    strength = coefficients.abs()
    outlying = strength > strength.mean(1, keepdim=True) + OUTLYING * strength.std(1, keepdim=True)
    points = torch.nn.functional.normalize(coefficients, dim=1).numpy()
    kmeans = KMeans(n_clusters, n_init=1, random_state=random_state).fit(points)
    labels = kmeans.labels_.astype(np.int64)
    words = [_text(tokenizer, token) for token in ids]
    classes, kinds = np.unique([_class(word) for word in words], return_inverse=True)
    counted = np.zeros((n_clusters, len(classes)), dtype=np.int64)
    np.add.at(counted, (labels, kinds), 1)
    distance = 1 - np.einsum("nk,nk->n", points, kmeans.cluster_centers_[labels])
    examples = []
    for cluster in range(n_clusters):
        members = np.flatnonzero(labels == cluster)
        examples.append([words[i] for i in members[np.argsort(distance[members], kind="stable")[:EXAMPLES]]])
    several = len(np.unique(labels)) > 1
    report = ClusterReport(
        silhouette=float(
            silhouette_score(
                points,
                labels,
                metric="cosine",
                sample_size=min(SILHOUETTE_SAMPLE, len(points)),
                random_state=random_state,
            )
        )
        if several
        else float("nan"),
        purity=float(counted.max(1).sum() / len(ids)),
        purity_by_chance=float(counted.sum(0).max() / len(ids)),
        sizes=counted.sum(1),
        outlying_keys=float(outlying.float().mean()),
        examples=examples,
    )
    return labels, report


def _text(tokenizer: Any, token: int) -> str:
    found = tokenizer.decode([token])
    return found if isinstance(found, str) else "".join(found)


def _class(word: str) -> str:
    """The kind of a token, by its text."""
    stripped = word.strip()
    if not stripped:
        return "other"
    if any(c.isdigit() for c in stripped):
        return "number"
    if all(unicodedata.category(c)[0] in "PS" for c in stripped):
        return "punctuation"
    if not stripped[0].isalpha():
        return "other"
    if stripped[0].isupper():
        return "capitalised"
    return "start" if word[0].isspace() else "continuation"


def _positive(**given: int) -> None:
    for name, value in given.items():
        if value < 1:
            raise InputError(f"{name}={value}: must be at least 1")
