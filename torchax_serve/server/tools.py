"""Tools of a chat: what templates are shown, and what answers are held to and parsed by."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchax_serve.server.call_forms import call_grammar
from torchax_serve.server.common_calls import reads_tools, with_common_calls
from torchax_serve.server.errors import bad_request
from torchax_serve.server.response_family import ResponseFamily
from torchax_serve.server.response_parsing import begun_answer
from torchax_serve.server.schemas import ChatRequest
from torchax_serve.server.structured import Grammar

MAX_TOOLS = 1024
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclasses.dataclass(frozen=True)
class ToolPlan:
    """Tools of a request.

    Attributes:
        tools: JSON schemas for the template and for the parser of the answer.
        grammar: What the answer is held to; None for any text.
        max_calls: Most tool calls of the answer; None for any number.
        family: How the answer is spelled; None for plain text.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    grammar: Grammar | None = None
    max_calls: int | None = None
    family: ResponseFamily | None = None


def plan_tools(
    request: ChatRequest,
    family: ResponseFamily | None,
    special_ids: Mapping[str, int] | None = None,
    *,
    template: str = "tools",
) -> ToolPlan:
    """Returns the tools of a request, checked.

    Args:
        request: The request.
        family: How the model's answers are spelled.
        special_ids: Special tokens of its tokenizer.
        template: Source of the chat template; one that has no place for tools asks for calls in the common form.

    Raises:
        ApiError: 400 for tools that are none, or a choice that is none of them.
    """
    tools = [_checked(index, tool) for index, tool in enumerate(request.tools or ())]
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools: expected at most {MAX_TOOLS}, got {len(tools)}", "tools", "invalid_value")
    mode, names = _choice(request.tool_choice, [tool["function"]["name"] for tool in tools])
    if mode == "none" or not tools:
        return ToolPlan(family=family)
    chosen = [tool for tool in tools if tool["function"]["name"] in names]
    max_calls = 1 if request.parallel_tool_calls is False or mode == "named" else None
    is_forced, is_strict = mode != "auto", any(tool["function"].get("strict") for tool in chosen)
    is_own = family is not None and family.reads_calls and reads_tools(template)
    if family is None or not is_own or (family.call is None and (is_forced or is_strict)):
        family = with_common_calls(family, is_strict=is_strict and not is_forced)
    grammar = None
    if is_forced or is_strict:
        assert family.call is not None
        grammar = call_grammar(family.call, chosen, special_ids or {}, is_forced=is_forced, max_calls=max_calls)
    shown = [_without_strict(tool) for tool in chosen]
    return ToolPlan(shown, None if grammar is None else Grammar("tools", grammar), max_calls, family)


def _checked(index: int, tool: Any) -> dict[str, Any]:
    where = f"tools[{index}]"
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise bad_request(
            f'{where}: expected {{"type": "function", "function": {{...}}}}, got something else', where, "invalid_value"
        )
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_request(
            f"{where}.function.name: expected 1 to 64 of a-z, A-Z, 0-9, _, . and -, got another", where, "invalid_value"
        )
    if parameters is not None and not isinstance(parameters, dict):
        raise bad_request(f"{where}.function.parameters: expected a JSON schema, got none", where, "invalid_value")
    found: dict[str, Any] = tool
    return found


def _without_strict(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {key: value for key, value in tool["function"].items() if key != "strict"}
    return {"type": "function", "function": function}


def _choice(choice: Any, names: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Returns the mode and the names of the tools that may be called.

    The mode is ``none``, ``auto``, ``required`` or ``named``.
    """
    if choice is None or choice in ("none", "auto", "required"):
        if choice == "required" and not names:
            raise bad_request("tool_choice: expected tools with required, got none", "tool_choice", "invalid_value")
        return choice or "auto", names
    mode: Any
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        wanted, mode = [choice["function"].get("name")], "named"
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        mode = allowed.get("mode", "auto") if isinstance(allowed, dict) else None
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        wanted = [_name_of(each) for each in (listed if isinstance(listed, list) else [None])]
    else:
        wanted, mode = [None], "auto"
    if mode not in ("auto", "required", "named") or not wanted or any(name not in names for name in wanted):
        raise bad_request(
            "tool_choice: expected none, auto, required or a tool of the request, got another",
            "tool_choice",
            "invalid_value",
        )
    return mode, [name for name in wanted if name is not None]


def _name_of(allowed: Any) -> Any:
    """Returns the name of an allowed tool, as chats or responses spell it; None for another."""
    function = allowed.get("function") or allowed if isinstance(allowed, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def reasoning_end(
    family: ResponseFamily, prompt: str, decode: Callable[[Sequence[int]], str]
) -> Callable[[Sequence[int]], int | None] | None:
    """Returns what finds the end of the reasoning that a prompt has opened, or begun.

    None if it has opened none.

    The returned function takes the tokens of the answer so far, and returns how many of them are reasoning, None while
    it goes on; it is called after each token.

    Args:
        family: How answers are spelled.
        prompt: Text of the prompt.
        decode: Returns the text of tokens, special ones included.
    """
    markers = family.reasoning_markers
    if markers is None:
        return None
    if not prompt.rstrip().endswith(markers.opening) and not markers.is_open(begun_answer(family, prompt)):
        return None
    window = 8  # tokens that the closing text may be spread over

    def find_end(output_ids: Sequence[int]) -> int | None:
        return len(output_ids) if markers.closing in decode(list(output_ids[-window:])) else None

    return find_end
