"""Taps: what they read and write, that nothing of them stays, and recordings in files."""

import json
import multiprocessing
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from practicum.toolbox import taps as taps_module
from practicum.toolbox.errors import InputError
from practicum.toolbox.taps import (
    Ragged,
    Steering,
    Taps,
    decoder_blocks,
    fingerprint,
    head_shape,
    n_layers,
    output_projection,
    record,
)

BLOCKS = 3
SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = {"num_key_value_heads": 1, "head_dim": 8}
GPT2 = {"vocab_size": 60, "n_embd": 16, "n_layer": BLOCKS, "n_head": 2, "bos_token_id": 1, "eos_token_id": None}
ARCHITECTURES = {
    "llama": SIZES | GROUPED,
    "qwen2": SIZES | {"num_key_value_heads": 1},
    "qwen3": SIZES | GROUPED,
    "gemma2": SIZES | GROUPED | {"sliding_window": 4},
    "gemma3_text": SIZES | GROUPED | {"sliding_window": 4},
    "phi": SIZES,
    "phi3": SIZES,
    "gpt2": GPT2,
    "gpt_neox": SIZES,
    "mixtral": SIZES | GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "falcon": SIZES | {"new_decoder_architecture": False, "parallel_attn": True},
}
# Its blocks have no module for the MLP, and their second half of the names is another.
OTHERS = {"opt": SIZES | {"ffn_dim": 32, "word_embed_proj_dim": 16}, "bloom": GPT2}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15], [16, 17, 18, 19, 20]]
# Attention sums over masked places in another order; float32 rounds that to this.
ROUNDING = {"rtol": 1e-4, "atol": 1e-5}


def build(name, **changes):
    config = CONFIG_MAPPING[name](**{**(ARCHITECTURES | OTHERS)[name], **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def models():
    return {name: build(name) for name in ARCHITECTURES}


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def model(models, request):
    return models[request.param]


@pytest.fixture(scope="module")
def llama(models):
    return models["llama"]


def n_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def padded(prompts, side):
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(p)) for p in prompts]
    ids = [r + p if side == "left" else p + r for p, r in zip(prompts, rows, strict=True)]
    real = [[1] * len(p) for p in prompts]
    mask = [r + p if side == "left" else p + r for p, r in zip(real, rows, strict=True)]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def one_by_one(model, layers, site="residual"):
    read = []
    for prompt in PROMPTS:
        with torch.no_grad(), Taps(model, layers, site) as taps:
            model(torch.tensor([prompt]))
        read.append({layer: taps[layer][0] for layer in layers})
    return read


# What is read ---------------------------------------------------------------------------------------------------------


def test_residual_is_hidden_states_of_transformers(model):
    ids = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
    with torch.no_grad(), Taps(model, range(BLOCKS + 1)) as taps:
        output = model(ids, output_hidden_states=True)
    assert n_layers(model) == len(decoder_blocks(model)) == BLOCKS
    for layer in range(BLOCKS):
        assert torch.equal(taps[layer], output.hidden_states[layer]), layer
    decoder = model.get_decoder()
    norm = [module for module in decoder.children() if "norm" in type(module).__name__.lower()][-1]
    with torch.no_grad():
        assert torch.allclose(norm(taps[BLOCKS]), output.hidden_states[BLOCKS], **ROUNDING)


def test_attention_and_mlp_are_what_the_modules_return(model):
    seen = {}
    names = {"attention": ("self_attn", "attn", "attention", "self_attention"), "mlp": ("mlp",)}
    block = decoder_blocks(model)[1]
    hooks = []
    for site, possible in names.items():
        module = next(getattr(block, name) for name in possible if hasattr(block, name))

        def keep(module, args, output, site=site):
            seen[site] = (output[0] if isinstance(output, tuple) else output).clone()

        hooks.append(module.register_forward_hook(keep))
    for site in names:
        with torch.no_grad(), Taps(model, 2, site) as taps:
            model(torch.tensor([[5, 6, 7]]))
        assert taps[2].shape == (1, 3, 16)
        assert torch.equal(taps[2], seen[site])
    for hook in hooks:
        hook.remove()


