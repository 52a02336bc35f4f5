"""Attention interception: what unmodified model code reaches through transformers' attention and mask interfaces.

While a model is traced, its configuration names ``torchax_serve`` as attention implementation. Masks are then made by
`torchax_mask` and attention is computed by `torchax_attention`. Both leave notes on the tensors they hand to model
code: a mask that is causal, perhaps windowed and padded on the left, says so; keys that come straight from the cache
say where they were written. When both notes arrive, a decode step runs as one op that writes the cache and attends. A
note that model code has dropped on the way, by computing something else from the tensor, means the dense path with the
very tensors model code passed: slower, never different.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from model_adapters.bridge.views import as_views, jax_view, torch_view
from model_adapters.caches.layers import KVWrite
from model_adapters.caches.paged_cache import NotPackableError, PagedWrite, attend_paged
from model_adapters.lowerings import constant_folding
from model_adapters.ops import decode_attention, dense_attention
from model_adapters.ops.attention_args import AttentionArgs


class ImplementationName(str):
    """The name of our attention, which model code that asks takes for torch's ``sdpa``.

    Some model code builds its masks by the name of the implementation (``in ("eager", "sdpa")``): additions to a mask
    that a kernel of another name would not read. What ``sdpa`` reads, our attention reads too. Tables of
    implementations look a name up by its hash, which stays that of the name.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == "sdpa"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


IMPLEMENTATION = ImplementationName("torchax_serve")
ADDITIVE_MASK = ImplementationName("torchax_serve_additive")
"""The same attention for code that knows no ``sdpa``: its masks are numbers to add, as its own attention has them."""


@dataclasses.dataclass(frozen=True)
class LeftPadding:
    """Attached to a 2D mask that is nothing but left padding; `starts` int32[batch] is the first visible position."""

    starts: jax.Array


@dataclasses.dataclass(frozen=True)
class CausalMask:
    """Attached to a 4D mask that is causal, restricted to the last `window` positions if given, and left-padded."""

    window: int | None
    starts: jax.Array | None  # int32[batch]; None: no padding

    def key_mask(self, length: int) -> jax.Array | None:
        """Which of `length` keys are no padding, bool[batch, 1, 1, length]; None if all are."""
        return None if self.starts is None else (jnp.arange(length) >= self.starts[:, None])[:, None, None]


def padding_mask(starts: jax.Array, length: int) -> torch.Tensor:
    """The 2D mask [batch, length] of left padding, annotated; `starts` int32[batch]."""
    mask = torch_view(jnp.arange(length)[None, :] >= starts[:, None])
    mask.left_padding = LeftPadding(starts)
    return mask


