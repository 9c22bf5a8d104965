"""Verbalized confidence: labels, format, loss, read-out, the frozen trunk, and what is refused."""

import json
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from practicum.language.confidence import (
    ConfidenceFormat,
    ConfidenceLabeler,
    ConfItem,
    ConfResult,
    FrozenTrunk,
    LabeledItem,
    VerbalConfidence,
    calibration_report,
    families,
    linear_lora,
    read_items,
    read_labels,
    task_items,
    transfer_cells,
    write_labels,
    write_page,
)
from practicum.language.confidence.format import escape, unescape
from practicum.language.confidence.generation import decode, stop_ids
from practicum.language.confidence.labels import QUOTE, balanced, matches, quotes
from practicum.language.confidence.pool import label_pool, labeled_pool, pool_items, shipped_labels, to_ship
from practicum.language.confidence.tiny import tiny_model
from practicum.language.confidence.transfer import MIXTURE, mixture, pooled
from practicum.toolbox.choices import ChoiceScorer
from practicum.toolbox.errors import InputError
from practicum.toolbox.trunk import Forward, Group, TokenRow, first_trained_block, grouped, pack

ARCHITECTURES = ["llama", "qwen2", "gpt2"]
DECOMPOSED = ConfidenceFormat("decomposed")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def pair(request):
    return tiny_model(request.param, 4, scale=0.3)


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama", 4, scale=0.3)


@pytest.fixture(scope="module")
def items():
    return families("reasoning", 6) + families("copy", 6, n_records=[2, 3])


def labeled_as(shares, answer="5"):
    return [
        LabeledItem(ConfItem(f"What is {n} + 1?", str(n + 1)), p_hat=p, evidence=1.0, reasoning=p, answer=answer)
        for n, p in enumerate(shares)
    ]


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


# Labels ---------------------------------------------------------------------------------------------------------------


def test_seven_right_samples_of_ten_are_level_seven(llama, monkeypatch):
    labeler = ConfidenceLabeler(*llama, n_samples=10, exact=False)
    monkeypatch.setattr(labeler, "_sampled", lambda prompts, n, stop, rng: [["4"] * 7 + ["5"] * 3])
    one = labeler.label([ConfItem("What is 2 + 2?", "4")])[0]
    assert one.p_hat == one.reasoning == pytest.approx(0.7)
    assert one.evidence == 1.0
    assert one.answer in one.samples
    assert ConfidenceFormat().level_texts[ConfidenceFormat().level(one.p_hat)] == "7"
    percent = ConfidenceFormat(levels="percent")
    assert percent.level_texts[percent.level(one.p_hat)] == "70%"
    assert ConfidenceFormat().level(1.0) == 9
    assert percent.level_texts[percent.level(1.0)] == "100%"


def test_exact_labels_are_the_limit_of_sampling_among_choices(llama):
    item = task_items("codes", 1, n_records=[3])[0]
    exact = ConfidenceLabeler(*llama, random_state=0).label([item])[0]
    sampled = ConfidenceLabeler(*llama, n_samples=2000, exact=False, random_state=0).label([item])[0]
    assert abs(exact.p_hat - sampled.p_hat) < 3 * np.sqrt(exact.p_hat * (1 - exact.p_hat) / 2000)
    assert sum(exact.probabilities) == pytest.approx(1)
    assert len(sampled.samples) == 2000


@pytest.mark.parametrize("max_new_tokens", [1, 3])
def test_exact_labels_are_the_limit_of_sampling_what_is_written(max_new_tokens):
    """The gold answer is the text that this random model writes most often, so that its probability is not tiny."""
    model, tokenizer = tiny_model(scale=0.6, seed=1)
    asked = ConfItem("2 + 2?", "4")
    settings = {"max_new_tokens": max_new_tokens, "random_state": 0}
    first = ConfidenceLabeler(model, tokenizer, n_samples=2000, exact=False, **settings)
    # Blanks at the ends and marks count as nothing when answers are matched, but not when they are written.
    texts = [text for text in first.label([asked])[0].samples if text and text == text.strip(" .,;:!?\"'").casefold()]
    gold = max(sorted(set(texts)), key=texts.count)

    class Plain(ConfidenceFormat):
        def answer_text(self, answer, tokenizer=None):
            return answer

    item = ConfItem("2 + 2?", gold)
    same = lambda answer, right: answer == right  # noqa: E731
    exact = ConfidenceLabeler(model, tokenizer, format=Plain(), exact=True, match=same, **settings).label([item])[0]
    raw = sampled_texts(model, tokenizer, item, max_new_tokens)
    share = np.mean([text == gold for text in raw])
    assert exact.p_hat > 0
    assert abs(exact.p_hat - share) < 3 * np.sqrt(exact.p_hat * (1 - exact.p_hat) / len(raw)) + 1e-9


def sampled_texts(model, tokenizer, item, max_new_tokens):
    form = ConfidenceFormat()
    decoded = decode(
        model,
        [form.prompt_ids(item, tokenizer)],
        n_samples=2000,
        max_new_tokens=max_new_tokens,
        stop=stop_ids(model, tokenizer, at_newline=True),
        generator=torch.Generator().manual_seed(7),
    )
    return tokenizer.batch_decode(decoded.ids)


def test_the_parts_multiply_to_the_share_of_right_answers(llama, items):
    labeled = ConfidenceLabeler(*llama, random_state=0).label(items)
    for one in labeled:
        if one.item.context is None:
            assert (one.evidence, one.reasoning) == (1.0, one.p_hat)
        if one.evidence < 1:
            assert one.evidence * one.reasoning == pytest.approx(one.p_hat, abs=1e-9)
    assert any(one.evidence < 1 for one in labeled)


def test_a_context_that_is_the_evidence_leaves_nothing_to_find(llama):
    item = ConfItem(
        "What is Ann's code?",
        "123",
        context="Ann's code is 123.",
        evidence="Ann's code is 123.",
        choices=["123", "456"],
    )
    for exact in (True, False):
        one = ConfidenceLabeler(*llama, exact=exact, random_state=0).label([item])[0]
        assert (one.evidence, one.reasoning) == (1.0, one.p_hat)


