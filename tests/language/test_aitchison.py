"""Aitchison geometry of attention: definitions, laws, the linear path, the monitor and the scale."""

import json
import math
import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from practicum.language.aitchison import (
    AitchisonCallback,
    AitchisonState,
    AttentionMonitor,
    LengthExponents,
    LengthScaledAttention,
    aitchison_distance,
    aitchison_norm,
    attention_statistics,
    causal_aitchison,
    clr,
    critical_inverse_temperature,
    expected_aitchison_norm,
    length_scale,
    mean_squared_aitchison_norm,
    min_inverse_temperature,
    sharpening_inverse_temperature,
)
from practicum.toolbox.errors import InputError
from practicum.toolbox.kv import AttentionTap

SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def numbers(seed=0):
    return torch.Generator().manual_seed(seed)


def build(kind=LlamaForCausalLM, config=None, implementation="sdpa"):
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(0)
        model = kind._from_config(config or LlamaConfig(**SMALL), attn_implementation=implementation).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "q_proj" in name or "k_proj" in name:
                    weight.mul_(15)  # attention of fresh weights is all but uniform
    return model


@pytest.fixture(scope="module")
def llama():
    return build()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, 60, (2, 40), generator=numbers(1))


def keep_logits(found):
    return lambda call: found.update({call.layer: call.logits(slice(None))})


def keep_query(found):
    return lambda call: found.update({call.layer: call.query})


def compositions(n, parts, seed=0):
    return torch.rand(n, parts, dtype=torch.float64, generator=numbers(seed)).add(0.01).pow(3).T.div(1).T


def closed(x):
    return x / x.sum(-1, keepdim=True)


# Geometry -------------------------------------------------------------------------------------------------------------


def test_clr_of_a_known_composition():
    p = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    expected = torch.tensor([-0.44058528, -0.03512017, 0.47570545], dtype=torch.float64)
    assert torch.allclose(clr(p), expected, atol=1e-8)
    assert torch.allclose(clr(p.log(), from_logits=True), expected, atol=1e-8)


def test_distance_is_that_of_the_log_ratios_of_all_pairs():
    p, r = closed(compositions(100, 7)), closed(compositions(100, 7, seed=1))
    ours = aitchison_distance(p, r, from_logits=False, normalized=False)
    x, y = p.numpy(), r.numpy()
    for i in range(100):
        pairs = np.log(x[i][:, None] / x[i][None]) - np.log(y[i][:, None] / y[i][None])
        assert ours[i] == pytest.approx(math.sqrt((pairs**2).sum() / 14), abs=1e-10)
        centred = np.log(x[i]) - np.log(x[i]).mean() - np.log(y[i]) + np.log(y[i]).mean()
        assert ours[i] == pytest.approx(np.linalg.norm(centred), abs=1e-10)
    assert torch.allclose(clr(p).sum(-1), torch.zeros(100, dtype=torch.float64), atol=1e-12)


def test_distance_is_a_metric_that_perturbation_leaves_alone():
    p, r, s, a = (closed(compositions(50, 6, seed)) for seed in range(4))

    def d(x, y):
        return aitchison_distance(x, y, from_logits=False)

    assert torch.equal(d(p, r), d(r, p))
    assert bool((d(p, s) <= d(p, r) + d(r, s) + 1e-12).all())
    assert torch.allclose(d(closed(a * p), closed(a * r)), d(p, r), atol=1e-12)
    powered = closed(p**2.5)
    assert torch.allclose(
        aitchison_norm(powered, from_logits=False), 2.5 * aitchison_norm(p, from_logits=False), atol=1e-12
    )
    assert torch.allclose(d(p, torch.full_like(p, 1 / 6)), aitchison_norm(p, from_logits=False), atol=1e-12)


def test_the_normalised_norm_is_the_standard_deviation_of_the_logits():
    z = torch.randn(5, 30, generator=numbers(), dtype=torch.float64)
    assert torch.allclose(aitchison_norm(z), z.std(1, correction=0))
    assert torch.allclose(aitchison_norm(z, beta=3.0), aitchison_norm((3 * z).softmax(1), from_logits=False))
    pairs = (z[:, :, None] - z[:, None]).square().mean((1, 2)).sqrt()
    assert torch.allclose(pairs, math.sqrt(2) * aitchison_norm(z))
    far = torch.tensor([0.0, -2000.0])  # the softmax of which has a zero
    assert aitchison_norm(far).item() == pytest.approx(1000.0)


def test_masked_parts_do_not_count():
    z = torch.randn(4, 9, generator=numbers())
    mask = torch.arange(9) < 5
    assert torch.allclose(aitchison_norm(z.masked_fill(~mask, -torch.inf), mask=mask), aitchison_norm(z[:, :5]))
    assert aitchison_norm(z, mask=torch.zeros(9, dtype=torch.bool)).isnan().all()
    assert torch.equal(aitchison_norm(z, mask=torch.arange(9) < 1), torch.zeros(4))
    assert torch.equal(clr(z, from_logits=True, mask=mask)[:, 5:], torch.zeros(4, 4))
    assert aitchison_norm(z.half()).dtype == torch.float32


