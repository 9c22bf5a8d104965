"""Find the heads that say what the task is, ask why a prompt fails, and repair it."""

import torch

from practicum.datasets import load_tasks
from practicum.language import HeadPatch, LexicalTaskHeads, build_prompts
from practicum.language.taskheads import head_figure, mean_head_outputs, patch_scores, write_task_page
from practicum.models import load_language_model

loaded = load_language_model()
model, tokenizer = loaded.model, loaded.tokenizer
tasks = load_tasks(["country-capital", "country-currency"])

finder = LexicalTaskHeads(model, tokenizer, require_correct=False).fit(tasks, n_prompts=20, n_held_out=8)
for task in tasks:
    print(f"{task}: heads {finder.heads_[task]['examples']}, in both styles {finder.shared_[task]}")
print("what head 7 of layer 22 says:", [token for token, _ in finder.decode(" Japan: yen; Mexico:", 22, 7)])

# Which task does a prompt evoke?
for found in finder.diagnose(" Japan: yen; Mexico:"):
    print(f"{found.task}: {found.activation} heads, share {found.share:.2f}")

# Write what the heads give in good prompts into worse ones: those of other countries, with a single example.
task = "country-capital"
heads = finder.heads_[task]["examples"]
good = mean_head_outputs(model, tokenizer, build_prompts(tasks[task], indices=range(16)))
prompts = build_prompts(tasks[task], n_shots=1, indices=range(20, 40))
answers = [tasks[task].pairs[i][1] for i in range(20, 40)]
scores = patch_scores(model, tokenizer, prompts, answers, [([], good, 1.0), (heads, good, 3.0)])
print(f"answered: {scores.accuracy[0]:.0%} as they are, {scores.accuracy[1]:.0%} with the heads patched")

# The same for any forward pass, by hooks that go with the block.
with torch.no_grad(), HeadPatch(model, heads, good, scale=3):
    answer = model(**tokenizer(prompts[0], return_tensors="pt")).logits[0, -1].argmax()
print(f"{prompts[0]} ->{tokenizer.decode([answer])}")

head_figure(finder, task).write_html("heads.html")
print("the page:", write_task_page(finder, task, "country-capital.html"))
