"""Chooses static arguments: the fewest with which the model's code can be traced.

Text goes to a program as arrays: one program serves every prompt of a length. Code that reads values needs them when
the program is made. What it reads of images are their grids and sizes, which are few; some code reads the token ids
themselves, and then there is a program for each prompt.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from model_adapters.bridge.views import to_jax_array
from model_adapters.errors import InvalidArgumentError
from model_adapters.ops.compressed_weight import Weights
from model_adapters.program.static_tensors import StaticLeaf, StaticTensor, can_be_static
from torchax_serve.compilation.executable_cache import ExecutableCache

logger = logging.getLogger("torchax_serve")

NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""What JAX raises for code that asks for values, of which a trace has none."""
TEXT_ENDINGS = ("input_ids", "attention_mask", "position_ids", "labels", "token_type_ids", "inputs_embeds")
ID_ENDINGS = ("input_ids", "labels")
PIXEL_MASKS = frozenset({"pixel_attention_mask", "image_attention_mask"})
"""Which end as a text's mask does, and are none."""


class StaticArgs(enum.IntEnum):
    """Kind of arguments whose values are constants when a program is made."""

    NOTHING = 0  # shapes alone
    GRIDS = 1  # integers and booleans that are no text
    MASKS = 2  # every integer and boolean but token ids
    TEXT = 3  # these too


def is_known(name: str, value: Any, known: StaticArgs) -> bool:
    """Returns whether the tensor `value` of argument `name` is a constant of the program."""
    if known is StaticArgs.NOTHING or not isinstance(value, torch.Tensor) or not can_be_static(value):
        return False
    unknown = {StaticArgs.GRIDS: TEXT_ENDINGS, StaticArgs.MASKS: ID_ENDINGS, StaticArgs.TEXT: ()}[known]
    return name in PIXEL_MASKS or not name.endswith(unknown)


def split_traced_and_static(
    given: Mapping[str, Any], known: StaticArgs = StaticArgs.NOTHING
) -> tuple[dict[str, Any], tuple[tuple[str, Any], ...]]:
    """Splits arguments into traced ones, tensors and trees with tensors, and static ones."""
    arrays: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in given.items():
        leaves = jax.tree.leaves(value)
        if is_known(name, value, known):
            rest[name] = StaticTensor.of(value)
        elif any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            arrays[name] = jax.tree.map(_as_leaf, value)
        else:
            rest[name] = _hashable(value)
    return arrays, tuple(sorted(rest.items(), key=lambda item: item[0]))


def _as_leaf(leaf: Any) -> Any:
    return to_jax_array(leaf) if isinstance(leaf, torch.Tensor) else StaticLeaf(leaf)


def _hashable(value: Any) -> Any:
    """Returns `value` with tuples in place of lists, to key programs."""
    return tuple(_hashable(item) for item in value) if isinstance(value, (list, tuple)) else value


def all_hold(conditions: jax.Array | None) -> bool:
    """Returns whether all `conditions` bool[n] hold; True if there are none."""
    return conditions is None or bool(np.asarray(conditions).all())


def shape_summary(given: Mapping[str, Any]) -> str:
    """Arguments in one line, their shapes and dtypes rather than values."""
    return repr(sorted((name, str(jax.tree.map(_shape, value))) for name, value in given.items()))


def _shape(leaf: Any) -> Any:
    return f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else leaf


def place_in_code(error: Exception, module: str) -> str | None:
    """Returns file and line in which `error` was raised, without folders.

    None if that was elsewhere. `module` is the name of any module of the package whose code counts.
    """
    package = module.partition(".")[0]
    frames = [
        frame
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] == package
    ]
    return f"{Path(frames[-1].f_code.co_filename).name}:{frames[-1].f_lineno}" if frames else None


