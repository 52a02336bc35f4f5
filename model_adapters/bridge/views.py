"""Torch views of JAX arrays, and the lowerings of torchax.

Terms as in torchax: a *torch view* of a JAX array is a tensor that torch code computes with and JAX executes; a
*jax view* is the array inside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import torch

from model_adapters.bridge.host_arrays import to_jax_zero_copy
from pytree_registry.torchax_import import own_torchax

torchax = own_torchax()
from torchax.interop import jax_view, torch_view  # noqa: E402

TorchTensor = torchax.tensor.Tensor
JaxFunction = Callable[..., Any]
default_env = inspect.unwrap(torchax.default_env)

_THREAD = threading.local()
"""depth: contexts of `torch_mode` and `computing` that this thread is in; number: how often it entered the first."""


def is_view(value: Any) -> bool:
    """Tells whether `value` is a torch view of a JAX array."""
    return isinstance(value, TorchTensor)


DEVICE = torch.device("privateuseone:0")
"""The device of torch views, by the name that PyTorch has for devices of other libraries."""


def _name_device() -> None:
    """Makes torch views tell their device without torchax's name for it.

    PyTorch was not told that name.
    """
    environment = torchax.tensor.Environment
    theirs = environment._is_same_device
    TorchTensor.device = property(lambda self: DEVICE)

    def is_same_device(self: Any, tensor: torch.Tensor, new_device: Any) -> bool:
        # PyTorch's own operators name the device of the wrapper.
        return (new_device == "meta" and is_view(tensor)) or theirs(self, tensor, new_device)

    environment._is_same_device = is_same_device


_name_device()


def accept_host_tensors() -> None:
    """Makes torchax take PyTorch's own tensors as constants.

    torchax refuses them together with its own. Model code that names no device makes them on the host, while it is
    traced: their values are known.
    """
    env = default_env()
    theirs = env.t2j_iso

    def t2j_iso(tensors: Any) -> Any:
        return theirs(as_views(tensors))

    env.t2j_iso = t2j_iso
    env.v2t_iso = lambda values: values  # torchax's class of views is not used
    for operator, found in env._decomps.items():
        env._decomps[operator] = dataclasses.replace(found, func=functools.partial(_over_views, found.func))


def _over_views(decomposition: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = as_views((args, kwargs))
    return decomposition(*args, **kwargs)


_WITHOUT_TENSORS = frozenset({int, float, bool, str, complex, slice, type(None), type(...), torch.dtype, torch.device})
"""Types of arguments that hold no tensor."""


def as_views(tensors: Any) -> Any:
    """Returns `tensors`, any pytree, with PyTorch's own host tensors as torch views."""
    if not _may_have_host_tensors(tensors):
        return tensors
    env = default_env()

    def taken(x: torch.Tensor) -> Any:
        if is_view(x):
            return x
        with jax.ensure_compile_time_eval():  # its values are known, and stay so
            return TorchTensor(to_jax_array(x.detach().clone()), env)  # PyTorch may write into it later

    return torch.utils._pytree.tree_map_only(torch.Tensor, taken, tensors)


def _may_have_host_tensors(value: Any) -> bool:
    """Tells whether a pytree may have tensors of PyTorch: quickly, since almost none has."""
    kind = type(value)
    if kind in (tuple, list):
        return any(map(_may_have_host_tensors, value))
    if kind is dict:
        return any(map(_may_have_host_tensors, value.values()))
    return kind not in _WITHOUT_TENSORS and not is_view(value) and not isinstance(value, jax.Array)


def set_lowering(torch_op: Any, function: Callable[..., Any], *, keep_kind: bool = False) -> None:
    """Makes `torch_op` run `function` over JAX arrays.

    With `keep_kind` it gets the arguments that the present lowering takes.
    """
    env = default_env()
    if keep_kind:
        env._ops[torch_op] = dataclasses.replace(env._ops[torch_op], func=function)
    else:
        env.override_op_definition(torch_op, functools.partial(_over_arrays, function))


def set_in_place(torch_op: Any, functional: Any) -> None:
    """Makes `torch_op` write into its first operand what the operator `functional` returns."""
    operators = default_env()._ops
    like = operators[torch.ops.aten.add_]
    operators[torch_op] = dataclasses.replace(like, torch_op=torch_op, func=type(like.func)(functional))


