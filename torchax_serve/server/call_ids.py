"""Ids of tool calls, in the form that a chat template demands, also when they come back."""

from __future__ import annotations

import hashlib
import re
import secrets
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torchax_serve.server.notes import note_once

IdForm = Literal["any", "nine", "indexed"]
"""Any text; nine letters and digits (Mistral); ``functions.NAME:INDEX`` (Kimi)."""
_ALPHABET = string.ascii_letters + string.digits
_LEN = 9
_FORMS: Mapping[IdForm, re.Pattern[str]] = {
    "any": re.compile(r"(?!\d{1,4}\Z)[^\s\x00-\x1f]{1,128}"),  # a place among an answer's calls is no id
    "nine": re.compile(rf"[a-zA-Z0-9]{{{_LEN}}}"),
    "indexed": re.compile(r"(?:functions\.)?[\w.-]+:\d+"),
}
_DEMANDS_NINE = re.compile(r"length\s*(?:!=|==|\)\s*!=|\)\s*==)\s*9\b")


def form_demanded(template: str, form: IdForm) -> IdForm:
    """Returns the form of ids that a chat template demands; `form` where it demands none."""
    return "nine" if _DEMANDS_NINE.search(template) else form


class CallIds:
    """Makes the ids of one answer's calls.

    Args:
        form: Form of the ids.
    """

    def __init__(self, form: IdForm = "any") -> None:
        self._form, self._used = form, set[str]()

    def id_of(self, name: str, written: str | None) -> str:
        """Returns the id of the next call, as the model wrote it if it has the form and is new."""
        found = written if written is not None and self.takes(written) else self._new(name, written)
        self._used.add(found)
        return found

    def takes(self, written: str) -> bool:
        """Returns whether an id has the form, and no other call has it."""
        return _FORMS[self._form].fullmatch(written) is not None and written not in self._used

    def _new(self, name: str, written: str | None) -> str:
        if self._form == "nine":
            return "".join(secrets.choice(_ALPHABET) for _ in range(_LEN))
        if self._form == "any":
            return f"call_{uuid.uuid4().hex[:24]}"
        stem = f"functions.{name}:" if written is None or ":" not in written else f"{written.rpartition(':')[0]}:"
        index = len(self._used)
        while f"{stem}{index}" in self._used:
            index += 1
        return f"{stem}{index}"


def replayed(messages: Sequence[Mapping[str, Any]], form: IdForm) -> list[dict[str, Any]]:
    """Returns messages whose ids of tool calls have a form; other servers' ids are replaced.

    An id is replaced by the same one in a call and in its result. Calls without an id get one, and so do results
    without one, in the order of the calls.
    """
    if form == "any":
        return [dict(message) for message in messages]
    replaced: dict[str, str] = {}
    convert = _nine if form == "nine" else _indexed()
    found, waiting = [], list[str]()
    for message in messages:
        message = dict(message)
        if isinstance(message.get("tool_calls"), list):
            own: dict[str, str] = {}  # an id may come again in a later message, of another function
            message["tool_calls"] = [
                _with_id(call, form, convert, own, len(replaced)) for call in message["tool_calls"]
            ]
            replaced |= own
            waiting = [str(call.get("id")) for call in message["tool_calls"] if isinstance(call, Mapping)]
        elif message.get("role") in ("tool", "function"):
            given = message.get("tool_call_id")
            known = replaced.get(given, given) if isinstance(given, str) and given else None
            if known is None and waiting:
                known = waiting[0]
            if known in waiting:
                waiting.remove(known)
            if isinstance(known, str):
                message["tool_call_id"] = known if _FORMS[form].fullmatch(known) else convert(known, "tool")
        found.append(message)
    return found


def _with_id(
    call: Any, form: IdForm, convert: Callable[[str, str], str], replaced: dict[str, str], num_before: int
) -> Any:
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    name = str(function.get("name")) if isinstance(function, Mapping) else "function"
    given = call.get("id")
    if isinstance(given, str) and _FORMS[form].fullmatch(given):
        convert(given, name)  # it counts
        return call
    key = given if isinstance(given, str) and given else f"{name} {num_before + len(replaced)}"
    if key not in replaced:
        _note(form)
        replaced[key] = convert(key, name)
    return {**call, "id": replaced[key]}


def _nine(given: str, name: str) -> str:
    """Returns nine letters and digits that depend on an id only."""
    del name
    if _FORMS["nine"].fullmatch(given):
        return given
    number = int.from_bytes(hashlib.sha256(given.encode("utf-8", "replace")).digest(), "big")
    return "".join(_ALPHABET[number // len(_ALPHABET) ** place % len(_ALPHABET)] for place in range(_LEN))


def _indexed() -> Callable[[str, str], str]:
    """Returns what gives calls the index that they have among all calls of a conversation."""
    count = 0

    def convert(given: str, name: str) -> str:
        nonlocal count
        count += 1
        return given if _FORMS["indexed"].fullmatch(given) else f"functions.{name}:{count - 1}"

    return convert


def _note(form: IdForm) -> None:
    shape = "nine letters and digits" if form == "nine" else "functions.NAME:INDEX"
    note_once(f"ids of tool calls are replaced in prompts: the model's chat template takes {shape}")
