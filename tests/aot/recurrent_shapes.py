"""Calls of recurrent layers, and their compilation for TPU chips that need not be there."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from model_adapters.ops import (
    Segments,
    gated_delta_rule,
    linear_recurrence,
    on_platform,
    selective_scan,
    state_space,
    use,
)


@dataclass(frozen=True)
class LayerShape:
    """A call of a recurrent layer: dtype of its operands, segments, tokens, and rows of the pool of states."""

    dtype: str = "bfloat16"
    num_segments: int = 32
    num_tokens: int = 32
    num_rows: int = 65


@dataclass(frozen=True)
class DeltaShape(LayerShape):
    """A call of the gated delta rule: heads of states [dim, width], tokens and segments."""

    key_heads: int = 16
    heads: int = 32
    dim: int = 128
    width: int = 128
    by_column: bool = False

    op = "gated_delta_rule"

    def __str__(self):
        kind = "decays by column" if self.by_column else "decays by head"
        sizes = f"{self.heads} heads of {self.dim}x{self.width}, {self.key_heads} of keys"
        return f"{sizes}, {self.num_segments} rows, {self.num_tokens} tokens, {self.dtype}, {kind}"

    @property
    def group(self):
        return self.heads // self.key_heads

    @property
    def pool(self):
        return (self.num_rows, self.heads, self.dim, self.width)

    def operands(self, array):
        by_key = array(self.dtype, self.num_tokens, self.key_heads, self.dim)
        gates = (self.num_tokens, self.heads)
        decays = array(jnp.float32, *gates, self.dim) if self.by_column else array(jnp.float32, *gates)
        return by_key, by_key, array(self.dtype, *gates, self.width), decays, array(self.dtype, *gates)

    def run(self, operands, pool, segments):
        return gated_delta_rule(*operands, pool, segments, is_normed=True)


@dataclass(frozen=True)
class SpaceShape(LayerShape):
    """A call of the state space layer: heads of states [dim, states], tokens and segments."""

    heads: int = 64
    dim: int = 64
    groups: int = 8
    states: int = 128

    op = "state_space"

    def __str__(self):
        sizes = f"{self.heads} heads of {self.dim}x{self.states}, {self.groups} groups"
        return f"{sizes}, {self.num_segments} rows, {self.num_tokens} tokens, {self.dtype}"

    @property
    def group(self):
        return self.heads // self.groups

    @property
    def pool(self):
        return (self.num_rows, self.heads, self.dim, self.states)

    def operands(self, array):
        by_head = array(jnp.float32, self.heads)
        x, dt = (array(self.dtype, self.num_tokens, self.heads, *rest) for rest in ((self.dim,), ()))
        by_group = array(self.dtype, self.num_tokens, self.groups, self.states)
        return x, dt, by_head, by_group, by_group, by_head, by_head

    def run(self, operands, pool, segments):
        return state_space(*operands, pool, segments)


@dataclass(frozen=True)
class ScanShape(LayerShape):
    """A call of the selective scan: channels of states [states], tokens and segments."""

    channels: int = 8192
    states: int = 16
    groups: int = 1

    op = "selective_scan"

    def __str__(self):
        sizes = f"{self.channels} channels of {self.states}, {self.groups} groups"
        return f"{sizes}, {self.num_segments} rows, {self.num_tokens} tokens, {self.dtype}"

    @property
    def pool(self):
        return (self.num_rows, self.channels, self.states)

    def operands(self, array):
        x, dt = (array(dtype, self.num_tokens, self.channels) for dtype in (self.dtype, jnp.float32))
        by_group = array(self.dtype, self.num_tokens, self.groups, self.states)
        by_channel = array(jnp.float32, self.channels)
        return x, dt, array(jnp.float32, self.channels, self.states), by_group, by_group, by_channel

    def run(self, operands, pool, segments):
        return selective_scan(*operands, pool, segments)


@dataclass(frozen=True)
class RecurrenceShape(LayerShape):
    """A call of the linear recurrence: channels, tokens and segments."""

    channels: int = 2560

    op = "linear_recurrence"

    def __str__(self):
        return f"{self.channels} channels, {self.num_segments} rows, {self.num_tokens} tokens, {self.dtype}"

    @property
    def pool(self):
        return (self.num_rows, self.channels)

    def operands(self, array):
        by_token = array(self.dtype, self.num_tokens, self.channels)
        return by_token, by_token

    def run(self, operands, pool, segments):
        return linear_recurrence(*operands, pool, segments)


def arguments(shape, mesh, pool_spec=PartitionSpec()):  # noqa: B008
    """Abstract operands, pool and segments of a call on `mesh`, all but the pool on every device."""

    def array(dtype, *sizes):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    ints, size = array(jnp.int32, shape.num_segments), shape.num_segments
    segments = Segments(array(jnp.int32, size + 1), ints, ints, array(jnp.bool_, size), ints)
    pool = jax.ShapeDtypeStruct(shape.pool, jnp.float32, sharding=NamedSharding(mesh, pool_spec))
    return shape.operands(array), pool, segments


def compile_recurrent(shape, mesh, kernel="tpu-pallas"):
    """The op on `shape`, compiled for one core of `mesh` with its pool donated."""
    with jax.set_mesh(mesh), on_platform("tpu"), use(shape.op, kernel):
        call = jax.jit(shape.run, donate_argnums=1)
        return call.trace(*arguments(shape, mesh)).lower().compile()


def pool_bytes(shape):
    """Bytes of the pool as it lies in memory, whose tiles are 8 rows of 128; channels of scans are columns there."""
    *rows, dim, width = shape.pool
    if shape.op == "selective_scan":
        dim, width = width, dim
    return math.prod(rows) * (dim + -dim % 8) * (width + -width % 128) * 4
