"""Logical ops: several implementations of one signature, selected at tracing.

An op is defined by its plain ``jnp`` reference, which runs everywhere. Faster implementations name their platforms and
may not support a call (a dtype, a shape, a missing compiler). The one registered last that supports the call is used::

    registry.call("linear", x, weight, bias)

The choice is part of the traced program: :func:`use` and :func:`on_platform` have no effect on a function that
``jax.jit`` has traced already.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

from model_adapters.errors import InvalidArgumentError

Function = TypeVar("Function", bound=Callable[..., Any])
UnsupportedReason = Callable[..., str | None]

PLATFORMS = ("cpu", "gpu", "tpu")
REFERENCE = "reference"


def _supports_all(*args: Any, **kwargs: Any) -> str | None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
        name: Name of the implementation, unique for its op.
        platforms: Platforms that it is selected on; with none it runs only inside of :func:`use`.
        function: The implementation, with the signature of the reference.
        unsupported_reason: Gets the arguments of a call; returns why it cannot be computed, or None.
        takes_precedence: Is selected before those registered later as well.
    """

    name: str
    platforms: tuple[str, ...]
    function: Callable[..., Any]
    unsupported_reason: UnsupportedReason = _supports_all
    takes_precedence: bool = False


@dataclass(frozen=True)
class Op:
    """A logical op and its implementations.

    Attributes:
        name: Name of the op.
        summary: What the op computes, in one line.
        implementations: Implementations in the order of their registration, the reference first.
        providers: Module that registers more implementations, by platform, until it is imported.
    """

    name: str
    summary: str
    implementations: list[Implementation] = field(default_factory=list)
    providers: dict[str, str] = field(default_factory=dict)

    def find(self, name: str) -> Implementation:
        """Returns the implementation called `name`."""
        for implementation in self.implementations:
            if implementation.name == name:
                return implementation
        names = ", ".join(implementation.name for implementation in self.implementations)
        raise InvalidArgumentError(f"expected an implementation of op {self.name!r} ({names}), got {name!r}")


_OPS: dict[str, Op] = {}
_CHOSEN: ContextVar[dict[str, str]] = ContextVar("chosen implementations", default={})  # noqa: B039 never mutated
_PLATFORM: ContextVar[str | None] = ContextVar("platform", default=None)


def define(name: str, summary: str) -> Callable[[Function], Function]:
    """Decorates the reference of a new op."""

    def add(function: Function) -> Function:
        if name in _OPS:
            raise InvalidArgumentError(f"op {name!r} is defined already; register another implementation instead")
        _OPS[name] = Op(name, summary, [Implementation(REFERENCE, PLATFORMS, function)])
        return function

    return add


def register(
    op: str,
    name: str,
    platforms: tuple[str, ...],
    unsupported_reason: UnsupportedReason = _supports_all,
    *,
    takes_precedence: bool = False,
) -> Callable[[Function], Function]:
    """Decorates an implementation of `op`, preferred to those registered before it.

    With `takes_precedence` it is preferred to those registered later, too.
    """
    if unknown := set(platforms) - set(PLATFORMS):
        raise InvalidArgumentError(f"expected platforms out of {PLATFORMS}, got {sorted(unknown)}")

    def add(function: Function) -> Function:
        implementations = _defined(op).implementations
        if any(other.name == name for other in implementations):
            raise InvalidArgumentError(f"op {op!r} has an implementation {name!r} already; choose another name")
        implementations.append(Implementation(name, platforms, function, unsupported_reason, takes_precedence))
        return function

    return add


def register_module(op: str, platform: str, module: str) -> None:
    """Names the module whose import, on first use, registers implementations of `op`.

    Kernels import compilers, which takes seconds, and a process runs on one platform.
    """
    _defined(op).providers[platform] = module


def _import_providers(op: Op, platforms: tuple[str, ...]) -> None:
    for name in platforms:
        if (module := op.providers.get(name)) is not None:
            with jax.ensure_compile_time_eval():  # may run inside a trace, which the module's own arrays must not join
                importlib.import_module(module)
            op.providers.pop(name, None)


def find(op: str) -> Op:
    """Returns the op called `op`, with the implementations of all platforms imported."""
    found = _defined(op)
    _import_providers(found, PLATFORMS)
    return found


def _defined(op: str) -> Op:
    if op not in _OPS:
        raise InvalidArgumentError(f"expected one of the ops {', '.join(sorted(_OPS))}, got {op!r}")
    return _OPS[op]