def test_reasoning_that_never_succeeds_is_counted(llama, monkeypatch):
    labeler = ConfidenceLabeler(*llama, exact=False)
    monkeypatch.setattr(labeler, "_sampled", lambda prompts, n, stop, rng: [["wrong"] * n for _ in prompts])
    item = ConfItem(
        "What is Ann's code?", "123", context="Ann's code is 123. Bob's is 4.", evidence="Ann's code is 123."
    )
    one = labeler.label([item])[0]
    assert (one.p_hat, one.evidence, one.reasoning) == (0.0, 1.0, 0.0)
    assert labeler.n_undefined_ == 1


def test_a_context_without_evidence_has_no_parts(llama):
    one = ConfidenceLabeler(*llama).label([ConfItem("Who?", "Ann", context="Ann came.", choices=["Ann", "Bob"])])[0]
    assert one.evidence is None
    assert one.reasoning is None


def test_own_answers_stand_in_the_training_text_right_or_wrong(llama):
    labeled = ConfidenceLabeler(*llama, random_state=0).label(families("reasoning", 30))
    right = [one.answer == one.item.answer for one in labeled]
    assert 0 < sum(right) < 30
    assert len(labeled) == 30, "questions that were answered wrongly stay"
    for one in labeled:
        assert one.answer in one.item.choices
        assert ConfidenceFormat().render(one)[1].startswith(f" {one.answer}\n")


def test_quoted_evidence(llama, monkeypatch):
    item = ConfItem(
        "What is Ann's code?",
        "123",
        context="Ann's code is 123. Bob's is 4.",
        evidence="Ann's code is 123.",
        choices=["123", "4"],
    )
    labeler = ConfidenceLabeler(*llama, evidence="quote", n_samples=4, random_state=0)
    prompts_seen = []

    def texts(prompts, n, stop, rng):
        prompts_seen.extend(llama[1].batch_decode(prompts))
        return [["Evidence: Ann's code is 123.\nAnswer: 123", "Evidence: Bob's is 4.\nAnswer: 4", "123", "Evidence:"]]

    monkeypatch.setattr(labeler, "_sampled", texts)
    one = labeler.label([item])[0]
    assert one.evidence == 0.25
    assert QUOTE.strip() in prompts_seen[0]
    assert not quotes("Answer: 123", "Ann's code is 123.")


def test_labels_for_the_most_likely_answer_rise_with_the_share(llama):
    items = families("reasoning", 40)
    sampled = ConfidenceLabeler(*llama, random_state=0).label(items)
    greedy = ConfidenceLabeler(*llama, target="greedy", random_state=0).label(items)
    order = np.argsort([one.p_hat for one in sampled])
    assert (np.diff([greedy[i].p_hat for i in order]) >= 0).all()
    right = np.mean([one.greedy == one.item.answer for one in sampled])
    assert np.mean([one.p_hat for one in greedy]) == pytest.approx(right)


def test_balanced_labels_have_as_many_of_every_tenth():
    drawn = balanced(labeled_as([0.05] * 90 + [0.55] * 9 + [0.95]), np.random.default_rng(0))
    counts = np.unique([one.p_hat for one in drawn], return_counts=True)[1]
    assert counts.tolist() == [34, 33, 33]


def test_sampling_is_repeatable(llama):
    items = [ConfItem("What is 2 + 2?", "4"), ConfItem("What is 3 + 2?", "5")]
    runs = [ConfidenceLabeler(*llama, max_new_tokens=4, random_state=s).label(items) for s in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize(
    ("answer", "gold", "match", "right"),
    [
        ("Paris.", "paris", "exact", True),
        ("in Paris", "Paris", "exact", False),
        ("7 * 8 = 56", "56.0", "number", True),
        ("about 1,200", "1200", "number", True),
        ("none", "56", "number", False),
        ("abc", "b", lambda a, g: g in a, True),
    ],
)
def test_matching(answer, gold, match, right):
    assert matches(answer, gold, match) is right


def test_the_choices_are_scored_as_by_the_toolbox(pair, items):
    model, tokenizer = pair
    from practicum.datasets import MCQuestion

    form = ConfidenceFormat()
    ours = ConfidenceLabeler(model, tokenizer).choice_probabilities(items)
    scorer = ChoiceScorer(model, tokenizer, template="{question}", cache=False)
    theirs = scorer([MCQuestion(form.prompt(item), list(item.choices)) for item in items]).logits
    for one, other in zip(ours, theirs, strict=True):
        expected = np.exp(other - other.max())
        np.testing.assert_allclose(one, expected / expected.sum(), atol=1e-4)


# The format -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["scalar", "decomposed"])
@pytest.mark.parametrize("levels", ["digit", "percent"])
@pytest.mark.parametrize("tags", [False, True])
@pytest.mark.parametrize("ask", ["", "How sure?"])
def test_what_is_rendered_is_parsed(mode, levels, tags, ask):
    form = ConfidenceFormat(mode, levels, tags, ask=ask)
    for level, value in enumerate(form.level_values):
        share = min(level / 10 + 0.01, 1.0)
        one = labeled_as([share], answer="forty\ntwo")[0]
        _, completion, spans = form.render(one)
        read = form.parse(completion)
        assert read.pop("answer") == "forty\ntwo"
        expected = (
            {"confidence": value} if mode == "scalar" else {"evidence": form.level_values[-1], "reasoning": value}
        )
        assert read == pytest.approx(expected)
        trained = "".join(completion[a:b] for a, b in spans)
        assert form.level_texts[level] in trained
        assert ("<" in trained) == tags
        assert "forty" not in trained


HOSTILE = (
    st.lists(
        st.sampled_from(
            [
                "Confidence: 9",
                "Evidence confidence: 3",
                "<confidence>",
                "</confidence>7",
                "\\",
                "\n",
                " ",
                "a",
                "Reasoning confidence: 1",
                "<evidence_confidence>4</evidence_confidence>",
            ]
        ),
        min_size=1,
        max_size=6,
    )
    .map("".join)
    .filter(lambda text: text.strip())
)


@given(answer=HOSTILE, mode=st.sampled_from(["scalar", "decomposed"]), tags=st.booleans())
@settings(max_examples=300, deadline=None)
def test_answers_that_look_like_confidences_are_escaped(answer, mode, tags):
    answer = answer.strip()
    assert unescape(escape(answer)) == answer
    form = ConfidenceFormat(mode, tags=tags)
    read = form.parse(form.render(labeled_as([0.3], answer=answer)[0])[1])
    assert read["answer"] == answer
    assert read[form.names[-1]] == pytest.approx(0.35)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        "42\nConfidence: high",
        "42\nConfidence: 75",
        "42\nConfidence: -1",
        "42\nConfidence: 7 or 8",
        "42\nconfidence 7",
        "42 Confidence: 7",
        "42\nConfidence: 7\nand so on",
        "42\nConfidence: 7.5",
        "42\nConfidence: 3\nConfidence: 7",
        "42\nConfidence:",
        "42\nEvidence confidence: 7",
    ],
)
def test_nothing_is_guessed(text):
    assert ConfidenceFormat().parse(text) is None


