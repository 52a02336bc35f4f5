"""Makes ready the native functions that stored programs call.

A program on disk names functions of libraries outside of it. XLA's own, such as Fourier transforms, are part of it, and
this project's kernels are loaded before the name of a program is known (`environment`). LAPACK's are in a table that
jaxlib fills while an operation that needs one is lowered, which a process that only reads programs never does: it would
call address 0.
"""

from __future__ import annotations

import jax

from model_adapters.once import once

LAPACK = b"lapack_"
"""Beginning of the names under which jaxlib registers functions of LAPACK."""


def prepare_native_calls(code: bytes) -> None:
    """Fills jaxlib's table of LAPACK functions if a serialized program names one.

    It imports SciPy's LAPACK, which takes a third of a second.

    Args:
        code: The serialized program.
    """
    if LAPACK in code:
        _fill_lapack()


@once
def _fill_lapack() -> None:
    matrix = jax.ShapeDtypeStruct((1, 1), "float32")
    jax.jit(jax.lax.linalg.cholesky).trace(matrix).lower(lowering_platforms=("cpu",))
