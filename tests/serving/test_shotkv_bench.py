"""The diagnosis: prompts, how answers are scored, the benchmark and its program."""

import json
import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.trainers import WordLevelTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from practicum.datasets import DataFileError
from practicum.serving.shotkv import (
    H2O,
    KVFundaBench,
    ShotItem,
    ShotKV,
    SnapKV,
    kvfundabench,
    read_shot_items,
    shot_items,
    split_units,
)
from practicum.serving.shotkv.bench import METHODS, Cell, Evaluator, TokenizedItem, attention_profile
from practicum.serving.shotkv.figures import write_bench_page
from practicum.serving.shotkv.program import app
from practicum.serving.shotkv.tasks import TASKS, long_item
from practicum.toolbox.errors import InputError


@pytest.fixture(scope="module")
def tokenizer():
    """Words and marks of the generated prompts."""
    words = Tokenizer(models.WordLevel(unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Whitespace()])
    texts = [item.prompt + item.answer for task in TASKS for item in shot_items(task, 2, 8)]
    words.train_from_iterator(texts, WordLevelTrainer(special_tokens=["?"], vocab_size=400))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="?")


@pytest.fixture(scope="module")
def model():
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
    return LlamaForCausalLM(config).eval()


# Prompts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_prompts_share_their_units_and_follow_the_seed(task):
    items = shot_items(task, 4, 8, random_state=3)
    assert len(items) == 4
    assert len({item.units for item in items}) == 1
    assert len(items[0].units) == 8
    assert items == shot_items(task, 4, 8, random_state=3)
    assert items != shot_items(task, 4, 8, random_state=4)
    assert all("".join(item.units) not in item.query for item in items)
    for item in items:
        assert [item.prompt[a:b] for a, b in item.spans] == list(item.units)


@pytest.mark.parametrize("task", ["sums", "chain", "reversed", "mixed", "label"])
def test_no_question_is_among_the_examples(task):
    for item in shot_items(task, 5, 12):
        assert not any(unit.startswith(item.query) for unit in item.units)


def test_answers_are_right():
    for item in shot_items("sums", 6, 4):
        numbers = [int(word.strip(".?")) for word in item.query.split() if word.strip(".?").isdigit()]
        assert item.answer.endswith(f"The answer is {numbers[0] + numbers[1] - numbers[2]}.")
    for item in shot_items("needle", 6, 16):
        name = item.query.split("locker of ")[1].split("?")[0]
        assert f"The locker of {name} has the code{item.answer} " in item.units
    for item in shot_items("docs", 4, 6):
        name = item.query.rsplit("Answer: ", 1)[1]
        assert any(unit.startswith(name + item.answer) for unit in item.units)
    for item in shot_items("reversed", 4, 4):
        assert item.query.split("backwards: ")[1].split("\n")[0].split()[::-1] == item.answer.split()


def test_a_long_item_answers_all_its_questions():
    item = long_item(7, 4)
    assert item.answer.count("The answer is") == item.query.count("left?") == 7


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shot_items("poems", 2), "task='poems': must be one of sums"),
        (lambda: shot_items("sums", 0), "n_items=0: must be 1 or more"),
        (lambda: shot_items("sums", 1, 3), "n_units=3: must be 4 or more"),
        (lambda: shot_items("label", 5, 30), "there are not as many questions of a kind; 32 were found"),
        (lambda: long_item(0), "n_questions=0: must be 1 or more"),
    ],
)
def test_prompts_that_cannot_be_made_are_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"units": ["a"], "query": "b"}', "line 2: field 'answer': must be text that is not empty; got nothing"),
        ('{"units": ["a"], "query": 3, "answer": "c"}', "line 2: field 'query': must be text"),
        ('{"units": [], "query": "b", "answer": "c"}', "line 2: field 'units': must be a list of texts"),
        ('{"units": "ab", "query": "b", "answer": "c"}', "line 2: field 'units': must be a list"),
        ('{"units": ["a"], "query": "b", "answer": "c", "preamble": 1}', "line 2: field 'preamble': must be text"),
        ("[1]", "line 2: must be an object"),
    ],
)
def test_files_that_are_wrong_are_refused(tmp_path, line, message):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"units": ["a"], "query": "b", "answer": "c"}\n' + line + "\n")
    with pytest.raises(DataFileError, match=message):
        read_shot_items(path)
    path.write_text("")
    with pytest.raises(DataFileError):
        read_shot_items(path)


