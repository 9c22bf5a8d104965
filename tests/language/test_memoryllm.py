"""MemoryLLM: the model, its tables, what is read out of them, and the start from a dense model."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import nn
from torch.nn.functional import silu
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from practicum.language.memoryllm import (
    MemoryBlock,
    MemoryLMConfig,
    MemoryLMForCausalLM,
    MemoryLMModel,
    TokenLookups,
    cluster_tokens,
    fit_memory,
    memory_lm_from_dense,
    nearest_tokens,
    retrieve,
)
from practicum.language.memoryllm.model import BLOCK, _block_places
from practicum.toolbox.taps import Taps

V, H, N = 90, 32, 3
SMALL = {"vocab_size": V, "hidden_size": H, "num_hidden_layers": N, "num_attention_heads": 4, "num_key_value_heads": 2}


def numbers(seed=0):
    return torch.Generator().manual_seed(seed)


def build(kind=MemoryLMForCausalLM, config=None, seed=0, scale=5.0, **options):
    """A model whose weights are large enough for every part to show in the logits."""
    if config is None:
        config = MemoryLMConfig(**{**SMALL, **options})
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(seed)
        model = kind(config).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.mul_(scale) if weight.ndim > 1 else weight.add_(torch.randn_like(weight) * 0.3)
                assert name
    return model


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, V, (2, 17), generator=numbers(1))


@pytest.fixture
def table():
    return torch.randn(V, N, H, generator=numbers(2)) * torch.rand(V, 1, 1, generator=numbers(3))


@pytest.fixture
def file(table, tmp_path):
    path = tmp_path / "tol.safetensors"
    TokenLookups(table, "abc").save(path)
    return path


def logits(model, ids, **options):
    with torch.no_grad():
        return model(ids, **options).logits


# The configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("beta", "width"), [(1, 2240), (2, 1920), (3, 1600)])
def test_widths_of_table_5(beta, width):
    config = MemoryLMConfig(hidden_size=960, num_attention_heads=16, flex_beta=beta)
    assert config.memory_intermediate_size == width
    assert config.intermediate_size == round(beta * 960 / 3)


def test_widths_of_the_paper_are_taken():
    sizes = {"hidden_size": 2048, "num_attention_heads": 32}
    assert MemoryLMConfig(**sizes, memory_intermediate_size=5464).memory_intermediate_size == 5464
    assert MemoryLMConfig(**sizes, flex_beta=3, memory_intermediate_size=3418).memory_intermediate_size == 3418
    assert MemoryLMConfig(**sizes, flex_beta=1, memory_intermediate_size=4778).memory_intermediate_size == 4778


def on_meta(**options):
    with torch.device("meta"):
        return MemoryLMForCausalLM(MemoryLMConfig(**options))


def test_parameter_counts_of_the_paper():
    sizes = {"hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 1, "vocab_size": 128256}
    dense = on_meta(**sizes, memory_intermediate_size=5464)
    memory = dense.num_parameters() - dense.num_parameters(active=True)
    assert memory == 3 * 2048 * 5464 + 2048
    assert round((memory - 2048) / 1e6, 2) == 33.57
    flex = on_meta(**sizes, flex_beta=1)
    context = sum(w.numel() for n, w in flex.named_parameters() if ".mlp." in n)
    assert context == pytest.approx(4.194e6, rel=0.01)
    assert flex.num_parameters() - flex.num_parameters(active=True) == pytest.approx(29.36e6, rel=0.01)


def test_active_counts_of_the_250m_model():
    """Table 4: 737M in all and 245M active have 402M and 1208M beside them; the embeddings are tied at none of them."""
    model = on_meta(
        hidden_size=1600,
        num_attention_heads=16,
        num_hidden_layers=24,
        vocab_size=128256,
        memory_intermediate_size=4272,
        tie_word_embeddings=True,
    )
    embeddings = 128256 * 1600
    active = model.num_parameters(active=True)
    assert (active - embeddings) / 1e6 == pytest.approx(24 * 4 * 1600**2 / 1e6, rel=0.01)
    assert (model.num_parameters() - embeddings) / 1e6 == pytest.approx(737, rel=0.01)
    assert (active - embeddings) / 1e6 == pytest.approx(245, rel=0.01)


def test_storage_of_the_paper():
    assert 128256 * 24 * 2048 * 2 == 12_608_077_824
    lookups = TokenLookups(torch.zeros(2, 24, 2048, dtype=torch.float16))
    assert lookups.row_bytes == 98_304
    assert 128256 * lookups.row_bytes / 1e9 == pytest.approx(12.61, abs=0.005)
    assert 128256 * 2048 // (128256 + 2048) == 2015


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flex_beta": -0.5}, "flex_beta=-0.5: must be at least 0 and below 8"),
        ({"flex_beta": 8}, "flex_beta=8: must be"),
        ({"flex_beta": float("nan")}, "flex_beta=nan"),
        ({"compute": "gelu"}, "compute='gelu': must be one of 'swiglu', 'linear'"),
        ({"flex_beta": 3, "memory_intermediate_size": 80}, "memory_intermediate_size=80: disagrees with flex_beta=3"),
        ({"memory_intermediate_size": 0}, "memory_intermediate_size=0: must be at least 1"),
        ({"intermediate_size": 64}, "intermediate_size=64: with flex_beta=0"),
        ({"flex_beta": 3, "intermediate_size": 64}, "intermediate_size=64: disagrees with flex_beta=3"),
    ],
)
def test_the_configuration_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        MemoryLMConfig(**{**SMALL, **options})


def test_heads_must_divide_the_hidden_size_as_in_llama():
    with pytest.raises(Exception, match="not a multiple of the number of attention") as ours:
        MemoryLMConfig(hidden_size=30, num_attention_heads=4)
    with pytest.raises(type(ours.value)):
        LlamaConfig(hidden_size=30, num_attention_heads=4)


# The formula ----------------------------------------------------------------------------------------------------------


def rms(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def by_hand(model, ids, norms=None):
    """Equation 2.6 with the model's attention, everything else written out."""
    decoder = model.model
    x0 = decoder.embed_tokens.weight[ids]
    x = x0
    n = ids.shape[1]
    position = torch.arange(n)[None]
    mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
    rotary = decoder.rotary_emb(x, position)
    for i, layer in enumerate(decoder.layers):
        q = rms(x, layer.input_layernorm.weight)
        attended, _ = layer.self_attn(q, position_embeddings=rotary, attention_mask=mask)
        y = x + attended
        u = rms(x0, (norms or [block.memory_norm.weight for block in decoder.layers])[i])
        m = layer.memory
        new = y + (silu(u @ m.gate_proj.weight.T) * (u @ m.up_proj.weight.T)) @ m.down_proj.weight.T
        if layer.mlp is not None:
            new = new + layer.mlp(rms(y, layer.post_attention_layernorm.weight))
        x = new
    return rms(x, decoder.norm.weight) @ model.lm_head.weight.T


