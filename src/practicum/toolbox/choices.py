"""Scores of the options of multiple-choice questions under a causal language model, and the activations behind them."""

from __future__ import annotations

import string
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from practicum.datasets.questions import MCQuestion, require_questions
from practicum.toolbox.cache import cache_folder, cache_key, load_or_build
from practicum.toolbox.errors import InputError
from practicum.toolbox.extras import requires

if TYPE_CHECKING:
    import torch

Mode: TypeAlias = Literal["continuation", "letter"]
Packing: TypeAlias = Literal["packed", "rows", "letters"]
LengthNorm: TypeAlias = Literal["sum", "mean", "pmi"]

MODES = ("continuation", "letter")
LENGTH_NORMS = ("sum", "mean", "pmi")
DEFAULT_TEMPLATE = "Question: {question}\nAnswer:"
PLACEHOLDER = "{question}"
SCORER_VERSION = 1
# Nats for each token: far above the rounding of the type, far below what a misread mask does.
TOLERANCE = {"torch.float16": 0.05, "torch.bfloat16": 0.3}
FLOAT32_TOLERANCE = 1e-4
OPTIONS_ALONE = 16


@dataclass(frozen=True)
class ChoiceScores:
    """What a model gives the options of N questions.

    Attributes
    ----------
    logits : list of ndarray of shape (K_i,), float64
        A score for each option; the softmax of them are the model's probabilities.
    hidden : dict of int to list of ndarray of shape (K_i, d), float16
        For each layer that was asked for the residual stream: at the last token of each option, or where options are
        letters at the last token of the prompt, the same row for all options of a question. Layer 0 is the embeddings,
        layer l is after block l.

    Examples
    --------
    >>> scores = ChoiceScores([np.zeros(2), np.zeros(3)], {4: [np.zeros((2, 8)), np.zeros((3, 8))]})
    >>> len(scores), [rows.shape for rows in scores.take([1]).hidden[4]]
    (2, [(3, 8)])
    """

    logits: list[np.ndarray]
    hidden: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.logits)

    def take(self, indices: Sequence[int] | np.ndarray) -> ChoiceScores:
        """Return the scores of some of the questions, in the order of ``indices``, without copying."""
        chosen = [int(i) for i in indices]
        hidden = {layer: [rows[i] for i in chosen] for layer, rows in self.hidden.items()}
        return ChoiceScores([self.logits[i] for i in chosen], hidden)