def test_zeros_are_replaced_only_when_asked():
    p = torch.tensor([0.0, 0.4, 0.6])
    with pytest.raises(InputError, match="p: has zeros.*zero_replacement"):
        clr(p)
    replaced = torch.tensor([0.01, 0.4 * 0.99, 0.6 * 0.99])
    assert torch.allclose(clr(p, zero_replacement=0.01), clr(replaced))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: clr(torch.tensor([0.2, 0.2])), "p: sums to 0.4; must sum to 1"),
        (lambda: clr(torch.tensor([-0.2, 1.2])), "p: has negative entries"),
        (lambda: clr(torch.tensor([1, 2])), "p: is torch.int64"),
        (lambda: aitchison_norm(torch.ones(2, dtype=torch.complex64)), "x: is torch.complex64"),
        (lambda: aitchison_norm(torch.tensor([1.0, torch.nan])), "x: has values that are not finite"),
        (lambda: aitchison_norm(torch.tensor([1.0, -torch.inf])), "x: has values that are not finite; give a mask"),
        (lambda: aitchison_norm(torch.ones(3), mask=torch.ones(4, dtype=torch.bool)), "mask: has shape"),
        (lambda: aitchison_norm(torch.ones(3), mask=torch.ones(3)), "mask: is torch.float32"),
        (lambda: aitchison_norm(torch.ones(3), dim=1), "dim=1"),
        (lambda: aitchison_norm(torch.ones(3), beta=-1.0), "beta=-1.0"),
        (lambda: aitchison_norm(torch.ones(3), zero_replacement=0.1), "zero_replacement=0.1: goes with"),
        (lambda: clr(torch.tensor([0.0, 1.0]), zero_replacement=2.0), "zero_replacement=2.0: must be above 0"),
        (lambda: aitchison_distance(torch.ones(2), torch.ones(3)), "y: has shape"),
        (lambda: min_inverse_temperature(torch.ones(3), 1.0), "p_max=1.0: must be between 0 and 1"),
        (lambda: sharpening_inverse_temperature(torch.ones(3), 0.0), "p_max=0.0"),
        (lambda: expected_aitchison_norm(0, 4), "n_keys=0"),
        (lambda: critical_inverse_temperature(0), "n_keys=0"),
        (lambda: critical_inverse_temperature(4, 0.0), "std=0.0"),
        (lambda: mean_squared_aitchison_norm(4, torch.eye(2), torch.eye(3)), "key_covariance: has shape"),
    ],
)
def test_geometry_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Laws -----------------------------------------------------------------------------------------------------------------


def test_expected_norm_in_one_dimension():
    assert expected_aitchison_norm(2, 1, normalized=False) == pytest.approx(2 / math.pi)
    assert expected_aitchison_norm(1, 8) == 0.0
    assert expected_aitchison_norm(10**6, 8) == pytest.approx(0.9693, abs=1e-4)
    assert expected_aitchison_norm(10**6, 64) == pytest.approx(0.9961, abs=1e-4)


@pytest.mark.parametrize(("n", "d"), [(5, 1), (16, 8), (200, 64)])
def test_expected_norm_agrees_with_monte_carlo(n, d):
    q = torch.randn(2000, 1, d, dtype=torch.float64, generator=numbers(2))
    k = torch.randn(2000, n, d, dtype=torch.float64, generator=numbers(3))
    norms = aitchison_norm((k @ q.mT)[..., 0] / math.sqrt(d), normalized=False)
    error = float(norms.std() / math.sqrt(2000))
    assert float(norms.mean()) == pytest.approx(expected_aitchison_norm(n, d, normalized=False), abs=4 * error)


def test_mean_square_for_any_covariance():
    d, n = 6, 40
    a, b = (torch.randn(d, d, dtype=torch.float64, generator=numbers(s)) for s in (4, 5))
    mean = torch.linspace(-1, 1, d, dtype=torch.float64)
    q = torch.randn(6000, 1, d, dtype=torch.float64, generator=numbers(6)) @ a.mT + mean
    k = torch.randn(6000, n, d, dtype=torch.float64, generator=numbers(7)) @ b.mT + 3.0
    squares = aitchison_norm((k @ q.mT)[..., 0] / math.sqrt(d), normalized=False) ** 2
    expected = mean_squared_aitchison_norm(n, a @ a.mT + torch.outer(mean, mean), b @ b.mT, normalized=False)
    assert float(squares.mean()) == pytest.approx(float(expected), abs=4 * float(squares.std()) / math.sqrt(6000))


ROWS = st.lists(
    st.one_of(st.floats(-50, 50, width=32), st.sampled_from([0.0, 1.0, 1.0, 300.0])), min_size=1, max_size=40
)


