"""Attention interception through transformers' attention and mask interfaces.

While a model is traced, its configuration names ``torchax_serve`` as attention implementation. Masks are then made by
`torchax_mask` and attention is computed by `torchax_attention`. Both annotate the tensors they return: a mask that is
causal, perhaps with a window and padding on the left, has `CausalMask`; keys that come from the cache have `KVWrite`.
With both annotations, a decode step runs as one op that writes the cache and attends. Keys of the packed executor, on
pages, have `PagedWrite` or `LatentWrite`. Where model code has lost an annotation by computing something else from the
tensor, dense attention runs on the tensors it passed: slower, never different. On pages there are no such tensors:
`NotPackableError` is raised, and the model runs per sequence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from model_adapters.bridge.views import as_views, in_torch_mode, jax_view, torch_view
from model_adapters.caches.cross_attention_layer import StoredSource
from model_adapters.caches.layers import KVWrite
from model_adapters.caches.packed_batch import NotPackableError
from model_adapters.caches.paged_cache import attend_latents, attend_paged
from model_adapters.caches.paged_layers import LatentWrite, PagedWrite
from model_adapters.lowerings import constant_folding
from model_adapters.ops import decode_attention, dense_attention
from model_adapters.ops.attention_args import AttentionArgs
from model_adapters.ops.row_pages import attend_row, attend_stored
from model_adapters.ops.varlen_attention import text_of_token, varlen_attention


class ImplementationName(str):
    """Name of our attention, which compares equal to torch's ``sdpa``.

    Some model code adds to its masks only for some implementations (``in ("eager", "sdpa")``), as other kernels would
    not read the additions. Our attention reads all that ``sdpa`` reads. Tables of implementations look a name up by its
    hash, which stays that of the name.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == "sdpa"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


IMPLEMENTATION = ImplementationName("torchax_serve")
# The same attention for code without ``sdpa``, which expects masks that are added to the scores.
ADDITIVE_MASK = ImplementationName("torchax_serve_additive")


@dataclasses.dataclass(frozen=True)
class LeftPadding:
    """Annotation of a 2D mask of left padding only.

    `starts` int32[batch] is the first visible position.
    """

    starts: jax.Array


@dataclasses.dataclass(frozen=True)
class CausalMask:
    """Annotation of a 4D causal mask, with left padding.

    The mask is restricted to the last `window` positions if given.
    """

    window: int | None
    starts: jax.Array | None  # int32[batch]; None: no padding

    def key_mask(self, length: int) -> jax.Array | None:
        """Returns a mask of keys that are not padding, bool[batch, 1, 1, length]; None if all are.

        `length` is the number of keys.
        """
        return None if self.starts is None else (jnp.arange(length) >= self.starts[:, None])[:, None, None]


@dataclasses.dataclass(frozen=True)
class TextMask:
    """Annotation of a mask over texts that stand in one row: what a token sees of its own text.

    Attributes:
        cu_seqlens: int32[S + 1], where each text begins.
        before: Most tokens in front of its own that it sees; None: all.
        behind: Most tokens behind its own that it sees; None: all.
    """

    cu_seqlens: jax.Array
    before: int | None
    behind: int | None


_TEXTS: ContextVar[jax.Array | None] = ContextVar("where texts begin", default=None)


@contextlib.contextmanager
def texts_in_one_row(cu_seqlens: jax.Array) -> Iterator[None]:
    """Has attention inside see each text of a row by itself.

    They begin at `cu_seqlens` int32[S + 1]. Enter it where one trace runs at a time: it replaces a function of
    transformers.
    """
    found = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None  # texts are known, not guessed
    token = _TEXTS.set(cu_seqlens)
    try:
        yield
    finally:
        _TEXTS.reset(token)
        masking_utils.find_packed_sequence_indices = found


def padding_mask(starts: jax.Array, length: int) -> torch.Tensor:
    """Returns the annotated 2D mask bool[batch, length] of left padding; `starts` int32[batch]."""
    mask = torch_view(jnp.arange(length)[None, :] >= starts[:, None])
    mask.left_padding = LeftPadding(starts)
    return mask