class ChoiceScorer:
    r"""Score the options of multiple-choice questions with any causal language model of transformers.

    In mode ``"continuation"`` an option's score is the log-probability of its tokens after the question,

    .. math:: s_i = \sum_t \log p(o_{i,t} \mid q, o_{i,<t})

    In mode ``"letter"`` the options are listed in the prompt as "A. ...", "B. ...", and the score is the logit of the
    letter.

    The options of a question share its prompt. They are read in one row: the prompt once, then all options, each of
    which sees the prompt and itself alone and is at the positions right after the prompt. The language-model head reads
    only the positions whose logits are needed. Both are tried on the longest question against plain rows and the whole
    head before they are used; where a model has no such masks or positions (sliding windows that are too short, ALiBi,
    state spaces) every option gets its own row, with a warning.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model; may be wrapped by PEFT. It is left as it was found.
    tokenizer : transformers.PreTrainedTokenizerBase
        Its padding side does not matter.
    mode : {"continuation", "letter"}
    length_norm : {"sum", "mean", "pmi"}
        In mode ``"continuation"``: the sum over an option's tokens, their mean, or the sum less what it is after the
        end of the template alone ("Answer:"), which takes out how likely an option is without the question.
    template : str
        Has "{question}", where the question goes (and the options, in mode ``"letter"``). An option is put behind it,
        after a space if the template does not end in white space.
    layers : sequence of int
        Whose activations to keep, from 0 to the number of blocks.
    batch_size : int
        Rows in a forward pass: questions, or options where each has its own row.
    cache : bool
        Keep scores in the cache folder and read them from there when model, questions and settings are the same. With
        forward hooks or PEFT layers a model is never cached, since its weights alone do not tell what it computes.

    Attributes
    ----------
    packing_ : {"packed", "rows", "letters"}
        After the first call, how the options were read: all options of a question in one row, a row each, or letters,
        which need no more than the prompt.
    packing_reason_ : str
        Why ``packing_`` is "rows"; empty otherwise.
    head_ : {"needed", "all"}
        The positions at which logits are computed.

    Raises
    ------
    InputError
        A ValueError naming the argument.

    Examples
    --------
    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    >>> vocabulary = {word: i for i, word in enumerate("? Question : Answer two three".split())}
    >>> words = Tokenizer(models.WordLevel(vocabulary, "?"))
    >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=6, **sizes))
    >>> scorer = ChoiceScorer(model, PreTrainedTokenizerFast(tokenizer_object=words), layers=[1], cache=False)
    >>> scores = scorer([MCQuestion("two ?", ["two", "three", "two three"])])
    >>> scores.logits[0].shape, scores.hidden[1][0].shape, scorer.packing_
    ((3,), (3, 8), 'packed')
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        mode: Mode = "continuation",
        length_norm: LengthNorm = "sum",
        template: str = DEFAULT_TEMPLATE,
        layers: Sequence[int] = (),
        batch_size: int = 16,
        cache: bool = True,
    ) -> None:
        if mode not in MODES:
            raise InputError(f"mode={mode!r}: must be one of {', '.join(map(repr, MODES))}")
        if length_norm not in LENGTH_NORMS:
            raise InputError(f"length_norm={length_norm!r}: must be one of {', '.join(map(repr, LENGTH_NORMS))}")
        if mode == "letter" and length_norm != "sum":
            raise InputError(
                f"length_norm={length_norm!r}: letters are single tokens; must be 'sum' with mode='letter'"
            )
        if not isinstance(template, str) or template.count(PLACEHOLDER) != 1:
            raise InputError(f"template={template!r}: must have {PLACEHOLDER} once")
        if length_norm == "pmi" and not template.partition(PLACEHOLDER)[2].strip():
            raise InputError(f"template={template!r}: must have text after {PLACEHOLDER} with length_norm='pmi'")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
            raise InputError(f"batch_size={batch_size!r}: must be a whole number, at least 1")
        self.model = model
        self.tokenizer = tokenizer
        self.mode = mode
        self.length_norm = length_norm
        self.template = template
        self.layers = _require_layers(model, layers)
        self.batch_size = int(batch_size)
        self.cache = cache
        self.packing_: Packing = "letters" if mode == "letter" else "packed"
        self.packing_reason_ = ""
        self.head_: Literal["needed", "all"] = "needed"
        self._checked = (0, 0)

    def __call__(self, questions: Sequence[MCQuestion]) -> ChoiceScores:
        """Return the scores of all options, in the order of the questions.

        Parameters
        ----------
        questions : sequence of MCQuestion
            At least one; they may differ in their number of options. Answers are not looked at.

        Returns
        -------
        ChoiceScores

        Raises
        ------
        InputError
            A ValueError naming ``questions[i]``: for fewer than two options, an empty or a repeated one, one without
            tokens, a question longer than the model takes, more than 26 options in mode ``"letter"``. One that names
            the letter that the tokenizer does not have as a token, or the layer whose activations are not finite in
            float16.
        """
        questions = require_questions(questions)
        packs = self._letter_packs(questions) if self.mode == "letter" else self._option_packs(questions)
        self._require_lengths(packs)
        options = sorted({choice for question in questions for choice in question.choices})
        alone = self._packs_alone(options) if self.length_norm == "pmi" else []
        if not self.cache or not _told_by_contents(self.model):
            return self._scores(questions, packs, options, alone)
        target = cache_folder() / "choices" / f"{self._key(packs, alone)}.safetensors"
        return load_or_build(
            target, lambda path: self._save(self._scores(questions, packs, options, alone), path), self._load
        )

    def _scores(
        self, questions: list[MCQuestion], packs: list[_Pack], options: list[str], alone: list[_Pack]
    ) -> ChoiceScores:
        with requires("language", "the scoring of options"):
            import torch

        with torch.no_grad(), _evaluating(self.model):
            self._check([*packs, *alone])
            logits, hidden = self._read(packs, self.layers)
            if self.length_norm == "mean":
                logits = [sums / pack.lengths for sums, pack in zip(logits, packs, strict=True)]
            elif self.length_norm == "pmi":
                likely = dict(zip(options, np.concatenate(self._read(alone, ())[0]), strict=True))
                logits = [
                    sums - np.array([likely[choice] for choice in question.choices])
                    for sums, question in zip(logits, questions, strict=True)
                ]
        for i, values in enumerate(logits):
            if not np.isfinite(values).all():
                raise InputError(f"model: gives questions[{i}] the scores {values}; must be finite")
        return ChoiceScores(logits, hidden)

    def _option_packs(self, questions: list[MCQuestion]) -> list[_Pack]:
        prompts = [self.template.replace(PLACEHOLDER, question.question) for question in questions]
        names = [[f"questions[{i}].choices[{j}]" for j in range(len(q.choices))] for i, q in enumerate(questions)]
        return self._packs(prompts, [list(question.choices) for question in questions], names)

    def _packs_alone(self, options: list[str]) -> list[_Pack]:
        prompt = self.template.partition(PLACEHOLDER)[2].lstrip()
        groups = [options[i : i + OPTIONS_ALONE] for i in range(0, len(options), OPTIONS_ALONE)]
        return self._packs([prompt] * len(groups), groups, [[repr(option) for option in group] for group in groups])

    def _packs(self, prompts: list[str], options: list[list[str]], names: list[list[str]]) -> list[_Pack]:
        """Tokenise each option with its prompt in front, as the model would meet them."""
        before = self._tokens(prompts)
        wholes = [
            prompt + ("" if prompt[-1:].isspace() else " ") + option
            for prompt, its_options in zip(prompts, options, strict=True)
            for option in its_options
        ]
        rest = iter(self._tokens(wholes))
        packs = []
        for prompt, its_names in zip(before, names, strict=True):
            rows = [next(rest) for _ in its_names]
            # Where the tokenizer joins the end of the prompt with the option, the shared part ends earlier.
            shared = min(_n_shared(prompt, row) for row in rows)
            for row, name in zip(rows, its_names, strict=True):
                if len(row) <= shared:
                    raise InputError(f"{name}: becomes no token; must have text that the tokenizer knows")
            if not shared:
                raise InputError(f"template={self.template!r}: begins with no token; put text before {PLACEHOLDER}")
            packs.append(_Pack(prompt[:shared], [row[shared:] for row in rows]))
        return packs

    def _letter_packs(self, questions: list[MCQuestion]) -> list[_Pack]:
        for i, question in enumerate(questions):
            if len(question.choices) > len(LETTERS):
                n = len(question.choices)
                raise InputError(
                    f"questions[{i}]: has {n} choices; must have at most {len(LETTERS)} with mode='letter'"
                )
        letters = self.letter_tokens(max(len(question.choices) for question in questions))
        prompts = [self.template.replace(PLACEHOLDER, with_letters(question)) for question in questions]
        rows = self._tokens(prompts)
        return [
            _Pack(row, [[letter] for letter in letters[: len(question.choices)]])
            for row, question in zip(rows, questions, strict=True)
        ]

    def letter_tokens(self, n: int) -> list[int]:
        """Single tokens of the first n letters, with a space in front if all have one, else without."""
        unknown = self.tokenizer.unk_token_id
        for prefix in (" ", ""):
            texts = [prefix + letter for letter in LETTERS[:n]]
            ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            lacking = [letter for letter, row in zip(LETTERS, ids, strict=False) if len(row) != 1 or row[0] == unknown]
            if not lacking and len({row[0] for row in ids}) == n:
                return [row[0] for row in ids]
        raise InputError(
            f"tokenizer: has no single token for the letter {(lacking or LETTERS)[0]}; use mode='continuation'"
        )

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        """Token ids with whatever the tokenizer puts in front, without the end of text that some put behind."""
        plain, special = (self.tokenizer("a", add_special_tokens=add)["input_ids"] for add in (False, True))
        behind = next(
            (n for n in range(len(special)) if special[len(special) - n - len(plain) :][: len(plain)] == plain), 0
        )
        return [row[: len(row) - behind] for row in self.tokenizer(texts)["input_ids"]]

    def _require_lengths(self, packs: list[_Pack]) -> None:
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        for i, pack in enumerate(packs):
            if limit and pack.longest > limit:
                raise InputError(
                    f"questions[{i}]: has {pack.longest} tokens with its longest option; the model takes {limit}"
                )

    def _check(self, packs: list[_Pack]) -> None:
        """Find out, on as long a question as there is, whether packing and the shortened head read the same."""
        prompt = max((pack.prompt for pack in packs), key=len)
        options = sorted((option for pack in packs for option in pack.options), key=len)
        lengths = (len(prompt), len(options[-1]))
        if all(new <= old for new, old in zip(lengths, self._checked, strict=True)):
            return
        # The short option behind the long one would show a leak between options, and positions that do not restart.
        pack = _Pack(prompt, [options[-1], options[0], options[len(options) // 2]])
        rows = pack.rows()
        truth = self._forward(rows, self.layers, packed=False, whole_head=True)
        if not np.isfinite(truth.scores).all():
            raise InputError("model: gives logits that are not finite; in a lower precision they may overflow")
        if self.head_ == "needed" and _difference(self._tried(rows, packed=False), truth):
            self.head_ = "all"
        if self.packing_ == "packed":
            self.packing_reason_ = _difference(self._tried([pack], packed=True), truth)
            if self.packing_reason_:
                self.packing_ = "rows"
                name = type(self.model).__name__
                warnings.warn(f"{name}: each option is read in its own row: {self.packing_reason_}", stacklevel=4)
        self._checked = (max(lengths[0], self._checked[0]), max(lengths[1], self._checked[1]))

    def _tried(self, packs: list[_Pack], *, packed: bool) -> _Reading | str:
        """What is read, or why it cannot be read so."""
        import torch

        try:
            return self._forward(packs, self.layers, packed=packed)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError) as error:
            lines = str(error).strip().splitlines()
            return f"{type(error).__name__}: {lines[0] if lines else ''}"

    def _read(
        self, packs: list[_Pack], layers: tuple[int, ...]
    ) -> tuple[list[np.ndarray], dict[int, list[np.ndarray]]]:
        """Scores and activations of every pack's options."""
        units = [row for pack in packs for row in pack.rows()] if self.packing_ == "rows" else packs
        # Rows of like length are read together, so that little is padding.
        order = sorted(range(len(units)), key=lambda i: units[i].n_tokens)
        scores: list[Any] = [None] * len(units)
        hidden: dict[int, list[Any]] = {layer: [None] * len(units) for layer in layers}
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            reading = self._forward([units[i] for i in batch], layers, packed=self.packing_ == "packed")
            ends = np.cumsum([len(units[i].options) for i in batch])[:-1]
            for i, part in zip(batch, np.split(reading.scores, ends), strict=True):
                scores[i] = part
            for layer, rows in reading.hidden.items():
                with np.errstate(over="ignore"):
                    narrow = rows.astype(np.float16)
                if not np.isfinite(narrow).all():
                    raise InputError(
                        f"layers: the activations of layer {layer} are not finite in float16; leave it out"
                    )
                for i, part in zip(batch, np.split(narrow, ends), strict=True):
                    hidden[layer][i] = part
        if self.packing_ == "rows":
            ends = np.cumsum([len(pack.options) for pack in packs])[:-1]
            return np.split(np.concatenate(scores), ends), {
                layer: np.split(np.concatenate(rows), ends) for layer, rows in hidden.items()
            }
        return scores, hidden

    def _forward(
        self, packs: list[_Pack], layers: tuple[int, ...], *, packed: bool, whole_head: bool = False
    ) -> _Reading:
        """Read a row for each pack; with ``packed`` its options see the prompt and themselves."""
        import torch

        letters = self.packing_ == "letters"
        rows = [_Row(pack, keep_last=bool(layers), prompt_only=letters) for pack in packs]
        width = max(len(row.tokens) for row in rows)
        device = self.model.get_input_embeddings().weight.device
        tokens = torch.full((len(rows), width), self._padding, dtype=torch.int64)
        segments = torch.full((len(rows), width), -1, dtype=torch.int64)
        positions = torch.zeros((len(rows), width), dtype=torch.int64)
        sources: list[int] = []
        slots: list[int] = []
        targets: list[int] = []
        options: list[int] = []
        lasts: list[int] = []
        n_options = 0
        for i, row in enumerate(rows):
            n = len(row.tokens)
            tokens[i, :n], segments[i, :n], positions[i, :n] = map(
                torch.tensor, (row.tokens, row.segments, row.positions)
            )
            slots += [len(sources) + slot for slot in row.slots]
            sources += [i * width + source for source in row.sources]
            targets += row.targets
            options += [n_options + option for option in row.options]
            lasts += [i * width + last for last in row.lasts]
            n_options += len(row.lasts)
        inputs: dict[str, Any] = {"input_ids": tokens.to(device), "use_cache": False}
        if packed:
            inputs["attention_mask"] = _mask(segments, self.model.dtype).to(device)
            inputs["position_ids"] = positions.to(device)
        else:
            inputs["attention_mask"] = (segments >= 0).long().to(device)
        needed = torch.tensor(sources)
        shortened = not whole_head and self.head_ == "needed"
        with _taps(self.model, layers) as taps, _head_at(self.model, needed) if shortened else nullcontext():
            logits = self.model(**inputs).logits
        expected = (1, len(sources)) if shortened else tuple(tokens.shape)
        if tuple(logits.shape[:2]) != expected:
            raise InputError(f"model: gives logits of shape {tuple(logits.shape)}; must be {expected} by vocabulary")
        logits = logits.reshape(-1, logits.shape[-1])
        logits = (logits if shortened else logits[needed.to(logits.device)]).float()
        scores = logits[slots, targets]
        if not letters:
            scores = scores - torch.logsumexp(logits, dim=-1)[slots]
        hidden = {layer: taps[layer].flatten(0, 1) for layer in layers}
        return _Reading(
            np.bincount(options, weights=scores.double().cpu().numpy(), minlength=n_options),
            {
                layer: rows[torch.tensor(lasts, device=rows.device)].float().cpu().numpy()
                for layer, rows in hidden.items()
            },
            np.bincount(options, minlength=n_options),
            TOLERANCE.get(str(self.model.dtype), FLOAT32_TOLERANCE),
        )

    @property
    def _padding(self) -> int:
        """Any token will do where nothing is looked at."""
        return self.tokenizer.pad_token_id or 0

    def _key(self, packs: list[_Pack], alone: list[_Pack]) -> str:
        return cache_key(
            {
                "version": SCORER_VERSION,
                "model": _contents(self.model),
                "mode": self.mode,
                "length_norm": self.length_norm,
                "layers": self.layers,
                "packs": [[pack.prompt, pack.options] for pack in packs],
                "alone": [[pack.prompt, pack.options] for pack in alone],
            }
        )

    def _save(self, scores: ChoiceScores, path: Path) -> None:
        from safetensors.numpy import save_file

        arrays = {"logits": np.concatenate(scores.logits), "n_choices": np.array([len(row) for row in scores.logits])}
        arrays |= {f"hidden.{layer}": np.concatenate(rows) for layer, rows in scores.hidden.items()}
        how = {"packing": self.packing_, "packing_reason": self.packing_reason_, "head": self.head_}
        save_file(arrays, path, metadata=how)

    def _load(self, path: Path) -> ChoiceScores:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as stored:
                arrays = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
                how = stored.metadata()
        except SafetensorError as error:
            raise ValueError(f"{path}: is damaged") from error
        self.packing_, self.packing_reason_, self.head_ = how["packing"], how["packing_reason"], how["head"]
        ends = np.cumsum(arrays["n_choices"])[:-1]
        hidden = {layer: np.split(arrays[f"hidden.{layer}"], ends) for layer in self.layers}
        return ChoiceScores(np.split(arrays["logits"], ends), hidden)


