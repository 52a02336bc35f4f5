"""One forward of texts that stand one after the other in one row, without padding.

The text encoders of transformers take ``position_ids``, mix tokens in attention alone, and attend through transformers'
attention interface: what they are told then is where each text begins. Other models raise `NotPackableError`, and their
texts are padded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters.attention import attention_name, texts_in_one_row
from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.caches.packed_batch import NotPackableError
from model_adapters.lowerings import deferred_checks, index_checks
from model_adapters.ops.compressed_weight import Weights
from model_adapters.ops.varlen_attention import text_of_token
from model_adapters.program.call_spec import CallSpec
from model_adapters.program.model_program import INDICES, Arrays, ModelProgram


def forward_varlen(program: ModelProgram, weights: Weights, inputs: Mapping[str, Any], cu_seqlens: jax.Array) -> Arrays:
    """Returns the fields [T, ...] of the output that have a row for each token. To be traced.

    Args:
        program: The model.
        weights: Every tensor of the module by qualified name.
        inputs: ``int32[T]`` by the forward's argument names: token ids, token types.
        cu_seqlens: ``int32[S + 1]``, where each text begins; tokens from the last entry on are padding.

    Raises:
        NotPackableError: something in the model's code does not let texts stand in one row.
    """
    reason = varlen_reason(program)
    if reason is not None:
        raise NotPackableError(reason)
    ids = inputs[program.names.ids]
    given = {name: torch_view(array[None]) for name, array in inputs.items()}
    given[program.names.positions] = torch_view(_positions(program.target, ids, cu_seqlens)[None])
    if program.accepts("use_cache"):
        given["use_cache"] = False
    with program.folding(CallSpec()), deferred_checks.collect() as met, index_checks.collect() as in_range:
        output = program.run(weights, given, attention_name(program.module), texts_in_one_row(cu_seqlens))
    if met:
        raise NotPackableError("its code checks the values of texts")
    arrays = {name: jax_view(value) for name, value in output.items() if isinstance(value, torch.Tensor)}
    fields = {name: array[0] for name, array in arrays.items() if array.shape[:2] == (1, len(ids))}
    if in_range:
        fields[INDICES] = jnp.stack(in_range)
    return fields


def varlen_reason(program: ModelProgram) -> str | None:
    """Returns why a model's signature does not let texts stand in one row; None if it does."""
    if program.sharding is not None:
        return "it is on a mesh"
    if program.rope is not None:
        return "its rotary frequencies depend on the length of a text"
    if not program.accepts(program.names.positions):
        return "the forward takes no positions"
    if attention_name(program.module) is None:
        return "it attends past transformers' attention interface"
    return None


def _positions(target: torch.nn.Module, ids: jax.Array, cu_seqlens: jax.Array) -> jax.Array:
    """Returns the position of each token in its text, int32[T], as the model's code counts."""
    texts, positions = text_of_token(cu_seqlens, len(ids))
    padding_id = _counted_behind(target)
    if padding_id is None:
        return positions
    # RoBERTa counts from the padding token's id on, and leaves padding tokens out wherever they stand.
    counts = (ids != padding_id) & (texts < len(cu_seqlens) - 1)
    before = jnp.cumsum(counts) - counts
    first = before[cu_seqlens[texts].clip(0, len(ids) - 1)]
    return jnp.where(counts, before - first + 1, 0).astype(jnp.int32) + padding_id


def _counted_behind(target: torch.nn.Module) -> int | None:
    """Returns the padding token's id, from which positions count on; None: they count from 0."""
    for child in target.modules():
        method: Callable[..., Any] | None = getattr(child, "create_position_ids_from_input_ids", None)
        padding_id = getattr(child, "padding_idx", None)
        if method is not None and isinstance(padding_id, int):
            return padding_id
    return None