def test_percentages_are_whole_numbers_to_a_hundred():
    form = ConfidenceFormat(levels="percent")
    assert form.parse("42\nConfidence: 73%") == {"answer": "42", "confidence": 0.73}
    assert form.parse("42\nConfidence: 100") == {"answer": "42", "confidence": 1.0}
    assert form.parse("42\nConfidence: 101%") is None
    assert ConfidenceFormat("decomposed").parse("42\nReasoning confidence: 3\nEvidence confidence: 4") is None


def word_tokenizer():
    """One that knows few words and no digits."""
    inner = Tokenizer(models.WordLevel({"<unknown>": 0, "<end>": 1, "What": 2, "%": 3}, unk_token="<unknown>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>", unk_token="<unknown>")


def test_digits_must_be_single_tokens(llama):
    with pytest.raises(InputError, match="no single token for every digit.*percent"):
        VerbalConfidence(llama[0], word_tokenizer())
    fallback = ConfidenceFormat("decomposed", tags=True, fallback="percent").suited(word_tokenizer())
    assert (fallback.mode, fallback.levels, fallback.tags) == ("decomposed", "percent", True)
    assert ConfidenceFormat(fallback="percent").suited(llama[1]).levels == "digit"


def test_a_chat_template_is_used_where_there_is_one(llama):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=llama[1].backend_tokenizer, eos_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
    item = ConfItem("What is Ann's code?", "1", context="Ann's code is 1.")
    form = ConfidenceFormat()
    assert form.prompt(item, tokenizer) == "[user] Ann's code is 1.\nWhat is Ann's code?\n[assistant] "
    assert form.answer_text("1", tokenizer) == "1"
    plain = ConfidenceFormat(template="Q: {question} A:")
    assert plain.prompt(item, tokenizer) == "Q: Ann's code is 1.\nWhat is Ann's code? A:"
    assert plain.answer_text("1", tokenizer) == " 1"
    # The answer is not cut at a line break, and what is thought over goes on in the same turn.
    result = VerbalConfidence(llama[0], tokenizer, max_new_tokens=3).predict([item], max_rethinks=1, threshold=1.0)
    assert result.n_rethinks == 1


# The loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tags", [False, True])
@pytest.mark.parametrize("which", ["characters", "smollm2"])
def test_labels_are_masked_outside_the_confidence(llama, tags, which):
    tokenizer = llama[1] if which == "characters" else smollm2_tokenizer()
    form = ConfidenceFormat("decomposed", tags=tags, template="Question: {question}\nAnswer:")
    one = labeled_as([0.72])[0]
    row = VerbalConfidence(llama[0], tokenizer, form).to_dataset([one])[0]
    trained = [i for i, label in enumerate(row["labels"]) if label != -100]
    assert [row["labels"][i] for i in trained] == [row["input_ids"][i] for i in trained]
    said = tokenizer.decode([row["input_ids"][i] for i in trained])
    _, completion, spans = form.render(one)
    assert "".join(said.split()) == "".join("".join(completion[a:b] for a, b in spans).split())
    assert tokenizer.decode(row["input_ids"]) == form.prompt(one.item) + completion
    with_answers = VerbalConfidence(llama[0], tokenizer, form, answer_weight=0.5).to_dataset([one])[0]
    more = [i for i, label in enumerate(with_answers["labels"]) if label != -100]
    assert set(more) > set(trained)
    assert tokenizer.decode([row["input_ids"][i] for i in more if i not in trained]).strip() == "5"


def smollm2_tokenizer():
    from practicum.models import load_language_model

    return load_language_model().tokenizer


def test_the_answer_has_no_gradient_unless_it_has_a_weight(llama):
    model, tokenizer = llama
    seen = {}

    class Watched(Forward):
        def logits(self, batch, keep):
            seen["logits"] = super().logits(batch, 40).detach().requires_grad_()
            return seen["logits"][:, -keep:] if keep <= 40 else seen["logits"]

    for weight in (0.0, 0.5):
        verbal = VerbalConfidence(model, tokenizer, answer_weight=weight)
        examples = verbal.examples(labeled_as([0.3]))
        verbal.batch_loss(Watched(model), examples).backward()
        moved = seen["logits"].grad[0].abs().sum(-1).nonzero()[:, 0] - 40
        of_level = [-1]
        of_answer = [p - 1 - len(examples[0].row.ids) for p in examples[0].answered]
        assert moved.tolist() == sorted(of_level + (of_answer if weight else []))


def test_the_second_loss_keeps_the_answers():
    model, tokenizer = tiny_model("llama", 2, scale=0.3)
    labeled = ConfidenceLabeler(model, tokenizer, random_state=0).label(families("reasoning", 16))
    rows = [TokenRow(tuple(ConfidenceFormat().prompt_ids(one.item, tokenizer))) for one in labeled]
    before = Forward(model).last_log_probs(rows)
    moved = []
    for options in ({}, {"answer_weight": 10.0, "retain": "kl"}):
        verbal = VerbalConfidence(model, tokenizer, lr=1e-2, epochs=6, random_state=0, **options).fit(labeled)
        after = Forward(verbal.model_).last_log_probs(rows)
        moved.append(float((before.exp() * (before - after)).sum(-1).mean()))
        verbal.unload()
    assert moved[1] < moved[0] / 2


# The trunk ------------------------------------------------------------------------------------------------------------


def test_the_trunk_equals_the_full_forward_in_loss_and_gradient(pair, items):
    model, tokenizer = pair
    labeled = ConfidenceLabeler(model, tokenizer, random_state=0).label(items)
    verbal = VerbalConfidence(model, tokenizer, DECOMPOSED, lora=linear_lora(model, 2), random_state=0).fit(labeled)
    try:
        examples = verbal.examples(labeled)
        found = []
        for trunk in (None, verbal.trunk_):
            verbal.model_.zero_grad()
            loss = verbal.batch_loss(Forward(verbal.model_, trunk), examples)
            loss.backward()
            gradients = [p.grad.clone() for p in verbal.model_.parameters() if p.grad is not None]
            found.append((loss, gradients))
        assert verbal.trunk_.first == 2
        assert float((found[0][0] - found[1][0]).detach().abs()) < 1e-4
        assert len(found[0][1]) == len(found[1][1]) > 0
        for one, other in zip(found[0][1], found[1][1], strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)
    finally:
        verbal.unload()


@pytest.mark.parametrize("kind", [*ARCHITECTURES, "qwen3", "gemma2", "phi", "mixtral", "opt", "gpt_neox"])
def test_any_architecture_begins_at_any_block_and_packs(kind):
    model, tokenizer = tiny_model(kind, 4, scale=0.3)
    state, forwards = weights(model), [vars(module).get("forward") for module in model.modules()]
    prompts = [tokenizer(text)["input_ids"] for text in ("What is 2 + 2?", "Ann", "Who came to Rome?")]
    options = [[tokenizer(text)["input_ids"] for text in (" 4", " five", " 22")]] * 3
    forward = Forward(model)
    packed = forward.continuation_log_probs(prompts, options)
    assert forward.packs
    for one, other in zip(packed, forward._one_by_one(prompts, options), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    rows = [TokenRow(tuple(p)) for p in prompts] + [pack(p, o) for p, o in zip(prompts, options, strict=True)]
    for first in (1, 3):
        trunk = FrozenTrunk(model, first)
        short = Forward(model, trunk).last_log_probs(rows)
        torch.testing.assert_close(short, forward.last_log_probs(rows), atol=1e-4, rtol=1e-4)
        assert trunk.is_exact(rows[0])
    assert [vars(module).get("forward") for module in model.modules()] == forwards
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8), st.booleans())
@settings(max_examples=200, deadline=None)
def test_sequences_are_grouped_without_loss(texts, packs):
    rows = list(dict.fromkeys(TokenRow(tuple(text)) for text in texts))
    if packs:
        rows = list(dict.fromkeys([*rows, pack(texts[0], [[1, 2, 3], [2, 1]])]))
    groups = grouped(rows)
    assert sorted(map(repr, (m for g in groups for m in g.members))) == sorted(map(repr, rows))
    for group in groups:
        # A "hidden state" that tells its token and what the token sees: each member must get back its own.
        row = group.row
        hidden = torch.stack([torch.tensor([float(t), float(s)]) for t, s in seen_by(row)])
        for member, part in group.parts(hidden).items():
            assert [tuple(v) for v in part.tolist()] == [(float(t), float(s)) for t, s in seen_by(member)]


