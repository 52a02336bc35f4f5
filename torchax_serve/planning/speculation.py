"""What speculation adds to a plan: weights, pages, and the bound of drafting."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from transformers import PreTrainedModel

from model_adapters.caches.packed_batch import NotPackableError
from model_adapters.draft_heads.head_sharding import head_sharding
from model_adapters.draft_heads.mtp import mtp_class
from model_adapters.errors import UnsupportedArgumentError
from model_adapters.loading.model_class import module_of
from torchax_serve.executors.packed.probes import packed_shapes
from torchax_serve.kv_cache.memory import MemoryBudget
from torchax_serve.kv_cache.pools import PagedLayerSpec
from torchax_serve.planning.abstract_model import AbstractModel, Quantization, abstract_model
from torchax_serve.planning.chips import Chip
from torchax_serve.planning.executors import PlannedExecutor
from torchax_serve.planning.roofline import StepBound, decode_bound
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.scheduler import SpeculativeConfig
from torchax_serve.scheduler.speculative_config import MAX_SPECULATIVE_TOKENS


@dataclasses.dataclass(frozen=True, repr=False)
class PlannedSpeculation:
    """Options of speculation in a plan.

    Attributes:
        config: The options; a draft model is named.
        draft: The draft model on the meta device; None: the method has none.
        quantization: What the draft model's configuration states.
    """

    config: SpeculativeConfig
    draft: PreTrainedModel | None = None
    quantization: Quantization = None

    def __post_init__(self) -> None:
        method, has_model = self.config.method, self.config.model is not None
        if method == "eagle3" or (method == "mtp" and has_model):
            what = "an assistant" if method == "mtp" else "a head of EAGLE-3"
            raise UnsupportedArgumentError(
                "speculative_config: expected method 'ngram', 'draft_model', or 'mtp' without a model for a plan, got "
                f"{method!r} with {what}, which is read with its weights; leave it out of the plan"
            )
        if self.draft is not None and self.draft.config.model_type in ("gemma4_assistant", "gemma4_unified_assistant"):
            raise UnsupportedArgumentError(
                f"speculative_config: model: expected a draft model with a cache of its own for a plan, got "
                f"{self.config.model}, an assistant; leave it out of the plan"
            )

    def __repr__(self) -> str:
        """Returns options and configuration, under which a plan is stored."""
        config = "" if self.draft is None else self.draft.config.to_json_string(use_diff=False)
        dtype = None if self.draft is None else self.draft.dtype
        return f"PlannedSpeculation({self.config!r}, {config}, {dtype}, {self.quantization!r})"


@dataclasses.dataclass(frozen=True)
class DraftSizes:
    """Bytes of speculation on one device.

    Attributes:
        weights_bytes: Weights of the draft model or head.
        slot_bytes: Pages of the draft model for one request, which are its own from beginning to end.
        head_pages: Paged cache of the head's layer, which has the model's pages; empty: there is no head.
        model: The draft model; None: the method has none.
        pages: Paged cache of each layer of the draft model.
    """

    weights_bytes: int = 0
    slot_bytes: int = 0
    head_pages: tuple[PagedLayerSpec, ...] = ()
    model: AbstractModel | None = None
    pages: tuple[PagedLayerSpec, ...] = ()

    def with_head(self, executor: PlannedExecutor) -> PlannedExecutor:
        """Returns the executor with pages of the head's layer."""
        return dataclasses.replace(executor, pages=executor.pages + self.head_pages)

    def bound(self, chip: Chip, num_rows: int, context_len: int, num_drafts: int) -> StepBound | None:
        """Returns the bound of drafting for one verify step, a step of the model for each draft."""
        if self.model is None:
            return None
        step = decode_bound(self.model, chip, self.pages, num_rows, context_len)
        seconds = None if step.seconds is None else step.seconds * num_drafts
        num_bytes, flops = step.bytes_read * num_drafts, step.flops * num_drafts
        return dataclasses.replace(step, step="draft", bytes_read=num_bytes, flops=flops, seconds=seconds)


def draft_sizes(
    speculation: PlannedSpeculation,
    model: AbstractModel,
    executor: PlannedExecutor,
    chip: Chip,
    sizes: MemoryBudget,
    *,
    refuse_uneven: bool,
) -> DraftSizes:
    """Returns what speculation takes on one device; called where `chip` is compiled for.

    Raises:
        UnsupportedArgumentError: the model or the draft model does not run packed, or there is no such head.
    """
    if executor.name != "packed":
        raise UnsupportedArgumentError(
            f"speculative_config: expected a model that runs packed for a plan with drafts, got one that is "
            f"{executor.name} ({executor.fallback_reason}); leave it out of the plan"
        )
    if speculation.config.method == "mtp":
        return _mtp_sizes(model, executor, refuse_uneven=refuse_uneven)
    if speculation.draft is None:
        return DraftSizes()
    draft = abstract_model(
        speculation.draft,
        model.sharding.mesh,
        refuse_uneven=refuse_uneven,
        quantization=speculation.quantization,
        chip=chip,
    )
    runtime = ModelRuntime(speculation.draft, draft.weights, sharding=draft.sharding)  # type: ignore[arg-type]
    try:
        shapes = packed_shapes(runtime, sizes)
    except NotPackableError as reason:
        raise UnsupportedArgumentError(
            f"speculative_config: model: expected a model that runs packed, got {speculation.config.model}: {reason}"
        ) from None
    # Drafts behind the longest length are computed before they are dropped.
    pages_per_seq = -(-(sizes.max_model_len + MAX_SPECULATIVE_TOKENS) // sizes.page_size)
    page_bytes = sum(draft.page_bytes(shape, sizes.page_size) for shape in shapes)
    return DraftSizes(draft.weights_bytes_per_device, pages_per_seq * page_bytes, (), draft, shapes)


def _mtp_sizes(model: AbstractModel, executor: PlannedExecutor, *, refuse_uneven: bool) -> DraftSizes:
    """Returns the sizes of a prediction layer with an embedding and head of its own, the most."""
    config: Any = copy.deepcopy(model.module.config.get_text_config(decoder=True))
    number = getattr(config, "num_nextn_predict_layers", None) or 0
    if number != 1:
        raise UnsupportedArgumentError(
            "speculative_config: method 'mtp': expected a configuration with num_nextn_predict_layers 1 for a plan, "
            f"got {number} in that of {type(model.module).__name__}; leave it out of the plan"
        )
    config.architectures = None
    head = module_of(mtp_class(model.module), config, model.module.dtype)
    sharding = head_sharding(head, model.sharding, config.model_type, {}, refuse_uneven=refuse_uneven)
    itemsize = model.module.dtype.itemsize
    weights = sum(placed.bytes_per_device(model.mesh_shape, itemsize) for placed in sharding.placed.values())
    return DraftSizes(weights, head_pages=(dataclasses.replace(executor.pages[-1], window=None),))