def test_residual_is_the_sum_of_its_parts(llama):
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad(), Taps(llama, [1, 2]) as stream, Taps(llama, 2, "attention") as a, Taps(llama, 2, "mlp") as m:
        llama(ids)
    assert torch.allclose(stream[2], stream[1] + a[2] + m[2], **ROUNDING)


@pytest.mark.parametrize("name", [*ARCHITECTURES, "opt"])
def test_heads_are_what_the_output_projection_takes(name):
    model = build(name)
    assert head_shape(model) == (BLOCKS, 2, 8)
    projection, seen = output_projection(model, 2), {}
    hook = projection.register_forward_pre_hook(lambda module, args: seen.update(x=args[0].clone()))
    with torch.no_grad(), Taps(model, 2, "heads") as taps:
        model(torch.tensor([[5, 6, 7]]))
    hook.remove()
    assert taps[2].shape == (1, 3, 16)
    assert torch.equal(taps[2], seen["x"])
    last = record(model, PROMPTS, 2, site="heads", dtype=torch.float32)[2]
    with torch.no_grad(), Taps(model, 2, "heads", positions="last") as taps:
        model(torch.tensor([PROMPTS[1]]))
    np.testing.assert_allclose(last[1], taps[2][0], **ROUNDING)


def test_heads_may_be_wider_than_the_residual_stream():
    model = build("qwen3", head_dim=12)
    assert head_shape(model) == (BLOCKS, 2, 12)
    assert record(model, PROMPTS, 1, site="heads")[1].shape == (len(PROMPTS), 24)
    assert record(model, PROMPTS, 1)[1].shape == (len(PROMPTS), 16)


@pytest.mark.parametrize("side", ["left", "right"])
def test_last_is_the_last_real_token(llama, side):
    inputs = padded(PROMPTS, side)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), Taps(llama, [0, 2], positions="last") as taps:
        llama(**inputs, position_ids=positions)
    for i, alone in enumerate(one_by_one(llama, [0, 2])):
        for layer in (0, 2):
            assert torch.allclose(taps[layer][i], alone[layer][-1], **ROUNDING)


def test_last_by_position_of_the_mask(models):
    gpt2 = models["gpt2"]
    inputs = padded(PROMPTS, "right")
    with torch.no_grad(), Taps(gpt2, 3, positions="last") as taps:
        # The decoder's own forward, its mask not given by keyword.
        gpt2.transformer(inputs["input_ids"], None, inputs["attention_mask"])
    for i, alone in enumerate(one_by_one(gpt2, [3])):
        assert torch.allclose(taps[3][i], alone[3][-1], **ROUNDING)


def test_last_without_a_mask_and_with_one_of_four_dimensions(llama):
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad(), Taps(llama, 1) as every, Taps(llama, 1, positions="last") as last:
        llama(ids)
    assert torch.equal(last[1], every[1][:, -1])
    mask = torch.zeros(1, 3, 3).masked_fill(torch.ones(3, 3).triu(1) > 0, torch.finfo(torch.float32).min)
    mask[:, :, 2] = torch.finfo(torch.float32).min
    with torch.no_grad(), Taps(llama, 1, positions="last") as last:
        llama(ids, attention_mask=mask[None])
    assert torch.allclose(last[1], every[1][:, 1], **ROUNDING)
    with pytest.raises(InputError, match=r"has shape \(1, 1, 1, 3\); for"), Taps(llama, 1, positions="last"):
        llama(ids, attention_mask=mask[None, :, :1])


def test_gradients_reach_what_is_read(llama):
    with Taps(llama, 2) as taps:
        loss = llama(torch.tensor([[5, 6, 7]])).logits.square().sum()
    (gradient,) = torch.autograd.grad(loss, taps[2])
    assert gradient.shape == (1, 3, 16)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_bfloat16(mode):
    model = build("llama").bfloat16()
    with mode(), Taps(model, [0, 3]) as taps:
        model(torch.tensor([[5, 6, 7]]))
    assert taps[3].dtype == torch.bfloat16
    found = record(model, PROMPTS, 3)[3]
    assert found.dtype == np.float16
    assert np.isfinite(found).all()


