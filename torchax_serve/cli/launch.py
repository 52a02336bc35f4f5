"""``torchax-serve launch``: runs a coding agent on a server, which is started if none runs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from model_adapters.errors import InvalidArgumentError, TorchaxServeError
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.model_name import check_model, complete_model
from torchax_serve.cli.shared.server_client import DEFAULT_URL, ClientKey, ServerUrl, asked, is_there
from torchax_serve.cli.shared.terminal import print_note

NO_KEY = "none"
"""Key that programs send where the server has none: they refuse to start without one."""
POLL_S = 0.2
END_S = 30.0
"""Seconds that a started server has to end."""
OUTPUT_PART = 4
"""What part of a model's length an answer may have, of a program that has to be told."""


class Launched(NamedTuple):
    """How a program is started: its arguments, and variables of its environment."""

    arguments: list[str]
    variables: dict[str, str]


class ModelEntry(NamedTuple):
    """A model of the server: its name, and its length in tokens if it is known."""

    name: str
    max_len: int | None


class CodingAgent(NamedTuple):
    """A coding agent that `launch` knows.

    Attributes:
        package: What ``npm install`` gets it by.
        prepare: Returns how it is started, by the server's address, a key and a model.
    """

    package: str
    prepare: Callable[[str, str, ModelEntry], Launched]


def _claude(url: str, key: str, model: ModelEntry) -> Launched:
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": model.name,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model.name,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return Launched([], variables)


def _codex(url: str, key: str, model: ModelEntry) -> Launched:
    provider = {
        "name": "local",
        "base_url": f"{url}/v1",
        "env_key": "TORCHAX_SERVE_CLIENT_KEY",
        "wire_api": "responses",
    }
    settings: dict[str, str | int] = {"model": model.name, "model_provider": "local"}
    if model.max_len is not None:
        settings["model_context_window"] = model.max_len  # it shortens a conversation in time
    settings |= {f"model_providers.local.{name}": value for name, value in provider.items()}
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return Launched(options, {"TORCHAX_SERVE_CLIENT_KEY": key})


def _opencode(url: str, key: str, model: ModelEntry) -> Launched:
    options = {"baseURL": f"{url}/v1", "apiKey": "{env:TORCHAX_SERVE_CLIENT_KEY}"}
    # It asks for 32,000 tokens of a model that it does not know, which with a prompt are more than many have.
    limit = {} if model.max_len is None else {"context": model.max_len, "output": max(1, model.max_len // OUTPUT_PART)}
    models = {model.name: {"limit": limit} if limit else {}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "local", "options": options, "models": models}
    name = f"local/{model.name}"
    config = {"provider": {"local": provider}, "model": name, "small_model": name}
    return Launched([], {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "TORCHAX_SERVE_CLIENT_KEY": key})


PROGRAMS = {
    "claude": CodingAgent("@anthropic-ai/claude-code", _claude),
    "codex": CodingAgent("@openai/codex", _codex),
    "opencode": CodingAgent("opencode-ai", _opencode),
}


def launch(
    program: Annotated[str, typer.Argument(help="claude, codex or opencode.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(show_default=False, help="Arguments of the program, behind --.")
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option("--model", show_default=False, autocompletion=complete_model, help="Model; the server's first."),
    ] = None,
    url: ServerUrl = DEFAULT_URL,
    api_key: ClientKey = None,
) -> int:
    """Run a coding agent on this server; one is started, and ended with the agent, if none runs.

    torchax-serve launch claude --model qwen3-0.6b

    torchax-serve launch codex -- exec "What does README.md say?"
    """
    if program not in PROGRAMS:
        raise InvalidArgumentError(f"PROGRAM: expected one of {', '.join(PROGRAMS)}, got {program!r}")
    known = PROGRAMS[program]
    found = shutil.which(program)
    if found is None:
        raise InvalidArgumentError(
            f"PROGRAM: expected {program} on this machine, found none; npm install -g {known.package}"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ended_in_order())
        if not is_there(url):
            stack.enter_context(_started_server(model, url))
        served = _served_model(model, url, api_key)
        launched = known.prepare(url.rstrip("/"), api_key or NO_KEY, served)
        print_note(f"{program} uses {served.name} of {url}")
        return _run([found, *launched.arguments, *(arguments or ())], launched.variables)


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Has a signal, as of a terminal that closes, end what this program has started first."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _served_model(model: str | None, url: str, api_key: str | None) -> ModelEntry:
    """Returns the model that was asked for, or the first that can chat.

    Raises:
        InvalidArgumentError: It has no such model.
    """
    entries = asked(url, "/v1/models", api_key, "data")["data"]
    # Other servers say neither what a model does nor how long it is.
    chats = {each["id"]: each.get("max_model_len") for each in entries if "chat" in (each.get("tasks") or ["chat"])}
    wanted = [name for name in chats if model is None or name in (model, Path(model).name)]
    if not wanted:
        what = "a model that can chat" if model is None else model
        raise InvalidArgumentError(f"--model: expected {what} on {url}, which has {', '.join(chats) or 'none'}")
    return ModelEntry(str(wanted[0]), chats[wanted[0]])


@contextlib.contextmanager
def _started_server(model: str | None, url: str) -> Iterator[None]:
    """Runs a server of a model at an address of this machine, once it answers.

    Raises:
        InvalidArgumentError: The address is one of another machine.
        TorchaxServeError: The server has ended.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or parts.hostname not in ("127.0.0.1", "localhost") or parts.path.strip("/"):
        raise InvalidArgumentError(f"--url: expected a server at {url}, got none; torchax-serve serve starts one there")
    check_model(model)
    program = "from torchax_serve.cli.main import main; main()"
    command = [sys.executable, "-c", program, "serve", *([] if model is None else [model])]
    command += ["--host", parts.hostname, "--port", str(parts.port or 80)]
    log = Path(tempfile.mkdtemp(prefix="torchax-serve-")) / "server.log"
    print_note(f"a server starts at {url}, whose log is {log}")
    with log.open("wb") as file:  # in a session of its own: Ctrl-C in the agent is not meant for it
        server = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        while not _is_ready(url):
            if server.poll() is not None:
                last = log.read_text(errors="replace").strip().splitlines()[-1:]
                raise TorchaxServeError(f"the server ended with status {server.returncode}: {' '.join(last)}")
            time.sleep(POLL_S)
        yield
    finally:
        server.terminate()
        try:
            server.wait(END_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/readyz", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _run(command: Sequence[str], variables: dict[str, str]) -> int:
    """Runs a program in this terminal and returns its exit status; Ctrl-C is the program's."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        # What is ignored would be so in the program as well.
        process = subprocess.Popen(command, env=os.environ | variables, preexec_fn=_with_interrupts)
        try:
            return process.wait()
        except SystemExit:
            process.terminate()
            raise
    finally:
        signal.signal(signal.SIGINT, before)


def _with_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


COMMAND = Command("launch", launch, position=84)