@pytest.mark.parametrize("options", [{}, {"flex_beta": 3}, {"flex_beta": 1, "compute": "linear"}, {"flex_beta": 0.5}])
@torch.no_grad()
def test_the_formula(options, ids):
    model = build(**options)
    assert torch.allclose(logits(model, ids), by_hand(model, ids), atol=1e-4)


@torch.no_grad()
def test_the_shared_norm_is_one(ids):
    model = build(shared_memory_norm=True)
    names = [name for name, _ in model.named_parameters() if "memory_norm" in name]
    assert names == ["model.memory_norm.weight"]
    assert torch.allclose(logits(model, ids), by_hand(model, ids, [model.model.memory_norm.weight] * N), atol=1e-4)
    separate = [name for name, _ in build().named_parameters() if "memory_norm" in name]
    assert len(separate) == N


@torch.no_grad()
def test_the_block_in_plain_torch_is_the_layer(model, ids):
    layer = model.model.layers[1]
    block = MemoryBlock(H, model.config.memory_intermediate_size)
    own = {name.removeprefix("memory."): weight for name, weight in layer.state_dict().items()}
    block.load_state_dict({name: own[name] for name in block.state_dict()})
    x, attended = torch.randn(2, 2, 17, H, generator=numbers(4))
    x0 = model.model.embed_tokens(ids)
    expected = x + attended + layer.recall(x0)
    assert torch.allclose(block(x, x0, attended), expected, atol=1e-5)
    assert MemoryBlock(960).gate_proj.out_features == 2560
    with pytest.raises(ValueError, match="hidden_size=0: must be at least 1"):
        MemoryBlock(0)
    with pytest.raises(ValueError, match="must have one shape"):
        block(x, x0[:, :5], attended)


@pytest.mark.parametrize(("beta", "shapes"), [(1, [(H, H)]), (2, [(H, H), (H, H)]), (3, [(48, H), (H, 48)])])
def test_the_linear_network_has_beta_h_squared_parameters(beta, shapes):
    layer = build(flex_beta=beta, compute="linear").model.layers[0]
    found = [tuple(weight.shape) for weight in layer.mlp.parameters()]
    assert found == shapes
    assert sum(math.prod(shape) for shape in found) == beta * H * H


def test_without_memory_flex_is_llama(ids):
    flex = build(flex_beta=3)
    config = LlamaConfig(**SMALL, intermediate_size=flex.config.intermediate_size)
    llama = LlamaForCausalLM(config).eval()
    state = {name: weight for name, weight in flex.state_dict().items() if "memory" not in name}
    llama.load_state_dict(state)
    with flex.drop_memory():
        assert torch.allclose(logits(flex, ids), logits(llama, ids), atol=1e-5)
    assert not torch.allclose(logits(flex, ids), logits(llama, ids), atol=1e-2)


def test_the_memory_of_a_position_depends_on_its_token_alone(model, ids):
    seen = []
    hook = model.model.layers[2].register_forward_pre_hook(
        lambda layer, args, kwargs: seen.append(kwargs["memory"].output(layer)), with_kwargs=True
    )
    other = torch.randint(0, V, ids.shape, generator=numbers(9))
    other[:, 5] = ids[:, 5]
    changed = ids.clone()
    changed[:, 5] = (ids[:, 5] + 1) % V
    for x in (ids, other, changed):
        logits(model, x)
    hook.remove()
    assert torch.equal(seen[0][:, 5], seen[1][:, 5])
    assert not torch.equal(seen[0][:, 6], seen[1][:, 6])
    assert not torch.allclose(seen[0][:, 5], seen[2][:, 5], atol=1e-3)


def test_nothing_of_the_residual_stream_reaches_the_memory(model, ids):
    """The memory's input has no gradient with respect to what enters the layer."""
    layer = model.model.layers[1]
    kept = {}
    before = layer.register_forward_pre_hook(lambda m, args: kept.update(x=args[0].retain_grad() or args[0]))
    inside = layer.memory.register_forward_hook(lambda m, args, out: kept.update(recalled=out))
    model(ids)
    before.remove(), inside.remove()
    assert torch.autograd.grad(kept["recalled"].sum(), kept["x"], allow_unused=True) == (None,)


# Distinct tokens ------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=200, unique=True))
def test_block_places(tokens):
    distinct = torch.tensor(sorted(tokens))
    row = _block_places(distinct)
    assert len(set(row.tolist())) == len(tokens)
    assert torch.equal(row % BLOCK, distinct % BLOCK)
    assert int(row.max()) // BLOCK + 1 == int(torch.bincount(distinct % BLOCK).max())