# Generation -----------------------------------------------------------------------------------------------------------


def test_every_step_of_generation_equals_one_pass(model):
    prompt = torch.tensor([[5, 6, 7, 8]])
    steps = []
    with Taps(model, [1, 3], on_forward=steps.append):
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)
    assert [step[1].shape[1] for step in steps] == [4, 1, 1, 1, 1]
    with torch.no_grad(), Taps(model, [1, 3]) as whole:
        model(made[:, :-1])
    for layer in (1, 3):
        assert torch.allclose(torch.cat([step[layer] for step in steps], 1), whole[layer], **ROUNDING)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_last_in_a_batch_that_is_generated(models, name, cache):
    llama = models[name]
    inputs = padded(PROMPTS, "left")
    steps = []
    with Taps(llama, 2, positions="last", on_forward=steps.append):
        llama.generate(**inputs, max_new_tokens=2, do_sample=False, cache_implementation=cache)
    for i, alone in enumerate(one_by_one(llama, [2])):
        assert torch.allclose(steps[0][2][i], alone[2][-1], **ROUNDING)
    assert steps[1][2].shape == (len(PROMPTS), 16)


def test_steering_in_generation(model):
    prompt = torch.tensor([[5, 6, 7, 8]])
    given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
    plain = model.generate(prompt, **given)
    with Steering(model, {2: lambda hidden: hidden}):
        assert torch.equal(model.generate(prompt, **given), plain)
    widths = []

    def push(hidden):
        widths.append(hidden.shape[1])
        return torch.full_like(hidden, 3.0) * torch.linspace(-1, 1, hidden.shape[-1])

    with Steering(model, {2: push}):
        model.generate(prompt, **given)
    assert widths == [4, 1, 1, 1, 1, 1]
    assert torch.equal(model.generate(prompt, **given), plain)


# Writing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("site", ["residual", "heads"])
@pytest.mark.parametrize(("positions", "back"), [("last", 0), (-1, 0), (-2, 1)])
def test_one_position_of_each_row_is_written(llama, side, site, positions, back):
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
    given = padded(prompts, side)
    with torch.no_grad(), Taps(llama, 2, site) as plain:
        llama(**given)
    rows = []

    def write(hidden):
        rows.append(hidden)
        return hidden + 1

    steering = Steering(llama, {2: write}, site, positions=positions)
    with torch.no_grad(), steering, Taps(llama, 2, site) as steered:
        llama(**given)
    width = given["input_ids"].shape[1]
    changed = (steered[2] != plain[2]).all(-1)
    for i, prompt in enumerate(prompts):
        place = (width if side == "left" else len(prompt)) - 1 - back
        assert changed[i].nonzero().flatten().tolist() == [place]
        assert torch.equal(rows[0][i], plain[2][i, place])
    assert rows[0].shape == (3, 16)


def test_a_position_that_a_row_has_not_is_refused(llama):
    with Steering(llama, {2: torch.zeros_like}, positions=-2), pytest.raises(InputError, match="row 2 has 1 tokens"):
        llama(**padded(PROMPTS[:3], "right"))
    for positions in (0, 3, "first", True):
        with pytest.raises(
            InputError, match=r"positions=.*: must be None \(all of them\), 'last' or a whole number below 0"
        ):
            Steering(llama, {2: torch.zeros_like}, positions=positions)


@pytest.mark.parametrize("site", ["residual", "attention", "mlp", "heads"])
def test_what_is_written_is_read(model, site):
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad(), Taps(model, 3) as before:
        plain = model(ids).logits
    steering = Steering(model, {2: torch.zeros_like}, site)
    with torch.no_grad(), steering, Taps(model, 2, site) as taps, Taps(model, 3) as after:
        changed = model(ids).logits
    assert not taps[2].any()
    assert not torch.equal(before[3], after[3])
    assert not torch.equal(changed, plain)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain)


