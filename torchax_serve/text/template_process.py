"""Script of the process that renders chat templates.

`torchax_serve.text.template_renderer` starts it. A chat template is untrusted code of the checkpoint and may loop or
allocate without end: the parent process ends this one at a deadline, and the system at a limit of memory or processor
time.

The file runs as a script and imports nothing of this project; jinja's sandbox and its functions are those of
transformers. Standard input is a socket. Each message is a length (eight bytes, big-endian) and JSON. The first message
has the parent's ``sys.path`` and is answered with ``{}``; each later one is a job of `_answer`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import resource
import socket
import sys
import types
from typing import Any

MEMORY_BYTES = 2**30  # for rendering, without the imports: a template needs a few MiB
MAX_CHARS = 2**26  # of a rendered conversation
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The tag of transformers around what the assistant writes."""


def main() -> None:
    """Answers jobs until the parent closes the socket."""
    connection = socket.socket(fileno=0)
    # What a library prints may not get between the answers, nor onto the parent's terminal.
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    first = _receive(connection)
    if first is None:
        return
    sys.path[:] = first["path"]
    chat_template_utils = _chat_template_utils()
    _limit(resource.RLIMIT_AS, _used_bytes() + MEMORY_BYTES)
    _send(connection, {})
    while (job := _receive(connection)) is not None:
        # Ends a template that loops forever even if the parent has died.
        usage = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime + 2 * job["deadline_s"]) + 1)
        try:
            answer = _answer(chat_template_utils, job)
        except MemoryError:
            answer = {"error": f"MemoryError: it takes more than {MEMORY_BYTES >> 20} MiB"}
        except Exception as error:
            answer = {"error": _described(error)}
        _send(connection, answer)


def _chat_template_utils() -> Any:
    """Returns transformers' module of chat templates, imported without the packages around it.

    These import torch, which takes seconds; the module and what it imports do not. With a release of transformers of
    which this is not true, the packages are imported.
    """
    packages = ("transformers", "transformers.utils")
    try:
        found = importlib.util.find_spec("transformers")
        assert found is not None and found.submodule_search_locations is not None
        folder = found.submodule_search_locations[0]
        for name, path in zip(packages, (folder, os.path.join(folder, "utils")), strict=True):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [path]
        return importlib.import_module("transformers.utils.chat_template_utils")
    except Exception:
        for name in [each for each in sys.modules if each.split(".")[0] == "transformers"]:
            del sys.modules[name]
        return importlib.import_module("transformers.utils.chat_template_utils")


def _answer(chat_template_utils: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Parses the template of a job and renders each of its conversations.

    Returns:
        ``variables`` that the template reads, ``words`` (names and strings that occur in it), ``takes_parts`` (of a
        content), and ``texts``: for each conversation ``{"text": …, "generated": …}`` or ``{"error": …}``. What is
        generated is a list of begins and ends, or None without the tag ``generation``.
    """
    compiled = chat_template_utils._compile_jinja_template(job["template"])
    texts = []
    for conversation in job["conversations"]:
        try:
            text, generated = _rendered(chat_template_utils, job, conversation)
            texts.append({"text": text, "generated": generated})
        except MemoryError:
            raise
        except Exception as error:
            texts.append({"error": _described(error)})
    return {**_facts(compiled.environment, job["template"]), "texts": texts}


def _rendered(chat_template_utils: Any, job: dict[str, Any], conversation: list[Any]) -> tuple[str, Any]:
    is_tagged = GENERATION.search(job["template"]) is not None
    rendered, generated = chat_template_utils.render_jinja_template(
        conversations=[conversation],
        chat_template=job["template"],
        tools=job["tools"],
        documents=job["documents"],
        add_generation_prompt=not (job["continues"] or job["is_complete"]),
        continue_final_message=job["continues"],
        return_assistant_tokens_mask=is_tagged,
        **job["variables"],
    )
    text: str = rendered[0]
    if len(text) > MAX_CHARS:
        raise ValueError(f"it writes more than {MAX_CHARS} characters")
    return text, generated[0] if is_tagged else None


def _facts(environment: Any, template: str) -> dict[str, Any]:
    from jinja2 import meta, nodes

    tree = environment.parse(template)
    words = {node.attr for node in tree.find_all(nodes.Getattr)}
    words |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return {
        "variables": sorted(meta.find_undeclared_variables(tree) - environment.globals.keys()),
        "words": sorted(words),
        "takes_parts": _takes_parts(tree, nodes),
    }


def _takes_parts(tree: Any, nodes: Any) -> bool:
    """Returns whether a loop runs over a message's content, or over a variable computed from it."""

    def reads(node: Any, names: set[str]) -> bool:
        found = [node, *node.find_all((nodes.Getattr, nodes.Getitem, nodes.Name))]
        return any(
            (isinstance(each, nodes.Getattr) and each.attr == "content")
            or (isinstance(each, nodes.Getitem) and isinstance(each.arg, nodes.Const) and each.arg.value == "content")
            or (isinstance(each, nodes.Name) and each.name in names)
            for each in found
        )

    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and reads(assign.node, names):
            names.add(assign.target.name)
    return any(reads(loop.iter, names) for loop in tree.find_all(nodes.For))


def _described(error: Exception) -> str:
    """Returns type, line and first words of an error."""
    line = getattr(error, "lineno", None)
    message = " ".join((str(error) or "no message").split())
    return f"{type(error).__name__}{f' in line {line}' if line else ''}: {message[:300]}"


def _used_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _limit(kind: int, value: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # a lower hard limit holds already
        resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def _receive(connection: socket.socket) -> Any:
    header = _read(connection, 8)
    return None if header is None else json.loads(_read(connection, int.from_bytes(header, "big")) or b"null")


def _read(connection: socket.socket, length: int) -> bytes | None:
    data = bytearray()
    while len(data) < length:
        try:
            piece = connection.recv(min(length - len(data), 2**20))
        except ConnectionResetError:  # the parent has ended with an answer unread
            return None
        if not piece:
            return None
        data += piece
    return bytes(data)


def _send(connection: socket.socket, value: dict[str, Any]) -> None:
    data = json.dumps(value).encode()
    connection.sendall(len(data).to_bytes(8, "big") + data)


if __name__ == "__main__":
    main()