def test_evaluating_distinct_tokens_once_changes_nothing(ids, monkeypatch):
    repeated = ids % 12
    found = {}
    for name, most in (("once", 0.8), ("plain", -1.0)):
        monkeypatch.setattr("practicum.language.memoryllm.model.MOST_DISTINCT", most)
        model = build()
        rows = []
        hook = model.model.layers[0].memory.register_forward_pre_hook(
            lambda m, args, rows=rows: rows.append(args[0].reshape(-1, H).shape[0])
        )
        out = model(repeated, labels=repeated)
        hook.remove()
        out.loss.backward()
        found[name] = (rows, out.logits, {n: w.grad for n, w in model.named_parameters()})
    assert found["once"][0] == [len(torch.unique(repeated))]
    assert found["plain"][0] == [repeated.numel()]
    assert torch.allclose(found["once"][1], found["plain"][1], atol=1e-4)
    for name, gradient in found["once"][2].items():
        assert torch.allclose(gradient, found["plain"][2][name], rtol=1e-4, atol=1e-5), name
    assert found["once"][2]["model.embed_tokens.weight"].abs().sum() > 0


def test_gradients_reach_the_embeddings_through_the_memory(ids):
    model = build(scale=1.0)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
    with_memory = torch.autograd.grad(model(ids).logits.pow(2).sum(), model.model.embed_tokens.weight)[0]
    with model.drop_memory():
        without = torch.autograd.grad(model(ids).logits.pow(2).sum(), model.model.embed_tokens.weight)[0]
    assert not torch.allclose(with_memory, without, rtol=1e-2)


# Tables ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"flex_beta": 2}, {"shared_memory_norm": True}, {"mlp_bias": True}])
@pytest.mark.parametrize("tied", [False, True])
def test_looked_up_and_computed_logits_are_equal(options, tied, ids):
    model = build(tie_word_embeddings=tied, **options)
    computed = logits(model, ids)
    model.attach_lookups(model.precompute_lookups(batch_size=41))
    assert torch.equal(logits(model, ids), computed)
    model.detach_lookups()
    assert torch.equal(logits(model, ids), computed)


def test_every_row_is_what_one_token_alone_gives(model):
    lookups = model.precompute_lookups()
    alone = build()
    for token in (0, 1, 31, 32, V - 1):
        alone.attach_lookups(lookups)
        looked = logits(alone, torch.tensor([[token]]))
        alone.detach_lookups()
        assert torch.equal(logits(alone, torch.tensor([[token]])), looked)
    x0 = model.model.embed_tokens.weight
    for i, layer in enumerate(model.model.layers):
        assert torch.allclose(lookups.layer(i), layer.recall(x0), atol=1e-5)


def test_with_cache_padding_and_generation(model, ids):
    model = build()
    lookups = model.precompute_lookups()
    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), ids], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :4] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    options |= {"output_logits": True, "eos_token_id": None}
    computed = model.generate(padded, attention_mask=mask, **options)
    model.attach_lookups(lookups, free_memory_weights=True)
    looked = model.generate(padded, attention_mask=mask, **options)
    assert torch.equal(looked.sequences, computed.sequences)
    assert all(torch.equal(a, b) for a, b in zip(looked.logits, computed.logits, strict=True))
    plain = logits(model, ids)
    shifted = logits(model, padded, attention_mask=mask)[:, 4:]
    assert torch.allclose(plain, shifted, atol=1e-3)
    whole = logits(model, computed.sequences[:, :-1], attention_mask=nn.functional.pad(mask, (0, 5), value=1))
    for i, step in enumerate(computed.logits):
        assert torch.allclose(whole[:, padded.shape[1] - 1 + i], step, atol=1e-3)


def test_written_while_it_is_computed(model, ids, tmp_path):
    path = tmp_path / "deep" / "tol.safetensors"
    lookups = model.precompute_lookups(batch_size=7, path=path)
    assert lookups.backend == "mmap"
    assert lookups.fingerprint == model.memory_fingerprint()
    assert torch.equal(lookups.gather(ids), model.precompute_lookups().gather(ids))
    assert torch.equal(load_file(path)["values"], model.precompute_lookups().gather(torch.arange(V)))
    assert [p.name for p in path.parent.iterdir()] == ["tol.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compression", [None, 8, 4, "half rank", "two layers", "half rank, 8"])
def test_round_trips_of_all_backends(table, ids, dtype, compression, tmp_path):
    lookups = TokenLookups(table.to(dtype), "abc")
    if compression in (8, 4):
        lookups = lookups.quantize(compression)
    elif compression == "two layers":
        lookups = lookups.select_layers([2, 0])
    elif compression:
        lookups = lookups.low_rank(0.5)
        lookups = lookups.quantize(8) if "8" in compression else lookups
    path = tmp_path / "tol.safetensors"
    lookups.save(path)
    rows = lookups.gather(ids)
    assert rows.dtype == dtype
    assert path.stat().st_size >= lookups.nbytes
    for options in ({"backend": "memory"}, {"backend": "mmap"}, {"backend": "cached", "cache_rows": 5}):
        again = TokenLookups.load(path, **options)
        assert torch.equal(again.gather(ids), rows)
        assert (again.fingerprint, again.shape, again.nbytes) == ("abc", (V, N, H), lookups.nbytes)
        again.save(tmp_path / "again.safetensors")
        assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_a_table_is_token_major(table, file):
    stored = load_file(file)["values"]
    assert stored.shape == (V, N, H)
    assert stored[7].is_contiguous()
    cached = TokenLookups.load(file, "cached", cache_rows=5)
    cached.gather([7])
    assert cached.stats.bytes_read == N * H * 4 == cached.row_bytes


