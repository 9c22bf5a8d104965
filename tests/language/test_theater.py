"""Reasoning Theater: instruments against known answers, exits against plain generation, and what is refused."""

import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from typer.testing import CliRunner

from practicum.datasets.files import DataFileError
from practicum.datasets.questions import MCQuestion
from practicum.language.theater import (
    AttentionProbe,
    ExitCurve,
    ForcedAnswer,
    HFMonitor,
    ProbeBelief,
    ProbeEarlyExit,
    ReasoningFormat,
    RegexMonitor,
    Sampling,
    TextProbeMonitor,
    Trace,
    Traces,
    agreement_scores,
    belief_figure,
    belief_shifts,
    beliefs_of,
    budget_scores,
    certainty_scores,
    choose_depth,
    collect_traces,
    confidence_scores,
    curves_figure,
    exit_curve,
    exit_figure,
    format_of,
    generate_with_exit,
    inflections,
    load_reasoner,
    performativity,
    read_traces,
    reasoner_questions,
    record,
    trace_of,
    train_reasoner,
    write_page,
    write_traces,
)
from practicum.language.theater import reasoner as language
from practicum.language.theater.forced import option_tokens
from practicum.language.theater.monitors import ABSTENTION
from practicum.language.theater.program import app
from practicum.language.theater.stopping import first_stop
from practicum.language.theater.traces import decoded, step_boundaries

LAYER = 3
EXACT = Sampling(1.0, 1.0)
LETTERS = ("A", "B", "C", "D")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reasoner():
    return load_reasoner()


@pytest.fixture(scope="module")
def traces(reasoner):
    """Recorded chains by kind."""
    found = {}
    for kind in ("recall", "multi-hop"):
        questions = reasoner_questions(kind, 160, random_state=5)
        found[kind] = collect_traces(
            *reasoner, questions, max_new_tokens=56, sampling=EXACT, format=reasoner.format, batch_size=160
        )
        record(reasoner.model, found[kind], [LAYER], batch_size=160)
    return found


@pytest.fixture(scope="module")
def forced(reasoner):
    return ForcedAnswer(*reasoner, stub=reasoner.format.stub, batch_size=256)


@pytest.fixture(scope="module")
def probe(traces):
    learnt = [*traces["recall"][:120], *traces["multi-hop"][:90]]
    return AttentionProbe(lr=1e-2, epochs=15, random_state=0).fit(
        [trace.hidden[LAYER] for trace in learnt],
        [trace.answer for trace in learnt],
        start=[trace.start for trace in learnt],
        options=[trace.options for trace in learnt],
    )


def planned(cuts, options=LETTERS, answer="A", gold="A", text=None, question="?"):
    """A trace with cuts at these tokens; each step is one word."""
    words = [f"w{k}." for k in range(len(cuts))]
    text = " ".join(words) if text is None else text
    ends = [match.end() for match in re.finditer(r"[.]", text)]
    assert len(ends) == len(cuts)
    n_tokens = cuts[-1] if cuts else 0
    return Trace(question, options, [1, 2], list(range(n_tokens)), list(cuts), answer, gold, text, ends)


def sure(option, n, options=LETTERS):
    return np.tile([float(label == option) for label in options], (n, 1))


def silent(question, prefix, options):
    return None


# The tiny model -------------------------------------------------------------------------------------------------------


def test_the_shipped_model_knows_its_facts_and_does_its_moves(traces, forced):
    recall, hops = traces["recall"], traces["multi-hop"]
    assert np.mean([trace.answer == trace.gold for trace in recall]) >= 0.97
    assert np.mean([trace.answer == trace.gold for trace in hops]) >= 0.5
    world = language.World(language.SHIPPED_SEED)
    right = steps = 0
    for trace in hops:
        words = trace.text.split()
        state = int(trace.question.split()[1][1:])
        for a, b, c in zip(words, words[1:], words[2:], strict=False):
            if a == "step":
                right += c == f"m{world.table[state, int(b[1:])]}"
                steps += 1
                state = int(c[1:]) if c[0] == "m" else state
        assert trace.question.split()[0] == "hop"
    assert right / steps >= 0.8
    # It can tell a fact at any time, and the end of many moves only after doing them.
    at_once = [
        rows[0].argmax() == t.options.index(t.answer) for rows, t in zip(forced.beliefs(recall), recall, strict=True)
    ]
    assert np.mean(at_once) >= 0.95
    guessed = [
        rows[0].argmax() == t.options.index(t.answer) for rows, t in zip(forced.beliefs(hops), hops, strict=True)
    ]
    assert np.mean(guessed) <= 0.45


def test_recall_chains_do_not_tell_the_answer_before_they_say_so(traces):
    monitor = RegexMonitor()
    only_at_the_end = 0
    for trace in traces["recall"][:100]:
        *before, said = [monitor(trace.question, prefix, trace.options) for prefix in trace.prefixes]
        named = said is not None and trace.options[said.argmax()] == trace.answer
        only_at_the_end += named and all(told is None for told in before)
    # Chains are drawn at temperature 1, so one or another goes astray.
    assert only_at_the_end >= 95


def test_an_option_that_is_mentioned_in_a_recall_chain_says_nothing(reasoner):
    world, rng = language.World(0), np.random.default_rng(0)
    right = total = 0
    for _ in range(400):
        question, options, answer = world.ask("recall", rng)
        for step in world.chain(question, options, answer, rng).split(" . ")[:-1]:
            if step.startswith("consider"):
                right += step.split()[1] == answer
                total += 1
    assert abs(right / total - 0.25) < 0.05


def test_theatrical_waits_are_put_in_at_random_and_genuine_ones_follow_a_slip():
    world, rng = language.World(3), np.random.default_rng(1)
    waits = {"theatrical": 0, "multi-hop": 0, "recall": 0}
    for kind in waits:
        for _ in range(300):
            question, options, answer = world.ask(kind, rng)
            chain = world.chain(question, options, answer, rng)
            waits[kind] += "wait" in chain
            if kind == "multi-hop" and "wait" in chain:
                slip = re.search(r"so (m\d) \. wait", chain).group(1)
                assert slip != answer
            assert chain.endswith(f"so {answer} .")
    assert waits["recall"] == 0
    assert abs(waits["theatrical"] / 300 - 0.5) < 0.1
    assert abs(waits["multi-hop"] / 300 - 0.25) < 0.1


