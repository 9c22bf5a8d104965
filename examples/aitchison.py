"""Watch the attention of a model with the Aitchison norm, raise an alarm, and scale attention with the context."""

import torch

from practicum.language import AttentionMonitor, LengthScaledAttention
from practicum.models import load_language_model

loaded = load_language_model()
model, tokenizer = loaded.model, loaded.tokenizer
text = "Attention tells tokens apart by the differences of their logits. " * 40
ids = tokenizer(text, return_tensors="pt").input_ids

# The norm needs queries and keys only, so it costs little beside any attention kernel; entropy here is of 32 rows.
with torch.no_grad(), AttentionMonitor(model, metrics=("aitchison", "entropy"), sample_rows=32) as monitor:
    model(ids)
print("layers x heads:", tuple(monitor.result()["aitchison"].shape))
lengths, means = monitor.by_length("aitchison")
for n, norm in zip(lengths.tolist(), means.nanmean((0, 1)).tolist(), strict=True):
    print(f"rows that see {n:4d} keys or more: norm {norm:.2f}")
monitor.figure().write_html("aitchison.html")

# Calibrate on clean batches, then look for heads that are off.
clean = [ids[:, i : i + 64] for i in range(0, 256, 64)]
monitor = AttentionMonitor(model, layers=[2, 6, 10], metrics=("aitchison",))
monitor.calibrate(clean)
# What is entered first acts first: the monitor is to see the scaled queries.
with torch.no_grad(), LengthScaledAttention(model, law=lambda n: torch.full(n.shape, 1.3)), monitor:
    model(ids[:, 256:320])
print("heads that are off:", [(layer, head, round(z, 1)) for layer, head, z in monitor.alarms(z=4.0)[:5]])

# Beyond the training length multiply the logits by sqrt(log n / log n0); "auto" measures the exponent of each head.
with torch.no_grad(), LengthScaledAttention(model, law="sqrt_log", train_length=256):
    loss = model(ids, labels=ids).loss
print("loss with scaled attention:", round(float(loss), 3))
law = LengthScaledAttention(model, law="auto", train_length=256).calibrate([ids])
print("median exponent of log n that keeps rows as sharp:", round(law.exponent.median().item(), 2))
