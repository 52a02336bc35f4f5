"""``torchax-serve cache``: size and integrity of compiled programs on disk, and removal."""

from __future__ import annotations

import enum
import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError
from torchax_serve.cli.shared.command import Command

if TYPE_CHECKING:
    from model_adapters.disk_cache import SealedFolder


class Action(enum.StrEnum):
    """Action on the files."""

    LIST = "list"
    VERIFY = "verify"
    PRUNE = "prune"
    CLEAR = "clear"


def cache(
    action: Annotated[
        Action,
        typer.Argument(
            help="list: what there is. verify: reads every file and checks its seal. prune: removes what is damaged, "
            "and the least recently used beyond the limit. clear: removes everything."
        ),
    ] = Action.LIST,
    kind: Annotated[
        str | None, typer.Option("--kind", help="Only programs, xla, plans, kernels or start, in place of all.")
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(
            "--max-size",
            help="For prune: such as 2GB. The limit of every process is TORCHAX_SERVE_CACHE_SIZE, 10GB by default.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
) -> int:
    """List, check, shrink or clear compiled programs; deleting costs a compilation alone.

    Processes that run meanwhile are not disturbed.
    """
    from torchax_serve.compilation.cache_folders import folders, max_cache_bytes, parse_size

    if max_size is not None and action is not Action.PRUNE:
        raise InvalidArgumentError(f"--max-size: expected with prune, got with {action}; leave it out")
    chosen = _of_kind(folders(), kind)
    limit = max_cache_bytes() if max_size is None else parse_size(max_size, "--max-size")
    found: dict[str, Any] = {"max_bytes": limit}
    if action is Action.LIST:
        found["kinds"] = {name: _described(folder) for name, folder in chosen.items()}
    elif action is Action.VERIFY:
        found["kinds"] = {name: {**_described(folder), "damaged": _damaged(folder)} for name, folder in chosen.items()}
    else:
        found["kinds"] = _removed(chosen, 0 if action is Action.CLEAR else limit)
    print(json.dumps(found, indent=1) if as_json else "\n".join(_lines(action, found)))
    return int(action is Action.VERIFY and any(each["damaged"] for each in found["kinds"].values()))


def _of_kind(folders: dict[str, SealedFolder], kind: str | None) -> dict[str, SealedFolder]:
    if kind is None:
        return folders
    if kind not in folders:
        raise InvalidArgumentError(f"--kind: expected one of {', '.join(folders)}, got {kind!r}")
    return {kind: folders[kind]}


def _described(folder: SealedFolder) -> dict[str, Any]:
    entries = list(folder.entries())
    return {
        "folder": str(folder.path),
        "num_files": len(entries),
        "num_bytes": sum(entry.num_bytes for entry in entries),
        "last_used": max((entry.last_used for entry in entries), default=None),
        "not_used_because": folder.untrusted_reason(),
    }


def _damaged(folder: SealedFolder) -> dict[str, str]:
    """Returns the reasons why files are damaged, by name."""
    reasons = ((entry.path.name, folder.damage(entry.path.name)) for entry in folder.entries())
    return {name: reason for name, reason in reasons if reason is not None}


def _removed(folders: dict[str, SealedFolder], max_bytes: int) -> dict[str, dict[str, Any]]:
    """Removes damaged files and those beyond `max_bytes`; returns the counts.

    `max_bytes` is the limit for all `folders`; the least recently used files go first.
    """
    from model_adapters.disk_cache import keep_within

    before = {name: list(folder.entries()) for name, folder in folders.items()}
    for folder in folders.values():
        if max_bytes:
            for name in _damaged(folder):
                folder.remove(name)
    keep_within(folders.values(), max_bytes)
    removed = {}
    for name, folder in folders.items():
        left = {entry.path for entry in folder.entries()}
        gone = [entry for entry in before[name] if entry.path not in left]
        removed[name] = {
            **_described(folder),
            "num_removed": len(gone),
            "num_removed_bytes": sum(entry.num_bytes for entry in gone),
        }
    return removed


def _lines(action: Action, found: dict[str, Any]) -> list[str]:
    kinds, lines = found["kinds"], []
    for name, each in kinds.items():
        line = f"{name:9} {each['num_files']:6} files {_size(each['num_bytes']):>9}"
        if action in (Action.PRUNE, Action.CLEAR):
            line += f"   removed {each['num_removed']} files, {_size(each['num_removed_bytes'])}"
        elif each["last_used"] is not None:
            line += f"   last used {time.strftime('%Y-%m-%d %H:%M', time.localtime(each['last_used']))}"
        lines.append(f"{line}   {each['folder']}")
        if each["not_used_because"] is not None:
            lines.append(f"  not used: {each['not_used_because']}")
        lines += [f"  {file}: {reason}" for file, reason in each.get("damaged", {}).items()]
    total = sum(each["num_bytes"] for each in kinds.values())
    lines.append(f"{_size(total)} of at most {_size(found['max_bytes'])}")
    if action is Action.VERIFY:
        number = sum(len(each["damaged"]) for each in kinds.values())
        lines.append(
            "all files are intact" if not number else f"{number} damaged; remove them: torchax-serve cache prune"
        )
    return lines


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


COMMAND = Command("cache", cache, position=120)