@settings(max_examples=150, deadline=None)
@given(ROWS, st.floats(0.02, 0.98))
def test_no_row_is_sharp_below_the_bound(row, tau):
    z = torch.tensor(row, dtype=torch.float64)
    least, exact = float(min_inverse_temperature(z, tau)), float(sharpening_inverse_temperature(z, tau))
    assert exact >= least * (1 - 1e-9)
    n, tied = len(row), row.count(max(row))
    if n == 1 or tau * n <= 1:
        assert (least, exact) == (0.0, 0.0)
    elif tau * tied >= 1:
        assert exact == math.inf
    elif exact < 1e6:
        assert float((exact * z).softmax(0).max()) == pytest.approx(tau, rel=1e-6)


def test_the_bound_is_met_where_the_others_are_equal():
    for n, tau, gap in ((2, 0.9, 0.5), (17, 0.5, 2.0), (1000, 0.3, 7.0)):
        z = torch.zeros(n, dtype=torch.float64)
        z[3 % n] = gap
        expected = math.log(tau * (n - 1) / (1 - tau)) / gap
        assert float(sharpening_inverse_temperature(z, tau)) == pytest.approx(expected, rel=1e-12)
        assert float(min_inverse_temperature(z, tau)) == pytest.approx(expected, rel=1e-12)


def test_the_edges_of_the_bound():
    equal = torch.zeros(4)
    assert min_inverse_temperature(equal) == math.inf
    assert sharpening_inverse_temperature(equal) == math.inf
    assert min_inverse_temperature(equal, 0.2) == 0.0
    assert min_inverse_temperature(torch.tensor([3.0])) == 0.0
    z = torch.tensor([[5.0, 5.0, 0.0], [5.0, 1.0, 0.0]])
    assert sharpening_inverse_temperature(z, 0.5).tolist()[0] == math.inf
    assert math.isfinite(sharpening_inverse_temperature(z, 0.4)[0])
    masked = torch.tensor([[5.0, 1.0, -torch.inf]])
    assert torch.equal(
        sharpening_inverse_temperature(masked, mask=masked > -torch.inf), sharpening_inverse_temperature(masked[:, :2])
    )
    assert torch.equal(sharpening_inverse_temperature(z.T, dim=0), sharpening_inverse_temperature(z))


def test_the_critical_temperature_parts_sharp_from_flat():
    n = 2**17
    z = torch.randn(40, n, generator=numbers(8)) * 1.7
    beta = critical_inverse_temperature(n, 1.7)

    def p_max(factor):
        return float((factor * beta * z).softmax(1).amax(1).mean())

    assert p_max(0.4) < 0.02
    assert p_max(2.0) > 0.5


# The linear path ------------------------------------------------------------------------------------------------------


