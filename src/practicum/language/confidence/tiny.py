"""A language model of a few thousand random weights that knows single characters, for examples and trials."""

from __future__ import annotations

import string
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

WIDTH = 32


def tiny_model(model_type: str = "llama", n_layers: int = 3, *, scale: float = 0.02, seed: int = 0) -> tuple[Any, Any]:
    r"""Make a model with random weights, and a tokenizer that splits text into characters.

    Parameters
    ----------
    model_type : str
        As transformers calls it: ``"llama"``, ``"qwen2"``, ``"gpt2"`` and others with the usual names of sizes.
    n_layers : int
    scale : float
        Standard deviation of the weights.
    seed : int

    Returns
    -------
    model : transformers.PreTrainedModel
        In inference mode.
    tokenizer : transformers.PreTrainedTokenizerFast

    Examples
    --------
    >>> model, tokenizer = tiny_model("gpt2")
    >>> tokenizer.decode(tokenizer("2 + 2\n= 4")["input_ids"])
    '2 + 2\n= 4'
    """
    tokenizer = character_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": n_layers,
        "hidden_size": WIDTH,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 2 * WIDTH,
        "max_position_embeddings": 1024,
        "initializer_range": scale,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if model_type == "gpt2":
        del sizes["num_key_value_heads"], sizes["intermediate_size"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
    return model.eval(), tokenizer


def character_tokenizer() -> Any:
    """A tokenizer with one token for every printable ASCII character and one that ends the text."""
    tokens = ["<end>", "<unknown>", *string.digits, *string.ascii_letters, *string.punctuation, " ", "\n"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>")
