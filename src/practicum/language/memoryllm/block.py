"""The block of a MemoryLLM in plain PyTorch, for architectures other than ours."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from practicum.toolbox.errors import InputError


class MemoryBlock(nn.Module):
    r"""The feed-forward half of a MemoryLLM block.

    .. math:: X_{L+1} = X_L + \mathrm{Attn}_L(\mathrm{LN}(X_L)) + \mathrm{FFN}_L(\mathrm{LN}_L(X_0)),

    where :math:`X_0` are the token embeddings, :math:`\mathrm{LN}_L` is a root-mean-square norm that belongs to this
    layer, and :math:`\mathrm{FFN}(u) = W_{down} (W_{up} u \odot \mathrm{SiLU}(W_{gate} u))`. The attention is the
    caller's. As the last term depends on the token alone, it can be tabulated once the weights are trained.

    Parameters
    ----------
    hidden_size : int
        h.
    intermediate_size : int, optional
        K, by default round(8 h / 3).
    eps : float
        Of the norm.

    Raises
    ------
    ValueError
        For a size below 1, and for tensors whose shapes do not go together.

    References
    ----------
    arXiv:2602.00398, equation 2.6.

    Examples
    --------
    >>> block = MemoryBlock(16)
    >>> x0 = torch.randn(2, 5, 16)
    >>> block(x0, x0, torch.zeros(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(self, hidden_size: int, intermediate_size: int | None = None, eps: float = 1e-6) -> None:
        super().__init__()
        width = round(8 * hidden_size / 3) if intermediate_size is None else intermediate_size
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", width)):
            if size < 1:
                raise InputError(f"{name}={size}: must be at least 1")
        self.memory_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def memory(self, x0: Tensor) -> Tensor:
        """What the memory holds for these embeddings.

        Parameters
        ----------
        x0 : Tensor of shape (..., h)
            Token embeddings.

        Returns
        -------
        Tensor of shape (..., h)
        """
        q = self.memory_norm(x0)
        return self.down_proj(nn.functional.silu(self.gate_proj(q)) * self.up_proj(q))

    def forward(self, x: Tensor, x0: Tensor, attn_out: Tensor) -> Tensor:
        """Add the attention's output and the memory's.

        Parameters
        ----------
        x : Tensor of shape (batch, positions, h)
            What enters the block.
        x0 : Tensor of the same shape
            The token embeddings.
        attn_out : Tensor of the same shape
            Of this block's attention.

        Returns
        -------
        Tensor of the same shape
        """
        if not x.shape == x0.shape == attn_out.shape:
            shapes = ", ".join(str(tuple(t.shape)) for t in (x, x0, attn_out))
            raise InputError(f"x, x0 and attn_out must have one shape; got {shapes}")
        return torch.add(x + attn_out, self.memory(x0))
