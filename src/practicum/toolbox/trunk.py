"""Forward passes over batches of token sequences, and how to leave out the layers that training does not change."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from practicum.toolbox.errors import InputError
from practicum.toolbox.taps import decoder_blocks


@dataclass(frozen=True)
class TokenRow:
    """Token ids, and for several continuations of one prefix in a row where each token belongs.

    ``segments`` is empty for plain text. Otherwise it has one number a token: 0 for the prefix, which all see, and
    k > 0 for the k-th continuation, which sees the prefix and itself; positions continue from the prefix in each.
    """

    ids: tuple[int, ...]
    segments: tuple[int, ...] = ()


class Forward:
    """Logits of batches of sequences, padded on the left, from the whole model or from a `FrozenTrunk`.

    Parameters
    ----------
    model : transformers.PreTrainedModel or peft.PeftModel
        Any causal language model.
    trunk : FrozenTrunk, optional
        Where the hidden states of the lower layers come from.
    batch_size : int

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    ...                      num_attention_heads=2, num_key_value_heads=2)
    >>> forward = Forward(LlamaForCausalLM(config).eval())
    >>> forward.logits([TokenRow((1, 2, 3)), TokenRow((4,))], keep=1).shape
    torch.Size([2, 1, 50])
    """

    def __init__(self, model: Any, trunk: FrozenTrunk | None = None, batch_size: int = 16) -> None:
        self.model = model
        self.trunk = trunk
        self.batch_size = batch_size
        self.arguments = forward_arguments(model)
        self.packs: bool | None = None

    def logits(self, batch: Sequence[TokenRow], keep: int) -> Tensor:
        """Logits at the last ``keep`` positions of one batch, shape (n, keep, n_vocabulary), float32.

        With gradients where they are enabled. Sequences shorter than ``keep`` have nonsense before their start.
        """
        inputs = self.inputs(batch, keep)
        if self.trunk is None:
            output = self.model(**inputs).logits
        else:
            with self.trunk.entered(batch, inputs["input_ids"].shape[1]):
                output = self.model(**inputs).logits
        return output[:, -keep:].float()

    @torch.no_grad()
    def last_log_probs(self, sequences: Sequence[TokenRow]) -> Tensor:
        """Log-probabilities of what follows each sequence, shape (n, n_vocabulary), float32."""
        found: list[Tensor] = [torch.empty(0)] * len(sequences)
        for chosen in self.batches(sequences):
            rows = self.logits([sequences[i] for i in chosen], keep=1)[:, -1].log_softmax(-1)
            for i, row in zip(chosen, rows, strict=True):
                found[i] = row
        return torch.stack(found)

    @torch.no_grad()
    def continuation_log_probs(
        self, prefixes: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> list[Tensor]:
        """Log-probability of each continuation of each prefix, one tensor (n_continuations,) a prefix.

        The prefix is computed once for all its continuations, which stand in one row and do not see each other.
        """
        if self.packs is None:
            self.packs = self.can_pack(prefixes, continuations)
        if not self.packs:
            return self._one_by_one(prefixes, continuations)
        rows = [pack(prefix, options) for prefix, options in zip(prefixes, continuations, strict=True)]
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        for chosen in self.batches(rows):
            keep = max(len(rows[i].ids) - len(prefixes[i]) + 1 for i in chosen)
            logits = self.logits([rows[i] for i in chosen], keep)
            for i, of_row in zip(chosen, logits, strict=True):
                found[i] = _of_pack(of_row[keep - (len(rows[i].ids) - len(prefixes[i]) + 1) :], continuations[i])
        return found

    def _one_by_one(
        self, prefixes: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> list[Tensor]:
        rows = [
            (n, TokenRow((*prefix, *option[:-1])), option)
            for n, (prefix, options) in enumerate(zip(prefixes, continuations, strict=True))
            for option in options
        ]
        found: list[list[Tensor]] = [[] for _ in prefixes]
        scores: list[Tensor] = [torch.empty(0)] * len(rows)
        for chosen in self.batches([row[1] for row in rows]):
            keep = max(len(rows[i][2]) for i in chosen)
            logits = self.logits([rows[i][1] for i in chosen], keep).log_softmax(-1)
            for i, of_row in zip(chosen, logits, strict=True):
                option = torch.tensor(rows[i][2], device=logits.device)
                scores[i] = of_row[keep - len(option) :].gather(1, option[:, None]).sum()
        for (n, _, _), score in zip(rows, scores, strict=True):
            found[n].append(score)
        return [torch.stack(of_prefix) for of_prefix in found]

    def can_pack(self, prefixes: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]) -> bool:
        """Whether this architecture takes a mask that it did not make; told by trying on one prefix."""
        if "position_ids" not in self.arguments:
            return False
        if all(len(option) == 1 for options in continuations for option in options):
            return True
        longest = max(range(len(prefixes)), key=lambda i: sum(map(len, continuations[i])))
        sample = [prefixes[longest]], [continuations[longest]]
        expected = self._one_by_one(*sample)[0]
        self.packs = True
        try:
            packed = self.continuation_log_probs(*sample)[0]
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            return False
        finally:
            self.packs = None
        # The bound is for half precision; a mask that is not heeded is off by far more.
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.1
        return bool(torch.allclose(packed, expected, rtol=tolerance, atol=tolerance))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the model's weights."""
        return next(self.model.parameters()).dtype

    def batches(self, sequences: Sequence[TokenRow]) -> Iterator[list[int]]:
        """Indices in batches of about the same length."""
        size = self.batch_size if "position_ids" in self.arguments else 1
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i].ids))
        for start in range(0, len(order), size):
            yield order[start : start + size]

    def inputs(self, batch: Sequence[TokenRow], keep: int) -> dict[str, Any]:
        """What the model's forward is given for a batch: ids of shape (n, length), padded on the left, and the rest."""
        device = next(self.model.parameters()).device
        length = max(len(sequence.ids) for sequence in batch)
        ids = torch.zeros(len(batch), length, dtype=torch.long)
        mask = torch.zeros(len(batch), length, dtype=torch.long)
        positions = torch.zeros(len(batch), length, dtype=torch.long)
        for row, sequence in enumerate(batch):
            start = length - len(sequence.ids)
            ids[row, start:] = torch.tensor(sequence.ids)
            mask[row, start:] = 1
            positions[row, start:] = torch.tensor(positions_of(sequence))
        inputs: dict[str, Any] = {"input_ids": ids.to(device), "attention_mask": mask.to(device), "use_cache": False}
        if any(sequence.segments for sequence in batch):
            inputs["attention_mask"] = packed_mask(batch, length, self.dtype).to(device)
        if "position_ids" in self.arguments:
            inputs["position_ids"] = positions.to(device)
        if "logits_to_keep" in self.arguments:
            inputs["logits_to_keep"] = keep
        return inputs


