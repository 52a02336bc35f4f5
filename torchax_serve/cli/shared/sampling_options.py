"""Options of ``torchax-serve run`` for sampling and stopping."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from model_adapters.errors import InvalidArgumentError

if TYPE_CHECKING:
    from torchax_serve.sampling_params import SamplingParams

_option = functools.partial(
    typer.Option,
    show_default=False,
    rich_help_panel="Decoding (default: what the model's generation_config says)",
)


@dataclass(frozen=True)
class DecodingOptions:
    """Options of sampling and stopping.

    Each field is an option of the command (`option_groups`).
    """

    max_new_tokens: Annotated[
        int | None,
        _option(
            "--max-new-tokens",
            "--max-tokens",
            "-n",
            help="Longest answer, in tokens; 1024 in a chat and 256 raw where the model says none.",
        ),
    ] = None
    min_new_tokens: Annotated[int | None, _option("--min-new-tokens", help="Shortest answer, in tokens.")] = None
    temperature: Annotated[
        float | None, _option("--temperature", "--temp", help="Above 1 more varied, below 1 less; 0 is greedy.")
    ] = None
    top_k: Annotated[int | None, _option("--top-k", help="Draw from the k likeliest tokens; 0 is off.")] = None
    top_p: Annotated[
        float | None, _option("--top-p", help="Draw from the likeliest tokens that have this probability together.")
    ] = None
    min_p: Annotated[
        float | None,
        _option("--min-p", help="Leave out tokens below this fraction of the likeliest one's probability."),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _option("--repetition-penalty", "--repeat-penalty", help="Above 1 makes tokens that were said less likely."),
    ] = None
    no_repeat_ngram_size: Annotated[
        int | None, _option("--no-repeat-ngram-size", help="Never say the same n tokens twice; 0 is off.")
    ] = None
    seed: Annotated[int | None, _option("--seed", help="Same seed, same prompt, same answer.")] = None
    stop: Annotated[list[str] | None, _option("--stop", help="End before this text; may be given several times.")] = (
        None
    )
    greedy: Annotated[bool, _option("--greedy", help="Always the likeliest token.")] = False

    def __post_init__(self) -> None:
        self.params()

    def params(self) -> SamplingParams:
        """Returns the sampling parameters of a request.

        Raises:
            InvalidArgumentError: A value is out of range, or two do not go together.
        """
        from torchax_serve.sampling_params import SamplingParams

        if self.greedy and (drawing := self._sampling_flags()):
            raise InvalidArgumentError(
                f"--greedy: expected without {' and '.join(drawing)}, which matters only where tokens are drawn; "
                "leave one of them out"
            )
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            do_sample=False if self.greedy else None,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            seed=self.seed,
            stop=tuple(self.stop) if self.stop else None,
        )

    def _sampling_flags(self) -> list[str]:
        """Lists given flags that only have an effect when tokens are sampled."""
        options = {
            "--temperature": self.temperature or None,
            "--top-k": self.top_k or None,
            "--top-p": self.top_p,
            "--min-p": self.min_p,
        }
        return [flag for flag, value in options.items() if value is not None]
