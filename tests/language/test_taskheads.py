"""Lexical task heads: what heads say, how they are found, patched and compared, and what is refused."""

import copy
import html
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import hypergeom

from practicum.datasets import Task
from practicum.language.taskheads import (
    HeadLens,
    HeadPatch,
    LexicalTaskHeads,
    ablate_heads,
    build_prompts,
    head_figure,
    head_lens,
    head_scan,
    mean_head_outputs,
    overlap,
    patch_scores,
    path_patch,
    retrieval_heads,
    sharing,
    write_task_page,
)
from practicum.language.taskheads.heads import cross_validated_auroc, failure_features, shares
from practicum.language.taskheads.patching import matched_heads
from practicum.language.taskheads.prompts import answer_tokens, names_the_task, word_tokens
from practicum.language.taskheads.steps import PromptBatch, read
from practicum.language.taskheads.tiny import tiny_model
from practicum.toolbox.taps import Taps, head_shape, output_projection

WORDS = "up down in out hot cold big small wet dry left right opposite The of is Not but 5 6 near far"
PAIRS = [("up", "down"), ("in", "out"), ("hot", "cold"), ("big", "small"), ("wet", "dry"), ("left", "right")]
TASK = Task("antonym", PAIRS, ["opposite"], ["The opposite of {input} is", "Not {input} but"])
# Another task of the same words.
SAME = Task("same", [(a, a) for a, _ in PAIRS], ["near"], ["The {input} is"])
PROMPTS = [" up: down; in:", " hot: cold; big: small; wet:", " left:"]
ANSWERS = ["out", "dry", "right"]
ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "olmo2", "gpt2")
ROUNDING = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def each(request):
    return tiny_model(WORDS, request.param)


@pytest.fixture(scope="module")
def llama():
    return tiny_model(WORDS)


def n_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def ids_of(tokenizer, prompt):
    return torch.tensor([tokenizer(prompt)["input_ids"]])


def last_logits(model, tokenizer, prompt):
    with torch.no_grad():
        return model(ids_of(tokenizer, prompt)).logits[0, -1]


def outputs(model, tokenizer, prompts=PROMPTS):
    rows = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    return read(model, rows, torch.zeros(len(rows), dtype=torch.int64), 2).z


# Prompts and words ----------------------------------------------------------------------------------------------------


def test_prompts_of_examples_are_in_the_official_format():
    assert build_prompts(TASK, n_shots=1, indices=[1]) == [" up: down; in:"]
    assert build_prompts(TASK, n_shots=2, indices=[2]) == [" up: down; in: out; hot:"]
    assert build_prompts(TASK, n_shots=0, indices=[0]) == [" up:"]


def test_the_first_query_is_preceded_by_the_last_pairs():
    assert build_prompts(TASK, n_shots=2, indices=[0]) == [" wet: dry; left: right; up:"]
    for prompt, (query, _) in zip(build_prompts(TASK, n_shots=5), PAIRS, strict=True):
        assert prompt.count(f" {query}:") == 1


def test_instructions():
    assert build_prompts(TASK, "instruction", template=1, indices=[0, 3]) == ["Not up but", "Not big but"]
    assert names_the_task(TASK, 0)
    assert not names_the_task(TASK, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_shots": 6}, "n_shots=6: must be from 0 to 5: antonym has 6 pairs, and a query must not be among its own"),
        ({"n_shots": -1}, "n_shots=-1"),
        ({"style": "poem"}, "style='poem': must be one of 'examples', 'instruction'"),
        ({"style": "instruction", "template": 2}, "template=2: must be from 0 to 1"),
        ({"indices": [6]}, "indices: 6 must be from 0 to 5"),
    ],
)
def test_prompts_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_prompts(TASK, **arguments)


def test_the_answer_is_what_the_model_would_write_next(llama):
    tokenizer = llama[1]
    found = answer_tokens(tokenizer, [" up:", " in:"], ["down", "out"])
    assert tokenizer.convert_ids_to_tokens(found.tolist()) == [" down", " out"]


class SplitsDigits:
    """Splits the space off a digit, as SmolLM2 does."""

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids):
        return "".join(map(chr, ids))


def test_an_answer_that_begins_with_white_space_alone_has_no_token():
    assert answer_tokens(SplitsDigits(), ["4:"], ["5"]).tolist() == [-1]


def test_words_in_all_forms_that_are_one_token():
    tokenizer = tiny_model("city City CITY town")[1]
    task = Task("capital", PAIRS, ["city", "metropolis"])
    with pytest.warns(UserWarning, match="no single token, left out: metropolis"):
        found = word_tokens(tokenizer, task)
    known = tokenizer.convert_ids_to_tokens(found.tolist())
    # What the tokenizer does not know is one token as well, that for the unknown, and does not count.
    assert set(known) == {"city", "City", "CITY", " city", " City", " CITY"}


# The lens -------------------------------------------------------------------------------------------------------------


def test_heads_add_up_to_the_output_of_the_attention(each):
    model, tokenizer = each
    lens = HeadLens(model)
    with torch.no_grad(), Taps(model, 2, "attention") as taps:
        model(ids_of(tokenizer, PROMPTS[0]))
    z = outputs(model, tokenizer, PROMPTS[:1])[0, 1]
    attention = taps[2][0, -1]
    if lens._post[1] is not None:  # the block norms it
        norm = next(m for n, m in model.named_modules() if n.endswith("layers.1.post_attention_layernorm"))
        with torch.no_grad():
            attention = norm(attention)
    else:
        bias = getattr(output_projection(model, 2), "bias", None)
        attention = attention - (0 if bias is None else bias)
    assert torch.allclose(lens.written(z, 1).sum(0), attention, **ROUNDING)


