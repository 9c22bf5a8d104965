import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from practicum.models import LanguageModel, ModelError, load_language_model, load_token_encoder
from practicum.models.loading import locate


def refused(load, name, reason: str, **options) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        load(name, **options)
    assert "\n" not in str(caught.value)
    assert re.match(r"(name_or_path|device)='", str(caught.value))


LOADERS = pytest.mark.parametrize("load", [load_language_model, load_token_encoder])


def test_importing_the_house_of_models_does_not_import_torch():
    code = "import sys, practicum.models; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_local_causal_model_is_loaded_as_it_was_saved(tiny_causal_folder: Path):
    from transformers import LlamaForCausalLM

    loaded = load_language_model(tiny_causal_folder)
    assert isinstance(loaded, LanguageModel)
    assert loaded.name == tiny_causal_folder.name
    assert loaded.provenance == str(tiny_causal_folder)
    assert not loaded.model.training
    saved = LlamaForCausalLM.from_pretrained(tiny_causal_folder).state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in loaded.model.state_dict().items())
    encoded = loaded.tokenizer("the cat sat", return_tensors="pt")
    generated = loaded.model.generate(
        input_ids=encoded.input_ids, attention_mask=encoded.attention_mask, max_new_tokens=3, do_sample=False
    )
    assert generated.shape[0] == 1


def test_dtype_is_that_asked_for(tiny_causal_folder: Path):
    assert load_language_model(tiny_causal_folder).model.dtype == torch.float32
    assert load_language_model(tiny_causal_folder, dtype="bfloat16").model.dtype == torch.bfloat16
    assert load_language_model(tiny_causal_folder, dtype=torch.float16).model.dtype == torch.float16
    for wrong in ("float99", "int64", torch.int64, "nn", 3):
        with pytest.raises(ValueError, match=r"dtype=.*floating-point"):
            load_language_model(tiny_causal_folder, dtype=wrong)


def test_progress_bars_of_transformers_stay_as_they_were(tiny_causal_folder: Path, capfd):
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    load_language_model(tiny_causal_folder)
    assert logging.is_progress_bar_enabled() == before
    assert "Loading weights" not in capfd.readouterr().err


@LOADERS
def test_a_folder_that_is_not_there(load, tmp_path: Path):
    refused(load, tmp_path / "nowhere", "no such folder")
    refused(load, "./nowhere", "no such folder")
    refused(load, "~/nowhere/at/all", "no such folder")


@LOADERS
def test_a_file_in_place_of_a_folder(load, tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    refused(load, tmp_path / "model.safetensors", "a file; give the folder")


@LOADERS
def test_an_empty_folder(load, tmp_path: Path):
    refused(load, tmp_path, "no config.json")


@LOADERS
def test_a_folder_without_weights(load, tmp_path: Path, tiny_causal_folder: Path):
    shutil.copy(tiny_causal_folder / "config.json", tmp_path)
    refused(load, tmp_path, "no weights in this folder, model.safetensors$")
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    refused(load, tmp_path, r"pytorch_model\.bin is not read: save the model with save_pretrained")


@LOADERS
def test_damaged_weights(load, tmp_path: Path, tiny_causal_folder: Path):
    shutil.copytree(tiny_causal_folder, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    refused(load, tmp_path / "model", "cannot be loaded")


@LOADERS
def test_a_damaged_config(load, tmp_path: Path, tiny_causal_folder: Path):
    shutil.copytree(tiny_causal_folder, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{")
    refused(load, tmp_path / "model", "cannot be loaded")


@LOADERS
def test_an_architecture_that_is_not_known(load, tmp_path: Path, tiny_causal_folder: Path):
    shutil.copytree(tiny_causal_folder, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "from-the-future"}))
    refused(load, tmp_path / "model", "cannot be loaded")


@LOADERS
def test_code_that_comes_with_a_model_is_not_run(load, tmp_path: Path, tiny_causal_folder: Path):
    shutil.copytree(tiny_causal_folder, tmp_path / "model")
    ran = tmp_path / "ran"
    (tmp_path / "model" / "configuration_mine.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MyConfig"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    refused(load, tmp_path / "model", "cannot be loaded")
    assert not ran.exists()


def test_weights_that_the_model_needs_and_the_folder_lacks(tmp_path: Path, tiny_causal_folder: Path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_causal_folder, tmp_path / "model")
    weights = load_file(tiny_causal_folder / "model.safetensors")
    del weights["model.norm.weight"], weights["lm_head.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    refused(load_language_model, tmp_path / "model", r"lack lm_head\.weight and 1 more, which LlamaForCausalLM needs")


def test_an_encoder_is_not_a_language_model(tiny_encoder_folder: Path):
    refused(load_language_model, tiny_encoder_folder, "the weights lack cls.predictions")


def test_what_can_be_a_hub_id_and_what_cannot():
    assert locate("owner/name-1.0_x") == "owner/name-1.0_x"
    assert locate("gpt2") == "gpt2"
    for wrong in ("a/b/c", "", "owner/", "own er/name", "owner/name@main"):
        with pytest.raises(ModelError, match="neither a folder that exists nor a hub id"):
            locate(wrong)


@LOADERS
def test_a_hub_id_that_cannot_be_reached(load, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(load, "no-such-owner/no-such-model", "cannot be loaded")


@LOADERS
def test_a_device_that_is_not_there(load, tiny_causal_folder: Path):
    refused(load, tiny_causal_folder, "not a torch device", device="warp")
    refused(load, tiny_causal_folder, "does not have it", device="cuda:99")
