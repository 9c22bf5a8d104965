"""The Aitchison geometry of attention rows: norm, distance, their Gaussian law, and what a sharp row asks for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from practicum.toolbox.errors import InputError

# How far the sum of probabilities may be from 1.
SUM_TOLERANCE = 1e-3
NEWTON_STEPS = 200


def clr(
    p: Tensor,
    dim: int = -1,
    *,
    from_logits: bool = False,
    mask: Tensor | None = None,
    zero_replacement: float | None = None,
) -> Tensor:
    r"""Centred log-ratio of compositions, :math:`\mathrm{clr}(p)_j = \log p_j - \frac1n \sum_l \log p_l`.

    From logits nothing is exponentiated: :math:`\mathrm{clr}(\mathrm{softmax}(z)) = z - \bar z`.

    Parameters
    ----------
    p : Tensor of shape (..., n, ...)
        Probabilities, or logits with ``from_logits``. Half precision is widened to float32.
    dim : int
        The dimension of the n parts.
    from_logits : bool
    mask : Tensor of bool, optional
        Broadcastable to ``p``; False where a part does not belong to the composition.
    zero_replacement : float, optional
        With it, zeros become this value and the other parts are multiplied by what is left (multiplicative
        replacement). Without it zeros are refused, for their logarithm would be infinite.

    Returns
    -------
    Tensor of the shape of ``p``
        Sums to 0 along ``dim``; 0 where masked.

    Raises
    ------
    InputError
        A ValueError: for zeros, negative or not normalised ``p``, for logits that are not finite where the mask is
        True, and for integer or complex tensors.

    References
    ----------
    J. Aitchison, "The Statistical Analysis of Compositional Data", JRSS B 44(2), 1982. Of attention: S. Hilton-Jones,
    T. J. Norman, Z. Zhu, "Modelling Attention with Aitchison Geometry", ICML 2026.

    Examples
    --------
    >>> clr(torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64))
    tensor([-0.4406, -0.0351,  0.4757], dtype=torch.float64)
    """
    x, seen = _log_parts(p, dim, from_logits, mask, zero_replacement, "p")
    return _centred(x, seen, dim)


def aitchison_norm(
    x: Tensor,
    dim: int = -1,
    *,
    from_logits: bool = True,
    mask: Tensor | None = None,
    normalized: bool = True,
    beta: float = 1.0,
    zero_replacement: float | None = None,
) -> Tensor:
    r"""Aitchison norm of attention rows: how far each is from uniform attention.

    :math:`\|p\|_A = \|\mathrm{clr}(p)\|_2`, and with :math:`p = \mathrm{softmax}(\beta z)` it is
    :math:`\beta \|z - \bar z\|_2`, so it is linear in the inverse temperature and can be had without the softmax.
    Normalised, :math:`D(p) = \|p\|_A / \sqrt n`: **the normalised Aitchison norm of a row is the (population) standard
    deviation of its logits.** The root mean square of :math:`\log(p_i / p_j)` over all ordered pairs is
    :math:`\sqrt 2 D`.

    Parameters
    ----------
    x : Tensor of shape (..., n, ...)
        Logits, or probabilities with ``from_logits=False``.
    dim : int
    from_logits : bool
    mask : Tensor of bool, optional
        Broadcastable to ``x``; False for keys that the row does not see.
    normalized : bool
        Divide by :math:`\sqrt n`. The paper's normalisation is not known to us; this is the one in which the norm has a
        finite limit for long contexts, the raw norm grows like :math:`\sqrt n`.
    beta : float
        Inverse temperature, at least 0.
    zero_replacement : float, optional
        As in `clr`.

    Returns
    -------
    Tensor, the shape of ``x`` without ``dim``, float32 or float64
        0 for a single key, nan where all keys are masked.

    Raises
    ------
    InputError
        A ValueError, as `clr`.

    Examples
    --------
    >>> z = torch.tensor([1.0, -1.0, 1.0, -1.0])
    >>> aitchison_norm(z), aitchison_norm(z, beta=3.0), aitchison_norm(z.softmax(0), from_logits=False)
    (tensor(1.), tensor(3.), tensor(1.))
    """
    if not beta >= 0 or not math.isfinite(beta):
        raise InputError(f"beta={beta}: must be at least 0 and finite")
    logs, seen = _log_parts(x, dim, from_logits, mask, zero_replacement, "x" if from_logits else "p")
    return beta * _length(logs, seen, dim, normalized)


def aitchison_distance(
    x: Tensor,
    y: Tensor,
    dim: int = -1,
    *,
    from_logits: bool = True,
    mask: Tensor | None = None,
    normalized: bool = True,
    zero_replacement: float | None = None,
) -> Tensor:
    r"""Aitchison distance between attention rows over the same keys.

    :math:`d_A(p, r) = \|\mathrm{clr}(p) - \mathrm{clr}(r)\|_2`, which is the square root of
    :math:`\frac{1}{2n} \sum_{i,j} (\log\frac{p_i}{p_j} - \log\frac{r_i}{r_j})^2`. From logits it is the norm of
    :math:`z - z'`, so for one query and two caches of keys it is that of the differences of the keys:
    ``causal_aitchison(query, key - other_key, ...)``.

    Parameters
    ----------
    x, y : Tensor of shape (..., n, ...)
        Logits, or probabilities with ``from_logits=False``.
    dim : int
    from_logits : bool
    mask : Tensor of bool, optional
    normalized : bool
        Divide by :math:`\sqrt n`.
    zero_replacement : float, optional
        As in `clr`.

    Returns
    -------
    Tensor, the shape of ``x`` without ``dim``, float32 or float64

    Raises
    ------
    InputError
        A ValueError, as `clr`, and for other shapes.

    Examples
    --------
    >>> x, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([11.0, 12.0, 13.0])
    >>> aitchison_distance(x, y)
    tensor(0.)
    """
    if x.shape != y.shape:
        raise InputError(f"y: has shape {tuple(y.shape)}; must have that of x, {tuple(x.shape)}")
    first, seen = _log_parts(x, dim, from_logits, mask, zero_replacement, "x" if from_logits else "p")
    second, _ = _log_parts(y, dim, from_logits, mask, zero_replacement, "y" if from_logits else "p")
    return _length(first - second, seen, dim, normalized)


def expected_aitchison_norm(n_keys: int, head_dim: int, *, beta: float = 1.0, normalized: bool = True) -> float:
    r"""Mean Aitchison norm of a row with standard normal query and keys.

    With :math:`q, k_j \sim N(0, I_d)` and :math:`z_j = q \cdot k_j / \sqrt d` it is
    :math:`\beta\, \frac{\mu(d)}{\sqrt d}\, \mu(L - 1)`, :math:`\mu(m) = \sqrt 2\, \Gamma(\frac{m+1}{2}) / \Gamma(\frac
    m 2)`, for L keys. Normalised it converges to :math:`\beta \mu(d) / \sqrt d` for long contexts: it does not vanish.

    Parameters
    ----------
    n_keys : int
        L, at least 1.
    head_dim : int
        d, at least 1.
    beta : float
    normalized : bool
        Divide by :math:`\sqrt L`.

    Returns
    -------
    float
        Of a row of logits of shape (n_keys,).

    Raises
    ------
    InputError
        A ValueError.

    Examples
    --------
    >>> round(expected_aitchison_norm(4096, 64, normalized=False), 2)
    63.74
    """
    for name, value in (("n_keys", n_keys), ("head_dim", head_dim)):
        if value < 1:
            raise InputError(f"{name}={value}: must be at least 1")
    if n_keys == 1:
        return 0.0
    norm = beta * _mean_length(head_dim) / math.sqrt(head_dim) * _mean_length(n_keys - 1)
    return norm / math.sqrt(n_keys) if normalized else norm


def mean_squared_aitchison_norm(
    n_keys: int, query_moment: Tensor, key_covariance: Tensor, *, beta: float = 1.0, normalized: bool = True
) -> Tensor:
    r"""Mean squared Aitchison norm for keys of any covariance, whatever their mean.

    :math:`E\|p\|_A^2 = \beta^2 (L - 1)\, \mathrm{tr}(M_q \Sigma_k) / d` with :math:`z_j = q \cdot k_j / \sqrt d`.

    Parameters
    ----------
    n_keys : int
        L.
    query_moment : Tensor of shape (d, d)
        :math:`M_q = E[q q^\top]`, which is the covariance of the queries plus the outer product of their mean.
    key_covariance : Tensor of shape (d, d)
    beta : float
    normalized : bool
        Divide by L.

    Returns
    -------
    Tensor, a scalar of float64

    Raises
    ------
    InputError
        A ValueError.

    Examples
    --------
    >>> mean_squared_aitchison_norm(101, torch.eye(8), torch.eye(8), normalized=False)
    tensor(100., dtype=torch.float64)
    """
    if n_keys < 1:
        raise InputError(f"n_keys={n_keys}: must be at least 1")
    d = query_moment.shape[-1]
    for name, matrix in (("query_moment", query_moment), ("key_covariance", key_covariance)):
        if matrix.shape != (d, d):
            raise InputError(f"{name}: has shape {tuple(matrix.shape)}; must be ({d}, {d})")
    trace = (query_moment.double() * key_covariance.double().mT).sum()
    squared = beta**2 * (n_keys - 1) * trace / d
    return squared / n_keys if normalized else squared


def min_inverse_temperature(logits: Tensor, p_max: float = 0.5, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Lower bound on the inverse temperature of a row whose largest probability is ``p_max`` or more.

    Jensen's inequality on the other n - 1 log-probabilities gives, for any row,
    :math:`\beta \ge B = (1 - \frac1n) \log\frac{\tau (n-1)}{1 - \tau} \,/\, (z_{\max} - \bar z)`. It is an equality
    where the others are equal. For Gaussian rows B grows like :math:`\sqrt{\log n / 2} / \sigma`. This is a **lower
    bound**: what suffices can be larger, see `sharpening_inverse_temperature` and `critical_inverse_temperature`.

    Parameters
    ----------
    logits : Tensor of shape (..., n, ...)
    p_max : float
        :math:`\tau`, between 0 and 1.
    dim : int
    mask : Tensor of bool, optional

    Returns
    -------
    Tensor, the shape of ``logits`` without ``dim``
        0 where :math:`\tau \le 1/n` (a single key included), inf where all logits are equal.

    Raises
    ------
    InputError
        A ValueError: for ``p_max`` out of its range, and as `clr`.

    Examples
    --------
    >>> z = torch.tensor([3.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    >>> min_inverse_temperature(z), sharpening_inverse_temperature(z)
    (tensor(0.5493, dtype=torch.float64), tensor(0.5493, dtype=torch.float64))
    """
    _require_probability(p_max)
    z, seen = _log_parts(logits, dim, True, mask, None, "logits")
    n = seen.sum(dim).to(z.dtype)
    top = z.masked_fill(~seen, -torch.inf).amax(dim)
    lead = top - (z * seen).sum(dim) / n
    needed = (1 - 1 / n) * torch.log(p_max * (n - 1) / (1 - p_max))
    bound = torch.where(lead > 0, needed / lead, torch.inf)
    bound = torch.where(p_max * n <= 1, 0.0, bound)
    return torch.where(n == 0, torch.nan, torch.where(n == 1, 0.0, bound))


