"""Prompts that state a task by examples or by an instruction, and the tokens in which answers and words begin."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from practicum.datasets.tasks import SLOT, Task
from practicum.toolbox.errors import InputError

Style = Literal["examples", "instruction"]
STYLES: tuple[Style, ...] = ("examples", "instruction")
# A word may begin a text, follow a space or stand in a name such as file_name.
PREFIXES = ("", " ", ".", "_", "-")


def build_prompts(
    task: Task,
    style: Style = "examples",
    n_shots: int = 5,
    template: int = 0,
    indices: Sequence[int] | None = None,
) -> list[str]:
    """Write prompts for the pairs of a task.

    With examples, a query follows the ``n_shots`` pairs that precede it in the task, the last pair preceding the first:
    ``" in: out; in: out; query:"``. With an instruction, the query takes the place of ``{input}``.

    Parameters
    ----------
    task : Task
    style : {"examples", "instruction"}
    n_shots : int
        Examples in a prompt; 0 leaves the query alone.
    template : int
        Which of ``task.instructions``.
    indices : sequence of int, optional
        The pairs to ask for; all by default.

    Returns
    -------
    list of str, of shape (n,)

    Raises
    ------
    InputError
        A ValueError: for as many shots as there are pairs (a query would be among its own examples), a template or a
        pair that is not there, an unknown style.

    References
    ----------
    Z. Yang et al., "Shared Lexical Task Representations Explain Behavioral Variability In LLMs", arXiv:2604.22027.

    Examples
    --------
    >>> task = Task("opposite", [("up", "down"), ("in", "out"), ("hot", "cold")], ["opposite"], ["Not {input} but"])
    >>> build_prompts(task, n_shots=2, indices=[1])
    [' hot: cold; up: down; in:']
    >>> build_prompts(task, "instruction", indices=[1])
    ['Not in but']
    """
    if style not in STYLES:
        raise InputError(f"style={style!r}: must be one of {', '.join(map(repr, STYLES))}")
    n = len(task.pairs)
    chosen = list(range(n)) if indices is None else [int(i) for i in indices]
    for i in chosen:
        if not 0 <= i < n:
            raise InputError(f"indices: {i} must be from 0 to {n - 1}, the pairs of {task.name}")
    if style == "instruction":
        if not 0 <= template < len(task.instructions):
            there = f"from 0 to {len(task.instructions) - 1}" if task.instructions else "of a task with instructions"
            raise InputError(f"template={template}: must be {there}; the task is {task.name}")
        return [task.instructions[template].replace(SLOT, task.pairs[i][0]) for i in chosen]
    if not 0 <= n_shots < n:
        raise InputError(
            f"n_shots={n_shots}: must be from 0 to {n - 1}: {task.name} has {n} pairs, and a query must not be among "
            "its own examples"
        )
    prompts = []
    for i in chosen:
        shots = "".join(" {}: {};".format(*task.pairs[j % n]) for j in range(i - n_shots, i))
        prompts.append(f"{shots} {task.pairs[i][0]}:")
    return prompts


def answer_tokens(tokenizer: Any, prompts: Sequence[str], answers: Sequence[str]) -> Tensor:
    r"""Find the token in which each answer begins behind its prompt.

    The answer follows a space. Some tokenizers split the space off (" 5" into " " and "5"); such a first token tells
    nothing of the answer, and a model that writes any space would be right.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    prompts, answers : sequence of str

    Returns
    -------
    Tensor of shape (n,), int64
        -1 where the first token is nothing but white space.

    Examples
    --------
    >>> class Letters:
    ...     def __call__(self, text, add_special_tokens=True):
    ...         return {"input_ids": [ord(letter) for letter in text.replace(" b", "B")]}
    ...
    ...     def decode(self, ids):
    ...         return "".join(map(chr, ids))
    >>> answer_tokens(Letters(), ["a:", "a:"], ["b", "c"]).tolist() == [ord("B"), -1]
    True
    """
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        before = tokenizer(prompt)["input_ids"]
        whole = tokenizer(f"{prompt} {answer}")["input_ids"]
        n = len(before)
        if len(whole) > n and whole[:n] == before:
            token = whole[n]
        else:  # the answer runs into the prompt's last token, or a closing token follows the prompt
            token = tokenizer(f" {answer}", add_special_tokens=False)["input_ids"][0]
        found.append(token if tokenizer.decode([token]).strip() else -1)
    return torch.tensor(found, dtype=torch.int64)


def word_tokens(tokenizer: Any, task: Task) -> Tensor:
    """Find the tokens that are a word of the task: in lower case, Capitalised, in UPPER case, behind a space, "." ...

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    task : Task

    Returns
    -------
    Tensor of shape (n,), int64
        In increasing order.

    Warns
    -----
    UserWarning
        Where some words are no single token in any form: they are dropped.

    Raises
    ------
    InputError
        A ValueError where no word is a single token.

    Examples
    --------
    >>> class Words:
    ...     def __call__(self, text, add_special_tokens=True):
    ...         return {"input_ids": [{" up": 3, " UP": 4}.get(text, 0)] * (1 if text in (" up", " UP") else 2)}
    >>> word_tokens(Words(), Task("above", [("a", "b"), ("c", "d")], ["up"]))
    tensor([3, 4])
    """
    found: set[int] = set()
    dropped = []
    unknown = getattr(tokenizer, "unk_token_id", None)
    for word in task.words:
        of_word = set()
        for form in dict.fromkeys((word, word.lower(), word.upper(), word.capitalize())):
            for prefix in PREFIXES:
                ids = tokenizer(prefix + form, add_special_tokens=False)["input_ids"]
                if len(ids) == 1 and ids[0] != unknown:
                    of_word.add(int(ids[0]))
        found |= of_word
        if not of_word:
            dropped.append(word)
    if not found:
        raise InputError(
            f"words: none of {', '.join(task.words)} is a single token of this tokenizer; give the task {task.name!r} "
            "other words"
        )
    if dropped:
        warnings.warn(f"words of {task.name}: no single token, left out: {', '.join(dropped)}", stacklevel=2)
    return torch.tensor(sorted(found), dtype=torch.int64)


def names_the_task(task: Task, template: int) -> bool:
    """Whether an instruction has a word of the task in it, so that a head that says the word may only copy it.

    Parameters
    ----------
    task : Task
    template : int

    Returns
    -------
    bool

    Examples
    --------
    >>> pairs, instructions = [("a", "b"), ("c", "d")], ["The opposite of {input} is", "Not {input} but"]
    >>> task = Task("opposite", pairs, ["opposite"], instructions)
    >>> names_the_task(task, 0), names_the_task(task, 1)
    (True, False)
    """
    text = task.instructions[template].lower()
    return any(word.lower() in text for word in task.words)
