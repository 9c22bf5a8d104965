"""Sets of token vectors of different sizes, kept in one matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class MultiVectors:
    """N sets of token vectors, one set for each document or query, without padding.

    Parameters
    ----------
    vectors : tensor or ndarray of shape (T, d)
        The tokens of the first set, then those of the second, and so on. float32, float16 and bfloat16 are kept as
        they are; float64 becomes float32.
    lengths : tensor or ndarray of shape (N,), integers
        Tokens in each set, all at least 1; they sum to T.
    name : str
        What messages call these sets.

    Attributes
    ----------
    vectors : tensor of shape (T, d)
        C-contiguous.
    lengths : tensor of shape (N,), int64
        On the CPU.

    Raises
    ------
    TypeError
        When the vectors are not numbers in an array, tensor or nested list.
    ValueError
        When the vectors are integers or not finite, a set is empty, or the lengths do not sum to T. The message
        names the argument and the first such index.

    Examples
    --------
    >>> import numpy as np
    >>> documents = MultiVectors.from_list([np.eye(2, 3), np.ones((1, 3))])
    >>> documents
    MultiVectors(2 sets, 3 tokens, d=3, float32)
    >>> documents[1]
    tensor([[1., 1., 1.]])
    >>> len(documents[:1]), documents.lengths.tolist()
    (1, [2, 1])
    """

    vectors: torch.Tensor
    lengths: torch.Tensor

    def __init__(self, vectors: Any, lengths: Any, *, name: str = "vectors") -> None:
        tokens = _floats(vectors, name)
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise ValueError(f"{name} must have shape (tokens, d) with d >= 1; got {tuple(tokens.shape)}")
        counts = _lengths(lengths, name)
        empty = torch.nonzero(counts < 1)
        if len(empty):
            first = int(empty[0])
            raise ValueError(f"{name}[{first}] has {int(counts[first])} tokens; every set needs at least 1")
        if int(counts.sum()) != len(tokens):
            raise ValueError(f"{name}: the lengths sum to {int(counts.sum())}, but there are {len(tokens)} tokens")
        self.vectors, self.lengths = tokens, counts
        self._require_finite(name)

    @classmethod
    def from_list(cls, xs: Sequence[Any], *, name: str = "xs") -> MultiVectors:
        """Join sets given one by one, as ``MultiVectorEncoder.encode_document`` and PyLate return them.

        Parameters
        ----------
        xs : sequence of tensors or ndarrays of shape (n_i, d)
        name : str
            What messages call ``xs``.

        Returns
        -------
        MultiVectors

        Raises
        ------
        ValueError
            When there are no sets, one is empty, or their dimensions differ.

        Examples
        --------
        >>> MultiVectors.from_list([[[0.0, 1.0]], [[1.0, 0.0], [0.5, 0.5]]]).lengths
        tensor([1, 2])
        """
        if len(xs) == 0:
            raise ValueError(f"{name} is empty; give at least one set of token vectors")
        sets = [_floats(x, f"{name}[{i}]") for i, x in enumerate(xs)]
        for i, tokens in enumerate(sets):
            if len(tokens) == 0:
                raise ValueError(f"{name}[{i}] has 0 tokens; every set needs at least 1")
            if tokens.ndim != 2:
                raise ValueError(f"{name}[{i}] must have shape (tokens, d); got {tuple(tokens.shape)}")
            if tokens.shape[1] != sets[0].shape[1]:
                raise ValueError(f"{name}[{i}] has d={tokens.shape[1]}, {name}[0] has d={sets[0].shape[1]}")
        device = sets[0].device
        joined = torch.cat([tokens.to(device) for tokens in sets])
        return cls(joined, torch.tensor([len(tokens) for tokens in sets]), name=name)

    @classmethod
    def from_padded(cls, x: Any, mask: Any, *, name: str = "x") -> MultiVectors:
        """Take sets out of a padded block.

        Parameters
        ----------
        x : tensor or ndarray of shape (N, L, d)
        mask : tensor or ndarray of shape (N, L)
            True, or not 0, where a token counts.
        name : str
            What messages call ``x``.

        Returns
        -------
        MultiVectors

        Raises
        ------
        ValueError
            When the shapes do not fit together or a set has no token left.

        Examples
        --------
        >>> x = np.arange(8.0).reshape(2, 2, 2)
        >>> MultiVectors.from_padded(x, [[True, False], [True, True]]).vectors
        tensor([[0., 1.],
                [4., 5.],
                [6., 7.]])
        """
        block = _floats(x, name)
        counts = torch.as_tensor(mask).to(device=block.device, dtype=torch.bool)
        if block.ndim != 3 or counts.shape != block.shape[:2]:
            raise ValueError(
                f"{name} must have shape (N, L, d) and mask (N, L); got {tuple(block.shape)} and {tuple(counts.shape)}"
            )
        return cls(block[counts], counts.sum(dim=1), name=name)

    @classmethod
    def of_checked(cls, vectors: torch.Tensor, lengths: torch.Tensor) -> MultiVectors:
        """Wrap tensors that are known to be valid, without looking at them again.

        Parameters
        ----------
        vectors : tensor of shape (T, d)
        lengths : tensor of shape (N,), int64

        Returns
        -------
        MultiVectors
        """
        made = cls.__new__(cls)
        made.vectors, made.lengths = vectors.contiguous(), lengths
        return made

    @cached_property
    def offsets(self) -> torch.Tensor:
        """Where each set begins, and the end: shape (N + 1,), int64, on the CPU."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(self.lengths, 0)])

    @property
    def dimension(self) -> int:
        """Length d of a token vector."""
        return int(self.vectors.shape[1])

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.split(self.vectors, self.lengths.tolist()))

    def __getitem__(self, index: Any) -> Any:
        """One set as a tensor of shape (n_i, d) for an integer; `MultiVectors` for a slice or a list of integers."""
        if isinstance(index, (int, np.integer)):
            if not -len(self) <= index < len(self):
                raise IndexError(f"index {index} is out of range for {len(self)} sets")
            at = int(index) % len(self)
            return self.vectors[int(self.offsets[at]) : int(self.offsets[at + 1])]
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                stop = max(start, stop)
                tokens = self.vectors[int(self.offsets[start]) : int(self.offsets[stop])]
                return MultiVectors.of_checked(tokens, self.lengths[start:stop])
            index = torch.arange(len(self))[torch.arange(start, stop, step)]
        chosen = torch.as_tensor(index, dtype=torch.int64, device="cpu")
        lengths = self.lengths[chosen]
        rows = ragged_rows(self.offsets[:-1][chosen], lengths)
        return MultiVectors.of_checked(self.vectors.index_select(0, rows.to(self.vectors.device)), lengths)

    def __repr__(self) -> str:
        dtype = str(self.vectors.dtype).removeprefix("torch.")
        return f"MultiVectors({len(self)} sets, {len(self.vectors)} tokens, d={self.dimension}, {dtype})"

    def to(self, target: Any) -> MultiVectors:
        """Move to a device, or convert to another floating type.

        Parameters
        ----------
        target : torch.device, str or torch.dtype
            What ``Tensor.to`` takes.

        Returns
        -------
        MultiVectors
        """
        return MultiVectors.of_checked(self.vectors.to(target), self.lengths)

    def _require_finite(self, name: str) -> None:
        # A sum is not finite where a term is not; only then is it worth looking for the place.
        if bool(torch.isfinite(self.vectors.sum(dtype=torch.float64))):
            return
        bad = torch.nonzero(~torch.isfinite(self.vectors).all(dim=1))
        if len(bad):
            token = int(bad[0])
            index = int(torch.searchsorted(self.offsets, token, right=True)) - 1
            raise ValueError(f"{name}[{index}] has a NaN or infinite value in token {token - int(self.offsets[index])}")