LETTERS = string.ascii_uppercase
NOT_COMPUTED_WITH = ("_name_or_path", "architectures", "transformers_version")


@dataclass(frozen=True)
class _Pack:
    """Token ids of a prompt and of what may follow it."""

    prompt: list[int]
    options: list[list[int]]

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(option) for option in self.options])

    @property
    def longest(self) -> int:
        return len(self.prompt) + max(map(len, self.options))

    @property
    def n_tokens(self) -> int:
        return len(self.prompt) + sum(map(len, self.options))

    def rows(self) -> list[_Pack]:
        return [_Pack(self.prompt, [option]) for option in self.options]


class _Row:
    """A pack as one row of tokens, and where in it the logits of which tokens are found.

    ``segments`` are 0 in the prompt and count the options from 1. The logits at ``sources[slots[t]]`` are those of
    token ``targets[t]``, which belongs to option ``options[t]``; ``lasts`` is where each option's activation is taken.
    """

    def __init__(self, pack: _Pack, *, keep_last: bool, prompt_only: bool) -> None:
        n_prompt = len(pack.prompt)
        self.tokens = list(pack.prompt)
        self.segments = [0] * n_prompt
        self.positions = list(range(n_prompt))
        self.sources = [n_prompt - 1]
        self.slots: list[int] = []
        self.targets: list[int] = []
        self.options: list[int] = []
        self.lasts: list[int] = []
        for number, option in enumerate(pack.options):
            # Nothing follows the last token of an option, so it is read only for its activation.
            kept = [] if prompt_only else option if keep_last else option[:-1]
            start = len(self.tokens)
            self.slots += [0, *range(len(self.sources), len(self.sources) + len(option) - 1)]
            self.sources += range(start, start + len(option) - 1)
            self.targets += option
            self.options += [number] * len(option)
            self.tokens += kept
            self.segments += [number + 1] * len(kept)
            self.positions += range(n_prompt, n_prompt + len(kept))
            self.lasts.append(len(self.tokens) - 1 if kept else n_prompt - 1)


