"""Detection of changes of a model since its programs were compiled.

A change is one of parts, tensors, hooks, attributes or configuration.

Programs and arrays are made from a module in its state at some time. `ModuleWatch` records the state that the module's
forward depends on and compares it with the current one, in less than a millisecond for a model of some hundred tensors:
dicts of attributes by Python's own comparison, tensors by identity, address and version, and by a few of their values,
since an edit through ``tensor.data`` leaves no other trace.

Compared are the modules and their classes; attributes, and the contents of those that are containers; hooks; functions
in place of methods, with the values that they close over; the classes and functions of the modeling files; and
configurations. State that Python code reads from elsewhere is not compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from model_adapters.program.held_objects import described
from model_adapters.program.module_hooks import has_hooks, hooked_parts
from model_adapters.program.tensor_watch import TensorWatch
from model_adapters.program.trace_context import configs_of, trace_lock

PREPARES = "prepare_inputs_for_generation"
NOT_READ = frozenset(
    [
        "generation_config",
        "name_or_path",
        "rope_deltas",
        "warnings_issued",
        "_cache",
        "_diffusers_hook",
        "_jax_runtime",
        "_engine_rows",
        PREPARES,
    ]
)
"""Attributes of a model that its forward does not read, or that ``generate`` itself writes.

A pipeline of diffusers gives its models an empty registry of hooks when a call ends; a hook replaces their forward."""
PROCESSOR = "processor"
"""Attribute with the attention processor of a part of a diffusers model."""
TEMPORARY = "_torchax_serve_temporary"
"""Attribute of functions that replace a method of a module for the time of a call.

Such a function is no change of the model.
"""
_TABLES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs")
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_MODELING = ("transformers.models.", "transformers_modules.")


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of a model.

    Attributes:
        what: the first difference, such as the path of an attribute.
        tensors: names of tensors that are new or have other values.
        is_structural: more has changed than values, so that programs must be made anew.
    """

    what: str
    tensors: frozenset[str]
    is_structural: bool


class ModuleWatch:
    """Compares `module` with its state when `take` was last called, or the watch was made.

    Attributes:
        module: that is watched.
        is_held: whether code outside of this project may have the module, which can change then.
        structure: what there was besides the values of tensors.
        hooked: names of parts with hooks of a script.
        is_wrapped: whether the module itself has such hooks, or another forward than its class's.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.is_held = module, True
        self.take()

    def take(self) -> None:
        """Records the current state of the module."""
        self.structure = Structure(self.module)
        self._tensors = TensorWatch(self.module)
        self.hooked = hooked_parts(self.module)
        self.is_wrapped = has_hooks(self.module) or "forward" in vars(self.module)

    def may_have_changed(self) -> bool:
        """Returns whether `change` could find anything: it takes time for each part of the module.

        Functions of the modeling files can be replaced without having the module.
        """
        return self.is_held or self.structure.has_other_code()

    def change(self) -> Change | None:
        """Returns the change of the module; None if there is none.

        Waits while a trace has replaced the module's tensors.
        """
        with trace_lock():
            what = self.structure.difference()
            changed = self._tensors.changed(of_all=what is not None)
            if what is None and not changed:
                return None
            is_structural = what is not None or any(self._tensors.has_other_shape(name) for name in changed)
            return Change(what or min(changed), frozenset(changed), is_structural)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Runs model code inside, whose own changes of its module do not count."""
        with trace_lock():
            was_same = self.structure.difference() is None
            try:
                yield
            finally:
                if was_same and self.structure.difference() is not None:
                    self.structure = Structure(self.module)