class StaticArgPolicy:
    """Finds the static arguments of each kind of call, memoized by the names of its arguments.

    Code that decides by values which it computes (keypoints above a threshold) has none. Its operators run one by one,
    and those values are read between them.

    Args:
        text: names of arguments that are text.
        programs: where what was found is kept for other processes.
        weights: by name.
    """

    def __init__(self, text: frozenset[str], programs: ExecutableCache, weights: Weights) -> None:
        self._text, self._programs, self._weights = text, programs, weights
        self._by_operators: set[str] = set()  # kinds whose code reads values that it has computed
        self._known: dict[str, StaticArgs] = {}
        self._select: set[str] = set()  # kinds whose code selects by masks

    def run(
        self,
        given: dict[str, Any],
        call: Callable[[StaticArgs], tuple[Any, Any]],
        function: Callable[..., Any],
        step: Callable[..., Any],
        checks_of: Callable[[Any], jax.Array | None],
        *,
        code: str | None = None,
    ) -> Any:
        """Runs `step` with the fewest static arguments with which the model's code can be traced.

        Code that selects by a mask is traced as if the mask were all ones (`TracedMaskSelection`). If it is not, the
        call is repeated with masks as static arguments.

        Args:
            given: Arguments by name, tensors on the CPU.
            call: Returns positional arguments and the static part for a choice of static arguments.
            function: Function to trace.
            step: `function`, compiled.
            checks_of: Returns the deferred checks bool[n] in the result of `step`, or None.
            code: Name of the module of the model's code, if `function` may run operator by operator where that code
                cannot be traced for want of values.
        """
        is_text = not set(given) - self._text - {"token_type_ids"}
        kind = f"{function.__name__} {'text' if is_text else sorted(given)}"
        if kind in self._by_operators:
            return self._run_by_operators(call, function)
        has_gaps = any(is_known(name, value, StaticArgs.GRIDS) and not value.all() for name, value in given.items())
        if has_gaps and kind in self._select:
            args, spec = call(StaticArgs.GRIDS)
            return step(self._weights, *args, spec=spec)
        try:
            result = self._run(given, call, function, step, kind, is_text)
        except NEEDS_VALUES as error:
            place = None if code is None else place_in_code(error, code)
            if place is None:
                raise
            result = self._run_by_operators(call, function)
            logger.warning("operators run one by one, for %s reads a value that the model computes", place)
            self._by_operators.add(kind)
            return result
        if not has_gaps or all_hold(checks_of(result)) or self._known.get(kind, StaticArgs.NOTHING) >= StaticArgs.GRIDS:
            return result
        args, spec = call(StaticArgs.GRIDS)
        try:
            exact = step(self._weights, *args, spec=spec)
        except Exception:  # whatever model code makes of arguments that do not fit: what was not met is said
            return result
        if not all_hold(checks_of(exact)):
            return result
        self._select.add(kind)
        return exact

    def _run_by_operators(self, call: Callable[[StaticArgs], tuple[Any, Any]], function: Callable[..., Any]) -> Any:
        args, spec = call(StaticArgs.NOTHING)
        return function(self._weights, *args, spec=spec)

    def _run(
        self,
        given: dict[str, Any],
        call: Callable[[StaticArgs], tuple[Any, Any]],
        function: Callable[..., Any],
        step: Callable[..., Any],
        kind: str,
        is_text: bool,
    ) -> Any:
        # Nearly all code can do without the values of text, and calls of one kind need alike: each is tried as such.
        guess = self._known.get(kind, StaticArgs.NOTHING if is_text else None)
        first: Exception | None = None
        if guess is not None:
            args, spec = call(guess)
            try:
                return step(self._weights, *args, spec=spec)
            except (jax.errors.JaxRuntimeError, InvalidArgumentError):
                raise
            except Exception as error:  # whatever model code raises for want of values
                if guess is StaticArgs.TEXT:
                    raise
                first = error
        least = StaticArgs.NOTHING if guess is None else StaticArgs(guess + 1)
        described = f"{function.__name__} from {least.name} {shape_summary(given)}"
        found = self._programs.memoize("known", described, lambda: self._found(call, function, least))
        if found is None and first is not None:
            raise first
        self._known[kind] = StaticArgs.TEXT if found is None else found  # its own error is raised where it runs
        args, spec = call(self._known[kind])
        return step(self._weights, *args, spec=spec)

    def _found(
        self, call: Callable[[StaticArgs], tuple[Any, Any]], function: Callable[..., Any], least: StaticArgs
    ) -> StaticArgs | None:
        """Returns the first choice from `least` on that can be traced; None if there is none."""
        for known in list(StaticArgs)[least:]:
            args, spec = call(known)
            with contextlib.suppress(Exception):  # whatever model code raises for want of values
                jax.eval_shape(functools.partial(function, spec=spec), self._weights, *args)
                return known
        return None