def test_the_lens_is_the_final_norm_and_the_unembedding(each):
    model, tokenizer = each
    z = outputs(model, tokenizer)[:, 1]
    written = HeadLens(model).written(z, 1)
    norm = model.transformer.ln_f if hasattr(model, "transformer") else model.model.norm
    with torch.no_grad():
        by_hand = model.get_output_embeddings()(norm(written))
    found = head_lens(model, z, 1)
    assert found.shape == (3, 4, len(tokenizer))
    assert torch.allclose(found, by_hand, **ROUNDING)


def test_the_layer_norm_of_gpt2_by_hand():
    model, tokenizer = tiny_model(WORDS, "gpt2")
    z = outputs(model, tokenizer)[:, 2]
    projection = output_projection(model, 3)
    own = torch.zeros(3, 32)
    own[:, 8:16] = z[:, 1]
    with torch.no_grad():
        o = own @ projection.weight
        o = (o - o.mean(1, keepdim=True)) / (o.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        logits = (o * model.transformer.ln_f.weight + model.transformer.ln_f.bias) @ model.lm_head.weight.T
    assert torch.allclose(head_lens(model, z, 2)[:, 1], logits, **ROUNDING)


def test_a_root_mean_square_norm_changes_no_rank(llama):
    model, tokenizer = llama
    lens = HeadLens(model)
    u = lens.normed(outputs(model, tokenizer))
    words = [torch.arange(7, 20)]
    assert torch.equal(lens.hits(u, words, k=4), lens.hits(17.0 * u, words, k=4))


def by_full_decoding(lens, normed, words, k, n_match=1):
    """In float64, with ties for the word."""
    logits = normed.double() @ lens._unembedding.weight.double().T
    least = [logits[..., ids].topk(n_match, dim=-1).values[..., -1:] for ids in words]
    return torch.stack([(logits > each).sum(-1) < k for each in least])


@pytest.mark.parametrize("n_match", [1, 2])
def test_the_shortcut_gives_the_booleans_of_full_decoding(n_match):
    """A vocabulary that is larger than the parts that are looked at first."""
    model, _ = tiny_model(" ".join(f"w{i}" for i in range(6000)))
    lens = HeadLens(model)
    assert lens.vocabulary > 9000
    generator = torch.Generator().manual_seed(1)
    normed = lens.normed(torch.randn(50, 3, 4, 8, generator=generator))
    words = [torch.randperm(lens.vocabulary, generator=generator)[:n] for n in (40, 400, 3)]
    short = lens.hits(normed, words, 10, n_match)
    assert short.shape == (3, 50, 3, 4)
    assert torch.equal(short, lens.hits(normed, words, 10, n_match, shortcut=False))
    assert torch.equal(short, by_full_decoding(lens, normed, words, 10, n_match))
    assert 0 < short[1].float().mean() < 0.9


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 30), n_match=st.integers(1, 3))
def test_hits_are_those_of_sorting(llama, seed, k, n_match):
    if n_match > k:
        k = n_match
    lens = HeadLens(llama[0])
    generator = torch.Generator().manual_seed(seed)
    normed = torch.randn(9, 32, generator=generator)
    words = [torch.randperm(lens.vocabulary, generator=generator)[:5]]
    top = lens.logits(normed).topk(k, dim=1).indices
    expected = torch.isin(top, words[0]).sum(1) >= n_match
    assert torch.equal(lens.hits(normed, words, k, n_match)[0], expected)


def test_ties_count_for_the_word(llama):
    model = copy.deepcopy(llama[0])
    weight = model.get_output_embeddings().weight
    with torch.no_grad():
        weight[8:14] = weight[7]
    lens = HeadLens(model)
    u = 5 * weight[7].detach()[None]
    assert int(lens.logits(u).argmax()) in range(7, 14)
    for token in range(7, 14):
        assert bool(lens.hits(u, [torch.tensor([token])], k=1)[0, 0])
        assert bool(lens.says_own(u, torch.tensor([token]), k=1)[0])


def test_each_row_has_its_own_token(llama):
    lens = HeadLens(llama[0])
    normed = torch.randn(20, 3, 32, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(0, lens.vocabulary, (20,), generator=torch.Generator().manual_seed(1))
    expected = torch.stack([lens.hits(normed[i], [tokens[i, None]], k=8)[0] for i in range(20)])
    assert torch.equal(lens.says_own(normed, tokens, k=8), expected)
    assert expected.any()


def test_bfloat16_and_adapted_projections_are_decoded(llama):
    from peft import LoraConfig, get_peft_model

    model, tokenizer = llama
    z = outputs(model, tokenizer)[:, 1]
    plain = head_lens(model, z, 1)
    rounded = head_lens(copy.deepcopy(model).bfloat16(), z, 1)
    assert torch.allclose(plain, rounded, atol=0.1, rtol=0.1)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["o_proj"], r=2)).eval()
    assert torch.allclose(head_lens(adapted, z, 1), plain, **ROUNDING)


# Running prompts ------------------------------------------------------------------------------------------------------


