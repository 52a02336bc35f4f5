"""Arguments that `chat`, `stream`, `generate_batch` and `iter_tokens` do not have, and where they belong."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from typing import Any

from model_adapters.errors import UnsupportedArgumentError
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.validation.argument_checks import short_repr
from torchax_serve.validation.sampling_hints import RENAMED, UNSUPPORTED

_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))

_ELSEWHERE: Mapping[str, str] = {
    "sampling_params": "give it as params",
    "prompt_token_ids": "give token ids in the place of the prompt",
    "use_tqdm": "there is no progress bar; stream() hands answers out as they come",
    "lora_request": "merge the adapter into the model before serve()",
    "generation_config": "set model.generation_config, or write its options in SamplingParams(...)",
    "streamer": "stream() and chat(stream=True) hand out the pieces; generate(streamer=...) takes a streamer",
    "chat_template": "set model.tokenizer.chat_template",
    "add_generation_prompt": "an answer begins a message; continue_final_message=True goes on with the last one",
    "conversation": "give it as messages",
    "stop_strings": "write SamplingParams(stop=...)",
}


def refuse_unknown(call: str, unknown: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Raises UnsupportedArgumentError for the first of `unknown` keyword arguments, with what to write instead.

    Args:
        call: name of the function that got them.
        unknown: the arguments by name.
        known: arguments that it has, for near matches.
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