def test_steering_the_embeddings(model):
    ids, other = torch.tensor([[5, 6, 7]]), torch.tensor([[9, 8, 20]])
    with torch.no_grad(), Taps(model, 0) as taps:
        wanted = model(other).logits
    with torch.no_grad(), Steering(model, {0: lambda hidden: taps[0]}):
        assert torch.allclose(model(ids).logits, wanted, **ROUNDING)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda hidden: None, r"functions\[2\]: returned NoneType; must return a tensor"),
        (lambda hidden: hidden[:, :1], r"functions\[2\]: returned shape"),
        (lambda hidden: hidden.double(), r"functions\[2\]: returned dtype torch.float64; must be torch.float32"),
    ],
)
def test_steering_checks_what_comes_back(llama, function, message):
    before = n_hooks(llama)
    with pytest.raises(InputError, match=message), Steering(llama, {2: function}):
        llama(torch.tensor([[5, 6, 7]]))
    assert n_hooks(llama) == before


# Leaving the model as it was ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_stays_after_an_exception(model, error):
    before = n_hooks(model)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        plain = model(ids).logits

    def interrupt(hidden):
        raise error

    taps, steering = Taps(model, [0, 1, 3]), Steering(model, {2: interrupt})
    with torch.no_grad(), pytest.raises(error), taps, Taps(model, 2, "mlp"), steering:
        model(ids)
    assert n_hooks(model) == before
    with pytest.raises(InputError, match="have read nothing"):
        taps[1]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain)


def test_nothing_stays_when_on_forward_fails(llama):
    before = n_hooks(llama)
    with pytest.raises(ZeroDivisionError), Taps(llama, 1, on_forward=lambda read: 1 / 0):
        llama(torch.tensor([[5]]))
    assert n_hooks(llama) == before


def test_a_pass_that_fails_does_not_mix_with_the_one_before(llama):
    with torch.no_grad(), Taps(llama, [1, 3]) as taps:
        llama(torch.tensor([[5, 6]]))
        first = taps[1].clone()
        with pytest.raises(RuntimeError), Steering(llama, {2: lambda hidden: hidden @ torch.zeros(3)}):
            llama(torch.tensor([[7, 8]]))
        assert torch.equal(taps[1], first)


def test_entering_twice_and_nesting(llama):
    before = n_hooks(llama)
    taps = Taps(llama, 1)
    with taps:
        with pytest.raises(InputError, match="active already"):
            taps.__enter__()
        with Taps(llama, 2) as inner:
            llama(torch.tensor([[5, 6]]))
        llama(torch.tensor([[5, 6, 7]]))
        assert inner[2].shape[1] == 2
    assert taps[1].shape[1] == 3
    assert n_hooks(llama) == before
    with taps:
        llama(torch.tensor([[5]]))
    assert taps[1].shape[1] == 1
    assert n_hooks(llama) == before


def test_wrapped_by_peft(llama):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules=["q_proj"], r=2))
    model.eval()
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad(), Taps(model, [1], positions="last") as adapted, Taps(llama, [1], positions="last") as plain:
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
        llama(ids)
    assert torch.equal(adapted[1], plain[1])
    assert fingerprint(model) != fingerprint(llama)
    assert np.array_equal(record(model, PROMPTS, 2)[2], record(llama, PROMPTS, 2)[2])


