"""What the engine's sampler is measured against: transformers' processors one row at a time, and numpy."""

import dataclasses

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as hf

from torchax_serve.request_params import RequestParams
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.scheduler import PlanRow

WARPERS = {  # in transformers' order
    "temperature": hf.TemperatureLogitsWarper,
    "top_h": hf.TopHLogitsWarper,
    "top_k": hf.TopKLogitsWarper,
    "top_p": hf.TopPLogitsWarper,
    "min_p": hf.MinPLogitsWarper,
    "typical_p": hf.TypicalLogitsWarper,
    "epsilon_cutoff": hf.EpsilonLogitsWarper,
    "eta_cutoff": lambda epsilon: hf.EtaLogitsWarper(epsilon, device="cpu"),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A request in a slot: what it asks for, and what it has so far."""

    options: dict
    prompt: tuple = (7, 8)
    outputs: tuple = ()
    seed: int = 0
    stop_ids: tuple = ()
    not_first: tuple = ()

    def params(self, vocab_size):
        params = SamplingParams(**self.options)
        config = GenerationConfig(max_new_tokens=64, begin_suppress_tokens=list(self.not_first) or None)
        made = RequestParams.of_generation_config(params.merged_into(config), params, seed=self.seed)
        made.check_tokens(vocab_size)
        return dataclasses.replace(made, stop_ids=self.stop_ids)

    def plan_row(self, slot):
        """The decode row after which the next token is sampled."""
        return PlanRow(slot, slot, len(self.prompt) + len(self.outputs) - 1, 1, None, True)


def adjusted_scores(row, logits):
    """float32[vocab]: `logits` behind biases and penalties."""
    options, scores = row.options, np.array(logits, np.float32)
    for token, bias in options.get("logit_bias", {}).items():
        scores[token] += np.float32(bias)
    if "allowed_token_ids" in options:
        scores[[token for token in range(len(scores)) if token not in options["allowed_token_ids"]]] = -np.inf
    scores[[token for token in options.get("suppress_tokens", ()) if token < len(scores)]] = -np.inf
    if "repetition_penalty" in options:
        ids = torch.tensor([[token for token in (*row.prompt, *row.outputs) if token < len(scores)]])
        processor = hf.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"])
        scores = processor(ids, torch.tensor(scores[None])).numpy()[0]
    for token in set(row.outputs):
        count = row.outputs.count(token)
        scores[token] -= np.float32(options.get("frequency_penalty", 0) * count + options.get("presence_penalty", 0))
    if len(row.outputs) < options.get("min_new_tokens", 0):
        scores[list(row.stop_ids)] = -np.inf
    if row.not_first:
        ids = torch.tensor([[*row.prompt, *row.outputs]])
        processor = hf.SuppressTokensAtBeginLogitsProcessor(list(row.not_first), len(row.prompt))
        scores = processor(ids, torch.tensor(scores[None])).numpy()[0]
    return scores


def processed_scores(row, logits):
    """float32[vocab]: `logits` behind everything that the row asks for."""
    scores = torch.tensor(adjusted_scores(row, logits)[None])
    for name, warper in WARPERS.items():
        value = row.options.get(name)
        if value and not (name in ("top_p", "typical_p") and value == 1):
            scores = warper(value)(None, scores)
    return scores.numpy()[0]
