"""What a plan's cache takes, before anything is compiled."""

from __future__ import annotations

import dataclasses
import math

from torchax_serve.kv_cache.pools import CacheAllocation, PagedLayerSpec
from torchax_serve.planning.abstract_model import AbstractModel
from torchax_serve.planning.chips import Chip
from torchax_serve.planning.executors import PlannedExecutor
from torchax_serve.scheduler import CacheGroup

RESERVE = 0.02
"""Part of a device's memory kept for a program's temporaries before the compiler has said what they are."""


@dataclasses.dataclass(frozen=True)
class CacheSizes:
    """Bytes of a road's cache on one device.

    Attributes:
        model: laid out.
        chip: its devices.
        road: of the model.
        page_size: tokens of a page.
        max_len: tokens of a request.
        num_slots: requests at once.
    """

    model: AbstractModel
    chip: Chip
    road: PlannedExecutor
    page_size: int
    max_len: int
    num_slots: int

    def page_bytes(self, shape: PagedLayerSpec) -> int:
        """Bytes of a page of one layer on one device."""
        sharding = self.model.sharding
        spec = sharding.pool_sharding(shape.num_heads).spec
        parts = sharding.mesh.shape["model"] if "model" in spec else 1
        return shape.page_bytes(self.page_size) // parts

    @property
    def state_bytes(self) -> int:
        """Bytes of what one request keeps as a whole, on one device."""
        return sum(map(self.road.row_bytes, self.road.rows))

    def windows(self) -> list[int | None]:
        """One for each group of layers that share pages."""
        windows = {shape.window for shape in self.road.pages}
        return sorted(windows, key=lambda window: (window is not None, window or 0))

    def group_bytes(self, window: int | None) -> int:
        """Bytes of a page in all layers of a group."""
        return sum(self.page_bytes(shape) for shape in self.road.pages if shape.window == window)

    def pages_per_seq(self, window: int | None) -> int:
        """Pages that a request of full length holds."""
        return CacheGroup("", window, 2).most_pages(self.max_len, self.page_size)

    def pages_of(self, slots: float) -> int:
        """Bytes of the pages of so many requests of full length, spare ones included."""
        return sum(
            (math.ceil(slots * self.pages_per_seq(window)) + self.road.num_spare) * self.group_bytes(window)
            for window in self.windows()
        )

    def states_of(self, slots: float) -> int:
        """Bytes of the states of so many requests, spare ones included."""
        return (math.ceil(slots) + self.road.num_spare) * self.state_bytes

    def bytes_of(self, slots: float) -> int:
        """Bytes of pages and states of so many requests of full length."""
        return self.pages_of(slots) + self.states_of(slots)

    @property
    def wanted_bytes(self) -> int:
        """Bytes of what all slots keep at full length."""
        return self.bytes_of(self.num_slots)

    @property
    def token_bytes(self) -> int:
        """Bytes of one more token in the layers that keep all of them."""
        kept = [shape for shape in self.road.pages if shape.window is None] or list(self.road.pages)
        return sum(self.page_bytes(shape) for shape in kept) // self.page_size

    def slots_in(self, room: int) -> float:
        """Requests of full length that there is `room` for."""
        unit = max(1, self.bytes_of(2) - self.bytes_of(1))
        return (room - self.bytes_of(0)) / unit

    def plan(self) -> tuple[CacheAllocation, int] | None:
        """Pages for all slots, or as many as there is room for, and the slots; None: not even for one request."""
        room = int(self.chip.memory_bytes * (1 - RESERVE)) - self.model.weights_bytes_per_device
        slots: float = self.num_slots
        if self.wanted_bytes > room:
            slots = self.slots_in(room)
            if slots < 1:
                return None
        # Slots are rows of a batch where each keeps a state or a page of its own; else they share what there is.
        num_slots = int(slots) if self.road.rows or not self.road.num_spare else self.num_slots
        groups = tuple(
            CacheGroup(
                "full attention" if window is None else f"window of {window}",
                window,
                max(2, int(slots * self.pages_per_seq(window)) + 1),
            )
            for window in self.windows()
        )
        return CacheAllocation(self.road.pages, groups, self.page_size, self.max_len), num_slots
