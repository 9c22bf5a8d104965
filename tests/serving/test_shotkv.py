"""ShotKV: whole units, every layer for itself, a frozen prompt, and the same `generate` as ever."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)

from hidden_keys import Hidden
from practicum.serving.shotkv import (
    H2O,
    ChunkKV,
    Prompt,
    PyramidKV,
    RandomUnits,
    ShotKV,
    SnapKV,
    StreamingLLM,
    Unit,
    split_units,
)
from practicum.serving.shotkv.policies import fill, unit_scores
from practicum.toolbox.errors import InputError
from practicum.toolbox.kv_cache import cut

SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SMALL)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=8)),
    "mistral": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=None)),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **SMALL,
            head_dim=8,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
        ),
    ),
}
PRESSES = [ShotKV, RandomUnits, SnapKV, PyramidKV, H2O, StreamingLLM, ChunkKV]
UNITS = [(1, 5), (5, 11), (11, 14), (14, 20), (20, 24)]
N = 30


def build(name="llama", implementation="sdpa", **changes):
    kind, config = MODELS[name]
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    for key, value in changes.items():
        setattr(config, key, value)
    config._attn_implementation = implementation
    return kind(config).eval()


@pytest.fixture(scope="module")
def llama():
    return build()


def tokens(n=N, batch=1, seed=1):
    return torch.randint(1, 60, (batch, n), generator=torch.Generator().manual_seed(seed))


def generate(model, ids, cache=None, n=10, **options):
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": n} | options
    return model.generate(ids, cache=cache, **options)


# What is kept --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_with_everything_kept_nothing_changes(name):
    model, ids = build(name), tokens()
    press = ShotKV(prefill_ratio=1.0)
    with press(model):
        cache = press.prefill(model, ids, UNITS)
        full = model(ids[:, :-1], cache=DynamicCache(config=model.config), use_cache=True).cache
        pressed = model(ids[:, -1:], cache=copy.deepcopy(cache), use_cache=True).logits
        # The prompt was read as a whole and its last token once more: sums of another order than in one pass.
        torch.testing.assert_close(pressed, model(ids[:, -1:], cache=full, use_cache=True).logits, atol=1e-5, rtol=1e-5)
        written = generate(model, ids, cache)
    assert torch.equal(written, generate(model, ids))
    assert cache.report.kept_fraction == 1


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 20}], ids=["greedy", "beam", "sampled"]
)
def test_with_everything_kept_every_search_is_the_same(name, options):
    model, ids, press = build(name), tokens(), ShotKV(prefill_ratio=1.0)
    with press(model):
        torch.manual_seed(5)
        written = generate(model, ids, press.prefill(model, ids, UNITS), **options)
    torch.manual_seed(5)
    assert torch.equal(written, generate(model, ids, **options))


@pytest.mark.parametrize("kind", PRESSES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_what_is_kept_acts_as_masks_would(kind, name):
    model, ids = build(name), tokens()
    press = kind(0.5)
    cache = press.prefill(model, ids, UNITS)
    layers = {i: layer for i, layer in enumerate(cache.layers, start=1) if i not in cache.report.untouched_layers}
    kept = {i: layer.positions[0] for i, layer in layers.items()}
    full = model(ids[:, :-1], cache=DynamicCache(config=model.config), use_cache=True).cache
    next_ids = tokens(4, seed=9)
    with Hidden(model, kept, N - 1):
        expected = [model(ids[:, -1:], cache=full, use_cache=True).logits]
        expected += [model(next_ids[:, i : i + 1], cache=full, use_cache=True).logits for i in range(4)]
    got = [model(ids[:, -1:], cache=cache, use_cache=True).logits]
    got += [model(next_ids[:, i : i + 1], cache=cache, use_cache=True).logits for i in range(4)]
    torch.testing.assert_close(torch.cat(got, 1), torch.cat(expected, 1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", PRESSES)
def test_every_press_keeps_the_budget_and_what_is_protected(kind, llama):
    ids = tokens()
    report = kind(0.5).prefill(llama, ids, UNITS).report
    assert report.protected == N - 23
    assert report.budget == 11
    kept = list(report.kept_tokens.values())
    if kind in (ShotKV, RandomUnits):
        shortest = min(end - start for start, end in UNITS)
        assert all(report.budget - shortest < k <= report.budget for k in kept)
    elif kind is PyramidKV:
        assert sum(kept) == 3 * report.budget
        assert kept == sorted(kept, reverse=True)
        assert kept[0] > kept[-1]
    else:
        assert kept == [report.budget] * 3
    held = kind(0.5).prefill(llama, ids, UNITS)
    for number, layer in enumerate(held.layers, start=1):
        for positions in layer.positions.reshape(-1, layer.positions.shape[-1]).tolist():
            assert {0, *range(24, N - 1)} <= set(positions)
            assert len(positions) == report.protected - 1 + report.kept_tokens[number]


@torch.no_grad()
def reference_choice(model, ids, ratio, window):
    """Units of every layer, by eager attention and a greedy loop."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    attentions = eager(ids, output_attentions=True).attentions
    chosen = []
    for attention in attentions:
        received = attention[0, :, -window:].sum((0, 1))
        scores = [float(received[a:b].mean()) for a, b in UNITS]
        room, taken = int(ratio * 23), []
        for i in sorted(range(len(UNITS)), key=lambda i: -scores[i]):
            if UNITS[i][1] - UNITS[i][0] <= room:
                taken.append(i)
                room -= UNITS[i][1] - UNITS[i][0]
        chosen.append(tuple(sorted(taken)))
    return chosen


