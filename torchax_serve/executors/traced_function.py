"""A function that is traced in front of a loop which calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core as jex


class TracedFunction:
    """A pure function, traced once for arguments of these shapes.

    Args:
        function: Function of pytrees of arrays.
        *args: Arguments, or others of their shapes.

    Attributes:
        result_shape: Shapes and dtypes of its results.
    """

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._closed, self.result_shape = jax.make_jaxpr(function, return_shape=True)(*args)

    def __call__(self, *args: Any) -> Any:
        """Returns the results for `args`."""
        results = jex.jaxpr_as_fun(self._closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self.result_shape), results)