def seen_by(row):
    """Of each token its id and a number for the tokens that it sees, in their order."""
    segments = row.segments or (0,) * len(row.ids)
    found = []
    for i, (token, segment) in enumerate(zip(row.ids, segments, strict=True)):
        text = [t for t, s in zip(row.ids[: i + 1], segments[: i + 1], strict=True) if s in (0, segment)]
        found.append((token, sum((t + 1) * 4**k for k, t in enumerate(text))))
    return found


def test_one_group_of_one_is_the_sequence_itself():
    row = TokenRow((1, 2, 3), (0, 1, 1))
    assert Group((1,), [row]).row is row


def test_an_architecture_that_passes_more_is_run_whole(llama):
    """A block that looks past its input at the embeddings cannot begin in the middle."""
    model, tokenizer = tiny_model("llama", 3, scale=0.3)
    first, last = model.model.layers[0], model.model.layers[2]
    kept = {}
    first.register_forward_pre_hook(
        lambda m, a, k: kept.update(x=(a[0] if a else k["hidden_states"])), with_kwargs=True
    )
    first.register_forward_hook(lambda m, a, out: kept.update(y=out))
    last.register_forward_hook(lambda m, a, out: out + (kept["y"] - kept["x"]) * 5 + 3 * kept["x"])
    labeled = labeled_as([0.1, 0.9])
    with pytest.warns(UserWarning, match="passes more than hidden states"):
        verbal = VerbalConfidence(model, tokenizer, lora=linear_lora(model, 1), epochs=1).fit(labeled)
    assert verbal.trunk_ is None


def test_what_is_trained_decides_where_the_trunk_ends(llama):
    model = llama[0]
    wrapped = get_peft_model(model, linear_lora(model, 1))
    assert first_trained_block(wrapped) == 3
    next(iter(model.get_output_embeddings().parameters())).requires_grad_(True)
    assert first_trained_block(wrapped) == 0
    wrapped.unload()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    with pytest.raises(InputError, match="trunk begins at block 3, but block 2 is trained"):
        VerbalConfidence(*llama, lora=linear_lora(model, 2), trunk=FrozenTrunk(model, 3)).fit(labeled_as([0.1, 0.9]))
    assert not any("lora" in name for name, _ in model.named_parameters()), "what failed leaves nothing behind"


# Training and reading out ---------------------------------------------------------------------------------------------


def test_an_adapter_that_was_not_trained_changes_nothing(pair, items):
    model, tokenizer = pair
    before = VerbalConfidence(model, tokenizer, DECOMPOSED).predict(items)
    wrapped = get_peft_model(model, linear_lora(model))
    after = VerbalConfidence(wrapped, tokenizer, DECOMPOSED, adapter_name="mine").predict(items)
    wrapped.unload()
    assert before.answers == after.answers
    np.testing.assert_allclose(before.confidence, after.confidence, atol=1e-6)


