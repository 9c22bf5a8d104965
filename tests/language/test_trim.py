"""TRIM: saliency, fingerprints, scores, budgets, shards, its rivals, and the program."""

import itertools
import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from scipy.stats import spearmanr
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from torch.nn.functional import normalize

import datasets
from practicum.cli import main
from practicum.language.confidence.tiny import character_tokenizer, tiny_model
from practicum.language.trim import (
    BM25Selector,
    Checkpoint,
    EmbeddingSelector,
    GradientSelector,
    LengthSelector,
    PerplexitySelector,
    RandomSelector,
    RepresentationSelector,
    SampleFile,
    SampleTokenizer,
    TokenStates,
    TrimSelector,
    attention_saliency,
    read_states,
    select_coreset,
    take,
    warm_up,
)
from practicum.language.trim import saliency as saliency_module
from practicum.language.trim.fingerprints import Fingerprints, mean_states, sample_scores
from practicum.language.trim.saliency import aggregate
from practicum.language.trim.shards import Scored, score_in_shards
from practicum.language.trim.states import StateReader
from practicum.language.trim.tasks import (
    FAMILIES,
    WANTED,
    instruction_pool,
    reworded_samples,
    wanted_samples,
    with_filler,
)
from practicum.language.trim.training import response_log_probs
from practicum.toolbox.errors import InputError
from practicum.toolbox.kv import AttentionCall, AttentionTap
from practicum.toolbox.trunk import Forward, FrozenTrunk, TokenRow

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
TARGET = [
    {"prompt": "2+2", "response": "2+2=4, so 4"},
    {"prompt": "1+5", "response": "1+5=6, so 6"},
    {"prompt": "3+4", "response": "3+4=7, so 7"},
]
POOL = [
    {"prompt": "dog", "response": "Hund"},
    {"prompt": "3+1", "response": "3+1=4, so 4"},
    {"prompt": "a longer question about a house", "response": "a house is Haus"},
    {"prompt": "5+2", "response": "it is 7"},
    {"prompt": "x", "response": "z"},
]


def numbers(seed=0):
    return torch.Generator().manual_seed(seed)


def tiny(model_type="llama", n_layers=3, **options):
    """Weights large enough for attention that is not uniform."""
    model, tokenizer = tiny_model(model_type, n_layers, scale=0.2, **options)
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer


@pytest.fixture(scope="module")
def llama():
    return tiny()


@pytest.fixture(scope="module")
def selector(llama):
    return TrimSelector(*llama, n_layers=2).fit(TARGET)


def call_of(query, key, causal=True, **options):
    return AttentionCall(
        1, torch.nn.Identity(), query, key, key, options.pop("mask", None), 1.0, causal, "sdpa", options
    )


# Saliency -------------------------------------------------------------------------------------------------------------


def test_attention_to_one_key_is_sharp():
    one_hot = 100 * torch.eye(6).reshape(1, 1, 6, 6)
    rows, columns = attention_saliency(call_of(one_hot, one_hot))
    assert rows[0].tolist() == [0, 1, 1, 1, 1, 1]
    expected = [1 / (6 - j) for j in range(6)]
    assert torch.allclose(columns[0], torch.tensor(expected))


def test_even_attention_is_not_sharp_and_columns_follow_harmonic_numbers():
    n = 9
    zeros = torch.zeros(2, 3, n, 4)
    rows, columns = attention_saliency(call_of(zeros, zeros))
    assert torch.allclose(rows, torch.zeros(2, n), atol=1e-6)
    expected = [sum(1 / i for i in range(j, n + 1)) / (n - j + 1) for j in range(1, n + 1)]
    assert torch.allclose(columns, torch.tensor(expected).expand(2, n))


def by_the_book(call, real):
    """Saliency from whole matrices, one sequence and head at a time."""
    z = call.logits(slice(None))
    b, heads, m, _ = z.shape
    rows, columns = torch.zeros(b, m), torch.zeros(b, m)
    for s in range(b):
        for h in range(heads):
            a = z[s, h].softmax(-1)
            visible = torch.isfinite(z[s, h])
            for i in range(m):
                p = a[i][visible[i]]
                if len(p) > 1:
                    rows[s, i] += (1 + float((p * p.log()).sum()) / math.log(len(p))) / heads
            for j in range(m):
                readers = visible[:, j] & real[s]
                columns[s, j] += float(a[readers, j].sum()) / max(1, int(readers.sum())) / heads
    return rows, columns


def test_saliency_is_that_of_whole_matrices(monkeypatch):
    query, key = (torch.randn(2, heads, 30, 8, generator=numbers(i)) for i, heads in enumerate((4, 2)))
    real = torch.ones(2, 30, dtype=torch.bool)
    real[1, :7] = False
    causal = torch.ones(30, 30, dtype=torch.bool).tril()
    window = causal & ~torch.ones(30, 30, dtype=torch.bool).tril(-11)
    for band in (causal, window):
        mask = (band[None] & real[:, None]) | torch.eye(30, dtype=torch.bool)
        call = call_of(query, key, mask=mask[:, None])
        expected = by_the_book(call, real)
        for most in (2**24, 4000, 1):
            monkeypatch.setattr(saliency_module, "MOST_AT_ONCE", most)
            found = attention_saliency(call, real)
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.allclose(ours[real], theirs[real], atol=1e-5)


def test_learned_sinks_take_their_part():
    zeros = torch.zeros(1, 1, 4, 4)
    _, columns = attention_saliency(call_of(zeros, zeros, s_aux=torch.tensor([0.0])))
    assert columns[0, -1].item() == pytest.approx(1 / 5)


