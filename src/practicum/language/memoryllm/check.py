"""The claims of MemoryLLM, measured on models that are trained side by side on the same tokens."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from practicum.checks import CannotMeasure, Check, Comparison, Curve, Metrics, Request, Workload, arm
from practicum.datasets import docstrings, read_texts
from practicum.language.memoryllm.config import MemoryLMConfig
from practicum.language.memoryllm.lookups import TokenLookups
from practicum.language.memoryllm.model import MemoryLMForCausalLM
from practicum.language.memoryllm.program import (
    CALIBRATION_WINDOWS,
    Corpus,
    Decode,
    Recipe,
    active_sizes,
    build,
    copyable,
    count,
    dense_sizes,
    losses,
    pruned,
    scaled,
    train,
)
from practicum.models import load_language_model
from practicum.toolbox.cache import cache_folder, cache_key, load_or_build

ALPHAS = (0.6, 0.4)
CURVE_ALPHAS = (0.9, 0.8, 0.5, 0.0)
CACHE_SHARES = (0.02, 0.05, 0.1, 0.2, 0.5)
RESIDENT_SHARE = 0.05
END = "<|endoftext|>"
# Characters that a tokenizer is trained on, and that a token has on average at the least.
TOKENIZER_CHARACTERS = 1_500_000
CHARACTERS_PER_TOKEN = 6
EVALUATED_SHARE = 0.1
FEWEST_WINDOWS = 16
CORPUS_SEED = 0
FULL_ONLY = "trained for more steps and beside more models; needs --scale full"
NOT_YOURS = "is about models trained side by side; not measured on your own model"
QUICK_ARMS = ("dense-total", "dense-active", "memoryllm")
TRAINED = ("perplexity", "perplexity (all tokens)")
PROBED = ("loss increase, later layers dropped", "first layer over the next", "loss of others over copyable")
# One part of what an arm measures, by its name.
Measure = Callable[[str], Metrics]
OWN_CONFIG = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")


@dataclass(frozen=True)
class Sizes:
    """What a scale changes."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    window: int
    batch: int
    steps: int
    rate: float
    evaluated: int
    watched: int
    looked_up: int
    decode: tuple[int, int, int, int]
    decoded: tuple[int, int]
    all_arms: bool


QUICK = Sizes(64, 3, 4, 1024, 64, 8, 80, 3e-3, 32, 0, 500, (576, 5, 9, 2048), (16, 8), False)
FULL = Sizes(96, 4, 4, 4096, 96, 16, 300, 3e-3, 96, 32, 5000, (576, 12, 9, 8192), (64, 32), True)
PAPER = Sizes(960, 24, 16, 128256, 2048, 64, 76_000, 1e-4, 256, 64, 5000, (2048, 24, 32, 128256), (256, 64), True)