def test_training_brings_the_loss_down_and_repeats_itself():
    losses = []
    first = train_reasoner(4, steps=(8, 2), listener=lambda step, loss: losses.append(loss))
    assert len(losses) == 10
    assert losses[7] < 0.9 * losses[0]
    second = train_reasoner(4, steps=(8, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    with pytest.raises(ValueError, match=re.escape("steps=(0, 0): must be two numbers from 0, not both 0")):
        train_reasoner(0, steps=(0, 0))


def test_what_is_learnt_of_a_text():
    """First what follows the question; then all but the end of a chain that was interrupted."""
    tokens, written, following = next(language._batches(0))
    ids = {word: i for i, word in enumerate(language.VOCABULARY)}
    interrupted = 0
    for row, whole, after in zip(tokens, written, following, strict=True):
        think, end = (int((row == ids[word]).nonzero()[0]) for word in ("<think>", "</think>"))
        cut_short = bool((row[:end] != ids["so"]).all())
        interrupted += cut_short
        assert row[1] != ids["hop"] or not cut_short
        length = int((row == ids["<eos>"]).nonzero()[0]) + 1
        assert whole[:length].sum() == length - cut_short
        assert whole[end] != cut_short
        assert after[:length].nonzero()[0] == (end if cut_short else think) + 1
        assert not whole[length:].any()
        assert not after[length:].any()
    assert 0 < interrupted < 32


def test_a_model_of_another_seed_is_trained_once_and_cached(monkeypatch, tmp_path):
    monkeypatch.setenv("PRACTICUM_CACHE", str(tmp_path))
    monkeypatch.setattr(language, "STEPS", (1, 1))
    calls = []
    real = language.train_reasoner

    def counted(seed):
        calls.append(seed)
        return real(seed, (1, 1))

    monkeypatch.setattr(language, "train_reasoner", counted)
    first, second = load_reasoner(7), load_reasoner(7)
    assert calls == [7]
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert not np.array_equal(first.world.facts, language.World(0).facts)


def test_neither_loading_nor_sampling_touches_the_global_generator(reasoner):
    before = torch.get_rng_state()
    load_reasoner()
    train_reasoner(1, steps=(1, 0))
    collect_traces(
        *reasoner, reasoner_questions("recall", 2), max_new_tokens=48, sampling=EXACT, format=reasoner.format
    )
    assert torch.equal(torch.get_rng_state(), before)


def test_questions_of_a_kind_that_is_not_there_are_refused():
    with pytest.raises(ValueError, match="kind='riddle': must be one of recall, multi-hop, theatrical"):
        reasoner_questions("riddle", 3)
    with pytest.raises(ValueError, match="n=0"):
        reasoner_questions("recall", 0)


# Chains ---------------------------------------------------------------------------------------------------------------


def test_the_answer_is_the_models_own(traces):
    own_but_wrong = [trace for trace in traces["multi-hop"] if trace.answer != trace.gold]
    assert own_but_wrong
    assert all(trace.text.split()[-2] == trace.answer for trace in own_but_wrong)


def test_sampling_repeats_itself_and_draws_from_the_softmax(reasoner):
    questions = reasoner_questions("recall", 30)
    same = {"max_new_tokens": 48, "sampling": EXACT, "format": reasoner.format}
    first, second = (collect_traces(*reasoner, questions, random_state=3, **same) for _ in range(2))
    other = collect_traces(*reasoner, questions, random_state=4, **same)
    assert first == second
    assert [t.text for t in first] != [t.text for t in other]
    from practicum.language.theater.traces import Draw

    scores = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).repeat(6000, 1)
    drawn = Draw(EXACT, 0)(None, scores).argmax(-1)
    shares = torch.bincount(drawn, minlength=3) / 6000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.2]), atol=0.03, rtol=0)
    kept = Draw(Sampling(1.0, 0.6), 0)(None, scores).argmax(-1)
    assert set(kept.tolist()) == {0, 1}


def test_chains_that_are_cut_off_are_counted_and_get_no_label(reasoner):
    questions = reasoner_questions("recall", 40)
    found = collect_traces(
        *reasoner, questions, max_new_tokens=22, sampling=EXACT, format=reasoner.format, batch_size=40
    )
    assert found.n_truncated > 0
    assert len(found) + found.n_dropped_ == 40
    with pytest.raises(ValueError, match="none of 40 got an answer: 40 chains were cut at max_new_tokens=3, 0 ended"):
        collect_traces(*reasoner, questions, max_new_tokens=3, format=reasoner.format, batch_size=40)


def test_answers_that_are_no_option_are_counted(reasoner):
    known = reasoner_questions("recall", 20)
    others = [MCQuestion(q.question, [c for c in q.choices if c != q.choices[q.answer]][:2], 0) for q in known]
    mixed = [*known[:2], *others]
    found = collect_traces(*reasoner, mixed, max_new_tokens=48, sampling=EXACT, format=reasoner.format)
    assert found.n_unanswered >= 10
    assert len(found) + found.n_unanswered + found.n_truncated == 22


def test_padding_on_the_left_changes_no_greedy_chain(reasoner):
    questions = [*reasoner_questions("recall", 3), *reasoner_questions("multi-hop", 3)]
    greedy = {"max_new_tokens": 48, "sampling": Sampling(0.0), "format": reasoner.format}
    together = collect_traces(*reasoner, questions, batch_size=6, **greedy)
    alone = collect_traces(*reasoner, questions, batch_size=1, **greedy)
    assert together == alone


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: {"max_new_tokens": 0}, "max_new_tokens=0: must be 1 or more"),
        (lambda: {"batch_size": 0}, "batch_size=0"),
        (lambda: {"sampling": Sampling(-1.0)}, "temperature=-1.0"),
        (lambda: {"sampling": Sampling(1.0, 0.0)}, "top_p=0.0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(reasoner, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        collect_traces(*reasoner, reasoner_questions("recall", 1), format=reasoner.format, **arguments())


def test_questions_that_are_not_sound_are_refused(reasoner):
    with pytest.raises(ValueError, match=r"questions\[0\]"):
        collect_traces(*reasoner, [MCQuestion("x", ("v1",), 0)], format=reasoner.format)


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet=st.sampled_from("ab .!?\n3é"), max_size=40))
def test_steps_end_before_their_separators_whatever_the_tokens(text):
    """Against a split of the text into characters, of which every one is a token."""
    boundaries = step_boundaries(text, list(range(1, len(text) + 1)))
    assert boundaries == sorted(set(boundaries))
    assert (boundaries[-1:] == [len(text)]) or not text
    inner = {match.start() for match in re.finditer(ReasoningFormat().step, text)} - {0}
    assert set(boundaries) == inner | ({len(text)} if text else set())


