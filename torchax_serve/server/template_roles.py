"""Roles that a chat template takes, and conversations in the form that it takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from model_adapters.errors import TorchaxServeError
from torchax_serve.text.messages import as_text

SYSTEM = ("system", "developer")
_USER = {"role": "user", "content": "Hello."}
_SYSTEM_BEHIND = ({"role": "system", "content": "Be brief."}, _USER, {"role": "system", "content": "Be kind."}, _USER)
_USERS = (_USER, {"role": "user", "content": "Are you there?"})


class TemplateRoles:
    """What a template does with probes, each of which is rendered at most once.

    Args:
        render: Renders a conversation; it raises TorchaxServeError where the template refuses it or leaves it out.
    """

    def __init__(self, render: Callable[[Sequence[dict[str, Any]]], Any]) -> None:
        self._render = render
        self._found: dict[int, bool] = {}

    @property
    def takes_system_anywhere(self) -> bool:
        """Whether a system message may stand behind others."""
        return self._takes(_SYSTEM_BEHIND)

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


def has_system_behind(messages: Sequence[dict[str, Any]]) -> bool:
    """Returns whether a system or developer message stands behind another message."""
    return any(message["role"] in SYSTEM for message in messages[1:])


def with_one_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a conversation whose system and developer messages are one, in front.

    Messages of the user that only one of them has kept apart are one, too.
    """
    texts: list[str] = []
    groups: list[list[dict[str, Any]]] = []
    follows_system = False
    for message in messages:
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