def sharpening_inverse_temperature(
    logits: Tensor, p_max: float = 0.5, dim: int = -1, mask: Tensor | None = None
) -> Tensor:
    r"""The inverse temperature at which the largest probability of a row is ``p_max``, exactly.

    :math:`\beta^*` solves :math:`1 / \sum_j e^{-\beta (z_{\max} - z_j)} = \tau`, by Newton's method in float64: the
    logarithm of the sum is convex and decreasing in :math:`\beta`, so the steps from 0 never go beyond the root.

    Parameters
    ----------
    logits : Tensor of shape (..., n, ...)
    p_max : float
        :math:`\tau`, between 0 and 1.
    dim : int
    mask : Tensor of bool, optional

    Returns
    -------
    Tensor of float64, the shape of ``logits`` without ``dim``
        0 where :math:`\tau \le 1/n`; inf where m logits share the maximum and :math:`\tau \ge 1/m`.

    Raises
    ------
    InputError
        A ValueError, as `min_inverse_temperature`.

    Examples
    --------
    >>> z = torch.tensor([2.0, 0.0])
    >>> beta = sharpening_inverse_temperature(z, p_max=0.9)
    >>> (beta * z).softmax(0)
    tensor([0.9000, 0.1000])
    """
    _require_probability(p_max)
    z, seen = _log_parts(logits.double(), dim, True, mask, None, "logits")
    z, seen = z.movedim(dim, -1), seen.expand_as(z).movedim(dim, -1)
    top = z.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
    gaps = torch.where(seen, top - z, torch.inf)
    n, tied = seen.sum(-1), (gaps == 0).sum(-1)
    beta = torch.zeros(n.shape, dtype=torch.float64, device=z.device)
    wanted = (p_max * n > 1) & (p_max * tied < 1)
    rows, found = gaps[wanted], beta[wanted]
    finite = rows.masked_fill(torch.isinf(rows), 0)
    unsolved = torch.arange(len(rows), device=z.device)
    for _ in range(NEWTON_STEPS):
        if not len(unsolved):
            break
        weights = (
            torch.exp(-found[unsolved, None] * rows[unsolved])
            .nan_to_num(1.0)
            .masked_fill(torch.isinf(rows[unsolved]), 0)
        )
        total = weights.sum(-1)
        slope = (weights * finite[unsolved]).sum(-1) / total
        step = (total.log() + math.log(p_max)) / slope
        found[unsolved] += step
        unsolved = unsolved[step > 1e-15 * found[unsolved]]
    beta[wanted] = found
    beta[(p_max * n > 1) & (p_max * tied >= 1)] = torch.inf
    return torch.where(n == 0, torch.nan, beta)