def test_batches_of_different_lengths_equal_single_runs(each):
    model, tokenizer = each
    rows = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    together = PromptBatch(model, rows)
    for whole in (together.whole()[0], together.step(), together.whole(surprise=True)[0]):
        for row, prompt in zip(whole, PROMPTS, strict=True):
            assert torch.allclose(row, last_logits(model, tokenizer, prompt), **ROUNDING)
    repeated = together.step(repeat=2)
    assert torch.allclose(repeated[:3], repeated[3:], **ROUNDING)
    assert torch.allclose(repeated[:3], together.step(), **ROUNDING)


def test_how_likely_a_prompt_is(llama):
    model, tokenizer = llama
    rows = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    found = PromptBatch(model, rows).whole(surprise=True)[1]
    for row, value in zip(rows, found, strict=True):
        with torch.no_grad():
            assert float(value) == pytest.approx(
                float(model(torch.tensor([row]), labels=torch.tensor([row])).loss), 1e-4
            )


# Patching -------------------------------------------------------------------------------------------------------------

SOME = [(0, 1), (1, 0), (1, 3), (2, 2)]


def test_its_own_outputs_change_nothing(each):
    model, tokenizer = each
    z = outputs(model, tokenizer, PROMPTS[:1])[0]
    plain = last_logits(model, tokenizer, PROMPTS[0])
    every = [(layer, head) for layer in range(3) for head in range(4)]
    with HeadPatch(model, every, z):
        assert torch.allclose(last_logits(model, tokenizer, PROMPTS[0]), plain, atol=1e-6)
    with HeadPatch(model, SOME, 0 * z):
        assert not torch.allclose(last_logits(model, tokenizer, PROMPTS[0]), plain, atol=1e-3)


def test_a_patch_without_heads_does_nothing_and_hooks_go(llama):
    model, tokenizer = llama
    before, plain = n_hooks(model), last_logits(model, tokenizer, PROMPTS[0])
    with HeadPatch(model, [], torch.zeros(3, 4, 8)):
        assert torch.equal(last_logits(model, tokenizer, PROMPTS[0]), plain)
    with pytest.raises(RuntimeError, match="on purpose"), HeadPatch(model, SOME, torch.zeros(3, 4, 8)):
        raise RuntimeError("on purpose")
    assert n_hooks(model) == before
    assert torch.equal(last_logits(model, tokenizer, PROMPTS[0]), plain)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("position", [-1, -2])
def test_padding_on_either_side_makes_no_difference(llama, side, position):
    model, tokenizer = llama
    values = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
    rows = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    n = max(map(len, rows))
    pad = [[0] * (n - len(row)) for row in rows]
    left = side == "left"
    ids = torch.tensor([p + row if left else row + p for row, p in zip(rows, pad, strict=True)])
    mask = torch.tensor([p + [1] * len(row) if left else [1] * len(row) + p for row, p in zip(rows, pad, strict=True)])
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad(), HeadPatch(model, SOME, values, scale=2, position=position):
        together = model(ids, attention_mask=mask, position_ids=positions).logits
        for i, row in enumerate(rows):
            alone = model(torch.tensor([row])).logits[0, -1]
            last = n - 1 if left else len(row) - 1
            assert torch.allclose(together[i, last], alone, **ROUNDING)


def test_generate_patches_the_prompt_alone_unless_asked(llama):
    model, tokenizer = llama
    ids, values = ids_of(tokenizer, PROMPTS[1]), torch.full((3, 4, 8), 3.0)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def by_hand(every_step):
        out = ids
        with torch.no_grad():
            for step in range(4):
                if step == 0 or every_step:
                    z = torch.zeros(out.shape[1], dtype=torch.bool)
                    z[len(ids[0]) - 1 :] = True
                logits = patched_positions(model, out, values, z.nonzero()[:, 0])
                out = torch.cat([out, logits[0, -1].argmax()[None, None]], dim=1)
                if every_step:
                    continue
                z = torch.cat([z, torch.zeros(1, dtype=torch.bool)])
        return out

    for every_step in (False, True):
        with HeadPatch(model, SOME, values, every_step=every_step):
            found = model.generate(ids, **options)
        assert found.tolist() == by_hand(every_step).tolist()
    assert by_hand(False).tolist() != model.generate(ids, **options).tolist()


