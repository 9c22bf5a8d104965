"""CORAL in ``lm-eval``: a Hugging Face model whose multiple-choice likelihoods are steered.

Importing this file registers the model under the name ``practicum-coral``; nothing else of the package imports it, so
that ``lm-eval`` is needed only where it is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from practicum.language.coral.estimator import Coral
from practicum.toolbox.choices import ChoiceScores
from practicum.toolbox.errors import InputError
from practicum.toolbox.extras import MissingExtra
from practicum.toolbox.taps import Taps

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    raise MissingExtra("CoralLM needs lm_eval: pip install 'lm-eval[hf]>=0.4.9'", name=error.name) from error


@register_model("practicum-coral")
class CoralLM(HFLM):
    r"""A causal language model of ``lm-eval`` whose answers to multiple-choice questions CORAL steers.

    The options of one document become one question again: their log-likelihoods are the scores s, the activation at the
    last token of each (in letter mode, at the last token of the context) goes to the probe, and what is returned for
    each is the logarithm of its steered probability. ``acc`` then is the accuracy of the steered answer. ``acc_norm``
    divides by the length of the option, which has no meaning for a probability that is already corrected. Tasks that
    generate, and likelihoods of single texts, are those of the model itself.

    Parameters
    ----------
    pretrained : str or transformers.PreTrainedModel
        As for lm-eval's own ``hf`` model.
    coral : Coral, str or pathlib.Path
        Fitted on scores of this model, of summed log-probabilities, or the folder where `Coral.save` wrote it. The task
        must ask as the scorer did: ``"Question: {{question}}\nAnswer:"`` by default.
    **options
        Of lm-eval's ``HFLM``: ``tokenizer``, ``batch_size``, ``device``, ``dtype`` and so on.

    Raises
    ------
    InputError
        A ValueError, when the probe was fitted on another model.

    Examples
    --------
    In Python, ``lm_eval.simple_evaluate(CoralLM(pretrained=name, coral="coral/"), tasks=["arc_easy"])``. Options of
    shape (K,) are scored in one batch.
    """

    def __init__(self, pretrained: Any, coral: Any, **options: Any) -> None:
        super().__init__(pretrained=pretrained, **options)
        if self.backend != "causal":
            raise InputError(f"pretrained={pretrained!r}: is not a causal language model")
        self.coral: Coral = coral if isinstance(coral, Coral) else Coral.load(coral)
        self.coral.require_model(self.model)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return log-probability and greediness of each continuation, steered where it is an option.

        Parameters
        ----------
        requests : list of lm_eval.api.instance.Instance

        Returns
        -------
        list of (float, bool)
        """
        questions = options_of_documents(requests)
        alone = sorted(set(range(len(requests))) - {i for members in questions for i in members})
        answers: dict[int, tuple[float, bool]] = {}
        if alone:
            plain = super().loglikelihood([requests[i] for i in alone], disable_tqdm=disable_tqdm)
            answers |= dict(zip(alone, plain, strict=True))
        for members in questions:
            pairs = [self._encode_pair(*requests[i].args) for i in members]
            answers |= dict(zip(members, self._steered(pairs), strict=True))
        return [answers[i] for i in range(len(requests))]

    def _steered(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        layers = self.coral.layer_ if isinstance(self.coral.layer_, tuple) else (self.coral.layer_,)
        # As in HFLM, a text that is too long loses its beginning.
        rows = [(context + continuation)[-self.max_length :] for context, continuation in pairs]
        longest = max(map(len, rows))
        ids = torch.zeros((len(rows), longest), dtype=torch.long, device=self.device)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row, device=self.device)
            mask[i, : len(row)] = 1
        begin = [len(row) - len(continuation) for row, (_, continuation) in zip(rows, pairs, strict=True)]
        offset = min(begin) - 1
        with torch.inference_mode(), Taps(self.model, list(layers)) as taps:
            logits = self._logits_from(offset, ids, mask)
            seen = {layer: taps[layer] for layer in layers}
        scores: list[float] = []
        greedy: list[bool] = []
        hidden: dict[int, list[Any]] = {layer: [] for layer in layers}
        for i, (row, (_, continuation)) in enumerate(zip(rows, pairs, strict=True)):
            first = begin[i]
            logs = torch.log_softmax(logits[i, first - 1 - offset : len(row) - 1 - offset].float(), dim=-1)
            wanted = torch.tensor(continuation, device=logs.device)
            scores.append(float(logs.gather(1, wanted[:, None]).sum()))
            greedy.append(bool((logs.argmax(dim=1) == wanted).all()))
            place = first - 1 if self.coral.mode == "letter" else len(row) - 1
            for layer in layers:
                hidden[layer].append(seen[layer][i, place].to("cpu", torch.float16).numpy())
        asked = ChoiceScores([np.array(scores)], {layer: [np.stack(h)] for layer, h in hidden.items()})
        steered = np.log(np.maximum(self.coral.predict_proba(asked)[0], 1e-300))
        return [(float(log), was_greedy) for log, was_greedy in zip(steered, greedy, strict=True)]

    def _logits_from(self, offset: int, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Logits from this position on, of shape (K, tokens - offset, n_vocabulary)."""
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            kept = torch.arange(offset, ids.shape[1], device=ids.device)
            return self.model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=kept).logits
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, offset:]


def options_of_documents(requests: Iterable[Any]) -> list[list[int]]:
    """Indices of the requests that are the options of one document: same context, two continuations or more.

    Without a context, as in the unconditional likelihoods of mutual information, there is no question to steer.
    """
    found: dict[tuple[Any, ...], list[int]] = {}
    for i, request in enumerate(requests):
        found.setdefault((request.task_name, request.doc_id, request.repeats, request.args[0]), []).append(i)
    return [members for key, members in found.items() if key[-1] and len(members) > 1]
