"""The ops on a mesh of devices: attention divided by heads, and products divided by XLA.

While a program is traced inside of :func:`on_mesh`, these implementations take precedence. Attention runs under
`jax.shard_map`: the kernel of the platform sees the heads of one device and needs no data of the others. Products are
left to XLA's partitioner, which cannot divide a kernel. An op registers itself by :func:`shard_by_heads` or
:func:`leave_to_partitioner`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_adapters.ops import registry
from model_adapters.ops.attention_args import unsupported_field

NAME = "sharded"
AXIS = "model"
ROW_AXIS = "data"
_MESH: ContextVar[Mesh | None] = ContextVar("mesh", default=None)
_TOKENS_DIVIDED: ContextVar[bool] = ContextVar("tokens divided", default=False)

BY_AXIS_1 = PartitionSpec(None, AXIS)  # heads of [tokens, heads, ...], [rows, heads, ...] or a pool [pages, heads, ...]
BY_AXIS_0 = PartitionSpec(AXIS)  # heads of [heads, ...], or tokens of [tokens, ...]
REPLICATED = PartitionSpec()  # the same on every device


@contextlib.contextmanager
def on_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Traces for the devices of `mesh`, or for one device if None, as inside of a shard."""
    token = _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(token)


@contextlib.contextmanager
def tokens_divided() -> Iterator[None]:
    """Traces a step in which tokens are divided among devices, and heads in attention.

    Before attention tokens are exchanged for heads, after it heads for tokens (DeepSpeed-Ulysses, Jacobs et al. 2023).
    """
    token = _TOKENS_DIVIDED.set(True)
    try:
        yield
    finally:
        _TOKENS_DIVIDED.reset(token)


def by_token(array: jax.Array, mesh: Mesh) -> jax.Array:
    """Returns ``array[tokens, ...]`` with its tokens divided among the devices of `mesh`."""
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, BY_AXIS_0))


def mesh_in_use() -> Mesh | None:
    """Returns the mesh that is traced for, or None."""
    return _MESH.get()


def divides_heads(heads: int, kv_heads: int, mesh: Mesh | None) -> bool:
    """Returns whether the mesh's model axis divides query heads and kv heads evenly."""
    num_shards = 1 if mesh is None else mesh.shape.get(AXIS, 1)
    return num_shards > 1 and heads % num_shards == 0 and kv_heads % num_shards == 0


def row_axis(num_rows: int, mesh: Mesh | None) -> str | None:
    """Returns the axis that divides a batch of `num_rows`.

    None if the mesh has none or does not divide it.
    """
    num_shards = 1 if mesh is None else mesh.shape.get(ROW_AXIS, 1)
    return ROW_AXIS if num_shards > 1 and num_rows % num_shards == 0 else None


def _by_row(spec: PartitionSpec) -> PartitionSpec:
    """Returns `spec` with axis 0 divided by row."""
    return PartitionSpec(ROW_AXIS, *spec[1:])


def pool_spec(kv_heads: int, mesh: Mesh) -> PartitionSpec:
    """Returns how a pool ``[pages, kv_heads, page_size, width]`` is divided on the mesh."""
    return BY_AXIS_1 if divides_heads(kv_heads, kv_heads, mesh) else REPLICATED