def test_gather_has_the_shape_of_the_ids(table):
    lookups = TokenLookups(table)
    assert torch.equal(lookups.gather([[3, 5], [5, 3]]), table[torch.tensor([[3, 5], [5, 3]])])
    assert lookups.gather(torch.tensor(4)).shape == (N, H)
    assert lookups.gather(np.zeros((2, 0), dtype=int)).shape == (2, 0, N, H)
    assert torch.equal(lookups.layer(1, [8, 2]), table[[8, 2], 1])
    assert repr(lookups).startswith(f"TokenLookups(shape=({V}, {N}, {H}), stored=float32, backend='memory'")


@pytest.mark.parametrize("bits", [8, 4])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), exponent=st.integers(-7, 3), odd=st.booleans())
def test_quantisation_errs_by_half_a_step_at_most(bits, seed, exponent, odd):
    table = torch.randn(6, 2, 9 if odd else 8, generator=numbers(seed)) * 10.0**exponent
    table[3, 1] = 0
    lookups = TokenLookups(table).quantize(bits)
    step = lookups._scales.float()[..., None]
    assert bool(((lookups.gather(range(6)) - table).abs() <= step / 2 * (1 + 1e-5)).all())
    assert bool((lookups.gather([3])[0, 1] == 0).all())
    exact = table.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert bool((step <= exact * (1 + 2**-10) + 2**-24).all())


def test_quantisation_of_bfloat16_and_its_size(table):
    lookups = TokenLookups(table.bfloat16())
    assert lookups.quantize(8).gather([1]).dtype == torch.bfloat16
    assert lookups.quantize(8).nbytes == V * N * (H + 2)
    assert lookups.quantize(4).nbytes == V * N * (H // 2 + 2)
    with pytest.raises(ValueError, match="beyond what float16 scales reach"):
        TokenLookups(torch.full((1, 1, 2), 1e30)).quantize(8)


def test_low_rank_is_the_best_of_its_rank(table):
    with pytest.warns(UserWarning, match=r"rank 24 of 32 saves no space for 90 tokens: a rank of 23 or less would"):
        lookups = TokenLookups(table).low_rank(0.75)
    for i in range(N):
        u, s, v = torch.linalg.svd(table[:, i], full_matrices=False)
        best = (u[:, :24] * s[:24]) @ v[:24]
        assert torch.allclose(lookups.layer(i), best, atol=1e-4)
    small = TokenLookups(table).low_rank(0.25)
    assert small.nbytes == 4 * (V * N * 8 + N * 8 * H)
    with pytest.warns(UserWarning, match="saves no space"):
        assert torch.allclose(TokenLookups(table).low_rank(1.0).gather(range(V)), table, atol=1e-5)


def test_layers_that_are_left_out_read_as_zero(model, ids):
    model = build()
    some = model.precompute_lookups().select_layers([1])
    assert bool((some.gather(ids)[..., [0, 2], :] == 0).all())
    with model.drop_memory([0, 2]):
        expected = logits(model, ids)
    model.attach_lookups(some)
    assert torch.allclose(logits(model, ids), expected, atol=1e-6)


# The cache ------------------------------------------------------------------------------------------------------------


def test_least_recently_used_makes_room(table, file):
    lookups = TokenLookups.load(file, "cached", cache_rows=3)
    for token in (1, 2, 3, 1, 4):
        assert torch.equal(lookups.gather([token])[0], table[token])
    assert lookups._rows.cached_ids == [3, 1, 4]
    assert (lookups.stats.lookups, lookups.stats.hits, lookups.stats.misses) == (5, 1, 4)
    lookups.gather([2, 9, 8, 7, 6])
    assert lookups._rows.cached_ids == [7, 8, 9]
    assert lookups.stats.hit_rate == 1 / 10


@settings(max_examples=25, deadline=None)
@given(
    calls=st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=6), min_size=1, max_size=15),
    capacity=st.integers(1, 12),
    ahead=st.booleans(),
)
def test_a_cache_of_any_size_gives_the_same_rows(tmp_path_factory, calls, capacity, ahead):
    table = torch.randn(V, N, H, generator=numbers(2))
    path = tmp_path_factory.getbasetemp() / "property.safetensors"
    if not path.exists():
        TokenLookups(table).save(path)
    lookups = TokenLookups.load(path, "cached", cache_rows=capacity)
    distinct = 0
    for i, call in enumerate(calls):
        if ahead:
            lookups.prefetch(calls[i] if i % 3 else calls[-1])
        assert torch.equal(lookups.gather(call), table[call])
        distinct += len(set(call))
        assert len(lookups._rows.cached_ids) <= capacity
    stats = lookups.stats
    assert stats.hits + stats.misses == stats.lookups == distinct
    assert stats.bytes_read == stats.misses * lookups.row_bytes


def test_a_hot_set_stays(table, file):
    counts = {5: 10, 8: 9, 3: 8, 70: 1}
    lookups = TokenLookups.load(file, "cached", cache_rows=3, counts=counts)
    assert lookups._rows.cached_ids == [3, 5, 8]
    assert torch.equal(lookups.gather([5, 70, 8, 1]), table[[5, 70, 8, 1]])
    lookups.gather([1])
    assert (lookups.stats.hits, lookups.stats.misses) == (2, 3)
    assert lookups._rows.cached_ids == [3, 5, 8]
    dense = np.zeros(V)
    dense[[5, 8, 3, 70]] = [10, 9, 8, 1]
    assert TokenLookups.load(file, "cached", cache_rows=3, counts=dense)._rows.cached_ids == [3, 5, 8]


@pytest.mark.parametrize("options", [{"backend": "mmap"}, {"backend": "cached", "cache_rows": 4}])
def test_prefetching_reads_ahead(table, file, options):
    lookups = TokenLookups.load(file, **options)
    lookups.prefetch([4, 5, 6])
    assert torch.equal(lookups.gather([4, 5, 7]), table[[4, 5, 7]])
    assert (lookups.stats.prefetched, lookups.stats.misses) == (2, 3)
    if options["backend"] == "cached":
        assert set(lookups._rows.cached_ids) == {4, 5, 6, 7}
        lookups.prefetch([4])
        assert lookups._ahead is None
    lookups.prefetch([20])
    lookups.prefetch([21])
    assert torch.equal(lookups.gather([20, 21]), table[[20, 21]])
    memory = TokenLookups(table)
    memory.prefetch([1])
    assert memory._ahead is None