def patched_positions(model, ids, values, positions):
    """A full forward pass with some heads replaced at some positions, by hooks of its own."""
    hooks = []
    for layer in range(3):
        heads = [head for l, head in SOME if l == layer]

        def write(module, args, heads=heads, layer=layer):
            x = args[0].clone().reshape(*args[0].shape[:2], 4, 8)
            for head in heads:
                x[:, positions, head] = values[layer, head]
            return (x.reshape(args[0].shape),)

        hooks.append(output_projection(model, layer + 1).register_forward_pre_hook(write))
    try:
        return model(ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()


def test_many_patches_at_once_equal_one_at_a_time(each):
    model, tokenizer = each
    generator = torch.Generator().manual_seed(0)
    values, of_rows = torch.randn(3, 4, 8, generator=generator), torch.randn(3, 3, 4, 8, generator=generator)
    patches = [([], values, 1.0), (SOME, values, 2.0), ([(1, 1)], of_rows, -1.0), ([(2, 0)], values, 0.0)]
    found = patch_scores(model, tokenizer, PROMPTS, ANSWERS, patches, batch_size=2)
    tokens = answer_tokens(tokenizer, PROMPTS, ANSWERS)
    for i, (heads, written, scale) in enumerate(patches):
        for j, prompt in enumerate(PROMPTS):
            one = written if written.ndim == 3 else written[j : j + 1]
            with HeadPatch(model, heads, one, scale):
                log_probs = last_logits(model, tokenizer, prompt).log_softmax(0)
            assert float(found.log_prob[i, j]) == pytest.approx(float(log_probs[tokens[j]]), abs=1e-4)
            assert abs(int(found.rank[i, j]) - int((log_probs > log_probs[tokens[j]]).sum())) <= 1
    assert found.accuracy.shape == found.reciprocal_rank.shape == (4,)


def test_a_scan_is_a_patch_of_every_head(llama):
    model, tokenizer = llama
    values = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(3))
    effects = head_scan(model, tokenizer, PROMPTS, ANSWERS, values, batch_size=2)
    tokens = answer_tokens(tokenizer, PROMPTS, ANSWERS)

    def likely():
        each = [last_logits(model, tokenizer, p).softmax(0)[t] for p, t in zip(PROMPTS, tokens, strict=True)]
        return float(torch.stack(each).mean())

    plain = likely()
    for layer, head in [(0, 0), (1, 2), (2, 3)]:
        with HeadPatch(model, [(layer, head)], values):
            assert float(effects[layer, head]) == pytest.approx(likely() - plain, abs=1e-5)
    some = head_scan(model, tokenizer, PROMPTS, ANSWERS, values, layers=[1])
    assert torch.allclose(some[1], effects[1], atol=1e-6)
    assert not some[0].any()


def test_mean_outputs(llama):
    model, tokenizer = llama
    expected = torch.stack([outputs(model, tokenizer, [prompt])[0] for prompt in PROMPTS]).mean(0)
    assert torch.allclose(mean_head_outputs(model, tokenizer, PROMPTS, batch_size=2), expected, **ROUNDING)


def test_ablation_beside_its_controls(llama):
    model, tokenizer = llama
    found = ablate_heads(model, tokenizer, PROMPTS, ANSWERS, [(1, 0), (2, 3)], "zero", n_controls=6, random_state=1)
    tokens, reciprocal = answer_tokens(tokenizer, PROMPTS, ANSWERS).tolist(), []
    with HeadPatch(model, [(1, 0), (2, 3)], torch.zeros(3, 4, 8)):
        for prompt, token in zip(PROMPTS, tokens, strict=True):
            logits = last_logits(model, tokenizer, prompt)
            reciprocal.append(1 / (1 + int((logits > logits[token]).sum())))
    assert found.reciprocal_rank == pytest.approx(np.mean(reciprocal), abs=1e-5)
    assert found.accuracy == pytest.approx(np.mean(np.array(reciprocal) == 1))
    for control in found.controls:
        assert sorted(layer for layer, _ in control) == [1, 2]
        assert not {(1, 0), (2, 3)} & set(control)
    again = ablate_heads(model, tokenizer, PROMPTS, ANSWERS, [(1, 0), (2, 3)], "zero", n_controls=6, random_state=1)
    assert found.controls == again.controls
    assert len({tuple(control) for control in found.controls}) > 1
    by_mean = ablate_heads(model, tokenizer, PROMPTS, ANSWERS, [(1, 0)], "mean", n_controls=1)
    assert by_mean.intact_reciprocal_rank == pytest.approx(found.intact_reciprocal_rank)
    assert by_mean.excess == float(by_mean.control_accuracy.mean()) - by_mean.accuracy


def test_matched_heads_are_filled_up_where_a_layer_has_too_few_others():
    heads = [(0, 0), (0, 1), (0, 2), (3, 1)]
    found = matched_heads(heads, 4, np.random.default_rng(0))
    assert len(set(found)) == 4
    assert (0, 3) in found
    assert [layer for layer, _ in found].count(0) == 3


def test_path_patching_follows_the_direct_path_alone(llama):
    """By hand: the sender's change goes into the input of the receiver's layer, and nowhere else."""
    model, tokenizer = llama
    prompt, values = PROMPTS[0], torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(5))
    clean = outputs(model, tokenizer, [prompt])
    found = path_patch(model, tokenizer, [prompt], [(0, 1)], values, [(2, 0), (0, 3)], scale=2.0)
    changed = torch.zeros(1, 32)
    changed[0, 8:16] = 2 * values[0, 1] - clean[0, 0, 1]
    with torch.no_grad():
        delta = changed @ output_projection(model, 1).weight.T

    def add(module, args, kwargs):
        hidden = (args[0] if args else kwargs["hidden_states"]).clone()
        hidden[:, -1] += delta
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    handle = model.model.layers[2].register_forward_pre_hook(add, with_kwargs=True)
    expected = outputs(model, tokenizer, [prompt])
    handle.remove()
    assert torch.allclose(found[0, 2, 0], expected[0, 2, 0], **ROUNDING)
    assert not torch.allclose(found[0, 2, 0], clean[0, 2, 0], atol=1e-4)
    # What is no receiver, or is not above the sender, is as it was.
    rest = torch.ones(3, 4, dtype=torch.bool)
    rest[2, 0] = False
    assert torch.allclose(found[0][rest], clean[0][rest], **ROUNDING)
    with HeadPatch(model, [(0, 1)], 2 * values):
        total = outputs(model, tokenizer, [prompt])
    assert not torch.allclose(total[0, 2, 0], found[0, 2, 0], atol=1e-3)