def critical_inverse_temperature(n_keys: int | Tensor, std: float | Tensor = 1.0) -> Tensor:
    r"""Where Gaussian rows turn sharp: :math:`\beta_c = \sqrt{2 \log n} / \sigma`.

    Below it the largest probability goes to 0 in long rows, above it it stays of order 1 (the condensation of the
    random energy model). It has the rate of the lower bound :math:`\sqrt{\log n / 2} / \sigma`, and twice its constant.

    Parameters
    ----------
    n_keys : int or Tensor of shape (...)
        At least 1.
    std : float or Tensor
        Of the logits, above 0.

    Returns
    -------
    Tensor of float64

    Raises
    ------
    InputError
        A ValueError.

    Examples
    --------
    >>> critical_inverse_temperature(torch.tensor([64, 65536]))
    tensor([2.8841, 4.7096], dtype=torch.float64)
    """
    n = torch.as_tensor(n_keys, dtype=torch.float64)
    sigma = torch.as_tensor(std, dtype=torch.float64)
    if bool((n < 1).any()):
        raise InputError(f"n_keys={n_keys}: must be at least 1")
    if not bool((sigma > 0).all()):
        raise InputError(f"std={std}: must be above 0")
    return torch.sqrt(2 * torch.log(n)) / sigma


def _require_probability(p_max: float) -> None:
    if not 0 < p_max < 1:
        raise InputError(f"p_max={p_max}: must be between 0 and 1")