@pytest.mark.parametrize(("scoring", "window"), [("window", 8), ("accumulated", N)])
@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.8])
def test_the_choice_is_that_of_eager_attention_and_a_loop(llama, scoring, window, ratio):
    report = ShotKV(ratio, scoring=scoring).prefill(llama, tokens(seed=3), UNITS).report
    assert list(report.units_by_layer.values()) == reference_choice(llama, tokens(seed=3), ratio, window)
    sizes = [sum(UNITS[i][1] - UNITS[i][0] for i in units) for units in report.units_by_layer.values()]
    assert sizes == list(report.kept_tokens.values())


def test_layers_choose_for_themselves_or_together(llama):
    found = [
        {
            tuple(ShotKV(0.4, layerwise=on).prefill(llama, tokens(seed=s), UNITS).report.units_by_layer.values())
            for s in range(8)
        }
        for on in (True, False)
    ]
    assert any(len(set(units)) > 1 for units in found[0])
    assert all(len(set(units)) == 1 for units in found[1])


def test_the_last_layer_chooses_by_its_own_queries(llama):
    """Other queries in the last layer change its choice and that of no layer below."""
    changed = copy.deepcopy(llama)
    with torch.no_grad():
        changed.model.layers[2].self_attn.q_proj.weight.mul_(-3)
    moved = 0
    for seed in range(6):
        one, other = (ShotKV(0.4).prefill(m, tokens(seed=seed), UNITS).report.units_by_layer for m in (llama, changed))
        assert (one[1], one[2]) == (other[1], other[2])
        moved += one[3] != other[3]
    assert moved


def test_units_of_one_token_are_snapkv_without_smoothing():
    model = build(num_key_value_heads=1)
    units = [(i, i + 1) for i in range(1, 24)]
    one = ShotKV(0.4).prefill(model, tokens(), units)
    other = SnapKV(0.4, pool=1).prefill(model, tokens(), units)
    for a, b in zip(one.layers, other.layers, strict=True):
        assert torch.equal(a.positions, b.positions)
        assert torch.equal(a.keys, b.keys)


def test_chunked_prefill_is_the_same(llama):
    for press in (ShotKV(0.4), ShotKV(0.4, scoring="accumulated"), SnapKV(0.4), H2O(0.4)):
        whole = press.prefill(llama, tokens(), UNITS)
        parts = press.prefill(llama, tokens(), UNITS, chunk_size=8)
        for a, b in zip(whole.layers, parts.layers, strict=True):
            assert torch.equal(a.positions, b.positions)
            torch.testing.assert_close(a.keys, b.keys, atol=1e-5, rtol=1e-5)
    with pytest.raises(InputError, match="chunk_size=7: must be at least the window that is looked at, 8 tokens"):
        ShotKV(0.4).prefill(llama, tokens(), UNITS, chunk_size=7)


