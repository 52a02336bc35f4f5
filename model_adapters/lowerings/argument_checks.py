"""Checks of arguments before a lowering runs: what PyTorch refuses is an error.

JAX broadcasts, promotes and clamps where PyTorch has an error, and XLA ends the process for some windows. PyTorch tells
by itself: each operator also runs on *meta tensors*, which have a shape and a dtype and no values. It is asked once for
each combination of them, in functions of `extract_jax`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from model_adapters.bridge.views import default_env, is_view, outside_torch_mode
from model_adapters.errors import OperatorArgumentError

_PLAIN = frozenset({int, float, complex, bool, str, type(None), type(...), torch.dtype, torch.memory_format})
"""Types of arguments that stand for themselves."""
_NARROWED = {torch.int64: torch.int32, torch.float64: torch.float32, torch.complex128: torch.complex64}
_WIDE = {torch.int32: torch.int64}
_ANSWERED = 8192
"""Combinations whose answer is kept: more than the operators of a large model."""


_ABOUT_META = ("meta", "internal assert", "not allocated", "data pointer", "storage")
"""Words of errors that say that a tensor has no values, and nothing of the arguments."""


class _Unchecked(Exception):
    """An argument for which there is no meta tensor."""


_STATE = threading.local()


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Checks operators inside, on this thread."""
    before, _STATE.is_enabled = getattr(_STATE, "is_enabled", False), True
    try:
        yield
    finally:
        _STATE.is_enabled = before


def install() -> None:
    """Makes torchax ask PyTorch before it runs an operator."""
    env = default_env()
    theirs, tables = env.dispatch, (env._ops, env._decomps)

    def is_lowered(func: Any) -> bool:
        return any(each in table for each in (func, getattr(func, "overloadpacket", func)) for table in tables)

    def dispatch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        is_on = getattr(_STATE, "is_enabled", False)
        if is_on and (places := _NUMBERS.get(_name(func))):
            _check_numbers(_name(func), places, args, kwargs or {})
        if (is_on and is_lowered(func)) or getattr(func, "overloadpacket", func) in _ALWAYS:
            _check(func, args, kwargs or {})
        return theirs(func, types, args, kwargs)

    env.dispatch = dispatch


def check(func: Any, args: Any, kwargs: Any) -> None:
    """Raises OperatorArgumentError if checks are on and PyTorch's `func` refuses its arguments."""
    if getattr(_STATE, "is_enabled", False):
        _check(func, args, kwargs)


def check_number(name: str, number: Any, dtype: torch.dtype) -> None:
    """Raises OperatorArgumentError if PyTorch does not make `number` one of `dtype`.

    Nothing is checked outside of `enabled`. Integers below 0 become unsigned ones by their last bits, floats do not.
    """
    if not getattr(_STATE, "is_enabled", False) or isinstance(number, bool) or not isinstance(number, int | float):
        return
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    if dtype == torch.bool or dtype.is_complex or (not is_integer and not math.isfinite(number)):
        return
    limits = torch.iinfo(dtype) if is_integer else torch.finfo(dtype)
    least = -limits.max if limits.min == 0 and isinstance(number, int) else limits.min
    if not least <= number <= limits.max:
        raise OperatorArgumentError(
            f"{name}: expected a number from {limits.min} to {limits.max}, which {dtype} holds, got {number}"
        )


def _check_numbers(name: str, places: dict[str, int], args: Any, kwargs: Any) -> None:
    """Checks the numbers among the arguments that an operator converts to its own dtype."""
    dtype = kwargs.get("dtype") or getattr(args[0] if args else None, "dtype", None)
    if not isinstance(dtype, torch.dtype) or (dtype in _NARROWED and kwargs.get("dtype") is None):
        return
    for keyword, place in places.items():
        number = args[place] if len(args) > place else kwargs.get(keyword)
        if type(number) not in (int, float):
            continue
        is_promoted = name in _PROMOTED and type(number) is float and not dtype.is_floating_point
        into = torch.float32 if is_promoted else _WIDE.get(dtype, dtype)
        if name != "pow" or into != torch.float32:  # whose exponents are float64
            check_number(name, float(number) if name in _OF_FLOATS else number, into)


def _name(func: Any) -> str:
    return getattr(func, "__name__", "").partition(".")[0].rstrip("_")


