"""What a trace of a model's code on a mesh knows of its weights.

That is where they lie, and how fused products are cut. A fused weight has on each device that device's share of all of
its parts. Its product is computed by shares; model code gets the parts side by side, which
`model_adapters.jaxpr.split_concats` keeps apart where the code cuts them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding_rules import TensorPlacement
from sharding_rules.layout import DimLayout, parts_dim

SHORT_RESULT = "modulation"
"""Logical axis of outputs that are gathered as soon as they are computed."""
_IN_USE: ContextVar[_Trace | None] = ContextVar("sharded trace", default=None)


@dataclasses.dataclass(frozen=True)
class _Trace:
    """State of a trace: its mesh, and what is known of arrays by their identity.

    Those are weights and their placements, concatenations and their parts, and squeezed weights.
    """

    mesh: Mesh
    placed: Mapping[int, TensorPlacement]
    parts: dict[int, tuple[jax.Array, tuple[jax.Array, ...]]] = dataclasses.field(default_factory=dict)
    squeezed: dict[int, tuple[jax.Array, TensorPlacement]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def splits_inputs(self) -> bool:
        """Whether the input of a product is a fused dimension."""
        return any(dim.sections for each in self.placed.values() for dim in each.dims[1:])


def placement_in_trace(weight: Any) -> TensorPlacement | None:
    """Returns the placement of a weight, unchanged by model code, in the current trace."""
    trace = _IN_USE.get()
    return None if trace is None else trace.placed.get(id(weight))


@contextlib.contextmanager
def placements_known(mesh: Mesh | None, placed: Mapping[int, TensorPlacement]) -> Iterator[None]:
    """Makes placements on `mesh` be found in a trace, by the identity of a weight.

    None is one device.
    """
    token = _IN_USE.set(None if mesh is None else _Trace(mesh, placed))
    try:
        yield
    finally:
        _IN_USE.reset(token)


@contextlib.contextmanager
def also_placed(pairs: Iterable[tuple[jax.Array, TensorPlacement | None]]) -> Iterator[None]:
    """Makes placements be found by other arrays as well, inside the context."""
    trace = _IN_USE.get()
    if trace is None:
        yield
        return
    found = {id(array): placed for array, placed in pairs if placed is not None}
    token = _IN_USE.set(_Trace(trace.mesh, {**trace.placed, **found}))
    try:
        yield
    finally:
        _IN_USE.reset(token)


def mesh_in_trace() -> Mesh | None:
    """Returns the mesh of the current trace."""
    trace = _IN_USE.get()
    return None if trace is None else trace.mesh


def note_parts(joined: jax.Array, parts: Sequence[jax.Array]) -> None:
    """Records that `joined` is `parts` side by side along its last dimension."""
    trace = _IN_USE.get()
    if trace is not None and trace.splits_inputs:
        trace.parts[id(joined)] = joined, tuple(parts)


def divide_fused_input(x: jax.Array, layout: DimLayout) -> jax.Array:
    """Returns the input of a product in the order of its weight.

    Each device has a share of each section.

    Args:
        x: ``[..., layout.size]``, sections one after the other.
        layout: Layout of the weight's input dimension.
    """
    trace = _IN_USE.get()
    if trace is None or not layout.sections or layout.mesh_axis is None:
        return x
    shards = trace.mesh.shape[layout.mesh_axis]
    sizes = _sizes_in_model(layout, shards)
    assert x.shape[-1] == sum(sizes) == layout.size_before, "a fused input is not filled up with zeros"
    _, parts = trace.parts.get(id(x), (x, ()))
    if tuple(part.shape[-1] for part in parts) != sizes:
        parts = tuple(jnp.split(x, np.cumsum(sizes)[:-1].tolist(), -1))
    return _shares(parts, layout, trace.mesh)


def divide_channels(weight: jax.Array, layout: DimLayout) -> jax.Array:
    """Returns a weight ``[..., channels]`` that every device has, as `divide_fused_input` does.

    Its parts are held in place: XLA would otherwise begin with dividing the weight in one piece.
    """
    trace = _IN_USE.get()
    if trace is None or not layout.sections or layout.mesh_axis is None:
        return weight
    everywhere = NamedSharding(trace.mesh, PartitionSpec())
    sizes = _sizes_in_model(layout, trace.mesh.shape[layout.mesh_axis])
    parts = jnp.split(weight, np.cumsum(sizes)[:-1].tolist(), -1)
    return _shares([jax.lax.with_sharding_constraint(part, everywhere) for part in parts], layout, trace.mesh)


def _shares(parts: Sequence[jax.Array], layout: DimLayout, mesh: Mesh) -> jax.Array:
    """Returns parts ``[..., n]`` in the order of a fused weight, ``[..., layout.size]``."""
    assert layout.mesh_axis is not None
    shards, lead = mesh.shape[layout.mesh_axis], parts[0].shape[:-1]
    divided = NamedSharding(mesh, PartitionSpec(*(PartitionSpec.UNCONSTRAINED,) * len(lead), layout.mesh_axis, None))
    shares = []
    for number, part in enumerate(parts):
        if number in layout.copied:
            share = jnp.broadcast_to(part[..., None, :], (*lead, shards, part.shape[-1]))
        else:
            share = part.reshape(*lead, shards, part.shape[-1] // shards)
        shares.append(jax.lax.with_sharding_constraint(share, divided))
    joined = jax.lax.with_sharding_constraint(jax.lax.concatenate(shares, len(lead) + 1), divided)
    return joined.reshape(*lead, layout.size)


def _sizes_in_model(layout: DimLayout, shards: int) -> tuple[int, ...]:
    """Returns the lengths of the parts as model code has them, without copies."""
    return tuple(size // shards if number in layout.copied else size for number, size in enumerate(layout.sections))


def note_squeezed(weight: jax.Array, squeezed: jax.Array) -> None:
    """Records that `squeezed` is a weight of a convolution without its dimension of one."""
    trace = _IN_USE.get()
    placed = None if trace is None else trace.placed.get(id(weight))
    if trace is not None and placed is not None and placed.rule.parts is not None:
        trace.squeezed[id(squeezed)] = squeezed, placed


def channel_layout(weight: jax.Array) -> DimLayout | None:
    """Returns the layout of the channels of a convolution's ``weight[channels, width]``.

    None for any other weight, and on one device.
    """
    trace = _IN_USE.get()
    found = None if trace is None else trace.squeezed.get(id(weight))
    if trace is None or found is None or found[1].rule.parts is None:
        return None
    return parts_dim(found[1].rule.parts, trace.mesh.shape["model"], "model")


def gathered(out: jax.Array) -> jax.Array:
    """Returns a result whose columns are divided, all of them on every device.

    Model code that cuts it in parts would otherwise exchange each part by itself.
    """
    trace = _IN_USE.get()
    if trace is None:
        return out
    spec = PartitionSpec(*(PartitionSpec.UNCONSTRAINED,) * (out.ndim - 1), None)
    return jax.lax.with_sharding_constraint(out, NamedSharding(trace.mesh, spec))


def gather_fused_result(out: jax.Array, layout: DimLayout) -> jax.Array:
    """Returns the result of a fused product as model code expects it.

    In `out` each device has its share.

    Args:
        out: ``[..., layout.size]``.
        layout: Layout of the weight's output dimension.
    """
    mesh = mesh_in_trace()
    if mesh is None or not layout.sections or layout.mesh_axis is None:
        return out
    shards = mesh.shape[layout.mesh_axis]
    lead = out.shape[:-1]
    shares = out.reshape(*lead, shards, layout.size // shards)
    spec = PartitionSpec(*(None for _ in lead), layout.mesh_axis, None)
    shares = jax.lax.with_sharding_constraint(shares, NamedSharding(mesh, spec))
    ends = np.cumsum([size // shards for size in layout.sections]).tolist()
    parts = []
    for number, (end, size) in enumerate(zip(ends, layout.sections, strict=True)):
        share = shares[..., end - size // shards : end]
        if number in layout.copied:
            parts.append(_own_copy(share, mesh, layout.mesh_axis))
        else:
            parts.append(share.reshape(*lead, -1))
    return jax.lax.concatenate(parts, len(lead))


def _own_copy(shares: jax.Array, mesh: Mesh, axis: str) -> jax.Array:
    """Returns ``[..., size]`` of ``[..., devices, size]``: on each device what it has computed."""
    spec = PartitionSpec(*(None,) * (shares.ndim - 2), axis, None)
    own = jax.shard_map(
        lambda own: own[..., 0, :], mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False
    )
    copy: jax.Array = own(shares)
    return copy
