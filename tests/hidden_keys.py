"""A slow reference for caches that hold a part: the full cache, and masks that hide the rest."""

import torch


class Hidden:
    """The full cache, with the keys that were let go of hidden by a mask of each layer's own.

    ``kept`` has for each layer the positions that stay of n: shape (T,), or (H_kv, T) where heads differ.
    """

    def __init__(self, model, kept, n):
        self.model, self.hooks = model, []
        self.hidden = {}
        for layer, indices in kept.items():
            rows = indices[None] if indices.ndim == 1 else indices
            hidden = torch.ones(len(rows), n, dtype=torch.bool).scatter(1, rows, False)
            self.hidden[layer] = hidden

    def __enter__(self):
        for layer, block in enumerate(self.model.get_decoder().layers, start=1):
            if layer in self.hidden:
                hook = self.hook(self.hidden[layer])
                self.hooks.append(block.self_attn.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def hook(self, hidden):
        def mask(module, args, kwargs):
            m = kwargs["hidden_states"].shape[1] if "hidden_states" in kwargs else args[0].shape[1]
            past = kwargs["cache"].layers[module.layer_idx].get_seq_length()
            causal = torch.arange(past + m)[None] <= past + torch.arange(m)[:, None]
            heads = module.config.num_attention_heads
            seen = causal.repeat(heads, 1, 1)
            seen[..., : hidden.shape[1]] &= ~hidden.repeat_interleave(heads // len(hidden), dim=0)[:, None]
            kwargs["attention_mask"] = torch.zeros(1, *seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
            return args, kwargs

        return mask

    def __exit__(self, *exception):
        for hook in self.hooks:
            hook.remove()
