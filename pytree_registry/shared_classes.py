"""Classes that a script registers with JAX itself, as tutorials do.

This comes in addition to this package's registration. JAX takes one registration of a class. Where the script is
first, its functions stay; where it comes second, the functions registered here hand over to its own (`Handover`). So a
script's registration takes effect in either order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.tree_util import FlattenedIndexKey

from pytree_registry.errors import RegistrationError

Flatten = Callable[[Any], tuple[Iterable[Any], Any]]


class Handover:
    """The flatten and unflatten functions of one class, until a script brings its own.

    Args:
        flatten_with_keys: of this package.
        flatten: likewise, without keys.
        unflatten: likewise.
    """

    def __init__(self, flatten_with_keys: Flatten, flatten: Flatten, unflatten: Callable[[Any, Any], Any]) -> None:
        self._flatten_with_keys, self._flatten, self._unflatten = flatten_with_keys, flatten, unflatten
        self.is_handed_over = False

    def hand_over(self, flatten: Flatten, unflatten: Callable[[Any, Any], Any], with_keys: Flatten | None) -> None:
        """Makes these functions take objects apart from now on.

        Objects taken apart before are joined by the functions that took them apart.
        """

        def with_index_keys(obj: Any) -> tuple[list[tuple[Any, Any]], Any]:
            children, static = flatten(obj)
            return [(FlattenedIndexKey(i), child) for i, child in enumerate(children)], static

        self._flatten_with_keys, self._flatten = with_keys or with_index_keys, flatten
        self._theirs, self.is_handed_over = unflatten, True

    def flatten_with_keys(self, obj: Any) -> tuple[Iterable[Any], Any]:
        """Returns pairs of key and child, and the static rest."""
        children, static = self._flatten_with_keys(obj)
        return children, (self.is_handed_over, static)

    def flatten(self, obj: Any) -> tuple[Iterable[Any], Any]:
        """Returns children and the static rest."""
        children, static = self._flatten(obj)
        return children, (self.is_handed_over, static)

    def unflatten(self, static: Any, children: Any) -> Any:
        """Returns the object again."""
        is_theirs, static = static
        return (self._theirs if is_theirs else self._unflatten)(static, children)


def hands_over(handovers: dict[type, Handover], is_safe: Callable[[type], bool]) -> None:
    """Makes JAX's functions for registration give a class of `handovers` to the script.

    The script is the one that calls them. Idempotent.

    Args:
        handovers: by class; filled later, too.
        is_safe: whether a class may have other functions than this package's.
    """
    if hasattr(jax.tree_util.register_pytree_node, "__wrapped__"):
        return
    plain, with_keys, of_class = (
        jax.tree_util.register_pytree_node,
        jax.tree_util.register_pytree_with_keys,
        jax.tree_util.register_pytree_node_class,
    )

    def is_taken(cls: type) -> bool:
        if cls not in handovers or handovers[cls].is_handed_over:
            return False  # JAX says that it is registered twice
        if not is_safe(cls):
            raise refusal(cls)
        return True

    @functools.wraps(plain)
    def register_pytree_node(
        nodetype: Any, flatten_func: Any, unflatten_func: Any, flatten_with_keys_func: Any = None
    ) -> None:
        if is_taken(nodetype):
            handovers[nodetype].hand_over(flatten_func, unflatten_func, flatten_with_keys_func)
        else:
            plain(nodetype, flatten_func, unflatten_func, flatten_with_keys_func)

    @functools.wraps(with_keys)
    def register_pytree_with_keys(
        nodetype: Any, flatten_with_keys: Any, unflatten_func: Any, flatten_func: Any = None
    ) -> None:
        if not is_taken(nodetype):
            with_keys(nodetype, flatten_with_keys, unflatten_func, flatten_func)
            return

        def without_keys(obj: Any) -> tuple[list[Any], Any]:
            pairs, static = flatten_with_keys(obj)
            return [child for _, child in pairs], static

        handovers[nodetype].hand_over(flatten_func or without_keys, unflatten_func, flatten_with_keys)

    @functools.wraps(of_class)
    def register_pytree_node_class(cls: Any) -> Any:
        if not is_taken(cls):
            return of_class(cls)
        handovers[cls].hand_over(lambda obj: obj.tree_flatten(), cls.tree_unflatten, None)
        return cls

    jax.tree_util.register_pytree_node = register_pytree_node
    jax.tree_util.register_pytree_with_keys = register_pytree_with_keys
    jax.tree_util.register_pytree_node_class = register_pytree_node_class


def refusal(cls: type) -> RegistrationError:
    """Returns the error for an additional registration that may give wrong numbers."""
    return RegistrationError(
        f"expected a class that is registered once, got {cls.__module__}.{cls.__qualname__}, which somebody else has "
        "registered with JAX; remove that registration, pytree_registry provides it (a script's own is fine for "
        "outputs and whole caches, not for cache layers, whose token counts it would freeze)"
    )