def test_the_base_model_is_left_as_it_was(pair, items):
    model, tokenizer = pair
    state, flags = weights(model), [p.requires_grad for p in model.parameters()]
    labeled = ConfidenceLabeler(model, tokenizer, random_state=0).label(items)
    untrained = VerbalConfidence(model, tokenizer).predict(items)
    rows = [TokenRow(tuple(ConfidenceFormat().prompt_ids(item, tokenizer))) for item in items]
    base = Forward(model).last_log_probs(rows)
    verbal = VerbalConfidence(model, tokenizer, lr=1e-2, random_state=0).fit(labeled)
    inner = verbal.model_.get_base_model().state_dict()
    for name, value in inner.items():
        if ".lora_" not in name:
            assert torch.equal(value, state[name.replace(".base_layer", "")]), name
    trained = verbal.predict(items)
    assert not np.allclose(trained.confidence, untrained.confidence)
    with verbal.disabled() as without:
        torch.testing.assert_close(Forward(without).last_log_probs(rows), base, atol=1e-5, rtol=1e-5)
    assert verbal.unload() is model
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    np.testing.assert_array_equal(VerbalConfidence(model, tokenizer).predict(items).confidence, untrained.confidence)


def test_the_same_seed_trains_the_same_adapter(llama, items):
    labeled = ConfidenceLabeler(*llama, random_state=0).label(items)
    before = torch.random.get_rng_state()
    found = []
    for seed in (0, 0, 1):
        verbal = VerbalConfidence(*llama, lora=linear_lora(llama[0], lora_dropout=0.2), random_state=seed).fit(labeled)
        found.append((verbal.losses_, verbal.predict(items).confidence))
        verbal.unload()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert found[0][0] == found[1][0] != found[2][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_a_planted_confidence_is_learned():
    """A word of the question tells how sure to be."""
    model, tokenizer = tiny_model("llama", 2, scale=0.1)
    words = {"oak": 0.9, "elm": 0.1}
    labeled = [
        LabeledItem(
            ConfItem(f"{word} {n}?", str(n)), p_hat=share, evidence=1.0, reasoning=share, answer=str((n * 7) % 10)
        )
        for n in range(10, 34)
        for word, share in words.items()
    ]
    options = {
        "lora": LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
        "lr": 2e-2,
        "epochs": 8,
        "random_state": 0,
        "max_new_tokens": 2,
    }
    tests = [ConfItem(f"{word} {n}?", str(n)) for n in range(40, 60) for word in words]
    sure = [item.question.startswith("oak") for item in tests]
    verbal = VerbalConfidence(model, tokenizer, **options).fit(labeled)
    assert calibration_report(verbal.predict(tests).confidence, sure).auroc > 0.95
    rng = np.random.default_rng(0)
    order = rng.permutation(len(labeled))
    shuffled = [
        LabeledItem(one.item, p_hat=labeled[i].p_hat, evidence=1.0, reasoning=labeled[i].p_hat, answer=one.answer)
        for one, i in zip(labeled, order, strict=True)
    ]
    verbal.unload()
    coins = rng.random(len(tests)) < 0.5
    confidence = VerbalConfidence(model, tokenizer, **options).fit(shuffled).predict(tests).confidence
    n = coins.sum() * (~coins).sum()
    error = np.sqrt((len(tests) + 1) / 12 / n)
    assert abs(calibration_report(confidence, coins).auroc - 0.5) < 3 * error


@pytest.mark.parametrize("mode", ["scalar", "decomposed"])
@pytest.mark.parametrize("levels", ["digit", "percent"])
def test_batches_equal_single_items(pair, items, mode, levels):
    model, tokenizer = pair
    some = items[:2] + items[6:8] + [ConfItem("Who came?", "Ann"), ConfItem("What is the name of this town?", "Rome")]
    verbal = VerbalConfidence(model, tokenizer, ConfidenceFormat(mode, levels), max_new_tokens=4)
    together = verbal.predict(some)
    alone = [verbal.predict([item]) for item in some]
    assert together.answers == [result.answers[0] for result in alone]
    np.testing.assert_allclose(together.confidence, [result.confidence[0] for result in alone], atol=1e-5)


def test_the_cache_of_the_answer_gives_the_same_confidence(pair):
    """Answers of different lengths, in a batch, against a forward pass over the whole text."""
    model, tokenizer = pair
    items = [ConfItem(text, "x") for text in ("Who came?", "What is the name of this town?", "Why?", "2 + 2 + 2")]
    verbal = VerbalConfidence(model, tokenizer, DECOMPOSED, max_new_tokens=6)
    answers, prefixes, decoded = verbal.answer(items)
    assert len({len(ids) for ids in decoded.ids}) > 1 or all(len(ids) == 6 for ids in decoded.ids)
    on_cache = verbal._expected(answers, prefixes, decoded)
    whole = verbal._expected(answers, prefixes, None)
    for (parts, text), (expected, expected_text) in zip(on_cache, whole, strict=True):
        assert text == expected_text
        np.testing.assert_allclose(parts, expected, atol=1e-5)


def test_the_cache_heeds_answers_that_ended_early(pair):
    model, tokenizer = pair
    prompts = [tokenizer(text)["input_ids"] for text in ("Who came?", "What is the name of this town?")]
    first = decode(model, prompts, max_new_tokens=5, temperature=0.0).ids
    # The second token that the first row writes ends it; the other row goes on.
    ended = decode(model, prompts, max_new_tokens=5, temperature=0.0, stop=frozenset({first[0][1]}))
    assert len(ended.ids[0]) < len(first[0])
    verbal = VerbalConfidence(model, tokenizer)
    asked = tokenizer("\nConfidence: ")["input_ids"]
    level_ids = verbal.format.level_ids(tokenizer)
    on_cache = verbal._levels_on_cache(ended, [asked, asked], level_ids)
    whole = verbal.level_probabilities([p + a + asked for p, a in zip(prompts, ended.ids, strict=True)])
    np.testing.assert_allclose(on_cache, whole, atol=1e-5)


def test_the_expected_read_out_stays_within_the_levels(llama, items):
    model, tokenizer = llama
    confidence = VerbalConfidence(model, tokenizer).predict(items).confidence
    assert ((confidence >= 0.05) & (confidence <= 0.95)).all()
    flat, _ = tiny_model("llama", 1)
    nn.init.zeros_(flat.get_output_embeddings().weight)
    np.testing.assert_allclose(VerbalConfidence(flat, tokenizer).predict(items).confidence, 0.5)
    percent = VerbalConfidence(flat, tokenizer, ConfidenceFormat(levels="percent")).predict(items[:1]).confidence
    assert 0 <= percent[0] <= 1


def test_the_greedy_read_out_counts_what_it_cannot_read(llama, items):
    model, tokenizer = llama
    result = VerbalConfidence(model, tokenizer).predict(items, read_out="greedy")
    unread = np.isnan(result.confidence)
    assert result.n_unparsable == unread.sum() > 0
    assert [ConfidenceFormat().parse(text) is None for text in result.text] == unread.tolist()
    report = calibration_report(np.append(result.confidence, 0.5), np.append(result.correct(items), True))
    assert report.n_missing == unread.sum()
    # Trained, the model writes one of its levels, the one that was likeliest.
    labeled = ConfidenceLabeler(model, tokenizer, random_state=0).label(items)
    verbal = VerbalConfidence(model, tokenizer, lr=2e-2, epochs=20, random_state=0).fit(labeled)
    greedy, expected = verbal.predict(items, read_out="greedy"), verbal.predict(items)
    verbal.unload()
    assert greedy.n_unparsable == 0
    assert greedy.text == expected.text
    assert set(greedy.confidence.round(2)) <= set(ConfidenceFormat().level_values.round(2))


@pytest.mark.parametrize("tags", [False, True])
def test_greedy_words_are_read_strictly(llama, monkeypatch, tags):
    model, tokenizer = llama
    verbal = VerbalConfidence(model, tokenizer, ConfidenceFormat(tags=tags))
    said = {}

    class Written:
        def __init__(self, prompts):
            self.ids = [tokenizer(said["text"])["input_ids"]]

    monkeypatch.setattr("practicum.language.confidence.verbal.decode", lambda m, prompts, **options: Written(prompts))
    close = "</confidence>" if tags else ""
    for text, value in (
        (f"7{close}", 0.75),
        (f"75{close}", None),
        ("high", None),
        (f"7{close} x"[: 1 + len(close)], 0.75),
    ):
        said["text"] = text
        parts, _ = verbal._written("42", [1, 2])
        assert (parts == [value]) if value else np.isnan(parts).all(), text


@pytest.mark.parametrize(
    ("aggregate", "rule"),
    [
        ("product", lambda e, r, i: e * r),
        ("min", lambda e, r, i: min(e, r)),
        ("evidence", lambda e, r, i: e),
        ("reasoning", lambda e, r, i: r),
        ("family", lambda e, r, i: r if i.context is None else e),
    ],
)
def test_the_parts_are_put_together(llama, items, aggregate, rule):
    result = VerbalConfidence(*llama, DECOMPOSED).predict(items, aggregate=aggregate)
    expected = [rule(*parts) for parts in zip(result.evidence, result.reasoning, items, strict=True)]
    np.testing.assert_allclose(result.confidence, expected)


def test_rethinking_keeps_the_surer_answer(llama, items):
    verbal = VerbalConfidence(*llama)
    once = verbal.predict(items)
    twice = verbal.predict(items, max_rethinks=2, threshold=float(np.median(once.confidence)))
    assert (twice.confidence >= once.confidence).all()
    assert len(items) // 2 <= twice.n_rethinks <= len(items)
    assert verbal.predict(items, max_rethinks=1, threshold=0.0).n_rethinks == 0
    changed = twice.confidence > once.confidence
    assert [a for a, c in zip(twice.answers, changed, strict=True) if not c] == [
        a for a, c in zip(once.answers, changed, strict=True) if not c
    ]


def test_equal_labels_are_warned_of_and_learned(llama):
    with pytest.warns(UserWarning, match="all labels are the same level"):
        verbal = VerbalConfidence(*llama, lr=2e-2, epochs=20, random_state=0).fit(labeled_as([0.72] * 8))
    confidence = verbal.predict([ConfItem("What is 4 + 1?", "5", choices=["5", "6"])]).confidence
    verbal.unload()
    assert abs(confidence[0] - 0.75) < 0.1


def test_a_second_fit_begins_anew(llama):
    labeled = labeled_as([0.1, 0.9, 0.4])
    verbal = VerbalConfidence(*llama, random_state=0)
    first = verbal.fit(labeled).losses_
    assert verbal.fit(labeled).losses_ == first
    verbal.unload()


def test_an_adapter_beside_another(llama, items):
    model, tokenizer = llama
    wrapped = get_peft_model(
        model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False), adapter_name="first"
    )
    try:
        with pytest.raises(InputError, match="wrapped by PEFT already; give adapter_name"):
            VerbalConfidence(wrapped, tokenizer)
        with pytest.raises(InputError, match="wrapped by PEFT already"):
            VerbalConfidence(model, tokenizer)
        before = {name: value.clone() for name, value in wrapped.state_dict().items()}
        verbal = VerbalConfidence(wrapped, tokenizer, adapter_name="second", random_state=0).fit(labeled_as([0.1, 0.9]))
        assert set(wrapped.peft_config) == {"first", "second"}
        now = wrapped.state_dict()
        assert all(
            torch.equal(value, now[name.replace("q_proj.weight", "q_proj.weight")])
            for name, value in before.items()
            if name in now
        )
        verbal.unload()
        assert set(wrapped.peft_config) == {"first"}
    finally:
        wrapped.unload()


