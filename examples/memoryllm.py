"""Train a small MemoryLLM, replace its feed-forward networks by a table on disk, generate, and look into the table."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import Trainer, TrainingArguments

from practicum.datasets import docstrings
from practicum.language import MemoryLMConfig, MemoryLMForCausalLM, TokenLookups, cluster_tokens, nearest_tokens
from practicum.models import load_language_model

texts = docstrings(2000).documents
tokenizer = load_language_model().tokenizer.train_new_from_iterator(texts, vocab_size=2048)
ids = torch.tensor([i for found in tokenizer(texts)["input_ids"] for i in [*found, tokenizer.eos_token_id]])
windows = ids[: len(ids) // 64 * 64].reshape(-1, 64)
rows = [{"input_ids": window, "labels": window} for window in windows]

config = MemoryLMConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    tie_word_embeddings=True,
    flex_beta=1,
)
model = MemoryLMForCausalLM(config)
print(f"{model.num_parameters():,} parameters, {model.num_parameters(active=True):,} of them active")

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=150,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=rows).train()
    model.eval()

    # The feed-forward networks of all layers, as a table with a row for each token of the vocabulary.
    table = model.precompute_lookups(dtype=torch.bfloat16)
    path = Path(folder, "table.safetensors")
    table.quantize(8).save(path)
    print(f"table: {table.nbytes / 1e6:.0f} MB, in 8 bits {path.stat().st_size / 1e6:.0f} MB")

    neighbours, cosines = nearest_tokens(table, layer=0, token_ids=tokenizer.encode(" array"), n_tokens=5)
    print("nearest to ' array' in the first memory:", [tokenizer.decode([i]) for i in neighbours[0]])
    _, report = cluster_tokens(model, 0, 20, tokenizer)
    print(f"clusters of its keys: purity {report.purity:.2f}, by chance {report.purity_by_chance:.2f}")

    # Generate with the table on disk, 200 rows of it in memory.
    counts = np.bincount(ids, minlength=len(tokenizer))
    lookups = TokenLookups.load(path, backend="cached", cache_rows=200, counts=counts)
    model.attach_lookups(lookups, free_memory_weights=True)
    prompt = tokenizer("The number of", return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=20, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    print(tokenizer.decode(out[0]))
    print(f"{lookups.stats.hit_rate:.0%} of {lookups.stats.lookups} lookups were in memory")