class MemoryLLMCheck(Check):
    """Dense models and MemoryLLMs trained by one recipe, and random ones that decode against the clock."""

    comparisons = (
        Comparison(
            "beats-dense-of-equal-active-size",
            metric="perplexity",
            arm="memoryllm",
            against="dense-active",
            ratio_at_most=1.0,
        ),
        Comparison("context-network-helps", metric="perplexity", arm="flex-3", against="memoryllm", ratio_at_most=1.0),
        Comparison(
            "flex-comes-near-dense", metric="perplexity", arm="flex-3", against="dense-total", ratio_at_most=1.05
        ),
        Comparison(
            "price-against-dense",
            metric="perplexity (all tokens)",
            arm="memoryllm",
            against="dense-total",
            ratio_at_least=1.0,
        ),
        Comparison("lookups-are-exact", metric="largest logit difference", arm="memoryllm", value_at_most=0.0),
        Comparison("int8-is-free", metric="perplexity ratio, int8", arm="memoryllm", value_at_most=1.002),
        Comparison("int4-is-cheap", metric="perplexity ratio, int4", arm="memoryllm", value_at_most=1.015),
        Comparison("half-rank-is-bearable", metric="perplexity ratio, half rank", arm="memoryllm", value_at_most=1.10),
        Comparison(
            "decodes-faster",
            metric="decode tokens/s",
            arm="memoryllm",
            against="dense-total",
            ratio_at_least=4 / 3,
            timed=True,
        ),
        Comparison(
            "decodes-faster-in-batches",
            metric="decode tokens/s, batch 8",
            arm="memoryllm",
            against="dense-total",
            ratio_at_least=4 / 3,
            timed=True,
        ),
        Comparison("less-memory", metric="resident MB", arm="memoryllm", against="dense-total", ratio_at_most=1.0),
        Comparison(
            "later-layers-matter-less",
            metric="loss increase, later layers dropped",
            arm="memoryllm",
            against="dense-total",
            difference_at_most=0.0,
        ),
        Comparison("first-layer-matters-most", metric="first layer over the next", arm="memoryllm", value_at_least=1.0),
        Comparison(
            "memory-holds-what-is-recalled", metric="loss of others over copyable", arm="memoryllm", value_at_least=0.0
        ),
        Comparison(
            "dense-networks-do-not-separate",
            metric="loss of others over copyable",
            arm="dense-total",
            value_at_most=0.0,
        ),
        Comparison(
            "beats-pruned-dense",
            metric="perplexity (all tokens)",
            arm="memoryllm",
            against=("pruned-magnitude", "pruned-wanda"),
            ratio_at_most=1.0,
        ),
    )
    seeds = {"quick": 1, "full": 3, "paper": 3}
    # Everything but the stopwatch of a seed runs in one worker, where its arms share what was trained.
    portable = True
    curves = (
        Curve("training", x="thousand tokens", y="validation perplexity"),
        Curve("layers", x="layer whose feed-forward network is dropped", y="perplexity ratio"),
        Curve("alpha", x="scale of the feed-forward outputs", y="perplexity ratio"),
        Curve("hits", x="rows in the cache (%)", y="hit rate"),
    )

    def prepare(self, request: Request) -> Work:
        """Read or harvest the texts and cut their tokens into windows; nothing is trained before an arm asks."""
        return prepared(request, request.pick(quick=QUICK, full=FULL, paper=PAPER))

    @arm("dense-total")
    def dense_total(self, work: Work) -> Metrics:
        """A Llama with as many parameters in all."""
        return work.measured("dense-total", work.trained_metrics, work.probes, work.timing("dense"))

    @arm("dense-active")
    def dense_active(self, work: Work) -> Metrics:
        """A smaller Llama with as many parameters as are active in the MemoryLLM."""
        return work.measured("dense-active", work.trained_metrics)

    @arm("memoryllm")
    def memoryllm(self, work: Work) -> Metrics:
        """The method."""
        return work.measured("memoryllm", work.trained_metrics, work.probes, work.tables, work.timing("memory"))

    @arm("flex-1")
    def flex_1(self, work: Work) -> Metrics:
        """With a network of h² parameters on the residual stream."""
        return work.measured("flex-1", work.trained_metrics)

    @arm("flex-2")
    def flex_2(self, work: Work) -> Metrics:
        """With one of 2h²."""
        return work.measured("flex-2", work.trained_metrics)

    @arm("flex-3")
    def flex_3(self, work: Work) -> Metrics:
        """With one of 3h²."""
        return work.measured("flex-3", work.trained_metrics)

    @arm("shared-norm")
    def shared_norm(self, work: Work) -> Metrics:
        """MemoryLLM with one norm of the embeddings for all layers: the paper's ablation."""
        return work.measured("shared-norm", work.trained_metrics)

    @arm("pruned-magnitude")
    def pruned_magnitude(self, work: Work) -> Metrics:
        """The dense model pruned to as many active parameters by magnitude."""
        return work.measured("pruned-magnitude", work.trained_metrics)

    @arm("pruned-wanda")
    def pruned_wanda(self, work: Work) -> Metrics:
        """The dense model pruned to as many active parameters by Wanda."""
        return work.measured("pruned-wanda", work.trained_metrics)

    @arm("attention-only", timed=True)
    def attention_only(self, work: Work) -> Metrics:
        """The MemoryLLM without any memory: what decoding costs at the least."""
        return work.timing("attention")("attention-only")

    def remarks(self, means: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
        """Where the dense model overtakes, and how near decoding comes to its limit."""
        ours, dense = means.get("memoryllm", {}), means.get("dense-total", {})
        shares = [share for share in (25, 50, 75, 100) if f"perplexity at {share} %" in ours]
        if shares and all(f"perplexity at {share} %" in dense for share in shares):
            ratios = [ours[f"perplexity at {share} %"] / dense[f"perplexity at {share} %"] for share in shares]
            told = ", ".join(f"{ratio:.3f} at {share} %" for ratio, share in zip(ratios, shares, strict=True))
            over = [share for ratio, share in zip(ratios, shares, strict=True) if ratio >= 1]
            crossing = f"the dense model is ahead from {over[0]} % on" if over else "the two have not crossed"
            yield (
                f"Perplexity of MemoryLLM over that of the dense model of equal size as training goes on: {told}; "
                f"{crossing}."
            )
        limit = means.get("attention-only", {}).get("decode tokens/s")
        if limit and "decode tokens/s" in ours:
            yield (
                f"Decoding with the table in memory runs at {ours['decode tokens/s'] / limit:.2f} of the speed without "
                "any feed-forward network, which is the limit."
            )


class Work:
    """The work of one seed; what several arms look at is computed once.

    Parameters
    ----------
    request : Request
    sizes : Sizes
    corpus : Corpus
    arguments : dict
        Of the MemoryLLM's configuration.
    recipe : Recipe
    own : MemoryLMForCausalLM or None
        The user's model.
    """

    def __init__(
        self,
        request: Request,
        sizes: Sizes,
        corpus: Corpus,
        arguments: dict[str, Any],
        recipe: Recipe,
        own: MemoryLMForCausalLM | None,
    ) -> None:
        self.request, self.sizes, self.corpus = request, sizes, corpus
        self.arguments, self.recipe, self.own = arguments, recipe, own
        self._models: dict[str, Any] = {}
        self._training: dict[str, list[tuple[int, float]]] = {}
        self._losses: dict[str, Tensor] = {}

    def measured(self, name: str, *parts: Measure) -> Metrics:
        """The metrics of an arm from its parts, or why there are none."""
        if self.own is not None and name != "memoryllm":
            metrics = Metrics(missing=dict.fromkeys((*TRAINED, *PROBED), NOT_YOURS))
            parts = tuple(part for part in parts if part not in (self.trained_metrics, self.probes))
        elif not self.sizes.all_arms and name not in QUICK_ARMS:
            return Metrics(missing=dict.fromkeys(TRAINED, FULL_ONLY))
        else:
            metrics = Metrics()
        for part in parts:
            found: Metrics = part(name)
            metrics = Metrics(
                {**metrics.values, **found.values},
                {**metrics.timed, **found.timed},
                {**metrics.missing, **found.missing},
                (*metrics.notes, *found.notes),
                {**metrics.curves, **found.curves},
            )
        return metrics

    # Training ---------------------------------------------------------------------------------------------------------

    def model(self, name: str) -> Any:
        """The trained model of an arm."""
        if name == "memoryllm" and self.own is not None:
            return self.own
        if name not in self._models:
            self._models[name] = self._made(name)
        return self._models[name]

    def _made(self, name: str) -> Any:
        if name.startswith("pruned-"):
            dense = self.model("dense-total")
            in_blocks = sum(w.numel() for n, w in dense.named_parameters() if ".layers." in n and w.ndim == 2)
            kept = count("memory", self.arguments, active=True) - (dense.num_parameters() - in_blocks)
            calibration = self.corpus.train[:CALIBRATION_WINDOWS]
            return pruned(dense, kept, name.removeprefix("pruned-"), calibration)
        if name == "dense-total":
            model = build("dense", dense_sizes(self.arguments), self.request.seed)
        elif name == "dense-active":
            model = build("dense", active_sizes(self.arguments), self.request.seed)
        else:
            options: dict[str, Any] = {}
            if name.startswith("flex-"):
                options["flex_beta"] = int(name.removeprefix("flex-"))
            if name == "shared-norm":
                options["shared_memory_norm"] = True
            model = build("memory", {**self.arguments, **options}, self.request.seed)
        self._training[name] = train(model, self.corpus, self.recipe, self.sizes.watched)
        return model

    def losses(self, name: str) -> Tensor:
        """Losses of the validation tokens, (windows, T - 1)."""
        if name not in self._losses:
            self._losses[name] = losses(self.model(name), self.corpus.validation)
        return self._losses[name]

    def trained_metrics(self, name: str) -> Metrics:
        """Perplexity, parameters, and how training went."""
        model = self.model(name)
        perplexity = math.exp(float(self.losses(name).double().mean()))
        active = model.num_parameters(active=True) if isinstance(model, MemoryLMForCausalLM) else None
        values = {"perplexity": perplexity, "parameters": float(model.num_parameters())}
        if name.startswith("pruned-"):
            active = sum(int(weight.count_nonzero()) for weight in model.parameters())
        values["active parameters"] = float(model.num_parameters() if active is None else active)
        missing = {}
        if self.sizes.all_arms and self.own is None:
            values["perplexity (all tokens)"] = perplexity
        else:
            missing["perplexity (all tokens)"] = FULL_ONLY if self.own is None else NOT_YOURS
        curves = {}
        if training := self._training.get(name):
            per_step = self.recipe.batch * self.corpus.train.shape[1] / 1000
            curves["training"] = [(step * per_step, math.exp(loss)) for step, loss in training]
            for i, (_, loss) in enumerate(training[:4]):
                values[f"perplexity at {25 * (i + 1)} %"] = math.exp(loss)
        return Metrics(values, missing=missing, curves=curves)

    # Layers and scales ------------------------------------------------------------------------------------------------

    def probes(self, name: str) -> Metrics:
        """What is lost when feed-forward outputs are dropped or scaled down."""
        model, base = self.model(name), self.losses(name).double()
        windows = self.corpus.validation
        n_layers = model.config.num_hidden_layers
        drops = []
        for layer in range(n_layers):
            with scaled(model, 0.0, [layer]):
                drops.append(float((losses(model, windows).double() - base).mean()))
        values = {f"perplexity ratio, layer {i} dropped": math.exp(drop) for i, drop in enumerate(drops)}
        missing: dict[str, str] = {}
        if n_layers > 1:
            values["loss increase, later layers dropped"] = float(np.mean(drops[1:]))
            values["first layer over the next"] = drops[0] / max([*drops[1:], 1e-6])
        else:
            only = "the model has one layer"
            missing |= {"loss increase, later layers dropped": only, "first layer over the next": only}
        again = copyable(windows)
        gaps, scales = [], {1.0: 1.0}
        for alpha in (*ALPHAS, *CURVE_ALPHAS):
            with scaled(model, alpha):
                increase = losses(model, windows).double() - base
            scales[alpha] = math.exp(float(increase.mean()))
            if alpha in ALPHAS and bool(again.any()) and not bool(again.all()):
                copied, others = float(increase[again].mean()), float(increase[~again].mean())
                values |= {f"loss increase at {alpha}, copyable": copied, f"loss increase at {alpha}, others": others}
                gaps.append(others - copied)
        values["copyable targets"] = float(again.double().mean())
        if gaps:
            values["loss of others over copyable"] = float(np.mean(gaps))
        else:
            missing["loss of others over copyable"] = "no target can be copied from its window; give longer texts"
        curves = {
            "layers": [(float(i), math.exp(drop)) for i, drop in enumerate(drops)],
            "alpha": [(alpha, scales[alpha]) for alpha in sorted(scales)],
        }
        return Metrics(values, missing=missing, curves=curves)

    # Tables -----------------------------------------------------------------------------------------------------------

    def tables(self, name: str) -> Metrics:
        """Exactness, compression, and what a cache of the table holds."""
        model = self.model(name)
        windows = self.corpus.validation
        base = float(self.losses(name).double().mean())
        table = model.precompute_lookups()
        some = windows[: max(2, len(windows) // 8)].to(model.device)
        with torch.no_grad():
            computed = model(some, use_cache=False).logits
            model.attach_lookups(table)
            difference = float((model(some, use_cache=False).logits - computed).abs().max())
        values = {"largest logit difference": difference, "table MB": table.nbytes / 1e6}
        compressed = {
            "int8": table.quantize(8),
            "int4": table.quantize(4),
            "90 % rank": table.low_rank(0.9),
            "half rank": table.low_rank(0.5),
            "quarter rank": table.low_rank(0.25),
        }
        for label, lookups in compressed.items():
            model.attach_lookups(lookups)
            loss = float(losses(model, windows).double().mean())
            values[f"perplexity ratio, {label}"] = math.exp(loss - base)
        model.detach_lookups()
        hits = self._hits(table)
        values |= {f"hit rate, {round(100 * share)} % of the rows": rate for share, rate in hits}
        values["bytes read for a token"] = float(table.row_bytes)
        return Metrics(values, curves={"hits": [(100 * share, rate) for share, rate in hits]})

    def _hits(self, table: TokenLookups) -> list[tuple[float, float]]:
        """Hit rates of the most frequent rows, the validation tokens looked up one by one."""
        tokens = self.corpus.validation.flatten()[: self.sizes.looked_up].tolist()
        out = []
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "table.safetensors")
            table.save(path)
            for share in CACHE_SHARES:
                rows = max(1, round(share * table.shape[0]))
                lookups = TokenLookups.load(path, "cached", cache_rows=rows, counts=self.corpus.counts)
                for token in tokens:
                    lookups.gather([token])
                out.append((share, lookups.stats.hit_rate))
        return out

    # Decoding ---------------------------------------------------------------------------------------------------------

    def timing(self, what: str) -> Measure:
        """The work for the stopwatch, and the bytes that are held meanwhile."""

        def part(name: str) -> Metrics:
            hidden, layers, heads, vocabulary = self.sizes.decode
            timed = {}
            for batch, tokens in zip((1, 8), self.sizes.decoded, strict=True):
                call = Decode(what, hidden, layers, heads, vocabulary, batch, tokens, self.request.device)
                label = "decode tokens/s" if batch == 1 else f"decode tokens/s, batch {batch}"
                timed[label] = Workload(call, units=batch * tokens, clock="cpu")
            sizes = call.sizes
            if what == "dense":
                held = 4 * count("dense", dense_sizes(sizes))
            else:
                held = 4 * count("memory", {**sizes, "memory_weights": False})
            values = {"resident MB without a table": held / 1e6}
            if what == "memory":
                # A cache of float32 rows, and the place of each token in it.
                row = 4 * layers * hidden
                held += round(RESIDENT_SHARE * vocabulary) * row + 4 * vocabulary
                values["table MB (decoding)"] = vocabulary * row / 1e6
            values["resident MB"] = held / 1e6
            return Metrics(values, timed)

        return part


def prepared(request: Request, sizes: Sizes) -> Work:
    """The work of one seed at these sizes.

    Parameters
    ----------
    request : Request
    sizes : Sizes
    """
    arguments, own = _arguments(request, sizes), None
    steps = sizes.steps
    if (tokens := _whole_number(request, "tokens")) is not None:
        steps = tokens // (sizes.batch * sizes.window)
        if steps < 1:
            raise CannotMeasure(f"--tokens {tokens}: must be at least {sizes.batch * sizes.window}, one step")
    texts = None if request.data is None else read_texts(request.data)
    if request.model is not None:
        own, tokenizer = _own_model(request.model, request.device)
    elif "tokenizer" in request.options:
        tokenizer = _tokenizer_of(request.options["tokenizer"])
    else:
        tokenizer = _trained_tokenizer(texts, sizes.vocabulary)
    arguments["vocab_size"] = vocabulary = len(tokenizer) if own is None else own.config.vocab_size
    corpus = _corpus(request, sizes, texts, tokenizer, vocabulary)
    recipe = Recipe(steps, sizes.batch, sizes.rate, request.seed, request.device)
    return Work(request, sizes, corpus, arguments, recipe, own)


def _arguments(request: Request, sizes: Sizes) -> dict[str, Any]:
    """Of the configuration of the MemoryLLM, the vocabulary aside."""
    arguments: dict[str, Any] = {
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "max_position_embeddings": max(sizes.window, 64),
        "tie_word_embeddings": True,
    }
    given = request.options.get("config")
    if given is None:
        return arguments
    try:
        content = json.loads(Path(given).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CannotMeasure(f"--config {given}: cannot be read: must be a JSON file ({error})") from error
    if not isinstance(content, dict):
        raise CannotMeasure(f"--config {given}: must be an object with arguments of MemoryLMConfig")
    unknown = sorted(content.keys() - set(OWN_CONFIG))
    if unknown:
        raise CannotMeasure(f"--config {given}: {unknown[0]!r} is not one of {', '.join(OWN_CONFIG)}")
    arguments |= content
    try:
        MemoryLMConfig(**arguments)
    except Exception as error:
        raise CannotMeasure(f"--config {given}: {' '.join(str(error).split())}") from error
    return arguments


def _whole_number(request: Request, name: str) -> int | None:
    given = request.options.get(name)
    if given is None:
        return None
    if not given.isdecimal() or int(given) < 1:
        raise CannotMeasure(f"--{name} {given}: must be a whole number of at least 1")
    return int(given)


@lru_cache(maxsize=1)
def _own_model(name: str, device: str) -> tuple[MemoryLMForCausalLM, Any]:
    loaded = load_language_model(name, device=device)
    if not isinstance(loaded.model, MemoryLMForCausalLM):
        raise CannotMeasure(
            f"--model {name}: is a {type(loaded.model).__name__}; must be a MemoryLMForCausalLM that was saved"
        )
    if not loaded.model.config.memory_weights:
        raise CannotMeasure(f"--model {name}: was saved without its memory weights")
    return loaded.model, loaded.tokenizer


def _tokenizer_of(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise CannotMeasure(f"--tokenizer {name}: cannot be loaded: {str(error).strip().splitlines()[0]}") from error


def _trained_tokenizer(texts: list[str] | None, vocabulary: int) -> Any:
    """A byte-level BPE tokenizer; that of the embedded corpus is trained once and kept in the cache folder."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    if texts is not None:
        trained = _bpe(texts, vocabulary)
    else:
        source = docstrings()
        key = cache_key({"texts": source.provenance, "vocabulary": vocabulary, "characters": TOKENIZER_CHARACTERS})
        target = cache_folder() / "memoryllm" / f"bpe-{key}.json"

        def train_and_save(path: Path) -> None:
            _bpe(_embedded_texts(), vocabulary).save(str(path))

        trained = load_or_build(target, train_and_save, lambda path: Tokenizer.from_str(path.read_text("utf-8")))
    return PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=END)


def _bpe(texts: list[str], vocabulary: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_some(texts, TOKENIZER_CHARACTERS), trainer)
    return tokenizer


def _some(texts: list[str], characters: int) -> Iterator[str]:
    for text in texts:
        if characters <= 0:
            return
        yield text[:characters]
        characters -= len(text)


def _embedded_texts() -> list[str]:
    """Summaries and bodies of the docstrings, in one order for every seed: what is evaluated was never trained on."""
    pairs = docstrings()
    order = np.random.default_rng(CORPUS_SEED).permutation(len(pairs))
    return [f"{pairs.queries[i]} {pairs.documents[i]}" for i in order]


def _corpus(request: Request, sizes: Sizes, texts: list[str] | None, tokenizer: Any, vocabulary: int) -> Corpus:
    wanted = _whole_number(request, "tokens") or sizes.steps * sizes.batch * sizes.window
    evaluated = sizes.evaluated * sizes.window
    if texts is None:
        tokens = _tokens(tokenizer, _embedded_texts(), wanted + evaluated)
    else:
        tokens = _tokens(tokenizer, texts, wanted + max(evaluated, math.ceil(wanted / (1 / EVALUATED_SHARE - 1))))
    n = len(tokens) // sizes.window
    if n < 2 * FEWEST_WINDOWS:
        least = 2 * FEWEST_WINDOWS * sizes.window
        raise CannotMeasure(f"--data {request.data}: has {len(tokens)} tokens; must have {least} at least")
    if int(tokens.max()) >= vocabulary:
        raise CannotMeasure(f"the tokenizer gives the id {int(tokens.max())}; must be below its {vocabulary} tokens")
    windows = tokens[: n * sizes.window].reshape(n, sizes.window)
    held_out = min(sizes.evaluated, max(FEWEST_WINDOWS, round(EVALUATED_SHARE * n)))
    train_windows = windows[:-held_out]
    counts = np.bincount(train_windows.flatten().numpy(), minlength=vocabulary)
    return Corpus(train_windows, windows[-held_out:], counts)


def _tokens(tokenizer: Any, texts: list[str], wanted: int) -> Tensor:
    """Tokens of the texts one after the other, with the end of each marked; no more texts are read than needed."""
    end = tokenizer.eos_token_id
    ids: list[NDArray[np.int64]] = []
    have = 0
    for start in range(0, len(texts), 256):
        for found in tokenizer(texts[start : start + 256], add_special_tokens=False)["input_ids"]:
            ids.append(np.array([*found, end] if end is not None else found, dtype=np.int64))
            have += len(ids[-1])
        if have >= wanted:
            break
    return torch.from_numpy(np.concatenate(ids)[:wanted])