def test_spread_over_devices_by_accelerate(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    plain, spread = build("llama"), build("llama")
    devices = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    devices |= {f"model.layers.{i}": "disk" if i == 1 else "cpu" for i in range(BLOCKS)}
    accelerate.dispatch_model(spread, devices, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert spread.model.layers[1].mlp.up_proj.weight.is_meta
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad(), Taps(spread, range(BLOCKS + 1)) as far, Taps(plain, range(BLOCKS + 1)) as near:
        spread(ids)
        plain(ids)
    for layer in range(BLOCKS + 1):
        assert torch.equal(far[layer], near[layer])
    assert np.array_equal(record(spread, PROMPTS, 2)[2], record(plain, PROMPTS, 2)[2])
    assert fingerprint(spread) == fingerprint(plain)
    assert spread.model.layers[1].mlp.up_proj.weight.is_meta


# Recordings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("site", ["residual", "mlp"])
def test_batched_equals_one_by_one(model, side, site):
    layers = [1, 3]
    wanted = one_by_one(model, layers, site)
    given = {"site": site, "padding_side": side, "batch_size": 3, "dtype": torch.float32}
    last = record(model, PROMPTS, layers, **given)
    every = record(model, PROMPTS, layers, positions="all", **given)
    for layer in layers:
        assert last[layer].shape == (len(PROMPTS), 16)
        for i, alone in enumerate(wanted):
            np.testing.assert_allclose(every[layer][i], alone[layer], **ROUNDING)
            np.testing.assert_allclose(last[layer][i], alone[layer][-1], **ROUNDING)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 59), min_size=1, max_size=9), min_size=1, max_size=7),
    st.integers(1, 8),
    st.sampled_from(["left", "right"]),
)
def test_order_and_batches_make_no_difference(prompts, batch_size, side):
    llama = SHARED.setdefault("llama", build("llama"))
    given = {"positions": "all", "dtype": torch.float32}
    found = record(llama, prompts, 3, batch_size=batch_size, padding_side=side, **given)[3]
    for prompt, one in zip(prompts, found, strict=True):
        np.testing.assert_allclose(one, record(llama, [prompt], 3, **given)[3][0], **ROUNDING)


SHARED = {}


def test_blocks_above_and_the_head_are_not_run(llama):
    ran = []
    hooks = [llama.lm_head.register_forward_hook(lambda *_: ran.append("head"))]
    hooks += [b.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, b in enumerate(llama.model.layers)]
    record(llama, [[5, 6]], [0, 2])
    assert ran == [0, 1]
    for hook in hooks:
        hook.remove()


