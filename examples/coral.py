"""Correct a language model's answers to multiple-choice questions, on topics it was fitted on and on one it was not."""

import tempfile

from practicum.datasets.questions import mcq_topics
from practicum.language.coral import Coral, CoralForMultipleChoice
from practicum.models import load_language_model

# Any causal language model of transformers will do; this one ships inside a package.
loaded = load_language_model()
questions = mcq_topics(30, topics=["capital", "element", "currency", "http"])
seen, unseen = questions.hold_out("currency")
train, test = seen[::2], seen[1::2]

steered = CoralForMultipleChoice(loaded.model, loaded.tokenizer, layer=19, random_state=0).fit(train)
print("on other questions of the same topics:")
print(steered.evaluate(test))
print("on a topic it has not seen:")
print(steered.evaluate(unseen))

question = test[0]
p = steered.predict_proba([question])[0]
before = steered.coral_.base_proba(steered.scorer([question]), temperature=1.0)[0]
print(question.question, dict(zip(question.choices, before.round(2).tolist(), strict=True)))
print("steered:", dict(zip(question.choices, p.round(2).tolist(), strict=True)))

with tempfile.TemporaryDirectory() as folder:
    steered.coral_.save(folder)
    again = CoralForMultipleChoice.with_fitted(Coral.load(folder), loaded.model, loaded.tokenizer)
    print("loaded again:", again.predict_proba([question])[0].round(2).tolist())

# A letter that is generated can be steered too: fit on letters, and generate inside `attach`.
lettered = CoralForMultipleChoice(
    loaded.model, loaded.tokenizer, mode="letter", layer=19, n_permutations=2, random_state=0
).fit(train[:20])
letters = lettered.logits_processor("ABCD")
inputs = loaded.tokenizer(lettered.prompt(question), return_tensors="pt")
with lettered.attach():
    answer = loaded.model.generate(
        **inputs,
        max_new_tokens=1,
        do_sample=False,
        logits_processor=[letters],
        # A model that is too small to keep to letters is held to them.
        prefix_allowed_tokens_fn=lambda batch, tokens: letters.letter_ids,
    )
print("generated:", loaded.tokenizer.decode(answer[0, -1:]))
