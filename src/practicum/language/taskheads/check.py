"""The claims about lexical task heads, measured beside random, retrieval and function-vector heads and task vectors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold, cross_val_predict
from torch import Tensor

from practicum.checks import CannotMeasure, Check, Comparison, Curve, Metrics, Request, arm
from practicum.datasets.tasks import Task, load_tasks, read_tasks
from practicum.language.taskheads.heads import (
    LexicalTaskHeads,
    failure_features,
    failure_model,
    overlap,
    shares,
    sharing,
    speaking_heads,
)
from practicum.language.taskheads.patching import direct_outputs, matched_heads
from practicum.language.taskheads.prompts import STYLES, answer_tokens, build_prompts
from practicum.language.taskheads.steps import (
    Edit,
    Head,
    PromptBatch,
    prompt_batches,
    read,
    run_edits,
    score,
    token_rows,
)
from practicum.models import load_language_model
from practicum.toolbox.taps import Steering, head_shape, n_layers, record

SCALES = (2.0, 3.0, 4.0)
VECTOR_SCALES = (1.0, 2.0)
VECTOR_DEPTHS = (0.25, 0.5, 0.75)
N_RANDOM = 5
FEWEST_FAILURES = 4
FEWEST_QUERIES = 4
FOLDS = 5
RESAMPLES = 1000
QUICK_TASKS = ("country-capital", "country-currency")
ONE_TASK = "needs two tasks at least"
PATH_SCALE = 3.0
FEWEST_RECEIVERS = 5


@dataclass(frozen=True)
class Sizes:
    """What a scale changes."""

    found_with: int
    measured_with: int
    shots: tuple[int, ...]
    templates: int
    function_vector_prompts: int


@dataclass(frozen=True)
class Cell:
    """The measured queries of a task, asked in one way.

    ``activations`` has, for every task, how many of its heads speak, (n,); ``random`` the same of random heads of the
    same layers for the task's own words.
    """

    correct: NDArray[np.bool_]
    log_prob: Tensor
    log_max: Tensor
    surprise: Tensor
    activations: dict[str, Tensor]
    random: Tensor


class TaskHeadsCheck(Check):
    """Heads found with one half of a task's queries; activations, repairs and failures measured on the other half."""

    comparisons = (
        Comparison(
            "task-specific", metric="heads that speak", arm="lexical", against="other prompts", difference_above=0.0
        ),
        Comparison("shared-above-chance", metric="shared heads", arm="lexical", against="chance", difference_above=0.0),
        Comparison("shared-within-tasks", metric="overlap", arm="lexical", against="other tasks", difference_above=0.0),
        Comparison("repairs-failures", metric="repaired", arm="lexical", against="random", difference_above=0.0),
        Comparison("raises-the-answer", metric="repaired MRR", arm="lexical", against="random", difference_above=0.0),
        Comparison("of-this-task", metric="repaired", arm="lexical", against="related task", difference_above=0.0),
        Comparison("activation-follows-accuracy", metric="tasks with the sign", arm="lexical", value_at_least=0.5),
        Comparison("activation-explains-prompts", metric="rank correlation", arm="lexical", value_at_least=0.0),
        Comparison("predicts-failure", metric="auroc", arm="lexical", value_at_least=0.5),
        Comparison("share-predicts-failure", metric="auroc", arm="share", value_at_least=0.5),
        Comparison("model-predicts-failure", metric="auroc", arm="logistic", value_at_least=0.5),
        Comparison(
            "other-tasks-compete",
            metric="share of the task",
            arm="correct prompts",
            against="wrong prompts",
            difference_above=0.0,
        ),
    )
    seeds = {"quick": 2, "full": 3, "paper": 3}
    curves = (Curve("shots", x="examples in the prompt", y="heads that speak, or share answered"),)

    def prepare(self, request: Request) -> Work:
        """Find the heads with some queries of every task, and ask the others in every way."""
        sizes = request.pick(
            quick=Sizes(16, 16, (1, 5), 1, 0),
            full=Sizes(30, 40, (1, 2, 3, 4, 5), 3, 8),
            paper=Sizes(100, 100, (1, 2, 3, 4, 5, 10, 20, 30), 5, 50),
        )
        return Work(request, sizes, _tasks(request, sizes))

    @arm("lexical")
    def lexical(self, work: Work) -> Metrics:
        """The lexical task heads."""
        values, missing, notes = work.repaired("lexical")
        values |= work.specificity | work.sharing_values
        values |= {f"{task}: p of the shared heads": found.p_value for task, found in work.sharing.items()}
        signs, missing_signs = work.signs
        values |= signs
        missing |= missing_signs
        values |= work.auroc("activation")
        values["answer heads after path patching"] = work.path_effect("lexical")
        return Metrics(values, missing=missing | work.missing_repairs, notes=[*work.notes, *notes], curves=work.lines)

    @arm("other prompts")
    def other_prompts(self, work: Work) -> Metrics:
        """The same heads and words, in prompts of other tasks."""
        if len(work.tasks) < 2:
            return Metrics(missing={"heads that speak": ONE_TASK})
        return Metrics({"heads that speak": float(np.mean([work.speaking_elsewhere(t).mean() for t in work.tasks]))})

    @arm("chance")
    def chance(self, work: Work) -> Metrics:
        """Heads that random sets of the same sizes share."""
        if not work.sharing:
            return Metrics(missing={"shared heads": "no task has instructions"})
        return Metrics({"shared heads": float(np.mean([found.expected for found in work.sharing.values()]))})

    @arm("other tasks")
    def other_tasks(self, work: Work) -> Metrics:
        """Overlap of heads found with examples with those found with another task's instruction."""
        styled = list(work.sharing)
        found = [overlap(work.heads(a), work.heads(b, "instruction")) for a in styled for b in styled if a != b]
        return Metrics({"overlap": float(np.mean(found))}) if found else Metrics(missing={"overlap": ONE_TASK})

    @arm("random")
    def random(self, work: Work) -> Metrics:
        """As many heads of the same layers, drawn at random: the mean of five draws."""
        values, missing, notes = work.repaired("random")
        own = [float(work.last_cell(task).random.mean()) for task in work.tasks]
        values |= {"heads that speak": float(np.mean(own))}
        values["answer heads after path patching"] = work.path_effect("random")
        return Metrics(values, missing=missing, notes=notes)

    @arm("related task")
    def related_task(self, work: Work) -> Metrics:
        """The lexical heads, with their outputs in prompts of a related task."""
        if len(work.tasks) < 2:
            return Metrics(missing={"repaired": ONE_TASK, "repaired MRR": ONE_TASK})
        values, missing, notes = work.repaired("related task")
        return Metrics(values, missing=missing, notes=notes)

    @arm("retrieval")
    def retrieval(self, work: Work) -> Metrics:
        """As many of the heads that most often say the answer itself."""
        values, missing, notes = work.repaired("retrieval")
        return Metrics(values, missing=missing, notes=notes)

    @arm("function vector")
    def function_vector(self, work: Work) -> Metrics:
        """As many heads with the largest average indirect effect on prompts with shuffled outputs."""
        if not work.sizes.function_vector_prompts:
            reason = "every head is patched by itself, which needs --scale full"
            return Metrics(missing={"repaired": reason, "repaired MRR": reason})
        values, missing, notes = work.repaired("function vector")
        return Metrics(values, missing=missing, notes=notes)

    @arm("whole layers")
    def whole_layers(self, work: Work) -> Metrics:
        """All heads of the layers that lexical heads are in."""
        values, missing, notes = work.repaired("whole layers")
        return Metrics(values, missing=missing, notes=notes)

    @arm("task vector")
    def task_vector(self, work: Work) -> Metrics:
        """The difference of the residual stream between prompts of five examples and of one, added: the strong peer."""
        values, missing, notes = work.repaired("task vector")
        return Metrics(values, missing=missing, notes=notes)

    @arm("share")
    def share(self, work: Work) -> Metrics:
        """The task's share of the activations of all tasks."""
        if len(work.tasks) < 2:
            return Metrics(missing={"auroc": ONE_TASK})
        return Metrics(work.auroc("share"))

    @arm("logistic")
    def logistic(self, work: Work) -> Metrics:
        """Activation, share and the strongest competitor in a logistic model, cross-validated over queries."""
        return work.cross_validated()

    @arm("max softmax")
    def max_softmax(self, work: Work) -> Metrics:
        """Peer: the probability of the likeliest token."""
        return Metrics(work.auroc("max softmax"))

    @arm("perplexity")
    def perplexity(self, work: Work) -> Metrics:
        """Peer: how likely the prompt itself is."""
        return Metrics(work.auroc("perplexity"))

    @arm("answer probability")
    def answer_probability(self, work: Work) -> Metrics:
        """The probability of the right answer, which only who knows the answer can read: an upper bound."""
        return Metrics(work.auroc("answer probability"))

    @arm("correct prompts")
    def correct_prompts(self, work: Work) -> Metrics:
        """Prompts that are answered correctly."""
        return work.share_where(correct=True)

    @arm("wrong prompts")
    def wrong_prompts(self, work: Work) -> Metrics:
        """Prompts that are answered wrongly."""
        return work.share_where(correct=False)

    def remarks(self, means: Mapping[str, Mapping[str, float]]) -> Iterable[str]:
        """For how many tasks what is claimed of their mean is so, and which peers repair more."""
        lexical = means.get("lexical", {})
        for ending, words in (
            (": own minus other prompts", "more heads speak in a task's own prompts than in others"),
            (": repaired minus random", "lexical heads repair more than random ones"),
        ):
            found = {name.removesuffix(ending): value for name, value in lexical.items() if name.endswith(ending)}
            if found:
                fails = [name for name, value in found.items() if value <= 0]
                which = f"; not for {', '.join(fails)}" if fails else ""
                yield f"On average over seeds, {words} for {len(found) - len(fails)} of {len(found)} tasks{which}."
        ours = lexical.get("repaired")
        peers = ("retrieval", "function vector", "whole layers", "task vector")
        better = [peer for peer in peers if ours is not None and means.get(peer, {}).get("repaired", -1) > ours]
        if better:
            yield f"More answers than by lexical heads are repaired by: {', '.join(better)}."


