"""Logits of a second head, which may read the last token: padding would be read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import torch

from model_adapters.program.model_program import ModelProgram
from model_adapters.program.padding_safety import has_further_logits, may_have_further_logits


class FurtherLogits:
    """Tells which calls of a module return logits of a second head, by the names of arguments."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._may_come = may_have_further_logits(module)
        self._known: dict[frozenset[str], bool] = {}

    def come(self, given: dict[str, Any], call: Callable[[], Any], program: ModelProgram, weights: Any) -> bool:
        """Tells whether a call does.

        `call` returns its arguments without padding, and its specification.
        """
        kind = frozenset(name for name, value in given.items() if value is not None)
        if self._may_come and kind not in self._known:
            (states, offset, inputs), spec = call()
            fields, _ = jax.eval_shape(functools.partial(program.forward, spec=spec), weights, states, offset, inputs)
            self._known[kind] = has_further_logits(fields)
        return self._may_come and self._known[kind]
