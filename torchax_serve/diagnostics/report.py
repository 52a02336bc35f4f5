"""Report to attach to a bug: sections of named facts, without personal data.

It is formatted as Markdown or plain data.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Fact:
    """Line of the report.

    Attributes:
        name: Name of the subject.
        value: Finding.
        state: "ok"; "note" if it costs speed or a feature; "problem" if something is broken.
    """

    name: str
    value: str
    state: State = "ok"


@dataclass(frozen=True)
class Section:
    """Facts under a heading."""

    title: str
    facts: tuple[Fact, ...]


def problems_of(sections: Iterable[Section]) -> list[Fact]:
    """Lists the facts about something broken."""
    return [fact for section in sections for fact in section.facts if fact.state == "problem"]


def without_personal_data(text: str, home: str | None = None, user: str | None = None) -> str:
    """Returns `text` without personal data.

    The home folder is written as ``~``; the user's name in paths and passwords in addresses are left out.

    Args:
        text: of a fact.
        home: None for the home folder of this user.
        user: None for the name of this user.
    """
    home = _home() if home is None else home
    user = _user() if user is None else user
    text = re.sub(r"(?<=://)[^/@\s]+@", "", text)
    if len(home) > 1:
        text = re.sub(rf"(?<![\w.-]){re.escape(home)}(?![\w.-])", "~", text)
    if user:
        text = re.sub(rf"(?<=/){re.escape(user)}(?=/|$|\s|:)", "USER", text)
    return text


def _home() -> str:
    try:
        return str(Path.home()).rstrip("/")
    except RuntimeError:
        return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return ""


def as_markdown(sections: Iterable[Section]) -> str:
    """Formats the report as Markdown.

    It has a heading and a list for each section, and the problems again at the end.
    """
    sections = list(sections)
    lines = ["# torchax-serve doctor"]
    for section in sections:
        lines += ["", f"## {section.title}", ""]
        width = max((len(fact.name) for fact in section.facts), default=0)
        for fact in section.facts:
            mark = "" if fact.state == "ok" else f"{fact.state.upper()}: "
            lines.append(without_personal_data(f"* {fact.name + ':':<{width + 1}} {mark}{fact.value}"))
    found = problems_of(sections)
    lines += ["", "## Result", ""]
    lines += [without_personal_data(f"* {fact.name}: {fact.value}") for fact in found] or ["* nothing is broken"]
    return "\n".join(lines)


def as_dict(sections: Iterable[Section]) -> dict[str, Any]:
    """Returns the report as plain data: facts by section, and the problems."""
    sections = list(sections)

    def fact_of(fact: Fact) -> dict[str, str]:
        return {"name": fact.name, "value": without_personal_data(fact.value), "state": fact.state}

    return {
        "sections": {section.title: [fact_of(fact) for fact in section.facts] for section in sections},
        "problems": [fact_of(fact) for fact in problems_of(sections)],
    }