def dense(q, k, scaling, mask=None, window=None, first=0):
    (b, heads, m, _), n = q.shape, k.shape[2]
    z = q.double() @ k.repeat_interleave(heads // k.shape[1], 1).double().mT * scaling
    rows, keys = torch.arange(m)[:, None] + n - m, torch.arange(n)[None]
    seen = (keys <= rows) & (keys > rows - (window or n + 1))
    real = torch.ones(b, n, dtype=torch.bool) if mask is None else mask
    shown = real & (real.long().cumsum(1) > first)
    norm = aitchison_norm(z, mask=seen[None, None] & shown[:, None, None])
    return torch.where(real[:, None, n - m :], norm, torch.nan)


def padding(kind, n):
    mask = torch.ones(2, n, dtype=torch.bool)
    if kind == "left":
        mask[0, : n // 3] = False
    if kind == "right":
        mask[1, n - n // 4 :] = False
    return None if kind == "none" else mask


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["none", "left", "right"])
@pytest.mark.parametrize("window", [None, 1, 33, 150])
def test_linear_equals_dense(dtype, kind, window):
    for (m, n), chunk in (((300, 300), 128), ((77, 205), 7), ((40, 40), 1), ((1, 130), 128), ((1, 1), 128)):
        for first in (0, 2):
            q = torch.randn(2, 6, m, 16, dtype=dtype, generator=numbers(m))
            k = torch.randn(2, 2, n, 16, dtype=dtype, generator=numbers(n + 1)) + 3
            mask = padding(kind, n)
            ours = causal_aitchison(
                q, k, scaling=0.25, mask=mask, chunk_size=chunk, sliding_window=window, exclude_first=first
            )
            expected = dense(q, k, 0.25, mask, window, first)
            assert ours.dtype == dtype
            assert torch.equal(ours.isnan(), expected.isnan())
            large = expected > 0.05
            error = ((ours.double() - expected).abs() / expected)[large]
            assert bool((error < (1e-9 if dtype == torch.float64 else 1e-4)).all())
            small = ~large & ~expected.isnan()
            assert bool(((ours.double() - expected).abs()[small] < 1e-3).all())


def test_a_large_common_offset_of_the_keys_does_not_matter():
    q = torch.randn(1, 2, 400, 16, generator=numbers(1))
    k = torch.randn(1, 2, 400, 16, generator=numbers(2))
    offset = torch.zeros(16)
    offset[0] = 1e3
    shifted = causal_aitchison(q, k + offset, scaling=0.25)
    assert float((shifted - causal_aitchison(q, k, scaling=0.25)).abs().max()) < 1e-3


def test_half_precision_is_widened():
    q, k = torch.randn(2, 1, 2, 60, 8, generator=numbers()).bfloat16()
    ours = causal_aitchison(q, k, scaling=0.3)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, causal_aitchison(q.float(), k.float(), scaling=0.3))


def test_other_masks_and_caps_are_computed_by_blocks():
    q, k = torch.randn(2, 1, 2, 50, 8, generator=numbers(), dtype=torch.float64)
    z = q @ k.mT
    causal = torch.ones(50, 50).tril().bool()
    alibi = -0.1 * (torch.arange(50)[:, None] - torch.arange(50)[None]).double()
    bias = alibi.masked_fill(~causal, torch.finfo(torch.float64).min)[None, None]
    assert torch.allclose(causal_aitchison(q, k, scaling=1.0, mask=bias), aitchison_norm(z + alibi, mask=causal))
    packed = causal & (torch.arange(50)[:, None] // 25 == torch.arange(50)[None] // 25)
    assert torch.allclose(causal_aitchison(q, k, scaling=1.0, mask=packed[None, None]), aitchison_norm(z, mask=packed))
    assert torch.allclose(
        causal_aitchison(q, k, scaling=1.0, softcap=2.0), aitchison_norm(2 * torch.tanh(z / 2), mask=causal)
    )
    without = causal & (torch.arange(50) >= 3)
    assert torch.allclose(
        causal_aitchison(q, k, scaling=1.0, softcap=2.0, exclude_first=3),
        aitchison_norm(2 * torch.tanh(z / 2), mask=without),
        equal_nan=True,
    )


class Largest(TorchDispatchMode):
    """The most elements that any tensor had."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


def test_no_tensor_of_all_pairs_is_made():
    n, d, heads = 4096, 16, 2
    q, k = torch.randn(2, 1, heads, n, d, generator=numbers())
    with Largest() as largest:
        causal_aitchison(q, k, scaling=0.25)
        causal_aitchison(q, k, scaling=0.25, sliding_window=1000, exclude_first=4)
    assert largest.elements <= 2 * heads * n * d < n * n / 50


def test_decoding_equals_prefill_and_does_not_slow_down():
    q, k = torch.randn(2, 2, 4, 60, 8, generator=numbers())
    k = k[:, :2]
    state, rows = AitchisonState(), []
    for i in range(60):
        state.update(k[:, :, i : i + 1])
        rows.append(state.row(q[:, :, i : i + 1], scaling=0.3))
    assert torch.allclose(torch.cat(rows, 2), causal_aitchison(q, k, scaling=0.3), atol=1e-5)
    assert state.n_keys == 60

    def seconds(n):
        keys = torch.randn(1, 4, n, 64, generator=numbers(n))
        state, taken = AitchisonState(), []
        state.update(keys)
        for _ in range(60):
            begun = time.process_time()
            for _ in range(10):
                state.update(keys[:, :, :1])
                state.row(keys[:, :, :1], scaling=0.1)
            taken.append(time.process_time() - begun)
        return min(taken)

    assert seconds(8192) / seconds(512) < 1.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(1, 3, 5, 8)}, "key: has 3 heads; the 4 of query must be a multiple"),
        ({"key": torch.zeros(1, 2, 5, 9)}, "key: has shape"),
        ({"key": torch.zeros(1, 2, 4, 8)}, "key: has 4 keys; must have at least the 5"),
        ({"query": torch.zeros(4, 5, 8)}, "query: is"),
        ({"query": torch.zeros(1, 4, 5, 8, dtype=torch.int64)}, "query: is"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"exclude_first": -1}, "exclude_first=-1"),
        ({"mask": torch.ones(1, 4, dtype=torch.bool)}, "mask: has shape"),
        ({"mask": torch.ones(1, 5)}, "mask: has shape"),
    ],
)
def test_the_linear_path_refuses(change, message):
    good = {"query": torch.zeros(1, 4, 5, 8), "key": torch.zeros(1, 2, 5, 8), "scaling": 1.0}
    with pytest.raises(InputError, match=message):
        causal_aitchison(**{**good, **change})


def test_the_state_refuses():
    state = AitchisonState()
    with pytest.raises(InputError, match="has no keys"):
        state.row(torch.zeros(1, 1, 1, 4), scaling=1.0)
    state.update(torch.zeros(1, 2, 1, 4))
    with pytest.raises(InputError, match=r"key: has shape \(1, 3, 1, 4\); must be \(1, 2, m, 4\)"):
        state.update(torch.zeros(1, 3, 1, 4))
    with pytest.raises(InputError, match="query: has shape"):
        state.row(torch.zeros(1, 3, 1, 4), scaling=1.0)


# The monitor ----------------------------------------------------------------------------------------------------------


def statistics(p):
    """Of probabilities (..., n), from first principles."""
    entropy = -(p * p.clamp_min(1e-45).log()).sum(-1)
    return {
        "entropy": entropy,
        "max_prob": p.amax(-1),
        "effective_tokens": entropy.exp(),
        "participation": 1 / p.square().sum(-1),
    }


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_the_monitor_agrees_with_eager_attention(implementation, ids):
    model = build(implementation=implementation)
    mask = torch.ones_like(ids)
    mask[0, :10] = 0
    plain = model(ids, attention_mask=mask).logits
    metrics = ("aitchison", "entropy", "max_logit", "max_prob", "effective_tokens", "participation")
    with AttentionMonitor(model, metrics=metrics) as monitor:
        watched = model(ids, attention_mask=mask).logits
    assert torch.equal(plain, watched)
    assert model.config._attn_implementation == implementation
    assert monitor.n_rows == int(mask.sum()) == 70
    attentions = build(implementation="eager")(ids, attention_mask=mask, output_attentions=True).attentions
    real, result = mask.bool(), monitor.result()
    for layer, p in enumerate(attentions):
        rows = [p[b, :, i, : i + 1] for b in range(2) for i in range(40) if real[b, i]]
        rows = [row[:, row[0] > 0] for row in rows]
        for name in ("entropy", "max_prob", "effective_tokens", "participation"):
            expected = torch.stack([statistics(row)[name] for row in rows]).mean(0)
            assert torch.allclose(result[name][layer], expected, rtol=1e-4), name
        expected = torch.stack([row.double().log().std(1, correction=0) for row in rows]).mean(0)
        assert torch.allclose(result["aitchison"][layer].double(), expected, rtol=1e-4)


@torch.no_grad()
def test_without_a_mask_rows_are_still_causal(llama, ids):
    """sdpa is given no mask for a plain causal one."""
    masks = []
    with AttentionTap(llama, lambda call: masks.append(call.attention_mask)), AttentionMonitor(llama) as one:
        llama(ids)
    assert masks == [None, None]
    with AttentionMonitor(llama) as other:
        llama(ids, attention_mask=torch.cat([torch.zeros(2, 1), torch.ones(2, 39)], 1).long())
    assert one.n_rows == 80
    assert other.n_rows == 78
    lengths, means = one.by_length("entropy")
    assert lengths.tolist() == [1, 2, 4, 8, 16, 32]
    assert torch.allclose(means[..., 0], torch.zeros(2, 4), atol=1e-6)
    assert bool((means[..., 1:] > 0).all())
    assert bool((means[..., 1] <= math.log(3)).all())


@torch.no_grad()
def test_windows_and_caps_in_models(ids):
    mistral = build(MistralForCausalLM, MistralConfig(**SMALL, sliding_window=8))
    with AttentionMonitor(mistral, metrics=("aitchison", "effective_tokens"), reduce="max") as monitor:
        mistral(ids)
    assert float(monitor.result()["effective_tokens"].max()) <= 8 + 1e-4
    gemma = build(Gemma2ForCausalLM, Gemma2Config(**SMALL, head_dim=8, sliding_window=8), "eager")
    p = []
    with AttentionMonitor(gemma, metrics="aitchison") as monitor:
        attentions = gemma(ids, output_attentions=True).attentions
    for attention, window in zip(attentions, (8, 40), strict=True):
        rows = [attention[b, :, i, max(0, i - window + 1) : i + 1] for b in range(2) for i in range(40)]
        p.append(torch.stack([row.double().log().std(1, correction=0) for row in rows]).mean(0))
    assert torch.allclose(monitor.result()["aitchison"].double(), torch.stack(p), rtol=1e-4)


@torch.no_grad()
def test_generation_is_watched_step_by_step(llama, ids):
    with AttentionMonitor(llama, metrics=("aitchison", "entropy")) as monitor:
        out = llama.generate(ids, max_new_tokens=4, do_sample=False)
    assert len(monitor.history) == 4
    with AttentionMonitor(llama, metrics=("aitchison", "entropy")) as whole:
        llama(out[:, :-1])
    for metric in ("aitchison", "entropy"):
        assert torch.allclose(monitor.result()[metric], whole.result()[metric], rtol=1e-4)


@torch.no_grad()
def test_sampled_rows_bound_the_cost(llama, ids):
    with AttentionMonitor(llama, sample_rows=5) as sampled:
        llama(ids)
    assert sampled.n_rows == 80  # the norm is of all rows
    calls = []
    with AttentionTap(llama, calls.append):
        llama(ids)
    rows = torch.tensor([8, 16, 23, 31, 39])
    expected = attention_statistics(calls[0], ["entropy"], rows=rows)["entropy"].mean((0, 2))
    assert torch.allclose(sampled.result()["entropy"][0], expected)


@torch.no_grad()
def test_alarms_name_the_head_that_is_off(ids):
    model = build()
    monitor = AttentionMonitor(model, metrics=("aitchison",))
    generator = numbers(5)
    clean = [torch.randint(1, 60, (8, 40), generator=generator) for _ in range(8)]
    monitor.calibrate(clean)
    assert not monitor._active
    other = torch.randint(1, 60, (8, 40), generator=generator)
    with monitor:
        model(other)
    assert monitor.alarms(z=12.0) == []
    monitor.reset()
    model.model.layers[1].self_attn.q_proj.weight[8:16] *= 3  # head 1
    with monitor:
        model(other)
    assert [(layer, head) for layer, head, _ in monitor.alarms(z=12.0)] == [(2, 1)]
    assert monitor.z_scores()[1, 1] > 12


@torch.no_grad()
def test_figures(llama, ids):
    with AttentionMonitor(llama, layers=[2]) as monitor:
        llama(ids)
    figure = monitor.figure("entropy")
    page = json.loads(figure.to_json())
    assert [trace["type"] for trace in page["data"]] == ["scatter", "heatmap"]
    assert page["data"][0]["name"] == "layer 2"
    assert "plotly" in figure.to_html(include_plotlyjs="cdn")


@torch.no_grad()
def test_a_sink_takes_its_share_of_the_probabilities(ids):
    config = GptOssConfig(**SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=64)
    model = build(GptOssForCausalLM, config, "eager")
    for layer, block in enumerate(model.model.layers):
        block.self_attn.sinks.fill_(1.0 + layer)
    with AttentionMonitor(model, metrics=("aitchison", "max_prob", "entropy")) as monitor:
        attentions = model(ids, output_attentions=True).attentions
    for layer, p in enumerate(attentions):
        rows = [p[b, :, i, : i + 1] for b in range(2) for i in range(40)]
        assert min(float(row.sum(1).min()) for row in rows) < 0.9
        top = torch.stack([row.amax(1) for row in rows]).mean(0)
        norm = torch.stack([row.double().log().std(1, correction=0) for row in rows]).mean(0)
        whole = [torch.cat([row, 1 - row.sum(1, keepdim=True)], 1) for row in rows]
        entropy = torch.stack([statistics(row)["entropy"] for row in whole]).mean(0)
        assert torch.allclose(monitor.result()["max_prob"][layer], top, rtol=1e-4)
        assert torch.allclose(monitor.result()["entropy"][layer], entropy, rtol=1e-3)
        assert torch.allclose(monitor.result()["aitchison"][layer].double(), norm, rtol=1e-4)


def test_the_monitor_gives_the_model_back(llama, ids):
    with pytest.raises(KeyboardInterrupt), AttentionMonitor(llama):
        raise KeyboardInterrupt
    assert llama.config._attn_implementation == "sdpa"
    assert "practicum" not in str(llama.config._attn_implementation)


def test_the_monitor_refuses(llama, ids):
    for arguments, message in (
        ({"metrics": ("kurtosis",)}, "metrics: 'kurtosis' must be among aitchison, entropy"),
        ({"metrics": ()}, "metrics="),
        ({"reduce": "sum"}, "reduce='sum'"),
        ({"exclude_first": -1}, "exclude_first=-1"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"sample_rows": 0}, "sample_rows=0"),
        ({"layers": 3}, "layers: 3 must be from 1 to 2"),
    ):
        with pytest.raises(ValueError, match=message):
            AttentionMonitor(llama, **arguments)
    monitor = AttentionMonitor(llama, metrics=("aitchison",))
    with pytest.raises(InputError, match="has measured nothing"):
        monitor.result()
    with pytest.raises(InputError, match="is not calibrated"):
        monitor.alarms()
    with pytest.raises(InputError, match="batches: has 1; must have two"):
        monitor.calibrate([ids])
    with pytest.raises(InputError, match="metric='entropy': must be among"):
        monitor.by_length("entropy")
    with pytest.raises(InputError, match="z=0"):
        monitor.alarms(z=0)
    with monitor, pytest.raises(RuntimeError, match="is active already"):
        monitor.__enter__()


# In training ----------------------------------------------------------------------------------------------------------


class Scalars(TrainerCallback):
    """What an integration such as TensorBoard's gets."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append((state.global_step, dict(logs)))


def trained(tmp_path, callback, steps=4, **arguments):
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1, 60, (64, 20), generator=numbers(3)).tolist()]
    given = TrainingArguments(
        str(tmp_path), max_steps=steps, logging_steps=2, report_to="none", use_cpu=True, disable_tqdm=True, **arguments
    )
    scalars = Scalars()
    model = build()
    trainer = Trainer(model, given, train_dataset=rows, callbacks=[scalars])
    if callback is not None:
        callback.attach(trainer)
    trainer.train()
    return trainer, scalars


