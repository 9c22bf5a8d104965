"""Teach a model to say how sure it is, as two numbers, and see whether it can be believed."""

import sys

from practicum.language.confidence import (
    ConfidenceFormat,
    ConfidenceLabeler,
    VerbalConfidence,
    calibration_report,
    families,
    linear_lora,
)
from practicum.models import load_language_model

language = load_language_model(sys.argv[1] if len(sys.argv) > 1 else None)
model, tokenizer = language.model, language.tokenizer
template = "Question: {question}\nAnswer:"

# How often is the model right, and is it the evidence that it misses or the reasoning?
items = families("reasoning", 40) + families("copy", 40, n_records=[2, 3])
labeler = ConfidenceLabeler(model, tokenizer, format=ConfidenceFormat(template=template), random_state=0)
labeled = labeler.label(items)
for one in (labeled[0], labeled[-1]):
    print(one.item.question, "evidence:", round(one.evidence, 2), "reasoning:", round(one.reasoning, 2))

# LoRA in the upper four blocks: the hidden states below are computed once.
verbal = VerbalConfidence(
    model,
    tokenizer,
    ConfidenceFormat("decomposed", template=template),
    lora=linear_lora(model, n_blocks=4),
    lr=5e-4,
    epochs=4,
    batch_size=8,
    random_state=0,
)
test = families("reasoning", 60)[40:] + families("copy", 60, n_records=[2, 3])[40:]
for told in ("untrained", "trained"):
    if told == "trained":
        verbal.fit(labeled)
    result = verbal.predict(test)
    report = calibration_report(result.confidence, result.correct(test))
    print(f"{told}: Brier {report.brier:.3f}, AUROC {report.auroc:.2f}, accuracy {report.accuracy:.2f}")
print(result.text[0])

# The same texts for TRL: SFTTrainer(model, train_dataset=Dataset.from_list(rows), peft_config=..., ...)
rows = verbal.to_dataset(labeled)
print(len(rows), "texts,", sum(label != -100 for label in rows[0]["labels"]), "tokens of the first are trained")

verbal.unload()
