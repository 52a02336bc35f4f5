"""Lower bounds on the time of a step.

Weights and pages are read once, recurrent states read and written, and products run at the chip's peak rate. The bound
is the roofline (Williams et al. 2009) of one device: the larger of bytes over bandwidth and operations over rate.
Exchange between devices is not in it, so the true time is above.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchax_serve.executors.base import AbstractStep
from torchax_serve.kv_cache.pools import PagedLayerSpec
from torchax_serve.planning.abstract_model import AbstractModel
from torchax_serve.planning.chips import Chip
from torchax_serve.planning.executors import PlannedExecutor
from torchax_serve.planning.pool_reads import PoolReads, reads_of


@dataclass(frozen=True)
class StepBound:
    """Lower bound on the time of one step on one device.

    Attributes:
        step: ``decode``, ``verify``, ``prefill``, or ``draft``, all steps of a draft model for one verify step.
        num_tokens: Number of tokens computed in the step.
        context_len: Largest number of tokens that each of them attends to.
        bytes_read: Bytes of weights, pages and states, each read once; of recurrent states also those written.
        flops: Operations: two for each weight and token, and those of attention.
        seconds: The larger of the two times at the chip's rates; None if these are not known.
        bound_by: "memory" or "compute".
    """

    step: str
    num_tokens: int
    context_len: int
    bytes_read: int
    flops: float
    seconds: float | None
    bound_by: str | None


def bound_of(model: AbstractModel, chip: Chip, executor: PlannedExecutor, step: AbstractStep) -> StepBound:
    """Computes the bound of `step` on one device."""
    if step.num_prompts:
        return prefill_bound(
            model,
            chip,
            executor.pages,
            step.num_tokens,
            step.context_len,
            step.num_prompts,
            _state_bytes(executor, step),
        )
    num_rows = step.num_rows if step.name == "verify" else step.num_tokens
    each = step.num_tokens // num_rows
    states = _state_bytes(executor, step)
    bound = decode_bound(model, chip, executor.pages, num_rows, step.context_len, states, tokens_per_row=each)
    return replace(bound, step=step.name)


def decode_bound(
    model: AbstractModel,
    chip: Chip,
    shapes: Sequence[PagedLayerSpec],
    num_rows: int,
    context_len: int,
    state_bytes: int = 0,
    *,
    tokens_per_row: int = 1,
) -> StepBound:
    """Returns the bound of a decode step of `num_rows` requests, or with more tokens of each.

    Each request has `context_len` tokens, whose pages are read once.
    """
    num_tokens = num_rows * tokens_per_row
    pages = attention = 0.0
    for reads, shape in zip(reads_of(_config(model), shapes), shapes, strict=True):
        length = min(context_len, shape.window or context_len)
        pages += num_rows * reads.rows(length, tokens_per_row) * _row_bytes(model, shape)
        attention += 2.0 * num_tokens * reads.rows(length, 1) * _row_size(model, shape, reads)
    return _bound(model, chip, "decode", num_tokens, context_len, pages + state_bytes, attention, num_tokens)


def prefill_bound(
    model: AbstractModel,
    chip: Chip,
    shapes: Sequence[PagedLayerSpec],
    num_tokens: int,
    context_len: int | None = None,
    num_prompts: int = 1,
    state_bytes: int = 0,
) -> StepBound:
    """Returns the bound of a step over the last `num_tokens` tokens of prompts.

    The prompts have `context_len` tokens (None: all).
    """
    new = num_tokens // num_prompts
    context = context_len or new
    pages = attention = 0.0
    for reads, shape in zip(reads_of(_config(model), shapes), shapes, strict=True):
        length = min(context, new + (shape.window or context))
        pages += num_prompts * reads.rows(length, new) * _row_bytes(model, shape)
        attention += 2.0 * num_prompts * reads.pairs(new, context) * _row_size(model, shape, reads)
    return _bound(model, chip, "prefill", num_tokens, context, pages + state_bytes, attention, num_prompts)


def _state_bytes(executor: PlannedExecutor, step: AbstractStep) -> int:
    """Returns the bytes of states that a step reads and writes on one device."""
    # The first chunk of a prompt reads none. What is kept beside pages in other executors may be an encoder's output.
    num_times = 2 if executor.name == "packed" and not step.num_prompts else 1
    return num_times * (step.num_prompts or step.num_rows) * sum(map(executor.row_bytes, executor.slot_states))


def _bound(
    model: AbstractModel,
    chip: Chip,
    step: str,
    num_tokens: int,
    context_len: int,
    page_bytes: float,
    attention_flops: float,
    num_logits: int,
) -> StepBound:
    weight_bytes, flops = _weights(model, num_tokens, num_logits)
    read = weight_bytes + page_bytes
    flops += attention_flops
    if chip.bytes_per_s is None or chip.flops_per_s is None:
        return StepBound(step, num_tokens, context_len, int(read), flops, None, None)
    memory_s, compute_s = read / chip.bytes_per_s, flops / chip.flops_per_s
    bound_by = "memory" if memory_s >= compute_s else "compute"
    return StepBound(step, num_tokens, context_len, int(read), flops, max(memory_s, compute_s), bound_by)


def _weights(model: AbstractModel, num_tokens: int, num_logits: int) -> tuple[float, float]:
    """Returns the bytes of weights that are read and the operations with weights, on one device."""
    config = _config(model)
    head, words = model.module.get_output_embeddings(), model.module.get_input_embeddings()
    names = {id(child): name for name, child in model.module.named_modules()}
    head_name = f"{names.get(id(head))}.weight"
    words_name = f"{names.get(id(words))}.weight"
    top_k = getattr(config, "num_experts_per_tok", None) or 1
    read = flops = 0.0
    tied = head_name in model.weights and model.weights[head_name] is model.weights.get(words_name)
    for name in model.unique_names():
        placed = model.sharding.placed[name]
        num_bytes = model.bytes_per_device(name)
        size = model.elements_per_device(name)
        is_head = name == head_name or (tied and name == words_name)
        if name == words_name and not is_head:
            continue  # a row for each token
        if len(placed.shape) == 3 and "expert" in name:  # each token goes to few
            experts = placed.shape[0]
            read += num_bytes * min(1.0, num_tokens * top_k / experts)
            flops += 2 * size * num_tokens * top_k / experts
            continue
        read += num_bytes
        if len(placed.shape) >= 2:
            flops += 2 * size * (num_logits if is_head else num_tokens)
    return read, flops


def _config(model: AbstractModel) -> Any:
    return model.module.config.get_text_config(decoder=True)


def _row_bytes(model: AbstractModel, shape: PagedLayerSpec) -> int:
    """Returns the bytes of a row of a pool, as of one token's keys and values, on one device."""
    return shape.num_heads * shape.width * shape.dtype.itemsize // _parts(model, shape)


def _row_size(model: AbstractModel, shape: PagedLayerSpec, reads: PoolReads) -> float:
    """Returns the multiplications for one query and one row in a layer.

    They are those on one device, over all heads.
    """
    if reads.num_heads is not None:
        return reads.num_heads * shape.width / _parts(model, shape)
    heads = getattr(_config(model), "num_attention_heads", shape.num_heads)
    return max(heads, shape.num_heads) * (shape.width + shape.shared_dim) / _parts(model, shape)


def _parts(model: AbstractModel, shape: PagedLayerSpec) -> int:
    sharding = model.sharding
    spec = sharding.pool_sharding(shape.num_heads).spec
    return math.prod(sharding.mesh.shape[axis] for axis in spec if axis is not None)
