"""The ops on a mesh of devices: attention by heads, each device with its own, and products that XLA can divide.

While a program is traced :func:`on_mesh`, these implementations stand before all others. Attention runs under
`jax.shard_map`, so that the kernel of the platform sees the heads of one device and needs nothing of the others;
products are left to XLA's partitioner, which cannot look into a kernel.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_adapters.ops import registry
from model_adapters.ops.activation import OP as ACTIVATION
from model_adapters.ops.activation import reference as activation_reference
from model_adapters.ops.decode_attention import OP as DECODE
from model_adapters.ops.decode_attention import decode_attention
from model_adapters.ops.dense_attention import OP as DENSE
from model_adapters.ops.dense_attention import dense_attention
from model_adapters.ops.grouped_matmul import OP as GROUPED
from model_adapters.ops.grouped_matmul import reference as grouped_reference
from model_adapters.ops.linear import OP as LINEAR
from model_adapters.ops.linear import reference as linear_reference
from model_adapters.ops.paged_attention import OP as PAGED
from model_adapters.ops.paged_attention import paged_attention
from model_adapters.ops.reductions import OP as ROW_SUM
from model_adapters.ops.reductions import reference as row_sum_reference
from model_adapters.ops.rms_norm import OP as RMS_NORM
from model_adapters.ops.rms_norm import reference as rms_norm_reference

NAME = "sharded"
AXIS = "model"
_MESH: ContextVar[Mesh | None] = ContextVar("mesh", default=None)
_TOKENS_DIVIDED: ContextVar[bool] = ContextVar("tokens divided", default=False)

_HEADS = PartitionSpec(None, AXIS)  # of [tokens, heads, ...], of a pool [pages, heads, ...] and of [rows, heads, ...]
_BY_HEAD = PartitionSpec(AXIS)
_WHOLE = PartitionSpec()


@contextlib.contextmanager
def on_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Traces for the devices of `mesh`; None: for one device, as inside of a shard."""
    token = _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(token)


@contextlib.contextmanager
def tokens_divided() -> Iterator[None]:
    """Traces a step in which each device has its part of the tokens, heads but in attention.

    There tokens are exchanged for heads, and behind it heads for tokens (DeepSpeed-Ulysses, Jacobs et al. 2023).
    """
    token = _TOKENS_DIVIDED.set(True)
    try:
        yield
    finally:
        _TOKENS_DIVIDED.reset(token)


def by_token(array: jax.Array, mesh: Mesh) -> jax.Array:
    """`array` ``[tokens, ...]``, each device with its part of the tokens."""
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, _BY_HEAD))


def mesh_in_use() -> Mesh | None:
    """The mesh that is traced for, if there is one."""
    return _MESH.get()


def divides_heads(heads: int, kv_heads: int, mesh: Mesh | None) -> bool:
    """Whether every device of the mesh's model axis has whole heads of its own."""
    num_shards = 1 if mesh is None else mesh.shape.get(AXIS, 1)
    return num_shards > 1 and heads % num_shards == 0 and kv_heads % num_shards == 0


def pool_spec(kv_heads: int, mesh: Mesh) -> PartitionSpec:
    """How a pool ``[pages, kv_heads, page_len, width]`` lies on the mesh."""
    return _HEADS if divides_heads(kv_heads, kv_heads, mesh) else _WHOLE


