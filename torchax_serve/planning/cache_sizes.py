"""Computes the bytes of a plan's cache before anything is compiled."""

from __future__ import annotations

import dataclasses
import math

from torchax_serve.kv_cache.pools import CacheAllocation, PagedLayerSpec
from torchax_serve.planning.abstract_model import AbstractModel
from torchax_serve.planning.chips import Chip
from torchax_serve.planning.executors import PlannedExecutor
from torchax_serve.scheduler import CacheGroup

RESERVE = 0.02
"""Fraction of a device's memory reserved for temporaries, until the compiler has reported their size."""


@dataclasses.dataclass(frozen=True)
class CacheSizes:
    """Bytes of an executor's cache on one device.

    Attributes:
        model: Abstract model on its mesh.
        chip: Kind of the mesh's devices.
        executor: Executor of the model.
        page_size: Number of tokens in a page.
        max_len: Number of tokens of a request.
        num_slots: Number of requests at once.
        draft_slot_bytes: Bytes of a draft model's pages of one request.
        draft_weights_bytes: Bytes of the weights of a draft model or head.
    """

    model: AbstractModel
    chip: Chip
    executor: PlannedExecutor
    page_size: int
    max_len: int
    num_slots: int
    draft_slot_bytes: int = 0
    draft_weights_bytes: int = 0

    def page_bytes(self, shape: PagedLayerSpec) -> int:
        """Returns the bytes of a page of one layer on one device."""
        return self.model.page_bytes(shape, self.page_size)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights on one device, those of a draft model or head included."""
        return self.model.weights_bytes_per_device + self.draft_weights_bytes

    def windows(self) -> list[int | None]:
        """Returns the window of each group of layers that share pages."""
        windows = {shape.window for shape in self.executor.pages}
        return sorted(windows, key=lambda window: (window is not None, window or 0))

    def group_bytes(self, window: int | None) -> int:
        """Returns the bytes of a page in all layers of a group."""
        return sum(self.page_bytes(shape) for shape in self.executor.pages if shape.window == window)

    def pages_per_seq(self, window: int | None) -> int:
        """Returns the number of pages of a full-length request."""
        return CacheGroup("", window, 2).most_pages(self.max_len, self.page_size)

    def pages_of(self, slots: float) -> int:
        """Returns the bytes of the pages of `slots` full-length requests, spare pages included."""
        return sum(
            (math.ceil(slots * self.pages_per_seq(window)) + self.executor.num_spare) * self.group_bytes(window)
            for window in self.windows()
        )

    def states_of(self, slots: float) -> int:
        """Returns the bytes in memory of the states of `slots` requests, spare states included."""
        num_rows = math.ceil(slots) + self.executor.num_spare
        return sum(self.executor.bytes_of_rows(state, num_rows) for state in self.executor.slot_states)

    def bytes_of(self, slots: float) -> int:
        """Returns the bytes of pages and states of `slots` full-length requests, drafts included."""
        return self.pages_of(slots) + self.states_of(slots) + math.ceil(slots) * self.draft_slot_bytes

    @property
    def wanted_bytes(self) -> int:
        """Bytes of pages and states if every slot holds a full-length request."""
        return self.bytes_of(self.num_slots)

    @property
    def token_bytes(self) -> int:
        """Bytes of one more token, in the layers that store all tokens."""
        full = [shape for shape in self.executor.pages if shape.window is None] or list(self.executor.pages)
        return sum(self.page_bytes(shape) for shape in full) // self.page_size

    def slots_in(self, room: int) -> float:
        """Returns the number of full-length requests that fit into `room` bytes."""
        unit = max(1, (self.wanted_bytes - self.bytes_of(0)) / self.num_slots)
        return (room - self.bytes_of(0)) / unit

    def plan(self) -> tuple[CacheAllocation, int] | None:
        """Allocates pages for all slots, or for as many as fit; None if not even one request fits.

        Returns:
            The allocation and the number of slots.
        """
        room = int(self.chip.memory_bytes * (1 - RESERVE)) - self.weights_bytes
        slots: float = self.num_slots
        if self.wanted_bytes > room:
            slots = self.slots_in(room)
            if slots < 1:
                return None
        # Slots with a state or a page of their own are rows of a batch; other slots share the pages that there are.
        num_slots = int(slots) if self.executor.slot_states or not self.executor.num_spare else self.num_slots
        groups = tuple(
            CacheGroup(
                "full attention" if window is None else f"window of {window}",
                window,
                max(2, int(slots * self.pages_per_seq(window)) + 1),
            )
            for window in self.windows()
        )
        return CacheAllocation(self.executor.pages, groups, self.page_size, self.max_len), num_slots
