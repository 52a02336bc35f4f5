"""One logical op, several implementations under one signature, chosen when a program is traced.

An op is defined by its plain ``jnp`` reference, which runs everywhere. Faster implementations name the platforms they
are for and may refuse a call (a dtype, a shape, a missing compiler); the newest that does not is taken::

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
    """One way to compute an op; `unsupported_reason` gets the call's arguments and answers why not, or None."""

    name: str
    platforms: tuple[str, ...]
    function: Callable[..., Any]
    unsupported_reason: UnsupportedReason = _supports_all
    takes_precedence: bool = False


@dataclass(frozen=True)
class Op:
    """A logical op: what it does in one line, and its implementations, the reference first.

    `providers` names by platform the module that registers more of them, until it is imported.
    """

    name: str
    summary: str
    implementations: list[Implementation] = field(default_factory=list)
    providers: dict[str, str] = field(default_factory=dict)

    def find(self, name: str) -> Implementation:
        """The implementation called `name`."""
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
    """Decorates a further implementation of `op`, preferred on `platforms` to those registered before it.

    With `takes_precedence`, to those that are registered later as well.
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
    """Names the module whose import registers implementations of `op` for `platform`; imported when they are needed.

    Kernels bring compilers along that take their time to import, and a process runs on one platform.
    """
    _defined(op).providers[platform] = module


def _import_providers(op: Op, platforms: tuple[str, ...]) -> None:
    for name in platforms:
        if (module := op.providers.get(name)) is not None:
            with jax.ensure_compile_time_eval():  # this may be amid a trace; what a module makes must not be part of it
                importlib.import_module(module)
            op.providers.pop(name, None)


def find(op: str) -> Op:
    """The op called `op`, with all its implementations."""
    found = _defined(op)
    _import_providers(found, PLATFORMS)
    return found


def _defined(op: str) -> Op:
    if op not in _OPS:
        raise InvalidArgumentError(f"expected one of the ops {', '.join(sorted(_OPS))}, got {op!r}")
    return _OPS[op]


def list_ops() -> list[Op]:
    """All ops, by name."""
    return [find(name) for name in sorted(_OPS)]


def platform() -> str:
    """The platform that programs are traced for: that of :func:`on_platform`, else of JAX's default device."""
    if (chosen := _PLATFORM.get()) is not None:
        return chosen
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    name = jax.default_backend() if device is None else getattr(device, "platform", device)
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


@contextlib.contextmanager
def on_platform(name: str) -> Iterator[None]:
    """Traces for `name` ("cpu", "gpu", "tpu") whatever the default device: for compiling ahead of time."""
    if name not in PLATFORMS:
        raise InvalidArgumentError(f"expected a platform out of {PLATFORMS}, got {name!r}")
    token = _PLATFORM.set(name)
    try:
        yield
    finally:
        _PLATFORM.reset(token)


def is_overridden() -> bool:
    """Whether `use` or `on_platform` decides what is traced here."""
    return bool(_CHOSEN.get()) or _PLATFORM.get() is not None


def selection_key() -> tuple[Any, ...]:
    """All that decides here which implementations are traced: equal for two calls that are traced alike."""
    return platform(), tuple(sorted(_CHOSEN.get().items()))


@contextlib.contextmanager
def use(op: str, implementation: str) -> Iterator[None]:
    """Has calls of `op` traced inside the block go to `implementation`, which then must not refuse them."""
    find(op).find(implementation)
    token = _CHOSEN.set({**_CHOSEN.get(), op: implementation})
    try:
        yield
    finally:
        _CHOSEN.reset(token)


_RECORDS: list[set[tuple[str, str]]] = []


@contextlib.contextmanager
def record_calls() -> Iterator[set[tuple[str, str]]]:
    """Collects (op, implementation) of what is traced meanwhile, in any thread."""
    record: set[tuple[str, str]] = set()
    _RECORDS.append(record)
    try:
        yield record
    finally:
        _RECORDS.remove(record)


_FALLBACKS: list[list[str]] = []


@contextlib.contextmanager
def fallbacks() -> Iterator[list[str]]:
    """Collects why kernels refuse the calls that are traced meanwhile, in any thread, and that go to the reference."""
    record: list[str] = []
    _FALLBACKS.append(record)
    try:
        yield record
    finally:
        _FALLBACKS.remove(record)


def implementation_for(op: str, *args: Any, **kwargs: Any) -> Implementation:
    """The implementation that a call with these arguments is given to.

    Raises:
        InvalidArgumentError: :func:`use` asks for an implementation that refuses these arguments.
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
    refusals = []
    for candidate in sorted(newest_first, key=lambda each: not each.takes_precedence):
        if here in candidate.platforms:
            if (reason := candidate.unsupported_reason(*args, **kwargs)) is None:
                if candidate.name == REFERENCE:
                    break
                return candidate
            if not candidate.takes_precedence:  # which hand on to another one
                refusals.append(f"{op}, {candidate.name}: {reason}")
    for record in _FALLBACKS:
        record += refusals
    return found.implementations[0]


def call(op: str, *args: Any, **kwargs: Any) -> Any:
    """Computes `op` with the implementation that the platform, the arguments and :func:`use` select."""
    chosen = implementation_for(op, *args, **kwargs)
    for record in _RECORDS:
        record.add((op, chosen.name))
    return chosen.function(*args, **kwargs)