def state_spec(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """How states ``[slots, 1, channels or heads, ...]`` lie on the mesh: as the weights that make them."""
    divides = len(shape) > 2 and divides_heads(shape[2], shape[2], mesh)
    return PartitionSpec(None, None, AXIS) if divides else _WHOLE


def _refuses_attention(*args: Any, return_weights: bool = False, **kwargs: Any) -> str | None:
    mesh = mesh_in_use()
    if mesh is None or mesh.size == 1:
        return "no mesh of several devices"
    return "weights are asked for, which are not divided" if return_weights else None


def per_shard(call: Callable[..., Any], args: tuple[Any, ...], specs: tuple[PartitionSpec, ...], out_specs: Any) -> Any:
    """`call` on each device's part of `args`, traced as for one device; arguments may be None."""
    given = [number for number, arg in enumerate(args) if arg is not None]
    mesh = mesh_in_use()
    assert mesh is not None

    def one_shard(*parts: jax.Array) -> Any:
        whole: list[Any] = [None] * len(args)
        for number, part in zip(given, parts, strict=True):
            whole[number] = part
        with on_mesh(None):
            return call(*whole)

    run = jax.shard_map(
        one_shard, mesh=mesh, in_specs=tuple(specs[n] for n in given), out_specs=out_specs, check_vma=False
    )
    return run(*(args[n] for n in given))


@dataclass(frozen=True)
class _Call:
    """An op with everything of a call that is not an array, and all that decides how it is traced."""

    op: str
    signature: inspect.Signature
    names: tuple[str, ...]  # of the arrays
    specs: tuple[PartitionSpec, ...]
    out_specs: Any
    features: tuple[tuple[str, Any], ...]
    mesh: Mesh | None
    traced_for: Any

    def __call__(self, *arrays: Any) -> Any:
        bound = self.signature.bind(**dict(zip(self.names, arrays, strict=True)), **dict(self.features))
        return registry.call(self.op, *bound.args, **bound.kwargs)


@partial(jax.jit, static_argnums=0)
def _layer(call: _Call, *arrays: Any) -> Any:
    """`call` by shards. Being a function of its own it is traced and lowered once, however many layers there are."""
    return per_shard(call, arrays, call.specs, call.out_specs)


def _by_heads(op: str, function: Callable[..., Any], specs: Mapping[str, PartitionSpec], out_specs: Any) -> Any:
    """An implementation of `op` that runs it on each device's part; on all of it where heads do not divide.

    The partitioner cannot look into a kernel, and for some platforms it does not even copy one to all devices.

    Args:
        op: its name.
        function: whose parameters a call is read by.
        specs: how each parameter that is an array lies; all others are the same on every device.
        out_specs: of the results.
    """
    signature = inspect.signature(function)

    def sharded(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        arrays = {name: value for name, value in given.items() if name in specs}
        features = tuple(sorted((name, value) for name, value in given.items() if name not in specs))
        lying = tuple(_fitting(name, specs[name], array) for name, array in arrays.items())
        mesh, results = mesh_in_use(), out_specs
        if not divides_heads(given["q"].shape[1], given["k"].shape[1], mesh):
            lying, results = (_WHOLE,) * len(lying), _WHOLE
        call = _Call(op, signature, tuple(arrays), lying, results, features, mesh, registry.selection_key())
        if op != PAGED or mesh is None or not _TOKENS_DIVIDED.get():
            return _layer(call, *arrays.values())
        out, pool = _layer(call, *(by_token(x, mesh) if name in _NEW_TOKENS else x for name, x in arrays.items()))
        return by_token(out, mesh), pool

    return sharded


def _fitting(name: str, spec: PartitionSpec, array: jax.Array | None) -> PartitionSpec:
    """`spec`, but for a mask of all heads alike, which every device has whole."""
    return _WHOLE if name == "mask" and array is not None and array.shape[1] == 1 else spec


_NEW_TOKENS = frozenset({"q", "k", "v"})
_NEW = {"q": _HEADS, "k": _HEADS, "v": _HEADS, "sinks": _BY_HEAD}
_CACHED = {**_NEW, "pool": _HEADS, "page_table": _WHOLE, "alibi": _BY_HEAD, "k_scale": _BY_HEAD, "v_scale": _BY_HEAD}

registry.register(DECODE, NAME, registry.PLATFORMS, refuses=_refuses_attention, before_all=True)(
    _by_heads(DECODE, decode_attention, {**_CACHED, "lens": _WHOLE, "starts": _WHOLE}, (_HEADS, _HEADS))
)
_RAGGED = {**_CACHED, "kv_lens": _WHOLE, "cu_q_lens": _WHOLE, "prefix_lens": _WHOLE}
registry.register(PAGED, NAME, registry.PLATFORMS, refuses=_refuses_attention, before_all=True)(
    _by_heads(PAGED, paged_attention, _RAGGED, (_HEADS, _HEADS))
)
registry.register(DENSE, NAME, registry.PLATFORMS, refuses=_refuses_attention, before_all=True)(
    _by_heads(DENSE, dense_attention, {**_NEW, "mask": _HEADS}, _HEADS)
)


def _refuses_product(*args: Any, **kwargs: Any) -> str | None:
    return "no mesh" if mesh_in_use() is None else None


# XLA divides its own products along whatever their operands are divided; a kernel it would give everything to.
for _op, _reference in (
    (LINEAR, linear_reference),
    (GROUPED, grouped_reference),
    (ACTIVATION, activation_reference),
    (RMS_NORM, rms_norm_reference),
    (ROW_SUM, row_sum_reference),
):
    registry.register(_op, NAME, ("cpu",), refuses=_refuses_product, before_all=True)(_reference)