def test_the_model_reads_ahead(ids, tmp_path):
    model = build()
    computed = logits(model, ids)
    model.precompute_lookups().save(tmp_path / "tol.safetensors")
    lookups = TokenLookups.load(tmp_path / "tol.safetensors", "cached", cache_rows=6)
    model.attach_lookups(lookups, free_memory_weights=True)
    assert torch.equal(logits(model, ids), computed)
    assert lookups.stats.prefetched == lookups.stats.misses == len(torch.unique(ids))


GROWTH = """
import sys
from practicum.language.memoryllm import TokenLookups


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


lookups = TokenLookups.load(sys.argv[1], "cached", cache_rows=1000)
lookups.gather([0])
before = resident()
for token in range(4000):
    lookups.gather([token])
print(lookups.nbytes, lookups.resident_bytes, resident() - before)
"""


def test_memory_of_the_cache_is_bounded(tmp_path):
    """All rows of a table far larger than the cache are read; the process grows by less than twice the cache."""
    path = tmp_path / "large.safetensors"
    TokenLookups(torch.ones(4000, 8, 512)).save(path)
    # A process of its own: one that has given memory back before would take the cache from that.
    done = subprocess.run([sys.executable, "-c", GROWTH, str(path)], capture_output=True, text=True, check=True)
    table, cache, growth = map(int, done.stdout.split())
    assert table > 3.9 * cache
    assert 0.9 * cache < growth < 2 * cache


def test_two_processes_share_a_mapped_table(table, file):
    """The other process reads with safetensors alone, while this one has the file mapped."""
    script = """
import sys
from safetensors import safe_open
with safe_open(sys.argv[1], framework="numpy") as opened:
    rows = opened.get_slice("values")
    print(float(rows[3:4].astype("float64").sum()), flush=True)
    sys.stdin.readline()
    print(float(rows[70:71].astype("float64").sum()))
"""
    mine, again = (TokenLookups.load(file, backend="mmap") for _ in range(2))
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert float(other.stdout.readline()) == pytest.approx(float(table[3].double().sum()))
    assert torch.equal(mine.gather([3, 70]), table[[3, 70]])
    assert torch.equal(again.gather([3, 70]), table[[3, 70]])
    with pytest.raises(ValueError, match="read-only"):
        mine._rows.rows[0] = 0
    out, _ = other.communicate("\n", timeout=60)
    assert float(out) == pytest.approx(float(table[70].double().sum()))
    assert other.returncode == 0


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (torch.zeros(3, 4), r"table: must have shape \(tokens, layers, hidden size\); got \(3, 4\)"),
        (torch.zeros(3, 0, 4), r"got \(3, 0, 4\)"),
        (torch.zeros(3, 1, 4, dtype=torch.float64), "table: must be float32, float16 or bfloat16; got torch.float64"),
    ],
)
def test_bad_tables_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        TokenLookups(table)


@pytest.mark.parametrize("backend", ["memory", "mmap", "cached"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([0, V], f"ids: the table has tokens 0 to {V - 1}; got {V}"),
        ([-1], "got -1"),
        ([0.5], "ids: must be whole numbers; got float64"),
    ],
)
def test_bad_ids_are_refused(file, backend, wrong, message):
    lookups = TokenLookups.load(file, backend, cache_rows=3 if backend == "cached" else None)
    for look in (lookups.gather, lookups.prefetch):
        with pytest.raises(ValueError, match=message):
            look(wrong)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.quantize(3), "bits=3: must be 8 or 4"),
        (lambda t: t.quantize(8).quantize(4), "the table is quantised to 8 bits already"),
        (lambda t: t.low_rank(0), "rank_fraction=0: must be above 0 and at most 1"),
        (lambda t: t.low_rank(1.5), "rank_fraction=1.5"),
        (lambda t: t.quantize(8).low_rank(0.5), "low_rank: the table is compressed already"),
        (lambda t: t.select_layers([N]), f"layers: there are layers 0 to {N - 1}; got {N}"),
        (lambda t: t.select_layers([1, 1]), "layers: one is named twice"),
        (lambda t: t.select_layers([]), "layers: must name one at least"),
        (lambda t: t.select_layers([1]).select_layers([0]), "layers: 0 has no rows in this table"),
        (lambda t: t.layer(-1), "got -1"),
        (lambda t: t.layer(0, [V]), f"got {V}"),
    ],
)
def test_bad_requests_to_a_table_are_refused(table, call, message):
    with pytest.raises(ValueError, match=message):
        call(TokenLookups(table))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "disk"}, "backend='disk': must be one of 'memory', 'mmap', 'cached'"),
        ({"backend": "cached"}, "cache_rows=None: backend='cached' needs 1 to 90 rows"),
        ({"backend": "cached", "cache_rows": 91}, "cache_rows=91"),
        ({"backend": "mmap", "cache_rows": 3}, "cache_rows and counts are for backend='cached'"),
        ({"backend": "cached", "cache_rows": 3, "counts": [1, 2]}, r"counts: must have shape \(90,\)"),
        ({"backend": "cached", "cache_rows": 3, "counts": {90: 1}}, "counts: the table has tokens 0 to 89; got 90"),
    ],
)
def test_bad_ways_of_loading_are_refused(file, options, message):
    with pytest.raises(ValueError, match=message):
        TokenLookups.load(file, **options)