# Finding heads --------------------------------------------------------------------------------------------------------


def planted(model_type="llama", layer=1, head=2):
    """A model in which one head always writes the direction of " opposite", and all others nothing."""
    model, tokenizer = tiny_model(WORDS, model_type)
    token = tokenizer.convert_tokens_to_ids(" opposite")
    with torch.no_grad():
        for i in range(3):
            block = model.model.layers[i].self_attn
            block.o_proj.weight.zero_()
            if i == layer:
                # Values are made constant by a direction that every token has.
                model.model.embed_tokens.weight[:, 0] = 6.0
                block.v_proj.weight.zero_()
                block.v_proj.weight[:, 0] = 1.0
                block.o_proj.weight[:, head * 8 : head * 8 + 8] = model.lm_head.weight[token][:, None]
    return model, tokenizer


def test_a_planted_head_is_found_and_no_other():
    model, tokenizer = planted()
    finder = LexicalTaskHeads(model, tokenizer, k=1, require_correct=False)
    finder.fit([TASK], n_prompts=6, n_shots=2, n_held_out=0)
    expected = torch.zeros(3, 4)
    expected[1, 2] = 1
    assert torch.equal(finder.scores_["antonym"]["examples"], expected)
    assert torch.equal(finder.scores_["antonym"]["instruction"], expected)
    assert finder.shared_["antonym"] == [(1, 2)]
    assert finder.decode(PROMPTS[0], 1, 2, k=1)[0][0] == " opposite"


def test_heads_of_a_random_model_are_chance():
    model, tokenizer = tiny_model(" ".join(f"w{i}" for i in range(400)) + " " + WORDS)
    finder = LexicalTaskHeads(model, tokenizer, k=2, threshold=0.5, require_correct=False)
    finder.fit([TASK], styles=["examples"], n_shots=2, n_held_out=0)
    assert len(finder.heads_["antonym"]["examples"]) <= 1


@pytest.fixture(scope="module")
def fitted(llama):
    model, tokenizer = llama
    finder = LexicalTaskHeads(model, tokenizer, k=6, threshold=0.3, batch_size=4, require_correct=False)
    return finder.fit({"antonym": TASK, "same": SAME}, n_shots=2, n_held_out=2, random_state=3)


def test_scores_are_shares_of_prompts_that_say_a_word(fitted):
    for task in (TASK, SAME):
        queries = fitted.queries_[task.name]["examples"]
        assert len(queries) == fitted.n_used_[task.name]["examples"] == 5
        prompts = build_prompts(task, n_shots=2, indices=queries)
        z = outputs(fitted.model, fitted.tokenizer, prompts)
        words = fitted.words_[task.name]
        said = torch.zeros(3, 4)
        for row in z:
            for layer in range(3):
                top = head_lens(fitted.model, row[layer], layer).topk(6, dim=1).indices
                said[layer] += torch.isin(top, words).any(1)
        assert torch.allclose(fitted.scores_[task.name]["examples"], said / len(z))
        above = [(int(a), int(b)) for a, b in (said / len(z) >= 0.3).nonzero().tolist()]
        assert fitted.heads_[task.name]["examples"] == above
    assert fitted.shared_["antonym"] == sorted(
        set(fitted.heads_["antonym"]["examples"]) & set(fitted.heads_["antonym"]["instruction"])
    )


def test_only_correctly_answered_prompts_count():
    model, tokenizer = tiny_model(WORDS)
    # The model answers everything with the same word, so that as many prompts are right as have this answer.
    token = tokenizer.convert_tokens_to_ids(" down")
    with torch.no_grad():
        model.lm_head.weight[:] = model.lm_head.weight * 1e-3
        model.model.embed_tokens.weight[:, 0] = 30.0
        model.lm_head.weight[token, 0] = 100.0
        model.model.norm.weight[0] = 1.0
    pairs = [(a, "down" if i % 2 else b) for i, (a, b) in enumerate([*PAIRS, *((b, a) for a, b in PAIRS[1:])])]
    task = Task("half", pairs, ["opposite"])
    finder = LexicalTaskHeads(model, tokenizer).fit([task], styles=["examples"], n_shots=1, n_held_out=0)
    right = [i for i, (_, b) in enumerate(task.pairs) if b == "down"]
    assert sorted(finder.queries_["half"]["examples"]) == right
    assert finder.accuracy_["half"]["examples"] == pytest.approx(len(right) / len(pairs))
    few = Task("few", [("up", "down"), *((a, b) for a, b in PAIRS[1:])], ["opposite"])
    with pytest.raises(ValueError, match="few: the model answers 1 of 6 prompts with examples correctly; must be 5"):
        LexicalTaskHeads(model, tokenizer).fit([few], styles=["examples"], n_shots=1, n_held_out=0)


def test_the_best_instruction_is_chosen_and_copying_is_said(fitted):
    assert fitted.template_["antonym"] in (0, 1)
    assert fitted.copied_["antonym"] == (fitted.template_["antonym"] == 0)
    assert not fitted.copied_["same"]
    accuracies = []
    for template in (0, 1):
        queries = sorted(fitted.queries_["antonym"]["instruction"])
        prompts = build_prompts(TASK, "instruction", template=template, indices=queries)
        tokens = answer_tokens(fitted.tokenizer, prompts, [PAIRS[i][1] for i in queries])
        right = [int(last_logits(fitted.model, fitted.tokenizer, p).argmax()) for p in prompts]
        accuracies.append(np.mean([a == b for a, b in zip(right, tokens.tolist(), strict=True)]))
    assert accuracies[fitted.template_["antonym"]] == max(accuracies)