def infer_window(mask_function: Callable[..., Any], length: int, batch: int = 1) -> int | None:
    """The window of a causal `mask_function`, `length` if it has none; None where it is anything else.

    The function is asked, not recognised: on concrete indices it must give the same band below the diagonal from any
    query position. A function that depends on more than the distance (chunks, blocks of images, packed sequences) or
    that computes with traced tensors gives something else. Where values of the batch are known, it is asked about every
    row and position, for it may depend on them.
    """
    positions = torch.arange(length)
    if constant_folding.is_enabled():
        rows, queries = torch.arange(batch)[:, None, None, None], positions[None, None, :, None]
        keys: torch.Tensor = positions[None, None, None]
    else:
        rows, keys = torch.tensor(0), positions
        queries = torch.tensor(sorted({0, length // 3, length // 2, length - 1}))[:, None]
    try:
        visible = mask_function(rows, torch.tensor(0), queries, keys)
    except Exception:  # whatever it needs, indices alone are not enough
        return None
    shape = torch.broadcast_shapes(rows.shape, queries.shape, keys.shape)
    if type(visible) is not torch.Tensor or visible.dtype != torch.bool:
        return None
    if torch.broadcast_shapes(visible.shape, shape) != shape:
        return None
    visible = visible.expand(shape)
    window = int(visible.reshape(-1, length)[-1].sum())
    return window if torch.equal(visible, ((keys <= queries) & (keys > queries - window)).expand(shape)) else None


def torchax_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """transformers' boolean mask [batch, 1, q_length, kv_length], annotated where it is a plain causal one."""
    # Mask functions are arithmetic of indices, which broadcasts; torch's vmap does not know torchax's tensors.
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False, use_vmap=False)
    mask: Any = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )
    padding = getattr(attention_mask, "left_padding", None)
    if attention_mask is None or padding is not None:
        window = infer_window(mask_function, kv_length, batch_size)
        if window is not None:
            starts = None if padding is None else padding.starts
            mask.causal_mask = CausalMask(None if window >= kv_length else window, starts)
    return mask


def additive_mask(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.Tensor:
    """`torchax_mask` as numbers to be added, 0 and the least of `dtype`; what it was before stands in a note."""
    visible: Any = torchax_mask(*args, dtype=dtype, **kwargs)
    mask: Any = torch.where(visible, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)
    mask.visible = visible
    if (note := getattr(visible, "causal_mask", None)) is not None:
        mask.causal_mask = note
    return mask


def torchax_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` [batch, heads, q_len, dim] over `key`, `value` [batch, kv_heads, kv_len, dim].

    Model code that hands over `alibi_slopes` [heads] has ``slope * (key position - query position)`` added to its
    scaled scores (Press et al., 2022), also where sequences are packed.

    Returns:
        The output [batch, q_len, heads, v_dim], and None in the place of the weights.
    """
    if dropout:
        raise ValueError(f"expected dropout 0 in a served model, got {dropout}; call model.eval() first")
    # Which code may have made on the host.
    attention_mask, position_bias, alibi_slopes = as_views((attention_mask, position_bias, alibi_slopes))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attention_mask = getattr(attention_mask, "visible", attention_mask)
    note: CausalMask | None = getattr(attention_mask, "causal_mask", None)
    paged: PagedWrite | None = getattr(key, "paged_write", None)
    if paged is not None:
        if note is None or note.starts is not None or position_bias is not None or value is not paged.values:
            raise NotPackableError("attention with a mask that is more than causal, or over changed values")
        features: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": s_aux, "alibi": alibi_slopes}
        return attend_paged(query, key, paged, note.window, **features), None
    alibi = None if alibi_slopes is None else jax_view(alibi_slopes).astype(jnp.float32)
    sinks = None if s_aux is None else jax_view(s_aux)
    write: KVWrite | None = getattr(key, "cache_write", None)
    if write is not None and value is not write.values_out:
        write = None  # model code has made other values of those that were written
    q = jax_view(query)
    if q.shape[2] == 1 and write is not None and write.pool_before is not None and note and position_bias is None:
        out: Any = _decode(q, write, note, AttentionArgs(scale, note.window, softcap, sinks, alibi))
    else:
        mask = None if attention_mask is None else jax_view(attention_mask)
        bias = None if position_bias is None else jax_view(position_bias)
        if alibi is not None:
            bias = _linear_bias(alibi, q.shape[2], key.shape[2]) + (0 if bias is None else bias)
        hides = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask, causal = _dense_mask(mask, bias, note, q.shape[2], key.shape[2], hides_later=hides)
        keys, values = jax_view(key), jax_view(value)
        if q.shape[0] == 1:  # queries that a model has learned, the same for all
            q = jnp.broadcast_to(q, (keys.shape[0], *q.shape[1:]))
        out = dense_attention(q, keys, values, mask, AttentionArgs(scale, None, softcap, sinks), causal=causal)
    return torch_view(jnp.swapaxes(out, 1, 2)), None


def _dense_mask(
    mask: jax.Array | None,
    bias: jax.Array | None,
    note: CausalMask | None,
    q_len: int,
    kv_len: int,
    *,
    hides_later: bool,
) -> tuple[jax.Array | None, bool]:
    """What `dense_attention` is given: a mask with `bias` in it, and whether each query sees its own key at last.

    `hides_later` says that many queries without a mask see no later keys.
    """
    if note is not None and note.window is None and q_len == kv_len and bias is None:
        # Said this way, the keys behind each query are skipped rather than masked.
        return note.key_mask(q_len), True
    causal = mask is None and q_len > 1 and hides_later
    if bias is not None:
        mask = bias if mask is None else bias + _additive(mask, bias.dtype)
    return mask, causal


def _linear_bias(slopes: jax.Array, q_len: int, kv_len: int) -> jax.Array:
    """float32[1, heads, q_len, kv_len], right up to a number for each query, which no softmax sees.

    The last query stands at the last key; where the keys are a cache with room behind them, it stands before it.
    """
    distance = jnp.arange(kv_len) - (jnp.arange(q_len)[:, None] + kv_len - q_len)
    return slopes[None, :, None, None] * distance.astype(jnp.float32)


def _additive(mask: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.where(mask, 0, jnp.finfo(dtype).min).astype(dtype) if mask.dtype == jnp.bool else mask.astype(dtype)


def _decode(q: jax.Array, write: KVWrite, note: CausalMask, args: AttentionArgs) -> jax.Array:
    """One new token per row: writes its keys and values and attends, in one op."""
    assert write.pool_before is not None
    layer, batch = write.layer, q.shape[0]
    lens = jnp.broadcast_to(jax_view(layer.offset).astype(jnp.int32) + 1, (batch,))
    starts = jnp.zeros(batch, jnp.int32) if note.starts is None else note.starts.astype(jnp.int32)
    out, pool = decode_attention(
        q[:, :, 0],
        write.keys[:, :, 0],
        write.values[:, :, 0],
        write.pool_before,
        jnp.arange(batch, dtype=jnp.int32)[:, None],  # the row's whole capacity is its one page
        lens,
        starts,
        args,
    )
    layer.pool = torch_view(pool)
    return out[:, :, None]


AttentionInterface.register(IMPLEMENTATION, torchax_attention)
AttentionMaskInterface.register(IMPLEMENTATION, torchax_mask)
AttentionInterface.register(ADDITIVE_MASK, torchax_attention)
AttentionMaskInterface.register(ADDITIVE_MASK, additive_mask)


def uses_attention_interface(module: PreTrainedModel) -> bool:
    """Whether `AttentionInterface` reaches the model's attention; one it does not keeps its own code and masks."""
    return bool(module._supports_attention_backend or module._supports_sdpa)


def attention_name(module: PreTrainedModel) -> str | None:
    """The attention that the code of `module` gets in a trace; None where its own stays."""
    if not uses_attention_interface(module):
        return None
    return IMPLEMENTATION if module._supports_sdpa else ADDITIVE_MASK