def test_saliency_of_a_model_is_that_of_its_attention(llama):
    model, _ = llama
    seen = {}

    def keep(call):
        seen[call.layer] = attention_saliency(call)

    ids = torch.randint(2, 50, (2, 12), generator=numbers())
    with torch.no_grad(), AttentionTap(model, keep):
        model(ids)
    model.set_attn_implementation("eager")
    attentions = model(ids, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    visible = torch.arange(1, 13).float()
    for layer, a in enumerate(attentions, start=1):
        entropy = -(a * a.clamp_min(1e-30).log()).sum(-1).mean(1)
        expected = 1 - entropy[:, 1:] / visible[1:].log()
        assert torch.allclose(seen[layer][0][:, 1:], expected, atol=1e-5)
        assert torch.allclose(seen[layer][1], a.mean(1).sum(1) / visible.flip(0), atol=1e-5)
    assert float(seen[1][0].std()) > 1e-3


def test_weights_are_scaled_within_each_sample():
    rows = torch.tensor([0.2, 0.4, 0.3, 7.0, 7.0])
    columns = torch.tensor([0.9, 0.1, 0.3, 0.5, 0.6])
    owner = torch.tensor([0, 0, 0, 1, 1])
    first = torch.tensor([True, False, False, False, False])
    assert torch.allclose(aggregate(rows, columns, owner, 2, first), torch.tensor([0, 0.5, 0.75, 0, 0.5]))


# Fingerprints ---------------------------------------------------------------------------------------------------------


def states_of(ids, states, owner=None, rows=None, columns=None):
    ids = torch.as_tensor(ids)
    owner = torch.zeros(len(ids), dtype=torch.long) if owner is None else torch.as_tensor(owner)
    places = torch.arange(1, len(ids) + 1)
    roles = torch.full((len(ids),), 2, dtype=torch.uint8)
    return TokenStates(ids, torch.as_tensor(states), owner, places, roles, int(owner.max()) + 1, rows, columns)


def test_a_fingerprint_is_the_weighted_mean_direction():
    states = torch.randn(4, 5, generator=numbers())
    rows, columns = torch.tensor([0.0, 1.0, 0.5, 0.2]), torch.tensor([0.0, 0.2, 1.0, 0.4])
    prints = Fingerprints.of(states_of([3, 7, 7, 3], states, rows=rows, columns=columns), torch.eye(9))
    alpha, units = (rows + columns) / 2, normalize(states, dim=-1)
    assert prints.ids.tolist() == [3, 7]
    assert torch.allclose(prints.vectors[1], normalize(alpha[1] * units[1] + alpha[2] * units[2], dim=0))
    assert torch.allclose(prints.vectors.norm(dim=-1), torch.ones(2))
    # Scaling all weights changes nothing, for they are scaled within the sample.
    scaled = Fingerprints.of(states_of([3, 7, 7, 3], states, rows=5 * rows, columns=5 * columns), torch.eye(9))
    assert torch.allclose(scaled.vectors, prints.vectors, atol=1e-6)


def test_a_class_without_weight_has_its_plain_mean():
    states = torch.randn(3, 5, generator=numbers())
    flat = torch.tensor([0.0, 1.0, 0.0])
    prints = Fingerprints.of(states_of([2, 4, 2], states, rows=flat, columns=flat), torch.eye(5))
    assert torch.allclose(prints.vectors[0], normalize(normalize(states[[0, 2]], dim=-1).sum(0), dim=0))


def test_the_order_of_the_target_does_not_matter(llama):
    one = TrimSelector(*llama, n_layers=2).fit(TARGET)
    other = TrimSelector(*llama, n_layers=2).fit(TARGET[::-1])
    assert torch.equal(one.fingerprint_ids_, other.fingerprint_ids_)
    assert torch.allclose(one.fingerprints_, other.fingerprints_, atol=1e-5)
    assert len(one.saliency_) == 3
    assert torch.allclose(one.saliency_[0], other.saliency_[2], atol=1e-5)


def test_unseen_tokens_go_by_the_nearest_embedding():
    embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 1.0], [-1.0, 9.0]])
    prints = Fingerprints.of(states_of([0, 1], torch.eye(2)), embeddings)
    assert prints.nearest.tolist() == [0, 1, 0, 1]
    states = torch.tensor([[1.0, 0.0], [1.0, 0.0], [2.0, 2.0]])
    scores = prints.token_scores(states_of([0, 2, 3], states), 0.5)
    assert torch.allclose(scores, torch.tensor([1.0, 0.5, 0.5 * 2**-0.5]))


def test_the_sample_score_is_between_mean_and_max():
    scores = torch.tensor([0.1, 0.5, -0.2, 0.9])
    owner = torch.tensor([0, 0, 1, 1])
    assert torch.allclose(sample_scores(scores, owner, 2, 0.0), torch.tensor([0.3, 0.35]))
    assert torch.allclose(sample_scores(scores, owner, 2, 1.0), torch.tensor([0.5, 0.9]))
    assert torch.allclose(sample_scores(scores, owner, 2, 0.25), torch.tensor([0.35, 0.4875]))


# Scores ---------------------------------------------------------------------------------------------------------------


def test_a_target_of_one_sample_matches_itself(llama):
    alone = TrimSelector(*llama, n_layers=2, saliency="uniform").fit([{"prompt": "q", "response": "abcdeab"}])
    told = alone.explain({"prompt": "q", "response": "abcdeab"})
    assert [token for token, _, _ in told] == list("abcdeab")
    assert all(seen for _, _, seen in told)
    assert all(score == pytest.approx(1, abs=1e-5) for token, score, _ in told if token in "cde")
    assert all(score < 1 - 1e-4 for token, score, _ in told if token in "ab")
    assert [seen for _, _, seen in alone.explain({"prompt": "q", "response": "cZ"})] == [True, False]


def test_a_target_sample_scores_above_its_tokens_in_other_order(llama):
    text = "3+4=7 so"
    rng = np.random.default_rng(0)
    shuffled = [{"prompt": "3+4", "response": "".join(rng.permutation(list(text)))} for _ in range(10)]
    found = TrimSelector(*llama, n_layers=2).fit([{"prompt": "3+4", "response": text}])
    scores = found.score_samples([{"prompt": "3+4", "response": text}, *shuffled])
    assert scores.argmax() == 0
    assert scores.dtype == np.float32


def test_a_known_score_from_the_formulas(llama):
    model, tokenizer = llama
    found = TrimSelector(model, tokenizer, n_layers=2, max_weight=0.3).fit(TARGET)
    (sample,) = SampleTokenizer(tokenizer).tokenize(POOL[3:4])
    with torch.no_grad():
        hidden = model.model(torch.tensor([sample.ids])).last_hidden_state[0]
    scores = []
    for place in sample.in_scope("response"):
        h, token = normalize(hidden[place], dim=0), sample.ids[place]
        if token in found.fingerprint_ids_.tolist():
            scores.append(float(h @ found.fingerprints_[found.fingerprint_ids_.tolist().index(token)]))
        else:
            embeddings = normalize(model.get_input_embeddings().weight.detach(), dim=-1)
            nearest = int((embeddings[found.fingerprint_ids_] @ embeddings[token]).argmax())
            scores.append(0.5 * float(h @ found.fingerprints_[nearest]))
    assert found.score_samples(POOL)[3] == pytest.approx(0.7 * np.mean(scores) + 0.3 * max(scores), abs=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen2"])
def test_batches_and_padding_change_nothing(model_type):
    model, tokenizer = tiny(model_type)
    scores = [
        TrimSelector(model, tokenizer, n_layers=2, batch_size=size, shard_size=shard).fit(TARGET).score_samples(POOL)
        for size, shard in ((1, 4096), (3, 4096), (8, 2))
    ]
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-5)
    np.testing.assert_allclose(scores[2], scores[0], atol=1e-5)
    assert np.ptp(scores[0]) > 1e-3


def test_duplicates_score_the_same(selector):
    pool = [POOL[1], *POOL, POOL[1]]
    scores = selector.score_samples(pool)
    np.testing.assert_allclose(scores[[0, 2, 6]], scores[0], atol=1e-6)


def test_bfloat16_ranks_alike(llama):
    model, tokenizer = tiny()
    pool = [{"prompt": str(i), "response": f"{i}+{i % 7}={i + i % 7} or {chr(97 + i % 26)}"} for i in range(40)]
    whole = TrimSelector(*llama, n_layers=2).fit(TARGET).score_samples(pool)
    halved = TrimSelector(model.bfloat16(), tokenizer, n_layers=2).fit(TARGET).score_samples(pool)
    assert spearmanr(whole, halved).statistic > 0.98
    assert not np.array_equal(whole, halved)


def test_the_penalty_is_for_unseen_tokens_alone(llama):
    def scores(penalty, pool):
        return TrimSelector(*llama, n_layers=2, unseen_penalty=penalty).fit(TARGET).score_samples(pool)

    assert np.array_equal(scores(0.0, [TARGET[0]]), scores(1.0, [TARGET[0]]))
    half, none = scores(0.5, POOL), scores(0.0, POOL)
    assert not np.array_equal(half, none)