def _check(func: Any, args: Any, kwargs: Any) -> None:
    try:
        key = _described((*args, *kwargs.values()))
        refusal = _refusal(func, len(args), tuple(kwargs), key)
    except (_Unchecked, TypeError):  # what cannot be hashed
        return
    if refusal is not None:
        name = _ALWAYS.get(func) or getattr(func, "__name__", str(func)).partition(".")[0]
        raise OperatorArgumentError(f"{name}: expected arguments that PyTorch takes: {refusal}")


def _described(values: Any) -> Any:
    """Returns what decides about `values`, of any nesting, as a key."""
    found = list[Any]()
    for value in values:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            if not is_view(value) and (value.layout != torch.strided or kind not in (torch.Tensor, torch.nn.Parameter)):
                raise _Unchecked
            found.append((torch.Tensor, tuple(value.shape), value.dtype))
        elif kind in _PLAIN:
            found.append((kind, value))
        elif kind in (tuple, list, torch.Size):
            found.append((kind, _described(value)))
        else:
            raise _Unchecked
    return tuple(found)


@functools.lru_cache(_ANSWERED)
def _refusal(func: Callable[..., Any], num_positional: int, names: tuple[str, ...], described: Any) -> str | None:
    """Returns what PyTorch says against arguments, or None if it takes them or cannot tell.

    JAX's int32 is PyTorch's int64, which most operators want as indices, or the int32 that some want, which is tried
    where the first is refused.
    """
    refusal = _answer(func, num_positional, names, described, wide=True)
    is_taken = refusal is None or _answer(func, num_positional, names, described, wide=False) is None
    return None if is_taken else refusal


def _answer(
    func: Callable[..., Any], num_positional: int, names: tuple[str, ...], described: Any, wide: bool
) -> str | None:
    with outside_torch_mode(), torch.no_grad():
        values = [_made(each, wide) for each in described]
        args, kwargs = values[:num_positional], dict(zip(names, values[num_positional:], strict=True))
        try:
            func(*args, **kwargs)
        except NotImplementedError:
            pass  # values decide, or the operator has no kernel for meta tensors
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            message = str(error).partition("\n")[0]
            if any(word in message.lower() for word in _ABOUT_META):
                return None
            return _left_out(func, args, kwargs) or message
        return _left_out(func, args, kwargs)


def _made(described: Any, wide: bool) -> Any:
    kind, value = described[:2]
    if kind is torch.Tensor:
        dtype = _NARROWED.get(described[2], described[2])
        return torch.empty(value, dtype=_WIDE.get(dtype, dtype) if wide else dtype, device="meta")
    if kind in (tuple, list, torch.Size):
        return kind(_made(each, wide) for each in value)
    return value


