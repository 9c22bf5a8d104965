"""A language model of a few thousand random weights that knows a few words, for examples and trials."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

WIDTH, HEADS = 32, 4


def tiny_model(words: str, model_type: str = "llama", n_layers: int = 3, *, scale: float = 0.2, seed: int = 0) -> Any:
    """Make a model with random weights, and a tokenizer with a token for each word, alone and behind a space.

    Parameters
    ----------
    words : str
        Separated by spaces.
    model_type : str
        As transformers calls it: ``"llama"``, ``"gpt2"`` and others with the usual names of sizes.
    n_layers : int
    scale : float
        Standard deviation of the weights.
    seed : int

    Returns
    -------
    model : transformers.PreTrainedModel
        In inference mode; it has 4 heads of 8 values in each layer.
    tokenizer : transformers.PreTrainedTokenizerFast

    Examples
    --------
    >>> model, tokenizer = tiny_model("up down")
    >>> tokenizer.convert_ids_to_tokens(tokenizer(" up: down;")["input_ids"])
    [' up', ':', ' down', ';']
    """
    tokenizer = word_tokenizer(words)
    sizes = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": n_layers,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "head_dim": WIDTH // HEADS,
        "intermediate_size": 2 * WIDTH,
        "max_position_embeddings": 512,
        "initializer_range": scale,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if model_type == "gpt2":
        del sizes["num_key_value_heads"], sizes["intermediate_size"], sizes["head_dim"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
    return model.eval(), tokenizer


def word_tokenizer(words: str) -> Any:
    """A tokenizer with a token for each word, alone and behind a space, for ``: ; .`` and for the space itself."""
    alone = list(dict.fromkeys(words.split()))
    tokens = ["<end>", "<unknown>", ":", ";", ".", ",", " ", *alone, *(f" {word}" for word in alone)]
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unknown>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[:;.,]| ?[^ :;.,]+| "), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>", unk_token="<unknown>")