def test_what_the_template_writes_never_counts(llama):
    model, tokenizer = llama
    samples = SampleTokenizer(tokenizer).tokenize(POOL)
    reader = StateReader(model, 2)
    states = reader.read(samples)
    assert len(states.ids) == sum(len(sample["prompt"]) + len(sample["response"]) for sample in POOL)
    noise = torch.randn(1, 1, 32, generator=numbers())

    def disturb(module, args, output):
        hidden = output.last_hidden_state.clone()
        length = hidden.shape[1]
        for row, sample in enumerate(disturbed):
            for place, role in enumerate(sample.roles):
                if role == 0:
                    hidden[row, length - len(sample.ids) + place] = noise
        output["last_hidden_state"] = hidden
        return output

    found = TrimSelector(model, tokenizer, n_layers=2, batch_size=1).fit(TARGET)
    expected = found.score_samples(POOL)
    for i, sample in enumerate(samples):
        disturbed = [sample]
        handle = model.model.register_forward_hook(disturb)
        try:
            assert found.score_samples([POOL[i]])[0] == expected[i]
        finally:
            handle.remove()


def test_scopes(llama):
    model, tokenizer = llama
    pool, target = (read_states(model, tokenizer, samples, saliency=True, n_layers=2) for samples in (POOL, TARGET))
    for scope, field in (("prompt", "prompt"), ("response", "response")):
        found = TrimSelector(model, tokenizer, n_layers=2, scope=scope).fit(TARGET)
        kept = pool.scoped(scope)
        assert tokenizer.decode(kept.ids[kept.owner == 2]) == POOL[2][field]
        assert np.allclose(found.score_samples(POOL), found.score_states(pool)[:, 0], atol=1e-5)
        again = TrimSelector(model, tokenizer, scope=scope).fit_states(target)
        assert torch.allclose(again.fingerprints_, found.fingerprints_, atol=1e-5)
    everything = TrimSelector(model, tokenizer, n_layers=2, scope="all").fit(TARGET)
    assert set(everything.fingerprint_ids_.tolist()) == set(
        tokenizer("".join(s["prompt"] + s["response"] for s in TARGET))["input_ids"]
    )


def test_states_before_the_norm(llama):
    model, tokenizer = llama
    before, after = (
        read_states(model, tokenizer, POOL, n_layers=2, hidden=hidden) for hidden in ("pre_norm", "last_hidden_state")
    )
    assert torch.allclose(model.model.norm(before.states), after.states, atol=1e-5)
    assert not torch.allclose(before.states, after.states, atol=1e-2)


def test_a_trunk_gives_the_same_states(llama):
    model, tokenizer = llama
    plain, fast = (
        read_states(model, tokenizer, TARGET, saliency=True, n_layers=1, trunk=trunk)
        for trunk in (None, FrozenTrunk(model, 2))
    )
    for name in ("states", "rows", "columns"):
        assert torch.allclose(getattr(plain, name), getattr(fast, name), atol=1e-5)


def test_scoring_makes_no_graph_and_leaves_the_model_alone(llama):
    model, tokenizer = llama
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        before = model(ids).logits
    states = read_states(model, tokenizer, POOL, saliency=True, n_layers=2)
    assert not states.states.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.config._attn_implementation == "sdpa"
    broken = [*TARGET[:1], {"prompt": "x", "response": ""}]
    with pytest.raises(InputError):
        TrimSelector(model, tokenizer, n_layers=2).fit(broken)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


def test_reading_saliency_does_not_change_the_states(llama):
    model, tokenizer = llama
    plain, watched = (read_states(model, tokenizer, POOL, saliency=how, n_layers=3) for how in (False, True))
    assert torch.equal(plain.states, watched.states)
    assert plain.rows is None
    assert watched.rows.shape == plain.ids.shape


def test_only_the_last_layers_are_watched(llama, monkeypatch):
    model, tokenizer = llama
    from practicum.language.trim import states as states_module

    layers = []
    whole = states_module.attention_saliency
    monkeypatch.setattr(
        states_module, "attention_saliency", lambda call, real: layers.append(call.layer) or whole(call, real)
    )
    TrimSelector(model, tokenizer, n_layers=2, batch_size=8).fit(TARGET)
    assert layers == [2, 3]
    TrimSelector(model, tokenizer, n_layers=2).fit(TARGET).score_samples(POOL)
    assert layers == [2, 3, 2, 3]


def test_several_tasks(llama):
    model, tokenizer = llama
    words = [{"prompt": "dog", "response": "der Hund"}, {"prompt": "cat", "response": "die Katze"}]
    target = [{**s, "task": "sum"} for s in TARGET] + [{**s, "task": "word"} for s in words]
    both = TrimSelector(model, tokenizer, n_layers=2).fit(target)
    assert both.tasks_ == ["sum", "word"]
    scores = both.score_tasks(POOL)
    for task, samples in enumerate((TARGET, words)):
        alone = TrimSelector(model, tokenizer, n_layers=2).fit(samples)
        np.testing.assert_allclose(scores[:, task], alone.score_samples(POOL), atol=1e-5)
        assert torch.allclose(both.fingerprints_[both.fingerprint_tasks_ == task], alone.fingerprints_, atol=1e-5)
    assert np.array_equal(both.score_samples(POOL), scores.max(1))
    turns = both.select(POOL, n=2, allocation="round_robin")
    assert turns[0] == scores[:, 0].argmax()
    left = scores[:, 1].copy()
    left[turns[0]] = -np.inf
    assert turns[1] == left.argmax()
    assert both.explain(POOL[0], task="word") != both.explain(POOL[0], task="sum")


def test_cloning_shares_the_model_and_forgets_the_fit(selector):
    again = clone(selector)
    assert again.model is selector.model
    assert again.get_params() == selector.get_params()
    assert again.set_params(max_weight=1.0).max_weight == 1.0
    with pytest.raises(NotFittedError):
        again.score_samples(POOL)


def test_random_state_is_not_for_scores(llama, selector):
    other = TrimSelector(*llama, n_layers=2, random_state=7).fit(TARGET)
    assert np.array_equal(other.score_samples(POOL), selector.score_samples(POOL))


def test_global_random_numbers_are_left_alone(llama):
    model, tokenizer = llama
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    tuned = warm_up(model, tokenizer, POOL, 0.5, LoraConfig(target_modules=["q_proj"]), random_state=3)
    GradientSelector(tuned, tokenizer, projection_dim=64).fit(TARGET).score_samples(POOL)
    undo(tuned)
    TrimSelector(model, tokenizer, n_layers=2).fit(TARGET).select(POOL, n=2, diversity=0.5)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002


def undo(tuned):
    for parameter in tuned.unload().parameters():
        parameter.requires_grad_(True)


# Samples --------------------------------------------------------------------------------------------------------------


def test_chat_templates_of_many_kinds():
    tokenizer = character_tokenizer()
    sample = {
        "messages": [
            {"role": "system", "content": "be user"},
            {"role": "user", "content": "user:"},
            {"role": "assistant", "content": " a "},
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": "assistant"},
        ]
    }
    for template in (
        TEMPLATE,
        "{{ 'You are nice.' }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'assistant' %}A: {% endif %}{{ m.content }}\n{% endfor %}",
    ):
        tokenizer.chat_template = template
        (found,) = SampleTokenizer(tokenizer).tokenize([sample])
        said = {
            role: "".join(tokenizer.decode([i]) for i, r in zip(found.ids, found.roles, strict=True) if r == role)
            for role in (1, 2)
        }
        assert said[1] == "be useruser:more"
        assert said[2].replace(" ", "") == "aassistant"