# The hosts ------------------------------------------------------------------------------------------------------------


def test_trl_takes_the_data_set(tmp_path, items):
    from trl import SFTConfig, SFTTrainer

    import datasets

    model, tokenizer = tiny_model()
    labeled = ConfidenceLabeler(model, tokenizer, random_state=0).label(items)
    verbal = VerbalConfidence(model, tokenizer, DECOMPOSED)
    rows = datasets.Dataset.from_list(verbal.to_dataset(labeled))
    settings = SFTConfig(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
    )
    trainer = SFTTrainer(
        model=model, args=settings, train_dataset=rows, processing_class=tokenizer, peft_config=linear_lora(model, 1)
    )
    batch = next(iter(trainer.get_train_dataloader()))
    assert ((batch["labels"] != -100).sum(-1) == 2).all(), "the two digits alone are trained"
    trainer.train()
    assert trainer.state.global_step == 2
    # The host's loss is ours.
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    host = trainer.model.eval()(**inputs).loss
    chosen = batch["input_ids"].tolist()
    examples = [next(e for e in verbal.examples(labeled) if e.targets == row[: len(e.targets)]) for row in chosen]
    ours = verbal.batch_loss(Forward(trainer.model), examples)
    assert float(abs(host - ours)) < 1e-4


def test_the_plain_trainer_takes_the_data_set(tmp_path):
    model, tokenizer = tiny_model("gpt2")
    rows = VerbalConfidence(model, tokenizer).to_dataset(labeled_as([0.1, 0.5, 0.9]))
    from transformers import DataCollatorForSeq2Seq

    settings = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model, args=settings, train_dataset=rows, data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True)
    )
    assert trainer.train().global_step == 1