def infer_window(mask_function: Callable[..., Any], length: int, batch: int = 1) -> int | None:
    """Returns the window of a causal `mask_function`; None if it is not causal.

    The window is `length` if the function has none. The function is evaluated, not recognised: on concrete indices it
    must return the same band below the diagonal for every query position. A function that depends on more than the
    distance (chunks, image blocks, packed sequences) or that computes with traced tensors returns something else. If
    values of the batch are known, it is evaluated for every row and position, as it may depend on them.
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
    except Exception:  # it needs more than indices
        return None
    shape = torch.broadcast_shapes(rows.shape, queries.shape, keys.shape)
    if type(visible) is not torch.Tensor or visible.dtype != torch.bool:
        return None
    if torch.broadcast_shapes(visible.shape, shape) != shape:
        return None
    visible = visible.expand(shape)
    window = int(visible.reshape(-1, length)[-1].sum())
    return window if torch.equal(visible, ((keys <= queries) & (keys > queries - window)).expand(shape)) else None


def _band_of(mask_function: Callable[..., Any], length: int) -> tuple[int | None, int | None] | None:
    """Returns how many tokens in front of its own, and behind, a token sees.

    None in place of a number: all; in place of both: it sees no such band. The function is evaluated, as by
    `infer_window`.
    """
    queries = torch.tensor(sorted({0, length // 3, length // 2, length - 1}))[:, None]
    keys = torch.arange(length)
    try:
        visible = mask_function(torch.tensor(0), torch.tensor(0), queries, keys).expand(len(queries), length)
    except Exception:  # it needs more than indices
        return None
    if type(visible) is not torch.Tensor or visible.dtype != torch.bool or not visible.any():
        return None
    far = (keys - queries)[visible]
    before, behind = -int(far.min()), int(far.max())
    if not torch.equal(visible, (keys >= queries - before) & (keys <= queries + behind)):
        return None
    return (None if before == length - 1 else before), (None if behind == length - 1 else behind)


def chunk_of(mask_function: Callable[..., Any]) -> int | None:
    """Returns the size of a mask function's chunks; None if it has none.

    transformers' ``chunked_causal_mask_function`` is recognised, not evaluated, as it reads padding: a traced tensor.
    """
    if getattr(mask_function, "__qualname__", None) != "and_masks.<locals>.and_mask":
        return None
    parts = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
    overlays = [part for part in parts if part is not causal_mask_function]
    if len(parts) != 2 or len(overlays) != 1 or overlays[0].__qualname__ != "chunked_overlay.<locals>.inner_mask":
        return None
    chunk: int | None = inspect.getclosurevars(overlays[0]).nonlocals.get("chunk_size")
    return chunk


def torchax_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Returns transformers' mask bool[batch, 1, q_length, kv_length].

    It is annotated if it is causal, in chunks or not.
    """
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
    if (cu_seqlens := _TEXTS.get()) is not None:
        band = _band_of(mask_function, kv_length) if attention_mask is None and q_length == kv_length else None
        mask.text_mask = None if band is None else TextMask(cu_seqlens, *band)
    elif attention_mask is None or padding is not None:
        window = infer_window(mask_function, kv_length, batch_size)
        if window is not None:
            starts = None if padding is None else padding.starts
            mask.causal_mask = CausalMask(None if window >= kv_length else window, starts)
        elif attention_mask is None:
            mask.attention_chunk_size = chunk_of(mask_function)
    return mask


