"""The road that a model would take, as `torchax_serve.engine.factory` and ``generate`` choose it, without its weights.

A road says what a request keeps on the device, and makes the steps to be compiled, all of whose arguments are shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from model_adapters.errors import UnsupportedModelError
from model_adapters.paged import NotPackableError, PackedBatch
from model_adapters.sharding import ModelSharding
from torchax_serve.executors.packed_factory import packed_shapes
from torchax_serve.executors.per_sequence_factory import GatheredParts
from torchax_serve.executors.per_sequence_forward import RowForward
from torchax_serve.kv_cache.memory import Sizes
from torchax_serve.kv_cache.pools import CachePlan
from torchax_serve.kv_cache.slot_states import GatheredCache
from torchax_serve.kv_cache.state_layout import StateLayout, StateRow
from torchax_serve.planning.generate_road import generate_road
from torchax_serve.planning.planned_road import AbstractPages, PlannedRoad
from torchax_serve.planning.programs import Step
from torchax_serve.runtime.model_runtime import Runtime


class PackedRoad(PlannedRoad):
    """Many sequences packed into one, on pages."""

    name = "packed"

    def steps(self, plan: CachePlan, num_slots: int, lens: Sequence[int]) -> Iterator[Step]:
        """As `PlannedRoad.steps`."""
        yield self._step("decode", plan, num_slots, num_slots)
        for length in lens:
            yield self._step("prefill", plan, length, min(num_slots, 4))

    def _step(self, name: str, plan: CachePlan, num_tokens: int, num_rows: int) -> Step:
        is_decode = name == "decode"
        layout = dataclasses.replace(plan.layout, is_decode=is_decode)
        pages, sharded = {group.window: group.num_pages for group in plan.groups}, AbstractPages(self.sharding)
        pools = tuple(
            sharded.zeros((pages[shape.window], shape.num_heads, plan.page_len, shape.width), shape.dtype)
            for shape in plan.shapes
        )
        table = self.integers(num_rows, -(-plan.max_len // plan.page_len))
        batch = PackedBatch(
            token_ids=self.integers(num_tokens),
            positions=self.integers(num_tokens),
            cu_q_lens=self.integers(num_rows + 1),
            kv_lens=self.integers(num_rows),
            last=self.integers(num_rows),
            page_tables=(table,) * len(plan.groups),
            rope_lens=self.integers(num_tokens) if self.runtime.program.rope is not None else None,
        )

        def run(weights: Any, pools: Any, batch: PackedBatch) -> Any:
            return self.runtime.program.forward_packed(weights, pools, batch, layout)

        length = plan.max_len if is_decode else num_tokens
        return Step(name, num_tokens, num_rows, length, 0 if is_decode else 1, run, (pools, batch), (0,))


@dataclasses.dataclass(frozen=True)
class GatheredRoad(PlannedRoad):
    """Each request a forward of its own, over what is gathered from its pages, and its states."""

    forward: RowForward
    layout: StateLayout

    name = "gathered"

    def row_bytes(self, row: StateRow) -> int:
        """Bytes on one device of what a request keeps as a whole: its channels or heads, where they divide."""
        sharding = self.sharding.state_sharding((1, *row.shape))
        return math.prod(sharding.shard_shape((1, *row.shape))) * row.dtype.itemsize

    def steps(self, plan: CachePlan, num_slots: int, lens: Sequence[int]) -> Iterator[Step]:
        """As `PlannedRoad.steps`; a chunk of a prompt may be shorter than asked, and lies at the prompt's end."""
        sizes = Sizes(plan.max_len, num_slots, plan.page_len, max(lens, default=1), None)
        parts = GatheredParts(self.runtime, self.forward, self.layout, sizes, None)
        cache = GatheredCache(plan, self.layout, num_slots, AbstractPages(self.sharding))
        model = parts.model(cache, parts.wanted_block_len)
        specs = [("decode", model.shapes.longest_decode())]
        specs += [("prefill", spec) for spec in dict.fromkeys(model.shapes.last_chunk(length) for length in lens)]
        for name, spec in specs:
            run = functools.partial(model.traced, hidden=None, spec=spec)
            args = (cache.pools, cache.states, self.integers(num_slots), self.integers(sum(spec.sizes)))
            num_tokens, num_prompts = spec.num_rows * spec.num_tokens, 0 if name == "decode" else 1
            yield Step(name, num_tokens, spec.num_rows, plan.max_len, num_prompts, run, args, (0, 1))


def road_of(runtime: Runtime, sharding: ModelSharding, page_len: int, max_len: int, num_slots: int) -> PlannedRoad:
    """The first road that the model's code lets it take, found by tracing.

    Raises:
        UnsupportedModelError: none; with the reasons.
    """
    sizes = Sizes(max_len, num_slots, page_len, num_slots, None)
    try:
        return PackedRoad(runtime, sharding, packed_shapes(runtime, sizes), (), None)
    except NotPackableError as reason:
        why = f"not packed: {reason}"
    try:
        forward = RowForward(runtime)
        layout = forward.layout()
        return GatheredRoad(runtime, sharding, layout.pages, layout.rows, why, forward, layout)
    except UnsupportedModelError as reason:
        why += f"; not gathered: {reason}"
    return generate_road(runtime, sharding, max_len, num_slots, why)