def test_tokens_find_their_place_in_the_text(reasoner):
    tokenizer = reasoner.tokenizer
    text, ends = decoded(tokenizer, tokenizer.encode("hmm . so v3 ."))
    assert (text, ends) == ("hmm . so v3 .", [3, 5, 8, 11, 13])
    byte_level = byte_tokenizer()
    words = "Naïve café. 東京 is 3.5 km\n\nOff"
    ids = byte_level.encode(words)
    text, ends = decoded(byte_level, ids)
    assert text == words
    assert ends[-1] == len(words)
    assert ends == sorted(ends)


def byte_tokenizer():
    """Every byte a token, as in byte-level BPE without merges."""
    from tokenizers import decoders

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=alphabet[0], pad_token=alphabet[0])


def test_an_empty_chain_has_the_question_alone(reasoner):
    trace = trace_of(reasoner.tokenizer, question="?", options=LETTERS, prompt_ids=[1], cot_ids=[], answer="B")
    assert (trace.cuts, trace.prefixes, trace.text) == ([0], [""], "")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"answer": "E"}, "answer='E': must be one of the options A, B, C, D"),
        ({"gold": "E"}, "gold='E'"),
        ({"options": ("A",)}, "options=('A',): must be two or more"),
        ({"prompt_ids": []}, "prompt_ids: is empty"),
    ],
)
def test_a_trace_that_is_not_sound_is_refused(reasoner, fields, message):
    sound = {"question": "?", "options": LETTERS, "prompt_ids": [1], "cot_ids": [], "answer": "A"}
    with pytest.raises(ValueError, match=re.escape(message)):
        trace_of(reasoner.tokenizer, **{**sound, **fields})


def test_the_format_tells_chain_and_answer_apart():
    thinking = ReasoningFormat()
    assert thinking.split("Hm. A?</think>\n\nThe answer is (B). So the final answer is **C**.") == (6, "C")
    assert thinking.split("The answer is B.") == (16, None)
    assert thinking.split("Hm.</think> \\boxed{\\text{D}}") == (3, "D")
    plain = format_of(byte_tokenizer())
    assert plain.end_of_thinking is None
    assert plain.split("It is cold. The final answer is B. The answer is C.") == (12, "B")
    assert plain.split("Well") == (4, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "{question}"}, "must have a place {options}"),
        ({"answer": "("}, "is no regular expression"),
        ({"answer": "x"}, "must have one group"),
        ({"step": "["}, "step='['"),
        ({"labels": "numbers"}, "labels='numbers'"),
    ],
)
def test_a_format_that_cannot_work_is_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ReasoningFormat(**fields)


def test_traces_come_back_from_their_file(traces, tmp_path):
    path = tmp_path / "chains.jsonl"
    write_traces(path, traces["multi-hop"][:5])
    assert read_traces(path) == traces["multi-hop"][:5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": "m99"}, "line 2: field 'answer': is 'm99'; must be one of the options"),
        ({"boundaries": [1]}, "line 2: field 'boundaries': must rise from above 0 to"),
        ({"prompt_ids": []}, "line 2: field 'prompt_ids': is empty"),
        ({"cot_ids": [1.5]}, "line 2: field 'cot_ids'"),
        ({"ends": [4]}, "line 2: field 'ends'"),
        ({"options": ["m1", "m1"]}, "line 2: field 'options'"),
        ({"text": 3}, "line 2: field 'text': is '3'; must be a text"),
        ({"choices": ["m1"]}, "line 2: field 'choices'"),
        (None, "line 2: field 'question': is missing"),
    ],
)
def test_a_file_of_traces_that_is_not_sound_is_told_by_line_and_field(traces, tmp_path, change, message):
    path = tmp_path / "chains.jsonl"
    write_traces(path, traces["multi-hop"][:2])
    first, second = path.read_text().splitlines()
    fields = {} if change is None else {**json.loads(second), **change}
    path.write_text(f"{first}\n{json.dumps(fields)}\n")
    with pytest.raises(DataFileError, match=re.escape(message)):
        read_traces(path)


def test_a_file_of_traces_that_is_no_file_is_told(tmp_path):
    with pytest.raises(DataFileError, match="there is no such file"):
        read_traces(tmp_path / "nowhere.jsonl")
    for content, message in (("", "is empty"), ("{", "line 1: is not JSON"), ("[1]", "line 1: must be an object")):
        (tmp_path / "bad.jsonl").write_text(content)
        with pytest.raises(DataFileError, match=message):
            read_traces(tmp_path / "bad.jsonl")


def test_recording_reads_prompt_and_chain_and_can_keep_them_on_disk(reasoner, traces, tmp_path):
    some = [Trace(**{**vars(t), "hidden": {}}) for t in traces["recall"][:4]]
    record(reasoner.model, some, [1, LAYER], store=tmp_path / "store")
    for trace, before in zip(some, traces["recall"], strict=False):
        assert trace.hidden[LAYER].shape == (len(trace.prompt_ids) + len(trace.cot_ids), 64)
        assert trace.hidden[LAYER].dtype == torch.float16
        torch.testing.assert_close(trace.hidden[LAYER], before.hidden[LAYER], atol=2e-3, rtol=2e-3)
    assert any((tmp_path / "store").iterdir())
    with pytest.raises(ValueError, match="traces: is empty"):
        record(reasoner.model, [], [LAYER])
    with pytest.raises(ValueError, match="layer"):
        record(reasoner.model, some, [9])


def test_activations_that_are_not_finite_are_told_by_layer_and_position(reasoner, traces):
    broken = load_reasoner()
    with torch.no_grad():
        broken.model.model.embed_tokens.weight[reasoner.tokenizer.convert_tokens_to_ids("so")] = float("nan")
    with pytest.raises(ValueError, match=r"layer.*3.*position|position.*layer.*3"):
        record(broken.model, traces["recall"][:2], [LAYER])


# Forced answers -------------------------------------------------------------------------------------------------------


def tiny_model(kind, vocabulary):
    torch.manual_seed(0)
    common = {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    narrow = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**narrow, **common)).eval()
    if kind == "mistral":  # a sliding window shorter than the chain
        return MistralForCausalLM(MistralConfig(**narrow, sliding_window=8, **common)).eval()
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=128, **common)).eval()


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "gpt2"])
def test_a_cropped_cache_gives_what_encoding_anew_gives(reasoner, traces, kind):
    with torch.random.fork_rng():
        model = tiny_model(kind, len(reasoner.tokenizer))
    cropped = ForcedAnswer(model, reasoner.tokenizer, stub=reasoner.format.stub)
    for trace in (traces["recall"][0], traces["multi-hop"][0]):
        (anew,) = cropped.beliefs([trace])
        assert anew.std() > 1e-6
        np.testing.assert_allclose(cropped(trace), anew, atol=1e-4)


