"""The value of ``--speculative-config``."""

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
    """Returns ``--speculative-config`` as `serve(speculative_config=...)` takes it.

    Raises:
        InvalidArgumentError: the text is no JSON.
    """
    if text is None:
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidArgumentError(
            f'--speculative-config: expected JSON such as \'{{"method": "ngram"}}\', got {text!r} ({error})'
        ) from None