def test_a_budget_over_the_prompt_counts_what_is_protected(llama):
    report = ShotKV(0.5, budget_over="prefill").prefill(llama, tokens(), UNITS).report
    assert report.budget == 15 - 7
    with pytest.warns(UserWarning, match="no unit fits into the budget of 0 tokens"):
        assert ShotKV(0.1, budget_over="prefill").prefill(llama, tokens(), UNITS).report.budget == 0


def test_one_unit_too_large_keeps_the_shortest(llama):
    with pytest.warns(
        UserWarning, match="no unit fits into the budget of 2 tokens: the shortest was kept, 1 tokens more than"
    ):
        report = ShotKV(0.1).prefill(llama, tokens(), UNITS).report
    assert report.overrun_tokens == 1
    assert set(report.units_by_layer.values()) == {(2,)}


def test_bytes_are_those_of_the_tokens(llama):
    cache = ShotKV(0.5).prefill(llama, tokens(), UNITS)
    report = cache.report
    kept = sum(report.protected + k for k in report.kept_tokens.values())
    assert report.nbytes / report.full_nbytes == pytest.approx(kept / (3 * N), rel=0.01)
    assert cache.held().tokens == tuple(report.protected - 1 + k for k in report.kept_tokens.values())


def test_sliding_windows_are_reported_and_left():
    model = build("gemma3")
    cache = ShotKV(0.4).prefill(model, tokens(), UNITS)
    assert cache.report.untouched_layers == (1,)
    assert type(cache.layers[0]).__name__ == "DynamicSlidingWindowLayer"
    assert set(cache.report.units_by_layer) == {2, 3}


def test_a_batch_shares_what_is_kept(llama):
    ids = tokens(batch=3)
    cache = ShotKV(0.5).prefill(llama, ids, UNITS)
    assert all(layer.keys.shape[0] == 3 and layer.positions.shape[:2] == (1, 1) for layer in cache.layers)
    alone = [ShotKV(1.0).prefill(llama, ids[i : i + 1], UNITS) for i in range(3)]
    for i in range(3):
        kept = cache.layers[1].positions[0, 0]
        torch.testing.assert_close(cache.layers[1].keys[i], alone[i].layers[1].keys[0][:, kept], atol=1e-5, rtol=1e-5)


def test_random_units_follow_their_seed(llama):
    draws = [
        RandomUnits(0.5, random_state=s).prefill(llama, tokens(), UNITS).report.units_by_layer[1]
        for s in (0, 0, 1, 2, 3)
    ]
    assert draws[0] == draws[1]
    assert len(set(draws)) > 1


# While generating ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "kept"), [(1.0, 100), (0.5, 48), (0.1, 20)])
def test_so_many_generated_tokens_are_kept(llama, ratio, kept):
    ids = tokens()
    press = ShotKV(0.5, ratio, decode_interval=32, recent=4, min_decode=20)
    with press(llama):
        cache = press.prefill(llama, ids, UNITS)
        before = [copy.deepcopy(cut_prompt(layer)) for layer in cache.layers]
        # The last prompt token and 99 more go by; the last eviction is at step 96, with 95 generated.
        generate(llama, ids, cache, n=101)
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert layer.get_seq_length() == N + 100
        mine = layer.generated()
        expected = 100 if ratio == 1 else max(20, int(ratio * 95)) + 5
        assert len(mine) == expected
        assert abs(expected - kept) <= 5
        # The last ones are always there.
        assert layer.positions[0, 0, -5:].tolist() == list(range(N + 95, N + 100))
        # The prompt is frozen.
        assert torch.equal(layer.keys[..., : keys.shape[-2], :], keys)
        assert torch.equal(layer.values[..., : keys.shape[-2], :], values)


def cut_prompt(layer):
    return layer.keys, layer.values


@torch.no_grad()
def test_what_received_the_least_goes(llama):
    """Against eager attention, kept step by step."""
    eager = build(implementation="eager")
    ids = tokens()
    press = ShotKV(1.0, 0.5, decode_interval=12, recent=2, min_decode=4)
    with press(eager):
        cache = press.prefill(eager, ids, UNITS)
        written = generate(eager, ids, cache, n=12)
    full = eager(ids[:, :-1], use_cache=True).cache
    received = [torch.zeros(12) for _ in range(3)]
    for step in range(12):
        token = written[:, N - 1 + step : N + step]
        attentions = eager(token, cache=full, use_cache=True, output_attentions=True).attentions
        for layer, attention in enumerate(attentions):
            received[layer][:step] += attention[0, :, 0, N:].sum(0)
    for layer, scores in zip(cache.layers, received, strict=True):
        scores = scores[:11].clone()
        scores[-2:] = torch.inf
        expected = scores.sort(descending=True, stable=True).indices[:5].sort().values + N
        assert layer.positions[0, 0][layer.generated()].tolist() == expected.tolist()


