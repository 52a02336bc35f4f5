"""Response templates of model families: how their answers spell reasoning and tool calls.

In the format of `transformers.utils.chat_parsing`; a checkpoint's own template comes first (`response_template_for`).
A family is recognised by what its chat template writes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from model_adapters.errors import InvalidArgumentError
from torchax_serve.server.call_ids import form_demanded
from torchax_serve.server.json_families import JSON_FAMILIES
from torchax_serve.server.response_family import ResponseFamily
from torchax_serve.server.tagged_families import TAGGED_FAMILIES

FAMILIES: tuple[ResponseFamily, ...] = (*TAGGED_FAMILIES, *JSON_FAMILIES)
"""The families, more special ones first."""


def response_template_for(tokenizer: Any, chosen: str | None = None) -> ResponseFamily | None:
    """Returns how a model's answers are spelled.

    That is as chosen, by the checkpoint's own template, or as its family.

    Args:
        tokenizer: Tokenizer of the model.
        chosen: Name of a family, path of a JSON file with a response template, or ``none``; None decides.

    Raises:
        InvalidArgumentError: No family and no file has that name, or the file has no valid template.
    """
    template = getattr(tokenizer, "chat_template", None)
    source = template if isinstance(template, str) else json.dumps(template or "", ensure_ascii=False)
    if chosen is not None:
        found = chosen_template(chosen)
        return None if found is None else _with_ids(found, source)
    own = getattr(tokenizer, "response_template", None)
    tokens = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    family = next((family for family in FAMILIES if _is_of(family, source, tokens)), None)
    if isinstance(own, Mapping):
        known = ResponseFamily("checkpoint", (), own) if family is None else family
        family = dataclasses.replace(known, name="checkpoint", signs=(), template=own)
    return None if family is None else _with_ids(family, source)


def _is_of(family: ResponseFamily, source: str, tokens: Collection[str]) -> bool:
    """Returns whether a chat template, or its tokenizer's tokens, have all signs of a family."""
    has_tokens = bool(family.tokens) and all(token in tokens for token in family.tokens)
    return has_tokens or all(sign in source for sign in family.signs)


def _with_ids(family: ResponseFamily, source: str) -> ResponseFamily:
    return dataclasses.replace(family, id_form=form_demanded(source, family.id_form))


def chosen_template(chosen: str) -> ResponseFamily | None:
    """Returns the template of an option, as `response_template_for`; None for ``none``.

    Raises:
        InvalidArgumentError: No family and no file has that name, or the file has no valid template.
    """
    if chosen == "none":
        return None
    found = next((family for family in FAMILIES if family.name == chosen), None)
    return found or _from_file(chosen)


def _from_file(path: str) -> ResponseFamily:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    from torchax_serve.server.python_call_list import add_parser

    add_parser()
    try:
        spec = json.loads(Path(path).read_text())
        load_response_template(spec)
    except (OSError, ValueError) as error:
        names = ", ".join(family.name for family in FAMILIES)
        raise InvalidArgumentError(
            f"response_template: expected {names}, none or a file with a response template, got {path} ({error})"
        ) from error
    return ResponseFamily("file", (), spec)
