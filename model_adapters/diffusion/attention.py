"""Attention of diffusers on this project's op, through its registry of backends.

Attention processors call ``dispatch_attention_fn``, which looks up the active backend by its name. While a module is
traced that is `NAME`. UNets of the older design call ``scaled_dot_product_attention`` instead, which is lowered to the
same op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from model_adapters import ops
from model_adapters.bridge.views import as_views, is_view, jax_view, torch_view
from model_adapters.errors import UnsupportedArgumentError
from model_adapters.once import once

NAME = "torchax_serve"
_SAME_NUMBERS = ("native", "_native_math", "_native_efficient", "_native_flash", "_native_cudnn", "flex", "flash")
"""Backends of diffusers that compute exact attention: which one a user has chosen makes no difference here."""


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> torch.Tensor:
    """Computes attention as diffusers' native backend does.

    Attention of tensors that are not traced is computed by that backend itself.

    Args:
        query: ``[batch, len, heads, dim]``.
        key: ``[batch, keys, kv_heads, dim]``.
        value: ``[batch, keys, kv_heads, value_dim]``.
        attn_mask: Boolean or additive, ``[batch, keys]`` or broadcastable to ``[batch, heads, len, keys]``.
        dropout_p: Has to be 0.
        is_causal: Query ``i`` sees keys up to ``i``.
        scale: Of the scores; None: ``dim ** -0.5``.
        enable_gqa: Whether there may be fewer kv heads than heads, which the op allows in any case.
        return_lse: Not supported.
        _parallel_config: Of diffusers' context parallelism; not supported.

    Returns:
        ``[batch, len, heads, value_dim]``.
    """
    given = {"return_lse": return_lse, "_parallel_config": _parallel_config, "dropout_p": dropout_p}
    if refused := [name for name, wanted in given.items() if wanted]:
        raise UnsupportedArgumentError(f"{refused[0]}: expected none in attention on JAX, got {given[refused[0]]!r}")
    if not any(is_view(x) for x in (query, key, value)):
        native = _backends()._backends[_names().NATIVE]
        result: torch.Tensor = native(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa=enable_gqa)
        return result
    q, k, v = (jax_view(as_views(x)).transpose(0, 2, 1, 3) for x in (query, key, value))
    mask = None if attn_mask is None else jax_view(as_views(attn_mask))
    if mask is not None and mask.ndim == 2 and mask.shape == (q.shape[0], k.shape[2]):
        mask = mask[:, None, None]
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    args = ops.AttentionArgs(query.shape[-1] ** -0.5 if scale is None else scale)
    out: Any = ops.dense_attention(q, k, v, mask, args, causal=is_causal)
    viewed: torch.Tensor = torch_view(out.transpose(0, 2, 1, 3))
    return viewed


def _backends() -> Any:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    return _AttentionBackendRegistry


def _names() -> Any:
    from diffusers.models.attention_dispatch import AttentionBackendName

    return AttentionBackendName


@once
def install() -> None:
    """Adds `attention` to diffusers' registry."""
    _backends().register(NAME)(attention)
    # AceStep looks the active name up among those of backends, to ask whether it is one of flash attention's.
    _names()._missing_ = classmethod(lambda names, value: names.NATIVE if value == NAME else None)


@contextlib.contextmanager
def active(module: torch.nn.Module) -> Iterator[None]:
    """Makes `attention` the backend of `module` inside the context.

    Another thread that runs diffusers eagerly meanwhile gets diffusers' native backend from it.

    Raises:
        UnsupportedArgumentError: the module was given a backend whose results differ from exact attention.
    """
    install()
    registry = _backends()
    processors = [processor for child in module.modules() if (processor := _chosen_by(child)) is not None]
    before = [(processor, processor._attention_backend) for processor in processors]
    for _, backend in before:
        name = getattr(backend, "value", backend)
        if name is not None and name not in _SAME_NUMBERS:
            raise UnsupportedArgumentError(
                f"set_attention_backend({name!r}): expected exact attention, which JAX computes by its own op; call "
                "reset_attention_backend() first"
            )
    active_before = registry._active_backend
    try:
        for processor in processors:
            processor._attention_backend = None
        registry.set_active_backend(NAME)
        yield
    finally:
        registry.set_active_backend(active_before)
        for processor, backend in before:
            processor._attention_backend = backend


def _chosen_by(child: torch.nn.Module) -> Any:
    """Returns the attention processor of `child` that names a backend; None if there is none."""
    processor = vars(child).get("processor")
    return processor if getattr(processor, "_attention_backend", None) is not None else None