def test_decay_forgets_what_was_received_long_ago(llama):
    kept = []
    for decay in (None, 0.5):
        press = ShotKV(1.0, 0.3, decode_interval=16, recent=1, min_decode=4, decay=decay)
        with press(llama):
            cache = press.prefill(llama, tokens(seed=4), UNITS)
            generate(llama, tokens(seed=4), cache, n=40)
        kept.append([layer.positions[0, 0].tolist() for layer in cache.layers])
    assert kept[0] != kept[1]


def test_beams_let_go_of_their_own_tokens(llama):
    ids = tokens()
    press = ShotKV(0.5, 0.4, decode_interval=8, recent=2, min_decode=4)
    with press(llama):
        written = generate(llama, ids, press.prefill(llama, ids, UNITS), n=24, num_beams=3)
        again = generate(llama, ids, press.prefill(llama, ids, UNITS), n=24, num_beams=3)
        many = generate(
            llama, ids, press.prefill(llama, ids, UNITS), n=12, do_sample=True, num_return_sequences=2, top_k=20
        )
    assert torch.equal(written, again)
    assert many.shape == (2, N + 12)


def test_cropping_takes_counts_along(llama):
    press = ShotKV(0.5, 0.5)
    with press(llama), torch.no_grad():
        cache = press.prefill(llama, tokens(), UNITS)
        llama(tokens(6, seed=2), cache=cache, use_cache=True)
        cache.crop(-4)
        for layer in cache.layers:
            assert layer.received.shape[1] == layer.keys.shape[-2]
            assert layer.get_seq_length() == N - 1 + 2
        llama(tokens(2, seed=2), cache=cache, use_cache=True)


def test_repositioned_keys_are_those_of_a_shorter_prompt():
    """In the first layer keys and values depend on their own tokens alone."""
    model, ids = build(), tokens()
    press = StreamingLLM(0.5, reposition=True)
    with press(model):
        cache = press.prefill(model, ids, UNITS)
        kept = [0, 1, 2, 3, *range(16, N)]
        shorter = model(ids[:, kept], use_cache=True).cache
        assert cache.get_seq_length() == len(kept) - 1
        torch.testing.assert_close(cache.layers[0].keys, cut(shorter, 0, len(kept) - 1)[0][0], atol=1e-4, rtol=1e-4)
        written = generate(model, cache.input_ids, cache, n=5)
    assert written.shape == (1, len(kept) + 5)
    with pytest.raises(InputError, match="reposition=True: the model has layers with sliding windows"):
        StreamingLLM(0.5, reposition=True).prefill(build("gemma3"), ids, UNITS)
    with pytest.raises(InputError, match="reposition=True: must keep the same tokens in all heads"):
        SnapKV(0.5, reposition=True).prefill(model, ids, UNITS)


def test_nothing_stays_behind_after_an_exception(llama):
    press = ShotKV(0.5, 0.5)
    before = (llama.config._attn_implementation, llama.generate.__func__, set(vars(llama)))
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in llama.modules())

    def stop(input_ids, scores, **options):
        raise KeyboardInterrupt

    cache = press.prefill(llama, tokens(), UNITS)
    with pytest.raises(KeyboardInterrupt), press(llama):
        generate(llama, tokens(), cache, stopping_criteria=[stop])
    assert (llama.config._attn_implementation, llama.generate.__func__, set(vars(llama))) == before
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in llama.modules()) == hooks


# Any prompt, any units ------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw):
    n = draw(st.integers(12, 40))
    points = sorted(draw(st.sets(st.integers(0, n - 2), min_size=2, max_size=9)))
    units = [(a, b) for a, b in itertools.pairwise(points) if draw(st.booleans())]
    return n, units or [(points[0], points[1])]