def _over_arrays(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = jax_view(as_views((args, kwargs)))
    return torch_view(function(*args, **kwargs))


def set_raw_lowering(torch_op: Any, function: Callable[..., Any]) -> None:
    """Makes `torch_op` run `function` over unconverted arguments.

    These are torch views, and numbers as they are.
    """
    operator = default_env()._ops[torch_op]
    default_env()._ops[torch_op] = dataclasses.replace(operator, func=function, is_jax_function=False)


def set_view_lowering(torch_op: Any, function: Callable[..., Any]) -> None:
    """Makes `torch_op` run `function` over unconverted arguments.

    It may have no lowering so far.
    """
    like = default_env()._ops[torch.Tensor.__getitem__]
    default_env()._ops[torch_op] = dataclasses.replace(like, torch_op=torch_op, func=function)


def set_first_operand(function: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Makes a function of PyTorch's own run over `change` of its first operand."""

    def changed(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(change(first), *args, **kwargs)

    set_view_lowering(function, changed)


def remove_lowering(torch_op: Any) -> None:
    """Makes `torch_op` run as PyTorch has it, as the operators that it consists of."""
    default_env()._ops.pop(torch_op)


def get_lowering(torch_op: Any) -> Callable[..., Any]:
    """Returns the function that torchax runs for `torch_op`."""
    return default_env()._ops[torch_op].func


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the tensors that a forward of `module` reads, by name.

    They are parameters, buffers and plain tensor attributes. A tensor with several names (tied weights) is under each
    of them.
    """
    found: dict[str, torch.Tensor] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = prefix + "." if prefix else ""
        for table in (child._parameters, child._buffers, vars(child)):
            for name, value in table.items():
                if isinstance(value, torch.Tensor):
                    found[dot + name] = value
    return found


def to_jax_array(tensor: torch.Tensor) -> jax.Array:
    """Returns the JAX array of a CPU tensor on the default device.

    It shares memory if that device is the CPU and the layout allows it. Without 64-bit types in JAX (its default) int64
    becomes int32 and float64 becomes float32.
    """
    array = to_jax_zero_copy(tensor)
    return array if jax.default_backend() == "cpu" else jax.device_put(array, jax.local_devices()[0])


def to_torch_tensor(array: jax.Array) -> torch.Tensor:
    """Returns a CPU tensor with a copy of a JAX array.

    Torch code may write to the tensor, and JAX's arrays never change.
    """
    if array.dtype == jax.numpy.bfloat16:
        return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


@contextlib.contextmanager
def torch_mode(module: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Runs torch code inside on JAX, with the tensors of `state` in place of those of `module`."""
    reparametrized = torch.nn.utils.stateless._reparametrize_module(module, dict(state))
    with (
        _on_this_thread(),
        _restored_random_key(),
        default_env(),
        torch.no_grad(),
        reparametrized,
        _PYTORCH.as_torchax_needs_it(),
        warnings.catch_warnings(),
    ):
        # Model code asks for int64 everywhere, and JAX without 64-bit types says each time that it gives int32.
        warnings.filterwarnings("ignore", "Explicitly requested dtype .*(int|float)64", UserWarning)
        yield


class _SharedSettings:
    """Settings of PyTorch for all threads that differ while any of them is in `torch_mode`."""

    def __init__(self) -> None:
        self._lock, self._depth, self._is_fast = threading.Lock(), 0, True
        self._named = ""  # the module of `torch` that was set here

    @contextlib.contextmanager
    def as_torchax_needs_it(self) -> Iterator[None]:
        """Switches off attention's fast path, and names a module of the device, inside."""
        name = DEVICE.type
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._is_fast = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
                if not hasattr(torch, name):
                    self._named = name
                    setattr(torch, name, torchax.device_module)
                    sys.modules[f"torch.{name}"] = torchax.device_module  # where PyTorch's own code looks
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if not self._depth:
                    torch.backends.mha.set_fastpath_enabled(self._is_fast)
                    if self._named:
                        delattr(torch, self._named)
                        del sys.modules[f"torch.{self._named}"]
                        self._named = ""


_PYTORCH = _SharedSettings()


@contextlib.contextmanager
def _restored_random_key() -> Iterator[None]:
    """Restores torchax's random key after a trace, which would leave a tracer as the next key."""
    properties = default_env().param
    before = properties.prng
    try:
        yield
    finally:
        if isinstance(properties.prng, jax.core.Tracer) and not isinstance(before, jax.core.Tracer):
            properties.prng = before


@contextlib.contextmanager
def _on_this_thread() -> Iterator[None]:
    _THREAD.depth = getattr(_THREAD, "depth", 0) + 1
    if _THREAD.depth == 1:
        _THREAD.number = getattr(_THREAD, "number", 0) + 1
    try:
        yield
    finally:
        _THREAD.depth -= 1


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Runs torch code on views inside, outside of any module, on this thread."""
    with _on_this_thread(), default_env(), _PYTORCH.as_torchax_needs_it(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Explicitly requested dtype .*(int|float)64", UserWarning)
        yield


@contextlib.contextmanager
def outside_torch_mode() -> Iterator[None]:
    """Runs torch code inside on PyTorch's own tensors again, on a thread in `torch_mode`."""
    depth, _THREAD.depth = getattr(_THREAD, "depth", 0), 0
    functions = [torch.overrides._pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    try:
        with torch.utils._python_dispatch._disable_current_modes():
            yield
    finally:
        for mode in reversed(functions):
            torch.overrides._push_mode(mode)
        _THREAD.depth = depth


def forward_number() -> tuple[int, int]:
    """Returns what tells this run of torch code on views from all others of the process."""
    return threading.get_ident(), getattr(_THREAD, "number", 0)


def in_torch_mode() -> bool:
    """Tells whether this thread is in `torch_mode`.

    Other threads see the arrays in the module, too.
    """
    return getattr(_THREAD, "depth", 0) > 0
