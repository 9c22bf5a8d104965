"""Keep half of the worked examples of a prompt, as wholes, and generate; then see what that costs which task."""

from practicum.models import load_language_model
from practicum.serving import ShotKV, split_units
from practicum.serving.shotkv import kvfundabench, shot_items

loaded = load_language_model()
model, tokenizer = loaded.model, loaded.tokenizer

item = shot_items("mixed", 1, n_units=12, random_state=1)[0]
units = split_units(tokenizer, item.prompt, separator="\n\n")
press = ShotKV(prefill_ratio=0.5, decode_ratio=0.5)
with press(model):
    cache = press.prefill(model, units.input_ids, units)
    written = model.generate(units.input_ids, cache=cache, max_new_tokens=20, do_sample=False)
report = cache.report
print(f"kept {report.kept_fraction:.0%} of {report.full_nbytes / 2**20:.1f} MiB")
print("examples of the first layer:", report.units_by_layer[1], "of the last:", report.units_by_layer[30])
print(tokenizer.decode(written[0, units.input_ids.shape[1] :]))

for bench in kvfundabench(model, tokenizer, ["label", "needle"], ["shotkv", "snapkv"], [0.25], seeds=1, n_items=2):
    print({task: [round(bench.change(task, m, r), 2) for m, r in bench.methods] for task in bench.tasks})