def test_generation_marks_serve_where_a_template_changes_messages():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content | upper }}"
        "{% endgeneration %}{% else %}{{ m.content | upper }}{% endif %};{% endfor %}"
    )
    (found,) = SampleTokenizer(tokenizer).tokenize([{"prompt": "ab", "response": "cd"}])
    assert tokenizer.decode(found.ids) == "AB;CD;"
    assert found.roles == (0, 0, 0, 2, 2, 0)


def test_a_format_of_ones_own():
    tokenizer = character_tokenizer()

    def format(sample):
        return [("Q ", "template"), (sample["question"], "prompt"), (" A", "template"), (" 4!", "response")]

    (found,) = SampleTokenizer(tokenizer, format).tokenize([{"question": "ab"}])
    assert tokenizer.decode(found.ids) == "Q ab A 4!"
    # A blank of the response by itself is the response's.
    assert found.roles == (0, 0, 1, 1, 0, 0, 2, 2, 2)


def test_completions_and_conversations_are_read():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    forms = [
        {"prompt": "a", "response": "b"},
        {"prompt": "a", "completion": "b"},
        {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ]
    assert len(set(SampleTokenizer(tokenizer).tokenize(forms))) == 1


def test_long_samples_are_cut_and_counted(llama):
    model, tokenizer = llama
    long_answer = {"prompt": "q", "response": "2+2=4" * 20}
    long_question = {"prompt": "q" * 100, "response": "2+2=4"}
    cutter = SampleTokenizer(tokenizer, max_length=30)
    first, last = cutter.tokenize([long_answer, long_question])
    assert len(first.ids) == len(last.ids) == 30
    assert tokenizer.decode(first.ids).startswith("user:q<end>assistant:2+2")
    assert tokenizer.decode(last.ids).endswith("assistant:2+2=4<end>")
    found = TrimSelector(model, tokenizer, n_layers=2, max_length=30).fit(TARGET)
    assert found.n_truncated_ == 2 or found.n_truncated_ == 3
    scores = found.score_samples([long_answer, long_question, {"prompt": "a", "response": "b"}])
    assert np.isfinite(scores).all()
    assert found.n_truncated_ == 2


def test_datasets_come_and_go(selector, llama):
    dataset = datasets.Dataset.from_list(POOL)
    expected = selector.score_samples(POOL)
    assert np.array_equal(selector.score_samples(dataset), expected)
    assert np.array_equal(selector.score_samples(dataset.to_iterable_dataset()), expected)
    assert np.array_equal(selector.score_samples(sample for sample in POOL), expected)
    fitted = TrimSelector(*llama, n_layers=2).fit(datasets.Dataset.from_list(TARGET))
    assert torch.allclose(fitted.fingerprints_, selector.fingerprints_)
    chosen = selector.select(dataset, n=2)
    taken = take(dataset, chosen)
    assert isinstance(taken, datasets.Dataset)
    assert taken.to_list() == [POOL[i] for i in chosen] == take(iter(POOL), chosen)
    with pytest.raises(InputError, match="of a DatasetDict, give one split"):
        selector.score_samples(datasets.DatasetDict({"train": dataset}))


def test_samples_of_a_file(tmp_path):
    path = tmp_path / "pool.jsonl"
    path.write_text("\n".join(json.dumps(sample) for sample in POOL) + "\n")
    assert list(SampleFile(path)) == list(SampleFile(path)) == POOL
    for content, message in (
        ('{"prompt": "a", "response": "b"}\n{"prompt": "a"}\n', r"line 2: field 'response': is missing"),
        ('{"prompt": "a", "response": 3}\n', r"line 1: field 'response': is a number"),
        ("[1]\n", r"line 1: is a list; must be an object"),
        ("", "is empty"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            list(SampleFile(path))
    with pytest.raises(ValueError, match="there is no such file"):
        SampleFile(tmp_path / "nowhere.jsonl")


# Budgets --------------------------------------------------------------------------------------------------------------


def test_budgets():
    scores = np.array([0.1, 0.9, 0.5, 0.9, -np.inf, 0.2])
    assert select_coreset(scores, n=5).tolist() == [1, 3, 2, 5, 0]
    assert select_coreset(scores, fraction=0.5).tolist() == [1, 3, 2]
    assert select_coreset(scores, fraction=1.0).tolist() == [1, 3, 2, 5, 0]
    assert select_coreset(scores, tokens=10, lengths=[1, 4, 4, 2, 1, 9]).tolist() == [1, 3, 2]
    with pytest.warns(UserWarning, match=r"fraction=0.01 of 6 samples is less than one: one is taken"):
        assert select_coreset(scores, fraction=0.01).tolist() == [1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1, 1, width=16), min_size=1, max_size=30),
    st.lists(st.integers(1, 20), min_size=30, max_size=30),
    st.integers(20, 200),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_a_budget_in_tokens_is_kept(scores, lengths, tokens, diversity):
    lengths = lengths[: len(scores)]
    states = np.random.default_rng(0).normal(size=(len(scores), 3))
    found = select_coreset(scores, tokens=tokens, lengths=lengths, diversity=diversity, states=states)
    assert sum(lengths[i] for i in found) <= tokens
    assert len(set(found.tolist())) == len(found) >= 1
    if diversity == 0:
        assert all(scores[a] >= scores[b] for a, b in itertools.pairwise(found))


def test_diversity_is_greedy_marginal_relevance():
    rng = np.random.default_rng(0)
    scores, states = rng.normal(size=20), rng.normal(size=(20, 4))
    pool = np.argsort(-scores)[:12]
    x = states[pool] - states[pool].mean(0)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    r = (scores[pool] - scores[pool].min()) / np.ptp(scores[pool])
    chosen = [0]
    while len(chosen) < 3:
        value = [
            -np.inf if i in chosen else 0.4 * r[i] - 0.6 * max(float(x[i] @ x[j]) for j in chosen) for i in range(12)
        ]
        chosen.append(int(np.argmax(value)))
    assert select_coreset(scores, n=3, diversity=0.6, states=states).tolist() == [int(pool[i]) for i in chosen]


def test_diversity_passes_over_copies(selector):
    pool = [TARGET[0]] * 3 + POOL
    plain, diverse = (selector.select(pool, n=2, diversity=d).tolist() for d in (0.0, 0.7))
    assert plain == [0, 1]
    assert diverse[0] == 0
    assert diverse[1] > 2


def test_mean_states_are_means_of_units():
    states = torch.randn(3, 4, generator=numbers())
    found = mean_states(states_of([1, 2, 3], states, owner=[0, 0, 2]))
    assert torch.allclose(found[0], normalize(states[:2], dim=-1).mean(0))
    assert torch.equal(found[1], torch.zeros(4))


def test_the_selectors_own_budget(llama):
    found = TrimSelector(*llama, n_layers=2, token_budget=60).fit(TARGET)
    lengths = [len(sample.ids) for sample in SampleTokenizer(llama[1]).tokenize(POOL)]
    chosen = found.select(POOL)
    assert 1 <= len(chosen) < len(POOL)
    assert sum(lengths[i] for i in chosen) <= 60
    assert len(found.select(POOL, n=4)) == 4


# Shards ---------------------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


def test_an_interrupted_run_goes_on(llama, tmp_path):
    model, tokenizer = llama
    found = TrimSelector(model, tokenizer, n_layers=2, shard_size=2).fit(TARGET)
    expected = found.score_samples(POOL)
    read, done = [], []

    def stream(stop=None):
        for i, sample in enumerate(POOL):
            if i == stop:
                raise Interrupted
            yield sample

    with pytest.raises(Interrupted):
        found.score_samples(stream(4), store=tmp_path / "store", progress=done.append)
    assert done == [2, 4]
    handle = model.model.register_forward_hook(lambda module, args, kwargs, output: read.append(1), with_kwargs=True)
    try:
        again = found.score_samples(stream(), store=tmp_path / "store")
        assert len(read) == 1  # the last sample alone
        assert np.array_equal(again, expected)
        assert np.array_equal(found.select(POOL, n=2, store=tmp_path / "store"), found.select(POOL, n=2))
    finally:
        handle.remove()
    names = sorted(path.name for path in (tmp_path / "store").iterdir())
    assert names == ["settings.json", *(f"shard-0000000{i}.npz" for i in range(3))]
    # A damaged shard is scored anew.
    (tmp_path / "store" / "shard-00000001.npz").write_bytes(b"half")
    assert np.array_equal(found.score_samples(POOL, store=tmp_path / "store"), expected)


def test_a_store_of_something_else_is_refused(llama, tmp_path):
    store = tmp_path / "store"
    found = TrimSelector(*llama, n_layers=2, shard_size=2).fit(TARGET)
    found.score_samples(POOL, store=store)
    others = {
        "max_weight=0.5, now it is 1.0": TrimSelector(*llama, n_layers=2, shard_size=2, max_weight=1.0).fit(TARGET),
        "shard_size=2, now it is 3": TrimSelector(*llama, n_layers=2, shard_size=3).fit(TARGET),
        "target=": TrimSelector(*llama, n_layers=2, shard_size=2).fit(TARGET[:1]),
        "model=": TrimSelector(*tiny(seed=1), n_layers=2, shard_size=2).fit(TARGET),
    }
    for message, other in others.items():
        with pytest.raises(InputError, match=rf"store='.*': was written with {message}.*give another folder"):
            other.score_samples(POOL, store=store)
    with pytest.raises(InputError, match=r"shard-00000001.npz is of other samples; give another folder"):
        found.score_samples([*POOL[:3], *POOL[:2]], store=store)
    (store / "settings.json").write_text("{")
    with pytest.raises(InputError, match=r"settings.json cannot be read"):
        found.score_samples(POOL, store=store)
    (store / "settings.json").unlink()
    with pytest.raises(InputError, match=r"has shards without settings.json"):
        found.score_samples(POOL, store=store)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written to"):
        found.score_samples(POOL, store=tmp_path / "file" / "store")


def test_a_long_stream_is_held_a_block_at_a_time():
    largest = 0
    alive = 0

    class Sample(dict):
        def __init__(self, i):
            nonlocal alive, largest
            super().__init__(prompt=str(i), response="x")
            alive += 1
            largest = max(largest, alive)

        def __del__(self):
            nonlocal alive
            alive -= 1

    def block(samples, first):
        n = len(samples)
        return Scored(np.full((n, 1), first, np.float32), np.ones(n, np.int64), np.zeros((n, 0), np.float16))

    found = score_in_shards((Sample(i) for i in range(5000)), block, 100)
    assert found.scores.shape == (5000, 1)
    assert found.scores[4321, 0] == 4300
    assert largest <= 300


# Rivals ---------------------------------------------------------------------------------------------------------------


def test_every_rival_has_the_same_interface(llama):
    model, tokenizer = llama
    rivals = [
        RandomSelector(tokenizer),
        LengthSelector(tokenizer),
        PerplexitySelector(model, tokenizer),
        RepresentationSelector(model, tokenizer),
        EmbeddingSelector(lambda texts: [[len(text), 1.0] for text in texts], tokenizer=tokenizer),
        BM25Selector(tokenizer=tokenizer),
        GradientSelector(model, tokenizer, projection_dim=256),
    ]
    for rival in rivals:
        with pytest.raises(NotFittedError):
            rival.score_samples(POOL)
        scores = clone(rival).fit(TARGET).score_samples(iter(POOL))
        assert scores.shape == (5,)
        assert scores.dtype == np.float32
        again = rival.fit(TARGET)
        np.testing.assert_allclose(again.score_samples(POOL), scores, atol=1e-5)
        assert again.select(POOL, fraction=0.4).tolist() == np.argsort(-scores, kind="stable")[:2].tolist()
        assert len(again.select(POOL, tokens=70)) >= 1
        with pytest.raises(InputError, match="reads no token states"):
            again.select(POOL, n=1, diversity=0.5)


def test_random_does_not_depend_on_the_target_and_length_counts(llama):
    _, tokenizer = llama
    assert np.array_equal(
        RandomSelector(random_state=1).fit(POOL).score_samples(POOL),
        RandomSelector(random_state=1).fit(TARGET).score_samples(POOL),
    )
    assert not np.array_equal(
        RandomSelector(random_state=1).fit(POOL).score_samples(POOL),
        RandomSelector(random_state=2).fit(POOL).score_samples(POOL),
    )
    assert LengthSelector(tokenizer).fit(TARGET).score_samples(POOL).tolist() == [4, 11, 15, 7, 1]
    with pytest.raises(InputError, match=r"tokens=5: RandomSelector has no tokenizer to count them with"):
        RandomSelector().fit(POOL).select(POOL, tokens=5)


def test_perplexity_is_that_of_the_responses(llama):
    model, tokenizer = llama
    low = PerplexitySelector(model, tokenizer, prefer="low").fit(TARGET).score_samples(POOL)
    (sample,) = SampleTokenizer(tokenizer).tokenize(POOL[1:2])
    with torch.no_grad():
        log_probs = model(torch.tensor([sample.ids])).logits[0].log_softmax(-1)
    start = sample.roles.index(2)
    # The token that ends the response counts too.
    wanted = [float(log_probs[i - 1, sample.ids[i]]) for i in range(start, start + len(POOL[1]["response"]) + 1)]
    assert low[1] == pytest.approx(np.mean(wanted), abs=1e-4)
    high = PerplexitySelector(model, tokenizer, prefer="high").fit(TARGET).score_samples(POOL)
    np.testing.assert_allclose(high, -low)
    near = PerplexitySelector(model, tokenizer).fit([POOL[3]]).score_samples(POOL)
    np.testing.assert_allclose(near, -np.abs(low - low[3]), atol=1e-5)


def test_representations(llama):
    model, tokenizer = llama
    states = read_states(model, tokenizer, POOL, n_layers=1).scoped("response")
    of_two = states.states[states.owner == 2]
    places = states.places[states.owner == 2]
    expected = {
        "last": of_two[-1],
        "mean": of_two.mean(0),
        "weighted": ((places + 1)[:, None] * of_two).sum(0),
    }
    for pool, vector in expected.items():
        found = RepresentationSelector(model, tokenizer, pool=pool).fit(TARGET)
        score = float((found.vectors_ @ normalize(vector, dim=0)).mean())
        assert found.score_samples(POOL)[2] == pytest.approx(score, abs=1e-5)


def test_the_default_embedding_is_minilm():
    pool = [{"prompt": "How many apples?", "response": "3 + 4 = 7"}, {"prompt": "capital", "response": "Paris"}]
    scores = EmbeddingSelector().fit([{"prompt": "How many pears?", "response": "2 + 4 = 6"}]).score_samples(pool)
    assert scores[0] > scores[1] + 0.2


def test_gradients_of_the_same_sample_agree(llama):
    model, tokenizer = llama
    found = GradientSelector(model, tokenizer).fit([POOL[1]])
    scores = found.score_samples(POOL)
    assert scores[1] == pytest.approx(1, abs=1e-5)
    assert np.abs(np.delete(scores, 1)).max() < 0.99
    assert torch.allclose(found.target_gradients_.norm(dim=-1), torch.ones(1, 1))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_projection_keeps_inner_products(llama):
    model, tokenizer = llama
    found = GradientSelector(model, tokenizer).fit([POOL[1]])
    size = sum(parameter.numel() for parameter in model.parameters())
    x = torch.randn(6, size, generator=numbers())
    x[1] += x[0]
    projected = torch.stack([found.project(row) for row in x])
    gram, exact = projected @ projected.T, x @ x.T
    norms = x.norm(dim=-1)
    assert float(((gram - exact) / (norms[:, None] * norms)).abs().max()) < 0.05


def test_less_by_the_book(llama):
    """Two checkpoints, without a projection that loses anything."""
    model, tokenizer = tiny()
    checkpoints = []
    tuned = warm_up(
        model,
        tokenizer,
        POOL,
        0.9,
        LoraConfig(target_modules=["q_proj"], r=2),
        epochs=2,
        learning_rate=0.1,
        batch_size=2,
        checkpoints=checkpoints,
    )
    assert len(checkpoints) == 2
    assert checkpoints[0].learning_rate > checkpoints[1].learning_rate > 0
    found = GradientSelector(tuned, tokenizer, checkpoints=checkpoints, projection_dim=2**20).fit(TARGET)
    own = {name: p.detach().clone() for name, p in tuned.named_parameters() if p.requires_grad}
    scores = found.score_samples(POOL)
    parameters = {name: p for name, p in tuned.named_parameters() if p.requires_grad}
    assert all(torch.equal(parameters[name], own[name]) for name in own)

    def gradient(sample, checkpoint, adam):
        (tokens,) = SampleTokenizer(tokenizer).tokenize([sample])
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(checkpoint.weights[name])
        loss = -torch.cat(response_log_probs(Forward(tuned), [tokens])).mean()
        parts = []
        for (name, _), g in zip(parameters.items(), torch.autograd.grad(loss, list(parameters.values())), strict=True):
            if adam:
                m = 0.9 * checkpoint.means[name] + 0.1 * g
                v = 0.999 * checkpoint.squares[name] + 0.001 * g**2
                g = m / (v + 1e-8).sqrt()
            parts.append(g.flatten())
        return normalize(torch.cat(parts), dim=0)

    rates = np.array([c.learning_rate for c in checkpoints])
    for i in (0, 3):
        cosines = [
            np.mean([float(gradient(POOL[i], c, True) @ gradient(t, c, False)) for t in TARGET]) for c in checkpoints
        ]
        assert scores[i] == pytest.approx(float(np.dot(rates / rates.sum(), cosines)), abs=0.01)


# Warm-up --------------------------------------------------------------------------------------------------------------


def test_warm_up_learns_what_the_pool_says():
    model, tokenizer = tiny()
    pool = [{"prompt": str(i), "response": "abc"} for i in range(20)]
    samples = SampleTokenizer(tokenizer).tokenize(pool[:1])
    trunk = FrozenTrunk(model, 2)
    config = LoraConfig(target_modules=["layers.2.mlp.up_proj", "layers.2.mlp.down_proj", "layers.2.self_attn.q_proj"])

    def log_prob(of):
        with torch.no_grad():
            return float(response_log_probs(Forward(of), samples)[0].mean())

    before = log_prob(model)
    found = []
    for chosen in (None, trunk):
        tuned = warm_up(model, tokenizer, pool, 0.5, config, epochs=8, learning_rate=0.05, trunk=chosen, random_state=1)
        assert not tuned.training
        found.append(log_prob(tuned))
        undo(tuned)
    assert found[0] > before + 0.3
    assert found[1] == pytest.approx(found[0], abs=1e-3)
    assert log_prob(model) == before


def test_a_warmed_model_scores(llama):
    model, tokenizer = tiny()
    plain = TrimSelector(model, tokenizer, n_layers=2).fit(TARGET).score_samples(POOL)
    tuned = warm_up(
        model, tokenizer, iter(POOL), 0.9, LoraConfig(target_modules=["v_proj"]), epochs=3, learning_rate=0.1
    )
    warmed = TrimSelector(tuned, tokenizer, n_layers=2).fit(TARGET).score_samples(POOL)
    assert not np.allclose(warmed, plain, atol=1e-3)
    undo(tuned)
    np.testing.assert_allclose(TrimSelector(model, tokenizer, n_layers=2).fit(TARGET).score_samples(POOL), plain)


def test_warm_up_repeats_by_its_seed():
    model, tokenizer = tiny()

    def weights(seed):
        tuned = warm_up(model, tokenizer, POOL, 0.5, LoraConfig(target_modules=["q_proj"]), random_state=seed)
        found = torch.cat([p.detach().flatten() for p in tuned.parameters() if p.requires_grad])
        undo(tuned)
        return found

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unseen_penalty": 1.1}, r"unseen_penalty=1.1: must be from 0 to 1"),
        ({"unseen_penalty": float("nan")}, r"unseen_penalty=nan: must be from 0 to 1"),
        ({"max_weight": -0.1}, r"max_weight=-0.1: must be from 0 to 1"),
        ({"n_layers": 4}, r"n_layers=4: must be from 1 to 3, the layers of the model"),
        ({"n_layers": 0}, r"n_layers=0: must be from 1 to 3"),
        ({"scope": "answer"}, r"scope='answer': must be one of prompt, response, all"),
        ({"saliency": "none"}, r"saliency='none': must be 'attention' or 'uniform'"),
        ({"hidden": "first"}, r"hidden='first': must be 'last_hidden_state' or 'pre_norm'"),
        ({"on_empty": "drop"}, r"on_empty='drop': must be 'raise' or 'skip'"),
        ({"batch_size": 0}, r"batch_size=0: must be at least 1"),
        ({"max_length": 0}, r"max_length=0: must be at least 1"),
        ({"token_budget": 0}, r"token_budget=0: must be at least 1"),
        ({"format": "chatml"}, r"format='chatml': must be a function of a sample"),
    ],
)
def test_bad_settings_are_refused(llama, settings, message):
    with pytest.raises(ValueError, match=message):
        TrimSelector(*llama, **{"n_layers": 2, **settings}).fit(TARGET)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ([], r"target: has no samples; give 5 to 10 of the task"),
        ([{"prompt": "a"}], r"target\[0\]: field 'response': is missing"),
        ([{"response": "a"}], r"target\[0\]: field 'prompt': is missing"),
        ([{"prompt": "a", "response": 4}], r"target\[0\]: field 'response': is a number; must be text"),
        ([TARGET[0], {"prompt": "a", "response": ""}], r"target\[1\]: field 'response': has no token in scope"),
        (["2+2=4"], r"target\[0\]: is text; must be a mapping with prompt and response, or messages"),
        ([{"messages": []}], r"target\[0\]: field 'messages': must be a list of messages"),
        ([{"messages": [{"role": "user"}]}], r"target\[0\]: field 'messages': message 0: must have 'content'"),
        ([{"messages": [{"role": "user", "content": "a"}]}], r"target\[0\]: field 'response': has no token"),
        ([{**TARGET[0], "task": "a"}, TARGET[1]], r"target\[1\]: field 'task': is missing; others have one"),
        (7, r"target: is int; must be samples one after the other"),
    ],
)
def test_bad_targets_are_refused(llama, target, message):
    with pytest.raises(ValueError, match=message):
        TrimSelector(*llama, n_layers=2).fit(target)


