"""The C++ kernels as JAX functions.

Without a compiler there are none: :func:`missing` returns why, and callers use XLA's own operations.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops.cpu import build
from model_adapters.ops.cpu.batching import with_rows_folded
from model_adapters.ops.cpu.quantized_numbers import QuantizedNumbers
from model_adapters.ops.cpu.targets import ROW_OPERANDS as ROW_OPERANDS
from model_adapters.ops.cpu.targets import TARGETS as TARGETS

logger = logging.getLogger("torchax_serve")

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32))
GROUP_ROWS, GROUP_COLUMNS = 16, 8
"""Rows and columns of a weight that are compressed together."""
_lock = threading.Lock()
_CODE: tuple[Path, Path | None] = (build.FOLDER, None)
"""Folder of the kernels' C++ files, and the library if it is built already."""
_BATCH_INVARIANT = contextvars.ContextVar("in_order", default=False)


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for target in TARGETS:
        getattr(library, target)
    library.tas_pack.restype = ctypes.c_int64
    return library


@functools.cache
def _loaded() -> ctypes.CDLL | str:
    """Returns the library with its targets registered, or why there is none. Logs one line."""
    begin = time.perf_counter()
    code, built = _CODE
    try:
        path = built or build.library_path(code=code)
        try:
            library = _open(path)
        except (OSError, AttributeError):  # an intact file, linked to libraries that this system lacks
            library = _open(build.library_path(rebuild=True, code=code))
    except (build.BuildError, OSError, AttributeError) as error:
        remedy = error.remedy if isinstance(error, build.BuildError) else "install g++ or set CXX"
        logger.warning(
            "no CPU kernels: %s. Decoding goes through XLA's own operations and is slower; %s.", error, remedy
        )
        return str(error)
    finally:
        build.remove_temporary()
    for target in TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    logger.info("CPU kernels ready in %.1f s (%s)", time.perf_counter() - begin, path)
    return library


def load_from(code: Path, built: Path | None) -> None:
    """Loads the kernels of other C++ files than the package's, for the rest of the process.

    Args:
        code: Folder of the C++ files.
        built: The library of these files for this machine; None: it is built if there is a compiler.

    Raises:
        InvalidArgumentError: other kernels are loaded already.
    """
    global _CODE
    with _lock:
        if _loaded.cache_info().currsize == 0:
            _CODE = code, built
            _loaded()
        elif build.sources_digest(_CODE[0]) != build.sources_digest(code):
            raise InvalidArgumentError(
                f"expected a process that has loaded no C++ kernels but those of {code}, got others; use a new process"
            )


def _library() -> ctypes.CDLL | str:
    with _lock:  # functools.cache by itself would let two threads build
        return _loaded()


def missing() -> str | None:
    """Returns why the kernels cannot be used here, or None.

    The first call builds or loads them.
    """
    found = _library()
    return found if isinstance(found, str) else None


def max_linear_rows(dtype: jnp.dtype) -> int | None:
    """Returns the most rows for which :func:`linear` is faster than XLA's; None: any number."""
    library = _library()
    return 0 if isinstance(library, str) else int(library.tas_linear_max_rows(jnp.dtype(dtype).itemsize)) or None


def library() -> ctypes.CDLL:
    """Returns the library.

    Raises:
        RuntimeError: there is none; call :func:`missing` first.
    """
    found = _library()
    if isinstance(found, str):
        raise RuntimeError(f"no CPU kernels: {found}; ask missing() first")
    return found


def packing_unsupported_reason() -> str | None:
    """Returns why this processor does not multiply with compressed weights, or None."""
    if (reason := missing()) is not None:
        return reason
    return None if library().tas_packs() else "they are for processors with AVX2 or AVX-512BW and without AMX"


def ffi_call(target: str, results: Any, **options: Any) -> Callable[..., Any]:
    """Returns a target of the library as a function of arrays; `results` are shapes and dtypes."""
    library()
    return jax.ffi.ffi_call(target, results, vmap_method="sequential", **options)


def or_empty(array: jax.Array | None) -> jax.Array:
    """Returns an operand that may be missing, in float32; without elements if it is."""
    return jnp.zeros((0,), jnp.float32) if array is None else array.astype(jnp.float32)


def unsupported_reason(x: jax.Array) -> str | None:
    """Returns why the kernels cannot take the dtype of `x`, of any shape, or None."""
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}, the kernel has bfloat16, float16 and float32"
    return missing()