def test_dropout_is_off_and_training_goes_on():
    model = build("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()
    model.transformer.h[0].mlp.eval()
    before = [module.training for module in model.modules()]
    first, second = (record(model, PROMPTS, 3)[3] for _ in range(2))
    assert np.array_equal(first, second)
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("positions", ["last", "all"])
def test_a_store_is_the_same_as_memory_and_is_opened_again(llama, tmp_path, positions):
    given = {"positions": positions, "batch_size": 2}
    plain = record(llama, PROMPTS, [0, 2], **given)
    stored = record(llama, PROMPTS, [0, 2], store=tmp_path / "s", **given)
    # A store that is complete is opened, not recorded again: this steering would show.
    with Steering(llama, {1: torch.zeros_like}):
        again = record(llama, PROMPTS, [0, 2], store=tmp_path / "s", **given)
    for found in (stored, again):
        assert list(found) == [0, 2]
        for layer in found:
            for one, other in zip(found[layer], plain[layer], strict=True):
                assert np.array_equal(one, other)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s"]
    # Writable, for torch; the file is not changed by it.
    torch.as_tensor(stored[2][0])[:] = 7
    assert np.array_equal(record(llama, PROMPTS, [0, 2], store=tmp_path / "s", **given)[2][0], plain[2][0])


def test_a_killed_recording_goes_on(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(taps_module, "SECONDS_BETWEEN_SAVES", 0.0)
    store = tmp_path / "s"
    prompts = [[i + 1] * (9 - i % 5) for i in range(10)]
    given = {"batch_size": 2, "store": store}

    def stop(done, total):
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(llama, prompts, 2, progress=stop, **given)
    assert not store.exists()
    done = []
    found = record(llama, prompts, 2, progress=lambda n, total: done.append((n, total)), **given)
    assert done == [(8, 10), (10, 10)]
    assert np.array_equal(found[2], record(llama, prompts, 2, batch_size=2)[2])


def test_a_half_of_another_recording_is_not_gone_on_with(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(taps_module, "SECONDS_BETWEEN_SAVES", 0.0)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(llama, PROMPTS, 2, batch_size=1, progress=stop, store=tmp_path / "s")
    others = [[7, 7, 7], *PROMPTS[1:]]
    done = []
    found = record(llama, others, 2, batch_size=1, progress=lambda n, _: done.append(n), store=tmp_path / "s")
    assert done == [1, 2, 3, 4]
    assert np.array_equal(found[2], record(llama, others, 2, batch_size=1)[2])


def test_a_store_of_something_else_is_refused(llama, models, tmp_path):
    store = tmp_path / "s"
    record(llama, PROMPTS, 2, store=store)
    for other, what in [
        (lambda: record(llama, PROMPTS[:2], 2, store=store), "prompts, shape"),
        (lambda: record(llama, PROMPTS, 1, store=store), "layers"),
        (lambda: record(models["qwen2"], PROMPTS, 2, store=store), "model"),
        (lambda: record(llama, PROMPTS, 2, dtype=torch.float32, store=store), "dtype"),
    ]:
        with pytest.raises(InputError, match=f"holds a recording of other {what}; give another path"):
            other()
    (tmp_path / "notes").mkdir()
    with pytest.raises(InputError, match="is there and is no recording"):
        record(llama, PROMPTS, 2, store=tmp_path / "notes")
    (store / "layer-2.npy").write_bytes((store / "layer-2.npy").read_bytes()[:100])
    with pytest.raises(InputError, match="is damaged"):
        record(llama, PROMPTS, 2, store=store)


def hold(folder, ready, release):
    with taps_module._only_writer(folder, folder):
        ready.set()
        release.wait(60)


def test_two_processes_do_not_write_one_store(llama, tmp_path):
    context = multiprocessing.get_context("fork")
    ready, release = context.Event(), context.Event()
    (tmp_path / ".s.partial").mkdir()
    other = context.Process(target=hold, args=(tmp_path / ".s.partial", ready, release))
    other.start()
    try:
        assert ready.wait(60)
        with pytest.raises(InputError, match="another process is writing it"):
            record(llama, PROMPTS, 2, store=tmp_path / "s")
    finally:
        release.set()
        other.join()
    assert record(llama, PROMPTS, 2, store=tmp_path / "s")[2].shape == (4, 16)


def test_memory_holds_a_batch_not_the_store(tmp_path):
    model = build("llama", hidden_size=256, head_dim=128, num_hidden_layers=1)
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12]] * 1500
    tracemalloc.start()
    try:
        record(model, prompts, [0, 1], positions="all", batch_size=100, store=tmp_path / "s")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    written = sum(file.stat().st_size for file in (tmp_path / "s").glob("*.npy"))
    assert written > 12e6
    assert peak < written / 10


def test_too_large_for_float16(llama):
    def swell(hidden):
        return hidden * torch.where(torch.arange(hidden.shape[1]) == 2, 1e7, 1.0)[:, None]

    with Steering(llama, {2: swell}):
        message = r"layer 2: input_ids\[0\] has an activation that is not finite at position 2; dtype=torch.float32"
        with pytest.raises(InputError, match=message):
            record(llama, [[5, 6, 7, 8], [9]], 2, positions="all")
        assert np.isfinite(record(llama, [[5, 6, 7, 8]], 2, positions="all", dtype=torch.float32)[2].flat).all()


def test_ragged():
    three = Ragged(np.arange(12).reshape(6, 2), np.array([0, 1, 3, 6]))
    assert [len(one) for one in three] == [1, 2, 3]
    assert [len(one) for one in three[1:]] == [2, 3]
    assert three[-1].base is not None
    with pytest.raises(IndexError):
        three[3]


# Fingerprints ---------------------------------------------------------------------------------------------------------


def test_fingerprint_is_of_the_weights(model, tmp_path):
    before = fingerprint(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert fingerprint(loaded) == before
    assert fingerprint(loaded.get_decoder()) == before
    assert fingerprint(loaded.bfloat16()) == before
    with torch.no_grad():
        decoder_blocks(loaded)[1].get_parameter(next(n for n, _ in decoder_blocks(loaded)[1].named_parameters())).mul_(
            2
        )
    assert fingerprint(loaded) != before


def test_fingerprints_differ_between_models(models):
    assert len({fingerprint(model) for model in models.values()}) == len(models)
    assert fingerprint(build("llama", rope_parameters={"rope_type": "default", "rope_theta": 5.0})) != fingerprint(
        models["llama"]
    )


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4,), "layers: 4 must be from 0 to 3"),
        (([1, -1],), "layers: -1 must be from 0 to 3"),
        ((True,), "layers: True must be from 0 to 3"),
        ((1.0,), "layers: 1.0 must be from 0 to 3"),
        (([],), r"layers=\[\]: must have one layer at least"),
        ((0, "mlp"), "layers: 0 must be from 1 to 3"),
        ((1, "head"), "site='head': must be one of 'residual', 'attention', 'mlp'"),
        ((1, "residual", "first"), "positions='first': must be None"),
    ],
)
def test_bad_taps(llama, arguments, message):
    with pytest.raises(InputError, match=message):
        Taps(llama, *arguments)