class Work:
    """The tasks of one seed, their heads, and what the model makes of the measured queries.

    Parameters
    ----------
    request : Request
    sizes : Sizes
    tasks : dict of str to Task
    """

    def __init__(self, request: Request, sizes: Sizes, tasks: dict[str, Task]) -> None:
        self.request, self.sizes = request, sizes
        self.tasks = {
            name: replace(task, instructions=task.instructions[: sizes.templates]) for name, task in tasks.items()
        }
        loaded = _language_model(request.model, request.device)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.batch_size = request.pick(quick=16, full=32, paper=32)
        self.dropped: dict[str, int] = {}
        self.queries = {name: self._split(i, task) for i, (name, task) in enumerate(self.tasks.items())}
        self.finder = self._found()
        self.lens = self.finder.lens
        self.random_heads = {name: self._random_sets(i, name) for i, name in enumerate(self.tasks)}
        self.cells = {name: self._cells(task) for name, task in self.tasks.items()}

    def rng(self, purpose: int, task: int = 0) -> np.random.Generator:
        """Random numbers of one purpose."""
        return np.random.default_rng(np.random.SeedSequence(self.request.seed, spawn_key=(purpose, task)))

    def heads(self, task: str, style: str = "examples") -> list[Head]:
        """The lexical heads of a task."""
        return self.finder.heads_[task][style]

    # Finding and asking -----------------------------------------------------------------------------------------------

    def _split(self, i: int, task: Task) -> tuple[list[int], list[int]]:
        """Queries that heads are found with, and those that are measured; without answers of white space."""
        answers = [answer for _, answer in task.pairs]
        ways = [build_prompts(task, n_shots=1)]
        ways += [build_prompts(task, "instruction", template=t) for t in range(len(task.instructions))]
        tokens = torch.stack([answer_tokens(self.tokenizer, prompts, answers) for prompts in ways])
        usable = (tokens >= 0).all(0).nonzero()[:, 0].numpy()
        self.dropped[task.name] = len(answers) - len(usable)
        order = [int(j) for j in self.rng(1, i).permutation(usable)]
        if len(order) < 2 * FEWEST_QUERIES:
            raise CannotMeasure(
                f"task {task.name!r}: has {len(order)} pairs whose answer does not begin with a token of white space; "
                f"must have {2 * FEWEST_QUERIES} at least"
            )
        n = min(self.sizes.found_with, len(order) // 2)
        return order[:n], order[n : n + self.sizes.measured_with]

    def _found(self) -> LexicalTaskHeads:
        found = {name: queries[0] for name, queries in self.queries.items()}
        finder = LexicalTaskHeads(self.model, self.tokenizer, batch_size=self.batch_size, require_correct=False)
        instructed = all(task.instructions for task in self.tasks.values())
        with warnings.catch_warnings():  # that some words are no single token is expected
            warnings.simplefilter("ignore", UserWarning)
            return finder.fit(
                self.tasks,
                styles=STYLES if instructed else STYLES[:1],
                n_shots=self._most_shots,
                n_held_out=0,
                queries=found,
            )

    @property
    def _most_shots(self) -> int:
        """Five, as in the paper, or as many as the smallest task has."""
        return min(5, min(len(task.pairs) for task in self.tasks.values()) - 1)

    def shots(self, task: Task) -> list[int]:
        """Numbers of examples that are asked with."""
        return [n for n in self.sizes.shots if n < len(task.pairs)]

    def _random_sets(self, i: int, name: str) -> list[list[Head]]:
        rng = self.rng(2, i)
        return [matched_heads(self.heads(name), self.lens.n_heads, rng) for _ in range(N_RANDOM)]

    def _cells(self, task: Task) -> dict[str, Cell]:
        asked: dict[str, list[str]] = {}
        queries = self.queries[task.name][1]
        for n in self.shots(task):
            asked[f"{n} examples"] = build_prompts(task, n_shots=n, indices=queries)
        for t in range(len(task.instructions)):
            asked[f"instruction {t}"] = build_prompts(task, "instruction", template=t, indices=queries)
        return {kind: self._cell(task, prompts, "examples" in kind) for kind, prompts in asked.items()}

    def _cell(self, task: Task, prompts: Sequence[str], surprise: bool) -> Cell:
        rows = token_rows(self.tokenizer, prompts)
        tokens = answer_tokens(self.tokenizer, prompts, [task.pairs[i][1] for i in self.queries[task.name][1]])
        readings = read(self.model, rows, tokens, self.batch_size, surprise=surprise)
        # Of its own task's words, what random heads say.
        first = self.random_heads[task.name][0]
        said = speaking_heads(self.lens, readings.z, first, [self.finder.words_[task.name]])[0]
        return Cell(
            readings.correct.numpy(),
            readings.log_prob,
            readings.log_max,
            readings.surprise,
            self.finder.activations_of(readings.z),
            said.sum(1).float(),
        )

    def last_cell(self, task: str) -> Cell:
        """Prompts with as many examples as the heads were found with, or nearly so."""
        most = max(n for n in self.shots(self.tasks[task]) if n <= self._most_shots)
        return self.cells[task][f"{most} examples"]

    def example_cells(self, task: str) -> list[Cell]:
        """Prompts of one to five examples."""
        return [cell for kind, cell in self.cells[task].items() if "examples" in kind]

    # C1 and C2: specific, and shared ----------------------------------------------------------------------------------

    def speaking_elsewhere(self, task: str) -> Tensor:
        """Heads of a task that say its words, in prompts of other tasks, (n,)."""
        return torch.cat([self.last_cell(other).activations[task] for other in self.tasks if other != task])

    @cached_property
    def specificity(self) -> dict[str, float]:
        """Heads that speak in their own task's prompts."""
        own = {task: float(self.last_cell(task).activations[task].mean()) for task in self.tasks}
        values = {"heads that speak": float(np.mean(list(own.values())))}
        if len(self.tasks) > 1:
            values |= {
                f"{task}: own minus other prompts": own[task] - float(self.speaking_elsewhere(task).mean())
                for task in self.tasks
            }
        return values

    @cached_property
    def sharing(self) -> dict[str, Any]:
        """Shared heads of every task whose styles were both run."""
        if "instruction" not in self.finder.styles_:
            return {}
        n = self.lens.n_layers * self.lens.n_heads
        return {task: sharing(self.heads(task), self.heads(task, "instruction"), n) for task in self.tasks}

    @property
    def sharing_values(self) -> dict[str, float]:
        """Means over tasks."""
        if not self.sharing:
            return {}
        overlaps = [overlap(self.heads(task), self.heads(task, "instruction")) for task in self.sharing]
        return {
            "shared heads": float(np.mean([found.shared for found in self.sharing.values()])),
            "overlap": float(np.mean(overlaps)),
        }

    # C3: repair -------------------------------------------------------------------------------------------------------

    @cached_property
    def failing(self) -> dict[str, list[int]]:
        """Queries that are answered wrongly after one example, of tasks with enough of them."""
        found = {}
        for task, (_, measured) in self.queries.items():
            wrong = ~self.cells[task][f"{self.shots(self.tasks[task])[0]} examples"].correct
            failed = [query for query, yes in zip(measured, wrong.tolist(), strict=True) if yes]
            if len(failed) >= FEWEST_FAILURES:
                found[task] = failed
        return found

    @property
    def missing_repairs(self) -> dict[str, str]:
        """What cannot be said where hardly any prompt fails."""
        if self.failing:
            return {}
        reason = f"no task has {FEWEST_FAILURES} prompts of one example that fail"
        return dict.fromkeys(("repaired", "repaired MRR"), reason)

    @cache  # noqa: B019
    def _to_repair(self, task: str) -> tuple[list[tuple[list[int], PromptBatch]], Tensor]:
        """The failing prompts of one example, run up to their last token, and the answers."""
        prompts = build_prompts(self.tasks[task], n_shots=1, indices=self.failing[task])
        answers = [self.tasks[task].pairs[i][1] for i in self.failing[task]]
        rows = token_rows(self.tokenizer, prompts)
        return list(prompt_batches(self.model, rows, self.batch_size)), answer_tokens(self.tokenizer, prompts, answers)

    def _mean_outputs(self, task: str) -> Tensor:
        """What heads give in correctly answered prompts of five examples that heads were found with."""
        return self.finder.readings_[task]["examples"].z.mean(0)

    def related(self, task: str) -> str:
        """The task that has most inputs in common, or else the next one."""
        names = list(self.tasks)
        after = [names[(names.index(task) + i) % len(names)] for i in range(1, len(names))]
        inputs = {a for a, _ in self.tasks[task].pairs}
        return max(after, key=lambda other: len(inputs & {a for a, _ in self.tasks[other].pairs}))

    def edited_heads(self, kind: str, task: str) -> list[list[Head]]:
        """The sets of heads of an arm."""
        lexical = self.heads(task)
        if kind == "random":
            return self.random_heads[task]
        if kind == "whole layers":
            layers = {layer for layer, _ in lexical}
            return [[(layer, head) for layer in sorted(layers) for head in range(self.lens.n_heads)]]
        if kind == "retrieval":
            return [self._top(self.retrieval_scores(task), len(lexical))]
        if kind == "function vector":
            # As many as there are lexical heads: where there are none, none.
            return [self._top(self._indirect_effects[task], len(lexical)) if lexical else []]
        return [lexical]

    @staticmethod
    def _top(scores: Tensor, n: int) -> list[Head]:
        order = scores.flatten().argsort(descending=True, stable=True)[:n].tolist()
        return sorted((i // scores.shape[1], i % scores.shape[1]) for i in order)

    @cache  # noqa: B019
    def retrieval_scores(self, task: str) -> Tensor:
        """How often each head says the answer, (layers, heads)."""
        z, tokens = self.finder.readings_[task]["examples"].z, self._found_answers(task)
        parts = zip(z.split(self.batch_size), tokens.split(self.batch_size), strict=True)
        said = [self.lens.says_own(self.lens.normed(part), own, self.finder.k) for part, own in parts]
        return torch.cat(said).float().mean(0)

    def _found_answers(self, task: str) -> Tensor:
        queries = self.finder.queries_[task]["examples"]
        prompts = build_prompts(self.tasks[task], n_shots=self._most_shots, indices=queries)
        return answer_tokens(self.tokenizer, prompts, [self.tasks[task].pairs[i][1] for i in queries])

    @cached_property
    def _indirect_effects(self) -> dict[str, Tensor]:
        """By task, how much likelier the answer becomes when one head is patched, of prompts with shuffled outputs."""
        every = [(layer, head) for layer in range(self.lens.n_layers) for head in range(self.lens.n_heads)]
        effects = {}
        for i, (name, task) in enumerate(self.tasks.items()):
            if name not in self.failing or not self.heads(name):
                continue
            queries = self.finder.queries_[name]["examples"][: self.sizes.function_vector_prompts]
            prompts = _shuffled(task, queries, self._most_shots, self.rng(3, i))
            rows = token_rows(self.tokenizer, prompts)
            tokens = answer_tokens(self.tokenizer, prompts, [task.pairs[j][1] for j in queries])
            mean = self._mean_outputs(name)
            edits = [Edit([], mean), *(Edit([head], mean) for head in every)]
            batched = prompt_batches(self.model, rows, self.batch_size)
            likely = run_edits(self.model, batched, tokens, edits, self.batch_size)[1].exp()
            effects[name] = (likely[1:] - likely[0]).mean(1).reshape(self.lens.n_layers, self.lens.n_heads)
        return effects

    def repaired(self, kind: str) -> tuple[dict[str, float], dict[str, str], list[str]]:
        """Share of repaired answers and mean reciprocal rank, over tasks; and both of every task."""
        found = {task: self.repair(kind, task) for task in self.failing}
        if not found:
            return {}, self.missing_repairs, []
        repaired, mrr = np.mean(list(found.values()), axis=0).tolist()
        values = {"repaired": repaired, "repaired MRR": mrr}
        if kind == "lexical":
            values |= {
                f"{task}: repaired minus random": found[task][0] - self.repair("random", task)[0] for task in found
            }
        words = [f"{task} {a:.2f} (MRR {b:.2f})" for task, (a, b) in found.items()]
        return values, {}, [f"repaired: {', '.join(words)}"]

    @cache  # noqa: B019
    def repair(self, kind: str, task: str) -> tuple[float, float]:
        """Of a task's failing prompts: share repaired, and mean reciprocal rank.

        The setting is chosen on one half of the prompts and measured on the other, both ways.
        """
        ranks = self._vector_ranks(task) if kind == "task vector" else self._ranks(task)[kind]
        order = self.rng(4, list(self.tasks).index(task)).permutation(ranks.shape[-1])
        share, mrr = np.mean([_chosen(of_set, order[::2], order[1::2]) for of_set in ranks], axis=0).tolist()
        return share, mrr

    @cache  # noqa: B019
    def _ranks(self, task: str) -> dict[str, NDArray[np.int64]]:
        """Ranks of the answers when heads are patched, by arm: (sets, scales, n)."""
        kinds = ["lexical", "random", "retrieval", "whole layers"]
        kinds += ["related task"] if len(self.tasks) > 1 else []
        kinds += ["function vector"] if self.sizes.function_vector_prompts else []
        own = self._mean_outputs(task)
        related = self._mean_outputs(self.related(task)) if len(self.tasks) > 1 else own
        sets = {kind: self.edited_heads(kind, task) for kind in kinds}
        edits = [
            Edit(heads, related if kind == "related task" else own, scale)
            for kind in kinds
            for heads in sets[kind]
            for scale in SCALES
        ]
        batched, answers = self._to_repair(task)
        ranks = run_edits(self.model, batched, answers, edits, self.batch_size)[0].long().numpy()
        bounds = np.cumsum([len(sets[kind]) * len(SCALES) for kind in kinds])[:-1]
        parts = np.split(ranks, bounds)
        return {kind: part.reshape(-1, len(SCALES), len(answers)) for kind, part in zip(kinds, parts, strict=True)}

    def _vector_ranks(self, task: str) -> NDArray[np.int64]:
        """Ranks under vectors that are added to the residual stream, one set: (1, layers and scales, n)."""
        layers = sorted({max(1, round(depth * n_layers(self.model))) for depth in VECTOR_DEPTHS})
        queries = self.finder.queries_[task]["examples"]
        means = []
        for shots in (self._most_shots, 1):
            ids = token_rows(self.tokenizer, build_prompts(self.tasks[task], n_shots=shots, indices=queries))
            at = record(self.model, ids, layers, batch_size=self.batch_size, dtype=torch.float32)
            means.append({layer: torch.from_numpy(np.asarray(at[layer])).mean(0) for layer in layers})
        settings = [(layer, scale) for layer in layers for scale in VECTOR_SCALES]
        batched, answers = self._to_repair(task)
        ranks = np.empty((1, len(settings), len(answers)), dtype=np.int64)
        for places, prompts in batched:
            adders = {}
            for layer in layers:
                # Each copy of the prompts is changed in the layer of its setting alone.
                scales = torch.tensor([scale if at == layer else 0.0 for at, scale in settings])
                vector = means[0][layer] - means[1][layer]
                adders[layer] = partial(_added, scales.repeat_interleave(len(places))[:, None] * vector)
            logits = prompts.step(len(settings), [Steering(self.model, adders, positions="last")])
            rank = score(logits, answers[places].repeat(len(settings)))[0].long()
            ranks[0][:, places] = rank.reshape(len(settings), len(places)).numpy()
        return ranks

    def path_effect(self, kind: str) -> float:
        """How many more retrieval heads say the answer, where they read what lexical (or random) heads write."""
        changes = []
        for task in self.failing:
            batched, tokens = self._to_repair(task)
            senders = self.heads(task) if kind == "lexical" else self.random_heads[task][0]
            receivers = self._top(self.retrieval_scores(task), max(FEWEST_RECEIVERS, len(self.heads(task))))
            edit = Edit(senders, self._mean_outputs(task), PATH_SCALE)
            before, after = direct_outputs(self.model, batched, len(tokens), edit)
            changes.append(self._say_answers(after, receivers, tokens) - self._say_answers(before, receivers, tokens))
        return float(np.mean(changes)) if changes else math.nan

    def _say_answers(self, z: Tensor, heads: Sequence[Head], tokens: Tensor) -> float:
        """Mean number of heads that say their prompt's answer."""
        total = 0
        for layer in sorted({layer for layer, _ in heads}):
            of_layer = [head for l, head in heads if l == layer]
            normed = self.lens.normed(z[:, layer : layer + 1], [layer])[:, 0, of_layer]
            total += int(self.lens.says_own(normed, tokens, self.finder.k).sum())
        return total / len(z)

    # C4 to C6: variation, failure, competition ------------------------------------------------------------------------

    @cached_property
    def signs(self) -> tuple[dict[str, float], dict[str, str]]:
        """Whether activation goes with accuracy: from one example to five, and over all prompts of a task."""
        agree, correlations = [], []
        for task, cells in self.cells.items():
            first, last = self.example_cells(task)[0], self.last_cell(task)
            gain = float(last.activations[task].mean() - first.activations[task].mean())
            better = float(last.correct.mean() - first.correct.mean())
            agree.append(float(gain * better > 0))
            activation = [float(cell.activations[task].mean()) for cell in cells.values()]
            accuracy = [float(cell.correct.mean()) for cell in cells.values()]
            if len(set(activation)) > 1 and len(set(accuracy)) > 1:
                correlations.append(float(spearmanr(activation, accuracy).statistic))
        values = {"tasks with the sign": float(np.mean(agree))}
        if not correlations:
            return values, {"rank correlation": "no task has prompts that differ in activation and in accuracy"}
        return values | {"rank correlation": float(np.mean(correlations))}, {}

    @property
    def lines(self) -> dict[str, list[tuple[float, float]]]:
        """Mean activation over the number of examples."""
        points = []
        for n in self.sizes.shots:
            kind = f"{n} examples"
            found = [float(cells[kind].activations[t].mean()) for t, cells in self.cells.items() if kind in cells]
            points.append((float(n), float(np.mean(found)) if found else math.nan))
        return {"shots": points}

    def _score(self, kind: str, task: str, cell: Cell) -> Tensor:
        if kind == "activation":
            return cell.activations[task]
        if kind == "share":
            return shares(cell.activations, task)
        if kind == "max softmax":
            return cell.log_max
        return -cell.surprise if kind == "perplexity" else cell.log_prob

    def auroc(self, kind: str) -> dict[str, float]:
        """How well a score tells correct prompts of one to five examples, within tasks: the mean, and each."""
        found = {}
        for task in self.tasks:
            cells = self.example_cells(task)
            correct = np.concatenate([cell.correct for cell in cells])
            if 0 < correct.sum() < len(correct):
                scores = torch.cat([self._score(kind, task, cell) for cell in cells]).numpy()
                found[task] = float(roc_auc_score(correct, scores))
        values = {"auroc": float(np.mean(list(found.values()))) if found else math.nan}
        if kind in ("activation", "share"):
            values |= {f"{task}: auroc": value for task, value in found.items()}
        return values

    def cross_validated(self) -> Metrics:
        """AUROC within tasks of a model that was fitted on other queries."""
        x, wrong, groups, names = [], [], [], []
        for i, task in enumerate(self.tasks):
            for cell in self.example_cells(task):
                x.append(failure_features(cell.activations, task))
                wrong.append(~cell.correct)
                groups.append(10**6 * i + np.arange(len(cell.correct)))
                names += [task] * len(cell.correct)
        y, of = np.concatenate(wrong), np.array(names)
        splits = list(GroupKFold(FOLDS).split(np.concatenate(x), y, np.concatenate(groups)))
        if any(len(np.unique(y[train])) < 2 for train, _ in splits):
            return Metrics(missing={"auroc": "nearly all prompts are answered alike"})
        predicted = cross_val_predict(failure_model(), np.concatenate(x), y, cv=splits, method="predict_proba")[:, 1]
        found = [
            roc_auc_score(y[of == task], predicted[of == task]) for task in self.tasks if 0 < y[of == task].mean() < 1
        ]
        if not found:
            return Metrics(missing={"auroc": "no task has prompts of both kinds"})
        return Metrics({"auroc": float(np.mean(found)), "auroc over all tasks": float(roc_auc_score(y, predicted))})

    def share_where(self, *, correct: bool) -> Metrics:
        """The task's share of the activations in prompts of one to five examples, over tasks that have both kinds."""
        if len(self.tasks) < 2:
            return Metrics(missing={"share of the task": ONE_TASK})
        found = []
        for task in self.tasks:
            cells = self.example_cells(task)
            right = torch.from_numpy(np.concatenate([cell.correct for cell in cells]))
            share = torch.cat([shares(cell.activations, task) for cell in cells])
            if bool(right.any()) and not bool(right.all()):
                found.append(float(share[right == correct].mean()))
        if not found:
            return Metrics(missing={"share of the task": "no task has prompts of both kinds"})
        return Metrics({"share of the task": float(np.mean(found))})

    @property
    def notes(self) -> list[str]:
        """What was found of every task, with intervals over its queries."""
        return [self._note(i, task) for i, task in enumerate(self.tasks)]

    def _note(self, i: int, task: str) -> str:
        heads = " ".join(f"{layer}.{head}" for layer, head in self.heads(task))
        parts = [f"heads {heads}" if heads else "no lexical heads"]
        used = self.finder.n_used_[task]["examples"]
        if "instruction" in self.finder.styles_:
            copied = ", whose words may be copied from it" if self.finder.copied_[task] else ""
            parts.append(f"{self.sharing[task].shared} shared with instruction {self.finder.template_[task]}{copied}")
        parts.append(f"found with {used} prompts")
        if self.dropped[task]:
            parts.append(f"{self.dropped[task]} pairs left out, whose answer begins with white space")
        if len(self.tasks) > 1:
            own, other = self.last_cell(task).activations[task], self.speaking_elsewhere(task)
            low, high = _interval(own.numpy(), other.numpy(), self.rng(5, i))
            verdict = "holds" if low > 0 else "does not hold" if high < 0 else "inconclusive"
            parts.append(
                f"{float(own.mean()):.2f} speak in its prompts, {float(other.mean()):.2f} in others "
                f"(95 % of the difference: {low:.2f} to {high:.2f}): {verdict}"
            )
        return f"{task}: {'; '.join(parts)}"


def _added(by: Tensor, hidden: Tensor) -> Tensor:
    return hidden + by.to(hidden)


def _chosen(ranks: NDArray[np.int64], first: NDArray[np.int64], second: NDArray[np.int64]) -> tuple[float, float]:
    """Share of rank 0 and mean reciprocal rank of (settings, n), the setting of each half chosen on the other."""
    right, reciprocal = ranks == 0, 1 / (ranks + 1)
    found = np.zeros((2, ranks.shape[1]))
    for measured, other in ((first, second), (second, first)):
        best = max(range(len(ranks)), key=lambda s: (right[s, other].mean(), reciprocal[s, other].mean(), -s))
        found[:, measured] = right[best, measured], reciprocal[best, measured]
    share, mrr = found.mean(1).tolist()
    return share, mrr


def _interval(own: NDArray[Any], other: NDArray[Any], rng: np.random.Generator) -> tuple[float, float]:
    """Percentile interval of the difference of two means, over queries."""
    a = rng.choice(own, (RESAMPLES, len(own))).mean(1)
    b = rng.choice(other, (RESAMPLES, len(other))).mean(1)
    low, high = np.quantile(a - b, [0.025, 0.975]).tolist()
    return low, high


def _shuffled(task: Task, queries: Sequence[int], n_shots: int, rng: np.random.Generator) -> list[str]:
    """Prompts of examples whose outputs are those of others of the task."""
    prompts = []
    for i in queries:
        shots = [task.pairs[j % len(task.pairs)] for j in range(i - n_shots, i)]
        others = [pair[1] for j, pair in enumerate(task.pairs) if j != i]
        wrong = rng.choice(len(others), n_shots, replace=False)
        pairs = zip((a for a, _ in shots), (others[j] for j in wrong), strict=True)
        prompts.append("".join(f" {a}: {b};" for a, b in pairs) + f" {task.pairs[i][0]}:")
    return prompts


@lru_cache(maxsize=1)
def _language_model(name: str | None, device: str) -> Any:
    loaded = load_language_model(name, device=device)
    head_shape(loaded.model)
    return loaded


def _tasks(request: Request, sizes: Sizes) -> dict[str, Task]:
    wanted = request.options.get("tasks")
    names = None if wanted is None else [name.strip() for name in wanted.split(",") if name.strip()]
    if names is not None and not names:
        raise CannotMeasure(f"--tasks {wanted!r}: must be names of tasks, separated by commas")
    if request.data is None:
        return load_tasks(names or request.pick(quick=list(QUICK_TASKS), full=None))
    there = read_tasks(request.data)
    for name in names or []:
        if name not in there:
            raise CannotMeasure(
                f"--tasks {wanted}: there is no {name!r} in {request.data}; there are {', '.join(there)}"
            )
    return {name: there[name] for name in names or there}
