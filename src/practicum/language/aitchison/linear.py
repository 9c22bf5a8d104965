"""The Aitchison norm of every row of causal attention from queries and keys alone, in time linear in the context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from practicum.toolbox.errors import InputError
from practicum.toolbox.kv import AttentionCall, Band

METRICS = ("aitchison", "entropy", "max_logit", "max_prob", "effective_tokens", "participation")


def causal_aitchison(
    query: Tensor,
    key: Tensor,
    *,
    scaling: float,
    mask: Tensor | None = None,
    chunk_size: int = 128,
    exclude_first: int = 0,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    r"""Normalised Aitchison norm of every row of causal attention; no tensor of L x L elements is made.

    The norm of a row is the standard deviation of its logits, and that needs two moments of the keys before it:
    :math:`\sum_j (z_j - \bar z)^2 = s^2\, q^\top M_n\, q` with the scatter matrix
    :math:`M_n = \sum_{j \le n} (k_j - \bar k)(k_j - \bar k)^\top`. Keys of earlier chunks enter through their mean and
    scatter, those of the row's own chunk exactly, and the two are joined without subtracting large numbers. It takes
    :math:`O(L (d^2 + C d))` instead of :math:`O(L^2 d)` and works beside any attention kernel.

    Parameters
    ----------
    query : Tensor of shape (B, H, L, d)
        After rotary embeddings. Its rows belong to the last L of the n keys.
    key : Tensor of shape (B, H_kv, n, d)
        H must be a multiple of H_kv (grouped-query attention); n at least L.
    scaling : float
        What q.k is multiplied by, :math:`1/\sqrt d` in most models.
    mask : Tensor of bool, optional
        Of shape (B, n): False for padding. Or of shape (B or 1, H or 1, L, n), bool or added to the logits: any mask,
        causal or not, for which all logits are computed, by blocks of rows, unless it amounts to a causal one.
    chunk_size : int
        C.
    exclude_first : int
        Leave out the first keys of each sequence, attention sinks: one with a lead of g adds about
        :math:`g^2 / n` to the square of the norm.
    sliding_window : int, optional
        Keys that a row sees, its own included.
    softcap : float, optional
        Where logits are capped by a tanh; all of them are computed then, by blocks.

    Returns
    -------
    Tensor of shape (B, H, L), float32, or float64 for float64 input
        0 for a row with one key; nan for rows that are padding or see no key.

    Raises
    ------
    InputError
        A ValueError that names the argument.

    Notes
    -----
    Means and scatter are accumulated in float64 where the device has it.

    Examples
    --------
    >>> generator = torch.Generator().manual_seed(0)
    >>> query, key = torch.randn(2, 1, 2, 300, 16, generator=generator)
    >>> D = causal_aitchison(query, key, scaling=0.25)
    >>> logits = 0.25 * query[0, 0, 250] @ key[0, 0, :251].T
    >>> torch.allclose(D[0, 0, 250], logits.std(correction=0))
    True

    The distance between attention over a cache of keys and over a damaged one:

    >>> damaged = key.half().float()
    >>> bool(causal_aitchison(query, key - damaged, scaling=0.25).max() < 1e-3)
    True
    """
    _require_heads(query, key)
    n, m = key.shape[2], query.shape[2]
    if n < m:
        raise InputError(f"key: has {n} keys; must have at least the {m} of the query's rows")
    for name, value in (("chunk_size", chunk_size), ("sliding_window", sliding_window)):
        if value is not None and value < 1:
            raise InputError(f"{name}={value}: must be at least 1")
    if exclude_first < 0:
        raise InputError(f"exclude_first={exclude_first}: must be at least 0")
    call = _call(query, key, scaling, mask, sliding_window, softcap)
    return norms(call, chunk_size=chunk_size, exclude_first=exclude_first)


def norms(call: AttentionCall, *, chunk_size: int = 128, exclude_first: int = 0) -> Tensor:
    """The same of an `AttentionCall`: by moments where its mask allows, else by blocks of logits.

    Parameters
    ----------
    call : AttentionCall
    chunk_size, exclude_first : int

    Returns
    -------
    Tensor of shape (B, H, m)
    """
    band = call.band()
    if band is None or call.softcap is not None:
        return attention_statistics(call, ("aitchison",), exclude_first=exclude_first)["aitchison"]
    return _by_moments(call.query, call.key, call.scaling, band, chunk_size, exclude_first)


class AitchisonState:
    r"""Mean and scatter of the keys so far: the Aitchison norm of a new row costs O(d^2), whatever the context.

    For decoding: `update` with the key of each token, `row` with its query. Equal to `causal_aitchison` of the whole.

    Attributes
    ----------
    n_keys : int
        Keys so far.

    Examples
    --------
    >>> generator = torch.Generator().manual_seed(0)
    >>> query, key = torch.randn(2, 1, 2, 50, 16, generator=generator)
    >>> state, rows = AitchisonState(), []
    >>> for i in range(50):
    ...     state.update(key[:, :, i : i + 1])
    ...     rows.append(state.row(query[:, :, i : i + 1], scaling=0.25))
    >>> torch.allclose(torch.cat(rows, dim=2), causal_aitchison(query, key, scaling=0.25), atol=1e-5)
    True
    """

    def __init__(self) -> None:
        self.n_keys = 0
        self._moments: _Moments | None = None

    def update(self, key: Tensor) -> None:
        """Add keys.

        Parameters
        ----------
        key : Tensor of shape (B, H_kv, m, d)

        Raises
        ------
        InputError
            A ValueError: for other B, H_kv or d than before.
        """
        if key.ndim != 4 or not key.shape[2] or not key.is_floating_point():
            raise InputError(f"key: has shape {tuple(key.shape)}; must be (B, H_kv, m, d) of floating-point numbers")
        new = _Moments.of(key.to(_wide(key)), None)
        if self._moments is None:
            self._moments = new
        else:
            if self._moments.mean.shape != new.mean.shape:
                (b, h, d), given = self._moments.mean.shape, tuple(key.shape)
                raise InputError(f"key: has shape {given}; must be ({b}, {h}, m, {d}) as before")
            self._moments = self._moments + new
        self.n_keys += key.shape[2]

    def row(self, query: Tensor, *, scaling: float) -> Tensor:
        """Norms of rows that see all keys so far.

        Parameters
        ----------
        query : Tensor of shape (B, H, m, d)
        scaling : float

        Returns
        -------
        Tensor of shape (B, H, m)

        Raises
        ------
        InputError
            A ValueError: before any key, and for heads that do not fit.
        """
        if self._moments is None:
            raise InputError("state: has no keys; call update first")
        b, kv_heads, d = self._moments.mean.shape
        fits = query.ndim == 4 and query.shape[0] == b and query.shape[3] == d and query.shape[1] % kv_heads == 0
        if not fits:
            raise InputError(f"query: has shape {tuple(query.shape)}; must be ({b}, {kv_heads} x groups, m, {d})")
        q = query.to(_wide(query)).reshape(b, kv_heads, -1, d)
        squares = self._moments.squares(q)
        return (abs(scaling) * (squares / self.n_keys).sqrt()).reshape(query.shape[:3])


def attention_statistics(
    call: AttentionCall,
    metrics: Sequence[str] = METRICS,
    *,
    rows: Tensor | None = None,
    exclude_first: int = 0,
    block_size: int = 128,
) -> dict[str, Tensor]:
    """Statistics of attention rows from all their logits, by blocks of rows: time O(m n d), memory O(block n).

    Parameters
    ----------
    call : AttentionCall
        m rows of queries, n keys.
    metrics : sequence of str
        Of "aitchison", "entropy" (nats), "max_logit", "max_prob", "effective_tokens" (exp of the entropy) and
        "participation" (1 over the sum of squared probabilities).
    rows : Tensor of int64, shape (r,), optional
        The rows that are wanted; all by default.
    exclude_first : int
        For "aitchison" only: keys left out at the beginning of each sequence.
    block_size : int
        Rows at once.

    Returns
    -------
    dict from metric to Tensor of shape (B, H, r)
        nan for rows that are padding or see no key. A sink's share is part of the probabilities' sum and no key.

    Examples
    --------
    >>> query = key = torch.zeros(1, 1, 4, 8)
    >>> call = AttentionCall(1, nn.Identity(), query, key, key, None, 1.0, True, "sdpa")
    >>> attention_statistics(call, ["effective_tokens"])["effective_tokens"]
    tensor([[[1., 2., 3., 4.]]])
    """
    for metric in metrics:
        if metric not in METRICS:
            raise InputError(f"metrics: {metric!r} must be among {', '.join(METRICS)}")
    band = call.band()
    m = call.query.shape[2]
    wanted = torch.arange(m, device=call.query.device) if rows is None else rows
    parts: dict[str, list[Tensor]] = {metric: [] for metric in metrics}
    for block in wanted.split(block_size):
        keys = slice(None)
        if band is not None:
            first, last = int(block.min()) + band.offset, int(block.max()) + band.offset
            keys = slice(0 if band.window is None else max(0, first - band.window + 1), last + 1)
        z = call.logits(block, keys)
        real = _real_rows(band, block, z)
        shown = z if not exclude_first else _without_first(call, z, keys, exclude_first)
        for metric, values in statistics_of_logits(z, shown, call.sinks, metrics).items():
            parts[metric].append(torch.where(real, values, torch.nan))
    return {metric: torch.cat(values, dim=2) for metric, values in parts.items()}


def statistics_of_logits(
    z: Tensor, shown: Tensor, sinks: Tensor | None = None, metrics: Sequence[str] = METRICS
) -> dict[str, Tensor]:
    """The same of logits (B, H, r, n) with -inf for what a row does not see; ``shown`` are those of the norm."""
    found: dict[str, Tensor] = {}
    if "aitchison" in metrics:
        seen = shown > -torch.inf
        n = seen.sum(-1)
        finite = shown.masked_fill(~seen, 0)
        mean = finite.sum(-1, keepdim=True) / n[..., None]
        squares = ((finite - mean) * seen).square().sum(-1)
        found["aitchison"] = (squares / n).sqrt()
    if set(metrics) - {"aitchison"}:
        top = z.amax(-1)
        found["max_logit"] = top
    if set(metrics) - {"aitchison", "max_logit"}:
        total = z.logsumexp(-1)
        if sinks is not None:
            sink = sinks.to(z.dtype)[None, :, None]
            total = torch.logaddexp(total, sink)
        p = torch.exp(z - total[..., None])
        found["max_prob"] = torch.exp(top - total)
        if {"entropy", "effective_tokens"} & set(metrics):
            # z - total once more would be the logarithms; p z is enough, as the probabilities sum to 1.
            mean_z = (p * z.masked_fill(z == -torch.inf, 0)).sum(-1)
            if sinks is not None:
                mean_z = mean_z + torch.exp(sink - total) * sink
            found["entropy"] = (total - mean_z).clamp_min(0)
            found["effective_tokens"] = found["entropy"].exp()
        if "participation" in metrics:
            found["participation"] = 1 / p.square().sum(-1)
    return {metric: found[metric] for metric in metrics}


def _real_rows(band: Band | None, block: Tensor, z: Tensor) -> Tensor:
    """Rows that see a key and are not padding, shape (B, H, r)."""
    real = (z > -torch.inf).any(-1)
    if band is not None and band.keys is not None:
        real = real & band.keys[:, None, block + band.offset]
    return real


def _without_first(call: AttentionCall, z: Tensor, keys: slice, exclude_first: int) -> Tensor:
    """The logits with the first keys of each sequence hidden, counted from where padding ends."""
    band, n = call.band(), call.key.shape[2]
    order = torch.arange(1, n + 1, device=z.device)[None]
    if band is not None and band.keys is not None:
        order = band.keys.long().cumsum(1)
    return z.masked_fill((order <= exclude_first)[:, None, None, keys], -torch.inf)


@dataclass(frozen=True)
class _Moments:
    """Number (B or 1,), mean (B, H_kv, d) and scatter (B, H_kv, d, d) of keys."""

    count: Tensor
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, keys: Tensor, shown: Tensor | None) -> _Moments:
        """Of keys (B, H_kv, c, d), those of ``shown`` (B, c)."""
        if shown is None:
            count = torch.full((1,), keys.shape[2], dtype=torch.float64 if keys.device.type != "mps" else torch.float32)
            count = count.to(keys.device)
            mean = keys.mean(2)
            centred = keys - mean[:, :, None]
        else:
            weights = shown[:, None, :, None].to(keys.dtype)
            number = weights.sum(2)
            mean = (keys * weights).sum(2) / number.clamp_min(1)
            centred = (keys - mean[:, :, None]) * weights
            count = number[:, 0, 0]
        wide = torch.float64 if keys.device.type != "mps" else torch.float32
        return cls(count.to(wide), mean.to(wide), (centred.mT @ centred).to(wide))

    def __add__(self, other: _Moments) -> _Moments:
        count = self.count + other.count
        share = (other.count / count.clamp_min(1))[:, None, None]
        step = other.mean - self.mean
        lift = (self.count * other.count / count.clamp_min(1))[:, None, None, None]
        outer = step[..., :, None] * step[..., None, :]
        return _Moments(count, self.mean + step * share, self.scatter + other.scatter + lift * outer)

    def squares(self, q: Tensor) -> Tensor:
        """Sum of squared deviations of the logits of rows q (B, H_kv, r, d): (B, H_kv, r)."""
        return ((q @ self.scatter.to(q.dtype)) * q).sum(-1).clamp_min(0)


def _by_moments(query: Tensor, key: Tensor, scaling: float, band: Band, chunk_size: int, exclude_first: int) -> Tensor:
    (b, _, m, _), offset, window = query.shape, band.offset, band.window
    key = key[:, :, : offset + m]
    shown = _shown(band, b, offset + m, exclude_first, key.device)
    starts = [*range(0, offset, chunk_size), *range(offset, offset + m, chunk_size)]
    ends = [*starts[1:], offset + m]
    enough = _enough_before(shown, starts, chunk_size, window)
    wide = _wide(query)
    past: list[tuple[int, int, _Moments]] = []
    parts = []
    for start, end, fast in zip(starts, ends, enough, strict=True):
        if start >= offset:
            # Of the chunks before, those that all rows of this one see, and the keys that some see.
            whole = [each for each in past if window is None or each[0] > end - 1 - window]
            first = whole[0][0] if whole else start if window is not None else 0
            begin = start if window is None else min(first, max(0, start - window + 1))
            pieces = [slice(begin, first), slice(start, end)] if begin < first else [slice(start, end)]
            q = query[:, :, start - offset : end - offset].to(wide)
            keys = torch.cat([key[:, :, piece] for piece in pieces], dim=2).to(wide)
            places = torch.cat([torch.arange(piece.start, piece.stop, device=key.device) for piece in pieces])
            moments = _total([each[2] for each in whole])
            seen = None if shown is None else shown[:, places]
            causal = _causal(places, start, end, window)
            if fast and moments is not None:
                parts.append(_later_rows(q, keys, seen, causal, moments))
            else:
                parts.append(_rows(q, keys, seen, causal, moments))
        if end < offset + m:
            chunk = _Moments.of(key[:, :, start:end].to(wide), None if shown is None else shown[:, start:end])
            if window is None:
                past = [(0, end, past[0][2] + chunk if past else chunk)]
            else:
                # What no later row sees is let go.
                past = [each for each in past if each[1] > end - window] + [(start, end, chunk)]
    deviation = abs(scaling) * torch.cat(parts, dim=2)
    if band.keys is not None:
        deviation = torch.where(band.keys[:, None, offset : offset + m], deviation, torch.nan)
    return deviation


def _rows(q: Tensor, keys: Tensor, shown: Tensor | None, seen: Tensor, before: _Moments | None) -> Tensor:
    """Standard deviation of q.k for the rows of a chunk, (B, H, c), with the logits' mean taken off first."""
    (b, heads, c, d), kv_heads = q.shape, keys.shape[1]
    q = q.reshape(b, kv_heads, -1, d)
    # Logits only shift when all keys do; near the keys' mean they lose less to rounding.
    reference = keys.mean(2, keepdim=True)
    z = (q @ (keys - reference).mT).reshape(b, kv_heads, heads // kv_heads, c, -1)
    weights = (seen[None] if shown is None else seen[None] & shown[:, None]).to(z.dtype)[:, None, None]
    count = weights.sum(-1)
    z = z * weights
    mean = z.sum(-1) / count.clamp_min(1)
    squares = ((z - mean[..., None]) * weights).square().sum(-1)
    if before is not None:
        shift = (q @ (before.mean.to(q.dtype) - reference[:, :, 0])[..., None])[..., 0].reshape(mean.shape)
        number = before.count.to(z.dtype)[:, None, None, None]
        lift = number * count / (number + count).clamp_min(1)
        squares = squares + before.squares(q).reshape(mean.shape) + lift * (mean - shift).square()
        count = count + number
    return torch.where(count > 0, (squares / count).sqrt(), torch.nan).reshape(b, heads, c)


def _later_rows(q: Tensor, keys: Tensor, shown: Tensor | None, seen: Tensor, before: _Moments) -> Tensor:
    """The same where the keys before are no fewer than those of the chunk.

    With logits counted from their mean over the keys before, the sum of squared deviations is that of those keys, plus
    the chunk's sum of squares, minus the square of its sum over the number of all: what is subtracted is then at most
    half of what it is subtracted from.
    """
    (b, heads, c, d), kv_heads = q.shape, keys.shape[1]
    q = q.reshape(b, kv_heads, -1, d)
    keys = keys - before.mean.to(q.dtype)[:, :, None]
    if shown is not None:
        keys = keys * shown[:, None, :, None].to(q.dtype)
    z = (q @ keys.mT).reshape(b, kv_heads, heads // kv_heads, c, -1)
    weights = seen.to(q.dtype)
    z = z.mul_(weights)
    count = before.count.to(q.dtype)[:, None] + (
        weights.sum(-1)[None] if shown is None else shown.to(q.dtype) @ weights.mT
    )
    total = z.sum(-1)
    squares = before.squares(q).reshape(total.shape) + torch.linalg.vector_norm(z, dim=-1).square()
    count = count[:, None, None]
    return ((squares - total.square() / count).clamp_min(0) / count).sqrt().reshape(b, heads, c)


def _causal(places: Tensor, start: int, end: int, window: int | None) -> Tensor:
    """Which of the keys at ``places`` the rows see, bool (c, e)."""
    rows = torch.arange(start, end, device=places.device)[:, None]
    seen = places[None] <= rows
    return seen if window is None else seen & (places[None] > rows - window)


def _total(moments: list[_Moments]) -> _Moments | None:
    if not moments:
        return None
    total = moments[0]
    for each in moments[1:]:
        total = total + each
    return total


def _enough_before(shown: Tensor | None, starts: list[int], chunk_size: int, window: int | None) -> list[bool]:
    """Whether each chunk is sure to have as many keys before it that can be seen, as it has itself."""
    if shown is None:
        return [window is None or window >= 4 * chunk_size] * len(starts)
    if window is not None:
        return [False] * len(starts)
    before = nn.functional.pad(shown.long().cumsum(1), (1, 0)).amin(0)[starts]
    return [count >= chunk_size for count in before.tolist()]


def _shown(band: Band, batch: int, n: int, exclude_first: int, device: torch.device) -> Tensor | None:
    if band.keys is None and not exclude_first:
        return None
    keys = torch.ones(batch, n, dtype=torch.bool, device=device) if band.keys is None else band.keys[:, :n]
    return keys & (keys.long().cumsum(1) > exclude_first)


def _call(
    query: Tensor, key: Tensor, scaling: float, mask: Tensor | None, sliding_window: int | None, softcap: float | None
) -> AttentionCall:
    n, m = key.shape[2], query.shape[2]
    if mask is not None:
        shape = tuple(mask.shape)
        fits = (mask.ndim == 2 and shape == (len(query), n)) or (
            mask.ndim == 4 and shape[2:] == (m, n) and shape[0] in (1, len(query)) and shape[1] in (1, query.shape[1])
        )
        if not fits or (mask.ndim == 2 and mask.dtype != torch.bool):
            raise InputError(
                f"mask: has shape {shape} and type {mask.dtype}; must be bool ({len(query)}, {n}), or "
                f"({len(query)} or 1, {query.shape[1]} or 1, {m}, {n})"
            )
    options = {name: x for name, x in (("sliding_window", sliding_window), ("softcap", softcap)) if x is not None}
    # Of the implementations, flash attention's is the one whose window and padding are not within the mask.
    return AttentionCall(0, nn.Identity(), query, key, key, mask, scaling, True, "flash", options)


def _require_heads(query: Tensor, key: Tensor) -> None:
    for name, x in (("query", query), ("key", key)):
        if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point():
            got = f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"{name}: is {got}; must be (batch, heads, tokens, d) of floating-point numbers")
    if key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        raise InputError(f"key: has shape {tuple(key.shape)}; must have the batch and d of {tuple(query.shape)}")
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        raise InputError(f"key: has {key.shape[1]} heads; the {query.shape[1]} of query must be a multiple of them")


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