def test_bad_pools_are_refused(selector, llama):
    for pool, message in (
        ([], "pool: has no samples"),
        ([*POOL, {"prompt": "a", "response": ""}], r"pool\[5\]: field 'response': has no token in scope 'response'"),
        ([*POOL, {"prompt": "a"}], r"pool\[5\]: field 'response': is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            selector.score_samples(pool)
    skipping = TrimSelector(*llama, n_layers=2, on_empty="skip").fit(TARGET)
    pool = [{"prompt": "a", "response": ""}, *POOL]
    scores = skipping.score_samples(pool)
    assert scores[0] == -np.inf
    np.testing.assert_allclose(scores[1:], skipping.score_samples(POOL), atol=1e-6)
    assert 0 not in skipping.select(pool, fraction=1.0)
    with pytest.raises(ValueError, match=r"n=6: must be from 1 to the 5 samples of the pool that are not empty"):
        skipping.select(pool, n=6)
    with pytest.raises(ValueError, match="scores: no sample has any; all of them are empty in this scope"):
        skipping.select(pool[:1], n=1)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"fraction": 0}, r"fraction=0: must be above 0 and at most 1"),
        ({"fraction": 1.5}, r"fraction=1.5: must be above 0 and at most 1"),
        ({"n": 0}, r"n=0: must be from 1 to the 5 samples of the pool"),
        ({"n": 6}, r"n=6: must be from 1 to the 5 samples of the pool"),
        ({}, r"fraction, n, tokens: give exactly one"),
        ({"n": 1, "fraction": 0.5}, r"fraction, n, tokens: give exactly one"),
        ({"tokens": 0}, r"tokens=0: must be at least 1"),
        ({"tokens": 3}, r"tokens=3: the best sample alone has \d+; must be as many at least"),
        ({"n": 1, "diversity": 2.0}, r"diversity=2.0: must be from 0 to 1"),
        ({"n": 1, "allocation": "fair"}, r"allocation='fair': must be 'max' or 'round_robin'"),
    ],
)
def test_bad_budgets_are_refused(selector, budget, message):
    with pytest.raises(ValueError, match=message):
        selector.select(POOL, **budget)


