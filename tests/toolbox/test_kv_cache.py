"""Surgery on caches: with all kept nothing changes, with some kept it is what a mask would give, keys move exactly."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)

from hidden_keys import Hidden
from practicum.toolbox.errors import InputError
from practicum.toolbox.kv import AttentionTap
from practicum.toolbox.kv_cache import Rotary, SelectedLayer, clone, cut, full_attention_layers, held, join, select

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
    # Larger than usual, so that tokens differ in what they pay attention to.
    "initializer_range": 0.3,
}
SCALED = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
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
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
        ),
    ),
}
TURNED = MODELS | {
    **{
        f"llama {name}": (LlamaForCausalLM, LlamaConfig(**SMALL, rope_parameters=rope)) for name, rope in SCALED.items()
    },
    "phi": (PhiForCausalLM, PhiConfig(**SMALL)),
    "cohere": (CohereForCausalLM, CohereConfig(**SMALL)),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**{k: v for k, v in SMALL.items() if "key_value" not in k})),
}


def build(name, implementation="sdpa"):
    kind, config = TURNED[name]
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    config._attn_implementation = implementation
    return kind(config).eval()


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return build(request.param)


@pytest.fixture(scope="module")
def llama():
    return build("llama")


def tokens(n, batch=1, seed=1):
    return torch.randint(1, 60, (batch, n), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def prefilled(model, ids):
    """A cache that has seen the ids."""
    return model(ids, cache=DynamicCache(config=model.config), use_cache=True).cache


def everything(cache):
    """Each layer of full attention as a selection that has lost nothing."""
    return select(
        cache, {layer: torch.arange(cache.layers[layer - 1].keys.shape[-2]) for layer in full_attention_layers(cache)}
    )


def some(cache, seed=0, share=0.5):
    """Different tokens in every layer, and different numbers of them; the last one stays."""
    generator = torch.Generator().manual_seed(seed)
    kept = {}
    for layer in full_attention_layers(cache):
        n = cache.layers[layer - 1].keys.shape[-2]
        stays = torch.rand(n, generator=generator) < share
        stays[-1] = True
        kept[layer] = torch.nonzero(stays).flatten()
    return kept


# With all tokens kept ------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_logits_are_the_same_to_the_bit(model):
    ids = tokens(12)
    full, kept = prefilled(model, ids[:, :9]), everything(prefilled(model, ids[:, :9]))
    for step in range(9, 12):
        expected = model(ids[:, step : step + 1], cache=full, use_cache=True).logits
        assert torch.equal(model(ids[:, step : step + 1], cache=kept, use_cache=True).logits, expected)


@torch.no_grad()
def test_several_tokens_at_once_are_the_same_to_the_bit(model):
    ids = tokens(12)
    full, kept = prefilled(model, ids[:, :7]), everything(prefilled(model, ids[:, :7]))
    expected = model(ids[:, 7:], cache=full, use_cache=True).logits
    assert torch.equal(model(ids[:, 7:], cache=kept, use_cache=True).logits, expected)


@pytest.mark.parametrize(
    "options",
    [{"do_sample": False}, {"num_beams": 3}, {"do_sample": True, "top_k": 20}],
    ids=["greedy", "beam", "sampled"],
)
def test_generate_gives_the_same_tokens(model, options):
    ids = tokens(9)
    written = []
    for prepare in (lambda cache: cache, everything):
        torch.manual_seed(3)
        cache = prepare(prefilled(model, ids[:, :-1]))
        # `generate` repeats what it is given for the beams, but not a cache.
        cache.batch_repeat_interleave(options.get("num_beams", 1))
        written.append(model.generate(ids, cache=cache, max_new_tokens=12, pad_token_id=0, **options))
    assert torch.equal(*written)
    torch.manual_seed(3)
    assert torch.equal(written[0], model.generate(ids, max_new_tokens=12, pad_token_id=0, **options))


# With some kept ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def reference(model, ids, n, kept, steps):
    cache = prefilled(model, ids[:, :n])
    logits = []
    with Hidden(model, kept, n):
        for a, b in steps:
            logits.append(model(ids[:, a:b], cache=cache, use_cache=True).logits)
    return torch.cat(logits, dim=1)


@torch.no_grad()
def test_layers_of_different_lengths_equal_masks(model):
    ids, n = tokens(14), 10
    cache = prefilled(model, ids[:, :n])
    kept = some(cache)
    select(cache, kept)
    got = torch.cat([model(ids[:, i : i + 1], cache=cache, use_cache=True).logits for i in range(n, 14)], dim=1)
    expected = reference(model, ids, n, kept, [(i, i + 1) for i in range(n, 14)])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    full = model(ids, use_cache=False).logits[:, n:]
    assert (got - full).abs().max() > 1e-2, "the selection made no difference: the test shows nothing"


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_in_a_tap_several_tokens_go_at_once(implementation):
    model = build("llama", implementation)
    ids, n = tokens(14), 10
    cache = prefilled(model, ids[:, :n])
    kept = some(cache, seed=4)
    assert len({len(indices) for indices in kept.values()}) > 1
    select(cache, kept)
    with AttentionTap(model, lambda call: None):
        got = model(ids[:, n:], cache=cache, use_cache=True).logits
    torch.testing.assert_close(got, reference(model, ids, n, kept, [(n, 14)]), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_generate_from_a_selection_equals_a_loop(model):
    ids = tokens(10)
    cache = prefilled(model, ids[:, :-1])
    kept = some(cache, seed=2)
    mine = select(clone(cache), kept)
    written = model.generate(ids, cache=select(cache, kept), max_new_tokens=8, do_sample=False, pad_token_id=0)
    token, expected = ids[:, -1:], []
    for position in range(9, 17):
        out = model(token, cache=mine, position_ids=torch.tensor([[position]]), use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        expected.append(int(token))
    assert written[0, 10:].tolist() == expected


@torch.no_grad()
def test_beams_share_a_selection(llama):
    ids = tokens(10)
    cache = select(prefilled(llama, ids[:, :-1]), some(prefilled(llama, ids[:, :-1]), seed=2))
    one = llama.generate(ids, cache=clone(cache), num_beams=1, do_sample=False, max_new_tokens=6, pad_token_id=0)
    wide = clone(cache)
    wide.batch_repeat_interleave(4)
    many = llama.generate(
        ids,
        cache=wide,
        num_beams=4,
        max_new_tokens=6,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert many.sequences.shape[1] == 16
    # The score of the beam is what a loop over the selection gives its tokens, so the cache was reordered with it.
    score, mine = 0.0, clone(cache)
    for i in range(9, 15):
        logits = llama(many.sequences[:, i : i + 1], cache=mine, use_cache=True).logits
        score += float(logits[0, -1].log_softmax(-1)[many.sequences[0, i + 1]])
    assert float(many.sequences_scores[0]) == pytest.approx(score / 6, abs=1e-3)
    greedy, mine = 0.0, clone(cache)
    for i in range(9, 15):
        greedy += float(
            llama(one[:, i : i + 1], cache=mine, use_cache=True).logits[0, -1].log_softmax(-1)[one[0, i + 1]]
        )
    assert score >= greedy - 1e-3


@torch.no_grad()
def test_heads_may_hold_different_tokens(llama):
    ids = tokens(11)
    cache = prefilled(llama, ids[:, :10])
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    chosen = torch.tensor([[[0, 3, 9], [1, 2, 8]]])
    select(cache, chosen)
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        for head in range(2):
            assert torch.equal(layer.keys[:, head], keys[:, head, chosen[0, head]])
            assert torch.equal(layer.values[:, head], values[:, head, chosen[0, head]])
        assert layer.positions.tolist() == chosen.tolist()
    logits = llama(ids[:, 10:], cache=cache, use_cache=True).logits
    assert bool(logits.isfinite().all())
    assert cache.layers[0].positions[0, :, -1].tolist() == [10, 10]


# Growing, cropping, the batch ----------------------------------------------------------------------------------------


@torch.no_grad()
def test_cropping_takes_back_what_was_said(llama):
    ids = tokens(16)
    cache = select(prefilled(llama, ids[:, :10]), torch.tensor([0, 2, 5, 9]))
    with AttentionTap(llama, lambda call: None):
        llama(tokens(3, seed=9), cache=cache, use_cache=True)
        cache.crop(-3)
        assert [layer.positions.flatten().tolist() for layer in cache.layers] == [[0, 2, 5, 9]] * 3
        assert cache.get_seq_length() == 10
        again = llama(ids[:, 10:], cache=cache, use_cache=True).logits
        fresh = select(prefilled(llama, ids[:, :10]), torch.tensor([0, 2, 5, 9]))
        assert torch.equal(again, llama(ids[:, 10:], cache=fresh, use_cache=True).logits)


def test_cropping_into_the_selection_goes_by_position():
    layer = SelectedLayer(torch.randn(1, 1, 4, 2), torch.randn(1, 1, 4, 2), torch.tensor([0, 2, 5, 9]), seen=12)
    layer.crop(-5)
    assert (layer.positions.flatten().tolist(), layer.get_seq_length(), layer.keys.shape[-2]) == ([0, 2, 5], 7, 3)
    layer.crop(0)
    assert layer.get_seq_length() == 7


@torch.no_grad()
def test_the_batch_goes_along(llama):
    ids = tokens(8, batch=2)
    cache = prefilled(llama, ids)
    chosen = torch.stack([torch.tensor([[0, 1, 7]] * 2), torch.tensor([[2, 3, 7]] * 2)])
    select(cache, chosen)
    layer = cache.layers[1]
    first, second = layer.keys.clone()
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(layer.keys[0], second)
    assert layer.positions[0].tolist() == [[2, 3, 7]] * 2
    cache.batch_repeat_interleave(2)
    assert layer.keys.shape[0] == layer.positions.shape[0] == 4
    cache.batch_select_indices(torch.tensor([2, 3]))
    assert torch.equal(layer.keys[1], first)
    assert layer.positions[1].tolist() == [[0, 1, 7]] * 2


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 12), st.lists(st.sampled_from(["keep", "grow", "crop"]), max_size=8))
def test_positions_follow_the_keys(seed, n, actions):
    """Keys hold their own positions, so whatever happens the two can be compared."""
    rng = torch.Generator().manual_seed(seed)
    start = torch.arange(float(n)).reshape(1, 1, n, 1)
    layer = SelectedLayer(start, start, torch.arange(n), seen=n)
    for action in actions:
        size = layer.keys.shape[-2]
        if action == "keep":
            stays = torch.rand(size, generator=rng) < 0.7
            stays[int(torch.randint(size, (1,), generator=rng))] = True
            layer.keep(torch.nonzero(stays).flatten())
        elif action == "grow":
            new = torch.arange(layer.seen, layer.seen + 3.0).reshape(1, 1, 3, 1)
            layer.update(new, new)
        else:
            wanted = -int(torch.randint(1, 3, (1,), generator=rng))
            if int(layer.positions[0, 0, 0]) < layer.seen + wanted:
                layer.crop(wanted)
        assert layer.keys.flatten().tolist() == layer.positions.flatten().tolist()
        assert layer.values.shape == layer.keys.shape
        assert layer.get_mask_sizes(2) == (layer.keys.shape[-2] + 2, layer.seen - layer.keys.shape[-2])


def test_a_clone_grows_alone(llama):
    ids = tokens(9)
    cache = select(prefilled(llama, ids[:, :8]), torch.tensor([0, 7]))
    other = clone(cache)
    with torch.no_grad():
        llama(ids[:, 8:], cache=other, use_cache=True)
    assert cache.get_seq_length() == 8
    assert other.get_seq_length() == 9
    assert held(cache).tokens == (2, 2, 2)
    assert held(other).tokens == (3, 3, 3)


def test_resetting_forgets():
    layer = SelectedLayer(torch.randn(1, 1, 2, 2), torch.randn(1, 1, 2, 2), torch.tensor([0, 4]), seen=6)
    layer.reset()
    assert layer.get_seq_length() == 0
    layer.update(torch.randn(1, 1, 3, 2), torch.randn(1, 1, 3, 2))
    assert layer.get_seq_length() == 3
    assert layer.positions.flatten().tolist() == [0, 1, 2]


def test_memory_is_that_of_what_is_held(llama):
    ids = tokens(20)
    full = held(prefilled(llama, ids))
    part = held(select(prefilled(llama, ids), torch.arange(15, 20)))
    assert part.nbytes == full.nbytes // 4
    assert part.full_nbytes == full.nbytes == full.full_nbytes
    assert part.seen == 20


def test_sliding_windows_are_left_alone():
    model = build("gemma3")
    cache = prefilled(model, tokens(9))
    assert full_attention_layers(cache) == [2, 3]
    before = cache.layers[0]
    select(cache, torch.tensor([0, 8]))
    assert cache.layers[0] is before
    assert held(cache).tokens == (3, 2, 2)
    with pytest.raises(InputError, match=r"tokens: layer 1 has no full attention .* are \[2, 3\]"):
        select(cache, {1: torch.tensor([0])})


def test_other_caches_keep_their_layers():
    """The class does not take the place of the layer that a configuration asks for."""
    assert {type(layer).__name__ for layer in DynamicCache(config=build("llama").config).layers} == {"DynamicLayer"}


# Moving keys ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def keys_of(model, ids, start):
    positions = torch.arange(start, start + ids.shape[1])[None]
    return model(ids, position_ids=positions, cache=DynamicCache(), use_cache=True).cache.layers


@pytest.mark.parametrize("name", TURNED)
def test_moved_keys_are_those_of_the_new_positions(name):
    model = build(name)
    rotary, ids = Rotary(model), tokens(6)
    here, there = keys_of(model, ids, 2), keys_of(model, ids, 11)
    # The first layer's keys depend on their own tokens alone.
    moved = rotary.move(here[0].keys, 9, 1)
    torch.testing.assert_close(moved, there[0].keys, atol=1e-4, rtol=1e-4)
    assert (here[0].keys - there[0].keys).abs().max() > 0.05
    # In every layer attention goes by distances, so all keys move alike.
    for layer in range(len(here)):
        moved = rotary.move(here[layer].keys, 9, layer + 1)
        torch.testing.assert_close(moved, there[layer].keys, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(rotary.move(moved, -9, layer + 1), here[layer].keys, atol=1e-4, rtol=1e-4)


def test_each_token_may_move_by_its_own_step(llama):
    rotary, keys = Rotary(llama), torch.randn(2, 2, 4, 8)
    moved = rotary.move(keys, torch.tensor([0, 3, -2, 7]), 1)
    for i, step in enumerate([0, 3, -2, 7]):
        torch.testing.assert_close(moved[:, :, i : i + 1], rotary.move(keys[:, :, i : i + 1], step, 1))
    torch.testing.assert_close(rotary.move(rotary.move(keys, 3, 2), 4, 2), rotary.move(keys, 7, 2))


def test_half_precision_is_rounded_once(llama):
    keys = torch.randn(1, 2, 5, 8).bfloat16()
    moved = Rotary(llama).move(keys, 1000, 1)
    assert moved.dtype == torch.bfloat16
    assert torch.equal(moved, Rotary(llama).move(keys.float(), 1000, 1).bfloat16())


def test_layers_turn_at_their_own_frequency():
    rotary, keys = Rotary(build("gemma3")), torch.randn(1, 2, 3, 8)
    assert not torch.allclose(rotary.move(keys, 5, 1), rotary.move(keys, 5, 2), atol=1e-2)
    assert torch.equal(rotary.move(keys, 5, 2), rotary.move(keys, 5, 3))


@torch.no_grad()
def test_cut_and_joined_elsewhere(llama):
    ids = tokens(12)
    cache = prefilled(llama, ids)
    joined = join([cut(cache, 6, 12), cut(cache, 0, 3)], starts=[6, 0], rotary=Rotary(llama))
    expected = prefilled(llama, torch.cat([ids[:, 6:12], ids[:, :3]], dim=1))
    assert joined.get_seq_length() == 9
    torch.testing.assert_close(joined.layers[0].keys, expected.layers[0].keys, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(joined.layers[0].values, expected.layers[0].values, atol=1e-5, rtol=1e-5)
    whole = join([cut(cache, 0, 5), cut(cache, 5, 12)])
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(whole.layers, cache.layers, strict=True))


# Bad input -----------------------------------------------------------------------------------------------------------


def a_layer(**changes):
    x = torch.zeros(1, 2, 3, 4)
    arguments = {"keys": x, "values": x, "positions": torch.tensor([0, 2, 5]), "seen": 6} | changes
    return SelectedLayer(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": torch.zeros(1, 2, 4, 4)}, r"values: has shape \(1, 2, 4, 4\); must be .* \(1, 2, 3, 4\)"),
        ({"keys": torch.zeros(2, 3)}, "values: has shape"),
        (
            {"positions": torch.zeros(3, 1, 3)},
            r"positions: has shape \(3, 1, 3\); must be \(3,\) or \(1 or 1, 2 or 1, 3\)",
        ),
        ({"positions": torch.tensor([0, 1])}, "positions: are 2; must be as many as keys, 3, and one at least"),
        ({"positions": torch.tensor([0, 0, 1])}, "positions: must ascend from 0"),
        ({"positions": torch.tensor([-1, 0, 1])}, "positions: must ascend from 0"),
        ({"seen": 5}, "seen=5: must be above the last position, 5"),
    ],
)
def test_a_layer_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        a_layer(**changes)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([], "tokens: are none; a layer must keep one token at least"),
        ([0, 3], r"tokens: must ascend and be within \[0, 3\)"),
        ([-1, 0], r"tokens: must ascend"),
        ([1, 0], r"tokens: must ascend"),
        ([1, 1], r"tokens: must ascend"),
    ],
)
def test_a_selection_that_is_none_is_refused(kept, message):
    with pytest.raises(InputError, match=message):
        a_layer().keep(torch.tensor(kept, dtype=torch.int64))


def test_cropping_too_much_is_refused():
    with pytest.raises(InputError, match="tokens_to_remove=2: must be negative"):
        a_layer().crop(2)
    with pytest.raises(InputError, match="tokens_to_remove=-6: the layer would hold no token of 6 seen"):
        a_layer().crop(-6)
    heads = a_layer(positions=torch.tensor([[[0, 2, 5], [0, 1, 2]]]))
    with pytest.raises(InputError, match="tokens_to_remove=-1: heads would hold 2 to 3 tokens"):
        heads.crop(-1)


def test_caches_that_cannot_hold_a_selection_are_refused(llama):
    static = StaticCache(config=llama.config, max_cache_len=16)
    with pytest.raises(InputError, match="cache: has no layer of full attention that grows; has StaticLayer"):
        select(static, torch.tensor([0]))
    with pytest.raises(InputError, match="cache: is a tuple; must be a DynamicCache"):
        full_attention_layers(())
    with pytest.raises(InputError, match="layer: is a StaticLayer; must be a DynamicLayer"):
        SelectedLayer.of(static.layers[0])
    with pytest.raises(InputError, match="layer: is empty"):
        SelectedLayer.of(DynamicCache(config=llama.config).layers[0])
    with pytest.raises(InputError, match=r"layer 2: tokens: must ascend and be within \[0, 5\)"):
        select(prefilled(llama, tokens(5)), {2: torch.tensor([5])})


def test_spans_that_are_not_held_are_refused(llama):
    cache = select(prefilled(llama, tokens(8)), {2: torch.tensor([0, 1, 2, 5, 6, 7])})
    assert len(cut(cache, 5, 8)) == 3
    with pytest.raises(InputError, match="start=2, stop=6: layer 2 does not hold the whole span"):
        cut(cache, 2, 6)
    with pytest.raises(InputError, match="start=6, stop=9: layer 1 does not hold the whole span"):
        cut(cache, 6, 9)
    with pytest.raises(InputError, match="start=3, stop=3: must be a span that is not empty"):
        cut(cache, 3, 3)
    part = cut(cache, 5, 8)
    with pytest.raises(InputError, match="parts: are none"):
        join([])
    with pytest.raises(InputError, match=r"parts: have \[1, 3\] layers"):
        join([part, part[:1]])
    with pytest.raises(InputError, match="starts and rotary: must be given together"):
        join([part], starts=[5])
    with pytest.raises(InputError, match="starts: are 2; must be as many as parts, 1"):
        join([part], starts=[5, 0], rotary=Rotary(llama))


def test_models_whose_keys_cannot_be_moved_are_refused():
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4))
    with pytest.raises(
        InputError, match="model=GPT2LMHeadModel: must have one module of rotary position embeddings; has 0"
    ):
        Rotary(gpt2)
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}
    rope["original_max_position_embeddings"] = 16
    long = LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=rope))
    with pytest.raises(InputError, match="longrope.* change with the length"):
        Rotary(long)


@torch.no_grad()
def test_a_dynamic_embedding_that_has_changed_is_refused():
    config = LlamaConfig(**SMALL, rope_parameters=SCALED["dynamic"], max_position_embeddings=16)
    model = LlamaForCausalLM(config).eval()
    rotary, keys = Rotary(model), torch.randn(1, 2, 3, 8)
    rotary.move(keys, 5, 1)
    model(tokens(20))
    with pytest.raises(InputError, match="dynamic.* have changed for a sequence of 20 tokens, more than the 16"):
        rotary.move(keys, 5, 1)


def test_moves_that_do_not_fit_are_refused(llama):
    rotary, keys = Rotary(llama), torch.randn(1, 2, 3, 8)
    with pytest.raises(InputError, match="layer=4: must be from 1 to 3"):
        rotary.move(keys, 1, 4)
    with pytest.raises(InputError, match=r"delta: has shape \(2,\); must be a number or \(3,\)"):
        rotary.move(keys, torch.tensor([1, 2]), 1)