@dataclass(frozen=True)
class _Reading:
    """Of all options of some rows: scores, activations of shape (n_options, d) by layer, and numbers of tokens."""

    scores: np.ndarray
    hidden: dict[int, np.ndarray]
    n_tokens: np.ndarray
    tolerance: float


def _difference(tried: _Reading | str, truth: _Reading) -> str:
    """What is wrong with what was tried; empty if nothing is."""
    if isinstance(tried, str):
        return tried
    apart = float(np.max(np.abs(tried.scores - truth.scores) / truth.n_tokens))
    if not apart <= truth.tolerance:
        return f"its scores would be off by up to {apart:.2g} nats a token"
    for layer, rows in truth.hidden.items():
        apart = float(np.max(np.abs(tried.hidden[layer] - rows)) / max(1.0, float(np.max(np.abs(rows)))))
        if not apart <= truth.tolerance:
            return f"its activations in layer {layer} would be off by {apart:.2g} of the largest"
    return ""


def _mask(segments: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask of shape (rows, 1, n, n): a token sees what is before it in the prompt and in its own option."""
    import torch

    seen = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])
    seen &= torch.ones(segments.shape[1], segments.shape[1], dtype=torch.bool).tril()
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[:, None]


@contextmanager
def _head_at(model: Any, flat: torch.Tensor) -> Iterator[None]:
    """Let the language-model head read these positions of the flattened batch alone.

    What the model does to its logits afterwards (scales, caps) it does to these.
    """

    def gather(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0].flatten(0, 1)[flat.to(args[0].device)][None], *args[1:])

    head = model.get_output_embeddings()
    if head is None:
        raise ValueError("the model has no output embeddings")
    handle = head.register_forward_pre_hook(gather)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _taps(model: Any, layers: tuple[int, ...]) -> Iterator[Any]:
    if not layers:
        yield {}
        return
    from practicum.toolbox.taps import Taps

    with Taps(model, layers) as taps:
        yield taps


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Keep dropout out."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _told_by_contents(model: Any) -> bool:
    """Whether configuration and weights, all of them in memory, say everything about what the model computes."""
    hooks = (
        hook
        for module in model.modules()
        for hook in [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        # Those of transformers itself only read, and some stay for good.
        if not (getattr(hook, "__module__", None) or "").startswith("transformers.")
    )
    adapted = any(hasattr(module, "base_layer") or hasattr(module, "peft_config") for module in model.modules())
    return not adapted and not any(hooks) and not any(weights.is_meta for weights in model.state_dict().values())


def _contents(model: Any) -> dict[str, Any]:
    """Configuration, fingerprint and a sum of the bits of every weight, of which the fingerprint has seen a few."""
    import torch

    from practicum.toolbox.taps import fingerprint

    whole_numbers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = {
        name: int(weights.view(whole_numbers[weights.element_size()]).sum(dtype=torch.int64))
        for name, weights in model.state_dict().items()
    }
    config = {key: str(value) for key, value in model.config.to_dict().items() if key not in NOT_COMPUTED_WITH}
    return {"class": type(model).__name__, "config": config, "fingerprint": fingerprint(model), "bits": sums}


def _require_layers(model: Any, layers: Sequence[int]) -> tuple[int, ...]:
    chosen = tuple(layers)
    if not chosen:
        return ()
    from practicum.toolbox.taps import n_layers

    n = n_layers(model)
    for layer in chosen:
        if isinstance(layer, bool) or not isinstance(layer, int | np.integer) or not 0 <= layer <= n:
            raise InputError(f"layers={layers!r}: {layer!r} is no layer; must be from 0 to {n}")
    return tuple(dict.fromkeys(int(layer) for layer in chosen))


def with_letters(question: MCQuestion) -> str:
    """Write a question with its options below it, each behind its letter."""
    listed = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, question.choices, strict=False)]
    return "\n".join([question.question, *listed])


def _n_shared(one: list[int], other: list[int]) -> int:
    """How many tokens the two begin with in common."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