def test_reading_another_layer_or_too_early(llama):
    with Taps(llama, [1, 2]) as taps:
        with pytest.raises(InputError, match="have read nothing"):
            taps[1]
        llama(torch.tensor([[5]]))
    with pytest.raises(InputError, match="layer=3: the tapped layers are 1, 2"):
        taps[3]


def test_models_that_have_no_such_parts(llama):
    with pytest.raises(InputError, match="model=Linear: must be a causal language model"):
        Taps(torch.nn.Linear(2, 2), 1)
    encoder = T5ForConditionalGeneration(
        T5Config(vocab_size=60, d_model=16, d_ff=32, num_layers=2, num_heads=2, d_kv=8)
    )
    with pytest.raises(InputError, match="is an encoder with a decoder"):
        Taps(encoder, 1)
    odd = build("llama")
    odd.config.num_hidden_layers = 2
    with pytest.raises(
        InputError, match="must have one outermost ModuleList of 2 blocks, its num_hidden_layers; found 0"
    ):
        decoder_blocks(odd)
    opt, bloom = build("opt"), build("bloom")
    with pytest.raises(InputError, match="site='mlp': no module of block 1 can be told to be it, among self_attn"):
        Taps(opt, 1, "mlp")
    with pytest.raises(InputError, match="site='attention': self_attention of block 2 adds the residual stream"):
        Taps(bloom, 2, "attention")
    for model in (opt, bloom):
        with torch.no_grad(), Taps(model, range(4)) as taps:
            states = model(torch.tensor([[5, 6, 7]]), output_hidden_states=True).hidden_states
        assert all(torch.equal(taps[layer], states[layer]) for layer in range(3))
    with pytest.raises(InputError, match="functions: 9 must be from 0 to 3"):
        Steering(llama, {9: torch.zeros_like})
    with pytest.raises(InputError, match=r"functions\[1\]=3: must be a function"):
        Steering(llama, {1: 3})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": []}, "input_ids: is empty"),
        ({"input_ids": "abc"}, "input_ids='abc': must be a sequence"),
        ({"input_ids": [[1], []]}, r"input_ids\[1\]=\[\]: must be a sequence of token ids, one at least"),
        ({"input_ids": [[1], [2.5]]}, r"input_ids\[1\]=\[2.5\]: must be a sequence of token ids"),
        ({"input_ids": [[1], [60]]}, r"input_ids\[1\]: has token 60; must be from 0 to 59"),
        ({"batch_size": 0}, "batch_size=0: must be a whole number, 1 or more"),
        ({"dtype": torch.bfloat16}, "dtype=torch.bfloat16: must be torch.float16 or torch.float32"),
        ({"positions": "first"}, "positions='first': must be one of 'last', 'all'"),
        ({"padding_side": "top"}, "padding_side='top': must be one of 'left', 'right'"),
    ],
)
def test_bad_recordings(llama, change, message):
    with pytest.raises(InputError, match=message):
        record(**{"model": llama, "input_ids": PROMPTS, "layers": 1, **change})


def test_a_full_disk_is_said(llama, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(taps_module.os, "posix_fallocate", full)
    with pytest.raises(InputError, match="GB cannot be written: No space left on device"):
        record(llama, PROMPTS, 2, store=tmp_path / "s")


def test_the_index_says_what_is_in_the_store(llama, tmp_path):
    record(llama, PROMPTS, [1, 2], store=tmp_path / "s")
    index = json.loads((tmp_path / "s" / "index.json").read_text())
    assert index["model"] == fingerprint(llama)
    assert (index["layers"], index["site"], index["shape"]) == ([1, 2], "residual", [4, 16])
