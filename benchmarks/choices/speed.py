"""Time the scoring of options beside a row for each option, interleaved; write results/benchmarks/choices.json.

Run from the checkout: ``python benchmarks/choices/speed.py``. It takes some minutes, and the first time some more to
expand the embedded model. Seconds are of CPU time on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from practicum.checks.check import Workload
from practicum.checks.measure import limit_threads, machine, time_workloads
from practicum.checks.results import write_json
from practicum.checks.store import versions
from practicum.datasets import MCQuestion, mcq_topics
from practicum.models import load_language_model
from practicum.toolbox.choices import DEFAULT_TEMPLATE, ChoiceScorer

OUT = Path(__file__).resolve().parents[2] / "results" / "benchmarks" / "choices.json"
N_PER_TOPIC = 3
BATCH = 16
REPEATS = 3
LAYER = 18
AT_LEAST = 2.0
LARGEST_DIFFERENCE = 1e-4


def main() -> None:
    """Measure and write."""
    loaded = load_language_model()
    model, tokenizer = loaded.model, loaded.tokenizer
    questions = mcq_topics(N_PER_TOPIC).questions
    figures = []
    with limit_threads(1):
        naive = partial(row_for_each_option, model, tokenizer, questions)
        for what, options in (("scores", {}), (f"scores and the activations of layer {LAYER}", {"layers": [LAYER]})):
            scorer = ChoiceScorer(model, tokenizer, batch_size=BATCH, cache=False, **options)
            figures.append(beside(f"{what}, over padded rows, one an option", naive, scorer, questions))
        scorer = ChoiceScorer(model, tokenizer, batch_size=BATCH, cache=False)
        peer = lm_eval_scorer(model, tokenizer, questions)
        figures.append(beside("scores, over lm-eval's HFLM.loglikelihood", peer, scorer, questions))
    content = {
        "method": "choices",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(("practicum", "numpy", "torch", "transformers", "lm_eval")),
        "ratios": figures,
    }
    write_json(OUT, content)
    for figure in figures:
        print(figure)


def beside(
    what: str, peer: Callable[[], list[np.ndarray]], scorer: ChoiceScorer, questions: Sequence[MCQuestion]
) -> dict[str, Any]:
    """Questions a second over those of a peer, which must give the same scores."""
    ours = scorer(questions).logits
    # Also the warm-up.
    apart = max(float(np.abs(a - b).max()) for a, b in zip(ours, peer(), strict=True))
    assert apart < LARGEST_DIFFERENCE, apart
    works = {
        "ours": Workload(partial(scorer, questions), units=len(questions), clock="cpu", repeats=REPEATS, warm_up=False),
        "peer": Workload(peer, units=len(questions), clock="cpu", repeats=REPEATS, warm_up=False),
    }
    timings, errors = time_workloads(works)
    if errors:
        raise next(iter(errors.values()))
    rates = {name: timings[name]["value"] for name in works}
    ratio = rates["ours"] / rates["peer"]
    return {
        "what": f"questions a second, {what}; {len(questions)} embedded questions",
        "ratio": ratio,
        "at least": AT_LEAST,
        "met": bool(ratio >= AT_LEAST),
        "questions_per_second": [rates["ours"], rates["peer"]],
        "largest difference": apart,
        "repeats": REPEATS,
    }


@torch.no_grad()
def row_for_each_option(model: Any, tokenizer: Any, questions: Sequence[MCQuestion]) -> list[np.ndarray]:
    """Every option in a row with its question, rows of a batch padded to the longest, logits of all positions."""
    prompts = [DEFAULT_TEMPLATE.replace("{question}", question.question) for question in questions]
    rows = [
        (len(tokenizer(prompt)["input_ids"]), tokenizer(f"{prompt} {option}")["input_ids"])
        for prompt, question in zip(prompts, questions, strict=True)
        for option in question.choices
    ]
    scores = []
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        padded = tokenizer.pad({"input_ids": [ids for _, ids in batch]}, padding_side="right", return_tensors="pt")
        likely = model(**padded).logits.log_softmax(dim=-1)
        for i, (n_prompt, ids) in enumerate(batch):
            targets = torch.tensor(ids[n_prompt:])
            places = torch.arange(n_prompt - 1, len(ids) - 1)
            scores.append(likely[i, places, targets].double().sum().item())
    ends = np.cumsum([len(question.choices) for question in questions])[:-1]
    return np.split(np.array(scores), ends)


def lm_eval_scorer(model: Any, tokenizer: Any, questions: Sequence[MCQuestion]) -> Callable[[], list[np.ndarray]]:
    """The same scores by the Hugging Face model class of lm-eval."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    evaluated = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=BATCH)
    pairs = [
        (DEFAULT_TEMPLATE.replace("{question}", question.question), f" {option}")
        for question in questions
        for option in question.choices
    ]
    ends = np.cumsum([len(question.choices) for question in questions])[:-1]

    def score() -> list[np.ndarray]:
        requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
        answers = evaluated.loglikelihood(requests, disable_tqdm=True)
        return np.split(np.array([likely for likely, _ in answers]), ends)

    return score


if __name__ == "__main__":
    main()
