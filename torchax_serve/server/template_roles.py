"""Roles that a chat template takes, and conversations in the form that it takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from model_adapters.errors import TorchaxServeError
from torchax_serve.server.errors import bad_request
from torchax_serve.text.messages import as_text
from torchax_serve.validation.argument_checks import short_repr

SYSTEM = ("system", "developer")
_USER = {"role": "user", "content": "Hello."}
_SYSTEM_BEHIND = ({"role": "system", "content": "Be brief."}, _USER, {"role": "system", "content": "Be kind."}, _USER)
_CODE = "invalid_value"


def _with_calls(*names: str) -> list[dict[str, Any]]:
    """Returns a conversation with a message that has a call of each function."""
    ids = [f"call{index:05}" for index in range(len(names))]
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}}
        for call_id, name in zip(ids, names, strict=True)
    ]
    results = [{"role": "tool", "tool_call_id": call_id, "content": "Done."} for call_id in ids]
    return [_USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


_ONE_CALL = _with_calls("first_function")
_CALLED = "second_function"
_USERS = (_USER, {"role": "user", "content": "Are you there?"})


class TemplateRoles:
    """What a template does with probes, each of which is rendered at most once.

    Args:
        render: Renders a conversation; it raises TorchaxServeError where the template refuses it or leaves it out.
    """

    def __init__(self, render: Callable[[Sequence[dict[str, Any]]], Any]) -> None:
        self._render = render
        self._found: dict[Any, bool] = {}

    @property
    def takes_system_anywhere(self) -> bool:
        """Whether a system message may stand behind others."""
        return self._takes(_SYSTEM_BEHIND)

    @property
    def takes_several_calls(self) -> bool:
        """Whether the prompt has all calls of a message that has several."""
        if _CALLED not in self._found:
            try:
                one, other = (self._render(_with_calls("first_function", name)) for name in (_CALLED, "other_function"))
                self._found[_CALLED] = one is True or one != other
            except TorchaxServeError:
                self._found[_CALLED] = not self._takes(_ONE_CALL)  # without tools some templates take no call
        return self._found[_CALLED]

    @property
    def takes_users_in_a_row(self) -> bool:
        """Whether a user's message may follow another."""
        return self._takes(_USERS)

    def _takes(self, probe: Sequence[dict[str, Any]]) -> bool:
        if id(probe) not in self._found:
            try:
                self._render(probe)
                self._found[id(probe)] = True
            except TorchaxServeError:
                self._found[id(probe)] = False
        return self._found[id(probe)]


def has_several_calls(messages: Sequence[dict[str, Any]]) -> bool:
    """Returns whether a message has more than one call."""
    return any(isinstance(each.get("tool_calls"), list) and len(each["tool_calls"]) > 1 for each in messages)


def with_single_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a conversation whose messages have one call each, with its result behind it.

    The text and the reasoning of a message stay with its first call. Results without an id follow the calls in their
    order.
    """
    found: list[dict[str, Any]] = []
    waiting = list(messages)
    while waiting:
        message = waiting.pop(0)
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            found.append(message)
            continue
        results = list(itertools.takewhile(lambda each: each["role"] in ("tool", "function"), waiting))
        del waiting[: len(results)]
        for index, call in enumerate(calls):
            head = message if index == 0 else {"role": message["role"], "content": ""}
            found.append({**head, "tool_calls": [call]})
            given = call.get("id") if isinstance(call, Mapping) else None
            own = [each for each in results if given is not None and each.get("tool_call_id") == given]
            own = own or [each for each in results if each.get("tool_call_id") is None][:1]
            found += own
            results = [each for each in results if not any(each is one for one in own)]
        found += results
    return found


def has_system_behind(messages: Sequence[dict[str, Any]]) -> bool:
    """Returns whether a system or developer message stands behind another message."""
    return any(message["role"] in SYSTEM for message in messages[1:])


def with_one_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a conversation whose system and developer messages are one, in front.

    Messages of the user that only one of them has kept apart are one, too.

    Raises:
        ApiError: 400 for a content that is none, and for one of a system message that is more than text.
    """
    texts: list[str] = []
    groups: list[list[dict[str, Any]]] = []
    follows_system = False
    for index, message in enumerate(messages):
        _check_content(f"messages[{index}].content", message)
        if message["role"] in SYSTEM:
            texts.append(as_text(message.get("content") or ""))
            follows_system = True
            continue
        if follows_system and groups and groups[-1][-1]["role"] == message["role"] == "user":
            groups[-1].append(message)
        else:
            groups.append([message])
        follows_system = False
    first = messages[0]
    role = first["role"] if first["role"] in SYSTEM else "system"
    return [{"role": role, "content": "\n\n".join(filter(None, texts))}, *map(joined, groups)]


def _check_content(where: str, message: Mapping[str, Any]) -> None:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise bad_request(
            f"{where}: expected a text or a list of parts, got {short_repr(content)}; write text", where, _CODE
        )
    for index, part in enumerate(content):
        is_part = isinstance(part, Mapping) and isinstance(part.get("type"), str)
        is_text = is_part and part["type"] == "text" and isinstance(part.get("text"), str)
        if not is_part or (message["role"] in SYSTEM and not is_text):
            expected = (
                "texts of a system message, as the chat template merges them" if is_part else "a part with a type"
            )
            got = short_repr(part["type"] if is_part else part)
            remedy = "move it to a message of the user" if is_part else 'write {"type": "text", "text": ...}'
            raise bad_request(f"{where}[{index}]: expected {expected}, got {got}; {remedy}", f"{where}[{index}]", _CODE)


def with_users_joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a conversation in which no message of the user follows another."""
    found: list[dict[str, Any]] = []
    for role, group in itertools.groupby(messages, lambda message: message["role"]):
        turn = list(group)
        found += [joined(turn)] if role == "user" else turn
    return found


def joined(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns messages of one role as one."""
    if len(messages) == 1:
        return messages[0]
    contents = [message.get("content") or "" for message in messages]
    if all(isinstance(each, str) for each in contents):
        return {**messages[0], "content": "\n\n".join(filter(None, contents))}
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents if each]
    return {**messages[0], "content": [part for each in parts for part in each]}