class Structure:
    """Everything that programs depend on except the values of tensors.

    Equal structures have equal programs. Attention processors are equal if their classes and contents are: some
    pipelines make new ones for each call.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._classes = [(child, type(child), name) for name, child in module.named_modules()]
        self._models = [(vars(child), _read(vars(child)), name) for child, _, name in self._classes if _is_model(child)]
        self._functions: list[tuple[Any, Any, str]] = []
        pairs: list[tuple[Any, Any, str]] = []
        for child, _, name in self._classes:
            attributes = vars(child)
            if not _is_model(child):
                pairs.append((attributes, dict(attributes), name))
            pairs += [(attributes[table], dict(attributes[table]), f"{name}.{table}") for table in _TABLES]
            for key, value in dict(attributes).items():
                if key in _OF_EVERY_MODULE or key in NOT_READ or hasattr(value, TEMPORARY):
                    continue
                if type(value) in (dict, list, set):
                    pairs.append((value, _copied(value), f"{name}.{key}"))
                elif isinstance(value, _FUNCTIONS):
                    self._functions.append((value, _state_of(value), f"{name}.{key}"))
        pairs += [(vars(config), _copied(vars(config)), "config") for config in configs_of(module)]
        self._spaces = _code_of({cls for _, cls, _ in self._classes})
        self._pairs = [pair for pair in pairs if _is_same(*pair[:2])]  # some values do not equal themselves
        known: dict[int, int] = {}
        held = {name: vars(child)[PROCESSOR] for child, _, name in self._classes if PROCESSOR in vars(child)}
        self._processors = {name: described(each, known) for name, each in held.items()}

    def difference(self) -> str | None:
        """Returns the place of the first difference; None if there is none."""
        where = "the model"
        try:
            for child, cls, where in self._classes:
                if child.__class__ is not cls:
                    return where or "the model"
            for now, was, where in self._pairs:
                if now != was:
                    return _place(now, was, where)
            for now, was, where in self._spaces:
                if now != was and (code := _code_in(now, was)) != was:
                    return _place(code, was, where)
            for now, was, where in self._models:
                if _read(now) != was:
                    return _place(now, was, where)
            for function, state, where in self._functions:
                if _state_of(function) != state:
                    return where
        except Exception:  # values that cannot be compared, such as tensors
            return where or "the model"
        return None

    def has_other_code(self) -> bool:
        """Returns whether classes or functions of the modeling files may differ."""
        try:
            return any(now != was and _code_in(now, was) != was for now, was, _ in self._spaces)
        except Exception:  # values that cannot be compared, such as tensors
            return True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        try:
            return bool(self._state() == other._state())
        except Exception:  # as above
            return False

    __hash__ = None  # type: ignore[assignment]

    def _state(self) -> list[Any]:
        pairs = [(_but_processor(was), where) for _, was, where in self._pairs]
        states = (*self._spaces, *self._models, *self._functions)
        return [each[:2] for each in self._classes] + pairs + [each[1:] for each in states] + [self._processors]


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def _is_model(child: torch.nn.Module) -> bool:
    return hasattr(child, "generation_config") or "_jax_runtime" in vars(child) or "config" in vars(child)


def _read(attributes: dict[str, Any]) -> dict[str, Any]:
    items = dict(attributes).items()  # a copy: another thread may replace a method meanwhile
    return {name: value for name, value in items if name not in NOT_READ and not hasattr(value, TEMPORARY)}


def _but_processor(value: Any) -> Any:
    is_held = isinstance(value, dict) and PROCESSOR in value
    return {name: each for name, each in value.items() if name != PROCESSOR} if is_held else value


def _copied(value: Any) -> Any:
    """Returns `value` with containers of their own, at every depth."""
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) is list:
        return [_copied(item) for item in value]
    if type(value) is set:
        return set(value)
    return value


def _is_same(now: Any, was: Any) -> bool:
    try:
        return bool(now == was)
    except Exception:  # values that cannot be compared
        return False


def _code_in(now: Mapping[str, Any], was: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the namespace `now` without values that libraries store there for themselves.

    Such are the registry of warnings that Python adds to a module, and what transformers stores on a class the first
    time that it finds it out: new, private, and no function.
    """
    return {k: v for k, v in now.items() if k in was or not k.startswith("_") or callable(v)}


def _place(now: Any, was: Any, where: str) -> str:
    """Returns `where` and the key under which the dicts `now` and `was` differ."""
    if not (isinstance(now, Mapping) and isinstance(was, Mapping)):
        return where
    keys = [key for key in {**was, **now} if key not in NOT_READ]
    key = next((key for key in keys if key not in now or key not in was or now[key] is not was[key]), "")
    return f"{where}.{key}".replace("._modules.", ".").replace("._parameters.", ".").strip(".")


def _state_of(function: Any) -> Any:
    """Returns the state that a function of a script reads: closed-over values and defaults."""
    if isinstance(function, functools.partial):
        return _copied([function.args, function.keywords, _state_of(function.func)])
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        return None
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    return _copied([cells, function.__defaults__, function.__kwdefaults__])


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _code_of(classes: set[type]) -> list[tuple[Any, Any, str]]:
    """Returns the namespaces of modeling files and their classes, with copies and names.

    Scripts put functions of their own into these namespaces.
    """
    bases = {base for cls in classes for base in cls.__mro__ if base.__module__.startswith(_MODELING)}
    files = {base.__module__ for base in bases if base.__module__ in sys.modules}
    spaces: list[tuple[Any, str]] = [(vars(base), f"the class {base.__qualname__}") for base in bases]
    spaces += [(vars(sys.modules[file]), f"the module {file}") for file in files]
    return [(space, dict(space), where) for space, where in spaces]