def test_the_callback_logs_through_the_trainer(tmp_path):
    callback = AitchisonCallback(every=2, metrics=("aitchison", "entropy"))
    trainer, scalars = trained(tmp_path, callback)
    names = {f"{m}_{what}" for m in ("aitchison", "entropy") for what in ("mean", "max", "layer1", "layer2")}
    for step, logs in scalars.seen[:2]:
        assert names <= logs.keys()
        assert all(math.isfinite(logs[name]) for name in names)
        assert logs["aitchison_mean"] == pytest.approx((logs["aitchison_layer1"] + logs["aitchison_layer2"]) / 2)
        assert names <= next(entry for entry in trainer.state.log_history if entry["step"] == step).keys()
    assert [step for step, _ in callback.history] == [1, 3]
    assert trainer.model.config._attn_implementation == "sdpa"
    assert len(callback.figure("entropy").data) == 2


def test_watching_does_not_change_the_training(tmp_path):
    watched, _ = trained(tmp_path / "a", AitchisonCallback(every=1))
    plain, _ = trained(tmp_path / "b", None)
    for ours, theirs in zip(watched.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_collapse_stops_the_training(tmp_path):
    calm = AitchisonCallback(every=1, stop_at=60.0, calibration=5)
    trainer, _ = trained(tmp_path / "calm", calm, steps=12, learning_rate=1e-5)
    assert (calm.alarms, trainer.state.global_step) == ([], 12)
    wild = AitchisonCallback(every=1, stop_at=60.0, calibration=5)
    trainer, _ = trained(tmp_path / "wild", wild, steps=40, learning_rate=0.5, warmup_steps=30)
    assert wild.alarms
    assert trainer.state.global_step == wild.alarms[0][0] < 40
    assert trainer.model.config._attn_implementation == "sdpa"


def test_the_callback_refuses(llama):
    for arguments, message in (
        ({"every": 0}, "every=0"),
        ({"stop_at": -1.0}, "stop_at=-1.0"),
        ({"stop_at": 4.0, "metrics": ("entropy",)}, "metrics must have 'aitchison'"),
        ({"calibration": 1}, "calibration=1"),
    ):
        with pytest.raises(InputError, match=message):
            AitchisonCallback(**arguments)
    with pytest.raises(InputError, match="nothing of it was measured"):
        AitchisonCallback().figure()


# Length scaling -------------------------------------------------------------------------------------------------------


def test_laws():
    n = torch.tensor([4, 16, 32, 256])
    ratio = torch.tensor([1.0, 1.0, 1.25, 2.0])
    assert torch.allclose(length_scale(n, "log", 16), ratio)
    assert torch.allclose(length_scale(n, "sqrt_log", 16), ratio.sqrt())
    assert torch.equal(length_scale(n, "none", 16), torch.ones(4))
    yarn = [(0.1 * math.log(max(1.0, x / 16)) + 1) ** 2 for x in n.tolist()]
    assert torch.allclose(length_scale(n, "yarn", 16), torch.tensor(yarn))
    law = LengthExponents(3, 2, 16, exponent=torch.tensor([[0.0, 1.0]] * 3))
    assert torch.allclose(law(n[None], 2)[0], torch.stack([torch.ones(4), ratio]))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("law", ["sqrt_log", "log", "yarn"])
@torch.no_grad()
def test_the_scale_is_on_the_logits(implementation, law, ids):
    model = build(implementation=implementation)
    before = {}
    with AttentionTap(model, keep_logits(before)):
        plain = model(ids).logits
    after = {}
    with (
        LengthScaledAttention(model, law=law, train_length=16),
        AttentionTap(model, keep_logits(after)),
    ):
        scaled = model(ids).logits
    factor = length_scale(torch.arange(1, 41), law, 16)
    assert torch.allclose(after[1].nan_to_num(0), (factor[:, None] * before[1]).nan_to_num(0), atol=1e-4)
    assert torch.equal(scaled[:, :16], plain[:, :16])
    assert bool((scaled[:, 16:] != plain[:, 16:]).any(-1).all())
    assert torch.equal(model(ids).logits, plain)


@torch.no_grad()
def test_short_inputs_and_no_law_leave_the_model_alone(llama, ids):
    plain = llama(ids).logits
    for law, length in (("none", 4), ("sqrt_log", 40), ("log", None)):
        with LengthScaledAttention(llama, law=law, train_length=length):
            assert torch.equal(llama(ids).logits, plain)


@torch.no_grad()
def test_padding_does_not_count_as_length(llama, ids):
    padded = torch.cat([torch.zeros(2, 6, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(2, 6), torch.ones(2, 40)], 1).long()
    with LengthScaledAttention(llama, law="log", train_length=16):
        alone = llama(ids).logits
        beside = llama(padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0)).logits
    assert torch.allclose(beside[:, 6:], alone, atol=1e-4)


@torch.no_grad()
def test_generation_with_a_cache_equals_computing_anew(llama, ids):
    with LengthScaledAttention(llama, law="log", train_length=8):
        cached = llama.generate(ids, max_new_tokens=6, do_sample=False, use_cache=True)
        anew = llama.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False)
    assert torch.equal(cached, anew)


