"""Token counts that Python code branches on, for use inside ``jax.jit``.

They need no trace per token. Sliding-window cache layers of transformers count their tokens in a Python int and ask
``count >= window``. Static, the count would make every decode step a new trace; traced, the question would fail. What
the questions need, though, is only where the count is in relation to the window. So the static part says in which
*range* it lies, and the value is a leaf: a :class:`TracedCount` answers from its range and computes with its value. A
question that the range leaves open is answered from the value where that is known (outside ``jax.jit``), else it is an
error, never a guess.

Ranges of a layer with window ``W``, each one trace:

* static sliding layer: ``0`` | ``1 .. W-2`` | ``W-1`` | ``W ..``. The cache's code distinguishes an empty, a filling
  and a full window, and computes ``max(count - W + 1, 0)``, which needs ``W-1`` by itself.
* dynamic sliding layer: exact below ``W``, where the tensors' shapes change each step anyway | ``W ..``.

A step that fills a window returns a count whose range lies across two of these. It is *settled* when it is next taken
apart, by reading its value back: once a step while a static window fills, never once it is full. What is read stands in
the pytree as a host integer. That also keeps JAX from taking the settled form for the form of every later output, which
it does where all leaves of an output are device arrays (`reflatten_outputs_for_dispatch` in ``jax/_src/pjit.py``, 0.10
and 0.11); a settled range with a device value outside it is refused when it is put together.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch

from pytree_registry.errors import RegistrationError, TracedCountError

_exact: ContextVar[bool] = ContextVar("exact_counts", default=False)


@contextlib.contextmanager
def exact_counts() -> Iterator[None]:
    """Makes the counts of all caches that are flattened inside static integers.

    Then any question works, at the cost of one trace a count. This is for code that needs the number itself, such as
    a two-dimensional attention mask over a full static sliding window.
    """
    token = _exact.set(True)
    try:
        yield
    finally:
        _exact.reset(token)


def _known(value: Any) -> int | None:
    """Returns the integer value of `value`; None if it is traced or not a number."""
    if isinstance(value, torch.Tensor) and hasattr(value, "jax"):
        value = value.jax()  # a torch view of a JAX array; outside its environment it cannot convert itself
    is_host_tensor = type(value) is torch.Tensor and value.device.type != "meta"
    is_number = isinstance(value, int | np.generic | np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer)
    return int(value) if is_number or is_host_tensor else None


class TracedCount:
    """A token count with a traced value, known to lie in ``low .. high``.

    Args:
        value: integer scalar: array, tensor or tracer.
        low: smallest value it can have.
        high: largest value it can have; ``math.inf`` for none.
        settled: whether this is one of the ranges of a rule, so that the same range comes in at the next step.
    """

    __slots__ = ("high", "low", "settled", "value")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any, low: float, high: float, settled: bool = False) -> None:
        self.value = value
        self.low = low
        self.high = high
        self.settled = settled

    def __repr__(self) -> str:
        return f"TracedCount({self.value!r} in {self.low}..{self.high})"

    def __int__(self) -> int:
        if self.low == self.high:
            return int(self.low)
        known = _known(self.value)
        if known is None:
            raise TracedCountError(
                f"expected a token count with a known value, got one traced in {self.low}..{self.high}; pass "
                "position ids and masks as tensors, or call under pytree_registry.exact_counts()"
            )
        return known

    __index__ = __int__

    def __add__(self, other: Any) -> Any:
        if isinstance(other, TracedCount):
            return TracedCount(self.value + other.value, self.low + other.low, self.high + other.high)
        if isinstance(other, int):
            return TracedCount(self.value + other, self.low + other, self.high + other)
        return self.value + other  # a tensor

    __radd__ = __add__

    def __neg__(self) -> TracedCount:
        return TracedCount(-self.value, -self.high, -self.low)

    def __sub__(self, other: Any) -> Any:
        return self + (-other)

    def __rsub__(self, other: Any) -> Any:
        return (-self) + other

    def _compare(self, other: Any, question: Callable[[Any, Any], Any]) -> Any:
        if isinstance(other, int | TracedCount):
            return _ask((self - other), question)
        return question(self.value, other)

    def __lt__(self, other: Any) -> Any:
        return self._compare(other, operator.lt)

    def __le__(self, other: Any) -> Any:
        return self._compare(other, operator.le)

    def __gt__(self, other: Any) -> Any:
        return self._compare(other, operator.gt)

    def __ge__(self, other: Any) -> Any:
        return self._compare(other, operator.ge)

    def __eq__(self, other: object) -> Any:
        return self._compare(other, operator.eq)

    def __ne__(self, other: object) -> Any:
        return self._compare(other, operator.ne)

    def __bool__(self) -> bool:
        return bool(self != 0)

    def zero_(self) -> TracedCount:
        """Sets the count to 0 in place.

        ``reset`` of a cache layer calls this on a count that is not an ``int``.
        """
        self.value, self.low, self.high = self.value * 0, 0, 0
        return self


def _ask(count: TracedCount, question: Callable[[Any, Any], bool]) -> bool:
    """Answers ``question(count, 0)`` from the range where that suffices, else from the value."""
    # The questions change their answer next to 0 or nowhere, so these points represent the range.
    points = [count.low, count.high, *(point for point in (-1, 0, 1) if count.low <= point <= count.high)]
    answers = {bool(question(point, 0)) for point in points}
    if len(answers) == 1:
        return answers.pop()
    known = _known(count.value)
    if known is None:
        raise TracedCountError(
            f"expected a question that every count in the range answers alike, got `{question.__name__}(count, 0)` of "
            f"one traced in {count.low}..{count.high}; feed a window that is filling token by token, or call under "
            "pytree_registry.exact_counts()"
        )
    return bool(question(known, 0))


@dataclass(frozen=True)
class CountRule:
    """Rule for a cache layer: the attribute that counts tokens, and what it is compared with.

    Attributes:
        attribute: name of the count.
        window: name of the attribute that holds the window, in tokens.
        exact_below_window: whether the shapes tell the count until the window is full, so that static costs nothing.
    """

    attribute: str
    window: str
    exact_below_window: bool

    def canonicalize(self, count: Any, window: int) -> TracedCount:
        """Returns the count as stored in the pytree of a layer with `window`.

        It is over one of the ranges if possible.

        Args:
            count: an ``int``, or a count that has been through a pytree.
            window: in tokens.
        """
        if isinstance(count, TracedCount):
            low, high = self._range(count.low, window)
            if not _exact.get() and low <= count.low and count.high <= high:
                return TracedCount(count.value, low, high, settled=True)
            known = int(count.low) if count.low == count.high else _known(count.value)
            if known is None:
                return TracedCount(count.value, count.low, count.high)
        else:
            known = int(count)
        low, high = (known, known) if _exact.get() else self._range(known, window)
        return TracedCount(np.int32(known), low, high, settled=True)

    def _range(self, count: float, window: int) -> tuple[float, float]:
        if count >= window:
            return window, math.inf
        if self.exact_below_window or count <= 0 or count == window - 1:
            return count, count
        return 1, window - 2


def _flatten(count: TracedCount) -> tuple[tuple[Any, ...], tuple[float, float, bool]]:
    return (count.value,), (count.low, count.high, count.settled)


def _flatten_with_keys(count: TracedCount) -> tuple[tuple[tuple[Any, Any], ...], tuple[float, float, bool]]:
    return ((jax.tree_util.GetAttrKey("value"), count.value),), (count.low, count.high, count.settled)


def _unflatten(static: tuple[float, float, bool], children: Any) -> Any:
    """Returns the count back: a plain ``int`` where it is known without asking a device."""
    low, high, settled = static
    (value,) = children
    if isinstance(value, np.generic | np.ndarray) or (type(value) is torch.Tensor and value.device.type == "cpu"):
        return int(value)
    if low == high and isinstance(value, torch.Tensor | jax.Array):
        return int(low)
    if settled and high < math.inf:
        known = _known(value) if isinstance(value, jax.Array) else None
        if known is not None and not low <= known <= high:
            raise RegistrationError(
                f"expected a token count in {low}..{high}, got {known}; the structure is not that of this count, "
                "take it from the cache that the count belongs to"
            )
    return TracedCount(value, low, high, settled)


jax.tree_util.register_pytree_with_keys(TracedCount, _flatten_with_keys, _unflatten, _flatten)