def test_forced_answers_of_many_are_those_of_each(traces, forced):
    some = [*traces["recall"][:4], *traces["multi-hop"][:4]]
    for trace, rows in zip(some, forced.beliefs(some), strict=True):
        assert rows.shape == (len(trace.cuts), 4)
        np.testing.assert_allclose(rows.sum(-1), 1)
        np.testing.assert_allclose(forced(trace), rows, atol=1e-4)


def test_the_cache_is_as_long_after_the_loop_as_the_last_cut_and_its_stub(reasoner, traces, monkeypatch):
    """It is cropped at every cut, and is never longer than prompt, chain and stub."""
    from practicum.language.theater import forced as module

    lengths, real = [], module.run_cached

    def watched(model, input_ids, cache):
        out = real(model, input_ids, cache)
        lengths.append(cache.get_seq_length())
        return out

    monkeypatch.setattr(module, "run_cached", watched)
    trace = traces["multi-hop"][0]
    ForcedAnswer(*reasoner, stub=reasoner.format.stub)(trace)
    stub = 2
    assert lengths[0] == trace.start + len(trace.cot_ids) - 1
    assert lengths[1:] == [trace.start + cut + stub for cut in reversed(trace.cuts)]


def test_options_that_go_on_alike_are_refused(reasoner):
    tokenizer = byte_tokenizer()
    assert [tokenizer.decode(t) for t in option_tokens(tokenizer, "The answer is ", ["A", "B"])[1]] == ["A", "B"]
    stub, options = option_tokens(tokenizer, "It is ", ["pear", "plum"])
    assert (tokenizer.decode(stub), [tokenizer.decode(t) for t in options]) == ("It is p", ["e", "l"])
    with pytest.raises(ValueError, match="some go on with the same token; use labels='letters'"):
        option_tokens(tokenizer, "It is ", ["10", "12", "20"])
    with pytest.raises(ValueError, match="same token"):
        option_tokens(tokenizer, "It is ", ["one", "one more"])


# Monitors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "stated"),
    [
        ("", None),
        ("Is it A? Or B?", None),
        ("So the answer is (B).", "B"),
        ("So B. Therefore, it must be C.", "C"),
        ("So B. Wait, no.", None),
        ("Wait. So D.", "D"),
        ("the answer is: **A**", "A"),
        ("so Bob", None),
    ],
)
def test_the_regex_monitor_reads_stated_conclusions_only(prefix, stated):
    told = RegexMonitor()("?", prefix, LETTERS)
    assert (None if told is None else LETTERS[told.argmax()]) == stated


def test_expressions_that_cannot_be_read_are_refused():
    with pytest.raises(ValueError, match=r"conclusion='\('"):
        RegexMonitor(conclusion="(")
    with pytest.raises(ValueError, match=r"pattern='\['"):
        inflections([planned([1])], [sure("A", 2)], "[")


def test_the_text_probe_reads_the_text_alone(traces, forced):
    learnt, rest = traces["multi-hop"][:80], traces["multi-hop"][80:]
    strong = TextProbeMonitor(window=12).fit(learnt)
    rows = strong.beliefs(rest)
    at_end = np.mean([r[-1].argmax() == t.options.index(t.answer) for r, t in zip(rows, rest, strict=True)])
    at_start = np.mean([r[0].argmax() == t.options.index(t.answer) for r, t in zip(rows, rest, strict=True)])
    assert at_end > 0.9
    assert at_start < 0.5
    np.testing.assert_allclose(strong("ignored", rest[0].prefixes[2], rest[0].options), rows[0][2])
    with pytest.raises(ValueError, match="fewer than two different answers"):
        TextProbeMonitor().fit([planned([1])])
    from sklearn.exceptions import NotFittedError

    with pytest.raises(NotFittedError, match="call fit"):
        TextProbeMonitor()("?", "", LETTERS)


def test_the_chat_monitor_abstains_where_the_model_says_so():
    tokenizer = byte_tokenizer()
    with torch.random.fork_rng():
        model = tiny_model("qwen2", len(tokenizer))
    # With one direction of the last hidden state written over, the next token is known.
    for letter in ("A", "N"):
        chosen = tokenizer.encode(letter)[0]
        with torch.no_grad():
            model.lm_head.weight.zero_()
            model.model.norm.weight.fill_(1.0)
            model.lm_head.weight[chosen] = 0.0
            model.lm_head.bias = torch.nn.Parameter(torch.zeros(len(tokenizer)))
            model.lm_head.bias[chosen] = 9.0
        monitor = HFMonitor(model, tokenizer, "{question} {options} {prefix}", batch_size=3)
        told = monitor("2 + 2?", "It is four.", ["four", "five", "six"])
        if letter == "N":
            assert told is None
            assert ABSTENTION.startswith("N")
        else:
            assert told.argmax() == 0
            np.testing.assert_allclose(told.sum(), 1)
    trace = planned([1, 2])
    rows = monitor.beliefs([trace])
    assert [len(row) for row in rows] == [3]
    np.testing.assert_allclose(beliefs_of(monitor, [trace])[0], 0.25)


def test_the_chat_monitor_is_told_not_to_solve():
    from practicum.language.theater.monitors import INSTRUCTION

    assert "Do not solve" in INSTRUCTION
    with pytest.raises(ValueError, match=re.escape("must have a place {prefix}")):
        HFMonitor(instruction="{question} {options}")
    with pytest.raises(ValueError, match="give both, or neither"):
        HFMonitor(model=object())


def test_a_chat_template_is_used_where_there_is_one():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<u>{{ m['content'] }}</u>{% endfor %}<a><think>"
    thinking = ReasoningFormat(prompt="{question}|{options}")
    ids = thinking.prompt_ids(tokenizer, MCQuestion("Q", ("x", "y"), 0))
    assert tokenizer.decode(ids) == "<u>Q|A. x\nB. y</u><a><think>"
    tokenizer.chat_template += "</think>"
    assert format_of(tokenizer).end_of_thinking == "</think>"


# Performativity -------------------------------------------------------------------------------------------------------


def test_a_probe_that_always_knows_and_a_monitor_that_never_says():
    trace = planned([1, 2, 4, 7])
    result = performativity([trace], [sure("A", 5)], silent)
    assert result.rate == 0.75
    assert result.ci == (0.75, 0.75)
    np.testing.assert_array_equal(result.monitor, 0.25)