def rewritten(path, change):
    """The file with its metadata and tensors changed."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        metadata = dict(opened.metadata())
    tensors = load_file(path)
    change(metadata, tensors)
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-100]), "truncated or damaged"),
        (lambda p: p.write_bytes(b"not a table"), "truncated or damaged"),
        (lambda p: p.write_bytes(b""), "truncated or damaged"),
        (lambda p: p.unlink(), "there is no such file"),
        (lambda p: save_file({"x": torch.zeros(2)}, p), "is not a table of token lookups"),
        (
            lambda p: rewritten(p, lambda m, t: t.update(other=t.pop("values"))),
            "has no tensor 'values'; there are other",
        ),
        (
            lambda p: rewritten(p, lambda m, t: (m.update(bits="8"), t.update(values=t["values"].char()))),
            "no tensor 'sc",
        ),
        (lambda p: rewritten(p, lambda m, t: m.update(rank="32")), "has no tensor 'basis'"),
        (lambda p: rewritten(p, lambda m, t: m.update(hidden_size="31")), r"'values' is F32 of shape \(90, 3, 32\)"),
        (lambda p: rewritten(p, lambda m, t: m.update(dtype="float99")), "what it says of the table is damaged"),
        (lambda p: rewritten(p, lambda m, t: m.pop("layers")), "what it says of the table is damaged"),
    ],
)
def test_damaged_files_are_refused_with_their_path(file, damage, message):
    damage(file)
    with pytest.raises(ValueError, match=message) as refused:
        TokenLookups.load(file, "mmap")
    assert str(file) in str(refused.value)


def test_a_file_that_is_cut_while_it_is_open(file):
    lookups = TokenLookups.load(file, "cached", cache_rows=2)
    os.truncate(file, file.stat().st_size - 10)
    with pytest.raises(ValueError, match=f"ends before the row of token {V - 1}; it has been truncated"):
        lookups.gather([V - 1])


def test_tables_of_other_models_are_refused(model):
    lookups = model.precompute_lookups()
    other = build(seed=1)
    with pytest.raises(ValueError, match="were computed from other weights"):
        other.attach_lookups(lookups)
    other.attach_lookups(lookups, strict=False)
    with pytest.raises(ValueError, match="computed from other weights .fingerprint none"):
        other.attach_lookups(TokenLookups(torch.zeros(V, N, H)))
    for shape in ((V + 1, N, H), (V, N + 1, H), (V, N, H + 1)):
        with pytest.raises(ValueError, match=r"lookups: must have \(tokens, layers, hidden size\)"):
            build().attach_lookups(TokenLookups(torch.zeros(shape)), strict=False)


def test_the_fingerprint_sees_every_memory_weight_and_no_other():
    prints = {build().memory_fingerprint()}
    assert prints == {build().bfloat16().memory_fingerprint()}
    for pick in (
        lambda m: m.model.embed_tokens.weight[V - 1, 3:4],
        lambda m: m.model.layers[2].memory.down_proj.weight[5, 7:8],
        lambda m: m.model.layers[0].memory_norm.weight[3:4],
    ):
        changed = build()
        with torch.no_grad():
            pick(changed).add_(1.0)
        prints.add(changed.memory_fingerprint())
    assert len(prints) == 4
    changed = build()
    with torch.no_grad():
        changed.model.layers[0].self_attn.q_proj.weight.add_(1)
        changed.lm_head.weight.add_(1)
    assert changed.memory_fingerprint() in prints


def test_what_a_model_with_a_table_refuses(ids):
    model = build()
    embedded = model.model.embed_tokens(ids)
    assert torch.allclose(logits(model, ids), logits(model, None, inputs_embeds=embedded), atol=1e-4)
    model.attach_lookups(model.precompute_lookups())
    with pytest.raises(ValueError, match="inputs_embeds: a table is looked up by token"):
        model(inputs_embeds=embedded)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(ids, inputs_embeds=embedded)
    with pytest.raises(ValueError, match=f"ids: the table has tokens 0 to {V - 1}; got {V}"):
        model(torch.tensor([[V]]))
    model.resize_token_embeddings(V + 4)
    with pytest.raises(ValueError, match=f"the table has {V} tokens and the model {V + 4}, since its embeddings were"):
        model(ids)


def test_without_memory_weights(ids, tmp_path):
    model = build()
    whole = model.num_parameters()
    assert model.num_parameters(active=True) < whole
    expected = logits(model, ids)
    model.precompute_lookups().save(tmp_path / "tol.safetensors")
    model.attach_lookups(TokenLookups.load(tmp_path / "tol.safetensors", "mmap"), free_memory_weights=True)
    assert model.num_parameters() == model.num_parameters(active=True)
    with pytest.raises(RuntimeError, match="train: the memory weights have been freed"):
        model.train()
    with pytest.raises(ValueError, match="precompute_lookups: the memory weights have been freed"):
        model.precompute_lookups()
    with pytest.raises(ValueError, match="key_coefficients: the memory weights have been freed"):
        model.key_coefficients(0)
    model.save_pretrained(tmp_path / "slim")
    slim = AutoModelForCausalLM.from_pretrained(tmp_path / "slim")
    assert slim.num_parameters() == model.num_parameters()
    with pytest.raises(ValueError, match="the model has no memory weights: attach_lookups"):
        slim(ids)
    with pytest.raises(ValueError, match="computed from other weights"):
        slim.attach_lookups(build(seed=1).precompute_lookups())
    slim.attach_lookups(TokenLookups.load(tmp_path / "tol.safetensors"))
    assert torch.equal(logits(slim, ids), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float64}, "dtype=torch.float64: must be torch.float32"),
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
    ],
)
def test_precompute_refuses(model, options, message):
    with pytest.raises(ValueError, match=message):
        model.precompute_lookups(**options)


def test_what_float16_cannot_hold_is_refused():
    model = build()
    with torch.no_grad():
        model.model.layers[1].memory.down_proj.weight.mul_(1e6)
    with pytest.raises(ValueError, match=r"dtype=torch.float16: cannot hold .* of layer 1; take torch.bfloat16"):
        model.precompute_lookups(dtype=torch.float16)
    assert model.precompute_lookups(dtype=torch.bfloat16).dtype == torch.bfloat16


# Probes ---------------------------------------------------------------------------------------------------------------


def test_scaling_the_memory(model, ids):
    plain = logits(model, ids)
    with model.memory_scale(1.0):
        assert torch.equal(logits(model, ids), plain)
    with pytest.raises(KeyError), model.memory_scale(0.5):
        raise KeyError
    assert torch.equal(logits(model, ids), plain)
    with model.memory_scale(0.5), model.memory_scale(0.4, [0]), model.memory_scale(0.0, 2):
        assert model.model.memory_scales == [0.2, 0.5, 0.0]
        scaled = logits(model, ids)
    halved = build()
    with torch.no_grad():
        for layer, alpha in zip(halved.model.layers, (0.2, 0.5, 0.0), strict=True):
            layer.memory.down_proj.weight.mul_(alpha)
    assert torch.allclose(scaled, logits(halved, ids), atol=1e-4)


def test_dropping_all_memory_leaves_attention(ids):
    model = build()
    with model.drop_memory():
        dropped = logits(model, ids)
    assert bool(torch.isfinite(dropped).all())
    model.attach_lookups(model.precompute_lookups())
    with model.drop_memory():
        assert torch.equal(logits(model, ids), dropped)
    with pytest.raises(ValueError, match="alpha=nan: must be finite"), model.memory_scale(float("nan")):
        pass
    with pytest.raises(ValueError, match=f"layers: there are layers 0 to {N - 1}; got {N}"), model.drop_memory([N]):
        pass


def test_key_coefficients_make_the_output(model):
    for i, layer in enumerate(model.model.layers):
        c = model.key_coefficients(i)
        assert c.shape == (V, model.config.memory_intermediate_size)
        assert torch.allclose(c @ layer.memory.down_proj.weight.T, model.precompute_lookups().layer(i), atol=1e-4)
    assert torch.allclose(model.key_coefficients(1, [5, 3]), model.key_coefficients(1)[[5, 3]], atol=1e-5)
    shared = build(shared_memory_norm=True)
    down = shared.model.layers[2].memory.down_proj.weight
    assert torch.allclose(shared.key_coefficients(2) @ down.T, shared.precompute_lookups().layer(2), atol=1e-4)
    assert model.key_coefficients(0, []).shape == (0, model.config.memory_intermediate_size)
    for layer, token, message in ((N, [0], "got 3"), (0, [V], f"token_ids: the model has tokens 0 to {V - 1}")):
        with pytest.raises(ValueError, match=message):
            model.key_coefficients(layer, token)


def test_what_a_token_retrieves():
    model = build()
    layer = model.model.layers[1]
    with torch.no_grad():
        # The memory of token 4 points at the head's row of token 20 through key 6.
        q = layer.query(model.model.embed_tokens.weight[4])
        layer.memory.gate_proj.weight[6] = layer.memory.up_proj.weight[6] = 3 * q
        model.model.norm.weight.fill_(1)
        layer.memory.down_proj.weight[:, 6] = 100 * model.lm_head.weight[20]
    found, other = retrieve(model, 1, [4, 5], n_keys=4, n_tokens=3)
    assert found.keys[0] == 6
    assert found.promoted[0] == 20
    assert found.n_outlying >= 1
    assert found.keys.shape == (4,)
    assert np.all(np.diff(np.abs(found.coefficients)) <= 0)
    assert found.coefficients[0] == pytest.approx(float(model.key_coefficients(1, [4])[0, 6]))
    assert other.token_id == 5
    with pytest.raises(ValueError, match="n_keys=0: must be at least 1"):
        retrieve(model, 1, [4], n_keys=0)


def test_nearest_tokens(table):
    table[9] = -3 * table[4]
    table[11] = 2 * table[4]
    table[12] = 0
    found, cosines = nearest_tokens(TokenLookups(table), 1, [4, 12], n_tokens=V - 1)
    assert found[0, 0] == 11
    assert found[0, -1] == 9
    assert cosines[0, [0, -1]] == pytest.approx([1, -1], abs=1e-5)
    assert 4 not in found[0]
    assert np.all(cosines[1] == 0)
    with pytest.raises(ValueError, match=f"n_tokens={V}: there are {V - 1} other tokens"):
        nearest_tokens(TokenLookups(table), 1, [4], n_tokens=V)


def test_clusters_of_tokens_whose_keys_differ():
    words = [str(i) for i in range(30)] + [chr(97 + i % 26) * (1 + i // 26) for i in range(30)]
    words += ["?" * (i + 1) for i in range(30)]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="0")))
    model = build()
    with torch.no_grad():
        centres = torch.randn(3, H, generator=numbers(5))
        noise = 0.02 * torch.randn(V, H, generator=numbers(6))
        model.model.embed_tokens.weight.copy_(centres.repeat_interleave(30, 0) + noise)
    labels, report = cluster_tokens(model, 1, 3, tokenizer, random_state=0)
    assert all(len(set(labels[i : i + 30])) == 1 for i in (0, 30, 60))
    assert report.purity == 1
    assert report.purity_by_chance == pytest.approx(1 / 3)
    assert report.silhouette > 0.8
    assert sorted(report.sizes) == [30, 30, 30]
    assert all(len(example) == 8 for example in report.examples)
    again, _ = cluster_tokens(model, 1, 3, tokenizer, random_state=0)
    assert np.array_equal(labels, again)
    some, _ = cluster_tokens(model, 1, 2, tokenizer, token_ids=[0, 1, 60, 61])
    assert some[0] == some[1] != some[2] == some[3]
    with pytest.raises(ValueError, match="n_clusters=1: must be at least 2 and below the 90 tokens"):
        cluster_tokens(model, 1, 1, tokenizer)


# With transformers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"flex_beta": 1, "tie_word_embeddings": True}, {"shared_memory_norm": True}])
def test_saving_and_loading_by_the_auto_classes(options, ids, tmp_path):
    model = build(**options)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "practicum_memorylm"
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, MemoryLMConfig)
    assert config.memory_intermediate_size == model.config.memory_intermediate_size
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, MemoryLMForCausalLM)
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert again.memory_fingerprint() == model.memory_fingerprint()
    decoder = AutoModel.from_pretrained(tmp_path)
    assert isinstance(decoder, MemoryLMModel)
    with torch.no_grad():
        hidden = decoder(ids).last_hidden_state
    assert torch.allclose(model.lm_head(hidden), logits(model, ids), atol=1e-5)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    half.attach_lookups(model.precompute_lookups(dtype=torch.bfloat16))
    assert torch.allclose(logits(half, ids).float(), logits(model, ids), atol=0.5, rtol=0.1)


def test_hidden_states_and_attentions(model, ids):
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
        with Taps(model, [0, 2]) as taps:
            model(ids)
    assert len(out.hidden_states) == N + 1
    assert torch.equal(out.hidden_states[2], taps[2])
    eager = build(config=MemoryLMConfig(**SMALL, attn_implementation="eager"))
    with torch.no_grad():
        attentions = eager(ids, output_attentions=True).attentions
    assert attentions[0].shape == (2, 4, 17, 17)
    assert torch.allclose(logits(eager, ids), logits(model, ids), atol=1e-3)


class Rows(torch.utils.data.Dataset):
    def __init__(self, tokens):
        self.tokens = tokens

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"bf16": True}])
def test_trainer(options, ids, tmp_path):
    model = build(scale=1.0)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    arguments = TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=2, report_to=[], save_strategy="no", use_cpu=True, **options
    )
    result = Trainer(model, arguments, train_dataset=Rows(ids.repeat(2, 1))).train()
    assert math.isfinite(result.training_loss)
    assert all(not torch.equal(weight, before[name]) for name, weight in model.named_parameters() if weight.ndim > 1)


def test_checkpointed_gradients_are_the_same(ids):
    gradients = []
    for checkpointed in (False, True):
        model = build(flex_beta=1).train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], rtol=1e-4, atol=1e-6), name


def test_it_learns(ids):
    model = build(scale=1.0, flex_beta=1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


# From a dense model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dense():
    return build(LlamaForCausalLM, LlamaConfig(**SMALL, intermediate_size=64), scale=8.0)


def test_what_a_dense_model_hands_on(dense, ids):
    student = memory_lm_from_dense(dense)
    theirs = dense.state_dict()
    copied = [name for name in student.state_dict() if "memory" not in name]
    assert copied
    assert all(torch.equal(student.state_dict()[name], theirs[name]) for name in copied)
    assert student.config.memory_intermediate_size == 64
    flex = memory_lm_from_dense(dense, flex_beta=2, compute="linear")
    with flex.drop_memory(), student.drop_memory():
        assert torch.allclose(logits(flex, ids), logits(student, ids), atol=1e-5)
    assert torch.equal(
        memory_lm_from_dense(dense, random_state=3).model.layers[0].memory.gate_proj.weight,
        memory_lm_from_dense(dense, random_state=3).model.layers[0].memory.gate_proj.weight,
    )
    tied = build(LlamaForCausalLM, LlamaConfig(**SMALL, intermediate_size=64, tie_word_embeddings=True))
    converted = memory_lm_from_dense(tied)
    assert converted.lm_head.weight is converted.model.embed_tokens.weight
    with pytest.raises(ValueError, match="model: must be a Llama model.*got GPT2Config"):
        memory_lm_from_dense(GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1)))
    with pytest.raises(ValueError, match="got MemoryLMConfig"):
        memory_lm_from_dense(student)


def test_fitting_the_memory_to_a_dense_model(dense):
    text = torch.randint(0, 12, (20, 20), generator=numbers(7))
    student = memory_lm_from_dense(dense)
    kept = student.model.layers[0].self_attn.q_proj.weight.clone(), student.model.embed_tokens.weight.clone()
    report = fit_memory(student, dense, text, steps=120, token_batch_size=64)
    assert min(report["explained"]) > 0.9
    assert all(0 < share <= 1 for share in report["explainable"])
    assert torch.equal(kept[0], student.model.layers[0].self_attn.q_proj.weight)
    assert torch.equal(kept[1], student.model.embed_tokens.weight)
    fitted = student.precompute_lookups().layer(0, [3])[0]
    outputs = []
    for row in text:
        with torch.no_grad(), Taps(dense, 1, "mlp") as taps:
            dense(row[None])
        outputs.append(taps[1][0][row == 3])
    target = torch.cat(outputs).mean(0)
    assert float((fitted - target).norm() / target.norm()) < 0.5
    again = memory_lm_from_dense(dense)
    assert fit_memory(again, dense, text, steps=120, token_batch_size=64) == report


def test_fitting_refuses(dense):
    student = memory_lm_from_dense(dense)
    with pytest.raises(ValueError, match=r"input_ids: must have shape \(n, positions\); got \(3,\)"):
        fit_memory(student, dense, torch.tensor([1, 2, 3]))
    other = build(LlamaForCausalLM, LlamaConfig(**{**SMALL, "num_hidden_layers": 2}, intermediate_size=64))
    with pytest.raises(ValueError, match="teacher: has num_hidden_layers=2; the student 3"):
        fit_memory(student, other, torch.tensor([[1, 2]]))
    student.attach_lookups(student.precompute_lookups(), free_memory_weights=True)
    with pytest.raises(ValueError, match="student: its memory weights have been freed"):
        fit_memory(student, dense, torch.tensor([[1, 2]]))
