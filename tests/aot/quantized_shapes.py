"""Products with quantized weights, compiled for TPUs and GPUs that need not be there."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from model_adapters.ops import linear, on_platform, registry
from model_adapters.ops.compressed_weight import substituted
from model_adapters.ops.quantized_weight import FP4_DOUBLED, NF4, QuantizedWeight, Scheme, take_rows

OUT, IN, ROWS = 7168, 8192, 64
"""Gate and up of Llama 3 70B on one of eight chips, and rows of activations."""
FP4 = tuple(map(float, FP4_DOUBLED))


@dataclasses.dataclass(frozen=True)
class Form:
    """Dtype of the numbers, columns of a group (None: a row), activations, a table, offsets."""

    values: str
    group: int | None = None
    act_dtype: str = "none"
    table: tuple[float, ...] | None = None
    has_offset: bool = False

    @property
    def bits(self):
        return 4 if self.values.endswith("int4") else 8


FORMS = {
    "int8 by row": Form("int8"),
    "int8 by 128": Form("int8", 128),
    "int4 by row": Form("int4"),
    "int4 by 128": Form("int4", 128),
    "int4 by 32": Form("int4", 32),
    "uint4 by 128 with offsets": Form("uint4", 128, has_offset=True),
    "fp4 by 32": Form("uint4", 32, table=FP4),
    "nf4 by 64": Form("uint4", 64, table=NF4),
    "int8 by row, int8 activations": Form("int8", act_dtype="int8"),
    "fp8 by row": Form("float8_e4m3fn"),
    "fp8 by row, fp8 activations": Form("float8_e4m3fn", act_dtype="float8_e4m3fn"),
}


def weight_of(form, mesh, *, out=OUT, columns=IN):
    """The weight as shapes without values, input-major."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def array(dtype, *sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype), sharding=everywhere)

    group = form.group or columns
    scale = array("float32", columns // group, out)
    scheme = Scheme(form.bits, group, form.act_dtype, layout="input-major", table=form.table)
    return QuantizedWeight(array(form.values, columns, out), scale, scale if form.has_offset else None, None, scheme)


def compile_product(form, mesh, platform, *, rows=ROWS, implementation=None, options=None, **sizes):
    """``linear`` compiled for a device of `mesh`, and the implementation that was chosen."""
    weight = weight_of(form, mesh, **sizes)
    x = jax.ShapeDtypeStruct((rows, weight.num_columns), jnp.bfloat16, sharding=weight.values.sharding)

    def call(x, weight):
        with substituted({"w": weight}) as arrays:
            return linear(x, arrays["w"])

    chosen = [] if implementation is None else [registry.use("linear", implementation)]
    with jax.set_mesh(mesh), on_platform(platform), registry.record_calls() as calls:
        for each in chosen:
            each.__enter__()
        try:
            traced = jax.jit(call).trace(x, weight)
        finally:
            for each in chosen:
                each.__exit__(None, None, None)
        name = {"gpu": "cuda"}.get(platform, platform)
        compiled = traced.lower(lowering_platforms=(name,)).compile(options)
    ((_, found),) = calls
    return compiled, found


def compile_lookup(form, mesh, platform):
    """A lookup of `ROWS` rows in a table of that form."""
    weight = weight_of(form, mesh)
    indices = jax.ShapeDtypeStruct((ROWS,), jnp.int32, sharding=weight.values.sharding)
    with jax.set_mesh(mesh), on_platform(platform):
        name = {"gpu": "cuda"}.get(platform, platform)
        return jax.jit(take_rows).trace(weight, indices).lower(lowering_platforms=(name,)).compile()


def bytes_of(form, *, out=OUT, columns=IN):
    """Bytes of the weight's parts."""
    groups = columns // (form.group or columns)
    return out * columns * form.bits // 8 + 4 * out * groups * (2 if form.has_offset else 1)