def state_spec(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Returns how states ``[slots, 1, channels or heads, ...]`` are divided.

    They are divided as the weights that compute them.
    """
    divides = len(shape) > 2 and divides_heads(shape[2], shape[2], mesh)
    return PartitionSpec(None, None, AXIS) if divides else REPLICATED


def recurrent_spec(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Returns how recurrent states ``[rows, channels or heads, ...]`` are divided."""
    return PartitionSpec(*state_spec((shape[0], 1, *shape[1:]), mesh)[1:])


def _attention_unsupported_reason(*arrays: Any, return_weights: bool = False, **kwargs: Any) -> str | None:
    mesh = mesh_in_use()
    if mesh is None or mesh.size == 1:
        return "no mesh of several devices"
    if return_weights:
        return "weights are asked for, which are not divided"
    return unsupported_field(arrays[-1], SUPPORTED_ARGS)


def per_shard(call: Callable[..., Any], args: tuple[Any, ...], specs: tuple[Any, ...], out_specs: Any) -> Any:
    """Runs `call` on each device's part of `args`: arrays or trees of them, or None."""
    given = [number for number, arg in enumerate(args) if arg is not None]
    mesh = mesh_in_use()
    assert mesh is not None

    def one_shard(*parts: jax.Array) -> Any:
        arguments: list[Any] = [None] * len(args)
        for number, part in zip(given, parts, strict=True):
            arguments[number] = part
        with on_mesh(None):
            return call(*arguments)

    run = jax.shard_map(
        one_shard, mesh=mesh, in_specs=tuple(specs[n] for n in given), out_specs=out_specs, check_vma=False
    )
    return run(*(args[n] for n in given))


Function = TypeVar("Function", bound=Callable[..., Any])
SpecOf = Callable[[tuple[Any, ...], jax.Array], PartitionSpec]


def _run_by_shards(function: Callable[..., Any], args: tuple[Any, ...], spec_of: SpecOf, out_specs: Any) -> Any:
    """Runs `function` on each device's part of the arrays in `args`; other leaves stay.

    `spec_of` tells of an array at a path of the arguments how it is divided.
    """
    with_paths, structure = jax.tree_util.tree_flatten_with_path(args)
    arrays = {n: (path, leaf) for n, (path, leaf) in enumerate(with_paths) if isinstance(leaf, jax.Array)}

    def one_shard(*parts: jax.Array) -> Any:
        own = dict(zip(arrays, parts, strict=True))
        leaves = [own.get(number, leaf) for number, (_, leaf) in enumerate(with_paths)]
        return function(*jax.tree.unflatten(structure, leaves))

    specs = tuple(spec_of(*each) for each in arrays.values())
    return per_shard(one_shard, tuple(leaf for _, leaf in arrays.values()), specs, out_specs)


def replicated_on_mesh(function: Function) -> Function:
    """Decorates a function of arrays that are on all devices of a mesh: each computes all of it.

    XLA would divide what is in its loops, so that devices exchange in each turn, and pools that it returns.
    """

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        mesh = mesh_in_use()
        call = partial(function, **options)
        if mesh is None or mesh.size == 1:
            return call(*args)
        return _run_by_shards(call, args, lambda path, array: REPLICATED, REPLICATED)

    return run  # type: ignore[return-value]


def heads_on_each_device(names: tuple[str, ...]) -> Callable[[Function], Function]:
    """Decorates attention that is no op: each device of a mesh computes its heads.

    It takes queries and keys first, and returns its output and the pool.

    `names` are those of `shard_by_heads`.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any) -> Any:
            mesh = mesh_in_use()
            if mesh is None or mesh.size == 1:
                return function(*args)
            specs = _specs_of(args[0].shape[1], args[1].shape[1], mesh)
            spec_of = partial(_spec_of, names, specs=specs)
            return _run_by_shards(function, args, spec_of, (specs["q"], specs["pool"]))

        return run  # type: ignore[return-value]

    return decorate


@dataclass(frozen=True)
class _ShardedCall:
    """A call of an op without its arrays: all that decides how it is traced.

    Attributes:
        op: Name of the op.
        structure: Tree of the positional arguments. It holds the static fields of `AttentionArgs`.
        specs: How each array is divided, in the order of the tree's leaves.
        out_specs: How the results are divided.
        options: Keyword arguments of the call.
        mesh: Devices that the call is traced for.
        traced_for: Selection of implementations, as :func:`registry.selection_key` has it.
    """

    op: str
    structure: jax.tree_util.PyTreeDef
    specs: tuple[PartitionSpec, ...]
    out_specs: Any
    options: tuple[tuple[str, Any], ...]
    mesh: Mesh | None
    traced_for: Any

    def __call__(self, *arrays: jax.Array) -> Any:
        return registry.call(self.op, *jax.tree.unflatten(self.structure, arrays), **dict(self.options))


@partial(jax.jit, static_argnums=0)
def _layer(call: _ShardedCall, *arrays: jax.Array) -> Any:
    """Runs `call` by shards.

    As a function of its own it is traced and lowered once, however many layers there are.
    """
    return per_shard(call, arrays, call.specs, call.out_specs)


def shard_by_heads(
    op: str, names: tuple[str, ...], *, divides_tokens: bool = False, divides_rows: bool = False
) -> None:
    """Registers an implementation of attention `op` that runs it on each device's heads.

    The partitioner cannot look into a kernel, and for some platforms it does not even copy one to all devices. One
    head of keys and values is on every device, for its query heads. Where heads do not divide else, every device
    computes all of them. The first result is divided as q, and the second one, where there is a pool, as that.

    Args:
        op: Name of the op.
        names: Names of its positional arrays, the first three of them q, k and v; `AttentionArgs` follow.
        divides_tokens: Inside of :func:`tokens_divided` the first three arrays and the output are divided by token.
        divides_rows: Axis 0 of q, k, v, the mask and the result is the batch, which the axis ``data`` divides.
    """

    def sharded(*args: Any, **options: Any) -> Any:
        mesh = mesh_in_use()
        token_mesh = mesh if divides_tokens and _TOKENS_DIVIDED.get() else None
        if token_mesh is not None:
            args = (*(by_token(array, token_mesh) for array in args[:3]), *args[3:])
        with_paths, structure = jax.tree_util.tree_flatten_with_path(args)
        heads, kv_heads, num_rows = args[0].shape[1], args[1].shape[1], args[0].shape[0]
        specs = _specs_of(heads, kv_heads, mesh)
        in_specs = tuple(_spec_of(names, path, array, specs) for path, array in with_paths)
        out_specs: Any = (specs["q"], specs["pool"]) if "pool" in names else specs["q"]
        if divides_rows and row_axis(num_rows, mesh) is not None:
            in_specs = tuple(
                _by_row(spec) if array.ndim == 4 and array.shape[0] == num_rows else spec
                for spec, (_, array) in zip(in_specs, with_paths, strict=True)
            )
            out_specs = _by_row(out_specs)
        keywords = tuple(sorted(options.items()))
        call = _ShardedCall(op, structure, in_specs, out_specs, keywords, mesh, registry.selection_key())
        results = _layer(call, *(array for _, array in with_paths))
        return results if token_mesh is None else (by_token(results[0], token_mesh), *results[1:])

    registry.register(
        op, NAME, registry.PLATFORMS, unsupported_reason=_attention_unsupported_reason, takes_precedence=True
    )(sharded)


def shard_states_by_heads(
    op: str, specs: tuple[PartitionSpec, ...], grouped: tuple[int, ...], *, are_channels: bool = False
) -> None:
    """Registers an implementation of a recurrent `op` that runs on each accelerator's heads.

    States, ``[rows, heads, ...]``, are divided as `state_spec` says; where their heads do not divide, every device
    computes all of them.

    Args:
        op: Name of the op, whose results are divided as its pool is.
        specs: How its positional arrays are divided, the pool last; the segments that follow are on every device.
        grouped: Positions of arrays ``[tokens, groups, ...]`` that several heads share. They are repeated for each head
            if the groups do not divide.
        are_channels: Whether the heads are channels, for each of which that would be too much: groups are then repeated
            until they divide.
    """

    def sharded(*args: Any, **options: Any) -> Any:
        mesh, given, heads = mesh_in_use(), list(args), args[len(specs) - 1].shape[1]
        divides, shards = divides_heads(heads, heads, mesh), 1 if mesh is None else mesh.shape.get(AXIS, 1)
        for number in grouped:
            groups = given[number].shape[1]
            if divides and not divides_heads(groups, groups, mesh):
                times = shards // math.gcd(groups, shards) if are_channels else heads // groups
                given[number] = jnp.repeat(given[number], times, axis=1)
        with_paths, structure = jax.tree_util.tree_flatten_with_path(tuple(given))
        numbers = [path[0].idx for path, _ in with_paths]
        in_specs = tuple(specs[n] if divides and n < len(specs) else REPLICATED for n in numbers)
        out_specs = (BY_AXIS_1, BY_AXIS_1) if divides else (REPLICATED, REPLICATED)
        keywords = tuple(sorted(options.items()))
        call = _ShardedCall(op, structure, in_specs, out_specs, keywords, mesh, registry.selection_key())
        return _layer(call, *(array for _, array in with_paths))

    registry.register(
        op, f"{NAME}-kernel", ("gpu", "tpu"), unsupported_reason=_states_unsupported_reason, takes_precedence=True
    )(sharded)


def _states_unsupported_reason(*args: Any, **kwargs: Any) -> str | None:
    mesh = mesh_in_use()
    return "no mesh of several devices" if mesh is None or mesh.size == 1 else None


def leave_to_partitioner(op: str, reference: Callable[..., Any]) -> None:
    """Registers the `reference` of `op` for meshes on CPUs, where XLA divides it.

    A kernel would be given all of its operands on every device.
    """
    registry.register(op, NAME, ("cpu",), unsupported_reason=_product_unsupported_reason, takes_precedence=True)(
        reference
    )


def _product_unsupported_reason(*args: Any, **kwargs: Any) -> str | None:
    return "no mesh" if mesh_in_use() is None else None


def _specs_of(heads: int, kv_heads: int, mesh: Mesh | None) -> Mapping[str, PartitionSpec]:
    """Returns how the arrays are divided, by name or field."""
    if divides_heads(heads, kv_heads, mesh):
        return _SPECS
    if kv_heads == 1 and divides_heads(heads, heads, mesh):
        return {**_SPECS, **dict.fromkeys(("k", "v", "pool", "kv_scales"), REPLICATED)}
    return dict.fromkeys(_SPECS, REPLICATED)


def _spec_of(
    names: tuple[str, ...], path: tuple[Any, ...], array: jax.Array, specs: Mapping[str, PartitionSpec]
) -> PartitionSpec:
    """Returns how the array at `path` of the arguments is divided."""
    index = path[0].idx
    name = names[index] if index < len(names) else path[1].name
    if name == "mask" and array.shape[1] == 1:  # one mask for all heads
        return REPLICATED
    if name == "distance_biases" and path[2].name == "profiles":
        return REPLICATED
    return specs[name]


_SPECS = {
    **dict.fromkeys(("q", "k", "v", "pool", "mask", "distance_biases", "position_biases", "token_sinks"), BY_AXIS_1),
    **dict.fromkeys(("sinks", "alibi_slopes", "kv_scales"), BY_AXIS_0),
    **dict.fromkeys(("page_table", "lens", "starts", "kv_lens", "cu_q_lens", "prefix_lens", "sees_until"), REPLICATED),
    **dict.fromkeys(("rows", "taken", "entries", "entry_rows"), REPLICATED),
}
"""Division of each array of an attention op, by its name or its field in `AttentionArgs`."""
SUPPORTED_ARGS = frozenset({"window", "softcap", "value_begin"}) | _SPECS.keys()
"""Fields of `AttentionArgs` that can be divided; static ones need no division."""