def forward_arguments(model: Any) -> set[str]:
    """Names of the keywords of the model's own forward, below any adapter."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return set(inspect.signature(type(base).forward).parameters)


def pack(prefix: Sequence[int], continuations: Sequence[Sequence[int]]) -> TokenRow:
    """The prefix with all its continuations in one row, without their last tokens, which nothing follows.

    >>> pack([7, 8], [[1, 2], [3, 4, 5], [6]])
    TokenRow(ids=(7, 8, 1, 3, 4), segments=(0, 0, 1, 2, 2))
    """
    ids, segments = [*prefix], [0] * len(prefix)
    for number, option in enumerate(continuations, start=1):
        ids += option[:-1]
        segments += [number] * (len(option) - 1)
    return TokenRow(tuple(ids), tuple(segments) if any(segments) else ())


def positions_of(sequence: TokenRow) -> list[int]:
    """Positions of the tokens, in every continuation going on from the prefix.

    >>> positions_of(TokenRow((7, 8, 1, 3, 4), (0, 0, 1, 2, 2)))
    [0, 1, 2, 2, 3]
    """
    if not sequence.segments:
        return list(range(len(sequence.ids)))
    prefix = sequence.segments.count(0)
    counts: dict[int, int] = {}
    found = []
    for segment in sequence.segments:
        place = counts.get(segment, 0)
        counts[segment] = place + 1
        found.append(place if segment == 0 else prefix + place)
    return found


def packed_mask(batch: Sequence[TokenRow], length: int, dtype: torch.dtype) -> Tensor:
    """Additive mask (n, 1, length, length): 0 where a token may look, the least number where not."""
    segments = torch.full((len(batch), length), -1)
    for row, sequence in enumerate(batch):
        segments[row, length - len(sequence.ids) :] = torch.tensor(sequence.segments or [0] * len(sequence.ids))
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = segments[:, :, None] == segments[:, None, :]
    # Padding sees padding: a row of the mask without any entry would be undefined.
    seen = causal & (same | ((segments[:, None, :] == 0) & (segments[:, :, None] >= 0)))
    return torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]


def _of_pack(logits: Tensor, continuations: Sequence[Sequence[int]]) -> Tensor:
    """Scores from the logits at the last token of the prefix and at every packed token after it."""
    log_probs = logits.log_softmax(-1)
    scores, place = [], 1
    for option in continuations:
        rows = [0, *range(place, place + len(option) - 1)]
        scores.append(log_probs[rows, list(option)].sum())
        place += len(option) - 1
    return torch.stack(scores)


class FrozenTrunk:
    """The hidden states that enter block ``first``, computed once for every sequence and kept.

    Where only blocks from ``first`` on are trained, everything below gives the same for the same text, in every
    epoch and for every adapter. `entered` lets the model's own forward run from there: the lower blocks pass on what
    they get, and what enters block ``first`` is replaced by what was kept. No architecture is named, and the model is
    as it was after every call.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    first : int
        Number of blocks below, from 1 to the number of blocks less one.
    batch_size : int
        For the sequences that are not kept yet.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
    ...                      num_attention_heads=2, num_key_value_heads=2)
    >>> model = LlamaForCausalLM(config).eval()
    >>> trunk = FrozenTrunk(model, 2)
    >>> text = [TokenRow((1, 2, 3))]
    >>> short = Forward(model, trunk).last_log_probs(text)
    >>> bool(torch.allclose(short, Forward(model).last_log_probs(text), atol=1e-5))
    True
    >>> trunk.kept[text[0]].shape
    torch.Size([3, 16])
    """

    def __init__(self, model: Any, first: int, batch_size: int = 16) -> None:
        blocks = decoder_blocks(model)
        if not 1 <= first < len(blocks):
            raise InputError(f"first must be from 1 to {len(blocks) - 1}, the number of blocks less one; got {first}")
        self.model = model
        self.first = first
        self._blocks = blocks
        self.kept: dict[TokenRow, Tensor] = {}
        self._forward = Forward(model, batch_size=batch_size)
        self._returned = 0
        self._packs: bool | None = None

    def fill(self, sequences: Sequence[TokenRow]) -> None:
        """Compute and keep the hidden states of those sequences that are not kept yet.

        Those that begin with the same tokens are computed in one row, where the architecture allows it: what stands
        before the first difference is read once.

        Parameters
        ----------
        sequences : sequence of TokenRow
            Shape (n_sequences,).
        """
        missing = [s for s in dict.fromkeys(sequences) if s not in self.kept]
        if not missing:
            return
        if self._packs is None:
            self._packs = self._forward.can_pack([missing[0].ids[:1]], [[[0, 0], [1, 1]]])
        groups = grouped(missing) if self._packs else [Group(row.ids, [row]) for row in missing]
        rows = [group.row for group in groups]
        with torch.no_grad():
            for chosen in self._forward.batches(rows):
                for i, hidden in zip(chosen, self._hidden([rows[i] for i in chosen]), strict=True):
                    self.kept.update(groups[i].parts(hidden[-len(rows[i].ids) :]))

    def _hidden(self, batch: Sequence[TokenRow]) -> Tensor:
        blocks = self._blocks
        seen: list[Tensor] = []

        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append((args[0] if args else kwargs["hidden_states"]).detach())
            raise _EnoughSeen

        def look(module: nn.Module, args: Any, output: Any) -> None:
            self._returned = len(output) if isinstance(output, tuple) else 0

        handles = [
            blocks[self.first].register_forward_pre_hook(leave, with_kwargs=True),
            blocks[0].register_forward_hook(look),
        ]
        try:
            self.model(**self._forward.inputs(batch, keep=1))
        except _EnoughSeen:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return seen[0]

    @contextmanager
    def entered(self, batch: Sequence[TokenRow], length: int) -> Iterator[None]:
        """Within it the model's forward on this batch begins at block ``first``.

        Parameters
        ----------
        batch : sequence of TokenRow
            Shape (n_rows,).
        length : int
            To which the rows are padded on the left.

        Yields
        ------
        None
        """
        self.fill(batch)
        blocks = self._blocks
        rows = [self.kept[sequence] for sequence in batch]
        hidden = rows[0].new_zeros(len(rows), length, rows[0].shape[-1])
        for n, row in enumerate(rows):
            hidden[n, length - len(row) :] = row

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (hidden, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": hidden}

        def pass_on(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return (hidden_states, *[None] * (self._returned - 1)) if self._returned else hidden_states

        below = list(blocks[: self.first])
        own = [vars(block).get("forward") for block in below]
        handle = blocks[self.first].register_forward_pre_hook(enter, with_kwargs=True)
        try:
            for block in below:
                block.forward = pass_on
            yield
        finally:
            handle.remove()
            for block, forward in zip(below, own, strict=True):
                if forward is None:
                    vars(block).pop("forward", None)
                else:
                    block.forward = forward

    def is_exact(self, sequence: TokenRow, tolerance: float = 1e-3) -> bool:
        """Whether beginning at block ``first`` gives this architecture's own logits, told by one sequence.

        Parameters
        ----------
        sequence : TokenRow
        tolerance : float
            Relative, and absolute in standard deviations of the logits.

        Returns
        -------
        bool
        """
        with torch.no_grad():
            whole = self._forward.logits([sequence], keep=1)
            short = Forward(self.model, self).logits([sequence], keep=1)
        return bool(torch.allclose(whole, short, rtol=tolerance, atol=tolerance * float(whole.std())))


@dataclass
class Group:
    """Sequences that begin with ``prefix`` and are computed in one row."""

    prefix: tuple[int, ...]
    members: list[TokenRow]

    @property
    def row(self) -> TokenRow:
        """The prefix with what each member has after it, in segments."""
        n = len(self.prefix)
        ids, segments, number = list(self.prefix), [0] * n, 0
        for member in self.members:
            ids += member.ids[n:]
            # A plain member is one segment; the segments of a packed one begin where the prefix ends.
            own = member.segments[n:] or (1,) * (len(member.ids) - n)
            segments += [number + segment for segment in own]
            number += max(own, default=0)
        if len(self.members) == 1:
            return self.members[0]
        return TokenRow(tuple(ids), tuple(segments))

    def parts(self, hidden: Tensor) -> dict[TokenRow, Tensor]:
        """The hidden states of each member, from those of `row`, shape (n_tokens, d)."""
        n = place = len(self.prefix)
        found = {}
        for member in self.members:
            end = place + len(member.ids) - n
            found[member] = torch.cat([hidden[:n], hidden[place:end]])
            place = end
        return found


def grouped(sequences: Sequence[TokenRow]) -> list[Group]:
    """Sequences by what they begin with, where that is half of each at least.

    >>> [(group.prefix, len(group.members)) for group in grouped([TokenRow((1, 2, 3)), TokenRow((1, 2, 4, 5))])]
    [((1, 2), 2)]
    """
    groups: list[Group] = []
    for sequence in sorted(sequences, key=lambda s: (s.ids, s.segments)):
        own = sequence.ids[: sequence.segments.count(0)] if sequence.segments else sequence.ids
        if groups:
            last = groups[-1]
            shared = _shared(last.prefix, own)
            # What a packed sequence has in common with others must be all that its segments see.
            packed = [m for m in (*last.members, sequence) if m.segments]
            if all(m.segments.count(0) == shared for m in packed) and 2 * shared >= max(
                len(own), *(len(m.ids) for m in last.members if not m.segments), 1
            ):
                groups[-1] = Group(last.prefix[:shared], [*last.members, sequence])
                continue
        groups.append(Group(own, [sequence]))
    return groups


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens that both begin with."""
    n = min(len(one), len(other))
    return next((i for i in range(n) if one[i] != other[i]), n)


class _EnoughSeen(Exception):
    """Ends a forward pass at the block where the trunk ends."""


def first_trained_block(model: Any) -> int:
    """Number of blocks below all that is trained; 0 when something outside the blocks is.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2))
    >>> first_trained_block(model)
    0
    """
    blocks = decoder_blocks(model)
    owner = {id(p): n for n, block in enumerate(blocks) for p in block.parameters()}
    trained = [owner.get(id(p), -1) for p in model.parameters() if p.requires_grad]
    return max(min(trained, default=0), 0)


def usable_trunk(model: Any, given: FrozenTrunk | None, sample: TokenRow) -> FrozenTrunk | None:
    """The trunk below what is trained in ``model``: the one given, a new one, or None where there is none."""
    first = first_trained_block(model)
    if given is not None:
        if given.first > first:
            raise InputError(f"trunk begins at block {given.first}, but block {first} is trained")
        return given
    if first == 0:
        return None
    trunk = FrozenTrunk(model, first)
    if trunk.is_exact(sample):
        return trunk
    warnings.warn(
        f"{type(model).__name__} passes more than hidden states between its blocks: every epoch runs all of it",
        stacklevel=3,
    )
    return None
