"""Lowered programs without the places in source code that their operations come from."""

from __future__ import annotations

from typing import Any

import jax
from jaxlib.mlir.passmanager import PassManager


def remove_locations(lowered: jax.stages.Lowered) -> None:
    """Removes names and source lines of operations from a lowered program.

    XLA holds them as long as the program. While it reads one from disk it has them four times, and they are a third of
    the file. Profiles, which need them, have programs of their own.
    """
    module: Any = lowered.compiler_ir()
    with module.context:
        PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
