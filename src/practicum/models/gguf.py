"""Llama models in GGUF files, written as folders that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from practicum.toolbox.extras import requires

# GGUF's name of a tensor -> the name it has in transformers' LlamaForCausalLM.
OUTER_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3


def write_llama_folder(file: Path, folder: Path) -> None:
    """Write a Llama model in a GGUF file as a folder for ``from_pretrained``, its weights expanded to float32.

    Parameters
    ----------
    file : pathlib.Path
        A GGUF file of architecture ``llama`` with a byte-level BPE tokenizer of kind ``smollm``.
    folder : pathlib.Path
        Is made; gets ``config.json``, ``model.safetensors``, the tokenizer and its chat template.

    Raises
    ------
    ValueError
        For another architecture or tokenizer, and for a tensor whose name is not known.
    MissingExtra
        When gguf or transformers is not installed.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.gguf").write_bytes(b"not such a file")
    ...     write_llama_folder(Path(folder, "a.gguf"), Path(folder, "model"))
    Traceback (most recent call last):
    ValueError: ...
    """
    with requires("embedded", "reading a GGUF file"):
        from gguf import GGUFReader
        from safetensors.numpy import save_file

    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    if fields["general.architecture"] != "llama":
        raise ValueError(f"{file}: architecture {fields['general.architecture']!r}; only 'llama' can be read")
    folder.mkdir()
    weights = _weights(reader.tensors, fields)
    _config(fields, tied="lm_head.weight" not in weights).save_pretrained(folder)
    _tokenizer(file, fields).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _config(fields: dict[str, Any], tied: bool) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        rope_parameters={"rope_type": "default", "rope_theta": float(fields["llama.rope.freq_base"])},
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=tied,
        dtype="float32",
    )


def _weights(tensors: Any, fields: dict[str, Any]) -> dict[str, np.ndarray]:
    from gguf.quants import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if kind in heads:
            values = _halves_of_heads(values, heads[kind])
        weights[_transformers_name(tensor.name)] = np.ascontiguousarray(values)
    return weights


def _transformers_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in OUTER_TENSORS:
        return f"{OUTER_TENSORS[stem]}.weight"
    blk, number, kind = [*stem.split("."), "", ""][:3]
    if blk != "blk" or kind not in BLOCK_TENSORS:
        raise ValueError(f"tensor {name!r} is not one of a Llama model")
    return f"model.layers.{number}.{BLOCK_TENSORS[kind]}.weight"


def _halves_of_heads(values: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorder the rows of each head from rotated pairs side by side to first halves before second halves.

    Rotary embedding turns pairs of rows; GGUF keeps the two of a pair together, transformers half a head apart.
    """
    rows, columns = values.shape
    return values.reshape(n_heads, rows // n_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(file: Path, fields: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = (fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"{file}: tokenizer {'/'.join(map(str, kind))}; only 'gpt2/smollm' can be read")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, type in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if type == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        model_max_length=fields["llama.context_length"],
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    )