def test_equal_curves_have_no_gap():
    trace = planned([2, 4, 6])
    rows = [np.array([[0.4, 0.3, 0.2, 0.1], [0.1, 0.7, 0.1, 0.1], [0.9, 0.1, 0, 0], [1, 0, 0, 0]])]
    assert performativity([trace], rows, rows).rate == 0
    assert performativity([trace], rows, rows, kind="slope").rate == 0


def test_knowing_from_the_middle_on():
    trace = planned([50, 100])
    rows = np.concatenate([np.full((1, 4), 0.25), sure("A", 2)])
    assert abs(performativity([trace], [rows], silent, grid=201).rate - 0.375) < 0.01


def test_the_slope_is_that_of_the_lines():
    trace = planned([1, 2, 3, 4])
    rows = np.concatenate([sure("B", 2), sure("A", 3)])
    result = performativity([trace], [rows], silent, kind="slope")
    line = np.polyfit(result.positions, result.belief, 1)[0]
    assert abs(result.rate + line) < 1e-12


def test_the_share_of_a_trace_lies_between_certainty_and_the_word():
    trace = planned([2, 4, 6, 10], text="a. b. c. So A.")
    sure_early = np.array([[0.3, 0.7, 0, 0], [0.6, 0.4, 0, 0], [0.95, 0.05, 0, 0], [0.8, 0.2, 0, 0], [1, 0, 0, 0]])
    # Last change of mind at cut 1; p >= 0.9 from cut 2 (4 tokens) on; named at the end (10 tokens).
    assert performativity([trace], [sure_early], RegexMonitor(), kind="trace").rate == pytest.approx(0.6)
    assert performativity([trace], [sure("B", 5)], RegexMonitor(), kind="trace").rate == 0
    assert performativity([trace], [sure("A", 5)], silent, kind="trace").rate == 1


def test_a_tie_counts_by_how_many_share_it():
    trace = planned([1])
    rows = [np.array([[0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0]])]
    result = performativity([trace], rows, silent, grid=2)
    np.testing.assert_array_equal(result.belief, [0.5, 0.0])


def test_an_empty_chain_has_constant_curves():
    trace = planned([], text="")
    for kind, rate in (("area", 0.75), ("slope", 0.0), ("trace", 0.0)):
        assert performativity([trace], [sure("A", 1)], silent, kind=kind).rate == pytest.approx(rate)


def test_the_bootstrap_draws_questions_and_not_chains():
    alone = [planned([1], question=f"{i}") for i in range(40)]
    repeated = [planned([1], question=f"{i // 10}") for i in range(40)]
    rows = [sure("A" if i % 20 < 10 else "B", 2) for i in range(40)]
    wide = performativity(repeated, rows, silent).ci
    narrow = performativity(alone, rows, silent).ci
    assert wide[1] - wide[0] > 1.5 * (narrow[1] - narrow[0])
    assert narrow == performativity(alone, rows, silent).ci


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([np.full((2, 4), 0.3)], r"belief\[0\]: at cut 0: .* sums to 1.2; must be probabilities"),
        ([[[1.2, -0.2, 0, 0], [1, 0, 0, 0]]], r"at cut 0: \[1.2, -0.2"),
        ([[[np.nan, 1, 0, 0], [1, 0, 0, 0]]], "at cut 0"),
        ([sure("A", 3)], r"has shape \(3, 4\); must be \(2, 4\)"),
        ([[[1.0], [1.0, 0.0]]], "rows differ in length|has shape"),
        ([], "has 0 entries; must have 1"),
    ],
)
def test_what_is_no_distribution_is_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        performativity([planned([1])], rows, silent)


def test_a_monitor_whose_probabilities_do_not_sum_to_one_is_refused():
    with pytest.raises(ValueError, match=r"monitor\[0\]: at cut 0: \[0.9, 0.9, 0.0, 0.0\] sums to 1.8"):
        performativity([planned([1])], [sure("A", 2)], lambda question, prefix, options: [0.9, 0.9, 0, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"kind": "volume"}, "kind='volume'"), ({"grid": 1}, "grid=1: must be 2 or more")],
)
def test_bad_arguments_of_performativity(arguments, message):
    with pytest.raises(ValueError, match=message):
        performativity([planned([1])], [sure("A", 2)], silent, **arguments)
    with pytest.raises(ValueError, match="traces: is empty"):
        performativity([], [], silent)


# Shifts and inflections -----------------------------------------------------------------------------------------------


def test_a_change_of_mind_is_a_shift_of_one():
    np.testing.assert_array_equal(belief_shifts(np.array([[1.0, 0.0], [0.0, 1.0]])), [1.0])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.floats(0.01, 1), min_size=3, max_size=3), min_size=2, max_size=6))
def test_shifts_are_total_variations(rows):
    p = np.array(rows) / np.sum(rows, axis=1, keepdims=True)
    shifts = belief_shifts(p)
    assert shifts.shape == (len(rows) - 1,)
    assert ((shifts >= 0) & (shifts <= 1)).all()
    np.testing.assert_allclose(shifts[0], np.maximum(p[1] - p[0], 0).sum(), atol=1e-12)


def test_risk_ratio_auroc_and_lag_of_a_planted_table():
    moved = np.concatenate([sure("B", 2), sure("A", 2)])
    calm = sure("A", 4)
    waiting, plain = "a. Wait. b.", "a. b. c."
    cases = [(moved, waiting)] * 30 + [(moved, plain)] * 10 + [(calm, waiting)] * 10 + [(calm, plain)] * 50
    found = inflections([planned([1, 2, 3], text=text) for _, text in cases], [rows for rows, _ in cases])
    assert found.table.tolist() == [[50, 10], [10, 30]]
    assert found.risk_ratio == pytest.approx((30 / 40) / (10 / 60))
    half = 1.959964 * np.sqrt(1 / 30 - 1 / 40 + 1 / 10 - 1 / 60)
    np.testing.assert_allclose(found.ci, (4.5 * np.exp(-half), 4.5 * np.exp(half)), rtol=1e-5)
    assert found.verdict == "associated"
    assert found.auroc == pytest.approx(0.5 * (30 / 40 + 50 / 60))
    # The belief moves with the second step, where the word is.
    assert found.lags[0] == 30
    assert found.n_confident == 100


def test_waits_at_random_are_not_associated():
    rng = np.random.default_rng(0)
    rows = [np.concatenate([sure("B", 2), sure("A", 2)]) if rng.random() < 0.5 else sure("A", 4) for _ in range(300)]
    texts = ["a. Wait. b." if rng.random() < 0.5 else "a. b. c." for _ in range(300)]
    found = inflections([planned([1, 2, 3], text=text) for text in texts], rows)
    assert found.verdict == "not associated"
    assert found.ci[0] < 1 < found.ci[1]


