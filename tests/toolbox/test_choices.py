import string
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from practicum.datasets import MCQuestion
from practicum.toolbox import choices
from practicum.toolbox.choices import ChoiceScorer, ChoiceScores
from practicum.toolbox.errors import InputError
from practicum.toolbox.taps import Steering

QUESTIONS = [
    MCQuestion("What is the capital of France?", ["Paris", "Addis Ababa", "Port Moresby on the sea", "Oslo"], 0),
    MCQuestion("Two?", ["2", "three hundred and seven"], 0),
    MCQuestion("Which is a colour, and not a number, of these three?", ["ten", "blue", "seventy seven"], 1),
]
WORDS = "the quick brown fox jumps over the lazy dog Question Answer capital of France Paris Oslo which what is a"
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2}
CONFIGS = {
    "llama": ("LlamaConfig", GROUPED),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 8}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}),
    "gpt-neox": ("GPTNeoXConfig", SMALL),
    "phi": ("PhiConfig", SMALL),
    "gemma2": ("Gemma2Config", {**GROUPED, "head_dim": 8, "final_logit_softcapping": 0.5}),
    "gemma3": ("Gemma3TextConfig", {**GROUPED, "head_dim": 8}),
    "mixtral": ("MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "cohere": ("CohereConfig", {**GROUPED, "logit_scale": 0.3}),
}
# What the rows of options cannot be packed for.
IN_ROWS = {
    "gemma2 with a short window": ("Gemma2Config", {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    "mistral with a short window": ("MistralConfig", {**GROUPED, "sliding_window": 4}),
    "bloom, which has ALiBi": ("BloomConfig", {"hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "mamba": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 4}),
}


def tiny(name: str, **changes) -> torch.nn.Module:
    kind, sizes = {**CONFIGS, **IN_ROWS}[name]
    config = getattr(transformers, kind)(
        vocab_size=400, pad_token_id=0, bos_token_id=1, eos_token_id=2, **{**sizes, **changes}
    )
    # Wide weights, so that what a token sees makes a difference.
    config.initializer_range = 0.2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def byte_pairs(*, template: str = "", alphabet: list[str] | None = None) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [WORDS] * 3 + [f" {letter} {letter}. " for letter in string.ascii_uppercase] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<s>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet is None else alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts if alphabet is None else [], trainer)
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_pairs(template="<s> $A")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRACTICUM_CACHE", str(tmp_path))
    return tmp_path / "choices"


@torch.no_grad()
def one_by_one(model, tokenizer, question: MCQuestion, template: str = choices.DEFAULT_TEMPLATE):
    """Log-probabilities of each option's tokens, and all activations at its last token."""
    prompt = tokenizer(template.replace("{question}", question.question))["input_ids"]
    for option in question.choices:
        ids = tokenizer(template.replace("{question}", question.question) + " " + option)["input_ids"]
        assert ids[: len(prompt)] == prompt
        output = model(torch.tensor([ids]), output_hidden_states=True)
        likely = output.logits[0].log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[len(prompt) - 1 :, 0]
        yield likely.double().numpy(), [rows[0, -1].numpy() for rows in output.hidden_states]


def close_to_one_by_one(scores: ChoiceScores, model, tokenizer, questions=QUESTIONS, layers=()) -> None:
    for i, question in enumerate(questions):
        for j, (likely, hidden) in enumerate(one_by_one(model, tokenizer, question)):
            assert scores.logits[i][j] == pytest.approx(likely.sum(), abs=1e-4)
            for layer in layers:
                # The last of transformers' own is behind the final norm.
                if layer < len(hidden) - 1:
                    np.testing.assert_allclose(scores.hidden[layer][i][j], hidden[layer], atol=2e-3, rtol=2e-3)


class TestPacked:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_as_a_row_for_each_option(self, name: str, tokenizer):
        model = tiny(name)
        scorer = ChoiceScorer(model, tokenizer, layers=[0, 2, 3], batch_size=2, cache=False)
        scores = scorer(QUESTIONS)
        assert (scorer.packing_, scorer.packing_reason_, scorer.head_) == ("packed", "", "needed")
        assert [len(row) for row in scores.logits] == [4, 2, 3]
        assert [rows.shape for rows in scores.hidden[3]] == [(4, 32), (2, 32), (3, 32)]
        assert all(rows.dtype == np.float16 for rows in scores.hidden[3])
        close_to_one_by_one(scores, model, tokenizer, layers=[0, 2])
        # Without activations the last token of an option need not be read.
        close_to_one_by_one(ChoiceScorer(model, tokenizer, cache=False)(QUESTIONS), model, tokenizer)

    def test_activations_are_those_of_a_row_for_each_option_to_1e_4(self, tokenizer):
        model = tiny("llama")
        scorer = ChoiceScorer(model, tokenizer, layers=[1, 3], cache=False)
        packs = scorer._option_packs(QUESTIONS)
        with torch.no_grad():
            packed = scorer._forward(packs, (1, 3), packed=True)
            rows = scorer._forward(
                [row for pack in packs for row in pack.rows()], (1, 3), packed=False, whole_head=True
            )
        np.testing.assert_allclose(packed.scores, rows.scores, atol=1e-4)
        for layer in (1, 3):
            np.testing.assert_allclose(packed.hidden[layer], rows.hidden[layer], atol=1e-4)

    @given(
        st.lists(
            st.lists(
                st.text("abc xyz", min_size=1, max_size=12).filter(str.strip), min_size=2, max_size=5, unique=True
            ),
            min_size=1,
            max_size=4,
        )
    )
    @settings(max_examples=15, deadline=None)
    def test_ragged_options(self, options):
        tokenizer, model = self.shared()
        questions = [MCQuestion("q" * (5 * i + 1), its_options) for i, its_options in enumerate(options)]
        close_to_one_by_one(
            ChoiceScorer(model, tokenizer, batch_size=3, cache=False)(questions), model, tokenizer, questions
        )

    @staticmethod
    def shared(made: list = []):  # noqa: B006
        if not made:
            made.extend([byte_pairs(template="<s> $A"), tiny("llama")])
        return made

    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_kinds_of_attention(self, attention: str, tokenizer):
        model = tiny("llama")
        model.set_attn_implementation(attention)
        scorer = ChoiceScorer(model, tokenizer, cache=False)
        close_to_one_by_one(scorer(QUESTIONS), model, tokenizer)
        assert scorer.packing_ == "packed"

    def test_bfloat16(self, tokenizer):
        model = tiny("llama").to(torch.bfloat16)
        scorer = ChoiceScorer(model, tokenizer, layers=[2], cache=False)
        packed = scorer(QUESTIONS)
        assert scorer.packing_ == "packed"
        scorer.packing_ = "rows"
        for one, other in zip(packed.logits, scorer(QUESTIONS).logits, strict=True):
            np.testing.assert_allclose(one, other, atol=0.5)

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_the_side_of_padding_does_not_matter(self, side: str, tokenizer):
        model = tiny("gpt2")
        other = byte_pairs(template="<s> $A")
        other.padding_side = side
        close_to_one_by_one(ChoiceScorer(model, other, cache=False)(QUESTIONS), model, tokenizer)

    def test_permuted_options_give_permuted_scores(self, tokenizer):
        model = tiny("llama")
        scorer = ChoiceScorer(model, tokenizer, cache=False)
        order = [2, 0, 3, 1]
        permuted = MCQuestion(QUESTIONS[0].question, [QUESTIONS[0].choices[i] for i in order])
        np.testing.assert_allclose(scorer([permuted]).logits[0], scorer(QUESTIONS[:1]).logits[0][order], atol=1e-5)

    def test_a_peft_model(self, tokenizer, own_cache: Path):
        from peft import LoraConfig, get_peft_model

        adapted = get_peft_model(tiny("llama"), LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"]))
        scorer = ChoiceScorer(adapted, tokenizer)
        scores = scorer(QUESTIONS)
        assert (scorer.packing_, scorer.head_) == ("packed", "needed")
        assert not own_cache.exists()
        close_to_one_by_one(scores, adapted.eval(), tokenizer)


class TestRows:
    @pytest.mark.parametrize("name", IN_ROWS)
    def test_where_options_cannot_be_packed(self, name: str, tokenizer):
        model = tiny(name)
        scorer = ChoiceScorer(model, tokenizer, batch_size=3, cache=False)
        with pytest.warns(UserWarning, match="each option is read in its own row"):
            scores = scorer(QUESTIONS)
        assert scorer.packing_ == "rows"
        assert scorer.packing_reason_
        close_to_one_by_one(scores, model, tokenizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scorer(QUESTIONS)

    def test_a_window_that_only_longer_questions_leave(self, tokenizer):
        model = tiny("mistral with a short window", sliding_window=30)
        scorer = ChoiceScorer(model, tokenizer, cache=False)
        scorer([MCQuestion("Two?", ["2", "three"])])
        assert scorer.packing_ == "packed"
        with pytest.warns(UserWarning, match="own row"):
            scores = scorer(QUESTIONS)
        assert scorer.packing_ == "rows"
        close_to_one_by_one(scores, model, tokenizer)

    def test_a_model_whose_head_cannot_be_shortened(self, tokenizer):
        class Normalised(transformers.LlamaForCausalLM):
            def forward(self, *args, **kwargs):
                output = super().forward(*args, **kwargs)
                output.logits = output.logits - output.logits.mean(dim=1, keepdim=True)
                return output

        model = Normalised(tiny("llama").config).eval()
        scorer = ChoiceScorer(model, tokenizer, cache=False)
        with pytest.warns(UserWarning, match="own row"):
            scorer(QUESTIONS)
        assert scorer.head_ == "all"


class TestLengths:
    def test_mean(self, tokenizer):
        model = tiny("qwen2")
        scores = ChoiceScorer(model, tokenizer, length_norm="mean", cache=False)(QUESTIONS)
        for i, question in enumerate(QUESTIONS):
            means = [likely.mean() for likely, _ in one_by_one(model, tokenizer, question)]
            np.testing.assert_allclose(scores.logits[i], means, atol=1e-4)

    def test_pmi(self, tokenizer):
        model = tiny("qwen2")
        scores = ChoiceScorer(model, tokenizer, length_norm="pmi", layers=[1], cache=False)(QUESTIONS)
        for i, question in enumerate(QUESTIONS):
            given_question = [likely.sum() for likely, _ in one_by_one(model, tokenizer, question)]
            alone = [likely.sum() for likely, _ in one_by_one(model, tokenizer, question, "Answer:")]
            np.testing.assert_allclose(scores.logits[i], np.subtract(given_question, alone), atol=1e-4)

    def test_single_tokens(self, tokenizer):
        model = tiny("llama")
        questions = [MCQuestion("Which?", ["A", "B", "C"])]
        close_to_one_by_one(ChoiceScorer(model, tokenizer, cache=False)(questions), model, tokenizer, questions)


class TestTokens:
    def test_a_tokenizer_that_ends_texts(self, tokenizer):
        model = tiny("llama")
        scores = ChoiceScorer(model, byte_pairs(template="<s> $A </s>"), cache=False)(QUESTIONS)
        close_to_one_by_one(scores, model, tokenizer)

    def test_a_prompt_that_joins_with_the_option(self, tokenizer):
        # "{question}\nThe" + "n" would be other tokens than the two apart; all options share what is left.
        model = tiny("llama")
        question = MCQuestion("Which?", ["A", "Paris"])
        template = "{question} "
        ids = [tokenizer(f"Which? {option}")["input_ids"] for option in question.choices]
        n_shared = next(n for n in range(20) if ids[0][n] != ids[1][n])
        scores = ChoiceScorer(model, tokenizer, template=template, cache=False)([question])
        for score, row in zip(scores.logits[0], ids, strict=True):
            with torch.no_grad():
                likely = model(torch.tensor([row])).logits[0].log_softmax(-1)[:-1]
            expected = likely.gather(1, torch.tensor(row[1:])[:, None])[n_shared - 1 :].sum()
            assert score == pytest.approx(expected.item(), abs=1e-4)

    def test_braces_in_questions_are_text(self, tokenizer):
        ChoiceScorer(tiny("llama"), tokenizer, cache=False)([MCQuestion("{x} {question} {}", ["{a}", "b"])])


class TestLetters:
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_logits_and_activations_at_the_end_of_the_prompt(self, side: str):
        tokenizer = byte_pairs(template="<s> $A")
        tokenizer.padding_side = side
        model = tiny("llama")
        scorer = ChoiceScorer(model, tokenizer, mode="letter", layers=[1], cache=False)
        scores = scorer(QUESTIONS)
        assert (scorer.packing_, scorer.head_) == ("letters", "needed")
        for i, question in enumerate(QUESTIONS):
            listed = "".join(f"\n{'ABCD'[j]}. {choice}" for j, choice in enumerate(question.choices))
            ids = tokenizer(f"Question: {question.question}{listed}\nAnswer:")["input_ids"]
            with torch.no_grad():
                output = model(torch.tensor([ids]), output_hidden_states=True)
            letters = [tokenizer(f" {letter}", add_special_tokens=False)["input_ids"] for letter in "ABCD"]
            assert {len(letter) for letter in letters} == {1}
            expected = output.logits[0, -1][[letter[0] for letter in letters[: len(question.choices)]]]
            np.testing.assert_allclose(scores.logits[i], expected, atol=1e-4)
            for row in scores.hidden[1][i]:
                np.testing.assert_allclose(row, output.hidden_states[1][0, -1], atol=2e-3, rtol=2e-3)

    def test_letters_without_a_space(self):
        tokenizer = byte_pairs(alphabet=pre_tokenizers.ByteLevel.alphabet())
        scorer = ChoiceScorer(tiny("llama"), tokenizer, mode="letter", cache=False)
        assert scorer.letter_tokens(3) == tokenizer.convert_tokens_to_ids(["A", "B", "C"])

    def test_a_tokenizer_that_lacks_one(self):
        tokenizer = byte_pairs(alphabet=[*string.ascii_lowercase, "Ġ", "A", "B", "Q", "?", ":", "."])
        scorer = ChoiceScorer(tiny("llama"), tokenizer, mode="letter", cache=False)
        scorer([MCQuestion("q", ["a", "b"])])
        with pytest.raises(InputError, match="no single token for the letter C"):
            scorer([MCQuestion("q", ["a", "b", "c"])])

    def test_at_most_26(self, tokenizer):
        scorer = ChoiceScorer(tiny("llama"), tokenizer, mode="letter", cache=False)
        assert len(scorer([MCQuestion("q", [f"o{i}" for i in range(26)])]).logits[0]) == 26
        with pytest.raises(InputError, match=r"questions\[1\]: has 27 choices; must have at most 26"):
            scorer([QUESTIONS[0], MCQuestion("q", [f"o{i}" for i in range(27)])])


class TestCache:
    def scorer(self, tokenizer, model=None, **options) -> ChoiceScorer:
        return ChoiceScorer(model or tiny("llama"), tokenizer, **{"layers": [2], **options})

    def test_read_again_bit_by_bit(self, tokenizer, own_cache: Path, monkeypatch: pytest.MonkeyPatch):
        first = self.scorer(tokenizer)(QUESTIONS)
        again = self.scorer(tokenizer)
        monkeypatch.setattr(again.model, "forward", None)
        second = again(QUESTIONS)
        assert again.packing_ == "packed"
        for one, other in zip(first.logits, second.logits, strict=True):
            np.testing.assert_array_equal(one, other)
        for one, other in zip(first.hidden[2], second.hidden[2], strict=True):
            np.testing.assert_array_equal(one, other)
            assert other.dtype == np.float16
        assert len(list(own_cache.glob("*.safetensors"))) == 1

    def test_other_work_is_not_mixed_up(self, tokenizer, own_cache: Path):
        changed = tiny("llama")
        with torch.no_grad():
            changed.lm_head.weight[5] += 1
        for scorer, questions in [
            (self.scorer(tokenizer), QUESTIONS),
            (self.scorer(tokenizer), QUESTIONS[:2]),
            (self.scorer(tokenizer, template="{question} Answer:"), QUESTIONS),
            (self.scorer(tokenizer, mode="letter"), QUESTIONS),
            (self.scorer(tokenizer, layers=[1]), QUESTIONS),
            (self.scorer(tokenizer, length_norm="mean"), QUESTIONS),
            (self.scorer(tokenizer, length_norm="pmi"), QUESTIONS),
            (self.scorer(tokenizer, changed), QUESTIONS),
        ]:
            before = len(list(own_cache.glob("*.safetensors"))) if own_cache.exists() else 0
            scorer(questions)
            assert len(list(own_cache.glob("*.safetensors"))) == before + 1

    def test_a_damaged_file_is_made_anew(self, tokenizer, own_cache: Path):
        first = self.scorer(tokenizer)(QUESTIONS)
        file = next(own_cache.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:50])
        np.testing.assert_array_equal(self.scorer(tokenizer)(QUESTIONS).logits[0], first.logits[0])

    def test_a_steered_model_is_not_cached(self, tokenizer, own_cache: Path):
        scorer = self.scorer(tokenizer)
        plain = scorer(QUESTIONS)
        with Steering(scorer.model, {1: lambda hidden: hidden * 2}):
            steered = scorer(QUESTIONS)
        assert not np.allclose(plain.logits[0], steered.logits[0])
        np.testing.assert_array_equal(scorer(QUESTIONS).logits[0], plain.logits[0])

    def test_hooks_that_transformers_leaves_behind_do_not_matter(self, tokenizer, own_cache: Path):
        scorer = self.scorer(tokenizer)
        scorer.model(torch.tensor([[1, 5]]), output_hidden_states=True)
        assert any(module._forward_hooks for module in scorer.model.modules())
        scorer(QUESTIONS)
        assert len(list(own_cache.glob("*.safetensors"))) == 1

    def test_without(self, tokenizer, own_cache: Path):
        self.scorer(tokenizer, cache=False)(QUESTIONS)
        assert not own_cache.exists()


class TestTheModelIsLeftAsItWas:
    def test_after_scoring_and_after_a_failure(self, tokenizer):
        model = tiny("llama")
        model.train()
        model.model.layers[0].eval()
        modes = [module.training for module in model.modules()]
        before = model(torch.tensor([[1, 5, 6]])).logits
        ChoiceScorer(model, tokenizer, layers=[1], cache=False)(QUESTIONS)
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.fill_(float("inf"))
        with pytest.raises(InputError):
            ChoiceScorer(model, tokenizer, layers=[2], cache=False)(QUESTIONS)
        assert [module.training for module in model.modules()] == modes
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        restored = tiny("llama")
        restored.train()
        assert torch.equal(before, restored(torch.tensor([[1, 5, 6]])).logits)

    def test_dropout_is_off(self, tokenizer):
        model = tiny("gpt2")
        truth = ChoiceScorer(model, tokenizer, cache=False)(QUESTIONS)
        model.train()
        scores = ChoiceScorer(model, tokenizer, cache=False)(QUESTIONS)
        np.testing.assert_allclose(scores.logits[0], truth.logits[0], atol=1e-5)


class TestBadInput:
    @pytest.mark.parametrize(
        ("question", "message"),
        [
            (MCQuestion("q", ["a"]), r"questions\[3\]: has 1 choices"),
            (MCQuestion("q", ["a", "a"]), r"questions\[3\]: choice 'a' is there twice"),
            (MCQuestion("q", ["a", ""]), r"questions\[3\]: choices\[1\] is empty"),
            (MCQuestion("q", ["a", "b"], 2), r"questions\[3\]: answer=2; must be from 0 to 1"),
            (MCQuestion("q" * 200, ["a", "b"]), r"questions\[3\]: has 2\d\d tokens .* the model takes 128"),
        ],
    )
    def test_questions(self, question: MCQuestion, message: str, tokenizer):
        with pytest.raises(InputError, match=message):
            ChoiceScorer(tiny("gpt2"), tokenizer, cache=False)([*QUESTIONS, question])

    def test_no_questions(self, tokenizer):
        with pytest.raises(InputError, match="questions: is empty"):
            ChoiceScorer(tiny("gpt2"), tokenizer, cache=False)([])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mode": "number"}, "mode='number': must be one of 'continuation', 'letter'"),
            ({"length_norm": "max"}, "length_norm='max': must be one of"),
            ({"mode": "letter", "length_norm": "mean"}, "length_norm='mean'"),
            ({"template": "no place"}, "template='no place': must have {question} once"),
            ({"template": "{question}", "length_norm": "pmi"}, "template='{question}': must have text after"),
            ({"batch_size": 0}, "batch_size=0: must be a whole number, at least 1"),
            ({"layers": [4]}, "layers=.*4.* from 0 to 3"),
            ({"layers": [-1]}, "layers=.*-1.* from 0 to 3"),
        ],
    )
    def test_options(self, options: dict, message: str, tokenizer):
        with pytest.raises(InputError, match=message):
            ChoiceScorer(tiny("llama"), tokenizer, **options)

    def test_an_option_without_tokens(self):
        silent = byte_pairs(alphabet=[*string.ascii_letters, "Ġ", "?", ":", "."])
        silent.unk_token = None
        silent.backend_tokenizer.model.unk_token = None
        scorer = ChoiceScorer(tiny("llama"), silent, template="{question} Answer: ", cache=False)
        with pytest.raises(InputError, match=r"questions\[1\].choices\[1\]: becomes no token"):
            scorer([MCQuestion("q", ["a", "b"]), MCQuestion("q", ["a", "é"])])

    def test_activations_that_overflow(self, tokenizer):
        model = tiny("llama")
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(1e7)
        scorer = ChoiceScorer(model, tokenizer, layers=[1, 2], cache=False)
        with pytest.raises(InputError, match="activations of layer 2 are not finite in float16"):
            scorer(QUESTIONS)

    def test_logits_that_are_not_finite(self, tokenizer):
        model = tiny("llama")
        with torch.no_grad():
            model.model.norm.weight.fill_(float("nan"))
        with pytest.raises(InputError, match="model: gives logits that are not finite"):
            ChoiceScorer(model, tokenizer, cache=False)(QUESTIONS)