@torch.no_grad()
def test_apply_and_remove_and_layers(llama, ids):
    plain = llama(ids).logits
    scale = LengthScaledAttention(llama, law="log", train_length=8, layers=[2]).apply()
    seen = {}
    with AttentionTap(llama, keep_query(seen)):
        llama(ids)
    unscaled = {}
    scale.remove()
    with AttentionTap(llama, keep_query(unscaled)):
        assert torch.equal(llama(ids).logits, plain)
    assert torch.equal(seen[1], unscaled[1])
    assert not torch.equal(seen[2], unscaled[2])


@torch.no_grad()
def test_a_law_of_ones_own(llama, ids):
    def law(n):
        return torch.full(n.shape, 2.0)

    with LengthScaledAttention(llama, law=law) as scale:
        ours = llama(ids).logits
    assert scale.train_length == llama.config.max_position_embeddings
    with AttentionTap(llama, lambda call: call.replace(query=2 * call.query)):
        assert torch.equal(ours, llama(ids).logits)
    with (
        LengthScaledAttention(llama, law=lambda n: 2.0),
        pytest.raises(InputError, match="law: returned float; must return a tensor"),
    ):
        llama(ids)


def test_learned_exponents_get_gradients_and_are_saved(tmp_path, llama, ids):
    law = LengthExponents(2, 4, train_length=8, exponent=0.0)
    optimizer = torch.optim.Adam(law.parameters(), lr=0.1)
    losses = []
    with LengthScaledAttention(llama, law=law):
        for _ in range(8):
            loss = llama(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    llama.zero_grad(set_to_none=True)
    assert losses[-1] < losses[0]
    assert bool((law.exponent != 0).all())
    law.save(tmp_path / "law.safetensors")
    again = LengthExponents.load(tmp_path / "law.safetensors")
    assert torch.equal(again.exponent, law.exponent)
    assert again.train_length == 8


@torch.no_grad()
def test_the_measured_law_holds_what_it_is_told_to_hold():
    """Keys that are all alike but for noise: the largest probability falls with length, and the exponent makes up."""
    model = build()
    generator = numbers(9)
    batches = [torch.randint(1, 60, (2, 200), generator=generator) for _ in range(3)]
    for hold in ("max_prob", "aitchison"):
        scale = LengthScaledAttention(model, law="auto", train_length=16)
        law = scale.calibrate(batches, hold=hold)
        assert law.exponent.shape == (2, 4)
        if hold == "aitchison":  # random keys keep their spread at any length
            assert float(law.exponent.median()) < 0.4
            continue

        def fall():
            with AttentionMonitor(model, layers=1, metrics=("max_prob",)) as monitor:
                for batch in batches:
                    model(batch)
            means = monitor.by_length("max_prob")[1].mean((0, 1))
            return float(means[7] / means[3])

        plain = fall()
        with scale:
            held = fall()
        assert plain < 0.75
        assert abs(held - 1) < 0.5 * abs(plain - 1)
        assert float(law.exponent.median()) > 0.5


def test_a_cap_is_warned_of(ids):
    gemma = build(Gemma2ForCausalLM, Gemma2Config(**SMALL, head_dim=8), "eager")
    with (
        torch.no_grad(),
        LengthScaledAttention(gemma, law="log", train_length=8),
        pytest.warns(UserWarning, match="acts before the cap"),
    ):
        gemma(ids)


def test_the_scale_refuses(tmp_path, llama, ids):
    for arguments, message in (
        ({"law": "cubic"}, "law='cubic': must be one of none, sqrt_log, log, yarn, auto"),
        ({"law": 3}, "law=3: must be one of"),
        ({"train_length": 1}, "train_length=1: must be at least 2"),
        ({"law": LengthExponents(3, 4, 16)}, "law: has exponents for 3 layers; the model has 2"),
        ({"law": LengthExponents(2, 4, 16), "train_length": 8}, "train_length=8: the law was made for 16"),
    ):
        with pytest.raises(InputError, match=message):
            LengthScaledAttention(llama, **arguments)
    with pytest.raises(InputError, match="law='auto': call calibrate"), LengthScaledAttention(llama, law="auto"):
        pass
    with pytest.raises(InputError, match="no row sees more than train_length=100"):
        LengthScaledAttention(llama, law="auto", train_length=100).calibrate([ids])
    with pytest.raises(InputError, match="hold='entropy'"):
        LengthScaledAttention(llama, law="auto", train_length=8).calibrate([ids], hold="entropy")
    with pytest.raises(InputError, match="law='cubic'"):
        length_scale(torch.ones(1), "cubic")
    for bad in ((0, 1, 16, 0.5), (2, 2, 1, 0.5), (2, 2, 16, torch.ones(3))):
        with pytest.raises(InputError):
            LengthExponents(*bad)
    (tmp_path / "law.safetensors").write_text("not tensors")
    for path in ("law.safetensors", "nowhere.safetensors"):
        with pytest.raises(InputError, match="is not a file that LengthExponents.save wrote"):
            LengthExponents.load(tmp_path / path)


def test_memory_of_the_monitor_does_not_grow_with_forward_passes(llama, ids):
    with torch.no_grad(), AttentionMonitor(llama, metrics=("aitchison",), keep=2) as monitor:
        for _ in range(3):
            llama(ids)
        tracemalloc.start()
        for _ in range(10):
            llama(ids)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(monitor.history) == 2
    assert peak < 2**20
