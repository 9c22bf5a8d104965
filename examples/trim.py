"""Choose the samples of an instruction pool that teach a task, look at why, and keep scores on disk."""

import json
import sys

import numpy as np

from practicum.language import TrimSelector, select_coreset
from practicum.language.trim.tasks import instruction_pool, wanted_samples
from practicum.models import load_language_model

loaded = load_language_model(sys.argv[1] if len(sys.argv) > 1 else None)
# A pool of eleven kinds of instructions, and six word problems of the kind that is wanted, about other things.
pool = [{"prompt": sample["prompt"], "response": sample["response"]} for sample in instruction_pool(3)]
target = wanted_samples(6)

selector = TrimSelector(loaded.model, loaded.tokenizer).fit(target)
print(len(selector.fingerprint_ids_), "fingerprints of", selector.fingerprints_.shape[1], "numbers")

# One pass; interrupted, it goes on from the last block of `shard_size` samples. The pool may also be a datasets.Dataset
# or a stream; `dataset.select(chosen)` then gives the coreset to a Trainer.
scores = selector.score_samples(pool, store="trim-scores")
chosen = select_coreset(scores, fraction=0.1)
print("chosen:", *(json.dumps(pool[i]["prompt"]) for i in chosen), sep="\n  ")
print("last:  ", json.dumps(pool[int(np.argmin(scores))]["prompt"]))

# Budgets may be in samples or in tokens, and near copies may give way to others.
print("in 300 tokens:", len(selector.select(pool, tokens=300, store="trim-scores")), "samples")
print("more different:", selector.select(pool, n=3, diversity=0.5, store="trim-scores").tolist())

# Which tokens matched, and whether the target has them.
for token, score, seen in selector.explain(pool[int(chosen[0])])[:8]:
    print(f"{token!r:12} {score:+.2f} {'seen' if seen else 'by the nearest'}")