def test_without_an_inflection_it_is_inconclusive():
    found = inflections([planned([1, 2])] * 3, [sure("A", 3)] * 3)
    assert (found.verdict, found.auroc, found.risk_ratio, found.ci) == ("inconclusive", None, None, None)
    assert found.p_large is None
    assert found.p_small == 0


def test_inflections_may_be_found_by_a_function():
    trace = planned([1, 2], text="a. hoppla.")
    found = inflections([trace, planned([1, 2])], [sure("A", 3)] * 2, lambda text: [3] if "hoppla" in text else [])
    assert found.table.sum(0).tolist() == [1, 1]
    with pytest.raises(ValueError, match="shift=0: must be above 0"):
        inflections([trace], [sure("A", 3)], shift=0)


@pytest.mark.parametrize(
    "words", ["Wait, no", "Hold on", "Let me reconsider", "Aha!", "alternatively", "that's not right"]
)
def test_the_usual_inflections_are_found(words):
    found = inflections([planned([1], text=f"{words}."), planned([1], text="A waiter waits.")], [sure("A", 2)] * 2)
    assert found.table.sum(0).tolist() == [1, 1]


# Stopping -------------------------------------------------------------------------------------------------------------


def test_what_a_rule_saves_and_costs():
    early = np.array([[0.96, 0.04, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]])
    wrong = np.array([[0.1, 0.9, 0, 0], [0.02, 0.98, 0, 0], [1, 0, 0, 0]])
    traces = [planned([4, 10]), planned([4, 10])]
    curve = exit_curve(traces, confidence_scores([early, wrong]), [early, wrong], [0.5, 0.95, 1.01])
    np.testing.assert_allclose(curve.saved, [1.0, (10 + 6) / 20, 0.0])
    np.testing.assert_allclose(curve.accuracy, [0.5, 0.5, 1.0])
    assert curve.full_accuracy == 1.0
    assert curve.saved_within(0.01) == 0.0
    assert curve.saved_within(0.5) == 1.0
    late = exit_curve(traces, confidence_scores([early, wrong]), [early, wrong], [0.95], min_tokens=4)
    np.testing.assert_allclose(late.saved, [12 / 20])
    patient = exit_curve(traces, confidence_scores([early, wrong]), [early, wrong], [0.95], patience=2)
    np.testing.assert_allclose(patient.saved, [6 / 20])


def test_the_scores_of_the_peers():
    rows = [np.array([[0.25] * 4, [1.0, 0, 0, 0], [0.5, 0.5, 0, 0]])]
    np.testing.assert_allclose(certainty_scores(rows)[0], [0, 1, 0.5], atol=1e-12)
    np.testing.assert_array_equal(
        agreement_scores([np.concatenate([sure("A", 2), sure("B", 1), sure("A", 1)])])[0], [1, 2, 1, 1]
    )
    np.testing.assert_array_equal(budget_scores([planned([3, 5])])[0], [0, 3, 5])
    assert first_stop(planned([3, 5]), np.array([0.0, 0.0, 9.0]), 1.0) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"traces": []}, "traces: is empty"),
        ({"patience": 0}, "patience=0"),
        ({"scores": []}, "scores: has 0 entries; must have 1"),
        ({"scores": [np.zeros(3)]}, r"traces\[0\]: must have 2 scores and answers; has 3"),
        ({"traces": [planned([1], gold=None)]}, r"traces\[0\]: has no right answer"),
    ],
)
def test_bad_arguments_of_exit_curves(changed, message):
    sound = {"traces": [planned([1])], "scores": [np.zeros(2)], "answers": [sure("A", 2)], "thresholds": [0.5]}
    with pytest.raises(ValueError, match=message):
        exit_curve(**{**sound, **changed})


# The exit in generate -------------------------------------------------------------------------------------------------


def greedy(reasoner, prompts, **options):
    from practicum.language.theater.traces import left_padded

    input_ids, mask = left_padded(prompts, 0)
    with torch.no_grad():
        return reasoner.model.generate(
            input_ids=input_ids, attention_mask=mask, max_new_tokens=48, do_sample=False, pad_token_id=0, **options
        )


def test_an_exit_that_never_comes_leaves_every_token_as_it_was(reasoner, traces, probe):
    prompts = [traces["recall"][0].prompt_ids, traces["multi-hop"][1].prompt_ids]
    plain = greedy(reasoner, prompts)
    early = ProbeEarlyExit(probe, LAYER, reasoner.tokenizer, tau=1.0)
    with early.attach(reasoner.model):
        armed = greedy(reasoner, prompts, stopping_criteria=[early])
    assert torch.equal(plain, armed)
    assert early.n_tokens_ == [None, None]
    assert all(len(curve) >= 4 for curve in early.curves_)


def test_a_threshold_near_zero_exits_at_the_first_cut(reasoner, traces, probe):
    prompts = [trace.prompt_ids for trace in traces["recall"][:3]]
    early = ProbeEarlyExit(probe, LAYER, reasoner.tokenizer, tau=1e-9)
    with early.attach(reasoner.model):
        output = greedy(reasoner, prompts, stopping_criteria=[early])
    assert early.n_tokens_ == [0, 0, 0]
    assert output.shape[1] == len(prompts[0]) + 1
    late = ProbeEarlyExit(probe, LAYER, reasoner.tokenizer, tau=1e-9, min_tokens=1)
    with late.attach(reasoner.model):
        output = greedy(reasoner, prompts[:1], stopping_criteria=[late])
    text = reasoner.tokenizer.decode(output[0, len(prompts[0]) :][: late.n_tokens_[0]])
    assert re.fullmatch(r"\S+( \S+)* \.", text)
    assert text.count(".") == 1


def telling_threshold(read, some):
    """A threshold at which chains stop in different places, and that no belief is near."""
    highest = np.concatenate([rows.max(-1) for rows in read])

    def worth(tau):
        stops = {first_stop(trace, rows.max(-1), tau) for trace, rows in zip(some, read, strict=True)}
        return len(stops) if abs(highest - tau).min() > 3e-3 else 0

    best = max(np.linspace(0.26, 0.99, 147), key=worth)
    assert worth(best) > 1
    return float(best)


def chains(reasoner, questions):
    return collect_traces(
        *reasoner, questions, max_new_tokens=48, sampling=Sampling(0.0), format=reasoner.format, batch_size=1
    )


