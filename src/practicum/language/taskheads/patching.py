"""Writing the outputs of heads: activation patching, a scan over all heads, ablation and path patching."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from practicum.language.taskheads.prompts import answer_tokens
from practicum.language.taskheads.steps import (
    Edit,
    Head,
    PromptBatch,
    prompt_batches,
    read,
    require_eval,
    run_edits,
    token_rows,
)
from practicum.toolbox.errors import InputError
from practicum.toolbox.taps import Steering, Taps, decoder_blocks, head_shape


class HeadPatch:
    """Replace the outputs of some heads while a model runs: :math:`z_{l,h}` becomes ``scale * values[l, h]``.

    Only hooks on the output projections are used. They are gone when the ``with`` block ends, however it ends.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, in eval mode.
    heads : sequence of (layer, head)
        From 0. With none the model is left as it is.
    values : Tensor of shape (layers, heads, d_head) or (batch, layers, heads, d_head)
        What heads shall give, such as `mean_head_outputs` of good prompts; for all prompts, or for each row.
    scale : float
    position : int
        Where: -1 is the last token of a row that the attention mask does not hide, -2 the one before, and so on.
    every_step : bool
        Whether to patch the tokens that `generate` adds as well. By default the prompt alone: passes of one token with
        a filled cache are left as they are.

    Raises
    ------
    InputError
        A ValueError: for heads that the model has not, values of another shape, a position that is not below 0, a model
        in training mode; and, when the model runs, for values of another number of rows.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    ... )
    >>> model, ids = LlamaForCausalLM(config).eval(), torch.tensor([[5, 6, 7]])
    >>> with torch.no_grad(), HeadPatch(model, [(1, 0)], torch.zeros(3, 2, 8)):
    ...     patched = model(ids).logits
    >>> bool((patched[0, -1] != model(ids).logits[0, -1]).any())
    True
    """

    def __init__(
        self,
        model: Any,
        heads: Sequence[Head],
        values: Tensor,
        scale: float = 1.0,
        position: int = -1,
        every_step: bool = False,
    ) -> None:
        require_eval(model)
        self.heads = checked_heads(model, heads)
        self.values = checked_values(model, values)
        self.scale = float(scale)
        if isinstance(position, bool) or not isinstance(position, int | np.integer) or position >= 0:
            raise InputError(f"position={position!r}: must be a whole number below 0; -1 is the last token")
        self.position = int(position)
        self.every_step = every_step
        self._shape = head_shape(model)
        self._active = True
        self._steering: Steering | None = None
        self._decoder = next(
            owner for owner in model.modules() if any(c is decoder_blocks(model) for c in owner.children())
        )
        if self.heads:
            functions = {layer + 1: partial(self._write, layer) for layer in sorted({layer for layer, _ in self.heads})}
            self._steering = Steering(model, functions, "heads", positions=self.position)
        self._hooks: ExitStack | None = None

    def __enter__(self) -> Self:
        """Register the hooks."""
        if self._hooks is not None:
            raise InputError("patch: is active already; make another HeadPatch to nest them")
        with ExitStack() as hooks:
            if self._steering is not None:
                hooks.callback(self._decoder.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
                hooks.enter_context(self._steering)
            self._hooks = hooks.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove the hooks."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.close()

    def _begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        filled = cache is not None and hasattr(cache, "get_seq_length") and int(cache.get_seq_length()) > 0
        ids = next(
            (x for x in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None), None
        )
        self._active = self.every_step or not (filled and ids is not None and ids.shape[1] == 1)

    def _write(self, layer: int, hidden: Tensor) -> Tensor:
        if not self._active:
            return hidden
        if self.values.ndim == 4 and len(self.values) != len(hidden):
            raise InputError(f"values: has {len(self.values)} rows; the batch has {len(hidden)}; must be as many")
        _, n_heads, width = self._shape
        heads = [head for l, head in self.heads if l == layer]
        patched = hidden.clone().reshape(len(hidden), n_heads, width)
        values = self.scale * self.values[..., layer, heads, :]
        patched[:, heads] = values.to(hidden.device, hidden.dtype)
        return patched.reshape(hidden.shape)


def mean_head_outputs(model: Any, tokenizer: Any, prompts: Sequence[str], batch_size: int = 16) -> Tensor:
    """Average what heads give at the last token of prompts.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, in eval mode.
    tokenizer : transformers.PreTrainedTokenizerBase
    prompts : sequence of str
    batch_size : int
        Prompts in a forward pass.

    Returns
    -------
    Tensor of shape (layers, heads, d_head), float32

    Raises
    ------
    InputError
        A ValueError: for no prompts, or a model in training mode.

    Examples
    --------
    >>> from practicum.language.taskheads.tiny import tiny_model
    >>> model, tokenizer = tiny_model("up down in out hot cold opposite")
    >>> mean_head_outputs(model, tokenizer, [" up: down; in:", " hot:"]).shape
    torch.Size([3, 4, 8])
    """
    require_eval(model)
    rows = token_rows(tokenizer, prompts)
    return read(model, rows, torch.zeros(len(rows), dtype=torch.int64), batch_size).z.mean(0)


@dataclass(frozen=True)
class PatchScores:
    """How answers fare under patches.

    Attributes
    ----------
    rank : Tensor of shape (n_patches, n_prompts), int64
        Tokens that are likelier than the answer.
    log_prob : Tensor of shape (n_patches, n_prompts), float32
        Of the answer's first token.

    Examples
    --------
    >>> scores = PatchScores(torch.tensor([[0, 1, 3]]), torch.zeros(1, 3))
    >>> scores.accuracy.tolist(), [round(x, 3) for x in scores.reciprocal_rank.tolist()]
    ([0.3333333432674408], [0.583])
    """

    rank: Tensor
    log_prob: Tensor

    @property
    def accuracy(self) -> Tensor:
        """Share of prompts whose answer is the likeliest token, (n_patches,)."""
        return (self.rank == 0).float().mean(1)

    @property
    def reciprocal_rank(self) -> Tensor:
        """Mean of one over (rank + 1), (n_patches,)."""
        return (1 / (self.rank + 1.0)).mean(1)


def patch_scores(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    answers: Sequence[str],
    patches: Sequence[tuple[Sequence[Head], Tensor, float]],
    batch_size: int = 16,
) -> PatchScores:
    """Patch heads at the last token of prompts, with each of many patches, and see how the answers fare.

    The tokens before the last are computed once for all patches, and several patches go through the model side by side:
    the result is that of `HeadPatch` around one forward pass for each patch, at a fraction of its cost.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, in eval mode.
    tokenizer : transformers.PreTrainedTokenizerBase
    prompts, answers : sequence of str
        Only the first token of an answer counts.
    patches : sequence of (heads, values, scale)
        As in `HeadPatch`; values of shape (layers, heads, d_head), or (n_prompts, layers, heads, d_head).
    batch_size : int
        Prompts in a forward pass; passes over last tokens have up to four times as many rows.

    Returns
    -------
    PatchScores

    Raises
    ------
    InputError
        A ValueError: for an answer that begins with white space alone, and as `HeadPatch`.

    Examples
    --------
    >>> from practicum.language.taskheads.tiny import tiny_model
    >>> model, tokenizer = tiny_model("up down in out hot cold opposite")
    >>> patches = [([], torch.zeros(3, 4, 8), 1.0), ([(1, 0)], torch.ones(3, 4, 8), 2.0)]
    >>> patch_scores(model, tokenizer, [" up:"], ["down"], patches).rank.shape
    torch.Size([2, 1])
    """
    require_eval(model)
    rows = token_rows(tokenizer, prompts)
    tokens = _usable_answers(tokenizer, prompts, answers)
    edits = [
        Edit(checked_heads(model, heads), checked_values(model, values), scale) for heads, values, scale in patches
    ]
    for edit in edits:
        if edit.values.ndim == 4 and len(edit.values) != len(rows):
            raise InputError(f"values: has {len(edit.values)} rows; there are {len(rows)} prompts; must be as many")
    found = run_edits(model, prompt_batches(model, rows, batch_size), tokens, edits, batch_size)
    return PatchScores(found[0].long(), found[1])


def head_scan(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    answers: Sequence[str],
    values: Tensor,
    batch_size: int = 16,
    layers: Sequence[int] | None = None,
) -> Tensor:
    """Patch every head of a model by itself, and measure how much likelier the answers become.

    With the means of good prompts for ``values`` and prompts whose examples have shuffled outputs, this is the average
    indirect effect by which function vectors choose their heads [1]_.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, in eval mode.
    tokenizer : transformers.PreTrainedTokenizerBase
    prompts, answers : sequence of str
    values : Tensor of shape (layers, heads, d_head) or (n_prompts, layers, heads, d_head)
    batch_size : int
        Prompts in a forward pass; passes over last tokens have up to four times as many rows.
    layers : sequence of int, optional
        Those to scan, from 0; all by default. Others get 0.

    Returns
    -------
    Tensor of shape (layers, heads), float32
        Mean change of the probability of the answer's first token.

    Raises
    ------
    InputError
        A ValueError, as `patch_scores`.

    References
    ----------
    .. [1] E. Todd et al., "Function Vectors in Large Language Models", arXiv:2310.15213.

    Examples
    --------
    >>> from practicum.language.taskheads.tiny import tiny_model
    >>> model, tokenizer = tiny_model("up down in out hot cold opposite")
    >>> head_scan(model, tokenizer, [" up:"], ["down"], torch.zeros(3, 4, 8)).shape
    torch.Size([3, 4])
    """
    n_layers, n_heads, _ = head_shape(model)
    chosen = list(range(n_layers)) if layers is None else list(layers)
    heads = [(layer, head) for layer in chosen for head in range(n_heads)]
    patches: list[tuple[Sequence[Head], Tensor, float]] = [
        ([], values, 1.0),
        *(([head], values, 1.0) for head in heads),
    ]
    probabilities = patch_scores(model, tokenizer, prompts, answers, patches, batch_size).log_prob.exp()
    effects = torch.zeros(n_layers, n_heads)
    for (layer, head), changed in zip(heads, (probabilities[1:] - probabilities[0]).mean(1), strict=True):
        effects[layer, head] = changed
    return effects


@dataclass(frozen=True)
class Ablation:
    """What the removal of heads does to answers, beside that of as many other heads of the same layers.

    Attributes
    ----------
    accuracy, reciprocal_rank : float
        With the heads removed.
    control_accuracy, control_reciprocal_rank : Tensor of shape (n_controls,)
        With each control set removed.
    intact_accuracy, intact_reciprocal_rank : float
        With all heads.
    controls : list of list of (layer, head)

    Examples
    --------
    >>> ablation = Ablation(0.2, 0.4, torch.tensor([0.7, 0.9]), torch.tensor([0.8, 0.9]), 0.9, 0.95, [])
    >>> round(ablation.excess, 3)
    0.6
    """

    accuracy: float
    reciprocal_rank: float
    control_accuracy: Tensor
    control_reciprocal_rank: Tensor
    intact_accuracy: float
    intact_reciprocal_rank: float
    controls: list[list[Head]]

    @property
    def excess(self) -> float:
        """How much more accuracy is lost than without the controls, on average."""
        return float(self.control_accuracy.mean()) - self.accuracy


def ablate_heads(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    answers: Sequence[str],
    heads: Sequence[Head],
    method: Literal["mean", "zero"] = "mean",
    n_controls: int = 10,
    random_state: int | None = 0,
    batch_size: int = 16,
) -> Ablation:
    """Remove heads at the last token, and as many random other heads of the same layers for comparison.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, in eval mode.
    tokenizer : transformers.PreTrainedTokenizerBase
    prompts, answers : sequence of str
    heads : sequence of (layer, head)
        From 0.
    method : {"mean", "zero"}
        What heads give instead: their mean over the prompts, or nothing.
    n_controls : int
    random_state : int, optional
        Of the controls.
    batch_size : int

    Returns
    -------
    Ablation
        Its controls have the shape (n_controls,).

    Raises
    ------
    InputError
        A ValueError, as `patch_scores`; and where a layer has too few other heads for a control.

    Examples
    --------
    >>> from practicum.language.taskheads.tiny import tiny_model
    >>> model, tokenizer = tiny_model("up down in out hot cold opposite")
    >>> ablate_heads(model, tokenizer, [" up:"], ["down"], [(1, 0)], n_controls=2).control_accuracy.shape
    torch.Size([2])
    """
    if method not in ("mean", "zero"):
        raise InputError(f"method={method!r}: must be 'mean' or 'zero'")
    chosen = checked_heads(model, heads)
    rng = np.random.default_rng(random_state)
    controls = [matched_heads(chosen, head_shape(model)[1], rng) for _ in range(n_controls)]
    if method == "mean":
        values = mean_head_outputs(model, tokenizer, prompts, batch_size)
    else:
        values = torch.zeros(head_shape(model))
    patches: list[tuple[Sequence[Head], Tensor, float]] = [(each, values, 1.0) for each in ([], chosen, *controls)]
    scores = patch_scores(model, tokenizer, prompts, answers, patches, batch_size)
    accuracy, rr = scores.accuracy, scores.reciprocal_rank
    return Ablation(float(accuracy[1]), float(rr[1]), accuracy[2:], rr[2:], float(accuracy[0]), float(rr[0]), controls)


def path_patch(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    senders: Sequence[Head],
    values: Tensor,
    receivers: Sequence[Head],
    scale: float = 1.0,
    batch_size: int = 16,
) -> Tensor:
    """What receiving heads give when senders are patched and everything between them stays as it was.

    At the last token all other heads and all MLPs keep their outputs of the unpatched run, so that a change of a
    receiver is due to what it reads of the senders directly. `HeadPatch` with the returned values then shows what the
    change does to the answer.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, in eval mode.
    tokenizer : transformers.PreTrainedTokenizerBase
    prompts : sequence of str
    senders, receivers : sequence of (layer, head)
        From 0. A receiver that is not above a sender does not change.
    values : Tensor of shape (layers, heads, d_head) or (n_prompts, layers, heads, d_head)
        What the senders give.
    scale : float
    batch_size : int

    Returns
    -------
    Tensor of shape (n_prompts, layers, heads, d_head), float32
        Outputs of all heads in the unpatched run, those of the receivers replaced by what they give.

    Raises
    ------
    InputError
        A ValueError, as `HeadPatch`.

    References
    ----------
    K. Wang et al., "Interpretability in the Wild", arXiv:2211.00593.

    Examples
    --------
    >>> from practicum.language.taskheads.tiny import tiny_model
    >>> model, tokenizer = tiny_model("up down in out hot cold opposite")
    >>> path_patch(model, tokenizer, [" up:", " in:"], [(0, 1)], torch.zeros(3, 4, 8), [(2, 0)]).shape
    torch.Size([2, 3, 4, 8])
    """
    require_eval(model)
    rows = token_rows(tokenizer, prompts)
    edit = Edit(checked_heads(model, senders), checked_values(model, values), scale)
    clean, received = direct_outputs(model, prompt_batches(model, rows, batch_size), len(rows), edit)
    for layer, head in checked_heads(model, receivers):
        clean[:, layer, head] = received[:, layer, head]
    return clean


def direct_outputs(
    model: Any, batched: Iterable[tuple[list[int], PromptBatch]], n: int, edit: Edit
) -> tuple[Tensor, Tensor]:
    """What heads give, and what they give when they read a residual stream that only the edit has changed.

    ``batched`` are n prompts, as `prompt_batches` gives them; both results are (n, layers, heads, d_head).
    """
    shape = head_shape(model)
    clean, found = torch.empty(n, *shape), torch.empty(n, *shape)
    every = range(1, shape[0] + 1)
    for places, prompts in batched:
        of_heads = Taps(model, every, "heads", positions="last")
        of_mlps = Taps(model, every, "mlp", positions="last")
        prompts.step(contexts=[of_heads, of_mlps])
        some = edit.of(places)
        frozen = {layer: of_heads[layer].reshape(len(places), *shape[1:]).clone() for layer in every}
        for layer, head in some.heads:
            frozen[layer + 1][:, head] = (some.scale * some.values[..., layer, head, :]).to(frozen[layer + 1])
        # Entered first, so that it sees what heads give before they are frozen.
        seen = Taps(model, every, "heads", positions="last")
        heads = {layer: partial(_replaced, values.reshape(len(places), -1)) for layer, values in frozen.items()}
        mlps = {layer: partial(_replaced, of_mlps[layer]) for layer in every}
        freeze = [Steering(model, heads, "heads", positions="last"), Steering(model, mlps, "mlp", positions="last")]
        prompts.step(contexts=[seen, *freeze])
        for layer in every:
            for out, read_at in ((clean, of_heads), (found, seen)):
                out[places, layer - 1] = read_at[layer].float().cpu().reshape(len(places), *shape[1:])
    return clean, found


def _replaced(by: Tensor, hidden: Tensor) -> Tensor:
    return by


def matched_heads(heads: Sequence[Head], n_heads: int, rng: np.random.Generator) -> list[Head]:
    """As many random heads of every layer that are not among ``heads``.

    Where more than half of a layer's heads are among them, the rest of the layer is filled up with some of these.
    """
    found: list[Head] = []
    for layer in sorted({layer for layer, _ in heads}):
        of_layer = {head for l, head in heads if l == layer}
        others = [int(h) for h in rng.permutation([head for head in range(n_heads) if head not in of_layer])]
        others += [int(h) for h in rng.permutation(sorted(of_layer))]
        found += [(layer, head) for head in others[: len(of_layer)]]
    return found


def checked_heads(model: Any, heads: Sequence[Head]) -> list[Head]:
    """Heads in order, each once."""
    n_layers, n_heads, _ = head_shape(model)
    chosen = set()
    for each in heads:
        if len(each) != 2 or not (0 <= each[0] < n_layers and 0 <= each[1] < n_heads):
            raise InputError(
                f"heads: {each!r} must be (layer, head), from (0, 0) to ({n_layers - 1}, {n_heads - 1}) in this model"
            )
        chosen.add((int(each[0]), int(each[1])))
    return sorted(chosen)


def checked_values(model: Any, values: Any) -> Tensor:
    """Values of the model's shape."""
    shape = head_shape(model)
    if not isinstance(values, Tensor) or values.ndim not in (3, 4) or tuple(values.shape[-3:]) != shape:
        seen = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InputError(f"values: has shape {seen}; must be {shape} or (rows, {', '.join(map(str, shape))})")
    return values


def _usable_answers(tokenizer: Any, prompts: Sequence[str], answers: Sequence[str]) -> Tensor:
    if len(answers) != len(prompts):
        raise InputError(f"answers: has {len(answers)}; must be {len(prompts)}, one for each prompt")
    tokens = answer_tokens(tokenizer, prompts, answers)
    blank = (tokens < 0).nonzero()[:, 0].tolist()
    if blank:
        raise InputError(
            f"answers[{blank[0]}]={answers[blank[0]]!r}: begins with a token of white space in this tokenizer, as do "
            f"{len(blank)} of {len(answers)}; leave them out"
        )
    return tokens