def test_activation_share_and_diagnosis_agree(fitted):
    own, other = (fitted.activation(PROMPTS, task) for task in ("antonym", "same"))
    assert torch.equal(fitted.share(PROMPTS, "antonym") + fitted.share(PROMPTS, "same"), torch.ones(3))
    for i, prompt in enumerate(PROMPTS):
        found = {each.task: each for each in fitted.diagnose(prompt)}
        assert found["antonym"].activation == int(own[i]) == len(found["antonym"].heads)
        assert found["same"].activation == int(other[i])
        assert set(found["same"].heads) <= set(fitted.heads_["same"]["examples"])
        activations = [each.activation for each in fitted.diagnose(prompt)]
        assert activations == sorted(activations, reverse=True)
    mass = fitted.activation(PROMPTS, "antonym", kind="mass")
    assert mass.shape == (3,)
    assert bool((mass <= 0).all())


def test_the_mass_is_that_of_the_words(fitted):
    z = outputs(fitted.model, fitted.tokenizer, PROMPTS[:1])[0]
    expected = 0.0
    for layer, head in fitted.heads_["same"]["examples"]:
        log_probs = head_lens(fitted.model, z[layer], layer)[head].log_softmax(0)
        expected += float(log_probs[fitted.words_["same"]].logsumexp(0))
    assert float(fitted.activation(PROMPTS[:1], "same", kind="mass")[0]) == pytest.approx(expected, abs=1e-4)


def test_failures_are_told_from_held_out_queries():
    """A model that is right for half of the answers, so that there is something to tell."""
    model, tokenizer = tiny_model(WORDS)
    token = tokenizer.convert_tokens_to_ids(" down")
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 30.0
        model.lm_head.weight[token, 0] = 100.0
    pairs = [(a, "down" if i % 2 else b) for i, (a, b) in enumerate([*PAIRS, *((b, a) for a, b in PAIRS[1:])])]
    pairs += [("far", "down"), ("near", "far")]
    tasks = [Task("half", pairs, ["opposite"]), Task("other", pairs[::-1], ["near"])]
    finder = LexicalTaskHeads(model, tokenizer, k=8, require_correct=False)
    finder.fit(tasks, styles=["examples"], n_shots=2, queries={"half": range(6), "other": range(6)})
    assert finder.failure_auroc_ is None or 0 <= finder.failure_auroc_ <= 1
    probability = finder.predict_failure(PROMPTS, "half")
    assert probability.shape == (3,)
    assert bool(((probability > 0) & (probability < 1)).all())


def test_failure_features_and_shares():
    activations = {"a": torch.tensor([2.0, 0.0]), "b": torch.tensor([1.0, 0.0]), "c": torch.tensor([1.0, 0.0])}
    assert shares(activations, "a").tolist() == [0.5, pytest.approx(1 / 3)]
    found = failure_features(activations, "a")
    np.testing.assert_allclose(found, [[2, 0.5, math.log(2)], [0, 1 / 3, 0]], rtol=1e-6)
    assert failure_features({"a": torch.tensor([2.0])}, "a").tolist() == [[2, 1, 0]]


def test_the_cross_validated_auroc():
    rng = np.random.default_rng(0)
    wrong = np.arange(200) % 2 == 0
    informative = np.stack([wrong + rng.normal(size=200), rng.normal(size=200), np.zeros(200)], axis=1)
    noise = rng.normal(size=(200, 3))
    groups = np.arange(200) // 4
    assert cross_validated_auroc(informative, wrong, groups) > 0.7
    assert 0.35 < cross_validated_auroc(noise, wrong, groups) < 0.65
    assert cross_validated_auroc(noise, wrong, np.zeros(200)) is None
    assert cross_validated_auroc(noise, np.zeros(200, dtype=bool), groups) is None


def test_the_same_seed_finds_the_same(llama, fitted):
    model, tokenizer = llama
    again = LexicalTaskHeads(model, tokenizer, k=6, threshold=0.3, batch_size=3, require_correct=False)
    again.fit([TASK, SAME], n_shots=2, n_held_out=2, random_state=3)
    assert again.queries_ == fitted.queries_
    assert again.heads_ == fitted.heads_
    other = LexicalTaskHeads(model, tokenizer, require_correct=False)
    assert other.fit([TASK], n_shots=2, n_held_out=2, random_state=4).queries_ != {
        "antonym": fitted.queries_["antonym"]
    }


def test_retrieval_heads_say_the_answer(llama):
    model, tokenizer = llama
    found = retrieval_heads(model, tokenizer, PROMPTS, ANSWERS, k=5, require_correct=False)
    z, tokens = outputs(model, tokenizer), answer_tokens(tokenizer, PROMPTS, ANSWERS)
    for layer in range(3):
        top = head_lens(model, z[:, layer], layer).topk(5, dim=-1).indices
        expected = (top == tokens[:, None, None]).any(-1).float().mean(0)
        assert torch.allclose(found[layer], expected)


