"""What the loading of any model has in common: where it is, whether it is whole, and where it shall run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from practicum.toolbox.errors import InputError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
NOT_STATED = "not stated; see the model's own card"


class ModelError(InputError):
    """A model that cannot be loaded; one line that names the argument, the value seen and what would be right."""


def locate(name_or_path: str | Path) -> str:
    """Return a folder that holds a model, or a hub id.

    What exists on disk, and what can only be a path, is taken as a folder.

    Raises
    ------
    ModelError
        When the folder is not there, or has no ``config.json`` or no safetensors weights; when it is neither a
        folder nor can be a hub id.

    Examples
    --------
    >>> locate("HuggingFaceTB/SmolLM2-135M-Instruct")
    'HuggingFaceTB/SmolLM2-135M-Instruct'
    >>> locate("./nowhere")
    Traceback (most recent call last):
    practicum.models.loading.ModelError: name_or_path='./nowhere': there is no such folder
    """
    given = str(name_or_path)
    folder = Path(given).expanduser()
    if given and folder.exists():
        _require_whole(given, folder)
        return str(folder)
    if isinstance(name_or_path, Path) or given.startswith((".", "/", "~")) or folder.is_absolute():
        raise ModelError(f"name_or_path={given!r}: there is no such folder")
    if not HUB_ID.fullmatch(given):
        raise ModelError(f"name_or_path={given!r}: neither a folder that exists nor a hub id such as 'owner/name'")
    return given


def _require_whole(given: str, folder: Path) -> None:
    if not folder.is_dir():
        raise ModelError(f"name_or_path={given!r}: a file; give the folder that holds config.json and the weights")
    if not (folder / "config.json").is_file():
        raise ModelError(f"name_or_path={given!r}: there is no config.json in this folder")
    if not any(folder.glob("*.safetensors")):
        others = sorted(
            p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.h5", "*.gguf") for p in folder.glob(pattern)
        )
        found = f"; {others[0]} is not read: save the model with save_pretrained" if others else ""
        raise ModelError(f"name_or_path={given!r}: there are no weights in this folder, model.safetensors{found}")


def usable_device(device: Any) -> Any:
    """Return the torch device that is meant.

    Raises
    ------
    ModelError
        When torch does not know it or the machine does not have it.

    Examples
    --------
    >>> usable_device("cpu")
    device(type='cpu')
    >>> usable_device("warp")
    Traceback (most recent call last):
    practicum.models.loading.ModelError: device='warp': not a torch device such as 'cpu' or 'cuda:0'
    """
    import torch

    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"device={str(device)!r}: not a torch device such as 'cpu' or 'cuda:0'") from error
    try:
        torch.zeros(1, device=chosen).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise ModelError(f"device={str(device)!r}: this machine or this torch does not have it") from error
    return chosen


def load_pretrained(
    auto: Any, name_or_path: str, *, tolerated: tuple[str, ...] = (), **options: Any
) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a folder or hub id, ready for inference.

    Parameters
    ----------
    auto : class
        A transformers auto class.
    name_or_path : str
        As returned by `locate`.
    tolerated : tuple of str
        Parts of the model that may be without weights because they are not used.
    **options
        For ``auto.from_pretrained``. Only safetensors are read, and no code that comes with the model is run.

    Raises
    ------
    ModelError
        When anything of it cannot be read, or weights are missing that the model needs.
    """
    from safetensors import SafetensorError
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)
        with _without_progress_bars():
            model, report = auto.from_pretrained(
                name_or_path, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
            )
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
        SafetensorError,
        ImportError,
        TypeError,
        AttributeError,
    ) as error:
        raise ModelError(f"name_or_path={name_or_path!r}: cannot be loaded: {_first_line(error)}") from error
    missing = sorted(name for name in report["missing_keys"] if not name.startswith(tolerated))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        message = (
            f"name_or_path={name_or_path!r}: the weights lack {missing[0]}{more}, which {type(model).__name__} needs"
        )
        raise ModelError(message)
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars inside the block: what is shown is the command line's to decide."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
