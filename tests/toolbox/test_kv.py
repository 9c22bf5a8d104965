"""The attention tap: it sees what goes in, changes what it is told to, and leaves no trace."""

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from practicum.toolbox.errors import InputError
from practicum.toolbox.kv import AttentionCall, AttentionTap, ReceivedAttention

SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "mistral": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=4)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=8)),
    "phi": (PhiForCausalLM, PhiConfig(**SMALL)),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SMALL, num_local_experts=2)),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0),
    ),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**SMALL, head_dim=8, sliding_window=4)),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig(**SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=4),
    ),
}
BOTH = ["llama", "mistral", "qwen3", "phi", "mixtral", "gpt2"]
CASES = [(name, "sdpa") for name in BOTH] + [(name, "eager") for name in MODELS]


def build(name, implementation="sdpa", seed=0):
    kind, config = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(seed)
        return kind._from_config(config, attn_implementation=implementation).eval()


@pytest.fixture(scope="module")
def llama():
    return build("llama")


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, 60, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def left_padded():
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    return mask


def left_behind():
    keys = [*AttentionInterface._global_mapping, *AttentionMaskInterface._global_mapping]
    return [key for key in keys if "practicum" in key]


def seen_by(mask, window):
    """Which keys each row sees, bool (2, 9, 9), from first principles."""
    rows, keys = torch.arange(9)[:, None], torch.arange(9)[None]
    seen = (keys <= rows) & (keys > rows - (window or 99))
    return seen[None] & mask[:, None].bool()


@pytest.mark.parametrize(("name", "implementation"), CASES)
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_it_sees_every_layer_and_changes_nothing(name, implementation, padded, ids, left_padded):
    model = build(name, implementation)
    mask = left_padded if padded else None
    plain = model(ids, attention_mask=mask).logits
    calls = []
    with AttentionTap(model, calls.append) as tap:
        tapped = model(ids, attention_mask=mask).logits
    assert torch.equal(tapped, plain)
    assert [call.layer for call in calls] == [1, 2] == list(tap.layers)
    assert model.config._attn_implementation == implementation
    assert not left_behind()
    full = left_padded if padded else torch.ones_like(left_padded)
    for call in calls:
        window = 4 if name in ("mistral",) or (name in ("gemma2", "gpt_oss") and call.layer == 1) else None
        expected = seen_by(full, window)
        assert torch.equal(call.visible(slice(None))[:, 0].expand(2, 9, 9), expected)
        assert torch.equal(call.keys_seen(), expected.sum(-1))
        band = call.band()
        assert (band.offset, band.window) == (0, window)
        assert torch.equal(band.visible(0, 9, 9, "cpu").expand(2, 9, 9), expected)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma2"])
@torch.no_grad()
def test_logits_are_those_of_eager_attention(name, ids, left_padded):
    model = build(name, "eager")
    calls = []
    with AttentionTap(model, calls.append):
        attentions = model(ids, attention_mask=left_padded, output_attentions=True).attentions
    for call, probabilities in zip(calls, attentions, strict=True):
        ours = call.logits(slice(None)).softmax(-1).nan_to_num(0)
        assert torch.allclose(ours[1], probabilities[1], atol=1e-6)
        assert torch.allclose(ours[0, :, 3:], probabilities[0, :, 3:], atol=1e-6)
        rows = torch.tensor([8, 4])
        some = call.logits(slice(None))[:, :, rows, 2:7]
        assert torch.allclose(call.logits(rows, slice(2, 7)), some, atol=1e-6)


@torch.no_grad()
def test_replacing_queries_is_scaling_the_logits(llama, ids):
    with AttentionTap(llama, lambda call: call.replace(query=2 * call.query), layers=2):
        ours = llama(ids).logits
    attention = llama.model.layers[1].self_attn
    attention.q_proj.weight.mul_(2)
    expected = llama(ids).logits
    attention.q_proj.weight.div_(2)
    assert torch.allclose(ours, expected, atol=1e-6)
    assert not torch.allclose(ours, llama(ids).logits, atol=1e-3)