def test_overlap_and_chance():
    a, b = [(0, 0), (0, 1), (1, 2)], [(0, 1), (1, 2), (3, 3), (4, 4)]
    assert overlap(a, b) == overlap(b, a) == pytest.approx(2 / 3)
    assert overlap(a, []) == 0.0
    found = sharing(a, b, 270)
    assert (found.shared, found.expected) == (2, pytest.approx(12 / 270))
    assert found.p_value == pytest.approx(sum(hypergeom.pmf(i, 270, 3, 4) for i in (2, 3)))
    with pytest.raises(ValueError, match="n_heads=3: must be 4 at least"):
        sharing(a, b, 3)


# The page -------------------------------------------------------------------------------------------------------------


def test_the_picture_marks_heads(fitted):
    figure = head_figure(fitted, "antonym")
    pictures, marks = figure.data[::2], figure.data[1::2]
    for style, picture, mark in zip(("examples", "instruction"), pictures, marks, strict=True):
        assert np.array_equal(picture.z, fitted.scores_["antonym"][style].numpy())
        assert list(zip(mark.y, mark.x, strict=True)) == fitted.heads_["antonym"][style]
        shared = [head in fitted.shared_["antonym"] for head in fitted.heads_["antonym"][style]]
        assert [symbol == "circle" for symbol in mark.marker.symbol] == shared


def test_the_page_says_what_was_found(fitted, tmp_path):
    page = write_task_page(fitted, "antonym", tmp_path / "antonym.html").read_text()
    assert "<script src" not in page
    assert "https://cdn" not in page.split("</script>")[-1]
    for style in ("examples", "instruction"):
        heads = ", ".join(f"{layer}.{head}" for layer, head in fitted.heads_["antonym"][style]) or "none"
        assert f"<td>{heads}</td>" in page
    layer, head = fitted.heads_["antonym"]["examples"][0]
    token, share = fitted.says("antonym", "examples", layer, head)[0]
    assert f'title="{share:.0%} of the prompts">{html.escape(token)}<' in page
    assert "The styles share" in page


def test_the_page_says_that_there_are_no_heads(llama, tmp_path):
    model, tokenizer = llama
    task = Task("none", PAIRS, ["5"])
    finder = LexicalTaskHeads(model, tokenizer, k=1, threshold=1.0, require_correct=False)
    finder.fit([task], styles=["examples"], n_shots=1, n_held_out=0)
    assert finder.heads_["none"]["examples"] == []
    assert "No lexical heads" in write_task_page(finder, "none", tmp_path / "none.html").read_text()
    assert finder.activation(PROMPTS, "none").tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match=r"cannot be written: No such file or directory"):
        write_task_page(finder, "none", tmp_path / "nowhere" / "none.html")


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k=0: must be a whole number, 1 or more"),
        ({"k": 2, "n_match": 3}, "n_match=3: must be at most k, which is 2"),
        ({"threshold": 0}, "threshold=0: must be above 0 and at most 1"),
        ({"threshold": 1.5}, "threshold=1.5"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_options_out_of_range(llama, options, message):
    with pytest.raises(ValueError, match=message):
        LexicalTaskHeads(*llama, **options)


@pytest.mark.parametrize(
    ("tasks", "options", "message"),
    [
        ([], {}, "tasks: is empty"),
        (["antonym"], {}, "tasks: has a str; must be tasks"),
        ([TASK, TASK], {}, "tasks: two have the same name"),
        ([TASK], {"styles": ["poem"]}, "styles=.*: must be some of 'examples', 'instruction'"),
        ([TASK], {"styles": "examples"}, "styles='examples'"),
        ([Task("t", PAIRS, ["opposite"])], {}, "styles: t has no instructions"),
        ([TASK], {"n_shots": 6}, "n_shots=6"),
        ([TASK], {"n_prompts": 0}, "n_prompts=0"),
        ([TASK], {"n_held_out": -1}, "n_held_out=-1"),
        ([TASK], {"queries": {"other": [1]}}, "queries: has none of antonym"),
    ],
)
def test_what_fit_refuses(llama, tasks, options, message):
    finder = LexicalTaskHeads(*llama, require_correct=False)
    with pytest.raises(ValueError, match=message):
        finder.fit(tasks, **{"n_shots": 2, **options})


class KnowsNoWord(SplitsDigits):
    """Every word is many tokens."""


def test_words_and_answers_that_tokenizers_split(llama):
    model = llama[0]
    with pytest.raises(ValueError, match="words: none of opposite is a single token of this tokenizer; give the task"):
        LexicalTaskHeads(model, KnowsNoWord()).fit([TASK])
    task = Task("letters", [("a", "b"), ("c", "d"), ("e", "f")], ["x"])
    with pytest.raises(ValueError, match="pairs of letters: all 3 answers begin with a token of white space"):
        LexicalTaskHeads(model, SplitsDigits()).fit([task], styles=["examples"], n_shots=1)
    with pytest.raises(ValueError, match=r"answers\[0\]='b': begins with a token of white space in this tokenizer"):
        patch_scores(model, SplitsDigits(), ["a:"], ["b"], [])
    with pytest.raises(ValueError, match="answers: all 1 begin with a token of white space"):
        retrieval_heads(model, SplitsDigits(), ["a:"], ["b"])
    two = LexicalTaskHeads(llama[0], llama[1], n_match=9, require_correct=False)
    with pytest.raises(ValueError, match=r"n_match=9: the task 'antonym' has \d tokens of words; must be at most that"):
        two.fit([TASK])


def test_white_space_answers_are_dropped_and_counted(llama):
    model, tokenizer = llama

    class Some:
        """Splits the space off the answer "out"."""

        def __call__(self, text, add_special_tokens=True):
            ids = tokenizer(text.replace(" out", " ") if text.endswith(" out") else text)["input_ids"]
            return {"input_ids": ids + tokenizer("out")["input_ids"] if text.endswith(" out") else ids}

        def decode(self, ids):
            return tokenizer.decode(ids)

    finder = LexicalTaskHeads(model, Some(), require_correct=False)
    finder.fit([TASK], styles=["examples"], n_shots=1, n_held_out=0)
    assert finder.n_dropped_["antonym"]["examples"] == 1
    assert 1 not in finder.queries_["antonym"]["examples"]


def test_a_model_in_training_mode_is_refused(llama):
    model, tokenizer = copy.deepcopy(llama[0]).train(), llama[1]
    for refused in (
        lambda: LexicalTaskHeads(model, tokenizer),
        lambda: HeadLens(model),
        lambda: HeadPatch(model, [], torch.zeros(3, 4, 8)),
        lambda: mean_head_outputs(model, tokenizer, PROMPTS),
        lambda: retrieval_heads(model, tokenizer, PROMPTS, ANSWERS),
    ):
        with pytest.raises(ValueError, match=r"model: is in training mode; call model.eval\(\) first"):
            refused()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": [(3, 0)]}, r"heads: \(3, 0\) must be \(layer, head\), from \(0, 0\) to \(2, 3\)"),
        ({"heads": [(0, 4)]}, r"heads: \(0, 4\)"),
        ({"values": torch.zeros(2, 4, 8)}, r"values: has shape \(2, 4, 8\); must be \(3, 4, 8\)"),
        ({"position": 0}, "position=0: must be a whole number below 0"),
    ],
)
def test_what_a_patch_refuses(llama, change, message):
    with pytest.raises(ValueError, match=message):
        HeadPatch(llama[0], **{"heads": SOME, "values": torch.zeros(3, 4, 8), **change})


