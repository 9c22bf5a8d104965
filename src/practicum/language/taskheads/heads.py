"""Lexical task heads: found, compared between prompting styles, and read to tell which task a prompt evokes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import hypergeom
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from practicum.datasets.tasks import Task
from practicum.language.taskheads.lens import HeadLens, check_k
from practicum.language.taskheads.prompts import (
    STYLES,
    Style,
    answer_tokens,
    build_prompts,
    names_the_task,
    word_tokens,
)
from practicum.language.taskheads.steps import Head, Readings, read, require_eval, token_rows
from practicum.toolbox.errors import InputError

FEWEST_CORRECT = 5
FOLDS = 5
# The paper's code compares the first five instructions of a task.
MOST_TEMPLATES = 5


@dataclass(frozen=True)
class Diagnosis:
    """How much of a task a prompt evokes.

    Attributes
    ----------
    task : str
    activation : int
        Heads of the task that say one of its words.
    share : float
        Of the activations of all tasks.
    heads : tuple of (layer, head)
        Those heads, of shape (activation, 2).

    Examples
    --------
    >>> Diagnosis("antonym", 1, 1.0, ((25, 4),)).heads
    ((25, 4),)
    """

    task: str
    activation: int
    share: float
    heads: tuple[Head, ...]


class LexicalTaskHeads:
    r"""Find the heads whose output, decoded, names the task that a prompt states.

    For a prompt, head (l, h) says a task when at least ``n_match`` of the ``k`` tokens of its decoded output with the
    largest logits are words of the task. Its score is the share of correctly answered prompts for which it does. The
    lexical task heads of a prompting style are those with a score of at least ``threshold``. They are found with
    prompts of examples and with the instruction that is answered best; the shared heads are in both sets.

    How many of a task's heads speak in a prompt is the task's activation there; its share of the activations of all
    tasks is low where another task competes. From both, a logistic model tells which prompts will fail; it is fitted on
    queries that the heads were not found with.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, in eval mode.
    tokenizer : transformers.PreTrainedTokenizerBase
    k : int
        Tokens of a head's output that count.
    n_match : int
        Words of the task that must be among them.
    threshold : float
        Above 0, at most 1.
    batch_size : int
        Prompts in a forward pass.
    require_correct : bool
        Whether a style needs five correctly answered prompts. With False all its prompts are used where fewer are
        correct; ``n_used_`` says how many.

    Attributes
    ----------
    scores_ : dict of str to dict of str to Tensor of shape (layers, heads), float32
        By task and style.
    heads_ : dict of str to dict of str to list of (layer, head)
        From 0.
    shared_ : dict of str to list of (layer, head)
        Heads of both styles.
    accuracy_ : dict of str to dict of str to float
    n_used_, n_dropped_ : dict of str to dict of str to int
        Prompts behind the scores, and those left out because the answer begins with white space alone.
    queries_ : dict of str to dict of str to list of int
        The pairs behind the scores.
    readings_ : dict of str to dict of str to Readings
        What the model made of their prompts; its ``z`` has the shape (n, layers, heads, d_head).
    template_ : dict of str to int
        The instruction that was answered best.
    copied_ : dict of str to bool
        Whether that instruction has a word of the task in it, which a head may only copy.
    failure_auroc_ : float or None
        Of the logistic model, cross-validated over queries; None where it could not be fitted.

    Raises
    ------
    InputError
        A ValueError: for ``k`` below 1, ``n_match`` above ``k``, a threshold out of range, a model in training mode or
        one whose parts cannot be told.

    References
    ----------
    Z. Yang et al., "Shared Lexical Task Representations Explain Behavioral Variability In LLMs", arXiv:2604.22027.

    Examples
    --------
    >>> from practicum.language.taskheads.tiny import tiny_model
    >>> model, tokenizer = tiny_model("up down in out hot cold opposite")
    >>> task = Task("opposite", [("up", "down"), ("in", "out"), ("hot", "cold")], ["opposite"])
    >>> finder = LexicalTaskHeads(model, tokenizer, k=3, require_correct=False)
    >>> finder.fit([task], styles=["examples"], n_shots=1).scores_["opposite"]["examples"].shape
    torch.Size([3, 4])
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        k: int = 10,
        n_match: int = 1,
        threshold: float = 0.1,
        batch_size: int = 16,
        require_correct: bool = True,
    ) -> None:
        check_k(k, n_match)
        if not 0 < threshold <= 1:
            raise InputError(f"threshold={threshold}: must be above 0 and at most 1")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise InputError(f"batch_size={batch_size!r}: must be a whole number, 1 or more")
        require_eval(model)
        self.model, self.tokenizer = model, tokenizer
        self.k, self.n_match, self.threshold = k, n_match, threshold
        self.batch_size, self.require_correct = batch_size, require_correct
        self.lens = HeadLens(model)

    def fit(
        self,
        tasks: Mapping[str, Task] | Sequence[Task],
        n_prompts: int = 100,
        styles: Sequence[Style] = STYLES,
        n_shots: int = 5,
        n_held_out: int = 20,
        random_state: int | None = 0,
        queries: Mapping[str, Sequence[int]] | None = None,
    ) -> Self:
        """Find the heads of tasks.

        Parameters
        ----------
        tasks : mapping of str to Task, or sequence of Task
        n_prompts : int
            Queries of a task at most.
        styles : sequence of {"examples", "instruction"}
        n_shots : int
            Examples in a prompt.
        n_held_out : int
            Further queries of a task at most, asked with one example and with ``n_shots``, on which the model that
            tells failures is fitted. A task with fewer pairs gives a quarter of its own; 0 fits none.
        random_state : int, optional
            Of the choice of queries.
        queries : mapping of str to sequence of int, optional
            The pairs of each task to find its heads with, in place of ``n_prompts`` drawn ones.

        Returns
        -------
        LexicalTaskHeads
            Itself. Its scores have the shape (layers, heads).

        Raises
        ------
        InputError
            A ValueError: for no task or style, words of which none is a single token, a task without instructions where
            the style is asked for, answers that all begin with white space alone, or fewer than five correct prompts.
        """
        self.tasks_ = _by_name(tasks)
        styles = _checked_styles(styles)
        for name, value, least in (("n_prompts", n_prompts, 1), ("n_held_out", n_held_out, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name}={value!r}: must be a whole number, {least} or more")
        self.styles_ = styles
        self.words_ = {name: self._words(task) for name, task in self.tasks_.items()}
        self.scores_: dict[str, dict[str, Tensor]] = {name: {} for name in self.tasks_}
        self.heads_: dict[str, dict[str, list[Head]]] = {name: {} for name in self.tasks_}
        self.accuracy_: dict[str, dict[str, float]] = {name: {} for name in self.tasks_}
        self.n_used_: dict[str, dict[str, int]] = {name: {} for name in self.tasks_}
        self.n_dropped_: dict[str, dict[str, int]] = {name: {} for name in self.tasks_}
        self.queries_: dict[str, dict[str, list[int]]] = {name: {} for name in self.tasks_}
        self.template_: dict[str, int] = {}
        self.copied_: dict[str, bool] = {}
        self.readings_: dict[str, dict[str, Readings]] = {name: {} for name in self.tasks_}
        held_out: dict[str, list[int]] = {}
        for i, (name, task) in enumerate(self.tasks_.items()):
            seed = np.random.SeedSequence(random_state, spawn_key=(i,)) if random_state is not None else None
            order = [int(j) for j in np.random.default_rng(seed).permutation(len(task.pairs))]
            if queries is not None:
                if not queries.get(name):
                    raise InputError(f"queries: has none of {name}; must have some of every task")
                chosen = [int(j) for j in queries[name]]
                order = [*(j for j in order if j not in chosen), *chosen]
                kept = min(n_held_out, len(order) - len(chosen))
            else:
                kept = min(n_held_out, len(order) // 4)
                chosen = order[kept : kept + n_prompts]
            held_out[name] = order[:kept]
            for style in styles:
                self._keep(task, style, self._asked(task, style, n_shots, chosen))
        self.shared_ = {
            name: sorted(set.intersection(*(set(of_style) for of_style in by_style.values())))
            for name, by_style in self.heads_.items()
        }
        self._fit_failure(held_out, n_shots)
        return self

    def decode(self, prompt: str, layer: int, head: int, k: int = 10) -> list[tuple[str, float]]:
        """Read what a head says at the last token of a prompt.

        Parameters
        ----------
        prompt : str
        layer, head : int
            From 0.
        k : int

        Returns
        -------
        list of (token, logit), of shape (k,)
            The largest first.

        Raises
        ------
        InputError
            A ValueError for a head that the model has not.
        """
        check_k(k, 1)
        self._require_head(layer, head)
        z = self._outputs([prompt])
        logits = self.lens.logits(self.lens.normed(z[:, layer : layer + 1], [layer])[0, 0, head])
        top = logits.topk(min(k, len(logits)))
        return [
            (self.tokenizer.decode([token]), logit)
            for token, logit in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]

    def says(self, task: str, style: Style, layer: int, head: int, k: int = 8) -> list[tuple[str, float]]:
        """Count what a head says in the correctly answered prompts of a task.

        Parameters
        ----------
        task : str
        style : {"examples", "instruction"}
        layer, head : int
            From 0.
        k : int
            Tokens to return.

        Returns
        -------
        list of (token, share), of shape (k,)
            Tokens that are most often among the ``k`` of the estimator, with the share of prompts.

        Raises
        ------
        InputError
            A ValueError for a task, a style or a head that is not there.
        """
        self._require_fitted(task, style)
        self._require_head(layer, head)
        z = self.readings_[task][style].z
        normed = self.lens.normed(z[:, layer : layer + 1], [layer])[:, 0, head]
        said = self.lens.logits(normed).topk(min(self.k, self.lens.vocabulary), dim=1).indices
        counts = Counter(said.flatten().tolist())
        return [(self.tokenizer.decode([token]), n / len(z)) for token, n in counts.most_common(k)]

    def activation(
        self, prompts: Sequence[str], task: str, style: Style = "examples", kind: Literal["count", "mass"] = "count"
    ) -> Tensor:
        """Measure how much of a task prompts evoke.

        Parameters
        ----------
        prompts : sequence of str
        task : str
            One of those that were fitted.
        style : {"examples", "instruction"}
            Whose heads are read. Prompts of examples have no word of the task in them.
        kind : {"count", "mass"}
            How many heads say a word of the task; or the sum over heads of the logarithm of the probability that the
            decoded output gives to the words, which has no steps.

        Returns
        -------
        Tensor of shape (n,), float32

        Raises
        ------
        InputError
            A ValueError for a task or a style that was not fitted.
        """
        self._require_fitted(task, style)
        if kind not in ("count", "mass"):
            raise InputError(f"kind={kind!r}: must be 'count' or 'mass'")
        z, heads = self._outputs(prompts), self.heads_[task][style]
        if kind == "count":
            return self.activations_of(z, style)[task]
        total = torch.zeros(len(z))
        for layer, head in heads:
            normed = self.lens.normed(z[:, layer : layer + 1], [layer])[:, 0, head]
            total += self.lens.logits(normed).log_softmax(1)[:, self.words_[task]].logsumexp(1).cpu()
        return total

    def activations_of(self, z: Tensor, style: Style = "examples") -> dict[str, Tensor]:
        """Count, for every task, its heads that say one of its words.

        Parameters
        ----------
        z : Tensor of shape (n, layers, heads, d_head)
            Outputs of the heads at the last token.
        style : {"examples", "instruction"}
            Whose heads are read.

        Returns
        -------
        dict of str to Tensor of shape (n,), float32
        """
        return {name: said.sum(1).float() for name, said in self._speaking(z, style).items()}

    def share(self, prompts: Sequence[str], task: str, style: Style = "examples") -> Tensor:
        """Compare a task's activation with those of all tasks.

        Parameters
        ----------
        prompts : sequence of str
        task : str
        style : {"examples", "instruction"}

        Returns
        -------
        Tensor of shape (n,), float32
            From 0 to 1; where no head says any task, one over the number of tasks.

        Raises
        ------
        InputError
            A ValueError for a task or a style that was not fitted.
        """
        self._require_fitted(task, style)
        return shares(self.activations_of(self._outputs(prompts), style), task)

    def diagnose(self, prompt: str, style: Style = "examples") -> list[Diagnosis]:
        """Tell which tasks a prompt evokes.

        Parameters
        ----------
        prompt : str
        style : {"examples", "instruction"}
            Whose heads are read.

        Returns
        -------
        list of Diagnosis, of shape (n_tasks,)
            The task with the largest activation first.

        Raises
        ------
        InputError
            A ValueError before `fit`.
        """
        self._require_fitted(None, style)
        speaking = self._speaking(self._outputs([prompt]), style)
        activations = {name: said.sum(1).float() for name, said in speaking.items()}
        found = []
        for name, said in speaking.items():
            heads = tuple(head for head, yes in zip(self.heads_[name][style], said[0].tolist(), strict=True) if yes)
            found.append(Diagnosis(name, len(heads), float(shares(activations, name)[0]), heads))
        return sorted(found, key=lambda each: (-each.activation, -each.share))

    def predict_failure(self, prompts: Sequence[str], task: str) -> Tensor:
        """Tell how likely a task's prompts are to be answered wrongly, before the answer is seen.

        Parameters
        ----------
        prompts : sequence of str
        task : str

        Returns
        -------
        Tensor of shape (n,), float32
            Probability of a wrong answer.

        Raises
        ------
        InputError
            A ValueError for a task that was not fitted; where no model was fitted because all held-out prompts were
            answered alike.
        """
        self._require_fitted(task, self.styles_[0] if hasattr(self, "styles_") else "examples")
        if self._failure_model is None:
            raise InputError(f"predict_failure: there is no model of failures: {self._no_failure_model}")
        x = failure_features(self.activations_of(self._outputs(prompts), self.styles_[0]), task)
        return torch.from_numpy(self._failure_model.predict_proba(x)[:, 1]).float()

    def _words(self, task: Task) -> Tensor:
        words = word_tokens(self.tokenizer, task)
        if len(words) < self.n_match:
            raise InputError(
                f"n_match={self.n_match}: the task {task.name!r} has {len(words)} tokens of words; must be at most that"
            )
        return words

    def _asked(self, task: Task, style: Style, n_shots: int, queries: Sequence[int]) -> _Asked:
        """The prompts of a style, run: with instructions the template that is answered best."""
        if style == "examples":
            return self._run(task, build_prompts(task, n_shots=n_shots, indices=queries), queries)
        if not task.instructions:
            raise InputError(f"styles: {task.name} has no instructions; give it some, or styles=['examples']")
        tried = [
            self._run(task, build_prompts(task, style, template=t, indices=queries), queries)
            for t in range(min(MOST_TEMPLATES, len(task.instructions)))
        ]
        best = max(range(len(tried)), key=lambda t: (tried[t].readings.accuracy, -t))
        self.template_[task.name] = best
        self.copied_[task.name] = names_the_task(task, best)
        return tried[best]

    def _run(self, task: Task, prompts: Sequence[str], queries: Sequence[int]) -> _Asked:
        tokens = answer_tokens(self.tokenizer, prompts, [task.pairs[i][1] for i in queries])
        usable = (tokens >= 0).nonzero()[:, 0].tolist()
        if not usable:
            raise InputError(
                f"pairs of {task.name}: all {len(queries)} answers begin with a token of white space in this "
                "tokenizer; must have others"
            )
        rows = token_rows(self.tokenizer, [prompts[i] for i in usable])
        readings = read(self.model, rows, tokens[usable], self.batch_size)
        return _Asked(readings, [queries[i] for i in usable], len(queries) - len(usable))

    def _keep(self, task: Task, style: Style, asked: _Asked) -> None:
        readings, name, queries = asked.readings, task.name, asked.queries
        n_correct = int(readings.correct.sum())
        if n_correct >= FEWEST_CORRECT:
            queries = [query for query, right in zip(queries, readings.correct.tolist(), strict=True) if right]
            readings = readings[readings.correct]
        elif self.require_correct:
            raise InputError(
                f"{name}: the model answers {n_correct} of {len(readings.rank)} prompts with {style} correctly; must "
                f"be {FEWEST_CORRECT} at least, or require_correct=False"
            )
        self.readings_[name][style], self.queries_[name][style] = readings, queries
        self.accuracy_[name][style] = asked.readings.accuracy
        self.n_used_[name][style], self.n_dropped_[name][style] = len(readings.rank), asked.n_dropped
        # In parts: what all heads write is much larger than what they give.
        parts = [
            self.lens.hits(self.lens.normed(z), [self.words_[name]], self.k, self.n_match)[0]
            for z in readings.z.split(self.batch_size)
        ]
        self.scores_[name][style] = torch.cat(parts).float().mean(0)
        self.heads_[name][style] = heads_above(self.scores_[name][style], self.threshold)

    def _fit_failure(self, held_out: Mapping[str, Sequence[int]], n_shots: int) -> None:
        """The model of failures, on queries that the heads were not found with."""
        self.failure_auroc_: float | None = None
        self._failure_model: Pipeline | None = None
        self._no_failure_model = "n_held_out is 0, or the tasks have too few pairs"
        features, wrong, groups = [], [], []
        for i, (name, queries) in enumerate(held_out.items()):
            for shots in sorted({min(1, n_shots), n_shots}) if queries else []:
                task = self.tasks_[name]
                prompts = build_prompts(task, n_shots=shots, indices=queries)
                if not (answer_tokens(self.tokenizer, prompts, [task.pairs[j][1] for j in queries]) >= 0).any():
                    continue
                asked = self._run(task, prompts, queries)
                features.append(failure_features(self.activations_of(asked.readings.z, self.styles_[0]), name))
                wrong.append(~asked.readings.correct.numpy())
                groups.append(np.array([i * 10**6 + query for query in asked.queries]))
        if not features:
            return
        x, y, group = np.concatenate(features), np.concatenate(wrong), np.concatenate(groups)
        if len(np.unique(y)) < 2:
            self._no_failure_model = f"all {len(y)} held-out prompts were answered {'wrongly' if y[0] else 'correctly'}"
            return
        self._failure_model = failure_model().fit(x, y)
        self.failure_auroc_ = cross_validated_auroc(x, y, group)

    def _outputs(self, prompts: Sequence[str]) -> Tensor:
        rows = token_rows(self.tokenizer, prompts)
        return read(self.model, rows, torch.zeros(len(rows), dtype=torch.int64), self.batch_size).z

    def _speaking(self, z: Tensor, style: Style) -> dict[str, Tensor]:
        """For every task, whether each of its heads says one of its words, (n, n_heads)."""
        wanted = sorted({head for by_style in self.heads_.values() for head in by_style[style]})
        said = speaking_heads(self.lens, z, wanted, list(self.words_.values()), self.k, self.n_match)
        places = {head: i for i, head in enumerate(wanted)}
        return {
            name: said[i][:, [places[head] for head in self.heads_[name][style]]] for i, name in enumerate(self.tasks_)
        }

    def _require_fitted(self, task: str | None, style: str) -> None:
        if not hasattr(self, "heads_"):
            raise InputError("taskheads: is not fitted; call fit(tasks) first")
        if task is not None and task not in self.heads_:
            raise InputError(f"task={task!r}: was not fitted; there are {', '.join(self.heads_)}")
        if style not in self.styles_:
            raise InputError(f"style={style!r}: was not fitted; there are {', '.join(self.styles_)}")

    def _require_head(self, layer: int, head: int) -> None:
        last = (self.lens.n_layers - 1, self.lens.n_heads - 1)
        if not (0 <= layer <= last[0] and 0 <= head <= last[1]):
            raise InputError(f"layer={layer}, head={head}: must be from (0, 0) to {last}")


@dataclass(frozen=True)
class _Asked:
    """Prompts that were run, the queries they ask for, and how many were left out."""

    readings: Readings
    queries: list[int]
    n_dropped: int


def retrieval_heads(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    answers: Sequence[str],
    k: int = 10,
    batch_size: int = 16,
    require_correct: bool = True,
) -> Tensor:
    """Score heads by how often their decoded output has the answer itself among its k tokens.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, in eval mode.
    tokenizer : transformers.PreTrainedTokenizerBase
    prompts, answers : sequence of str
        Only the first token of an answer counts; answers that begin with white space alone are left out.
    k : int
    batch_size : int
        Prompts in a forward pass.
    require_correct : bool
        Whether only correctly answered prompts count, of which there must be one.

    Returns
    -------
    Tensor of shape (layers, heads), float32
        Shares of the prompts.

    Raises
    ------
    InputError
        A ValueError: where no prompt is left to count; for a model in training mode.

    Examples
    --------
    >>> from practicum.language.taskheads.tiny import tiny_model
    >>> model, tokenizer = tiny_model("up down in out hot cold opposite")
    >>> retrieval_heads(model, tokenizer, [" up:"], ["down"], require_correct=False).shape
    torch.Size([3, 4])
    """
    check_k(k, 1)
    if len(answers) != len(prompts):
        raise InputError(f"answers: has {len(answers)}; must be {len(prompts)}, one for each prompt")
    lens = HeadLens(model)
    tokens = answer_tokens(tokenizer, prompts, answers)
    usable = (tokens >= 0).nonzero()[:, 0].tolist()
    if not usable:
        raise InputError(f"answers: all {len(answers)} begin with a token of white space; must have others")
    tokens = tokens[usable]
    readings = read(model, token_rows(tokenizer, [prompts[i] for i in usable]), tokens, batch_size)
    counted = readings.correct if require_correct else torch.ones_like(readings.correct)
    if not bool(counted.any()):
        raise InputError(f"prompts: none of {len(usable)} is answered correctly; or require_correct=False")
    parts = zip(readings.z[counted].split(batch_size), tokens[counted].split(batch_size), strict=True)
    return torch.cat([lens.says_own(lens.normed(z), own, k) for z, own in parts]).float().mean(0)


def speaking_heads(
    lens: HeadLens, z: Tensor, heads: Sequence[Head], words: Sequence[Tensor], k: int = 10, n_match: int = 1
) -> Tensor:
    """Whether heads say words: (n_sets, n, n_heads), bool, of outputs (n, layers, heads, d_head)."""
    said = torch.zeros(len(words), len(z), len(heads), dtype=torch.bool)
    for layer in sorted({layer for layer, _ in heads}):
        places = [i for i, (l, _) in enumerate(heads) if l == layer]
        of_layer = [heads[i][1] for i in places]
        normed = lens.normed(z[:, layer : layer + 1], [layer])[:, 0, of_layer]
        said[:, :, places] = lens.hits(normed, words, k, n_match)
    return said


def heads_above(scores: Tensor, threshold: float) -> list[Head]:
    """Heads whose score is at least the threshold, in order."""
    # Shares such as 3/30 in float32 may be a rounding below 0.1.
    return [(int(layer), int(head)) for layer, head in (scores >= threshold - 1e-6).nonzero().tolist()]


def shares(activations: Mapping[str, Tensor], task: str) -> Tensor:
    """A task's part of the activations of all tasks, (n,); equal parts where there are none."""
    total = torch.stack(list(activations.values())).sum(0)
    return torch.where(total > 0, activations[task] / total.clamp_min(1e-9), 1 / len(activations))


def failure_features(activations: Mapping[str, Tensor], task: str) -> NDArray[np.float64]:
    """Activation, share, and the logarithm of one more than the largest competing activation, (n, 3)."""
    others = [each for name, each in activations.items() if name != task] or [torch.zeros_like(activations[task])]
    largest = torch.stack(others).amax(0)
    return torch.stack([activations[task], shares(activations, task), largest.log1p()], dim=1).double().numpy()


def failure_model() -> Pipeline:
    """Logistic regression of standardised features."""
    return make_pipeline(StandardScaler(), LogisticRegression())


def cross_validated_auroc(
    features: NDArray[np.float64], wrong: NDArray[np.bool_], groups: NDArray[Any]
) -> float | None:
    """AUROC of the model of failures on queries that it was not fitted on; None where it cannot be measured."""
    folds = min(FOLDS, len(np.unique(groups)))
    if folds < 2:
        return None
    splits = list(GroupKFold(folds).split(features, wrong, groups))
    if any(len(np.unique(wrong[train])) < 2 for train, _ in splits):
        return None
    predicted = cross_val_predict(failure_model(), features, wrong, cv=splits, method="predict_proba")[:, 1]
    return float(roc_auc_score(wrong, predicted))


def overlap(a: Sequence[Head], b: Sequence[Head]) -> float:
    """Compare two sets of heads: their intersection over the smaller set.

    Parameters
    ----------
    a, b : sequence of (layer, head), of shape (n, 2)

    Returns
    -------
    float
        From 0 to 1; 0 where a set is empty.

    Examples
    --------
    >>> overlap([(1, 0), (2, 3)], [(2, 3), (4, 4), (5, 1)])
    0.5
    """
    smaller = min(len(set(a)), len(set(b)))
    return len(set(a) & set(b)) / smaller if smaller else 0.0


@dataclass(frozen=True)
class Sharing:
    """How many heads two sets, each of shape (n, 2), share, beside what chance would give.

    Attributes
    ----------
    shared : int
    expected : float
        Mean of the hypergeometric distribution: sets of these sizes drawn at random from all heads.
    p_value : float
        Probability of at least as many by chance.

    Examples
    --------
    >>> Sharing(3, 0.1, 1e-5).shared
    3
    """

    shared: int
    expected: float
    p_value: float


def sharing(a: Sequence[Head], b: Sequence[Head], n_heads: int) -> Sharing:
    """Compare the heads that two sets share with chance.

    Parameters
    ----------
    a, b : sequence of (layer, head), of shape (n, 2)
    n_heads : int
        All heads of the model, layers times heads.

    Returns
    -------
    Sharing

    Raises
    ------
    InputError
        A ValueError where a set has more heads than there are.

    Examples
    --------
    >>> found = sharing([(0, 0), (0, 1)], [(0, 1), (1, 1)], n_heads=4)
    >>> found.shared, found.expected, round(found.p_value, 3)
    (1, 1.0, 0.833)
    """
    first, second = set(a), set(b)
    if max(len(first), len(second)) > n_heads:
        raise InputError(f"n_heads={n_heads}: must be {max(len(first), len(second))} at least, the heads of a set")
    both = len(first & second)
    p = float(hypergeom.sf(both - 1, n_heads, len(first), len(second)))
    return Sharing(both, len(first) * len(second) / n_heads, p)


def _by_name(tasks: Mapping[str, Task] | Sequence[Task]) -> dict[str, Task]:
    listed = list(tasks.values()) if isinstance(tasks, Mapping) else list(tasks)
    if not listed:
        raise InputError("tasks: is empty; must have one task at least")
    for task in listed:
        if not isinstance(task, Task):
            raise InputError(f"tasks: has a {type(task).__name__}; must be tasks")
    named = {task.name: task for task in listed}
    if len(named) < len(listed):
        raise InputError("tasks: two have the same name; names must differ")
    return named


def _checked_styles(styles: Sequence[str]) -> tuple[Style, ...]:
    chosen = () if isinstance(styles, str) else tuple(dict.fromkeys(styles))
    if not chosen or any(style not in STYLES for style in chosen):
        raise InputError(f"styles={styles!r}: must be some of {', '.join(map(repr, STYLES))}")
    return chosen  # type: ignore[return-value]
