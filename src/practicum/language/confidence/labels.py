"""How sure the model ought to be: from its own answers, with the whole context and with the evidence alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.isotonic import IsotonicRegression

from practicum.language.confidence.format import ConfidenceFormat
from practicum.language.confidence.generation import decode, stop_ids
from practicum.language.confidence.items import ConfItem, LabeledItem
from practicum.toolbox.errors import InputError
from practicum.toolbox.trunk import Forward, TokenRow

Match = Literal["exact", "number"] | Callable[[str, str], bool]
QUOTE = (
    "\nFirst quote the words of the text that hold the answer, then answer, in this form:\nEvidence: ...\nAnswer: ..."
)
OVERLAP = 0.5
LARGEST_BATCH = 64


class ConfidenceLabeler:
    """Find for every question how often the model is right, and which part of the doubt is about the evidence.

    The share of right answers among the model's own is the label of [1]_: ``p_hat``. Here it is split [2]_. With the
    gold evidence alone as context the same model is right with the share ``r``, its confidence in reasoning; the rest
    is whether it finds the evidence, ``e = p_hat / r``, cut to at most 1, so that ``e * r`` is ``p_hat``. Without a
    context there is nothing to find: ``r = p_hat`` and ``e = 1``. [2]_ names the two parts only; that they are
    estimated in this way is our choice.

    Nothing is left out because its answer is wrong: labels of right answers alone say little.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Any causal language model, in inference mode.
    tokenizer : transformers.PreTrainedTokenizerBase
    format : ConfidenceFormat, optional
        Its prompt is used.
    n_samples : int
        K, answers per question.
    temperature : float
        Of the sampling.
    match : {"exact", "number"} or callable
        When an answer is right: the same text but for case, blanks and closing marks; the same last number; or
        ``match(answer, gold) -> bool``.
    exact : {"auto", True, False}
        Take the probability of the right answer in place of the share, which is its limit for many samples. ``"auto"``
        does so where there are choices. Without choices it is the probability of writing the answer and nothing else.
    evidence : {"ratio", "quote"}
        ``"quote"`` asks for a quotation with each answer and takes as ``e`` the share of samples whose quotation
        agrees with the gold evidence (F1 of words of at least 0.5).
    target : {"sampled", "greedy"}
        What the labels are about. A sampled answer is right less often than the most likely one; ``"greedy"`` maps
        the shares to how often the most likely answer is right, by isotonic regression over the given items.
    balance : {None, "uniform"}
        ``"uniform"`` draws, with replacement, as many items from every tenth of ``p_hat`` that has any.
    max_new_tokens : int
    batch_size : int
    random_state : int, numpy.random.Generator or None

    Attributes
    ----------
    n_undefined_ : int
        Items that are never right with the evidence alone: what was found cannot be told, and ``e`` is 1.

    Raises
    ------
    InputError
        A ValueError: on an option out of range, no items, or evidence that is missing.

    References
    ----------
    .. [1] C. Jang et al., "Verbalized Confidence Triggers Self-Verification", arXiv:2506.03723.
    .. [2] C. Jang et al., "Confidence is Not Universal: Task-Dependent Calibration and Emergent Behavior in LLMs",
       ICML 2026.

    Examples
    --------
    >>> from practicum.language.confidence.tiny import tiny_model
    >>> model, tokenizer = tiny_model()
    >>> item = ConfItem("What is 2 + 2?", "4", choices=["4", "5", "22"])
    >>> labeled = ConfidenceLabeler(model, tokenizer, random_state=0).label([item])[0]
    >>> np.shape(labeled.probabilities), labeled.evidence, labeled.reasoning == labeled.p_hat
    ((3,), 1.0, True)
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        format: ConfidenceFormat | None = None,
        n_samples: int = 10,
        temperature: float = 1.0,
        match: Match = "exact",
        exact: Literal["auto"] | bool = "auto",
        evidence: Literal["ratio", "quote"] = "ratio",
        target: Literal["sampled", "greedy"] = "sampled",
        balance: Literal["uniform"] | None = None,
        max_new_tokens: int = 64,
        batch_size: int = 16,
        random_state: int | np.random.Generator | None = None,
    ) -> None:
        for name, value in (("n_samples", n_samples), ("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
            if value < 1:
                raise InputError(f"{name} must be at least 1; got {value}")
        if not temperature > 0:
            raise InputError(f"temperature must be above 0; got {temperature}")
        for name, given, allowed in (
            ("exact", exact, ("auto", True, False)),
            ("evidence", evidence, ("ratio", "quote")),
            ("target", target, ("sampled", "greedy")),
            ("balance", balance, (None, "uniform")),
        ):
            if given not in allowed:
                raise InputError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {given!r}")
        if not callable(match) and match not in ("exact", "number"):
            raise InputError(f"match must be 'exact', 'number' or a callable; got {match!r}")
        self.model = model
        self.tokenizer = tokenizer
        self.format = format or ConfidenceFormat()
        self.n_samples = n_samples
        self.temperature = temperature
        self.match = match
        self.exact = exact
        self.evidence = evidence
        self.target = target
        self.balance = balance
        self.max_new_tokens = max_new_tokens
        self.batch_size = batch_size
        self.random_state = random_state

    def label(self, items: Sequence[ConfItem]) -> list[LabeledItem]:
        """Label the items.

        Parameters
        ----------
        items : sequence of ConfItem
            Shape (n_items,).

        Returns
        -------
        list of LabeledItem
            Shape (n_items,), in the same order but for ``balance``.
        """
        items = list(items)
        if not items:
            raise InputError("items must have one item at least; got none")
        rng = np.random.default_rng(self.random_state)
        whole = self._answers(items, [None] * len(items), rng)
        with_oracle = [i for i, item in enumerate(items) if _needs_oracle(item)]
        oracle = dict(
            zip(
                with_oracle,
                self._answers([items[i] for i in with_oracle], [items[i].evidence_text for i in with_oracle], rng),
                strict=True,
            )
        )
        if self.target == "greedy":
            self._to_greedy(items, whole, oracle)
        quoted = self._quoted(items, rng) if self.evidence == "quote" else {}
        self.n_undefined_ = 0
        labeled = []
        for i, (item, found) in enumerate(zip(items, whole, strict=True)):
            evidence, reasoning = self._parts(item, found["share"], oracle.get(i), quoted.get(i))
            labeled.append(
                LabeledItem(
                    item,
                    p_hat=found["share"],
                    evidence=evidence,
                    reasoning=reasoning,
                    answer=found["answer"],
                    samples=found["samples"],
                    probabilities=found["probabilities"],
                    greedy=found["greedy"],
                )
            )
        return balanced(labeled, rng) if self.balance == "uniform" else labeled

    def _parts(
        self, item: ConfItem, share: float, oracle: dict[str, Any] | None, quoted: float | None
    ) -> tuple[float | None, float | None]:
        """Return e and r of one item."""
        if item.context is None:
            return 1.0, share
        if item.evidence_text is None:
            return None, None
        reasoning = share if oracle is None else oracle["share"]
        if quoted is not None:
            return quoted, reasoning
        if reasoning == 0:
            self.n_undefined_ += 1
            return 1.0, 0.0
        return min(share / reasoning, 1.0), reasoning

    def _answers(
        self, items: Sequence[ConfItem], contexts: Sequence[str | None], rng: np.random.Generator
    ) -> list[dict[str, Any]]:
        """Share of right answers, samples and one answer of each item, in its context or the one given."""
        found: list[dict[str, Any]] = [{}] * len(items)
        prompts = [
            self.format.prompt_ids(item, self.tokenizer, context=context)
            for item, context in zip(items, contexts, strict=True)
        ]
        closed = [i for i, item in enumerate(items) if item.choices is not None]
        for i, probabilities in zip(
            closed, self.choice_probabilities([items[i] for i in closed], [prompts[i] for i in closed]), strict=True
        ):
            found[i] = self._closed(items[i], probabilities, rng)
        still_open = [i for i, item in enumerate(items) if item.choices is None]
        if still_open:
            for i, of_item in zip(
                still_open,
                self._open([items[i] for i in still_open], [prompts[i] for i in still_open], rng),
                strict=True,
            ):
                found[i] = of_item
        return found

    def choice_probabilities(
        self, items: Sequence[ConfItem], prompts: Sequence[Sequence[int]] | None = None
    ) -> list[NDArray[np.float64]]:
        """The model's probabilities of the choices, normalised over them.

        Parameters
        ----------
        items : sequence of ConfItem
            Shape (n_items,), with choices.
        prompts : sequence of sequence of int, optional
            Token ids to continue in place of the items' own prompts.

        Returns
        -------
        list of array of shape (n_choices,), float64
        """
        if not items:
            return []
        if prompts is None:
            prompts = [self.format.prompt_ids(item, self.tokenizer) for item in items]
        options = [[self.format.answer_ids(c, self.tokenizer) for c in item.choices or ()] for item in items]
        scores = Forward(self.model, batch_size=self.batch_size).continuation_log_probs(prompts, options)
        return [(s.double() / self.temperature).softmax(-1).cpu().numpy() for s in scores]

    def _closed(self, item: ConfItem, probabilities: NDArray[np.float64], rng: np.random.Generator) -> dict[str, Any]:
        choices = list(item.choices or ())
        greedy = choices[int(probabilities.argmax())]
        if self.exact is False:
            drawn = tuple(choices[i] for i in rng.choice(len(choices), size=self.n_samples, p=probabilities))
            share = sum(sample == item.answer for sample in drawn) / len(drawn)
            return {"share": share, "samples": drawn, "answer": drawn[0], "probabilities": (), "greedy": greedy}
        return {
            "share": float(probabilities[choices.index(item.answer)]),
            "samples": (),
            "answer": choices[int(rng.choice(len(choices), p=probabilities))],
            "probabilities": tuple(map(float, probabilities)),
            "greedy": greedy,
        }

    def _open(
        self, items: Sequence[ConfItem], prompts: Sequence[list[int]], rng: np.random.Generator
    ) -> list[dict[str, Any]]:
        stop = stop_ids(self.model, self.tokenizer, at_newline=not self.format.uses_chat(self.tokenizer))
        samples = self._sampled(prompts, 1 if self.exact is True else self.n_samples, stop, rng)
        greedy: Sequence[str | None] = [None] * len(items)
        if self.target == "greedy":
            greedy = [texts[0] for texts in self._sampled(prompts, 1, stop, None)]
        if self.exact is True:
            shares = self._written_probability(items, prompts, stop)
        else:
            shares = [
                sum(matches(text, item.answer, self.match) for text in texts) / len(texts)
                for item, texts in zip(items, samples, strict=True)
            ]
        return [
            {
                "share": share,
                "samples": () if self.exact is True else tuple(texts),
                "answer": texts[0],
                "probabilities": (),
                "greedy": likely,
            }
            for share, texts, likely in zip(shares, samples, greedy, strict=True)
        ]

    def _sampled(
        self, prompts: Sequence[list[int]], n_samples: int, stop: frozenset[int], rng: np.random.Generator | None
    ) -> list[list[str]]:
        """Texts of each prompt; the most likely one where there is no ``rng``."""
        generator = None
        if rng is not None:
            device = next(self.model.parameters()).device
            generator = torch.Generator(device).manual_seed(int(rng.integers(2**62)))
        found: list[list[str]] = [[]] * len(prompts)
        size = max(LARGEST_BATCH // n_samples, 1)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            decoded = decode(
                self.model,
                [prompts[i] for i in chosen],
                n_samples=n_samples,
                max_new_tokens=self.max_new_tokens,
                temperature=0.0 if rng is None else self.temperature,
                stop=stop,
                generator=generator,
            )
            texts = [text.strip() for text in self.tokenizer.batch_decode(decoded.ids, skip_special_tokens=True)]
            for place, i in enumerate(chosen):
                found[i] = texts[place * n_samples : (place + 1) * n_samples]
        return found

    def _written_probability(
        self, items: Sequence[ConfItem], prompts: Sequence[list[int]], stop: frozenset[int]
    ) -> list[float]:
        """Probability of writing the right answer and then ending, at the temperature 1."""
        if self.temperature != 1:
            raise InputError(
                f"exact=True needs temperature=1 for items without choices; got {self.temperature}: set exact=False"
            )
        forward = Forward(self.model, batch_size=self.batch_size)
        answers = [self.format.answer_ids(item.answer, self.tokenizer) for item in items]
        scores = forward.continuation_log_probs(prompts, [[answer] for answer in answers])
        log_probs = np.array([float(score[0]) for score in scores])
        ended = [i for i, answer in enumerate(answers) if len(answer) < self.max_new_tokens]
        if ended and stop:
            after = forward.last_log_probs([TokenRow((*prompts[i], *answers[i])) for i in ended])
            log_probs[ended] += after[:, sorted(stop)].double().logsumexp(-1).cpu().numpy()
        too_long = [len(answer) > self.max_new_tokens for answer in answers]
        return [float(p) for p in np.where(too_long, 0.0, np.exp(log_probs))]

    def _quoted(self, items: Sequence[ConfItem], rng: np.random.Generator) -> dict[int, float]:
        """Share of the samples whose quotation agrees with the evidence, of the items that have both."""
        chosen = [i for i, item in enumerate(items) if item.context is not None and item.evidence_text is not None]
        if not chosen:
            return {}
        asked = [replace(items[i], question=items[i].question + QUOTE) for i in chosen]
        prompts = [self.format.prompt_ids(item, self.tokenizer) for item in asked]
        stop = stop_ids(self.model, self.tokenizer, at_newline=False)
        texts = self._sampled(prompts, self.n_samples, stop, rng)
        return {
            i: sum(quotes(text, items[i].evidence_text or "") for text in of_item) / len(of_item)
            for i, of_item in zip(chosen, texts, strict=True)
        }

    def _to_greedy(
        self, items: Sequence[ConfItem], whole: list[dict[str, Any]], oracle: dict[int, dict[str, Any]]
    ) -> None:
        """Replace the shares, in place, by how often the most likely answer is right at such a share."""
        for gold, group in ((items, whole), ([items[i] for i in oracle], list(oracle.values()))):
            if not group:
                continue
            right = [
                found["greedy"] == item.answer
                if item.choices is not None
                else matches(found["greedy"], item.answer, self.match)
                for item, found in zip(gold, group, strict=True)
            ]
            shares = [found["share"] for found in group]
            mapped = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit_transform(
                shares, np.array(right, dtype=float)
            )
            for found, share in zip(group, mapped, strict=True):
                found["share"] = float(share)


def _needs_oracle(item: ConfItem) -> bool:
    """Whether the evidence is another text than the context; if it is the same, so are the answers."""
    evidence = item.evidence_text
    return item.context is not None and evidence is not None and evidence.strip() != item.context.strip()


def balanced(labeled: Sequence[LabeledItem], rng: np.random.Generator) -> list[LabeledItem]:
    """As many items, drawn with replacement so that every tenth of ``p_hat`` that has any has about as many."""
    form = ConfidenceFormat()
    bins: dict[int, list[LabeledItem]] = {}
    for one in labeled:
        bins.setdefault(form.level(one.p_hat), []).append(one)
    levels = sorted(bins)
    return [
        bins[levels[n % len(levels)]][int(rng.integers(len(bins[levels[n % len(levels)]])))]
        for n in range(len(labeled))
    ]


def matches(answer: str, gold: str, match: Match) -> bool:
    """Whether an answer is right.

    >>> matches(" Paris.", "paris", "exact"), matches("7 * 8 = 56", "56.0", "number")
    (True, True)
    """
    if callable(match):
        return bool(match(answer, gold))
    if match == "exact":
        return _normal(answer) == _normal(gold)
    numbers = [re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "")) for text in (answer, gold)]
    return all(numbers) and float(numbers[0][-1]) == float(numbers[1][-1])


def _normal(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .,;:!?\"'")


def quotes(text: str, evidence: str) -> bool:
    r"""Whether a text has a quotation that agrees with the evidence.

    >>> quotes("Evidence: Ann's code is 123.\nAnswer: 123", "Ann's code is 123.")
    True
    """
    found = re.search(r"Evidence:\s*(.+?)\s*(?:\n|$)", text)
    if not found:
        return False
    quoted, gold = (Counter(re.findall(r"\w+", t.casefold())) for t in (found.group(1), evidence))
    common = sum((quoted & gold).values())
    return common > 0 and 2 * common / (sum(quoted.values()) + sum(gold.values())) >= OVERLAP