# Scoring -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_whole_cache_scores_as_one_pass_does(model, tokenizer):
    for item in shot_items("mixed", 3, 8):
        tokens = TokenizedItem.of(item, tokenizer)
        logits = model(torch.cat([tokens.prompt, tokens.answer], dim=1)).logits[0, tokens.prompt.shape[1] - 1 : -1]
        expected = torch.nn.functional.cross_entropy(logits, tokens.answer[0])
        evaluator = Evaluator(model, tokenizer)
        answered = evaluator.answer(tokens, evaluator.read(tokens), None)
        assert answered.nll == pytest.approx(float(expected), abs=1e-4)
        assert answered.accuracy == pytest.approx(float((logits.argmax(-1) == tokens.answer[0]).float().mean()))


@pytest.mark.parametrize("press", [ShotKV(0.4), SnapKV(0.4), H2O(0.4), ShotKV(0.4, scoring="accumulated")])
@torch.no_grad()
def test_what_is_shared_changes_nothing(model, tokenizer, press):
    """Against a prefill of each prompt on its own, and the answer token by token."""
    shared = Evaluator(model, tokenizer)
    for item in shot_items("mixed", 3, 8):
        tokens = TokenizedItem.of(item, tokenizer)
        answered = shared.answer(tokens, shared.read(tokens), press)
        cache = press.prefill(model, tokens.prompt, tokens.units)
        losses, token = [], tokens.prompt[:, -1:]
        for i in range(tokens.answer.shape[1]):
            logits = model(token, cache=cache, use_cache=True).logits[0]
            losses.append(torch.nn.functional.cross_entropy(logits, tokens.answer[0, i : i + 1]))
            token = tokens.answer[:, i : i + 1]
        assert answered.nll == pytest.approx(float(torch.stack(losses).mean()), abs=1e-4)
        assert answered.kept == pytest.approx(np.mean(list(cache.report.kept_tokens.values())))


def test_stepwise_and_at_once_agree_while_nothing_is_let_go_of(model, tokenizer):
    item = TokenizedItem.of(long_item(2, 4), tokenizer)
    evaluator = Evaluator(model, tokenizer)
    reading = evaluator.read(item)
    at_once = evaluator.answer(item, reading, ShotKV(0.5))
    stepwise = evaluator.answer(item, reading, ShotKV(0.5, 0.9, min_decode=10_000))
    assert stepwise.nll == pytest.approx(at_once.nll, abs=1e-4)
    evicting = evaluator.answer(item, reading, ShotKV(0.5, 0.2, min_decode=4, recent=2, decode_interval=4))
    assert evicting.nll != pytest.approx(at_once.nll, abs=1e-6)


def test_where_attention_goes(model, tokenizer):
    evaluator = Evaluator(model, tokenizer)
    share, entropy = attention_profile(evaluator.read(TokenizedItem.of(shot_items("sums", 1, 6)[0], tokenizer)))
    assert 0 < share < 1
    assert 0 < entropy < math.log(400)


def test_an_answer_without_tokens_is_refused(tokenizer):
    with pytest.raises(InputError, match="answer: ' ' has no token"):
        TokenizedItem.of(ShotItem("", ("a ",), "b", " "), tokenizer)


def test_units_are_those_of_the_text(tokenizer):
    item = shot_items("sums", 1, 6)[0]
    tokens = TokenizedItem.of(item, tokenizer)
    assert tokens.units == split_units(tokenizer, item.prompt, spans=item.spans).units
    assert len(tokens.units) == 6
    assert tokens.tail >= 8


# The benchmark -------------------------------------------------------------------------------------------------------


def run(model, tokenizer, **changes):
    options = {"tasks": ["sums", "needle", "label"], "methods": ["shotkv", "h2o"], "ratios": [0.5], "seeds": 2}
    *_, found = kvfundabench(model, tokenizer, **{**options, "n_items": 2, "n_units": 6, **changes})
    return found


def test_the_benchmark_measures_every_cell(model, tokenizer, tmp_path):
    found = run(model, tokenizer)
    cells = {(c.task, c.method, c.ratio, c.seed) for c in found.cells}
    assert len(cells) == len(found.cells) == 3 * 3 * 2
    assert found.tasks == ["sums", "needle", "label"]
    assert found.methods == [("shotkv", 0.5), ("h2o", 0.5)]
    assert set(found.gain) == set(found.sinks) == set(found.entropy) == set(found.tasks)
    assert -1 <= found.gain_and_sensitivity() <= 1
    found.save(tmp_path / "bench.json")
    assert KVFundaBench.load(tmp_path / "bench.json") == found
    assert run(model, tokenizer) == found