def _mean_length(m: int) -> float:
    """Mean length of a standard normal vector of m dimensions."""
    return math.sqrt(2) * math.exp(math.lgamma((m + 1) / 2) - math.lgamma(m / 2))


def _log_parts(
    x: Tensor, dim: int, from_logits: bool, mask: Tensor | None, zero_replacement: float | None, name: str
) -> tuple[Tensor, Tensor]:
    """Logarithms of the parts, 0 where masked, and the mask."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"{name}: is {kind}; must be a tensor of real floating-point numbers")
    if not x.ndim or not -x.ndim <= dim < x.ndim or not x.shape[dim]:
        raise InputError(f"dim={dim}: {name} has shape {tuple(x.shape)} and no parts there")
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    seen = torch.ones_like(x, dtype=torch.bool)
    if mask is not None:
        if mask.dtype != torch.bool:
            raise InputError(f"mask: is {mask.dtype}; must be bool, True for what belongs to the row")
        try:
            seen = mask.expand_as(x)
        except RuntimeError:
            raise InputError(f"mask: has shape {tuple(mask.shape)}; must broadcast to {tuple(x.shape)}") from None
    inside = x.masked_fill(~seen, 0)
    if not bool(torch.isfinite(inside).all()):
        raise InputError(f"{name}: has values that are not finite; give a mask where a row does not see a key")
    if from_logits:
        if zero_replacement is not None:
            raise InputError(f"zero_replacement={zero_replacement}: goes with from_logits=False")
        return inside, seen
    return _logs_of_probabilities(inside, seen, dim, zero_replacement), seen


def _logs_of_probabilities(p: Tensor, seen: Tensor, dim: int, zero_replacement: float | None) -> Tensor:
    if bool((p < 0).any()):
        raise InputError(f"p: has negative entries, the least {float(p.min()):.3g}; must be probabilities")
    total = p.sum(dim, keepdim=True)
    wrong = (total - 1).abs().masked_fill(~seen.any(dim, keepdim=True), 0)
    if bool((wrong > SUM_TOLERANCE).any()):
        raise InputError(f"p: sums to {float(total.flatten()[wrong.argmax()]):.6g}; must sum to 1 along dim={dim}")
    zero = seen & (p == 0)
    if bool(zero.any()):
        if zero_replacement is None:
            raise InputError(
                "p: has zeros, whose logarithm is infinite; give logits, or replace them with zero_replacement=1e-6"
            )
        left = 1 - zero_replacement * zero.sum(dim, keepdim=True)
        if not zero_replacement > 0 or not bool((left > 0).all()):
            raise InputError(
                f"zero_replacement={zero_replacement}: must be above 0, and leave something for the others"
            )
        p = torch.where(zero, zero_replacement, p * left)
    return torch.where(seen, p, 1.0).log()


def _centred(x: Tensor, seen: Tensor, dim: int) -> Tensor:
    mean = (x * seen).sum(dim, keepdim=True) / seen.sum(dim, keepdim=True)
    return torch.where(seen, x - mean, 0.0)


def _length(x: Tensor, seen: Tensor, dim: int, normalized: bool) -> Tensor:
    n = seen.sum(dim)
    length = torch.linalg.vector_norm(_centred(x, seen, dim), dim=dim)
    length = length / n.to(length.dtype).sqrt() if normalized else length
    return torch.where(n == 0, torch.nan, length)
