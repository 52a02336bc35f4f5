"""Counts what a request passes: files, functions and types of this project from a call to its answer.

``python benchmarks/request_walk.py`` prints a table for the bundled model: loading, the first and the second ``chat``,
``generate``, and ``chat`` with options that take another path. Threads are followed too. A *form* is a type of this
project of which an object is made on the way; types of a step that serves all requests count as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from torchax_serve import SamplingParams, serve

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torchax_serve", "model_adapters", "pytree_registry", "sharding_rules")
FOLDERS = tuple(f"{ROOT / package}/" for package in PACKAGES)


@dataclasses.dataclass
class Walk:
    """Calls that a profile has seen.

    Attributes:
        functions: file and qualified name of each function of this project that ran.
        forms: types of this project that were made.
        num_moves: calls whose function lies in another file than the one before, by thread.
    """

    functions: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    forms: set[str] = dataclasses.field(default_factory=set)
    num_moves: int = 0
    _last: dict[int, str] = dataclasses.field(default_factory=dict)

    @property
    def files(self) -> set[str]:
        """Files of the functions that ran."""
        return {file for file, _ in self.functions}

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> None:
        """Records one call, as `sys.setprofile` reports it."""
        if event != "call":
            return
        code = frame.f_code
        if code.co_name in ("__init__", "__new__", "__post_init__"):
            made = frame.f_locals.get("self", frame.f_locals.get("_cls"))
            made = made if isinstance(made, type) else type(made)
            if made.__module__.partition(".")[0] in PACKAGES:
                self.forms.add(made.__name__)
        if not code.co_filename.startswith(FOLDERS):
            return
        file, thread = code.co_filename.removeprefix(f"{ROOT}/"), threading.get_ident()
        self.functions.add((file, code.co_qualname))
        self.num_moves += self._last.get(thread, file) != file
        self._last[thread] = file


class Profile:
    """The profile function of all threads, which hands calls to the walk that is being taken."""

    walk: Walk | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Forwards one event of `sys.setprofile`."""
        if self.walk is not None:
            self.walk(frame, event, arg)

    def take(self, call: Callable[[], Any]) -> Walk:
        """The walk of ``call()``."""
        self.walk = walk = Walk()
        try:
            call()
        finally:
            self.walk = None
        return walk


def main() -> None:
    """Prints the table; with ``--show NAME`` also the functions and forms of one walk."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--show", help="part of a walk's name, whose functions and forms are listed")
    arguments = parser.parse_args()
    models: list[Any] = []
    profile = Profile()
    threading.setprofile(profile)  # of threads that start from now on, the engine's among them
    sys.setprofile(profile)
    walks = {"serve()": profile.take(lambda: models.append(serve()))}
    (model,) = models
    params = SamplingParams(max_new_tokens=4, temperature=0)
    ids = torch.tensor([[1, 5, 6, 7]])
    calls: dict[str, Callable[[], Any]] = {
        "chat": lambda: model.chat("Hi", params),
        "chat, repetition penalty": lambda: model.chat("Hi", dataclasses.replace(params, repetition_penalty=1.2)),
        "chat, no repeated n-grams": lambda: model.chat("Hi", dataclasses.replace(params, no_repeat_ngram_size=2)),
        "generate": lambda: model.generate(ids, max_new_tokens=4, do_sample=False),
    }
    for name, call in calls.items():
        walks[f"{name}, first"] = profile.take(call)
        walks[f"{name}, second"] = profile.take(call)
    sys.setprofile(None)
    model.close()
    print("| call | files | functions | moves between files | forms |\n|---|---|---|---|---|")
    for name, walk in walks.items():
        print(f"| {name} | {len(walk.files)} | {len(walk.functions)} | {walk.num_moves} | {len(walk.forms)} |")
    for name, walk in walks.items():
        if arguments.show and arguments.show in name:
            print(f"\n{name}")
            print(*(f"  {file}: {function}" for file, function in sorted(walk.functions)), sep="\n")
            print("  forms:", ", ".join(sorted(walk.forms)))


if __name__ == "__main__":
    main()
