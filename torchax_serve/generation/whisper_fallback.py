"""`WhisperFallback`: decodes a window again at a higher temperature, as Whisper does.

transformers decides whether a window is decoded again, and how long audio goes on. What it reads of an attempt comes
from the engine, where the attempt's rows ran: log-probabilities of tokens instead of the scores of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.logits_process import WhisperNoSpeechDetection

from torchax_serve.generation.call_limits import current_limits


class WhisperFallback:
    """Mixin in front of ``WhisperGenerationMixin``, for a model on JAX."""

    def generate_with_fallback(self, **arguments: Any) -> Any:
        """Decodes a window as transformers does, with one run of the encoder for all attempts.

        The tokens of attempts are passed on once one of them was accepted.
        """
        config, kwargs = arguments["generation_config"], dict(arguments["kwargs"])
        may_repeat = len(arguments["temperatures"]) > 1 or config.no_speech_threshold is not None
        features = arguments["segment_input"]
        is_one_row = features is not None and len(features) == 1  # rows that are left do not take their outputs along
        if may_repeat and is_one_row and kwargs.get("encoder_outputs") is None:
            kwargs["encoder_outputs"] = self.get_encoder()(features)  # type: ignore[attr-defined]
        arguments["kwargs"] = kwargs
        limits = current_limits()
        if limits is None or limits.on_tokens is None:
            return super().generate_with_fallback(**arguments)  # type: ignore[misc]
        if not may_repeat:
            found = super().generate_with_fallback(**arguments)  # type: ignore[misc]
        else:
            with limits.holding_tokens():
                found = super().generate_with_fallback(**arguments)  # type: ignore[misc]
            rows, _, is_skipped, *_ = found
            limits.put_tokens(() if is_skipped[0] else rows[0].tolist())
        limits.put_tokens(None)
        return found

    def _setup_no_speech_detection(
        self, logits_processor: Any, segment_input: torch.Tensor, decoder_input_ids: torch.Tensor, kwargs: Any
    ) -> None:
        """Computes the probability of no speech, as transformers' processor does in its loop."""
        super()._setup_no_speech_detection(  # type: ignore[misc]
            logits_processor, segment_input, decoder_input_ids, kwargs
        )
        detection = next(each for each in logits_processor if isinstance(each, WhisperNoSpeechDetection))
        encoded = kwargs.get("encoder_outputs")
        inputs = {"input_features": segment_input} if encoded is None else {"encoder_outputs": encoded}
        if (mask := kwargs.get("decoder_attention_mask")) is not None:
            inputs["decoder_attention_mask"] = mask
        logits = self(**inputs, decoder_input_ids=decoder_input_ids, use_cache=False).logits  # type: ignore[operator]
        at_start = logits[:, decoder_input_ids.shape[1] - detection.start_of_trans_offset]
        detection._no_speech_prob = at_start.float().softmax(-1)[:, detection.no_speech_token]

    def _retrieve_avg_logprobs(
        self, scores: Sequence[torch.Tensor], tokens: torch.Tensor, temperature: float | None
    ) -> torch.Tensor:
        """Returns the mean log-probability of an attempt's tokens.

        Args:
            scores: Scores of each step, float[vocab]; or of the engine, float[1], the log-probability of the token.
            tokens: int64[len], with the end-of-sequence token.
            temperature: Temperature of the attempt.
        """
        if scores[0].shape[-1] == 1:
            logprobs = torch.cat(list(scores))[: len(tokens)]
            return logprobs.sum() / len(logprobs)
        found: torch.Tensor = super()._retrieve_avg_logprobs(scores, tokens, temperature)  # type: ignore[misc]
        return found
