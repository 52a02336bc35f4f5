"""Detects how the installed transformers behaves where its releases differ.

Between 5.17 and 5.23 three logits processors changed what they compute. The installed code is run on inputs of two or
three tokens instead of comparing version numbers, so that releases in between and backports are right, too.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any


@dataclasses.dataclass(frozen=True)
class TransformersBehaviour:
    """Differences between the supported releases of transformers."""

    penalty_skips_padding: bool  # repetition penalty leaves out the left padding of the prompt
    bias_needs_longer_context: bool  # a biased sequence must be shorter than the context, not only its prefix
    decay_skips_infinite: bool  # the length penalty leaves infinite scores of eos alone, instead of making them nan


@functools.cache
def installed_rules() -> TransformersBehaviour:
    """Returns the behaviour of the installed transformers; the first call imports torch."""
    import torch
    from transformers import GenerationConfig, GenerationMixin
    from transformers.generation import logits_process

    class _Host(GenerationMixin):
        config = SimpleNamespace(is_encoder_decoder=False)

    padded_ids, mask = torch.tensor([[0, 1]]), torch.tensor([[0, 1]])
    host: Any = _Host()
    processors = host._get_logits_processor(
        GenerationConfig(repetition_penalty=2.0), input_ids_seq_length=2, model_kwargs={"attention_mask": mask}
    )
    penalised = processors(padded_ids, torch.ones(1, 3))
    biased = logits_process.SequenceBiasLogitsProcessor([[[1, 2], 1.0]])(torch.tensor([[1]]), torch.zeros(1, 3))
    decay = logits_process.ExponentialDecayLengthPenalty((0, 2.0), 1, 1)
    decayed = decay(padded_ids, torch.full((1, 3), -torch.inf))
    return TransformersBehaviour(
        penalty_skips_padding=bool(penalised[0, 0] == 1),
        bias_needs_longer_context=bool(biased[0, 2] == 0),
        decay_skips_infinite=not bool(decayed.isnan().any()),
    )