def test_the_benchmark_goes_on_where_it_was(model, tokenizer):
    whole = run(model, tokenizer)
    steps = kvfundabench(
        model, tokenizer, ["sums", "needle", "label"], ["shotkv", "h2o"], [0.5], 2, n_items=2, n_units=6
    )
    for _ in range(3):
        part = next(steps)
    assert len(part.cells) < len(whole.cells)
    resumed = run(model, tokenizer, done=part)
    assert sorted(map(str, resumed.cells)) == sorted(map(str, whole.cells))
    assert resumed.gain == pytest.approx(whole.gain)


def test_statistics_of_known_cells():
    cells = [
        Cell("a", "full", 1.0, 0, 0.1, 0.8, 0.5),
        Cell("a", "full", 1.0, 1, 0.3, 0.6, 0.5),
        Cell("a", "h2o", 0.1, 0, 1.2, 0.2, 0.0),
        Cell("a", "h2o", 0.1, 1, 1.2, 0.5, 0.0),
        Cell("b", "full", 1.0, 0, 1.0, 0.0, 0.0),
        Cell("b", "h2o", 0.1, 0, 1.5, 0.0, 0.0),
    ]
    bench = KVFundaBench(cells, gain={"a": 2.0, "b": 0.5})
    assert bench.change("a", "h2o", 0.1) == pytest.approx((0.35 - 0.7) / 0.7)
    assert math.isnan(bench.change("b", "h2o", 0.1))
    assert bench.sensitivity("a") == pytest.approx(1.0)
    assert math.isnan(bench.gain_and_sensitivity())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["zip"]}, "methods: 'zip' is none of shotkv, snapkv"),
        ({"seeds": 0}, "seeds=0: must be 1 or more"),
        ({"ratios": [1.5]}, "prefill_ratio=1.5: must be above 0"),
    ],
)
def test_a_benchmark_that_cannot_run_is_refused(model, tokenizer, changes, message):
    with pytest.raises(InputError, match=message):
        run(model, tokenizer, **changes)


def test_a_foreign_result_is_refused(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text('{"cells": [{"task": 1}]}')
    with pytest.raises(InputError, match=r"bench.json: is no result of the benchmark"):
        KVFundaBench.load(path)


def test_the_page_has_every_task_and_method(model, tokenizer, tmp_path):
    found = run(model, tokenizer)
    write_bench_page(tmp_path / "page.html", found, title="Mine <1>", notes=["A note."])
    text = (tmp_path / "page.html").read_text()
    assert "<h1>Mine &lt;1&gt;</h1>" in text
    assert all(f"<td>{task}</td>" in text for task in found.tasks)
    assert "<th>h2o 50%</th>" in text
    assert text.count("Plotly.newPlot") == 3
    assert "http" not in text.split("</style>")[0]


def test_the_program_measures_ones_own_prompts_and_resumes(model, tokenizer, tmp_path):
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    mine = tmp_path / "mine.jsonl"
    rows = [
        {"preamble": i.preamble, "units": i.units, "query": i.query, "answer": i.answer}
        for i in shot_items("sums", 2, 5)
    ]
    mine.write_text("\n".join(map(json.dumps, rows)))
    options = ["bench", "--model", str(folder), "--tasks", f"needle,{mine}", "--methods", "shotkv,random"]
    options += ["--ratios", "0.5", "--seeds", "1", "--items", "2", "--shots", "6", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, options, catch_exceptions=False)
    assert done.exit_code == 0
    first = (tmp_path / "out" / "bench.json").read_text()
    assert {cell["task"] for cell in json.loads(first)["cells"]} == {"needle", "mine"}
    assert "shotkv 50%" in done.output
    assert (tmp_path / "out" / "bench.html").exists()
    CliRunner().invoke(app, options, catch_exceptions=False)
    assert (tmp_path / "out" / "bench.json").read_text() == first
    with pytest.raises(InputError, match="--ratios half: must be numbers"):
        CliRunner().invoke(app, [*options[:5], "--ratios", "half"], catch_exceptions=False)


def test_every_method_can_be_measured(model, tokenizer):
    found = run(model, tokenizer, tasks=["label"], methods=list(METHODS), seeds=1)
    assert [method for method, _ in found.methods] == list(METHODS)
