"""The check of ShotKV on a tiny model and one's own prompts, and its example."""

import json
import math
import runpy
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.trainers import WordLevelTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from practicum.catalog import Catalog
from practicum.checks import CannotMeasure, Request, run_check
from practicum.checks.measure import time_workloads
from practicum.datasets import DataFileError
from practicum.serving.shotkv.bench import TokenizedItem
from practicum.serving.shotkv.check import NEEDS_FULL, NOT_YOURS, ShotKVCheck, Work, _of_length
from practicum.serving.shotkv.tasks import TASKS, long_item, shot_items

EXAMPLE = Path(__file__).parents[2] / "examples" / "shotkv.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny model that knows the words of the prompts."""
    words = Tokenizer(models.WordLevel(unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Whitespace()])
    texts = [item.prompt + item.answer for task in TASKS for item in shot_items(task, 2, 8)]
    words.train_from_iterator(texts, WordLevelTrainer(special_tokens=["?"], vocab_size=400))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="?")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    path = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).eval().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    path.write_text("\n".join(json.dumps(asdict(item)) for item in shot_items("mixed", 4, 8)))
    return path


def small(work, **changes):
    """The work of the full scale, smaller."""
    work.sizes = replace(work.sizes, steps=1, context=64, **changes)
    return work


@pytest.fixture(scope="module")
def works(folder):
    work = small(ShotKVCheck().prepare(Request(scale="full", model=str(folder))))
    work.items = {task: items[:2] for task, items in work.items.items()}
    work.long = TokenizedItem.of(long_item(2, 4), work.tokenizer)
    return work


@pytest.fixture(scope="module")
def in_full(works):
    return {name: method(works) for name, method in ShotKVCheck().arms().items()}


def test_every_claim_has_its_numbers(in_full):
    for comparison in ShotKVCheck.comparisons:
        for arm in (comparison.arm, *comparison.baselines):
            found = in_full[arm]
            assert comparison.metric in {**found.values, **found.timed, **found.missing}, (comparison.claim, arm)
    # Where accuracy does not fall at all there is no ratio; everything else is a number.
    values = [value for m in in_full.values() for name, value in m.values.items() if "fall" not in name]
    assert all(math.isfinite(value) for value in values)


def test_all_arms_keep_as_many_tokens(in_full, works):
    for task in TASKS:
        kept = {name: m.values[f"kept ({task})"] for name, m in in_full.items() if f"kept ({task})" in m.values}
        budget = kept["snapkv"]
        assert {kept[name] for name in ("snapkv", "h2o", "chunkkv", "streamingllm", "pyramidkv")} == {budget}
        for name in ("shotkv", "shotkv-accumulated", "shotkv-global", "random-units"):
            # Whole units seldom fill the budget, and where none fits one is kept.
            longest = max(unit.end - unit.start for item in works.items[task] for unit in item.units)
            assert abs(kept[name] - budget) <= longest


def test_only_some_arms_write_long_answers(in_full):
    written = {name for name, metrics in in_full.items() if "nll (long)" in metrics.values}
    assert {"full-cache", "shotkv", "h2o", "shotkv-prefill-only"} <= written
    assert not written & {"shotkv-accumulated", "shotkv-global", "pyramidkv"}


def test_the_stopwatch_gets_the_same_steps_at_two_lengths(in_full):
    timings, errors = time_workloads({name: in_full[name].timed["seconds"] for name in ("full-cache", "shotkv")})
    assert not errors
    assert all(timing["value"] > 0 for timing in timings.values())


def test_the_stopwatch_holds_the_share_that_is_kept():
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32)
    model = LlamaForCausalLM(config)
    for share, tokens in ((1.0, 100), (0.4, 40)):
        cache = _of_length(model, 100, share)
        assert cache.get_seq_length() == 100
        assert cache.held().tokens == (tokens, tokens)


def test_quick_says_what_it_has_no_time_for(folder):
    check = ShotKVCheck()
    work = small(check.prepare(Request(model=str(folder))))
    missing = check.arms()["shotkv"](work).missing
    assert missing["nll (needle)"] == missing["nll (docs)"] == missing["nll (long)"] == NEEDS_FULL
    assert "nll (mixed)" not in missing


def test_on_ones_own_model_and_prompts(folder, prompts, tmp_path):
    card = Catalog()["shotkv"]
    result = run_check(
        card, Catalog().load_check(card), seeds=1, jobs=1, model=str(folder), data=str(prompts), out=tmp_path
    )
    assert not [row for row in result.rows if row.status == "failed"]
    rows = {row.arm: row for row in result.rows}
    assert rows["shotkv"].metrics["nll (yours)"] > 0
    verdicts = {claim.claim: claim for claim in result.claims}
    assert NOT_YOURS in verdicts["best-on-documents"].reason
    assert verdicts["faster-decoding"].verdict != "could not measure"


def test_remarks_say_what_compression_costs_and_which_choice_is_better():
    means = {
        "full-cache": {"accuracy (sums)": 0.8},
        "shotkv": {"accuracy (sums)": 0.6, "nll (mixed) at 0.1": 0.5},
        "shotkv-global": {"accuracy (sums)": 0.4, "nll (mixed) at 0.1": 0.3},
    }
    told = list(ShotKVCheck().remarks(means))
    assert told[0].endswith("change from 0.80 at 25%: shotkv -25%, shotkv-global -50%.")
    assert "one choice for all layers is better: 0.500 against 0.300" in told[1]


def test_prompts_that_are_wrong_are_refused(folder, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"units": ["a"], "query": "b"}\n')
    with pytest.raises(DataFileError, match="line 1: field 'answer'"):
        ShotKVCheck().prepare(Request(model=str(folder), data=str(path)))
    path.write_text(json.dumps({"units": ["Q "] * 3000, "query": "A", "answer": " A"}) + "\n")
    with pytest.raises(CannotMeasure, match="--data: a prompt of .* tokens is longer than the model reads, 2048"):
        ShotKVCheck().prepare(Request(model=str(folder), data=str(path)))


def test_the_work_follows_the_seed(folder):
    check = ShotKVCheck()
    works = [check.prepare(Request(model=str(folder), seed=seed)) for seed in (0, 0, 1)]
    assert isinstance(works[0], Work)
    texts = [[item.prompt.tolist() for item in work.items["mixed"]] for work in works]
    assert texts[0] == texts[1] != texts[2]


def test_the_example_runs(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "kept" in capsys.readouterr().out
