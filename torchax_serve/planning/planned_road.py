"""What every road of a plan has: what a request keeps on the device, and steps whose arguments are shapes."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from model_adapters.sharding import ModelSharding
from torchax_serve.kv_cache.pools import CachePlan, Pages, PageShape
from torchax_serve.kv_cache.state_layout import StateRow
from torchax_serve.planning.programs import Step
from torchax_serve.runtime.model_runtime import Runtime


@dataclasses.dataclass(frozen=True)
class PlannedRoad(abc.ABC):
    """How a model would be run.

    Attributes:
        runtime: of the model, weights without values.
        sharding: how it lies on the mesh.
        pages: what each layer keeps of a token.
        rows: what a request keeps as a whole.
        why: what stands against the roads that are tried before; None for the first one.
    """

    runtime: Runtime
    sharding: ModelSharding
    pages: tuple[PageShape, ...]
    rows: tuple[StateRow, ...]
    why: str | None

    name = ""
    num_spare = 1
    """Pages and states that nobody has, for padding to write to."""

    @abc.abstractmethod
    def steps(self, plan: CachePlan, num_slots: int, lens: Sequence[int]) -> Iterator[Step]:
        """The decode step first, then a step for each of `lens` tokens of a prompt.

        Args:
            plan: of the pages.
            num_slots: requests that there is room for.
            lens: of prefill steps.
        """

    def page_len(self, asked: int, max_len: int) -> int:
        """Tokens of a page."""
        return asked

    def row_bytes(self, row: StateRow) -> int:
        """Bytes on one device of what a request keeps as a whole: each device has all of it."""
        return row.num_bytes

    def integers(self, *shape: int) -> Any:
        """Numbers that every device has."""
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=self.sharding.replicated())


class AbstractPages(Pages):
    """Pools and states that are shapes alone, laid out as those of an engine."""

    def __init__(self, sharding: ModelSharding) -> None:
        super().__init__(sharding.pool_sharding, sharding.state_sharding)
        self._model_sharding = sharding

    def zeros(self, shape: tuple[int, int, int, int], dtype: np.dtype) -> Any:
        """As `Pages.zeros`."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._model_sharding.pool_sharding(shape[1]))

    def rows(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """As `Pages.rows`."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._model_sharding.state_sharding(shape))