@torch.no_grad()
def test_taps_nest_and_end_in_any_order(llama, ids):
    plain = llama(ids).logits
    queries = []
    first = AttentionTap(llama, lambda call: call.replace(query=call.query + 1), layers=1)
    second = AttentionTap(llama, lambda call: queries.append(call.query.clone()), layers=1)
    first.__enter__()
    second.__enter__()
    changed = llama(ids).logits
    first.__exit__()
    assert torch.equal(llama(ids).logits, plain)
    second.__exit__()
    assert torch.allclose(queries[0], queries[1] + 1)
    assert not torch.equal(changed, plain)
    assert llama.config._attn_implementation == "sdpa"
    assert not left_behind()


@torch.no_grad()
def test_generation_with_a_cache(llama, ids):
    plain = llama.generate(ids, max_new_tokens=3, do_sample=False)
    sizes, passes = [], []

    def observe(call):
        sizes.append((call.query.shape[2], call.key.shape[2]))

    with AttentionTap(llama, observe, 1, lambda: passes.append(1)):
        tapped = llama.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(plain, tapped)
    assert sizes == [(9, 9), (1, 10), (1, 11)]
    assert len(passes) == 3


@torch.no_grad()
def test_a_static_cache_is_a_band_too(llama, ids):
    calls = []
    with AttentionTap(llama, calls.append, 1):
        llama.generate(ids, max_new_tokens=3, do_sample=False, cache_implementation="static", disable_compile=True)
    assert [(call.query.shape[2], call.key.shape[2]) for call in calls] == [(9, 11), (1, 11), (1, 11)]
    assert [call.keys_seen()[:, -1].tolist() for call in calls] == [[9, 9], [10, 10], [11, 11]]
    assert all(call.band() is not None for call in calls)


def test_it_is_gone_after_an_exception(llama, ids):
    def fail(call):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), AttentionTap(llama, fail):
        llama(ids)
    assert llama.config._attn_implementation == "sdpa"
    assert not left_behind()
    with torch.no_grad():
        llama(ids)


def test_another_implementation_set_meanwhile_stays(ids):
    model = build("llama")
    with AttentionTap(model, lambda call: None):
        model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    assert not left_behind()


def test_another_model_with_the_same_configuration_is_not_tapped(llama, ids):
    other = LlamaForCausalLM(llama.config).eval()
    layers = []
    with torch.no_grad(), AttentionTap(llama, lambda call: layers.append(call.layer)):
        other(ids)
    assert layers == []


def test_gradients_and_checkpointing(ids):
    model = build("llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    phases = []
    tap = AttentionTap(model, lambda call: phases.append((call.layer, tap.in_forward)))
    with tap:
        model(ids, labels=ids).loss.backward()
    assert phases == [(1, True), (2, True), (2, False), (1, False)]
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_wrapped_by_peft(llama, ids):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build("llama"), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    layers = []
    with torch.no_grad(), AttentionTap(model, lambda call: layers.append(call.layer)):
        model(ids)
    assert layers == [1, 2]


def test_masks_that_are_no_band():
    q = k = torch.zeros(1, 2, 5, 4)

    def call(mask, **options):
        return AttentionCall(1, torch.nn.Identity(), q, k, k, mask, 1.0, True, "sdpa", options)

    causal = torch.ones(5, 5).tril().bool()[None, None]
    assert call(causal).band() is not None
    packed = causal.clone()
    packed[..., 3:, :3] = False
    assert call(packed).band() is None
    assert call(packed).keys_seen().tolist() == [[1, 2, 3, 1, 2]]
    assert call(torch.ones_like(causal)).band() is None
    assert call(causal.expand(1, 2, 5, 5)).band() is None
    bias = torch.where(causal, -0.5, torch.finfo(torch.float32).min)
    assert call(bias).band() is None
    assert call(bias).logits(slice(0, 1))[0, 0, 0].tolist() == [-0.5] + [-torch.inf] * 4
    assert call(None, position_bias=torch.zeros(1, 2, 5, 5)).band() is None


def test_it_refuses(llama, ids):
    bloom = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2))
    with pytest.raises(InputError, match="model=Bloom.*does not go through the AttentionInterface registry"):
        AttentionTap(bloom, print)
    with pytest.raises(InputError, match="model=Linear: must be a causal language model"):
        AttentionTap(torch.nn.Linear(2, 2), print)
    with pytest.raises(InputError, match="layers: 0 must be from 1 to 2"):
        AttentionTap(llama, print, 0)
    with pytest.raises(InputError, match="observe=None: must be a function"):
        AttentionTap(llama, None)
    tap = AttentionTap(llama, lambda call: None)
    with tap, pytest.raises(InputError, match="is active already"):
        tap.__enter__()
    with AttentionTap(llama, lambda call: 3), pytest.raises(InputError, match="observe: returned int"):
        llama(ids)
    with (
        AttentionTap(llama, lambda call: call.replace(key=call.key[:, :, :2])),
        pytest.raises(InputError, match="key: has shape"),
    ):
        llama(ids)


