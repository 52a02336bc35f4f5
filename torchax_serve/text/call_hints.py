"""Errors for unknown arguments of `chat`, `stream` and `generate_batch`.

They say what to write instead.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar

from model_adapters.errors import UnsupportedArgumentError
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.validation.argument_checks import short_repr
from torchax_serve.validation.sampling_hints import RENAMED, UNSUPPORTED

P = ParamSpec("P")
R = TypeVar("R")

_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))

_ELSEWHERE: Mapping[str, str] = {
    "sampling_params": "give it as params",
    "prompt_token_ids": "give token ids in place of the prompt",
    "use_tqdm": "there is no progress bar; stream() yields answers as they come",
    "lora_request": "merge the adapter into the model before serve()",
    "generation_config": "set model.generation_config, or write its options in SamplingParams(...)",
    "streamer": "stream() and chat(stream=True) yield the pieces; generate(streamer=...) takes a streamer",
    "chat_template": "set model.tokenizer.chat_template",
    "add_generation_prompt": "an answer begins a message; continue_final_message=True continues the last one",
    "conversation": "give it as messages",
    "stop_strings": "write SamplingParams(stop=...)",
}


def refuses_unknown_options(function: Callable[P, R]) -> Callable[P, R]:
    """Makes `function` raise UnsupportedArgumentError for unknown keywords, and returns it.

    The error says what to write instead; see `refuse_unknown`.
    """
    known = [name for name in inspect.signature(function).parameters if name not in ("self", "model")]
    accepted = {"self", "model", *known}
    call = getattr(function, "__name__", "call")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not accepted.issuperset(kwargs):
            refuse_unknown(call, {name: value for name, value in kwargs.items() if name not in accepted}, known)
        return function(*args, **kwargs)

    return checked


def refuse_unknown(call: str, unknown: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Raises UnsupportedArgumentError for the first of `unknown` keyword arguments.

    The error says what to write instead.

    Args:
        call: name of the function that was called.
        unknown: the unknown arguments by name.
        known: names of the function's arguments, for near matches.
    """
    for name, value in unknown.items():
        hint = _ELSEWHERE.get(name) or _sampling_hint(name, value) or UNSUPPORTED.get(name)
        if hint is None:
            near = difflib.get_close_matches(name, [*known, *_SAMPLING], 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
        raise UnsupportedArgumentError(f"{call}() has no argument {name!r}; {hint}")


def _sampling_hint(name: str, value: Any) -> str | None:
    field = name if name in _SAMPLING else RENAMED.get(name)
    return None if field is None or name in UNSUPPORTED else f"write SamplingParams({field}={short_repr(value)})"
