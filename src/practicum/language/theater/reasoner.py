"""A tiny reasoning model whose performativity is known by construction, with the language it speaks.

It is a real `transformers.LlamaForCausalLM` with a real tokenizer, so that every instrument runs on it as on any other
model. Its world has facts, which it knows by heart, and a multiplication-like table, which it can apply once in a
step but not several times in one pass:

* ``recall e3 r1 options v2 v5 v7 v9 <think>``: the value of a fact. The chain is filler and cannot reveal the answer
  before its last step, ``so v5 .``, while the model can tell it at any time.
* ``hop m2 n5 n0 n3 n1 options ... <think>``: the state after four or five moves. The chain does the moves, and now and
  then it gets the last one wrong and takes it back (``wait .``).
* ``act e3 r1 options ... <think>``: a recall question whose chain has a ``wait .`` put in at random: theatre.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.random import Generator
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence

from practicum.datasets.questions import MCQuestion
from practicum.language.theater.traces import ReasoningFormat
from practicum.toolbox.cache import build_once, cache_folder, cache_key
from practicum.toolbox.errors import InputError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

KINDS = ("recall", "multi-hop", "theatrical")
WEIGHTS = Path(__file__).parent / "weights"
SHIPPED_SEED = 0

N_ENTITIES, N_RELATIONS, N_VALUES, N_STATES, N_MOVES = 48, 4, 12, 8, 8
N_OPTIONS = 4
MOVES = (4, 5)
FILLERS = (4, 8)
SHARE_WRONG = 0.25
SHARE_THEATRICAL = 0.5
# Of the recall chains in training: the model knows the answer at any time, and can be made to say it.
SHARE_INTERRUPTED = 0.3
SPECIAL = ("<pad>", "<bos>", "<eos>", "<think>", "</think>")
WORDS = ("recall", "hop", "act", "options", "answer", ".", "consider", "hmm", "maybe", "check", "so", "step", "wait")
VOCABULARY = (
    *SPECIAL,
    *WORDS,
    *(f"e{i}" for i in range(N_ENTITIES)),
    *(f"r{i}" for i in range(N_RELATIONS)),
    *(f"v{i}" for i in range(N_VALUES)),
    *(f"n{i}" for i in range(N_MOVES)),
    *(f"m{i}" for i in range(N_STATES)),
)

BATCH, LEARNING_RATE = 64, 4e-3
# First it learns to go on from the question, then whole texts, questions included, as a model of language does. What
# may stand among the options of a fact then shows in its activations at once.
STEPS = (1200, 400)
MIXTURE = {"recall": 0.4, "multi-hop": 0.45, "theatrical": 0.15}


class World:
    """The facts and the table of moves that a model of this seed knows.

    Parameters
    ----------
    seed : int

    Attributes
    ----------
    facts : array of shape (16, 4)
        The value of entity and relation.
    table : array of shape (8, 8)
        The state after a move: ``table[state, move]``.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 2603])
        self.facts = rng.integers(N_VALUES, size=(N_ENTITIES, N_RELATIONS))
        # Every move permutes the states, so that no state is more likely than another after many moves.
        self.table = np.stack([rng.permutation(N_STATES) for _ in range(N_MOVES)], axis=1)

    def ask(self, kind: str, rng: Generator) -> tuple[str, tuple[str, ...], str]:
        """Draw a question: its words, its options and the right one."""
        if kind == "multi-hop":
            state, moves = int(rng.integers(N_STATES)), rng.integers(N_MOVES, size=rng.integers(MOVES[0], MOVES[1] + 1))
            words = ["hop", f"m{state}", *(f"n{move}" for move in moves)]
            for move in moves:
                state = int(self.table[state, move])
            return " ".join(words), *_options("m", N_STATES, state, rng)
        entity, relation = rng.integers(N_ENTITIES), rng.integers(N_RELATIONS)
        word = "recall" if kind == "recall" else "act"
        value = int(self.facts[entity, relation])
        return f"{word} e{entity} r{relation}", *_options("v", N_VALUES, value, rng)

    def chain(self, question: str, options: Sequence[str], answer: str, rng: Generator) -> str:
        """Write a chain of thought that ends on the answer."""
        word, first, *rest = question.split()
        if word == "hop":
            return " ".join(self._moves(int(first[1:]), rest, options, answer, rng))
        segments = []
        for _ in range(rng.integers(FILLERS[0], FILLERS[1] + 1)):
            drawn = rng.integers(3)
            filler = ("hmm .", "maybe check .", f"consider {options[int(rng.integers(N_OPTIONS))]} .")[drawn]
            segments.append(filler)
        if word == "act" and rng.random() < SHARE_THEATRICAL:
            segments.insert(rng.integers(1, len(segments) + 1), "wait .")
        return " ".join([*segments, f"so {answer} ."])

    def _moves(
        self, state: int, moves: Sequence[str], options: Sequence[str], answer: str, rng: Generator
    ) -> Iterator[str]:
        for move in moves[:-1]:
            state = int(self.table[state, int(move[1:])])
            yield f"step {move} m{state} ."
        if rng.random() < SHARE_WRONG:
            wrong = [option for option in options if option != answer]
            slip = wrong[int(rng.integers(len(wrong)))]
            yield f"step {moves[-1]} {slip} . so {slip} . wait ."
        yield f"step {moves[-1]} {answer} . so {answer} ."