# Tasks, files, transfer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["times", "plus", "minus", "next", "codes", "letters", "likes", "lives"])
def test_generated_questions(task):
    items = task_items(task, 60, random_state=3)
    assert items == task_items(task, 60, random_state=3) != task_items(task, 60, random_state=4)
    assert len({(item.question, item.context) for item in items}) == 60
    for item in items:
        assert len(set(item.choices)) == 4
        if item.kind == "copy":
            assert item.answer in item.evidence
            assert item.evidence in item.context
    places = [item.choices.index(item.answer) for item in items]
    assert min(np.bincount(places, minlength=4)) > 3, "the right option is anywhere"


def test_generated_arithmetic_is_right():
    for item in task_items("times", 121):
        a, b = (int(word.strip("?")) for word in item.question.split() if word.strip("?").isdigit())
        assert int(item.answer) == a * b
    for item in task_items("minus", 50):
        a, b = (int(word.strip("?")) for word in item.question.split() if word.strip("?").isdigit())
        assert int(item.answer) == a - b


def test_shipped_labels_go_with_their_questions():
    pool = labeled_pool()
    items = pool_items()
    assert {name: [one.item for one in of] for name, of in pool.items()} == items
    for one in pool["reasoning"]:
        assert (one.evidence, one.reasoning) == (1.0, one.p_hat)
    copied = pool["copy"]
    assert np.mean([one.reasoning for one in copied]) > 0.95, "a record that is found is copied"
    assert np.std([one.evidence for one in copied]) > 0.1
    assert json.loads(to_ship(shipped_labels(), "x"))["labels"]["copy"][0] == pytest.approx(
        [round(p * 1e4) for p in shipped_labels()["copy"][0]]
    )
    with pytest.raises(InputError, match="labels of 'reasoning': must be 520; got 1"):
        labeled_pool({**shipped_labels(), "reasoning": [[0.25] * 4]})


def test_other_models_are_labelled_anew(monkeypatch):
    monkeypatch.setattr("practicum.language.confidence.pool.N_POOL", 4)
    monkeypatch.setattr("practicum.language.confidence.pool.N_HELD_OUT", 2)
    model, tokenizer = tiny_model(scale=0.3)
    labels = label_pool(model, tokenizer)
    assert {name: (len(rows), len(rows[0])) for name, rows in labels.items()} == {
        "reasoning": (4, 4),
        "copy": (4, 5),
        "minus": (2, 4),
        "letters": (2, 5),
    }
    pool = labeled_pool(labels)
    direct = ConfidenceLabeler(model, tokenizer).label([one.item for one in pool["copy"]])
    np.testing.assert_allclose([one.p_hat for one in pool["copy"]], [one.p_hat for one in direct], atol=1e-3)
    np.testing.assert_allclose([one.evidence for one in pool["copy"]], [one.evidence for one in direct], atol=1e-3)


def test_mixtures_are_as_large_as_what_they_mix():
    of = {"a": labeled_as([0.1] * 9), "b": labeled_as([0.9] * 9)}
    for n in (6, 7):
        shares = [one.p_hat for one in mixture(of, n, 0)]
        assert len(shares) == n
        assert abs(shares.count(0.1) - shares.count(0.9)) <= 1
    assert [one.p_hat for one in mixture(of, 6, 0)] == [one.p_hat for one in mixture(of, 6, 0)]


def test_the_transfer_matrix_and_its_page(llama, tmp_path):
    model, tokenizer = llama
    labeler = ConfidenceLabeler(model, tokenizer, random_state=0)
    labeled = {name: labeler.label(families(name, 12, n_records=[2])) for name in ("reasoning", "copy")}
    held_out = {"minus": labeler.label(task_items("minus", 6))}
    arms = {"scalar": ConfidenceFormat("scalar"), "decomposed": DECOMPOSED}
    cells = list(
        transfer_cells(
            model, tokenizer, labeled, arms, seeds=(0, 1), held_out=held_out, n_train=8, n_test=4, n_blocks=1, epochs=1
        )
    )
    places = {(cell.arm, cell.train, cell.test) for cell in cells}
    assert len(cells) == 2 * len(places) == 2 * 3 * 7
    assert ("decomposed", MIXTURE, "minus") in places
    assert not any("lora" in name for name, _ in model.named_parameters()), "the adapter is off again"
    joined = pooled(cells)
    assert all(len(cell.confidence) == 8 for cell in joined)
    write_page(tmp_path / "page.html", cells, "Transfer <of> confidence")
    page = (tmp_path / "page.html").read_text()
    assert page.count("class='diagram'") == len(places)
    assert "Transfer &lt;of&gt; confidence" in page
    assert "http://" not in page.split("<table>")[0].split("<body>")[0].replace("http://www.w3.org", "")


def test_reports_agree_with_their_definitions():
    rng = np.random.default_rng(0)
    confidence = rng.random(200)
    correct = rng.random(200) < confidence
    report = calibration_report(confidence, correct)
    assert report.brier == pytest.approx(np.mean((confidence - correct) ** 2))
    pairs = confidence[correct][:, None] - confidence[~correct][None]
    assert report.auroc == pytest.approx(np.mean(pairs > 0))
    assert report.reliability.count.sum() == 200
    assert report.ece_debiased <= report.ece