def list_ops() -> list[Op]:
    """Returns all ops in the order of their names."""
    return [find(name) for name in sorted(_OPS)]


def platform() -> str:
    """Returns the platform that is traced for.

    It is that of :func:`on_platform`, else of JAX's default device.
    """
    if (chosen := _PLATFORM.get()) is not None:
        return chosen
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    name = jax.default_backend() if device is None else getattr(device, "platform", device)
    return {"cuda": "gpu", "rocm": "gpu", "proxy": "tpu"}.get(name, name)  # the proxy is that of Pathways


@contextlib.contextmanager
def on_platform(name: str) -> Iterator[None]:
    """Traces for platform `name` ("cpu", "gpu", "tpu"), to compile ahead of time."""
    if name not in PLATFORMS:
        raise InvalidArgumentError(f"expected a platform out of {PLATFORMS}, got {name!r}")
    token = _PLATFORM.set(name)
    try:
        yield
    finally:
        _PLATFORM.reset(token)


def is_overridden() -> bool:
    """Returns whether `use` or `on_platform` decides which implementations are traced."""
    return bool(_CHOSEN.get()) or _PLATFORM.get() is not None


def selection_key() -> tuple[Any, ...]:
    """Returns a key that is equal for two calls that select the same implementations."""
    return platform(), tuple(sorted(_CHOSEN.get().items()))


@contextlib.contextmanager
def use(op: str, implementation: str) -> Iterator[None]:
    """Selects `implementation` for calls of `op` traced inside the block; it must support them."""
    find(op).find(implementation)
    token = _CHOSEN.set({**_CHOSEN.get(), op: implementation})
    try:
        yield
    finally:
        _CHOSEN.reset(token)


@contextlib.contextmanager
def use_references() -> Iterator[None]:
    """Selects the reference for calls of all ops traced inside the block."""
    token = _CHOSEN.set({op.name: REFERENCE for op in list_ops()})
    try:
        yield
    finally:
        _CHOSEN.reset(token)


_RECORDS: dict[int, set[tuple[str, str]]] = {}
"""By the id of the object: two records may be equal."""


@contextlib.contextmanager
def record_calls() -> Iterator[set[tuple[str, str]]]:
    """Collects (op, implementation) of the calls traced inside the block, in any thread."""
    record: set[tuple[str, str]] = set()
    _RECORDS[id(record)] = record
    try:
        yield record
    finally:
        del _RECORDS[id(record)]


_FALLBACKS: dict[int, list[str]] = {}
"""By the id of the object, as `_RECORDS`."""


@contextlib.contextmanager
def fallbacks() -> Iterator[list[str]]:
    """Collects why kernels do not support calls that are traced inside the block.

    Calls of any thread count, if they use the reference.
    """
    record: list[str] = []
    _FALLBACKS[id(record)] = record
    try:
        yield record
    finally:
        del _FALLBACKS[id(record)]


def implementation_for(op: str, *args: Any, **kwargs: Any) -> Implementation:
    """Returns the implementation that computes a call with these arguments.

    Raises:
        InvalidArgumentError: :func:`use` selects an implementation that does not support these arguments.
    """
    here, found = platform(), _defined(op)
    _import_providers(found, (here,))
    if (name := _CHOSEN.get().get(op)) is not None:
        chosen = found.find(name)
        if (reason := chosen.unsupported_reason(*args, **kwargs)) is not None:
            raise InvalidArgumentError(
                f"implementation {name!r} of op {op!r} was asked for and cannot serve: {reason}; "
                f"drop `use({op!r}, {name!r})`"
            )
        return chosen
    newest_first = found.implementations[::-1]
    reasons = []
    for candidate in sorted(newest_first, key=lambda each: not each.takes_precedence):
        if here in candidate.platforms:
            if (reason := candidate.unsupported_reason(*args, **kwargs)) is None:
                if candidate.name == REFERENCE:
                    break
                return candidate
            if not candidate.takes_precedence:  # those call another implementation
                reasons.append(f"{op}, {candidate.name}: {reason}")
    for record in list(_FALLBACKS.values()):
        record += reasons
    return found.implementations[0]


def call(op: str, *args: Any, **kwargs: Any) -> Any:
    """Computes `op` with the implementation that platform, arguments and `use` select."""
    chosen = implementation_for(op, *args, **kwargs)
    for record in list(_RECORDS.values()):
        record.add((op, chosen.name))
    return chosen.function(*args, **kwargs)
