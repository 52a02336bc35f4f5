"""Finds steps that pass over a whole pool, by reading their optimized programs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from torchax_serve.entrypoints.served_model import ServedModel

_RESULT = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = \w+\[([\d,]+)\]\S* ([\w\-]+)\(")
PASSES = frozenset({"copy", "convert", "bitcast-convert", "transpose", "select", "concatenate", "pad", "broadcast"})
"""Instructions that write all of their result; of a pool's size they take as long as the cache is large."""


def check_pools(served: ServedModel) -> None:
    """Checks the steps that the engine of `served` has compiled so far.

    Raises:
        AssertionError: one copies or converts a pool, or the states of all slots; names the instructions.
    """
    engine: Any = served.engine
    cache = engine._runner._cache
    model = served.torch_model if served.torch_model.can_generate() else served._generator()
    shapes = {tuple(each.shape) for each in jax.tree.leaves((cache.pools, getattr(cache, "states", ())))}
    functions = list(model._jax_runtime.steps.executables.functions.values())
    found = {line for each in functions for line in passes_of(list(each._programs.values()), shapes)}
    if found:
        raise AssertionError(f"{len(found)} instructions write all of a pool: {min(found)}")


def passes_of(programs: Iterable[Any], shapes: set[tuple[int, ...]]) -> Iterator[str]:
    """Yields instructions of compiled `programs` that write all of an array of `shapes`."""
    for program in programs:
        for line in program.as_text().splitlines():
            match = _RESULT.match(line)
            if match and match[2] in PASSES and tuple(map(int, match[1].split(","))) in shapes:
                yield line.strip().partition(", metadata")[0]
