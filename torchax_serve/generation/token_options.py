"""Options of `iter_tokens`: of one answer, as tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from model_adapters.errors import UnsupportedArgumentError
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.text.prompt import given_or_default
from torchax_serve.validation.argument_checks import short_repr

if TYPE_CHECKING:
    from transformers import GenerationConfig


def check_one_answer(config: Any) -> None:
    """Raises UnsupportedArgumentError if `config` asks for several answers."""
    if (config.num_return_sequences or 1) != 1:
        raise UnsupportedArgumentError(
            f"num_return_sequences: expected 1 for tokens of one answer, got "
            f"{short_repr(config.num_return_sequences)}; call generate_batch() with SamplingParams(n=...)"
        )


def with_params(config: GenerationConfig, params: SamplingParams) -> GenerationConfig:
    """Returns `config` with the sampling options of `params`.

    Raises:
        UnsupportedArgumentError: `params` has stop strings or asks for several answers.
    """
    given_or_default(params)
    for name in ("stop", "n"):
        if (value := getattr(params, name)) not in (None, 1):
            raise UnsupportedArgumentError(
                f"{name}: expected None for tokens of one answer, got {short_repr(value)}; call "
                f"{'stream()' if name == 'stop' else 'generate_batch()'}"
            )
    return params.merged_into(config)