def differentiable(kernel: Callable[..., jax.Array], reference: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns `kernel` with the derivatives of `reference`, which has the same result."""

    @jax.custom_jvp
    def run(*arrays: Any) -> jax.Array:
        return kernel(*arrays)

    @run.defjvp
    def tangent(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        return run(*primals), jax.jvp(reference, primals, tangents)[1]

    return run


def differentiated_as(kernel: Callable[..., jax.Array], plain: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns `kernel`, in whose place `plain` is computed where derivatives are wanted.

    These need what `plain` computes in any case: to run the kernel as well would take time for nothing.
    """

    @jax.custom_jvp
    def run(*arrays: Any) -> jax.Array:
        return kernel(*arrays)

    @run.defjvp
    def tangent(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        found: tuple[jax.Array, jax.Array] = jax.jvp(plain, primals, tangents)
        return found

    return run


@contextlib.contextmanager
def batch_invariant(wanted: bool = True) -> Iterator[None]:
    """Makes rows of products traced inside bit-equal for any number of rows.

    All sums are in one order. Else up to four rows of a 16-bit type are summed in another order, which reads weights a
    third faster.
    """
    before = _BATCH_INVARIANT.set(wanted)
    try:
        yield
    finally:
        _BATCH_INVARIANT.reset(before)


def is_batch_invariant() -> bool:
    """Returns whether what is traced is inside of :func:`batch_invariant`."""
    return _BATCH_INVARIANT.get()


def linear(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    dtype: jnp.dtype,
    folded: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """Returns ``x[rows, K] @ weight[N, K].T + bias[N]`` in `dtype`, summed in float32.

    `dtype` is that of x, or float32. `folded` computes the rows of a ``vmap``, in place of the kernel.
    """

    def run(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        result = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), dtype)
        return ffi_call("tas_linear", result)(x, weight, bias, in_order=_BATCH_INVARIANT.get())

    return with_rows_folded(run, 1, folded)(x, weight, or_empty(bias))


def lora(x: jax.Array, sums: jax.Array, ids: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns `model_adapters.ops.lora` of ``x[rows, K]``, ``sums[rows, N]`` and ids.

    `a` is ``[adapters, rank, K]`` and `b` ``[adapters, rank, N]``, all in x's dtype; summed in float32.
    """

    def run(x: jax.Array, sums: jax.Array, ids: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        result = jax.ShapeDtypeStruct(sums.shape, sums.dtype)
        out: jax.Array = ffi_call("tas_lora", result, input_output_aliases={1: 0})(x, sums, ids, a, b)
        return out

    return with_rows_folded(run, 3)(x, sums, ids.astype(jnp.int32), a, b)


def packed_linear(
    x: jax.Array, groups: jax.Array, index: jax.Array, bias: jax.Array | None, num_rows: int | None = None
) -> jax.Array:
    """Returns :func:`linear` with a compressed weight, bit-equal to :func:`batch_invariant`.

    Args:
        x: bfloat16[rows, K].
        groups: Compressed weight, uint8[N / 16, K / 8, 192].
        index: Table of the weight, int32[...].
        bias: float[N] or None.
        num_rows: N, if its last 16 rows are padded.
    """

    def run(x: jax.Array, groups: jax.Array, index: jax.Array, bias: jax.Array) -> jax.Array:
        result = jax.ShapeDtypeStruct((x.shape[0], num_rows or groups.shape[0] * GROUP_ROWS), x.dtype)
        return ffi_call("tas_packed_linear", result)(x, groups, index, bias)

    return with_rows_folded(run, 1)(x, groups, index, or_empty(bias))


def quantized_linear(
    x: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    offset: jax.Array | None,
    bias: jax.Array | None,
    *,
    num_rows: int,
    numbers: QuantizedNumbers,
) -> jax.Array:
    """Returns ``x[rows, K]`` times the transpose of a quantized matrix ``[N, K]``.

    The product is in x's dtype, summed in float32.

    Args:
        x: float[rows, K].
        values: Numbers in the order of `quantized_rows.h`.
        scale: float16 or float32 ``[N / 16, groups, 16]``.
        offset: Like `scale`, or None.
        bias: float[N] or None.
        num_rows: N.
        numbers: What the values are.
    """

    def run(x: jax.Array, *parts: jax.Array) -> jax.Array:
        result = jax.ShapeDtypeStruct((x.shape[0], num_rows), x.dtype)
        attributes = numbers.attributes() | {"in_order": _BATCH_INVARIANT.get()}
        out: jax.Array = ffi_call("tas_quantized_linear", result)(x, *parts, **attributes)
        return out

    shift = jnp.zeros((0,), scale.dtype) if offset is None else offset
    return with_rows_folded(run, 1)(x, values, scale, shift, or_empty(bias))


def quantized_routed_linear(
    x: jax.Array,
    ids: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    offset: jax.Array | None,
    bias: jax.Array | None,
    *,
    num_rows: int,
    numbers: QuantizedNumbers,
) -> jax.Array:
    """Returns :func:`routed_linear` with quantized matrices ``[E, N, K]``.

    The other arguments are those of :func:`quantized_linear`, with a leading axis E of the parts and of `bias`.
    """
    result = jax.ShapeDtypeStruct((*ids.shape, num_rows), x.dtype)
    shift = jnp.zeros((0,), scale.dtype) if offset is None else offset
    out: jax.Array = ffi_call("tas_quantized_routed_linear", result)(
        x, ids, values, scale, shift, or_empty(bias), in_order=True, **numbers.attributes()
    )
    return out


def unpack(groups: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the weight bfloat16[..., N, K] of a compressed one.

    `groups` are uint8[..., N / 16, K / 8, 192], with one axis of matrices or none, `index` int32[...].
    """
    *matrices, blocks, columns, _ = groups.shape
    result = jax.ShapeDtypeStruct((*matrices, blocks * GROUP_ROWS, columns * GROUP_COLUMNS), jnp.bfloat16)
    return ffi_call("tas_unpack", result)(groups, index)


def unpack_rows(ids: jax.Array, groups: jax.Array, index: jax.Array) -> jax.Array:
    """Returns rows `ids` int32[T], clamped, of a compressed weight, bfloat16[T, K].

    `groups` are uint8[N / 16, K / 8, 192], `index` int32[...].
    """

    def run(ids: jax.Array, groups: jax.Array, index: jax.Array) -> jax.Array:
        result = jax.ShapeDtypeStruct((ids.shape[0], groups.shape[1] * GROUP_COLUMNS), jnp.bfloat16)
        out: jax.Array = ffi_call("tas_unpack_rows", result)(ids, groups, index)
        return out

    return with_rows_folded(run, 1)(ids, groups, index)


def routed_linear(
    x: jax.Array,
    ids: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    is_input_major: bool,
    dtype: Any = None,
) -> jax.Array:
    """Returns rows of x times the matrices that their ids name, ``[T, choices, N]``.

    The result is in `dtype`, which is that of x, as None is, or float32.

    `ids` is ``int32[T, choices]``, `x` is ``[T, K]`` or ``[T, choices, K]``, `weight` is ``[E, K, N]`` if
    `is_input_major`, else ``[E, N, K]``, `bias` is ``[E, N]``. Rows whose id is no matrix are zero.
    """
    result = jax.ShapeDtypeStruct((*ids.shape, weight.shape[2 if is_input_major else 1]), dtype or x.dtype)
    options = {"in_order": _BATCH_INVARIANT.get(), "is_input_major": is_input_major}
    return ffi_call("tas_routed_linear", result)(x, ids, weight, or_empty(bias), **options)


def packed_routed_linear(
    x: jax.Array, ids: jax.Array, groups: jax.Array, index: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """Returns :func:`routed_linear` of a compressed stack, as under :func:`batch_invariant`.

    `groups` are uint8[E, N / 16, K / 8, 192], `index` int32[...], ``x`` is bfloat16.
    """
    result = jax.ShapeDtypeStruct((*ids.shape, groups.shape[1] * GROUP_ROWS), x.dtype)
    return ffi_call("tas_packed_routed_linear", result)(x, ids, groups, index, or_empty(bias))


def activation(x: jax.Array, *, is_gelu: bool) -> jax.Array:
    """Returns SiLU or tanh GELU of ``x[...]`` in x's dtype, computed in float32."""

    def run(x: jax.Array) -> jax.Array:
        out: jax.Array = ffi_call("tas_activation", jax.ShapeDtypeStruct(x.shape, x.dtype))(
            x, is_gelu=np.int64(is_gelu)
        )
        return out

    return with_rows_folded(run, 1)(x) if x.ndim else run(x)


def row_sum(x: jax.Array) -> jax.Array:
    """Returns the sums float32[rows] of the rows of ``x[rows, n]``."""

    def run(x: jax.Array) -> jax.Array:
        out: jax.Array = ffi_call("tas_row_sum", jax.ShapeDtypeStruct(x.shape[:1], jnp.float32))(x)
        return out

    return with_rows_folded(run, 1)(x)


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, rounds_first: bool) -> jax.Array:
    """Returns `model_adapters.ops.rms_norm` of ``x[rows, n]`` and ``weight[n]``."""

    def run(x: jax.Array, weight: jax.Array) -> jax.Array:
        call = ffi_call("tas_rms_norm", jax.ShapeDtypeStruct(x.shape, x.dtype))
        out: jax.Array = call(x, weight, eps=np.float32(eps), rounds_first=np.int64(rounds_first))
        return out

    return with_rows_folded(run, 1)(x, weight)