# What keys receive --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_received_attention_is_what_eager_attention_sums_to(name, window):
    model = build(name, "eager")
    ids = torch.randint(1, 60, (2, 11), generator=torch.Generator().manual_seed(0))
    with ReceivedAttention(model, window) as seen:
        attentions = model(ids, output_attentions=True).attentions
    assert seen.rows == (window or 11)
    for layer, expected in enumerate(attentions, start=1):
        rows = expected[:, :, -(window or 11) :].sum(2)
        torch.testing.assert_close(seen.received[layer], rows.float(), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_received_attention_of_parts_is_that_of_the_whole():
    model, ids = build("llama"), torch.randint(1, 60, (1, 12), generator=torch.Generator().manual_seed(0))
    with ReceivedAttention(model) as whole:
        model(ids)
    with ReceivedAttention(model) as parts:
        cache = None
        for a, b in ((0, 5), (5, 9), (9, 12)):
            cache = model(ids[:, a:b], cache=cache, use_cache=True).cache
    assert parts.rows == whole.rows == 12
    for layer, found in whole.received.items():
        torch.testing.assert_close(parts.received[layer], found, atol=1e-5, rtol=1e-5)
    with ReceivedAttention(model, window=2) as last:
        model(ids[:, 9:], cache=model(ids[:, :9], use_cache=True).cache, use_cache=True)
    with ReceivedAttention(model, window=2) as expected:
        model(ids)
    torch.testing.assert_close(last.received[2], expected.received[2], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_prompt_after_another_begins_anew():
    model, ids = build("llama"), torch.randint(1, 60, (1, 8), generator=torch.Generator().manual_seed(0))
    with ReceivedAttention(model, layers=2) as twice:
        model(ids.flip(1))
        model(ids)
    with ReceivedAttention(model, layers=2) as once:
        model(ids)
    assert list(twice.received) == [2]
    assert twice.rows == once.rows == 8
    assert torch.equal(twice.received[2], once.received[2])


@torch.no_grad()
def test_padding_changes_nothing_for_tokens():
    model, ids = build("llama"), torch.randint(1, 60, (1, 6), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), ids], dim=1)
    mask = (torch.arange(9) >= 3)[None].long()
    with ReceivedAttention(model) as alone:
        model(ids)
    with ReceivedAttention(model) as seen:
        model(padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0))
    torch.testing.assert_close(seen.received[1][..., 3:], alone.received[1], atol=1e-5, rtol=1e-5)
    # What padding receives comes from the three rows of padding alone.
    assert float(seen.received[2][..., :3].sum(-1).max()) <= 3 + 1e-5
    assert not bool(seen.received[1].isnan().any())


def test_a_window_of_no_rows_is_refused():
    with pytest.raises(InputError, match="window=0: must be 1 or more rows"):
        ReceivedAttention(build("llama"), window=0)