def test_bad_scores_are_refused():
    for arguments, message in (
        ({"scores": []}, r"scores: must have shape \(N,\)"),
        ({"scores": [0.1, float("nan")]}, "scores: sample 1 has nan"),
        ({"scores": [0.1, 0.2], "n": None, "tokens": 4}, "tokens: needs the lengths of the samples"),
        ({"scores": [0.1, 0.2], "n": None, "tokens": 4, "lengths": [1]}, r"lengths: must have shape \(2,\)"),
        ({"scores": [0.1, 0.2], "diversity": 0.5}, "diversity: needs states="),
        ({"scores": [0.1, 0.2], "diversity": 0.5, "states": [[1.0]]}, r"states: must have shape \(2, s\)"),
        ({"scores": [0.1, 0.2], "candidates": 0}, "candidates=0: must be at least 1"),
        (
            {"scores": [[0.1, 0.2]], "diversity": 0.5, "allocation": "round_robin"},
            "diversity: goes with allocation='max'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            select_coreset(**{"n": 1, **arguments})


def test_tokenizers_that_do_not_go_are_refused(llama):
    model, _ = llama
    bare = character_tokenizer()
    remedy = r"pass format=, a function of a sample that returns"
    with pytest.raises(ValueError, match=rf"tokenizer: has no chat template; {remedy}"):
        TrimSelector(model, bare, n_layers=2).fit(TARGET)
    bare.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    with pytest.raises(ValueError, match=rf"target\[0\]: the tokenizer's chat template changes the text.*{remedy}"):
        TrimSelector(model, bare, n_layers=2).fit(TARGET)
    bare.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(ValueError, match=r"target\[0\]: the chat template refuses it: no such role"):
        TrimSelector(model, bare, n_layers=2).fit(TARGET)
    for format in (lambda sample: [("a", "answer")], lambda sample: 3):
        with pytest.raises(ValueError, match=r"target\[0\]: format: must return \[\(text, part\), ...\]"):
            TrimSelector(model, bare, n_layers=2, format=format).fit(TARGET)

    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="tokenizer=Slow: must be a fast one"):
        TrimSelector(model, Slow(), n_layers=2).fit(TARGET)


def test_states_that_overflow_name_the_sample():
    model, tokenizer = tiny()
    found = TrimSelector(model, tokenizer, n_layers=2).fit(TARGET)
    with torch.no_grad():
        (zed,) = tokenizer("z")["input_ids"]
        model.get_input_embeddings().weight[zed] = float("inf")
    with pytest.raises(ValueError, match=r"pool\[4\]: the model's states are not finite; half precision overflows"):
        found.score_samples(POOL)
    with pytest.raises(ValueError, match=r"target\[0\]: the model's states are not finite"):
        found.fit([{"prompt": "z", "response": "a"}])


def test_attention_that_cannot_be_read_is_refused_unless_uniform():
    model, tokenizer = tiny()
    type(model.model)._can_set_attn_implementation, kept = (
        classmethod(lambda cls: False),
        type(model.model).__dict__.get("_can_set_attn_implementation"),
    )
    try:
        with pytest.raises(ValueError, match=r"does not go through the AttentionInterface.*pass saliency='uniform'"):
            TrimSelector(model, tokenizer, n_layers=2).fit(TARGET)
        uniform = TrimSelector(model, tokenizer, n_layers=2, saliency="uniform").fit(TARGET)
        assert np.isfinite(uniform.score_samples(POOL)).all()
    finally:
        if kept is None:
            del type(model.model)._can_set_attn_implementation
        else:
            type(model.model)._can_set_attn_implementation = kept


def test_a_pool_without_any_seen_token_warns(llama):
    found = TrimSelector(*llama, n_layers=2).fit([{"prompt": "a", "response": "123"}])
    with pytest.warns(UserWarning, match="pool: has no token of the target in scope 'response'"):
        scores = found.score_samples([{"prompt": "a", "response": "xyz"}])
    assert np.isfinite(scores).all()
    # A class of the target that never appears in the pool is fine, and one-token responses have mean = max.
    single = found.score_samples([{"prompt": "a", "response": "1"}])[0]
    ((_, score, seen),) = found.explain({"prompt": "a", "response": "1"})
    assert seen
    assert single == pytest.approx(score, abs=1e-6)
    nothing = TrimSelector(*llama, n_layers=2, unseen_penalty=0).fit([{"prompt": "a", "response": "123"}])
    with pytest.warns(UserWarning, match="has no token of the target"):
        assert nothing.score_samples([{"prompt": "a", "response": "xyz"}])[0] == 0


def test_other_refusals(llama, selector):
    model, tokenizer = llama
    frozen, _ = tiny()
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    empty = Checkpoint({}, {}, {}, 1.0)
    attention_free = read_states(model, tokenizer, TARGET, n_layers=2)
    for call, message in (
        (lambda: selector.explain(POOL[0], task="x"), "task='x': must be one of target"),
        (lambda: TrimSelector(*llama).fit_states(attention_free), "states: have no saliency"),
        (lambda: read_states(model, tokenizer, []), "samples: has no samples"),
        (lambda: take(POOL, [5]), "indices: must be from 0 to 4"),
        (lambda: take(iter(POOL), [5]), "indices: the pool has no sample 5"),
        (lambda: warm_up(model, tokenizer, [], 0.5), "pool: has no samples"),
        (lambda: warm_up(model, tokenizer, iter([]), 0.5), "pool: has no samples"),
        (lambda: warm_up(model, tokenizer, POOL, 0.0), "fraction=0.0: must be above 0 and at most 1"),
        (lambda: warm_up(model, tokenizer, POOL, epochs=0), "epochs=0: must be at least 1"),
        (
            lambda: warm_up(
                model, tokenizer, [{"prompt": "a", "response": ""}], 1.0, format=lambda s: [("a", "prompt")]
            ),
            "samples: none has a response to train on",
        ),
        (
            lambda: warm_up(
                model, tokenizer, POOL, 1.0, LoraConfig(target_modules=["q_proj"]), trunk=FrozenTrunk(model, 2)
            ),
            "trunk: begins at block 2, but block 0 is trained",
        ),
        (
            lambda: read_states(model, tokenizer, POOL, saliency=True, n_layers=2, trunk=FrozenTrunk(model, 2)),
            "trunk: has the first 2 layers; saliency needs 2 on",
        ),
        (lambda: GradientSelector(frozen, tokenizer).fit(TARGET), "model: nothing of it is trained"),
        (lambda: GradientSelector(model, tokenizer, projection_dim=0).fit(TARGET), "projection_dim=0"),
        (
            lambda: GradientSelector(model, tokenizer, checkpoints=[empty]).fit(TARGET),
            "checkpoints: are of other parameters",
        ),
        (lambda: RepresentationSelector(model, tokenizer, pool="first").fit(TARGET), "pool='first': must be"),
        (lambda: PerplexitySelector(model, tokenizer, prefer="mid").fit(TARGET), "prefer='mid': must be"),
        (lambda: BM25Selector().fit(TARGET).score_samples([]), "pool: has no samples"),
        (lambda: BM25Selector().fit(TARGET).score_samples(POOL, store="x"), "BM25Selector scores without a store"),
        (lambda: instruction_pool(41), "n=41: must be from 1 to 40"),
        (lambda: score_in_shards(POOL, lambda s, i: None, 0), "shard_size=0: must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert all(parameter.requires_grad for parameter in model.parameters()), "a refused warm-up leaves the model"


# Generated samples ----------------------------------------------------------------------------------------------------


def test_generated_samples_are_right_and_do_not_repeat():
    pool = instruction_pool(40, 3)
    assert len({sample["prompt"] for sample in pool}) == len(pool) == 440
    assert {sample["family"] for sample in pool} == set(FAMILIES)
    assert pool == instruction_pool(40, 3) != instruction_pool(40, 4)
    target = wanted_samples(48, 3)
    for sample in [s for s in pool if s["family"] == WANTED] + target:
        left, right = re.match(r"(.*) = (\d+)", sample["response"]).groups()
        assert eval(left) == int(right)
    words = {word for sample in pool for word in sample["prompt"].lower().split()}
    assert not {"passengers", "parcels", "driver", "baker"} & words
    assert not {sample["prompt"] for sample in target} & {sample["prompt"] for sample in pool}


def test_filler_keeps_the_response():
    samples = wanted_samples(5)
    for plain, noisy in zip(samples, with_filler(samples, 1), strict=True):
        assert plain["response"] in noisy["response"]
        assert 25 <= len(noisy["response"].split()) - len(plain["response"].split()) <= 70


# The program ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory, llama):
    found = tmp_path_factory.mktemp("program")
    model, tokenizer = llama
    model.save_pretrained(found / "model")
    tokenizer.save_pretrained(found / "model")
    for name, samples in (("pool", POOL), ("target", TARGET)):
        (found / f"{name}.jsonl").write_text("\n".join(json.dumps(sample) for sample in samples) + "\n")
    return found


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["run", "trim", *map(str, arguments)])
    return ended.value.code


def test_the_program_scores_and_selects(folder, capsys, selector):
    scored = folder / "scores.jsonl"
    given = ["score", "--pool", folder / "pool.jsonl", "--target", folder / "target.jsonl", "--layers", 2]
    given += ["--model", folder / "model", "--shard-size", 2, "--out", scored]
    assert run(*given) == 0
    assert "scored 5 samples, 0 of them cut" in capsys.readouterr().out
    rows = [json.loads(line) for line in scored.read_text().splitlines()]
    np.testing.assert_allclose([row["score"] for row in rows], selector.score_samples(POOL), atol=1e-5)
    assert len(list((folder / "scores.jsonl.shards").glob("shard-*.npz"))) == 3
    out = folder / "coreset.jsonl"
    assert run("select", "--pool", folder / "pool.jsonl", "--scores", scored, "--n", 2, "--out", out) == 0
    chosen = [json.loads(line) for line in out.read_text().splitlines()]
    assert chosen == [POOL[i] for i in selector.select(POOL, n=2)]
    assert "chose 2 of 5 samples" in capsys.readouterr().out
    assert run(*given, "--max-weight", 1.0) == 1
    assert "was written with max_weight=0.5, now it is 1.0" in capsys.readouterr().err


def test_the_program_refuses(folder, capsys):
    pool = folder / "pool.jsonl"
    wrong = folder / "wrong.jsonl"
    wrong.write_text('{"score": 1}\n')
    short = folder / "short.jsonl"
    short.write_text('{"index": 0, "score": 1.0, "tokens": 3}\n')
    for arguments, message in (
        (["select", "--pool", folder / "no.jsonl"], "there is no such file"),
        (["select", "--pool", pool, "--scores", folder / "no.jsonl"], "there is no such file; run score first"),
        (["select", "--pool", pool, "--scores", wrong], "line 1: is not what score writes"),
        (["select", "--pool", pool, "--scores", short], "has 1 samples, but"),
        (["score", "--pool", pool, "--target", folder / "no.jsonl"], "there is no such file"),
    ):
        assert run(*arguments) == 1
        assert message in capsys.readouterr().err


def test_rows_of_a_trunk_are_those_of_the_samples(llama):
    model, tokenizer = llama
    trunk = FrozenTrunk(model, 1)
    read_states(model, tokenizer, POOL, n_layers=1, trunk=trunk)
    assert set(trunk.kept) == {TokenRow(sample.ids) for sample in SampleTokenizer(tokenizer).tokenize(POOL)}
    assert not any(states.requires_grad or states.is_inference() for states in trunk.kept.values())


def test_reworded_samples_ask_the_same_and_work_it_otherwise():
    for plain, reworded in zip(wanted_samples(20, 3), reworded_samples(20, 3), strict=True):
        assert reworded["prompt"] == plain["prompt"]
        numbers = plain["response"].split(" = ")[1].split(".")[0]
        assert numbers in reworded["response"]
        assert plain["response"].split(". ")[0] not in reworded["response"]