def as_multivectors(x: Any, name: str, *, dimension: int | None = None, expected: str = "") -> MultiVectors:
    """Take token vectors in any of the forms the public functions accept.

    `MultiVectors` stay as they are. A 2-D array or tensor is one set, a 3-D one is N sets of equal length, and any
    other sequence is a list of 2-D sets.

    Parameters
    ----------
    x : MultiVectors, array, tensor or sequence of them
    name : str
        What messages call ``x``.
    dimension : int, optional
        The d that is needed, which ``expected`` describes.
    """
    if not isinstance(x, MultiVectors):
        if isinstance(x, (np.ndarray, torch.Tensor)) and x.dtype not in (object,):
            if x.ndim == 3:
                n, length, d = x.shape
                x = MultiVectors(x.reshape(n * length, d), torch.full((n,), length), name=name)
            else:
                x = MultiVectors(x, [len(x)] if x.ndim else [1], name=name)
        else:
            x = MultiVectors.from_list(x, name=name)
    if dimension is not None and x.dimension != dimension:
        raise ValueError(f"{name} have d={x.dimension}; {expected} has d={dimension}")
    return x


def ragged_rows(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Indices of the rows of several runs, one after the other: ``starts[i], starts[i] + 1, ...`` for each i.

    >>> ragged_rows(torch.tensor([5, 0]), torch.tensor([2, 3]))
    tensor([5, 6, 0, 1, 2])
    """
    ends = torch.cumsum(lengths, 0)
    total = int(ends[-1]) if len(ends) else 0
    return torch.arange(total) + torch.repeat_interleave(starts - (ends - lengths), lengths)


def _floats(x: Any, name: str) -> torch.Tensor:
    try:
        tokens = x.detach() if isinstance(x, torch.Tensor) else torch.as_tensor(_writable(x))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be arrays of numbers, one row a token; got {type(x).__name__}") from error
    if tokens.dtype == torch.float64:
        tokens = tokens.to(torch.float32)
    if tokens.dtype not in FLOATS:
        got = str(tokens.dtype).removeprefix("torch.")
        raise ValueError(f"{name} have dtype {got}; must be float32, float16, bfloat16 or float64")
    return tokens.contiguous()


def _writable(x: Any) -> np.ndarray:
    """The array itself; a copy where it is read-only, which torch cannot know of a tensor."""
    array = np.ascontiguousarray(x)
    return array if array.flags.writeable else array.copy()


def _lengths(lengths: Any, name: str) -> torch.Tensor:
    counts = torch.as_tensor(np.asarray(lengths) if not isinstance(lengths, torch.Tensor) else lengths).cpu()
    if counts.ndim == 1 and len(counts) == 0:
        raise ValueError(f"{name} is empty; give at least one set of token vectors")
    whole = not counts.dtype.is_floating_point and not counts.dtype.is_complex and counts.dtype != torch.bool
    if counts.ndim != 1 or not whole:
        raise ValueError(f"lengths of {name} must be integers of shape (N,); got {counts.dtype} {tuple(counts.shape)}")
    return counts.to(torch.int64)