@pytest.mark.filterwarnings("ignore:no unit fits")
@settings(max_examples=200, deadline=None)
@given(
    layouts(),
    st.floats(0.02, 1.0),
    st.integers(0, 2**31),
    st.sampled_from([ShotKV, RandomUnits, StreamingLLM, ChunkKV]),
)
def test_any_layout_equals_the_reference(layout, ratio, seed, kind):
    (n, units), model = layout, _MODEL
    ids = tokens(n, seed=seed)
    with torch.no_grad():
        cache = kind(ratio).prefill(model, ids, units)
        kept = {i: layer.positions[0] for i, layer in enumerate(cache.layers, start=1)}
        for layer, units_of_layer in cache.report.units_by_layer.items():
            if kind in (ShotKV, RandomUnits):
                assert sum(units[i][1] - units[i][0] for i in units_of_layer) == cache.report.kept_tokens[layer]
        full = model(ids[:, :-1], use_cache=True).cache
        with Hidden(model, kept, n - 1):
            expected = model(ids[:, -1:], cache=full, use_cache=True).logits
        got = model(ids[:, -1:], cache=cache, use_cache=True).logits
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)
    assert model.config._attn_implementation == "sdpa"


_MODEL = build()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(0, 40), st.integers(0, 2**31))
def test_filling_is_greedy_and_within_the_budget(sizes, budget, seed):
    units, start = [], 0
    for size in sizes:
        units.append(Unit(start, start + size))
        start += size
    scores = torch.rand(len(units), generator=torch.Generator().manual_seed(seed))
    taken = fill(scores, units, budget)
    total = sum(sizes[i] for i in taken)
    if budget < min(sizes):
        assert taken == [sizes.index(min(sizes))]
        return
    assert total <= budget
    # Whoever was passed over did not fit beside the better ones that were taken.
    for i in set(range(len(units))) - set(taken):
        better = sum(sizes[j] for j in taken if (scores[j], -j) > (scores[i], -i))
        assert better + sizes[i] > budget


def test_scores_are_means_over_units():
    received = torch.rand(30)
    found = unit_scores(received, [Unit(a, b) for a, b in UNITS])
    torch.testing.assert_close(found.float(), torch.stack([received[a:b].mean() for a, b in UNITS]))


def test_equal_scores_go_to_the_earlier():
    units = [Unit(0, 2), Unit(2, 4), Unit(4, 6)]
    assert fill(torch.ones(3), units, 4) == [0, 1]


# Units ---------------------------------------------------------------------------------------------------------------

WORDS = ["[UNK]", "Add", "the", "numbers", ".", "one", "two", "three", "is", "and", "?", "Q", "A", "\n\n"]


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Split(r" ", "removed")
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n\n", "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")


PROMPT = "Add the numbers .\n\none and one is two\n\none and two is three\n\nQ one and one ?"


def test_a_separator_cuts_between_preamble_and_question(tokenizer):
    units = split_units(tokenizer, PROMPT, separator="\n\n")
    assert [(u.start, u.end) for u in units] == [(5, 11), (11, 17)]
    assert units.input_ids.shape == (1, 22)
    assert units.torn == ()
    whole = split_units(tokenizer, PROMPT, separator="\n\n", preamble=False, question=False)
    assert [(u.start, u.end) for u in whole] == [(0, 5), (5, 11), (11, 17), (17, 22)]


def test_sentences_are_units(tokenizer):
    units = split_units(tokenizer, "Add the numbers . one is one . two is two ? Q three", splitter="sentences")
    assert [(u.start, u.end) for u in units] == [(4, 8), (8, 12)]


def test_spans_of_characters_become_tokens(tokenizer):
    units = split_units(tokenizer, PROMPT, spans=[(PROMPT.index("one"), PROMPT.index("\n\none and two"))])
    assert [(u.start, u.end) for u in units] == [(5, 10)]


