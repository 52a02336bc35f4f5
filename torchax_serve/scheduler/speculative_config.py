"""`SpeculativeConfig`: how an engine speculates, with the keys of vLLM's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.validation.argument_checks import short_repr

METHODS = ("ngram", "draft_model", "eagle3", "mtp")
"""Methods that are implemented."""

LISTED = ", ".join(map(repr, METHODS[:-1])) + f" or {METHODS[-1]!r}"

REFUSED_METHODS = {
    "eagle": "EAGLE heads are not supported, those of EAGLE-3 are",
    "medusa": "Medusa heads are not supported",
    "mlp_speculator": "MLP speculators are not supported",
    "deepseek_mtp": "its name is 'mtp'",
    "qwen3_next_mtp": "its name is 'mtp'",
    "suffix": "suffix trees are not supported",
}
"""vLLM's other methods, and why they are refused."""

NEEDS_MODEL = {"draft_model": "the name or folder of a model", "eagle3": "the name or folder of an EAGLE-3 head"}
"""Methods whose drafts come from other files than the model's, and what is expected."""

MAX_SPECULATIVE_TOKENS = 16
"""Most drafts of a step: later ones are rarely accepted, and each costs a token of a step."""

MAX_LOOKUP = 16
"""Longest n-gram that is looked up: a longer match says little more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Options of speculative decoding.

    Attributes:
        method: "ngram": drafts are the tokens that followed the last tokens before, in the prompt or the answer;
            "draft_model": another model writes them; "eagle3", "mtp": a head on the served model's hidden states does,
            an EAGLE-3 head, the model's own prediction layer or Gemma 4's assistant.
        model: Draft model, EAGLE-3 head or assistant, as `serve` takes a model; None for other drafts.
        num_speculative_tokens: Number of drafts that a step verifies.
        prompt_lookup_max: Most last tokens that are looked up; more of them in common are a better match.
        prompt_lookup_min: Fewest last tokens that are looked up.
        adaptive: Whether steps speculate only where that is expected to be faster.
    """

    method: str = "ngram"
    model: Any = None
    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    adaptive: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.method, str) and self.method in REFUSED_METHODS:
            raise UnsupportedArgumentError(
                f"speculative_config: method: expected {LISTED}, got {self.method!r}; {REFUSED_METHODS[self.method]}"
            )
        if self.method not in METHODS:
            raise InvalidArgumentError(f"speculative_config: method: expected {LISTED}, got {self.method!r}")
        if self.method != "mtp" and (self.method in NEEDS_MODEL) != (self.model is not None):
            expected = NEEDS_MODEL.get(self.method, f"None with method {self.method!r}")
            raise InvalidArgumentError(f"speculative_config: model: expected {expected}, got {short_repr(self.model)}")
        self._check("num_speculative_tokens", 1, MAX_SPECULATIVE_TOKENS, "4 is usual; None does not speculate")
        self._check("prompt_lookup_max", 1, MAX_LOOKUP, "4 is usual")
        self._check("prompt_lookup_min", 1, self.prompt_lookup_max, "it is at most prompt_lookup_max")
        if not isinstance(self.adaptive, bool):
            raise InvalidArgumentError(f"speculative_config: adaptive: expected True or False, got {self.adaptive!r}")

    def __repr__(self) -> str:
        """Shows a PyTorch module by its class: its own `repr` has a line for each layer."""
        shown = {field.name: repr(getattr(self, field.name)) for field in dataclasses.fields(self)}
        if "\n" in shown["model"]:
            shown["model"] = f"<{type(self.model).__name__}>"
        return f"SpeculativeConfig({', '.join(f'{name}={value}' for name, value in shown.items())})"

    @property
    def looks_up(self) -> bool:
        """Whether drafts are looked up in the text: no model and no head writes them."""
        return self.method == "ngram"

    def _check(self, name: str, low: int, high: int, remedy: str) -> None:
        value = getattr(self, name)
        if type(value) is not int or not low <= value <= high:
            raise InvalidArgumentError(
                f"speculative_config: {name}: expected a whole number from {low} to {high}, got {value!r}; {remedy}"
            )

    @classmethod
    def parse(cls, value: Any) -> SpeculativeConfig | None:
        """Returns the config for `value`, a config, a mapping with its fields, or None.

        Raises:
            InvalidArgumentError: a value is out of its range, or a key is unknown.
            UnsupportedArgumentError: a method of vLLM that is not supported.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise InvalidArgumentError(
                'speculative_config: expected a mapping such as {"method": "ngram", "num_speculative_tokens": 4}, got '
                f"{value!r}"
            )
        fields = [field.name for field in dataclasses.fields(cls)]
        if isinstance(value.get("method"), str) and value["method"] in REFUSED_METHODS:
            return cls(method=value["method"])  # whose keys are others
        unknown = [key for key in value if key not in fields]
        if unknown:
            raise InvalidArgumentError(
                f"speculative_config: expected keys of {', '.join(fields)}, got {unknown[0]!r}; leave it out"
            )
        return cls(**value)


def refuse_heads(speculative: SpeculativeConfig | None, where: str) -> None:
    """Raises UnsupportedArgumentError for drafts that a model or a head writes, for `where`."""
    if speculative is not None and not speculative.looks_up:
        raise UnsupportedArgumentError(
            f"speculative_config: method: expected 'ngram' for {where}, got {speculative.method!r}; choose that, or "
            "run on one host"
        )


def refuse_drafts(speculative: SpeculativeConfig | Mapping[str, Any] | None, where: str) -> None:
    """Raises UnsupportedArgumentError if `speculative` is a config, for `where`."""
    config = SpeculativeConfig.parse(speculative)
    if config is not None:
        raise UnsupportedArgumentError(
            f"speculative_config: expected None for {where}, got method {config.method!r}; leave it out"
        )
