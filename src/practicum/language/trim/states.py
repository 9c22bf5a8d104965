"""The last states of a model's tokens, read in batches by forward passes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from practicum.language.trim.saliency import attention_saliency
from practicum.language.trim.samples import IN_SCOPE, TEMPLATE, Scope, TokenizedSample
from practicum.toolbox.errors import InputError
from practicum.toolbox.kv import AttentionCall, AttentionTap
from practicum.toolbox.taps import decoder_blocks
from practicum.toolbox.trunk import Forward, FrozenTrunk, TokenRow

Hidden = Literal["last_hidden_state", "pre_norm"]
Saliency = Literal["attention", "uniform"]


@dataclass(frozen=True)
class TokenStates:
    """The tokens of n samples, one after the other, without those of the template.

    Attributes
    ----------
    ids : Tensor of int64, shape (n_tokens,)
    states : Tensor of shape (n_tokens, d), float32
        What the model's last layer gives for each.
    owner : Tensor of int64, shape (n_tokens,)
        The sample of each token, from 0.
    places : Tensor of int64, shape (n_tokens,)
        Where in its sequence each token stands, the template's tokens counted.
    roles : Tensor of uint8, shape (n_tokens,)
        1 for prompt, 2 for response.
    n_samples : int
    rows, columns : Tensor of shape (n_tokens,) or None
        Saliency, where it was read (`attention_saliency`), a mean over layers.

    Examples
    --------
    >>> one = TokenStates(
    ...     torch.tensor([5, 6]), torch.eye(2), torch.tensor([0, 1]), torch.tensor([3, 3]),
    ...     torch.tensor([1, 2], dtype=torch.uint8), 2,
    ... )
    >>> one.scoped("response").ids.tolist(), one.scoped("response").n_samples
    ([6], 2)
    """

    ids: Tensor
    states: Tensor
    owner: Tensor
    places: Tensor
    roles: Tensor
    n_samples: int
    rows: Tensor | None = None
    columns: Tensor | None = None

    def scoped(self, scope: Scope) -> Self:
        """The tokens of a scope; samples without any stay counted.

        Parameters
        ----------
        scope : {"prompt", "response", "all"}

        Returns
        -------
        TokenStates
        """
        chosen = torch.isin(self.roles, torch.tensor(IN_SCOPE[scope], dtype=torch.uint8, device=self.roles.device))
        return self if bool(chosen.all()) else self._where(chosen)

    def take(self, samples: Sequence[int]) -> Self:
        """Some of the samples, in their old order, numbered anew.

        Parameters
        ----------
        samples : sequence of int
            Shape (n,).

        Returns
        -------
        TokenStates
        """
        new = torch.full((self.n_samples,), -1, device=self.owner.device)
        order = sorted({int(i) for i in samples})
        new[torch.tensor(order, device=new.device)] = torch.arange(len(order), device=new.device)
        kept = self._where(new[self.owner] >= 0)
        return replace(kept, owner=new[kept.owner], n_samples=len(order))

    def _where(self, chosen: Tensor) -> Self:
        found: dict[str, Any] = {
            part.name: value[chosen] for part in fields(self) if isinstance(value := getattr(self, part.name), Tensor)
        }
        return replace(self, **found)


class StateReader:
    """Reads the states of batches of tokenized samples.

    Only the decoder runs, without the head that makes logits; saliency needs the queries and keys of the last layers,
    which an `AttentionTap` shows, and leaves the model's own attention as it is.

    Parameters
    ----------
    model : transformers.PreTrainedModel or peft.PeftModel
    n_layers : int
        The last layers that saliency is read from.
    hidden : {"last_hidden_state", "pre_norm"}
        States after the final normalisation, or those that the last block gives.
    batch_size : int
        Sequences in a forward pass: what memory grows with.
    trunk : FrozenTrunk, optional
        Where the states of the lower layers come from.

    Raises
    ------
    InputError
        A ValueError that names the argument.

    Examples
    --------
    States have shape (n_tokens, d):

    >>> from practicum.language.confidence.tiny import tiny_model
    >>> reader = StateReader(tiny_model()[0], n_layers=2)
    >>> reader.read([TokenizedSample((5, 6, 7), (0, 1, 2))]).states.shape
    torch.Size([2, 32])
    """

    def __init__(
        self,
        model: Any,
        n_layers: int = 4,
        hidden: Hidden = "last_hidden_state",
        batch_size: int = 8,
        trunk: FrozenTrunk | None = None,
    ) -> None:
        n = len(decoder_blocks(model))
        if not 1 <= n_layers <= n:
            raise InputError(f"n_layers={n_layers}: must be from 1 to {n}, the layers of the model")
        if hidden not in ("last_hidden_state", "pre_norm"):
            raise InputError(f"hidden={hidden!r}: must be 'last_hidden_state' or 'pre_norm'")
        if batch_size < 1:
            raise InputError(f"batch_size={batch_size}: must be at least 1")
        self.model = model
        self.layers = tuple(range(n - n_layers + 1, n + 1))
        self.hidden = hidden
        self.trunk = trunk
        self._blocks = decoder_blocks(model)
        self._forward = Forward(model, batch_size=batch_size)

    def read(self, samples: Sequence[TokenizedSample], saliency: bool = False, name: str = "samples") -> TokenStates:
        """The states of all samples at once.

        Parameters
        ----------
        samples : sequence of TokenizedSample
            Shape (n_samples,).
        saliency : bool
            Whether saliency is read too.
        name : str
            What the samples are called in an error.

        Returns
        -------
        TokenStates
        """
        parts = list(self.batches(samples, saliency, name))
        found: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for _, part in parts])
            for name in ("ids", "states", "places", "roles", *(("rows", "columns") if saliency else ()))
        }
        owner = torch.cat([torch.tensor(chosen, device=part.owner.device)[part.owner] for chosen, part in parts])
        order = owner.argsort(stable=True)
        found = {name: value[order] for name, value in found.items()}
        return TokenStates(owner=owner[order], n_samples=len(samples), **found)

    def batches(
        self, samples: Sequence[TokenizedSample], saliency: bool = False, name: str = "pool", first: int = 0
    ) -> Iterator[tuple[list[int], TokenStates]]:
        """The states of batches of samples of about the same length.

        Parameters
        ----------
        samples : sequence of TokenizedSample
            Shape (n_samples,).
        saliency : bool
            Whether saliency is read too.
        name, first : str and int
            What the samples are called in an error, and the index of the first of them.

        Yields
        ------
        indices : list of int
            Into ``samples``.
        states : TokenStates
            Of those samples, in that order.

        Raises
        ------
        InputError
            A ValueError that names the sample, for states that are not finite.
        """
        rows = [TokenRow(sample.ids) for sample in samples]
        for chosen in self._forward.batches(rows):
            batch = [samples[i] for i in chosen]
            # Not inference_mode: what a trunk keeps here is trained on later.
            with torch.no_grad():
                found = self._batch([rows[i] for i in chosen], batch, saliency)
                finite = torch.isfinite(found.states).all(-1)
                if not bool(finite.all()):
                    wrong = first + chosen[int(found.owner[~finite][0])]
                    raise InputError(
                        f"{name}[{wrong}]: the model's states are not finite; half precision overflows: load it with "
                        "dtype='bfloat16' or 'float32'"
                    )
            yield chosen, found

    def _batch(self, rows: Sequence[TokenRow], samples: Sequence[TokenizedSample], saliency: bool) -> TokenStates:
        inputs = self._forward.inputs(rows, keep=1)
        inputs.pop("logits_to_keep", None)
        length = inputs["input_ids"].shape[1]
        real = inputs["attention_mask"].bool()
        seen: list[tuple[Tensor, Tensor]] = []
        before_norm: list[Tensor] = []

        def observe(call: AttentionCall) -> None:
            seen.append(attention_saliency(call, real))

        def keep(module: Any, args: Any, output: Any) -> None:
            before_norm[:] = [output if isinstance(output, Tensor) else output[0]]

        if self.trunk is not None:
            if saliency and self.layers[0] <= self.trunk.first:
                raise InputError(f"trunk: has the first {self.trunk.first} layers; saliency needs {self.layers[0]} on")
            # Before the tap: what is computed once is not to be watched.
            self.trunk.fill(rows)
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        with ExitStack() as active:
            if saliency:
                active.enter_context(AttentionTap(self.model, observe, self.layers))
            if self.hidden == "pre_norm":
                active.callback(self._blocks[-1].register_forward_hook(keep).remove)
            active.enter_context(nullcontext() if self.trunk is None else self.trunk.entered(rows, length))
            output = model.base_model(**inputs)
        states = before_norm[0] if self.hidden == "pre_norm" else output.last_hidden_state
        roles = torch.zeros(len(rows), length, dtype=torch.uint8)
        for row, sample in enumerate(samples):
            roles[row, length - len(sample.roles) :] = torch.tensor(sample.roles, dtype=torch.uint8)
        roles = roles.to(states.device)
        kept = roles != TEMPLATE
        starts = length - real.sum(1)
        owner, column = torch.nonzero(kept, as_tuple=True)
        found: dict[str, Any] = {}
        if saliency:
            found["rows"] = torch.stack([q for q, _ in seen]).mean(0)[kept]
            found["columns"] = torch.stack([k for _, k in seen]).mean(0)[kept]
        return TokenStates(
            ids=inputs["input_ids"][kept],
            states=states[kept].float(),
            owner=owner,
            places=column - starts[owner],
            roles=roles[kept],
            n_samples=len(rows),
            **found,
        )