def test_a_token_across_a_boundary_goes_to_the_earlier_unit(tokenizer):
    text = "one two three"
    units = split_units(tokenizer, text, spans=[(0, 5), (5, 13)])
    assert [(u.start, u.end) for u in units] == [(0, 2), (2, 3)]
    assert units.torn == (1,)


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_ratio": 0}, "prefill_ratio=0: must be above 0 and at most 1"),
        ({"prefill_ratio": 1.5}, "prefill_ratio=1.5: must be above 0"),
        ({"decode_ratio": 0.0}, "decode_ratio=0.0: must be above 0"),
        ({"decode_ratio": float("nan")}, "decode_ratio=nan: must be above 0"),
        ({"scoring": "mean"}, "scoring='mean': must be 'window' or 'accumulated'"),
        ({"window": 0}, "window=0: must be 1 or more"),
        ({"budget_over": "all"}, "budget_over='all': must be 'units' or 'prefill'"),
        ({"decode_interval": 0}, "decode_interval=0: must be 1 or more"),
        ({"recent": 65}, "recent=65: must be from 0 to min_decode, 64"),
        ({"decay": 1.0}, "decay=1.0: must be between 0 and 1"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        ShotKV(**options)


def test_settings_of_the_others_are_refused():
    with pytest.raises(InputError, match="pool=4: must be odd"):
        SnapKV(pool=4)
    with pytest.raises(InputError, match="beta=1: must be above 1"):
        PyramidKV(beta=1)
    with pytest.raises(InputError, match="chunk=0: must be 1 or more"):
        ChunkKV(chunk=0)


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ([], "units: are none"),
        ([(1, 5), (4, 8)], r"units\[1\]: begins at 4, before the end of the one before it, 5"),
        ([(5, 8), (1, 4)], r"units\[1\]: begins at 1, before"),
        ([(1, 5), (5, 31)], r"units\[1\]: \[5, 31\) is outside the prompt of 30 tokens"),
        ([(-1, 5)], r"units\[0\]: \[-1, 5\) is outside"),
        ([(4, 4)], r"units\[0\]: is empty"),
    ],
)
def test_units_that_are_wrong_are_refused(llama, units, message):
    with pytest.raises(InputError, match=message):
        ShotKV().prefill(llama, tokens(), units)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"separator": "###"}, "separator='###': does not occur"),
        ({"separator": "Q"}, "separator='Q': leaves no unit between the preamble and the question of 2 pieces"),
        ({}, "separator, spans and splitter='sentences': give exactly one"),
        ({"separator": "\n\n", "spans": [(0, 3)]}, "give exactly one"),
        ({"spans": [(3, 3)]}, r"spans\[0\]: is empty"),
        ({"spans": [(0, 999)]}, r"spans\[0\]: \[0, 999\) is outside the prompt"),
        ({"spans": [(0, 9), (5, 12)]}, r"spans\[1\]: begins at 5, before the end"),
    ],
)
def test_texts_that_cannot_be_split_are_refused(tokenizer, options, message):
    with pytest.raises(InputError, match=message):
        split_units(tokenizer, PROMPT, **options)


def test_a_tokenizer_without_offsets_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(InputError, match="tokenizer: Slow does not say where its tokens are"):
        split_units(Slow(), PROMPT, separator="\n\n")


def test_prompts_that_cannot_be_read_are_refused(llama):
    mask = torch.ones(1, N)
    mask[0, 0] = 0
    with pytest.raises(InputError, match="attention_mask: a batch must be pad-free"):
        ShotKV().prefill(llama, tokens(), UNITS, attention_mask=mask)
    with pytest.raises(InputError, match=r"input_ids: has shape \(30,\)"):
        ShotKV().prefill(llama, tokens()[0], UNITS)
    training = build().train()
    with pytest.raises(InputError, match="model: is in training mode"):
        ShotKV().prefill(training, tokens(), UNITS)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=60, hidden_size=32, n_layer=2, n_head=4)).eval()
    with pytest.raises(InputError, match="model=Bloom.*: its attention does not go through"):
        ShotKV().prefill(bloom, tokens(), UNITS)


def test_a_cache_of_another_prompt_is_refused(llama):
    press = ShotKV(0.5)
    with press(llama):
        cache = press.prefill(llama, tokens(), UNITS)
        with pytest.raises(InputError, match="cache: was made for another prompt"):
            generate(llama, tokens(seed=8), cache)
        static = StaticCache(config=llama.config, max_cache_len=64)
        with pytest.raises(InputError, match="cache: is a StaticCache; must be what press.prefill returns"):
            generate(llama, tokens(), static)
        assert generate(llama, tokens(), cache).shape == (1, N + 10)


def test_a_prompt_knows_its_groups():
    received = torch.arange(8.0).reshape(1, 4, 2)
    prompt = Prompt(2, (Unit(0, 2),), 1, {1: received}, 1, {1: 2})
    assert prompt.by_kv_head(1).tolist() == [[[1.0, 2.0], [5.0, 6.0]]]
