"""Fine-tuning a model to say how sure it is, and reading out what it says."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from practicum.language.confidence.format import ConfidenceFormat
from practicum.language.confidence.generation import Decoded, decode, step, stop_ids
from practicum.language.confidence.items import ConfItem, LabeledItem
from practicum.language.confidence.labels import Match, matches
from practicum.toolbox.errors import InputError
from practicum.toolbox.taps import decoder_blocks
from practicum.toolbox.trunk import Forward, FrozenTrunk, TokenRow, usable_trunk

Aggregate = Literal["product", "min", "reasoning", "evidence", "family"]
AGGREGATES = ("product", "min", "reasoning", "evidence", "family")
AGAIN = "\nLet me check this again.\n"
IGNORED = -100
LARGEST_GRADIENT = 1.0

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ConfResult:
    r"""What the model answered and how sure it said to be.

    Attributes
    ----------
    answers : list of str
        Shape (n_items,).
    confidence : array of shape (n_items,), float64
        From 0 to 1; nan where the model's words could not be read (greedy read-out only).
    evidence, reasoning : array of shape (n_items,), float64, or None
        The two parts, in the decomposed mode.
    text : list of str
        The completions, shape (n_items,); with the expected read-out, the most likely levels.
    n_unparsable : int
        Items whose words could not be read.
    n_rethinks : int
        Answers that were thought over.

    Examples
    --------
    >>> result = ConfResult(["4"], np.array([0.75]), None, None, ["4\nConfidence: 7"])
    >>> result.correct([ConfItem("What is 2 + 2?", "4")])
    array([ True])
    """

    answers: list[str]
    confidence: Array
    evidence: Array | None
    reasoning: Array | None
    text: list[str]
    n_unparsable: int = 0
    n_rethinks: int = 0

    def correct(self, items: Sequence[ConfItem], match: Match = "exact") -> NDArray[np.bool_]:
        """Which answers are right.

        Parameters
        ----------
        items : sequence of ConfItem
            Those that were predicted, shape (n_items,).
        match : {"exact", "number"} or callable
            As in `ConfidenceLabeler`; answers chosen among choices must be the same text.

        Returns
        -------
        array of shape (n_items,), bool
        """
        if len(items) != len(self.answers):
            raise InputError(f"items must be the {len(self.answers)} that were predicted; got {len(items)}")
        return np.array(
            [
                answer == item.answer if item.choices is not None else matches(answer, item.answer, match)
                for answer, item in zip(self.answers, items, strict=True)
            ]
        )


@dataclass
class _Example:
    """A training text: what is read, and which of the next tokens are trained."""

    row: TokenRow
    targets: list[int]
    stated: list[int] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)


class VerbalConfidence:
    """A language model that says how sure it is, by LoRA on its own answers.

    The loss is the cross-entropy of the confidence tokens alone (and of their tags, where there are any), on texts
    with the model's own answers, as in [1]_. With ``ConfidenceFormat("decomposed")`` the model states two numbers, how
    sure it is to have found the evidence and how sure of its reasoning given that evidence [2]_, and their product is
    its confidence. How [2]_ puts the two together is not public; the product is our choice, since the labels of
    `ConfidenceLabeler` multiply to the share of right answers.

    Where the adapter leaves the lower blocks alone, their output is computed once for every text (`FrozenTrunk`).

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Any causal language model. While an adapter is attached its layers are wrapped, its weights are not changed;
        `unload` takes the adapter off.
    tokenizer : transformers.PreTrainedTokenizerBase
    format : ConfidenceFormat, optional
    lora : peft.LoraConfig, optional
        By default `linear_lora`: rank 8 on all linear layers of all blocks.
    answer_weight : float
        Weight of a second loss on the tokens of the answer, which keeps the answers as they are. 0 as in the paper.
    retain : {None, "kl"}
        The second loss: the cross-entropy of the model's own answer, or the divergence from what the model without
        the adapter says.
    lr : float
        Of AdamW, the same in every step.
    epochs, batch_size : int
    adapter_name : str, optional
        Needed where ``model`` has been wrapped by PEFT already: the new adapter is added under this name.
    max_new_tokens : int
        Length of answers where there are no choices.
    trunk : FrozenTrunk, optional
        One to share between adapters that are trained from the same block on. By default one is made where the
        adapter leaves lower blocks alone.
    random_state : int or None

    Attributes
    ----------
    model_ : peft.PeftModel
    losses_ : list of float
        Mean loss of each epoch.
    trunk_ : FrozenTrunk or None

    Raises
    ------
    InputError
        A ValueError: on an option out of range, or a model that is wrapped already.

    References
    ----------
    .. [1] C. Jang et al., "Verbalized Confidence Triggers Self-Verification", arXiv:2506.03723.
    .. [2] C. Jang et al., "Confidence is Not Universal: Task-Dependent Calibration and Emergent Behavior in LLMs",
       ICML 2026.

    Examples
    --------
    >>> from practicum.language.confidence.tiny import tiny_model
    >>> model, tokenizer = tiny_model()
    >>> items = [ConfItem(f"What is {n} + 1?", str(n + 1), choices=[str(n), str(n + 1)]) for n in range(8)]
    >>> labeled = [LabeledItem(item, p_hat=0.7, evidence=1.0, reasoning=0.7, answer=item.answer) for item in items[:6]]
    >>> labeled.append(LabeledItem(items[6], p_hat=0.2, evidence=1.0, reasoning=0.2, answer="6"))
    >>> verbal = VerbalConfidence(model, tokenizer, ConfidenceFormat("decomposed"), random_state=0).fit(labeled)
    >>> result = verbal.predict(items)
    >>> result.confidence.shape, bool(np.allclose(result.confidence, result.evidence * result.reasoning))
    ((8,), True)
    >>> verbal.unload() is model
    True
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        format: ConfidenceFormat | None = None,
        *,
        lora: LoraConfig | None = None,
        answer_weight: float = 0.0,
        retain: Literal["kl"] | None = None,
        lr: float = 3e-4,
        epochs: int = 2,
        batch_size: int = 16,
        adapter_name: str | None = None,
        max_new_tokens: int = 64,
        trunk: FrozenTrunk | None = None,
        random_state: int | None = None,
    ) -> None:
        for name, value in (("epochs", epochs), ("batch_size", batch_size), ("max_new_tokens", max_new_tokens)):
            if value < 1:
                raise InputError(f"{name} must be at least 1; got {value}")
        if not lr > 0:
            raise InputError(f"lr must be above 0; got {lr}")
        if not answer_weight >= 0:
            raise InputError(f"answer_weight must be at least 0; got {answer_weight}")
        if retain not in (None, "kl"):
            raise InputError(f"retain must be None or 'kl'; got {retain!r}")
        if retain == "kl" and answer_weight == 0:
            raise InputError("retain='kl' needs an answer_weight above 0; got 0")
        if _is_wrapped(model) and adapter_name is None:
            raise InputError(
                "model is wrapped by PEFT already; give adapter_name to add an adapter to it, or unload it"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.format = (format or ConfidenceFormat()).suited(tokenizer)
        self.lora = lora
        self.answer_weight = answer_weight
        self.retain = retain
        self.lr = lr
        self.epochs = epochs
        self.batch_size = batch_size
        self.adapter_name = adapter_name
        self.max_new_tokens = max_new_tokens
        self.random_state = random_state
        self.model_ = model
        self.trunk = trunk
        self.trunk_ = trunk
        self._flags: list[tuple[nn.Parameter, bool]] = []

    def fit(self, labeled: Sequence[LabeledItem]) -> VerbalConfidence:
        """Train an adapter on labelled items.

        Parameters
        ----------
        labeled : sequence of LabeledItem
            Shape (n_items,).

        Returns
        -------
        VerbalConfidence
            Itself.

        Raises
        ------
        InputError
            A ValueError: without items, or in the decomposed mode with a context whose evidence is not known.
        """
        labeled = list(labeled)
        if not labeled:
            raise InputError("labeled must have one item at least; got none")
        examples = [self._example(one) for one in labeled]
        if len({tuple(e.targets[i] for i in e.stated) for e in examples}) == 1:
            warnings.warn("all labels are the same level: a constant is learned", stacklevel=2)
        self.unload()
        seed = 0 if self.random_state is None else self.random_state
        if self.random_state is None:
            seed = int(np.random.default_rng().integers(2**31))
        # PEFT draws the adapter, and its dropout, from torch's own generator.
        with torch.random.fork_rng(devices=_cuda_devices(self.model)):
            torch.manual_seed(seed)
            try:
                self._attach()
                self.trunk_ = usable_trunk(self.model_, self.trunk, examples[0].row)
                self._train(examples, torch.Generator().manual_seed(seed))
            except BaseException:
                self.unload()
                raise
        self.model_.eval()
        return self

    def _attach(self) -> None:
        self._flags = [(p, p.requires_grad) for p in self.model.parameters()]
        config = self.lora or linear_lora(self.model)
        name = self.adapter_name or "default"
        if isinstance(self.model, PeftModel):
            self.model.add_adapter(name, config)
            self.model.set_adapter(name)
            self.model_ = self.model
        else:
            self.model_ = get_peft_model(self.model, config, adapter_name=name)
        self.model_.eval()
        for module_name, module in self.model_.named_modules():
            if module_name.endswith("lora_dropout") or ".lora_dropout." in module_name:
                module.train()

    def _train(self, examples: Sequence[_Example], generator: torch.Generator) -> None:
        forward = self._forward()
        if self.trunk_ is not None:
            self.trunk_.fill([example.row for example in examples])
        parameters = [p for p in self.model_.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=self.lr, weight_decay=0.0)
        self.losses_ = []
        with torch.enable_grad():
            for _ in range(self.epochs):
                total = 0.0
                order = torch.randperm(len(examples), generator=generator).tolist()
                for start in range(0, len(order), self.batch_size):
                    batch = [examples[i] for i in order[start : start + self.batch_size]]
                    loss = self.batch_loss(forward, batch)
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(parameters, LARGEST_GRADIENT)
                    optimizer.step()
                    total += float(loss.detach()) * len(batch)
                self.losses_.append(total / len(examples))

    def batch_loss(self, forward: Forward, batch: Sequence[_Example]) -> Tensor:
        """The loss of one batch, with its gradient.

        Parameters
        ----------
        forward : Forward
            On ``model_``.
        batch : sequence of example
            As `examples` gives them, shape (n,).

        Returns
        -------
        torch.Tensor of shape (), float32
        """
        rows = [example.row for example in batch]
        wanted = [e.stated + (e.answered if self.answer_weight else []) for e in batch]
        keep = max(len(e.row.ids) - min(places) + 1 for e, places in zip(batch, wanted, strict=True))
        logits = forward.logits(rows, keep)
        loss = _cross_entropy(logits, batch, [e.stated for e in batch])
        if not self.answer_weight:
            return loss
        answered = [e.answered for e in batch]
        if self.retain is None:
            return loss + self.answer_weight * _cross_entropy(logits, batch, answered)
        with torch.no_grad(), self.model_.disable_adapter():
            base = _gather(forward.logits(rows, keep), batch, answered)[0].log_softmax(-1)
        now = _gather(logits, batch, answered)[0].log_softmax(-1)
        return loss + self.answer_weight * nn.functional.kl_div(now, base, log_target=True, reduction="batchmean")

    def examples(self, labeled: Sequence[LabeledItem]) -> list[_Example]:
        """The training texts as tokens.

        Parameters
        ----------
        labeled : sequence of LabeledItem
            Shape (n_items,).

        Returns
        -------
        list of example
            Shape (n_items,).
        """
        return [self._example(one) for one in labeled]

    def _example(self, labeled: LabeledItem) -> _Example:
        ids = self.format.prompt_ids(labeled.item, self.tokenizer)
        stated: list[int] = []
        answered: list[int] = []
        for piece in self.format.segments(labeled, self.tokenizer):
            tokens = self.tokenizer(piece.text, add_special_tokens=False)["input_ids"]
            places = range(len(ids), len(ids) + len(tokens))
            if piece.role == "answer":
                answered += places
            elif piece.role in ("level", "tag"):
                stated += places
            ids = ids + tokens
        # What is read ends before the last token that is trained.
        return _Example(TokenRow(tuple(ids[: stated[-1]])), ids, stated, answered)

    def to_dataset(self, labeled: Sequence[LabeledItem]) -> list[dict[str, list[int]]]:
        """The training texts for TRL's ``SFTTrainer`` or transformers' ``Trainer``.

        Parameters
        ----------
        labeled : sequence of LabeledItem
            Shape (n_items,).

        Returns
        -------
        list of dict
            ``input_ids`` and ``labels``, each of shape (n_tokens,); labels are -100 but for the confidence tokens, and
            for those of the answer where ``answer_weight`` is above 0 (a host's loss gives both the same weight).
            ``datasets.Dataset.from_list`` makes a data set of it.

        Examples
        --------
        >>> from practicum.language.confidence.tiny import tiny_model
        >>> labeled = LabeledItem(ConfItem("What is 2 + 2?", "4"), p_hat=0.7, evidence=1.0, reasoning=0.7, answer="5")
        >>> row = VerbalConfidence(*tiny_model()).to_dataset([labeled])[0]
        >>> len(row["input_ids"]) == len(row["labels"]), sum(label != -100 for label in row["labels"])
        (True, 1)
        """
        if not labeled:
            raise InputError("labeled must have one item at least; got none")
        rows = []
        for example in self.examples(labeled):
            labels = [IGNORED] * len(example.targets)
            for place in example.stated + (example.answered if self.answer_weight else []):
                labels[place] = example.targets[place]
            rows.append({"input_ids": list(example.targets), "labels": labels})
        return rows

    def unload(self) -> Any:
        """Take the adapter off.

        Returns
        -------
        transformers.PreTrainedModel
            The model that was given, as it was.
        """
        if self.model_ is not self.model:
            self.model_.unload()
        elif isinstance(self.model, PeftModel) and self.adapter_name in self.model.peft_config and self._flags:
            self.model.delete_adapter(self.adapter_name)
        for parameter, flag in self._flags:
            parameter.requires_grad_(flag)
        self.model_, self.trunk_, self._flags = self.model, self.trunk, []
        return self.model

    def predict(
        self,
        items: Sequence[ConfItem],
        *,
        read_out: Literal["expected", "greedy"] = "expected",
        aggregate: Aggregate = "product",
        max_rethinks: int = 0,
        threshold: float = 0.5,
    ) -> ConfResult:
        """Answer questions and say how sure the answers are.

        Where there are choices the answer is the likeliest of them, otherwise it is written greedily. Before `fit`
        this is what the model says untrained.

        Parameters
        ----------
        items : sequence of ConfItem
            Shape (n_items,).
        read_out : {"expected", "greedy"}
            The mean over the levels by the model's probabilities of them, or the words that the model writes, which
            may say nothing that can be read.
        aggregate : {"product", "min", "reasoning", "evidence", "family"}
            What the two parts make; ``"family"`` takes the reasoning without a context and the evidence with one.
        max_rethinks : int
            How often a question is answered once more while the confidence is below ``threshold``, after "Let me
            check this again."; the surer answer is kept [1]_.
        threshold : float

        Returns
        -------
        ConfResult

        Raises
        ------
        InputError
            A ValueError: without items, or on an option out of range.
        """
        items = list(items)
        if not items:
            raise InputError("items must have one item at least; got none")
        if read_out not in ("expected", "greedy"):
            raise InputError(f"read_out must be 'expected' or 'greedy'; got {read_out!r}")
        if aggregate not in AGGREGATES:
            raise InputError(f"aggregate must be one of {', '.join(AGGREGATES)}; got {aggregate!r}")
        if max_rethinks < 0:
            raise InputError(f"max_rethinks must be at least 0; got {max_rethinks}")
        prompts = [self.format.prompt_ids(item, self.tokenizer) for item in items]
        found = self._said(items, prompts, read_out, aggregate)
        n_rethinks = 0
        for _ in range(max_rethinks):
            unsure = [i for i, said in enumerate(found) if said.confidence < threshold]
            if not unsure:
                break
            n_rethinks += len(unsure)
            again = self.tokenizer(self._again(), add_special_tokens=False)["input_ids"]
            for i in unsure:
                prompts[i] = prompts[i] + self.format.answer_ids(found[i].answer, self.tokenizer) + again
            anew = self._said([items[i] for i in unsure], [prompts[i] for i in unsure], read_out, aggregate)
            for i, said in zip(unsure, anew, strict=True):
                if said.confidence > found[i].confidence:
                    found[i] = said
        decomposed = self.format.mode == "decomposed"
        return ConfResult(
            answers=[said.answer for said in found],
            confidence=np.array([said.confidence for said in found]),
            evidence=np.array([said.parts[0] for said in found]) if decomposed else None,
            reasoning=np.array([said.parts[1] for said in found]) if decomposed else None,
            text=[said.text for said in found],
            n_unparsable=sum(bool(np.isnan(said.confidence)) for said in found),
            n_rethinks=n_rethinks,
        )

    def _again(self) -> str:
        if self.format.uses_chat(self.tokenizer):
            return AGAIN
        # The line with which the template asks for an answer.
        template = self.format.template or "Answer:"
        return AGAIN + template.rpartition("\n")[2]

    def _said(
        self, items: Sequence[ConfItem], prompts: Sequence[list[int]], read_out: str, aggregate: str
    ) -> list[_Said]:
        """Answers with their confidence, of items whose prompts are given."""
        answers, prefixes, decoded = self.answer(items, prompts)
        if read_out == "greedy":
            stated = [self._written(answer, prefix) for answer, prefix in zip(answers, prefixes, strict=True)]
        else:
            stated = self._expected(answers, prefixes, decoded)
        return [
            _Said(answer, _confidence(parts, item, aggregate), parts, text)
            for answer, item, (parts, text) in zip(answers, items, stated, strict=True)
        ]

    def answer(
        self, items: Sequence[ConfItem], prompts: Sequence[list[int]] | None = None
    ) -> tuple[list[str], list[list[int]], Decoded | None]:
        """Answer questions.

        Parameters
        ----------
        items : sequence of ConfItem
            Shape (n_items,).
        prompts : sequence of list of int, optional
            Token ids in place of the items' own prompts.

        Returns
        -------
        answers : list of str
            Shape (n_items,).
        prefixes : list of list of int
            Token ids of the prompts with the answers, shape (n_items,).
        decoded : Decoded or None
            With its cache, where all answers were written together.
        """
        if prompts is None:
            prompts = [self.format.prompt_ids(item, self.tokenizer) for item in items]
        answers, prefixes = [""] * len(items), [[0]] * len(items)
        closed = [i for i, item in enumerate(items) if item.choices is not None]
        if closed:
            options = [[self.format.answer_ids(c, self.tokenizer) for c in items[i].choices or ()] for i in closed]
            scores = self._forward().continuation_log_probs([prompts[i] for i in closed], options)
            for i, of_item, score in zip(closed, options, scores, strict=True):
                best = int(score.argmax())
                answers[i] = (items[i].choices or ())[best]
                prefixes[i] = prompts[i] + of_item[best]
        rest = [i for i, item in enumerate(items) if item.choices is None]
        decoded = None
        for start in range(0, len(rest), self.batch_size):
            chosen = rest[start : start + self.batch_size]
            stop = stop_ids(self.model_, self.tokenizer, at_newline=not self.format.uses_chat(self.tokenizer))
            decoded = decode(
                self.model_,
                [prompts[i] for i in chosen],
                max_new_tokens=self.max_new_tokens,
                temperature=0.0,
                stop=stop,
            )
            texts = self.tokenizer.batch_decode(decoded.ids, skip_special_tokens=True)
            for i, ids, text in zip(chosen, decoded.ids, texts, strict=True):
                answers[i], prefixes[i] = text.strip(), prompts[i] + ids
        return answers, prefixes, decoded if len(items) == len(rest) <= self.batch_size else None

    def _expected(
        self, answers: Sequence[str], prefixes: Sequence[list[int]], decoded: Decoded | None
    ) -> list[tuple[list[float], str]]:
        values = self.format.level_values
        texts = [self.format.answer_text(answer, self.tokenizer) for answer in answers]
        rows = [list(prefix) for prefix in prefixes]
        parts: list[list[float]] = [[] for _ in answers]
        level_ids = self.format.level_ids(self.tokenizer)
        before: list[list[int]] = [[] for _ in answers]
        for name in self.format.names:
            ask = self.format.asks(name)
            asked = self.tokenizer(ask.text, add_special_tokens=False)["input_ids"]
            rows = [row + asked for row in rows]
            before = [tokens + asked for tokens in before]
            if decoded is not None and self.format.levels == "digit":
                probabilities = self._levels_on_cache(decoded, before, level_ids)
                before = [[] for _ in answers]
            else:
                probabilities = self.level_probabilities(rows)
            closing = self.format.closes(name)
            closes = [t for piece in closing for t in self.tokenizer(piece.text, add_special_tokens=False)["input_ids"]]
            for i, of_item in enumerate(probabilities):
                level = int(of_item.argmax())
                parts[i].append(float(of_item @ values))
                texts[i] += ask.text + self.format.level_texts[level] + "".join(piece.text for piece in closing)
                rows[i] = rows[i] + level_ids[level] + closes
                before[i] = before[i] + level_ids[level] + closes
        return list(zip(parts, texts, strict=True))

    def level_probabilities(self, prefixes: Sequence[Sequence[int]]) -> Array:
        """Probabilities of the levels after token ids that end with the request for one.

        Parameters
        ----------
        prefixes : sequence of sequence of int
            Shape (n_items,).

        Returns
        -------
        array of shape (n_items, n_levels), float64
            Rows sum to 1.
        """
        level_ids = self.format.level_ids(self.tokenizer)
        forward = self._forward()
        if all(len(ids) == 1 for ids in level_ids):
            log_probs = forward.last_log_probs([TokenRow(tuple(prefix)) for prefix in prefixes])
            scores = log_probs[:, [ids[0] for ids in level_ids]]
        else:
            scores = torch.stack(forward.continuation_log_probs(prefixes, [level_ids] * len(prefixes)))
        return scores.double().softmax(-1).cpu().numpy()

    @torch.no_grad()
    def _levels_on_cache(
        self, decoded: Decoded, tokens: Sequence[Sequence[int]], level_ids: Sequence[Sequence[int]]
    ) -> Array:
        """The same, going on from the cache of the answers by as many tokens in every row."""
        new = torch.tensor([list(t) for t in tokens], device=decoded.mask.device)
        decoded.mask = torch.cat([decoded.mask, torch.ones_like(new)], dim=1)
        ids = torch.cat([decoded.last, new], dim=1)
        logits = step(self.model_, ids, decoded.mask, decoded.cache)[:, -1]
        decoded.last = new[:, :0]
        scores = logits[:, [ids[0] for ids in level_ids]]
        return scores.double().softmax(-1).cpu().numpy()

    def _written(self, answer: str, prefix: Sequence[int]) -> tuple[list[float], str]:
        """What the model writes itself after each request for a level, and what of it can be read."""
        text = self.format.answer_text(answer, self.tokenizer)
        row = list(prefix)
        longest = max(map(len, self.format.level_ids(self.tokenizer)))
        for name in self.format.names:
            ask = self.format.asks(name).text
            closing = "".join(piece.text for piece in self.format.closes(name))
            row += self.tokenizer(ask, add_special_tokens=False)["input_ids"]
            length = longest + len(self.tokenizer(closing, add_special_tokens=False)["input_ids"])
            # An untrained model may go on: "75" is not the digit 7.
            ahead = 0 if closing or self.model_ is not self.model else 1
            ids = decode(self.model_, [row], max_new_tokens=length + ahead, temperature=0.0).ids[0]
            said = self.tokenizer.decode(ids, skip_special_tokens=True)
            stated = re.match(rf"\s*\d+ ?%?(?:{re.escape(closing)})?", said)
            text += ask + (stated.group(0) if stated else said)
            row += self.tokenizer(stated.group(0) if stated else said, add_special_tokens=False)["input_ids"]
        read = self.format.parse(text)
        if read is None:
            return [float("nan")] * len(self.format.names), text
        return [read[name] for name in self.format.names], text

    def _forward(self) -> Forward:
        return Forward(self.model_, self.trunk_, self.batch_size)

    @contextmanager
    def disabled(self) -> Iterator[Any]:
        """Within it the model answers as without the adapter.

        Yields
        ------
        model
            The model to call.
        """
        if isinstance(self.model_, PeftModel):
            with self.model_.disable_adapter():
                yield self.model_
        else:
            yield self.model_


@dataclass(frozen=True)
class _Said:
    answer: str
    confidence: float
    parts: list[float]
    text: str


def _confidence(parts: Sequence[float], item: ConfItem, aggregate: str) -> float:
    if len(parts) == 1:
        return parts[0]
    evidence, reasoning = parts
    if aggregate == "family":
        aggregate = "reasoning" if item.context is None else "evidence"
    return {"product": evidence * reasoning, "min": min(parts), "evidence": evidence, "reasoning": reasoning}[aggregate]


def linear_lora(model: Any, n_blocks: int | None = None, r: int = 8, **options: Any) -> LoraConfig:
    """LoRA on all linear layers of the upper blocks.

    PEFT's own ``layers_to_transform`` cannot be given together with ``target_modules="all-linear"``; here the layers
    are named one by one, whatever the architecture calls them.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    n_blocks : int, optional
        Number of blocks, counted from the last; by default all.
    r : int
        Rank. ``lora_alpha`` is twice that.
    **options
        For `peft.LoraConfig`.

    Returns
    -------
    peft.LoraConfig

    Raises
    ------
    InputError
        A ValueError: when there are fewer blocks.

    Examples
    --------
    The factors of a weight of shape (n, m) have shapes (r, m) and (n, r).

    >>> from practicum.language.confidence.tiny import tiny_model
    >>> config = linear_lora(tiny_model()[0], n_blocks=1)
    >>> sorted(config.target_modules)[0], len(config.target_modules)
    ('model.layers.2.mlp.down_proj', 7)
    """
    blocks = decoder_blocks(model)
    chosen = len(blocks) if n_blocks is None else n_blocks
    if not 1 <= chosen <= len(blocks):
        raise InputError(f"n_blocks must be from 1 to {len(blocks)}; got {n_blocks}")
    within = {id(module) for block in blocks[len(blocks) - chosen :] for module in block.modules()}
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    names = [
        name.removesuffix(".base_layer")
        for name, module in base.named_modules()
        if id(module) in within and type(module) in (nn.Linear, Conv1D) and ".lora_" not in name
    ]
    settings: dict[str, Any] = {"r": r, "lora_alpha": 2 * r, "target_modules": names, "task_type": "CAUSAL_LM"}
    if any(type(module) is Conv1D for module in base.modules()):
        settings["fan_in_fan_out"] = True
    return LoraConfig(**{**settings, **options})


def _is_wrapped(model: Any) -> bool:
    return isinstance(model, PeftModel) or any(isinstance(module, BaseTunerLayer) for module in model.modules())


def _cuda_devices(model: Any) -> list[int]:
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})


def _gather(logits: Tensor, batch: Sequence[_Example], places: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """The logits that predict the tokens at these places, and the tokens; (n_tokens, n_vocabulary) and (n_tokens,)."""
    keep = logits.shape[1]
    rows = [row for row, of_row in enumerate(places) for _ in of_row]
    # The token at place p follows the one at p - 1, and the last position kept is that of the last token read.
    columns = [keep - len(e.row.ids) + p - 1 for e, of_row in zip(batch, places, strict=True) for p in of_row]
    targets = [e.targets[p] for e, of_row in zip(batch, places, strict=True) for p in of_row]
    return logits[rows, columns], torch.tensor(targets, device=logits.device)


def _cross_entropy(logits: Tensor, batch: Sequence[_Example], places: Sequence[Sequence[int]]) -> Tensor:
    return nn.functional.cross_entropy(*_gather(logits, batch, places))
