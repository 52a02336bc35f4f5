"""Values of options that are written in JSON, such as ``--speculative-config``."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError

SpeculativeJson = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        envvar="TORCHAX_SERVE_SPECULATIVE_CONFIG",
        show_envvar=False,
        help='How the engine speculates, in JSON: {"method": "ngram", "num_speculative_tokens": 4}.',
    ),
]
"""Type of the option."""


def parse_speculative(text: str | None) -> Any:
    """Returns ``--speculative-config`` as `serve` takes it; errors as of `parse_json_option`."""
    return parse_json_option("--speculative-config", text, '{"method": "ngram"}')


def parse_json_option(option: str, text: str | None, example: str) -> Any:
    """Returns the value of an option that is written in JSON; None if it is not given.

    Raises:
        InvalidArgumentError: the text is no JSON.
    """
    if text is None:
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidArgumentError(f"{option}: expected JSON such as '{example}', got {text!r} ({error})") from None