_NUMBERS: dict[str, dict[str, int]] = {
    "fill": {"value": 1},
    "masked_fill": {"value": 2},
    "index_fill": {"value": 3},
    "scatter": {"value": 3},
    "full": {"fill_value": 1},
    "full_like": {"fill_value": 1},
    "new_full": {"fill_value": 2},
    "pad": {"value": 3},
    "constant_pad_nd": {"value": 2},
    "clamp": {"min": 1, "max": 2},
    "clip": {"min": 1, "max": 2},
    "clamp_min": {"min": 1},
    "clamp_max": {"max": 1},
    "hardtanh": {"min_val": 1, "max_val": 2},
    "threshold": {"threshold": 1, "value": 2},
    "pow": {"exponent": 1},
    "linspace": {"start": 0, "end": 1},
}
"""Numbers that operators convert to the dtype of their tensor, by name and place."""
_PROMOTED = frozenset(("clamp", "clip", "clamp_min", "clamp_max", "pow"))
"""Operators whose results are floats for a number that is one."""
_OF_FLOATS = frozenset(("pad", "linspace"))
"""Operators that take all numbers as floats."""
_aten = torch.ops.aten
_ALWAYS: dict[Any, str] = {
    getattr(where, name): name
    for axes in (1, 2, 3)
    for where, name in (
        (_aten, f"avg_pool{axes}d"),
        (_aten, f"max_pool{axes}d_with_indices"),
        (torch.nn.functional, f"max_pool{axes}d"),
    )
    if hasattr(where, name)
}
"""Operators that are checked in every function, and their names: XLA ends the process for a window beyond its array."""
_ALIKE = {
    **dict.fromkeys(("addmm", "addbmm", "baddbmm", "addmv"), (0, 1, 2)),
    **dict.fromkeys(("cross", "linalg_cross", "heaviside", "complex", "polar"), (0, 1)),
    **dict.fromkeys(("grid_sampler_2d", "grid_sampler_3d"), (0, 1)),
    **dict.fromkeys(("index_add", "index_copy"), (0, 3)),
    **dict.fromkeys(("put", "index_put"), (0, 2)),
}
"""Operators of one dtype, and which of their operands have it."""
_INTO_PARTS = {
    "select_scatter": _aten.select.int,
    "slice_scatter": _aten.slice.Tensor,
    "diagonal_scatter": _aten.diagonal.default,
}
"""Operators that write into a part, and the view that is the part."""
_ALONG_AN_AXIS = ("index_select", "index_add", "index_copy")
"""Operators with an axis and a vector of indices."""
_OF_ORDER = frozenset(
    ("max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "sort", "topk", "kthvalue", "median", "sign", "clamp")
) | frozenset(("gt", "ge", "lt", "le", "maximum", "minimum"))
"""Operators that complex numbers, which have no order, do not have."""


def _left_out(func: Any, args: Any, kwargs: Any) -> str | None:
    """Returns what PyTorch says with values, and does not say of meta tensors."""
    name = _name(func)
    dtypes = [args[place].dtype for place in _ALIKE.get(name, ()) if place < len(args)]
    if len(set(dtypes)) > 1:
        return f"operands of one dtype, got {' and '.join(map(str, dtypes))}"
    if name in _OF_ORDER and args and isinstance(args[0], torch.Tensor) and args[0].is_complex():
        return "complex numbers have no order"
    if name == "scatter_reduce" and args[0].is_complex() and {"amax", "amin"} & {*args[4:5], kwargs.get("reduce")}:
        return "complex numbers have no order"
    if name in _INTO_PARTS and len(args) > 1:
        return _of_part(_INTO_PARTS[name], *args, **kwargs)
    if name == "as_strided_scatter":
        return _of_memory(*args, **kwargs)
    if name in _ALONG_AN_AXIS and len(args) > 2:
        return _of_indices(name, *args)
    if name == "masked_scatter" and args[1].dtype != torch.bool:
        return f"a mask of truth values, got {args[1].dtype}"
    if name == "conv2d" and len(args) > 4 and isinstance(args[4], list | tuple) and min(args[4]) < 0:
        return f"padding of at least 0, got {list(args[4])}"
    return _of_convolution(*args) if name == "convolution" else None


def _of_part(view: Any, x: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> str | None:
    try:
        part = view(x, *args, **kwargs)
    except (RuntimeError, IndexError) as error:
        return str(error).splitlines()[0]
    return None if part.shape == source.shape else f"a source of the shape {list(part.shape)}, got {list(source.shape)}"


def _of_memory(
    x: torch.Tensor, source: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None
) -> str | None:
    last = (storage_offset or 0) + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    return None if last < x.numel() or 0 in size else f"places up to {x.numel() - 1}, got {last}"


def _of_indices(name: str, x: torch.Tensor, dim: int, index: torch.Tensor, *others: Any) -> str | None:
    most = max(x.ndim, 1)
    if not -most <= dim < most:
        return f"an axis from {-most} to {most - 1}, got {dim}"
    if index.ndim > 1 or index.dtype not in (torch.int64, torch.int32):
        return f"a vector of integers as indices, got {index.dtype} {list(index.shape)}"
    if not x.ndim and index.numel() != 1:
        return f"one index into a tensor without axes, got {index.numel()}"
    if not others or not isinstance(others[0], torch.Tensor):
        return None
    wanted = list(x.shape)
    if x.ndim:
        wanted[dim] = index.numel()
    given = list(others[0].shape)
    if given != wanted and not (name == "index_copy" and not given) and not (len(wanted) < 2 and not given):
        return f"a source of the shape {wanted}, got {given}"
    return None


def _of_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> str | None:
    if min(padding, default=0) < 0 or min(output_padding, default=0) < 0:
        return f"padding of at least 0, got {list(padding)} and {list(output_padding)}"
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    if bias is not None and tuple(bias.shape) != (channels,):
        return f"a bias of the shape {[channels]}, got {list(bias.shape)}"
    if transposed and any(
        more >= max(step, wide) for more, step, wide in zip(output_padding, stride, dilation, strict=False)
    ):
        return f"output padding below the stride or the dilation, got {list(output_padding)}"
    return None