def test_the_stream_sees_in_a_padded_batch_what_the_probe_reads_from_records(reasoner, probe):
    """Beliefs at every cut, in one batch with padding on the left, equal those on the recorded chain."""
    questions = [*reasoner_questions("recall", 3, random_state=9), *reasoner_questions("multi-hop", 3, random_state=9)]
    alone = chains(reasoner, questions)
    record(reasoner.model, alone, [LAYER])
    assert len({trace.start for trace in alone}) > 1
    early = ProbeEarlyExit(probe, LAYER, reasoner.tokenizer, tau=1.0, options=[t.options for t in alone])
    with early.attach(reasoner.model):
        greedy(reasoner, [trace.prompt_ids for trace in alone], stopping_criteria=[early])
    belief = ProbeBelief(probe, LAYER)
    for trace, curve in zip(alone, early.curves_, strict=True):
        assert [n_tokens for n_tokens, _ in curve] == trace.cuts
        np.testing.assert_allclose(np.stack([p for _, p in curve]), belief(trace), atol=5e-3)


def test_every_sequence_of_a_batch_has_its_own_exit(reasoner, probe):
    questions = [*reasoner_questions("recall", 4, random_state=2), *reasoner_questions("multi-hop", 4, random_state=2)]
    alone = chains(reasoner, questions)
    record(reasoner.model, alone, [LAYER])
    read = ProbeBelief(probe, LAYER).beliefs(alone)
    tau = telling_threshold(read, alone)
    stops = [first_stop(t, rows.max(-1), tau) for t, rows in zip(alone, read, strict=True)]
    expected = [None if stop is None else t.cuts[stop] for t, stop in zip(alone, stops, strict=True)]
    assert len(set(expected)) > 1
    early = ProbeEarlyExit(probe, LAYER, reasoner.tokenizer, tau=tau, options=[t.options for t in alone])
    with early.attach(reasoner.model):
        greedy(reasoner, [trace.prompt_ids for trace in alone], stopping_criteria=[early])
    assert early.n_tokens_ == expected


def test_replayed_exits_are_those_of_generation(reasoner, probe, forced):
    """Tokens and answers of `exit_curve` on recorded chains are those of `generate_with_exit`."""
    questions = [*reasoner_questions("recall", 5, random_state=3), *reasoner_questions("multi-hop", 5, random_state=3)]
    alone = chains(reasoner, questions)
    record(reasoner.model, alone, [LAYER])
    read = ProbeBelief(probe, LAYER).beliefs(alone)
    tau = telling_threshold(read, alone)
    curve = exit_curve(alone, confidence_scores(read), forced.beliefs(alone), [tau])
    asked = [q for q in questions if q.question in {t.question for t in alone}]
    early = ProbeEarlyExit(probe, LAYER, reasoner.tokenizer, tau=tau)
    said = generate_with_exit(
        *reasoner, asked, early, format=reasoner.format, sampling=Sampling(0.0), max_new_tokens=48
    )
    saved = 1 - sum(output.n_cot_tokens for output in said) / sum(len(trace.cot_ids) for trace in alone)
    assert any(output.exited for output in said)
    assert saved == pytest.approx(curve.saved[0])
    right = np.mean([output.answer == trace.gold for output, trace in zip(said, alone, strict=True)])
    assert right == pytest.approx(curve.accuracy[0])
    for output, trace in zip(said, alone, strict=True):
        assert trace.text.startswith(output.text)
        assert [n for n, _ in output.belief] == trace.cuts[: len(output.belief)]


def test_one_question_gives_one_output_and_the_probe_may_answer(reasoner, probe):
    (question,) = reasoner_questions("recall", 1)
    early = ProbeEarlyExit(probe, LAYER, reasoner.tokenizer, tau=1e-9)
    said = generate_with_exit(
        *reasoner, question, early, format=reasoner.format, answer_from="probe", max_new_tokens=40
    )
    assert (said.n_cot_tokens, said.text, said.exited) == (0, "", True)
    assert said.answer == question.choices[int(said.belief[0][1].argmax())]
    forced = generate_with_exit(*reasoner, question, early, format=reasoner.format, max_new_tokens=40)
    assert forced.answer == question.choices[question.answer]
    cut = generate_with_exit(
        *reasoner,
        question,
        ProbeEarlyExit(probe, LAYER, reasoner.tokenizer, tau=1.0),
        format=reasoner.format,
        max_new_tokens=4,
    )
    assert (cut.exited, cut.answer) == (False, question.choices[question.answer])
    with pytest.raises(ValueError, match="answer_from='me'"):
        generate_with_exit(*reasoner, question, early, answer_from="me")
    assert early.options is None


def test_patience_wants_cuts_in_a_row(reasoner, traces, probe):
    prompt = traces["recall"][0].prompt_ids
    taken = []
    for patience in (1, 2, 3):
        early = ProbeEarlyExit(probe, LAYER, reasoner.tokenizer, tau=1e-9, patience=patience)
        with early.attach(reasoner.model):
            greedy(reasoner, [prompt], stopping_criteria=[early])
        taken.append(early.n_tokens_[0])
        assert len(early.curves_[0]) == patience
    assert taken == sorted(set(taken))


def test_it_looks_no_more_once_the_chain_has_ended(reasoner, traces, probe):
    early = ProbeEarlyExit(probe, LAYER, reasoner.tokenizer, tau=1.0)
    trace = chains(reasoner, reasoner_questions("recall", 1))[0]
    with early.attach(reasoner.model):
        greedy(reasoner, [trace.prompt_ids], stopping_criteria=[early])
    assert max(n for n, _ in early.curves_[0]) == len(trace.cot_ids)


def test_several_generations_in_one_block_each_begin_anew(reasoner, traces, probe):
    early = ProbeEarlyExit(probe, LAYER, reasoner.tokenizer, tau=1.0)
    curves = []
    with early.attach(reasoner.model):
        for _ in range(2):
            greedy(reasoner, [traces["recall"][0].prompt_ids], stopping_criteria=[early])
            curves.append(np.stack([p for _, p in early.curves_[0]]))
    np.testing.assert_array_equal(*curves)


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_hooks_are_gone_whatever_happens(reasoner, probe, error):
    before = hooks(reasoner.model)
    early = ProbeEarlyExit(probe, LAYER, reasoner.tokenizer)

    def interrupted():
        with early.attach(reasoner.model):
            assert hooks(reasoner.model) > before
            raise error

    with pytest.raises(error):
        interrupted()
    assert hooks(reasoner.model) == before
    with early.attach(reasoner.model):
        pass
    assert hooks(reasoner.model) == before