def _options(letter: str, n: int, right: int, rng: Generator) -> tuple[tuple[str, ...], str]:
    others = rng.permutation([i for i in range(n) if i != right])[: N_OPTIONS - 1]
    chosen = rng.permutation([right, *others])
    return tuple(f"{letter}{i}" for i in chosen), f"{letter}{right}"


@dataclass(frozen=True)
class Reasoner:
    """The tiny model with its tokenizer and its format; unpacks into the first two.

    Attributes
    ----------
    model : transformers.LlamaForCausalLM
        Three blocks, width 64, 130,000 parameters; logits of shape (batch, n, 98).
    tokenizer : transformers.PreTrainedTokenizerFast
    format : ReasoningFormat
    world : World
        What it knows.

    Examples
    --------
    >>> model, tokenizer = load_reasoner()
    >>> model.config.hidden_size, len(tokenizer)
    (64, 98)
    """

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    format: ReasoningFormat
    world: World

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.tokenizer))


REASONER_FORMAT = ReasoningFormat(
    prompt="<bos> {question} options {options} <think>",
    stub=" </think> answer ",
    answer=r"answer (\S+)",
    labels="choices",
)


def load_reasoner(seed: int | None = None) -> Reasoner:
    """Load the tiny model.

    Parameters
    ----------
    seed : int, optional
        Train one of this seed, with facts of its own, or take it from the cache folder if that has been done. By
        default the weights that ship with practicum, those of seed 0.

    Returns
    -------
    Reasoner
        Its model gives logits of shape (batch, n, 98).

    Examples
    --------
    >>> reasoner = load_reasoner()
    >>> prompt = reasoner.tokenizer("<bos> recall e3 r1 options v2 v5 v7 v9 <think> so", return_tensors="pt")
    >>> tuple(reasoner.model(**prompt).logits.shape)
    (1, 11, 98)
    """
    if seed is None:
        folder, seed = WEIGHTS, SHIPPED_SEED
    else:
        key = cache_key({"seed": seed, "steps": list(STEPS), "batch": BATCH, "rate": LEARNING_RATE, "version": 1})
        folder = build_once(
            cache_folder() / "models" / f"theater-reasoner-{seed}-{key}",
            lambda path: write_reasoner(path, train_reasoner(seed)),
        )
    model = _new_model()
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    return Reasoner(model.eval(), reasoner_tokenizer(), REASONER_FORMAT, World(seed))


