"""Counts what a request passes: files, functions and types of this project from a call to its answer.

``python benchmarks/request_walk.py`` prints a table of the second ``chat`` with the bundled model, embedded and over
HTTP, at a first start, which loads torch, and at a second one, which finds the record of the first. Threads are
followed too. A *type* is one of this project of which an object is made on the way; types of a step that serves all
requests count as well. ``--show`` lists them, ``--more`` adds calls that take another path.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torchax_serve
from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import SamplingParams, serve
from torchax_serve.server.context import Stage
from torchax_serve.server.lifespan import Server
from torchax_serve.server.model_pool import ModelSpec
from torchax_serve.server.options import ServerOptions

PACKAGES = ("torchax_serve", "model_adapters", "pytree_registry", "sharding_rules")
ROOT = Path(torchax_serve.__file__).resolve().parents[1]  # of the packages as they are installed
FOLDERS = tuple(f"{ROOT / package}/" for package in PACKAGES)
PARAMS = SamplingParams(max_new_tokens=4, temperature=0)
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0})
START_S = 300.0
LEAST_TRIES, MOST_TRIES, EQUAL_TRIES = 5, 40, 3
"""Walks of a call, of which the one with the fewest functions counts: until so many have so few."""


@dataclasses.dataclass
class Walk:
    """Calls that a profile has seen.

    Attributes:
        functions: file and qualified name of each function of this project that ran.
        types: types of this project that were made.
        num_moves: calls whose function lies in another file than the one before, by thread.
    """

    functions: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    types: set[str] = dataclasses.field(default_factory=set)
    num_moves: int = 0
    _last: dict[int, str] = dataclasses.field(default_factory=dict)

    @property
    def files(self) -> set[str]:
        """Files of the functions that ran."""
        return {file for file, _ in self.functions}

    def add(self, frame: FrameType) -> None:
        """Records one call."""
        code = frame.f_code
        if code.co_name in ("__init__", "__new__", "__post_init__"):
            made = frame.f_locals.get("self", frame.f_locals.get("_cls"))
            # Objects may say that they are of another class, so they are not asked (isinstance does).
            made = made if issubclass(type(made), type) else type(made)
            if made.__module__.partition(".")[0] in PACKAGES:
                self.types.add(made.__name__)
        if not code.co_filename.startswith(FOLDERS):
            return
        file, thread = code.co_filename.removeprefix(f"{ROOT}/"), threading.get_ident()
        self.functions.add((file, code.co_qualname))
        self.num_moves += self._last.get(thread, file) != file
        self._last[thread] = file

    def described(self) -> dict[str, Any]:
        """What was counted, for JSON."""
        functions = sorted(f"{file}: {function}" for file, function in self.functions)
        counts = {"files": len(self.files), "functions": len(functions), "types": len(self.types)}
        return {**counts, "moves": self.num_moves, "all_functions": functions, "all_types": sorted(self.types)}


class Profile:
    """The profile function of the threads of a request, which hands calls to the walk that is being taken."""

    walk: Walk | None = None

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> None:
        """Forwards one event of `sys.setprofile`."""
        if self.walk is not None and event == "call":
            self.walk.add(frame)

    def take(self, call: Callable[[], Any]) -> Walk:
        """The walk of ``call()``."""
        self.walk = walk = Walk()
        sys.setprofile(self)
        try:
            call()
        finally:
            sys.setprofile(None)
            self.walk = None
        return walk


@contextlib.contextmanager
def serving(model: Any) -> Iterator[Server]:
    """A server of `model` on a free port, in threads of its own."""
    server = Server(ServerOptions(port=0, warm_up=False), [ModelSpec((), lambda: model)])
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until = time.monotonic() + START_S
        while server.context.stage is not Stage.READY and time.monotonic() < until:
            time.sleep(0.01)
        yield server
    finally:
        server.stop()
        thread.join(60)


def ask(server: Server) -> None:
    """Asks a server for a chat, without code of this project."""
    connection = http.client.HTTPConnection("127.0.0.1", int(server.addresses[0].rpartition(":")[2]), timeout=START_S)
    connection.request("POST", "/v1/chat/completions", BODY, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    answer.read()
    connection.close()


def further_calls(model: Any) -> dict[str, Callable[[], Any]]:
    """Calls that take another path than a plain chat."""
    import torch

    ids = torch.tensor([[1, 5, 6, 7]])
    penalized = dataclasses.replace(PARAMS, repetition_penalty=1.2)
    banned = dataclasses.replace(PARAMS, no_repeat_ngram_size=2)
    return {
        "chat, repetition penalty": lambda: model.chat("Hi", penalized),
        "chat, no repeated n-grams": lambda: model.chat("Hi", banned),
        "generate": lambda: model.generate(ids, max_new_tokens=4, do_sample=False),
    }


def walks_of(folder: str, *, has_more: bool) -> dict[str, Any]:
    """Walks of the model in a folder, each of a call that is not the first."""
    profile, walks = Profile(), {}
    model = serve(folder)
    kind = type(model).__name__

    def take(name: str, call: Callable[[], Any]) -> None:
        call()
        taken: list[Walk] = []
        for _ in range(MOST_TRIES):  # other threads may compile and write what calls before have begun
            time.sleep(0.2)
            taken.append(profile.take(call))
            counts = [len(walk.functions) for walk in taken]
            if len(taken) >= LEAST_TRIES and counts.count(min(counts)) >= EQUAL_TRIES:
                break
        walks[name] = min(taken, key=lambda walk: len(walk.functions)).described()

    model.chat("Hi", PARAMS)
    model.engine.call(lambda scheduler, runner: sys.setprofile(profile))
    take("chat", lambda: model.chat("Hi", PARAMS))
    for name, call in further_calls(model).items() if has_more else ():
        take(name, call)
    threading.setprofile(profile)  # of the threads of the server
    with serving(model) as server:
        take("HTTP", lambda: ask(server))
    for thread in threading.enumerate():
        if thread.name == "record-start":  # on a busy machine it takes longer than the calls
            thread.join()
    model.close()
    return {"model": kind, "is_stored": model.has_stored_programs, "walks": walks}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--show", action="store_true", help="list the functions and types of each walk")
    parser.add_argument("--more", action="store_true", help="also calls that take another path")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--of", help=argparse.SUPPRESS)  # the folder whose walks this process takes
    arguments = parser.parse_args()
    if arguments.of:
        print(json.dumps(walks_of(arguments.of, has_more=arguments.more)))
        return
    starts = {}
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        shutil.copytree(EMBEDDED, folder)  # whose start has not been recorded
        for start in ("first", "second"):
            more = ["--more"] if arguments.more and start == "first" else []
            command = [sys.executable, __file__, "--of", str(folder), *more]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            starts[start] = json.loads(done.stdout.splitlines()[-1])
    if arguments.json:
        print(json.dumps(starts))
        return
    print("| call | start | files | functions | types | moves between files |\n|---|---|---|---|---|---|")
    rows = [(start, name, walk) for start, found in starts.items() for name, walk in found["walks"].items()]
    for start, name, walk in rows:
        counts = " | ".join(str(walk[count]) for count in ("files", "functions", "types", "moves"))
        print(f"| {name} | {start}, {starts[start]['model']} | {counts} |")
    for start, name, walk in rows if arguments.show else ():
        print(f"\n{name}, {start} start", *walk["all_functions"], ", ".join(walk["all_types"]), sep="\n  ")


if __name__ == "__main__":
    main()