def additive_mask(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.Tensor:
    """Returns `torchax_mask` as an additive mask of `dtype`, annotated with the boolean one."""
    visible: Any = torchax_mask(*args, dtype=dtype, **kwargs)
    mask: Any = torch.where(visible, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)
    mask.visible = visible
    for name in ("causal_mask", "attention_chunk_size", "text_mask"):
        if (annotation := getattr(visible, name, None)) is not None:
            setattr(mask, name, annotation)
    return mask


def _mask_of_eager_code(*args: Any, use_vmap: bool = False, **kwargs: Any) -> Any:
    """Returns transformers' mask for eager attention, in a trace without torch's vmap."""
    kwargs["use_vmap"] = use_vmap and not in_torch_mode()
    return eager_mask(*args, **kwargs)


def torchax_attention(
    module: torch.nn.Module | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention of `query` over `key` and `value`.

    Shapes: `query` [batch, heads, q_len, dim], `key` and `value` [batch, kv_heads, kv_len, dim]. With `alibi_slopes`
    float[heads], ``slope * (key position - query position)`` is added to the scaled scores (Press et al., 2022), also
    for packed sequences. In a packed step `position_bias` is a pair, weights [1, q_len, heads, R] and profiles [R, E]
    of biases by distance, and `sinks` float[1, heads, q_len, 1] are those of each query.

    Returns:
        The output [batch, q_len, heads, v_dim], and None in place of the weights.
    """
    if dropout:
        raise ValueError(f"expected dropout 0 in a served model, got {dropout}; call model.eval() first")
    # Model code may have made these on the host.
    attention_mask, position_bias, alibi_slopes = as_views((attention_mask, position_bias, alibi_slopes))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attention_mask = getattr(attention_mask, "visible", attention_mask)
    causal_mask: CausalMask | None = getattr(attention_mask, "causal_mask", None)
    # From here on as in `AttentionArgs`: what transformers calls s_aux are `sinks`, what it calls sinks `token_sinks`.
    features = {"scale": scale, "softcap": softcap, "sinks": s_aux, "alibi_slopes": alibi_slopes, "token_sinks": sinks}
    pages: LatentWrite | PagedWrite | None = getattr(key, "latent_write", None) or getattr(key, "paged_write", None)
    if pages is not None:
        return _on_pages(query, key, value, pages, attention_mask, position_bias, features), None
    if _TEXTS.get() is not None:
        return _in_texts(query, key, value, attention_mask, position_bias, features), None
    if isinstance(position_bias, tuple) or sinks is not None:
        raise NotPackableError("sinks of each query, or biases by distance, outside of a packed step")
    slopes = None if alibi_slopes is None else jax_view(alibi_slopes).astype(jnp.float32)
    head_sinks, mask, bias = (None if x is None else jax_view(x) for x in (s_aux, attention_mask, position_bias))
    args = AttentionArgs(scale, None, softcap, head_sinks, slopes)
    q, write = jax_view(query), _cache_write(key, value)
    out: Any = None
    if softcap is None and head_sinks is None and slopes is None:
        out = _attend_to_source(query, key, value, mask, bias, scale)
    if out is None and causal_mask is not None and write is not None and _is_decode(q, write, bias, softcap):
        args = dataclasses.replace(args, window=causal_mask.window, position_biases=_by_position(bias, q))
        out = _decode(q, write, causal_mask.starts, args)
    elif out is None:
        hides = getattr(module, "is_causal", True) if is_causal is None else is_causal
        out = _attend_densely(q, jax_view(key), jax_view(value), mask, bias, causal_mask, args, hides_later=hides)
    return torch_view(jnp.swapaxes(out, 1, 2)), None


def _attend_densely(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
    causal_mask: CausalMask | None,
    args: AttentionArgs,
    *,
    hides_later: bool,
) -> jax.Array:
    """Runs `dense_attention`, with the slopes of `args` as a bias and the mask of `_dense_mask`."""
    if args.alibi_slopes is not None:
        bias = _linear_bias(args.alibi_slopes, q.shape[2], keys.shape[2]) + (0 if bias is None else bias)
        args = dataclasses.replace(args, alibi_slopes=None)
    mask, causal = _dense_mask(mask, bias, causal_mask, q.shape[2], keys.shape[2], hides_later=hides_later)
    if q.shape[0] == 1:  # queries that a model has learned, the same for all
        q = jnp.broadcast_to(q, (keys.shape[0], *q.shape[1:]))
    out: Any = dense_attention(q, keys, values, mask, args, causal=causal)
    return out


def _is_decode(q: jax.Array, write: KVWrite, bias: jax.Array | None, softcap: float | None) -> bool:
    """Tells whether `_decode` can attend for the new token, with biases by position if any."""
    if q.shape[2] != 1 or write.pool_before is None:
        return False
    layer = write.layer
    return bias is None or (bias.shape[-1] == layer.capacity and layer.right_align_len is None and softcap is None)


def _by_position(bias: jax.Array | None, q: jax.Array) -> jax.Array | None:
    """Returns a bias [batch or 1, heads or 1, 1, kv_len] as ``float32[batch, heads, kv_len]``."""
    if bias is None:
        return None
    return jnp.broadcast_to(bias[:, :, 0].astype(jnp.float32), (*q.shape[:2], bias.shape[-1]))


def _sum_of(bias: jax.Array | None, mask: jax.Array | None) -> jax.Array | None:
    """Returns the sum float32[...] of a bias and a mask, of which one or both may be missing."""
    if mask is None:
        return bias
    hidden = _additive(mask, jnp.dtype(jnp.float32))
    return hidden if bias is None else bias.astype(jnp.float32) + hidden


def _attend_to_source(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: jax.Array | None,
    bias: jax.Array | None,
    scale: float,
) -> jax.Array | None:
    """Returns attention of one query to an encoder's output where that is stored, or None.

    What is behind the output's length is not read there: a mask must hide it, or there must be nothing.
    """
    stored: StoredSource | None = getattr(key, "stored_source", None)
    if stored is None or id(stored) != id(getattr(value, "stored_source", None)):
        return None
    added = [x for x in (mask, bias) if x is not None]
    fits = all(x.ndim == 4 and x.shape[0] == 1 and x.shape[2:] == (1, key.shape[2]) for x in added)
    if query.shape[0] != 1 or query.shape[2] != 1 or not fits or (mask is None and not stored.is_fixed_len):
        return None
    q = jax_view(query)
    args = AttentionArgs(scale, position_biases=_by_position(_sum_of(bias, mask), q))
    return attend_stored(q[:, :, 0], stored.keys, stored.values, stored.slot, stored.length, args)[:, :, None]


def _cache_write(key: torch.Tensor, value: torch.Tensor) -> KVWrite | None:
    """Returns the write of keys and values; None if model code has made other values of them."""
    write: KVWrite | None = getattr(key, "cache_write", None)
    return write if write is not None and value is write.values_out else None


def _on_pages(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    write: LatentWrite | PagedWrite,
    mask: Any,
    distance_biases: Any,
    features: dict[str, Any],
) -> torch.Tensor:
    """Runs attention of a packed step on the pages of `key`, or of its latents."""
    causal: CausalMask | None = getattr(mask, "causal_mask", None)
    chunk: int | None = getattr(mask, "attention_chunk_size", None)
    is_causal = chunk is not None or (causal is not None and causal.starts is None)
    if not is_causal or not isinstance(distance_biases, tuple | None):
        raise NotPackableError("attention with a mask that is more than causal")
    features |= {"taken": getattr(mask, "taken", None), "distance_biases": distance_biases, "chunk": chunk}
    window = chunk if causal is None else causal.window
    if value is not write.values:
        raise NotPackableError("attention over changed values")
    if isinstance(write, LatentWrite):
        return attend_latents(query, write, window, **features)
    return attend_paged(query, key, write, window, **features)


def _in_texts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    position_bias: Any,
    features: dict[str, Any],
) -> torch.Tensor:
    """Runs attention of a row of texts, of which each is seen by itself.

    Raises:
        NotPackableError: scores depend on more than a band of positions, or keys are not the tokens of the row.
    """
    text_mask: TextMask | None = getattr(mask, "text_mask", None)
    if text_mask is None or position_bias is not None:
        raise NotPackableError("attention with a mask, or biases, that are more than a band of positions")
    if any(features[name] is not None for name in ("alibi_slopes", "token_sinks")):
        raise NotPackableError("attention with biases of its own in a row of texts")
    q, k, v = map(jax_view, (query, key, value))
    if not q.shape[0] == k.shape[0] == 1 or q.shape[2] != k.shape[2]:
        raise NotPackableError("attention to something else than the tokens of the row")
    cu_seqlens, sinks = text_mask.cu_seqlens, features["sinks"]
    texts, positions = text_of_token(cu_seqlens, q.shape[2])
    until = jnp.diff(cu_seqlens, append=cu_seqlens[-1:])[texts] - 1
    if text_mask.behind is not None:
        until = jnp.minimum(until, positions + text_mask.behind)
    args = AttentionArgs(
        features["scale"],
        None if text_mask.before is None else text_mask.before + 1,
        features["softcap"],
        None if sinks is None else jax_view(sinks),
        sees_until=until,
    )
    return torch_view(varlen_attention(jnp.swapaxes(q[0], 0, 1), k[0], v[0], cu_seqlens, args)[None])


def _dense_mask(
    mask: jax.Array | None,
    bias: jax.Array | None,
    causal_mask: CausalMask | None,
    q_len: int,
    kv_len: int,
    *,
    hides_later: bool,
) -> tuple[jax.Array | None, bool]:
    """Returns the mask for `dense_attention`, and whether its ``causal`` is to be set.

    `bias` is added to the mask. With ``causal``, each query's own key is its last. `hides_later`: several queries
    without a mask do not see later keys.
    """
    if causal_mask is not None and causal_mask.window is None and q_len == kv_len and bias is None:
        # As `causal`, later keys are skipped instead of masked.
        return causal_mask.key_mask(q_len), True
    causal = mask is None and q_len > 1 and hides_later
    if bias is not None:
        mask = bias if mask is None else bias + _additive(mask, bias.dtype)
    return mask, causal


def _linear_bias(slopes: jax.Array, q_len: int, kv_len: int) -> jax.Array:
    """Returns ALiBi's bias float32[1, heads, q_len, kv_len] from `slopes` [heads].

    The last query is taken to be at the last key. If the keys are a cache with unused capacity it is before it, which
    adds a constant per query, and softmax is invariant to that.
    """
    distance = jnp.arange(kv_len) - (jnp.arange(q_len)[:, None] + kv_len - q_len)
    return slopes[None, :, None, None] * distance.astype(jnp.float32)


def _additive(mask: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.where(mask, 0, jnp.finfo(dtype).min).astype(dtype) if mask.dtype == jnp.bool else mask.astype(dtype)


def _decode(q: jax.Array, write: KVWrite, starts: jax.Array | None, args: AttentionArgs) -> jax.Array:
    """Writes keys and values of one new token per row and attends, in one op.

    Args:
        q: [batch, heads, 1, dim].
        write: of the new token.
        starts: int32[batch], the first position that is no padding; None: 0.
        args: what else shapes the scores.
    """
    assert write.pool_before is not None
    layer, batch = write.layer, q.shape[0]
    if layer.table is not None:  # one sequence, on pages of many
        length = jax_view(layer.offset).astype(jnp.int32) + 1
        args = dataclasses.replace(args, kv_scales=layer.kv_scales())
        k, v = write.keys[:, :, 0], write.values[:, :, 0]
        row, pool = attend_row(q[:, :, 0], k, v, write.pool_before, jax_view(layer.table), length, args)
        write.pool_before, layer.pool = pool, torch_view(pool)
        return row[:, :, None]
    lens = jnp.broadcast_to(jax_view(layer.offset).astype(jnp.int32) + 1, (batch,))
    starts = jnp.zeros(batch, jnp.int32) if starts is None else starts.astype(jnp.int32)
    out, pool = decode_attention(
        q[:, :, 0],
        write.keys[:, :, 0],
        write.values[:, :, 0],
        write.pool_before,
        jnp.arange(batch, dtype=jnp.int32)[:, None],  # one page per row, as long as the capacity
        lens,
        starts,
        args,
    )
    write.pool_before, layer.pool = pool, torch_view(pool)
    return out[:, :, None]


AttentionInterface.register(IMPLEMENTATION, torchax_attention)
AttentionMaskInterface.register(IMPLEMENTATION, torchax_mask)
AttentionMaskInterface.register("eager", _mask_of_eager_code)
AttentionInterface.register(ADDITIVE_MASK, torchax_attention)
AttentionMaskInterface.register(ADDITIVE_MASK, additive_mask)


class FunctionInterception(torch.overrides.TorchFunctionMode):
    """Runs ``scaled_dot_product_attention`` on keys of a cache as `torchax_attention`.

    Code that calls the function itself (Falcon) so attends on pages, and by one op in decode steps.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs `func`, or attention on the cache."""
        if func is torch.nn.functional.scaled_dot_product_attention:
            out = _attention_of_function(*args, **(kwargs or {}))
            if out is not None:
                return out
        return func(*args, **(kwargs or {}))


def _attention_of_function(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,  # which our attention allows in any case
) -> torch.Tensor | None:
    """Returns attention [batch, heads, q_len, v_dim]; None if keys are no cache's."""
    if _TEXTS.get() is not None:
        raise NotPackableError("attention past transformers' attention interface")
    is_paged = hasattr(key, "paged_write") or hasattr(key, "latent_write")
    if not is_paged and not (hasattr(key, "cache_write") and hasattr(attn_mask, "causal_mask")):
        return None
    if is_causal and is_paged:  # the function's own mask is of this step's tokens alone
        raise NotPackableError("attention with a mask that the function makes")
    out, _ = torchax_attention(None, query, key, value, attn_mask, dropout=dropout_p, scaling=scale)
    return out.transpose(1, 2)


def uses_attention_interface(module: PreTrainedModel) -> bool:
    """Tells whether `AttentionInterface` replaces the model's attention.

    Otherwise its own code and masks stay.
    """
    return bool(module._supports_attention_backend or module._supports_sdpa)


def attention_name(module: PreTrainedModel) -> str | None:
    """Returns the attention implementation for `module` in a trace; None for its own."""
    if not uses_attention_interface(module):
        return None
    return IMPLEMENTATION if module._supports_sdpa else ADDITIVE_MASK
