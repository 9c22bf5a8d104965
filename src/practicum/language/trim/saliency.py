"""How much a token of the target says, read from attention: how sharply it looks, and how much it is looked at."""

from __future__ import annotations

import torch
from torch import Tensor

from practicum.toolbox.kv import AttentionCall

# Attention probabilities that are held at a time, over all sequences and heads: 64 MB of float32.
MOST_AT_ONCE = 2**24


def attention_saliency(call: AttentionCall, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Row and column saliency of one attention layer, means over its heads.

    With :math:`A` the attention of a head, a token :math:`i` that sees :math:`v_i` keys and a key :math:`j` that
    :math:`u_j` tokens see,

    .. math::
        Q_i = 1 - \frac{-\sum_j A_{ij} \log A_{ij}}{\log v_i}, \qquad K_j = \frac{1}{u_j} \sum_i A_{ij}.

    :math:`Q` is 1 where all attention goes to one key and 0 where it is even. The paper [1]_ names entropy sharpness
    and attention received; that they are divided by :math:`\log v_i` and :math:`u_j`, without which they would follow
    the place in the sequence, is our reading. A token that sees one key has no choice, and :math:`Q = 0`.

    The attention is computed by blocks of rows and dropped: no matrix of all pairs is held for long sequences.

    Parameters
    ----------
    call : AttentionCall
        What an `AttentionTap` shows, of B sequences without a cache.
    real : Tensor of bool, shape (B, m), optional
        False for padding, which looks at nothing that counts.

    Returns
    -------
    rows, columns : Tensor of shape (B, m), float32
        Q and K; undefined where ``real`` is False.

    References
    ----------
    .. [1] M. Nagaraj, S. Choudhary, U. Saxena, D. Ravikumar, K. Roy, "TRIM: Token-wise Attention-Derived Saliency for
       Data-Efficient Instruction Tuning", arXiv:2510.07118, ICML 2026.

    Examples
    --------
    Queries of zeros look at everything they see evenly:

    >>> zeros = torch.zeros(1, 1, 3, 4)
    >>> call = AttentionCall(1, torch.nn.Identity(), zeros, zeros, zeros, None, 1.0, True, "sdpa")
    >>> rows, columns = attention_saliency(call)
    >>> rows.tolist()
    [[0.0, 0.0, 0.0]]
    >>> [[round(x, 3) for x in row] for row in columns.tolist()]
    [[0.611, 0.417, 0.333]]
    """
    (b, heads, m, _), n = call.query.shape, call.key.shape[2]
    device = call.query.device
    real = torch.ones(b, m, dtype=torch.bool, device=device) if real is None else real.to(device)
    band, seen = call.band(), call.keys_seen().float()
    rows = torch.zeros(b, m, device=device)
    received, readers = torch.zeros(b, n, device=device), torch.zeros(b, n, device=device)
    step = max(1, MOST_AT_ONCE // (b * heads * n))
    for start in range(0, m, step):
        block = slice(start, min(start + step, m))
        # Keys after the last row are seen by none of the block.
        last = n if band is None else min(n, block.stop + band.offset)
        counts = real[:, block]
        logits = call.logits(block, slice(0, last)).float()
        total = logits.logsumexp(-1, keepdim=True)
        if call.sinks is not None:
            total = torch.logaddexp(total, call.sinks.float().reshape(1, heads, 1, 1))
        attention = (logits - total).exp().masked_fill(~counts[:, None, :, None], 0)
        entropy = torch.special.entr(attention).sum(-1).mean(1)
        rows[:, block] = 1 - entropy / seen[:, block].clamp_min(2).log()
        received[:, :last] += attention.mean(1).sum(1)
        visible = call.visible(block, slice(0, last))[:, 0].expand(b, -1, -1)
        readers[:, :last] += (visible & counts[..., None]).sum(1)
    rows = rows.masked_fill(seen < 2, 0).clamp(0, 1)
    return rows, (received / readers.clamp_min(1))[:, n - m :]


def aggregate(rows: Tensor, columns: Tensor, owner: Tensor, n_samples: int, is_first: Tensor) -> Tensor:
    r"""Saliency :math:`\alpha = Q / 2 + K / 2` of tokens in scope, each part scaled to [0, 1] within its sample.

    The first token of a sequence, on which attention rests for want of anything better, counts as looked at by none;
    the others are scaled without it. The scaling is our reading of the paper.

    Parameters
    ----------
    rows, columns : Tensor of shape (n_tokens,)
        Of the tokens in scope, from `attention_saliency`.
    owner : Tensor of int64, shape (n_tokens,)
        The sample of each token, from 0.
    n_samples : int
    is_first : Tensor of bool, shape (n_tokens,)
        Whether it is the first token of its sequence.

    Returns
    -------
    Tensor of shape (n_tokens,)

    Examples
    --------
    >>> q, k = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([9.0, 0.5, 0.25])
    >>> aggregate(q, k, torch.zeros(3, dtype=torch.long), 1, torch.tensor([True, False, False])).tolist()
    [0.0, 0.75, 0.5]
    """
    everything = torch.ones_like(is_first)
    return (_scaled(rows, owner, n_samples, everything) + _scaled(columns, owner, n_samples, ~is_first)) / 2


def _scaled(x: Tensor, owner: Tensor, n_samples: int, counted: Tensor) -> Tensor:
    low = x.new_full((n_samples,), torch.inf).scatter_reduce(0, owner[counted], x[counted], "amin")
    high = x.new_full((n_samples,), -torch.inf).scatter_reduce(0, owner[counted], x[counted], "amax")
    width = (high - low)[owner]
    scaled = (x - low[owner]) / width
    return torch.where(counted & (width > 0), scaled, 0)