def test_a_patch_of_rows_needs_as_many_rows(llama):
    model, tokenizer = llama
    values = torch.zeros(2, 3, 4, 8)
    with HeadPatch(model, SOME, values), pytest.raises(ValueError, match="values: has 2 rows; the batch has 1"):
        last_logits(model, tokenizer, PROMPTS[0])
    with pytest.raises(ValueError, match="values: has 2 rows; there are 3 prompts"):
        patch_scores(model, tokenizer, PROMPTS, ANSWERS, [(SOME, values, 1.0)])
    with HeadPatch(model, SOME, torch.zeros(3, 4, 8)) as patch, pytest.raises(ValueError, match="is active already"):
        patch.__enter__()


def test_what_else_is_refused(llama, fitted):
    model, tokenizer = llama
    with pytest.raises(ValueError, match="prompts=' up:': must be a list of prompts"):
        mean_head_outputs(model, tokenizer, " up:")
    with pytest.raises(ValueError, match=r"prompts\[1\]='': has no token"):
        mean_head_outputs(model, tokenizer, [" up:", ""])
    with pytest.raises(ValueError, match="answers: has 1; must be 3"):
        patch_scores(model, tokenizer, PROMPTS, ["out"], [])
    with pytest.raises(ValueError, match="method='median': must be 'mean' or 'zero'"):
        ablate_heads(model, tokenizer, PROMPTS, ANSWERS, SOME, "median")
    with pytest.raises(ValueError, match="layer=3: must be from 0 to 2"):
        head_lens(model, torch.zeros(4, 8), 3)
    with pytest.raises(ValueError, match=r"z: has shape \(2, 8\); must end in \(4, 8\)"):
        head_lens(model, torch.zeros(2, 8), 0)
    with pytest.raises(ValueError, match="task='other': was not fitted; there are antonym, same"):
        fitted.activation(PROMPTS, "other")
    with pytest.raises(ValueError, match="kind='most': must be 'count' or 'mass'"):
        fitted.activation(PROMPTS, "same", kind="most")
    with pytest.raises(ValueError, match=r"layer=9, head=0: must be from \(0, 0\) to \(2, 3\)"):
        fitted.decode(PROMPTS[0], 9, 0)
    with pytest.raises(ValueError, match="is not fitted; call fit"):
        LexicalTaskHeads(model, tokenizer).diagnose(PROMPTS[0])
    with pytest.raises(ValueError, match="finder: is not fitted"):
        head_figure(LexicalTaskHeads(model, tokenizer), "antonym")
    with pytest.raises(ValueError, match="none of 3 is answered correctly; or require_correct=False"):
        retrieval_heads(model, tokenizer, PROMPTS, ANSWERS)


def test_a_model_without_a_final_unembedding_is_refused(llama):
    model = copy.deepcopy(llama[0])
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="its output embeddings must have a weight .* of floating-point numbers"):
        HeadLens(model)
    renamed = copy.deepcopy(llama[0])
    for layer in renamed.model.layers:
        layer.self_attn.joined = layer.self_attn.o_proj
        del layer.self_attn.o_proj
    with pytest.raises(ValueError, match="must have an output projection named one of o_proj, c_proj"):
        head_shape(renamed)