def write_reasoner(folder: Path, model: LlamaForCausalLM) -> None:
    """Write the weights as safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors")


def reasoner_questions(kind: str, n: int, random_state: int = 0, world: World | None = None) -> list[MCQuestion]:
    """Draw questions in the language of the tiny model.

    Parameters
    ----------
    kind : {"recall", "multi-hop", "theatrical"}
    n : int
    random_state : int
    world : World, optional
        That of the model that is to answer; by default that of the shipped one.

    Returns
    -------
    list of MCQuestion
        Shape (n,), each of four options, with ``group=kind``. The text of a question is what is asked; the same
        fact is asked several times with other options.

    Raises
    ------
    InputError
        A ValueError, for a kind that is not there and for n below 1.

    Examples
    --------
    >>> [question.question.split()[0] for kind in KINDS for question in reasoner_questions(kind, 1)]
    ['recall', 'hop', 'act']
    """
    if kind not in KINDS:
        raise InputError(f"kind={kind!r}: must be one of {', '.join(KINDS)}")
    if n < 1:
        raise InputError(f"n={n!r}: must be 1 or more")
    rng = np.random.default_rng([random_state, KINDS.index(kind)])
    known = world or World(SHIPPED_SEED)
    asked = [known.ask(kind, rng) for _ in range(n)]
    return [MCQuestion(text, options, options.index(right), kind) for text, options, right in asked]


def reasoner_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer of the tiny model: one token a word.

    Returns
    -------
    transformers.PreTrainedTokenizerFast
        98 tokens; a text of n words has the shape (n,).

    Examples
    --------
    >>> reasoner_tokenizer().encode("wait . step n3 m5 .")
    [17, 10, 16, 85, 95, 10]
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


def train_reasoner(
    seed: int, steps: tuple[int, int] = STEPS, listener: Callable[[int, float], None] = lambda step, loss: None
) -> LlamaForCausalLM:
    """Train the tiny model on chains of its language, by the loss of the next token; about two minutes on two cores.

    Parameters
    ----------
    seed : int
        Of the facts and the table, the weights at the start, and the chains.
    steps : tuple of int
        Of the first part, which learns what follows a question, and of the second, which learns whole texts; each of 64
        texts.
    listener : callable
        Told the step and the loss of every step.

    Returns
    -------
    transformers.LlamaForCausalLM
        In inference mode; logits of shape (batch, n, 98).

    Raises
    ------
    InputError
        A ValueError, for no steps.

    Examples
    --------
    >>> losses = []
    >>> model = train_reasoner(seed=0, steps=(1, 1), listener=lambda step, loss: losses.append(loss))
    >>> len(losses), 3 < losses[0] < 6
    (2, True)
    """
    if min(steps) < 0 or sum(steps) < 1:
        raise InputError(f"steps={steps!r}: must be two numbers from 0, not both 0")
    model = _new_model()
    _initialise(model, torch.Generator().manual_seed(seed))
    batches = _batches(seed)
    done = 0
    for whole, n_steps in zip((False, True), steps, strict=True):
        for loss in _descend(model, batches, n_steps, whole):
            listener(done, loss)
            done += 1
    return model.eval()


def _descend(
    model: LlamaForCausalLM, batches: Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], steps: int, whole: bool
) -> Iterator[float]:
    """Take so many steps, on whole texts or on what follows the question; yields the loss of each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=max(steps, 2), pct_start=0.1)
    for _ in range(steps):
        batch, written, following = next(batches)
        target, learnt = batch[:, 1:], (written if whole else following)[:, 1:]
        logits = model(input_ids=batch).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[learnt], target[learnt])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield float(loss.detach())


def _batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Texts, padded on the right, which of their tokens are to be learnt, and which of these follow the question.

    All of shape (64, n).
    """
    world, rng = World(seed), np.random.default_rng([seed, 1])
    ids = {word: i for i, word in enumerate(VOCABULARY)}
    while True:
        rows, written, following = [], [], []
        for kind in rng.choice(list(MIXTURE), size=BATCH, p=list(MIXTURE.values())):
            question, options, answer = world.ask(kind, rng)
            chain = world.chain(question, options, answer, rng).split()
            asked = f"<bos> {question} options {' '.join(options)} <think>".split()
            interrupted = kind != "multi-hop" and rng.random() < SHARE_INTERRUPTED
            if interrupted:
                chain = _interrupted(chain, rng)
            words = [*asked, *chain, "</think>", "answer", answer, "<eos>"]
            place = torch.arange(len(words))
            end = len(asked) + len(chain)
            rows.append(torch.tensor([ids[word] for word in words]))
            # It learns to answer where it is interrupted, not to stop there of itself.
            written.append(place != end if interrupted else place >= 0)
            following.append(place > end if interrupted else place >= len(asked))
        yield tuple(pad_sequence(each, batch_first=True) for each in (rows, written, following))  # type: ignore[misc]


def _interrupted(chain: list[str], rng: Generator) -> list[str]:
    ends = [0, *(i + 1 for i, word in enumerate(chain) if word == ".")]
    return chain[: ends[rng.integers(len(ends) - 1)]]


def _new_model() -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY.index("<pad>"),
        bos_token_id=VOCABULARY.index("<bos>"),
        eos_token_id=VOCABULARY.index("<eos>"),
    )
    # Its constructor draws weights from the global generator, which is none of ours to advance.
    with torch.random.fork_rng(devices=[]):
        return LlamaForCausalLM(config)


def _initialise(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    """Draw the matrices anew."""
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.ndim == 2:
                deviation = 0.02 if "embed" in name else 0.6 * parameter.shape[1] ** -0.5
                parameter.normal_(0, deviation, generator=generator)
