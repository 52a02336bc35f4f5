"""Import of torchax on torch versions newer than its last release.

It makes ``import torchax`` work for this project and for scripts.

torchax 0.0.13 names overloads of named tensors (``aten.prod.dim_Dimname`` and its like) that torch 2.13 no longer has,
so ``import torchax`` fails there. Its source is mended (commit d1a9349), no release carries that yet. While torchax is
being imported, a missing overload whose name speaks of names is answered with an existing one of the same operator; the
entries that torchax then registers twice are the same function. torch 2.14 has no `aten.cholesky` and `aten.qr` either:
what stands for these is a key of torchax's tables that nothing looks up. Where torchax imports by itself nothing is
touched.

torchax also names a device of its own in PyTorch, by which all code of the process would find an accelerator without
streams and random state, and switches a fast path of attention off. Where this project imports it for itself
(`own_torchax`), PyTorch stays as it was until a script uses torchax, too: by `import_torchax`, or by the environment
that every use of torchax begins with.

`install` puts a finder in front of Python's own, which has torchax executed so whoever imports it. Nothing heavy is
imported here, so that every package of this project can call it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import importlib.machinery
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

NAME = "torchax"
_IS_OWN = contextvars.ContextVar("is_own", default=False)  # whether this project imports torchax, and no script
_LEFT_OUT: list[Callable[[], Any]] = []  # what torchax would have changed in PyTorch when this project imported it
_LOCK = threading.RLock()
REMOVED = frozenset({"cholesky", "qr"})
"""Operators that torchax 0.0.13 names, and torch has no more from 2.14 on; models call those of ``torch.linalg``."""
LATE = ("torchax.decompositions", "torchax.ops.jaten")
"""What torchax itself loads with its first environment, and which names such overloads and operators, too."""


def install() -> None:
    """Makes every later ``import torchax`` of the process answer missing overloads.

    Idempotent.
    """
    if NAME not in sys.modules and not any(isinstance(finder, TorchaxFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchaxFinder())


class TorchaxFinder(MetaPathFinder):
    """Finds torchax where Python finds it, with a loader that answers missing overloads."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of torchax; None of everything else."""
        if fullname != NAME:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _AnsweringLoader(spec.loader)
                return spec
        return None


class _RemovedOperator:
    """Stands for an operator that this torch does not have, and for its overloads."""

    def __getattr__(self, name: str) -> _RemovedOperator:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _AnsweringLoader(Loader):
    """Loader that executes torchax by the loader that Python has for it.

    The result replaces what a failed import has left.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Python's own."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Runs torchax and the module that it loads late."""
        _drop_parts()
        is_own = _IS_OWN.get()
        with _answered_where_needed(), _torch_as_it_was() if is_own else contextlib.nullcontext():
            self._loader.exec_module(module)
            _import_late()
        if is_own:
            _follow_scripts(module)
        _say_no_accelerator(module)


def _import_late() -> None:
    for name in LATE:
        importlib.import_module(name)


def _drop_parts() -> None:
    """Removes the remains of a failed import of torchax.

    They are submodules without their package, and torch's device module.
    """
    import torch

    for name in [name for name in sys.modules if name.startswith(f"{NAME}.")]:
        del sys.modules[name]
    if getattr(getattr(torch, "jax", None), "__name__", None) == f"{NAME}.device_module":
        delattr(torch, "jax")  # which torch lets nobody register twice
        del sys.modules["torch.jax"]


@contextlib.contextmanager
def _torch_as_it_was() -> Iterator[None]:
    """Keeps PyTorch's devices, its attention and the environment as they are, inside.

    What would have changed goes to `_LEFT_OUT`.
    """
    import torch

    registered = torch.utils.rename_privateuse1_backend, torch._register_device_module
    is_fast, environment = torch.backends.mha.get_fastpath_enabled(), dict(os.environ)
    left_out: list[Callable[[], Any]] = []
    rename, register = (
        lambda *args, change=change: left_out.append(functools.partial(change, *args)) for change in registered
    )
    torch.utils.rename_privateuse1_backend, torch._register_device_module = rename, register
    try:
        yield
    finally:
        torch.utils.rename_privateuse1_backend, torch._register_device_module = registered
        left_out.append(
            functools.partial(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        )
        torch.backends.mha.set_fastpath_enabled(is_fast)
        for name in os.environ.keys() - environment.keys():
            left_out.append(functools.partial(os.environ.setdefault, name, os.environ.pop(name)))
    _LEFT_OUT[:] = left_out


def _follow_scripts(torchax: Any) -> None:
    """Makes torchax change in PyTorch what it changes, once a script calls it.

    Every use of it begins with its environment; its submodules ask for that on behalf of this project, too.
    """
    own = torchax.default_env

    @functools.wraps(own)
    def default_env() -> Any:
        if not sys._getframe(1).f_globals.get("__name__", "").startswith(f"{NAME}."):
            _change_torch()
        return own()

    torchax.default_env = default_env


def _change_torch() -> None:
    """Names torchax's device in PyTorch and does what else torchax's import does there, once."""
    with _LOCK:
        while _LEFT_OUT:
            _LEFT_OUT.pop(0)()


def _say_no_accelerator(torchax: Any) -> None:
    """Takes torchax's device out of torch's accelerators.

    It has no streams, which ``torch.compile`` asks them for.
    """
    torchax.device_module.is_available = lambda: False


def _answered_where_needed() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if torch_has_named_overloads() else _missing_named_overloads_answered()


@contextlib.contextmanager
def _missing_named_overloads_answered() -> Iterator[None]:
    """Answers missing overloads that are named after names, and `REMOVED`, inside the context.

    The answer is the first overload of the operator, or an object that stands for the operator.
    """
    import torch

    packet_type: Any = type(torch.ops.aten.add)
    namespace_type: Any = type(torch.ops.aten)
    original, original_operator = packet_type.__getattr__, namespace_type.__getattr__

    def getattr_or_first_overload(packet: Any, name: str) -> Any:
        try:
            return original(packet, name)
        except AttributeError:
            if "name" not in name.lower() or name.startswith("__"):
                raise
            # getattr, not the saved method: the packet must hand out the overload object it caches.
            return getattr(packet, packet.overloads()[0])

    def getattr_or_removed(namespace: Any, name: str) -> Any:
        try:
            return original_operator(namespace, name)
        except AttributeError:
            if name not in REMOVED:
                raise
            return _RemovedOperator()

    packet_type.__getattr__, namespace_type.__getattr__ = getattr_or_first_overload, getattr_or_removed
    try:
        yield
    finally:
        packet_type.__getattr__, namespace_type.__getattr__ = original, original_operator


def torch_has_named_overloads() -> bool:
    """Returns whether this torch still has the overloads that torchax 0.0.13 names."""
    import torch

    return "dimname" in torch.ops.aten.all.overloads()


def own_torchax() -> ModuleType:
    """Returns the ``torchax`` module with its operator tables loaded.

    PyTorch stays as it is. Its function ``default_env`` is for scripts; the original is its ``__wrapped__``.
    """
    install()
    token = _IS_OWN.set(True)
    try:
        with _answered_where_needed():  # where it was imported before this project, and has not loaded all yet
            torchax = importlib.import_module(NAME)
            _import_late()
    finally:
        _IS_OWN.reset(token)
    if torchax is not None:
        _say_no_accelerator(torchax)
    return torchax


def import_torchax() -> ModuleType:
    """Returns the ``torchax`` module as scripts have it, with the device ``jax`` in PyTorch."""
    torchax = own_torchax()
    _change_torch()
    return torchax
