"""Indexers of a packed step: model code gets handles in place of all tokens' index keys.

An indexer (DeepSeek-V3.2) stores a key of its own for each token, multiplies a query with all that the cache returns,
takes the best tokens of each query, and hides the others in the mask. In a packed step the cache returns a handle.
What model code does with it is written down, and computed on pages where it takes the best tokens; the mask that it
makes of these is a handle as well, which attention reads. Whatever else is done with a handle is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import torch

from model_adapters.bridge.views import jax_view
from model_adapters.caches.packed_batch import NotPackableError


class Handle:
    """What stands for a tensor that a packed step does not compute."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses functions of PyTorch outside of `HandleMode`."""
        raise NotPackableError(f"{func.__name__} of what an indexer has chosen, outside of a packed step")


class HandleMode(torch.overrides.TorchFunctionMode):
    """Gives PyTorch's functions to the handles among their arguments, inside the context."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs `func`, or what a handle does in its place."""
        kwargs = kwargs or {}
        if not any(issubclass(each, Handle) for each in types):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name not in _FUNCTIONS:
            raise NotPackableError(f"an indexer's scores or tokens go through {name}, for which pages have no form")
        return _FUNCTIONS[name](*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class IndexPages:
    """The index keys of a layer on pages.

    Attributes:
        take: Returns the tokens that queries take, int32[T, n], of q float32[T, H, D], weights float32[T, H], the scale
            of the products, and n.
        num_tokens: T.
        capacity: Number of keys that model code sees.
        window: Last tokens that a query sees; None: all.
    """

    take: Callable[[jax.Array, jax.Array, float, int], jax.Array]
    num_tokens: int
    capacity: int
    window: int | None


@dataclasses.dataclass(frozen=True)
class IndexKeys(Handle):
    """The keys of all tokens; `shape` is that of the tensor that it stands for."""

    pages: IndexPages
    shape: tuple[int, ...]

    def float(self) -> IndexKeys:
        """Returns itself: products are in float32."""
        return self

    def transpose(self, one: int, other: int) -> IndexKeys:
        """Returns the keys with two axes exchanged."""
        shape = list(self.shape)
        shape[one], shape[other] = shape[other], shape[one]
        return dataclasses.replace(self, shape=tuple(shape))

    def unsqueeze(self, dim: int) -> IndexKeys:
        """Returns the keys with an axis of one."""
        return dataclasses.replace(self, shape=(*self.shape[:dim], 1, *self.shape[dim:]))

    def times(self, queries: torch.Tensor) -> IndexScores:
        """Returns the products with `queries` float32[1, T, H, D]."""
        q, (dim, capacity) = jax_view(queries), self.shape[-2:]
        if self.shape[:-2] != (1, 1) or capacity != self.pages.capacity or q.shape[::3] != (1, dim):
            raise NotPackableError(f"an indexer multiplies {q.shape} with keys {self.shape}")
        return IndexScores(self.pages, q[0])


@dataclasses.dataclass(frozen=True)
class IndexScores(Handle):
    """Scores of all tokens, by head or, with `weights`, of all heads."""

    pages: IndexPages
    q: jax.Array  # float32[T, H, D]
    scale: float = 1.0
    is_positive: bool = False  # whether what is negative became zero
    weights: jax.Array | None = None  # float32[T, H]
    is_masked: bool = False  # whether later tokens are hidden

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that it stands for, behind its sum over heads."""
        return 1, self.pages.num_tokens, self.pages.capacity

    def __mul__(self, factor: float) -> IndexScores:
        self._require(self.weights is None and not self.is_positive and isinstance(factor, float))
        return dataclasses.replace(self, scale=self.scale * factor)

    def relu(self) -> IndexScores:
        """Returns the scores without those below zero."""
        self._require(self.weights is None)
        return dataclasses.replace(self, is_positive=True)

    def weighted(self, weights: torch.Tensor) -> IndexScores:
        """Returns the sum over heads; `weights` are float32[1, T, 1, H]."""
        array = jax_view(weights)
        self._require(self.is_positive and self.weights is None and array.shape[::2] == (1, 1) and array.ndim == 4)
        return dataclasses.replace(self, weights=array[0, :, 0])

    def squeeze(self, dim: int) -> IndexScores:
        """Returns itself: the axis of one, of which heads were summed, is not among `shape`."""
        self._require(self.weights is not None and dim == -2)
        return self

    def masked_fill(self, mask: torch.Tensor, value: float) -> IndexScores:
        """Returns the scores without the tokens that `mask` hides, which attention checks."""
        self._require(value == float("-inf") and mask.dtype == torch.bool and tuple(mask.shape) == self.shape)
        return dataclasses.replace(self, is_masked=True)

    def __add__(self, mask: torch.Tensor) -> IndexScores:
        self._require(mask.dtype != torch.bool and tuple(mask.shape) == self.shape)
        return dataclasses.replace(self, is_masked=True)

    def topk(self, num: int, dim: int) -> TopTokens:
        """Returns the tokens with the highest scores, computed on pages."""
        self._require(self.is_masked and self.weights is not None and dim == -1)
        window = self.pages.window
        if num >= self.pages.capacity:  # every token
            return TopTokens(None, window)
        assert self.weights is not None
        return TopTokens(self.pages.take(self.q, self.weights, self.scale, num), window)

    def _require(self, is_met: bool) -> None:
        if not is_met:
            raise NotPackableError("an indexer computes its scores in a way for which pages have no form")


@dataclasses.dataclass(frozen=True)
class TopTokens(Handle):
    """The tokens that queries take; layers without an indexer take those of one before them.

    Attributes:
        tokens: int32[T, n], -1 for none; None: all that a query sees.
        window: Last tokens that a query sees; None: all.
    """

    tokens: jax.Array | None
    window: int | None

    @property
    def indices(self) -> TopTokens:
        """As of the result of ``torch.topk``."""
        return self

    def to(self, dtype: torch.dtype) -> TopTokens:
        """Returns itself."""
        return self

    def long(self) -> TopTokens:
        """Returns itself."""
        return self

    def new_ones(self, shape: Any, dtype: torch.dtype) -> TokenMask:
        """Returns a mask that hides all tokens."""
        return TokenMask(None, hides_taken=True)


@dataclasses.dataclass(frozen=True)
class TokenMask(Handle):
    """A mask of the tokens that queries take: True at them, or with `hides_taken` at all others."""

    taken: TopTokens | None
    hides_taken: bool

    def scatter(self, dim: int, index: TopTokens, value: bool) -> TokenMask:
        """Returns the mask with False at the tokens of `index`."""
        if self.taken is not None or not self.hides_taken or value is not False or not isinstance(index, TopTokens):
            raise NotPackableError("a mask of tokens is not made of those that an indexer takes")
        return TokenMask(index, hides_taken=True)

    def unsqueeze(self, dim: int) -> TokenMask:
        """Returns itself: it is the same for all heads."""
        return self

    def __invert__(self) -> TokenMask:
        return dataclasses.replace(self, hides_taken=not self.hides_taken)


@dataclasses.dataclass(frozen=True)
class SparseMask(Handle):
    """A causal mask of which queries see the tokens alone that they take.

    Attributes:
        causal_mask: Annotation of the mask.
        taken: The tokens.
    """

    causal_mask: Any
    taken: TopTokens


def _matmul(one: Any, other: Any) -> IndexScores:
    if isinstance(other, IndexKeys) and not isinstance(one, Handle):
        return other.times(one)
    if isinstance(other, IndexScores) and not isinstance(one, Handle):
        return other.weighted(one)
    raise NotPackableError("an indexer multiplies its keys from the left")


def _relu(scores: Any, inplace: bool = False) -> IndexScores:
    found: IndexScores = scores.relu()
    return found


def _and(mask: Any, kept: Any) -> SparseMask:
    """Returns the tokens that a boolean mask and a `TokenMask` show."""
    return _sparse(mask, kept, hides_taken=False)


def _hidden(mask: Any, hidden: Any, value: float) -> SparseMask:
    """Returns an additive mask that hides what a `TokenMask` has, too."""
    if not isinstance(mask, torch.Tensor) or value > torch.finfo(mask.dtype).min:
        raise NotPackableError("an indexer's tokens are not hidden by the lowest number")
    return _sparse(mask, hidden, hides_taken=True)


def _sparse(mask: Any, tokens: Any, *, hides_taken: bool) -> SparseMask:
    causal = getattr(mask, "causal_mask", None)
    if not isinstance(tokens, TokenMask) or tokens.taken is None or tokens.hides_taken is not hides_taken:
        raise NotPackableError("a mask hides the tokens that an indexer takes")
    if causal is None or causal.window != tokens.taken.window:
        raise NotPackableError("an indexer has a mask that is more than causal, or not that of its cache")
    return SparseMask(causal, tokens.taken)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "matmul": _matmul,
    "relu": _relu,
    "__and__": _and,
    "masked_fill": _hidden,
}
"""What PyTorch's functions do with handles, by name."""