def test_an_exit_that_is_not_armed_says_so(reasoner, traces, probe):
    early = ProbeEarlyExit(probe, LAYER, reasoner.tokenizer)
    with pytest.raises(ValueError, match="arm the exit first"):
        greedy(reasoner, [traces["recall"][0].prompt_ids], stopping_criteria=[early])
    with (
        early.attach(reasoner.model),
        pytest.raises(ValueError, match="attached already"),
        early.attach(reasoner.model),
    ):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tau": 0.0}, "tau=0.0: must be above 0 and at most 1"),
        ({"tau": 1.5}, "tau=1.5"),
        ({"tau": float("nan")}, "tau=nan"),
        ({"patience": 0}, "patience=0: must be 1 or more"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"boundary": "("}, "boundary='('"),
    ],
)
def test_bad_arguments_of_the_exit(reasoner, probe, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ProbeEarlyExit(probe, LAYER, reasoner.tokenizer, **arguments)


def test_it_works_on_another_architecture(reasoner):
    """A random Qwen2, from the sampling of chains to the exit."""
    with torch.random.fork_rng():
        model = tiny_model("qwen2", len(reasoner.tokenizer))
    torch.nn.init.normal_(model.lm_head.weight, std=0.05, generator=torch.Generator().manual_seed(0))
    rng = np.random.default_rng(0)
    words = ["hmm", "check", ".", "v1", "v2"]
    found = Traces(
        [
            trace_of(
                reasoner.tokenizer,
                question=f"recall e{i % 16} r0",
                options=("v1", "v2"),
                prompt_ids=reasoner.tokenizer.encode(f"<bos> recall e{i % 16} r0 options v1 v2 <think>"),
                cot_ids=reasoner.tokenizer.encode(" ".join([*rng.choice(words, size=6), "."])),
                answer=("v1", "v2")[i % 2],
                gold="v1",
            )
            for i in range(24)
        ]
    )
    record(model, found, [2])
    fitted = AttentionProbe(lr=1e-2, epochs=4, random_state=0).fit(
        [t.hidden[2] for t in found], [t.answer for t in found], start=[t.start for t in found]
    )
    early = ProbeEarlyExit(fitted, 2, reasoner.tokenizer, tau=1e-9)
    question = MCQuestion("recall e3 r0", ("v1", "v2"), 0)
    said = generate_with_exit(model, reasoner.tokenizer, question, early, format=reasoner.format, max_new_tokens=6)
    assert said.exited
    assert said.answer in ("v1", "v2")
    result = performativity(found, ProbeBelief(fitted, 2), ForcedAnswer(model, reasoner.tokenizer, " </think> answer "))
    assert -1 <= result.rate <= 1


def test_a_probe_needs_the_activations_of_its_layer(traces, probe):
    bare = Trace(**{**vars(traces["recall"][0]), "hidden": {}})
    with pytest.raises(ValueError, match=r"traces\[0\]: has no activations of layer 3; call record first"):
        ProbeBelief(probe, LAYER)(bare)


def test_the_best_depth_is_chosen_on_held_out_questions(reasoner, traces):
    some = [*traces["recall"][:60]]
    record(reasoner.model, some, [0, LAYER])
    fresh = AttentionProbe(lr=1e-2, epochs=6, random_state=0)
    assert choose_depth(fresh, some, [0, LAYER]) in (0, LAYER)
    for arguments, message in (
        ({"layers": []}, "layers: is empty"),
        ({"layers": [3], "validation": 1.0}, "validation=1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_depth(fresh, some, **arguments)
    with pytest.raises(ValueError, match="are of 1 questions"):
        choose_depth(fresh, some[:1], [LAYER])


# Figures and the program ----------------------------------------------------------------------------------------------


def test_figures_show_what_they_are_given():
    trace = planned([1, 2])
    figure = belief_figure(trace, {"probe": sure("A", 3), "monitor": sure("B", 3)})
    assert [heat.type for heat in figure.data] == ["heatmap", "heatmap"]
    np.testing.assert_array_equal(figure.data[1].z[1], 1)
    assert "A (answered, right)" in figure.data[0].y
    result = performativity([trace], [sure("A", 3)], silent)
    assert [line.name for line in curves_figure({"probe": result, "forced": result}).data] == [
        "probe",
        "forced",
        "monitor",
    ]
    curve = ExitCurve(np.array([0.9]), np.array([0.4]), np.array([0.8]), 0.8)
    assert exit_figure({"a": curve}).data[0].y.tolist() == [0.8]
    for draw, message in ((curves_figure, "results"), (exit_figure, "curves")):
        with pytest.raises(ValueError, match=f"{message}: is empty"):
            draw({})
    with pytest.raises(ValueError, match="beliefs: is empty"):
        belief_figure(trace, {})


def test_the_page_has_curves_exits_and_the_table_of_shifts(tmp_path):
    traces = [planned([1, 2], text=text, question=f"{i}") for i, text in enumerate(["a. b.", "a. Wait.", "<b>. c."])]
    for i, trace in enumerate(traces):
        trace.group = ("easy", "hard")[i % 2]
    path = tmp_path / "page.html"
    rows = [sure("A", 3)] * 3
    write_page(path, traces, probe=rows, forced=rows, monitor=RegexMonitor(), notes=["A <note>."])
    page = path.read_text()
    body = page[page.index("<body>") :]
    assert "A &lt;note&gt;." in body
    assert "&lt;b&gt;. c." in body
    for heading in ("<h2>easy</h2>", "<h2>hard</h2>", "Shifts of the probe", "risk ratio", "all together"):
        assert heading in body
    assert body.count("Plotly.newPlot") == 2 * 2 + 3
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=.?https?:", page)
    unknown = [Trace(**{**vars(trace), "gold": None}) for trace in traces]
    write_page(path, unknown, probe=rows, forced=rows, monitor=rows)
    assert path.read_text().count("What stopping early saves") == 0


def test_the_program_writes_a_page_of_the_tiny_reasoner(tmp_path):
    arguments = [
        "--n",
        "40",
        "--html",
        str(tmp_path / "page.html"),
        "--layer",
        "3",
        "--traces",
        str(tmp_path / "c.jsonl"),
    ]
    arguments += ["--probe", str(tmp_path / "probe"), "--examples", "1"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    told = json.loads(done.output[: done.output.rindex("wrote")])
    assert set(told["groups"]) == {"recall", "multi-hop"}
    assert told["layer"] == 3
    assert "Plotly.newPlot" in (tmp_path / "page.html").read_text()
    assert len(read_traces(tmp_path / "c.jsonl")) == told["chains"]
    assert (tmp_path / "probe.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--monitor", "me"], "--monitor me"),
        (["--n", "0"], "--n 0"),
        (["--model", "embedded"], "--data: must be given"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_the_program_refuses_by_name(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