def test_questions_survive_their_file(tmp_path, items):
    raw = [{k: v for k, v in vars(item).items() if v is not None} for item in items]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in raw))
    assert read_items(path) == items
    labeled = [
        LabeledItem(items[0], 0.5, 1.0, 0.5, "7", samples=("7", "8")),
        LabeledItem(items[7], 0.0, 0.0, 1.0, "7", probabilities=(0.5, 0.5), greedy="7"),
        LabeledItem(ConfItem("Who?", "Ann", context="Ann came."), 0.5, None, None, "7"),
    ]
    write_labels(tmp_path / "labels.jsonl", labeled)
    assert read_labels(tmp_path / "labels.jsonl") == labeled


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"question": " "}, "question must be text"),
        ({"answer": ""}, "answer must be text"),
        ({"context": ""}, "context must be text"),
        ({"evidence": "Bob came."}, "evidence 'Bob came.' is not in the context of 'Who came\\?'"),
        (
            {"context": "Ann came.", "evidence": ["Ann came.", "Bob left."]},
            "evidence 'Bob left.' is not in the context",
        ),
        ({"choices": ["Ann"]}, "choices must be two different texts"),
        ({"choices": ["Bob", "Carl"]}, "answer 'Ann' is not among the choices"),
        ({"choices": ["Ann", ""]}, "choices must be texts"),
    ],
)
def test_bad_questions_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        ConfItem(**{"question": "Who came?", "answer": "Ann", **options})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "line 2: must be a JSON object; got list"),
        ("{", "line 2: is not JSON"),
        ('{"question": "Who?"}', "line 2: field 'answer': must be text that is not blank; it is missing"),
        ('{"question": "Who?", "answer": 3}', "line 2: field 'answer': must be text that is not blank; got 3"),
        ('{"question": "Who?", "answer": "Ann", "context": 3}', "line 2: field 'context': must be text; got 3"),
        (
            '{"question": "Who?", "answer": "Ann", "evidence": "Ann."}',
            "line 2: field 'evidence': evidence 'Ann.' is not in",
        ),
        ('{"question": "Who?", "answer": "Ann", "choices": "Ann"}', "line 2: field 'choices': must be a list"),
        ('{"question": "Who?", "answer": "Ann", "answers": "Ann"}', "line 2: field 'answers': is not a field"),
    ],
)
def test_bad_lines_are_refused(tmp_path, line, message):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "Who?", "answer": "Ann"}\n' + line)
    with pytest.raises(InputError, match=message):
        read_items(path)


def test_bad_label_files_are_refused(tmp_path):
    path = tmp_path / "mine.jsonl"
    for content, message in (
        ("", "has no questions"),
        ('{"p_hat": 1}', "line 1: field 'item'"),
        (
            '{"item": {"question": "a", "answer": "b"}, "p_hat": 2, "answer": "b"}',
            "field 'p_hat': must be a number from 0 to 1",
        ),
        ('{"item": {"question": "a", "answer": "b"}, "p_hat": 1}', "field 'answer': must be text"),
    ):
        path.write_text(content)
        with pytest.raises(InputError, match=message):
            read_labels(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_samples": 0}, "n_samples must be at least 1; got 0"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"match": "fuzzy"}, "match must be 'exact', 'number' or a callable"),
        ({"exact": "always"}, "exact must be one of"),
        ({"evidence": "guess"}, "evidence must be one of"),
        ({"target": "x"}, "target must be one of"),
        ({"balance": "x"}, "balance must be one of"),
    ],
)
def test_bad_options_of_the_labeler_are_refused(llama, options, message):
    with pytest.raises(InputError, match=message):
        ConfidenceLabeler(*llama, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"answer_weight": -1.0}, "answer_weight must be at least 0"),
        ({"retain": "l2", "answer_weight": 1.0}, "retain must be None or 'kl'"),
        ({"retain": "kl"}, "retain='kl' needs an answer_weight above 0"),
    ],
)
def test_bad_options_of_the_training_are_refused(llama, options, message):
    with pytest.raises(InputError, match=message):
        VerbalConfidence(*llama, **options)


def test_bad_calls_are_refused(llama):
    verbal = VerbalConfidence(*llama)
    item = ConfItem("Who?", "Ann")
    for call, message in (
        (lambda: ConfidenceLabeler(*llama).label([]), "items must have one item at least"),
        (lambda: verbal.fit([]), "labeled must have one item at least"),
        (lambda: verbal.to_dataset([]), "labeled must have one item at least"),
        (lambda: verbal.predict([]), "items must have one item at least"),
        (lambda: verbal.predict([item], read_out="mean"), "read_out must be"),
        (lambda: verbal.predict([item], aggregate="sum"), "aggregate must be one of"),
        (lambda: verbal.predict([item], max_rethinks=-1), "max_rethinks must be at least 0"),
        (lambda: ConfidenceFormat("triple"), "mode must be"),
        (lambda: ConfidenceFormat(levels="letters"), "levels must be"),
        (lambda: ConfidenceFormat(template="Q:"), "template must have"),
        (lambda: ConfidenceFormat(fallback="digit"), "fallback must be"),
        (lambda: ConfidenceFormat().level(1.2), "share must be from 0 to 1"),
        (lambda: FrozenTrunk(llama[0], 4), "first must be from 1 to 3"),
        (lambda: linear_lora(llama[0], 5), "n_blocks must be from 1 to 4"),
        (lambda: task_items("division", 3), "task must be one of"),
        (lambda: task_items("times", 122), "n must be at most 121"),
        (lambda: task_items("codes", 3, n_records=[]), "n_records must be"),
        (lambda: families("recall", 3), "family must be"),
        (lambda: calibration_report([0.5], [1, 0]), "must have one shape"),
        (lambda: calibration_report([float("nan")], [1]), "conf has no number"),
        (lambda: calibration_report([1.5], [1]), "conf"),
        (lambda: ConfResult(["a"], np.array([0.5]), None, None, ["a"]).correct([]), "items must be the 1"),
        (
            lambda: ConfidenceLabeler(*llama, exact=True, temperature=0.5).label([item]),
            "exact=True needs temperature=1",
        ),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_two_numbers_need_the_evidence(llama):
    one = LabeledItem(ConfItem("Who came?", "Ann", context="Ann came."), 0.5, None, None, "Ann")
    with pytest.raises(InputError, match="needs the evidence of every item with a context; 'Who came\\?' has none"):
        VerbalConfidence(*llama, DECOMPOSED).fit([one])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        VerbalConfidence(*llama, epochs=1).fit([one]).unload()
