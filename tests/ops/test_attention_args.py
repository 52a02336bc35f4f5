"""Every field of `AttentionArgs` is honoured or refused, by every implementation of every op that takes them."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from ops_oracle import assert_close, decode_case, exact_decode

from model_adapters import ops
from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import AttentionArgs, KVScales, on_platform, registry, spmd, use
from model_adapters.ops.attention_args import DistanceBiases
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache

NUM_SEQS, HEADS, GROUP, DIM, PAGE = 4, 2, 2, 64, 64
NUM_TOKENS = 600  # several blocks of dense queries
OPS = {
    "decode_attention": NUM_SEQS,
    "paged_attention": NUM_SEQS + 1,
    "dense_attention": None,
    "cross_attention": None,
    "varlen_attention": None,
}
"""Each op that takes `AttentionArgs`, and the length of the last of its arrays of integers."""
PLATFORM = {"gpu-triton": "gpu", "gpu-mosaic": "gpu", "tpu-pallas": "tpu"}
STATIC = {"scale": (0.5, 0.25), "window": (9, 21), "softcap": (3.0, 5.0), "value_begin": (0, None)}
ARRAYS = {
    "sinks": jax.ShapeDtypeStruct((HEADS * GROUP,), "float32"),
    "alibi_slopes": jax.ShapeDtypeStruct((HEADS * GROUP,), "float32"),
    "prefix_lens": jax.ShapeDtypeStruct((NUM_SEQS,), "int32"),
    "sees_until": jax.ShapeDtypeStruct((NUM_SEQS,), "int32"),
    "distance_biases": DistanceBiases(
        jax.ShapeDtypeStruct((NUM_SEQS, HEADS * GROUP, 3), "float32"), jax.ShapeDtypeStruct((3, 9), "float32")
    ),
    "position_biases": jax.ShapeDtypeStruct((NUM_SEQS, HEADS * GROUP, 7), "float32"),
    "token_sinks": jax.ShapeDtypeStruct((NUM_SEQS, HEADS * GROUP), "float32"),
    "kv_scales": KVScales(*[jax.ShapeDtypeStruct((HEADS,), "float32")] * 2),
}
"""A new field needs two values that give different programs here, or the shape and dtype of its array."""
FIELDS = [field.name for field in dataclasses.fields(AttentionArgs)]
IMPLEMENTATIONS = [
    pytest.param(op, each.name, id=f"{op}-{each.name}") for op in OPS for each in registry.find(op).implementations
]


def arrays_of(op, pool_dtype):
    def array(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype)

    if op == "dense_attention":
        return [array(1, heads, NUM_TOKENS, DIM) for heads in (HEADS * GROUP, HEADS, HEADS)] + [None]
    if op == "cross_attention":
        pages = [array(9, HEADS, PAGE, DIM)] * 2
        return [
            array(NUM_SEQS, HEADS * GROUP, DIM),
            *pages,
            array(NUM_SEQS, 2, dtype="int32"),
            array(NUM_SEQS, dtype="int32"),
        ]
    if op == "varlen_attention":
        keys = [array(HEADS, NUM_SEQS, DIM)] * 2
        return [array(NUM_SEQS, HEADS * GROUP, DIM), *keys, array(3, dtype="int32")]
    heads = [array(NUM_SEQS, number, DIM) for number in (HEADS * GROUP, HEADS, HEADS)]
    pool = array(9, HEADS, PAGE, 2 * DIM, dtype=pool_dtype)
    ints = [array(*shape, dtype="int32") for shape in ((NUM_SEQS, 2), (NUM_SEQS,), (OPS[op],))]
    return [*heads, pool, *ints]


def program(op, implementation, args):
    """The jaxpr of a call that `implementation` serves; raises InvalidArgumentError if it does not."""
    arrays = arrays_of(op, "bfloat16" if args.kv_scales is None else "int8")
    mesh = AbstractMesh((2,), ("model",)) if implementation == spmd.NAME else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(spmd.on_mesh(mesh))
        stack.enter_context(on_platform(PLATFORM.get(implementation, "cpu")))
        if mesh is None:  # else it takes precedence, and the shards choose for themselves
            stack.enter_context(use(op, implementation))
        with registry.record_calls() as calls:
            made = jax.make_jaxpr(lambda *given: getattr(ops, op)(*given))(*arrays, args)
    assert (op, implementation) in calls
    return made


def is_used(jaxpr, var):
    """Whether an equation of `jaxpr` takes `var`, also inside of the functions and shards that it calls."""
    for equation in jaxpr.eqns:
        places = [i for i, other in enumerate(equation.invars) if other is var]
        inner = getattr(equation.params.get("jaxpr"), "jaxpr", equation.params.get("jaxpr"))
        if places and (inner is None or len(inner.invars) != len(equation.invars)):
            return True  # an operation, or a kernel
        if any(is_used(inner, inner.invars[i]) for i in places):
            return True
    return False


def honours(op, implementation, field):
    """Whether the program depends on the field; raises InvalidArgumentError if the implementation does not take it."""
    if field in STATIC:
        one, other = (
            program(op, implementation, dataclasses.replace(AttentionArgs(1.0), **{field: value}))
            for value in STATIC[field]
        )
        return str(one) != str(other)
    # Nothing but its array differs, so that the last inputs are the field's.
    made = program(op, implementation, dataclasses.replace(AttentionArgs(1.0), **{field: ARRAYS[field]}))
    inputs = made.jaxpr.invars[-len(jax.tree.leaves(ARRAYS[field])) :]
    return all(is_used(made.jaxpr, var) for var in inputs)


def test_every_field_has_a_value_here():
    assert {*STATIC, *ARRAYS} == {*FIELDS}


def test_every_op_with_attention_args_is_checked():
    assert {op.name for op in ops.list_ops() if op.name.endswith("attention")} == {*OPS}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(("op", "implementation"), IMPLEMENTATIONS)
def test_fields_are_honoured_or_refused(op, implementation, field):
    try:
        honoured = honours(op, implementation, field)
    except InvalidArgumentError as error:
        assert f"{field} is not implemented" in str(error)
        assert field != "scale"
        return
    assert honoured


@pytest.mark.parametrize("op", ["decode_attention", "paged_attention"])
@pytest.mark.parametrize("field", FIELDS)
def test_references_of_paged_ops_take_every_field(op, field):
    if (op, field) == ("decode_attention", "sees_until"):  # nothing is behind the newest token
        with pytest.raises(InvalidArgumentError, match="expected args without sees_until"):
            honours(op, "reference", field)
        return
    assert honours(op, "reference", field)


def test_a_field_that_a_kernel_lacks_goes_to_the_reference():
    args = AttentionArgs(1.0, window=9, prefix_lens=ARRAYS["prefix_lens"])
    with registry.record_calls() as calls, registry.fallbacks() as reasons:
        jax.eval_shape(ops.decode_attention, *arrays_of("decode_attention", "bfloat16"), args)
    assert calls == {("decode_attention", "reference")}
    assert reasons == ["decode_attention, cpu-ffi: prefix_lens is not implemented"]


def test_attention_without_a_kernel_is_reported_once_for_each_function(caplog):
    args = AttentionArgs(1.0, prefix_lens=ARRAYS["prefix_lens"])
    arrays = [jnp.zeros(each.shape, each.dtype) for each in arrays_of("decode_attention", "bfloat16")]
    prefix_lens = jnp.zeros(args.prefix_lens.shape, args.prefix_lens.dtype)

    def run(weights, *arrays, spec):
        given = AttentionArgs(1.0, prefix_lens=arrays[-1] if spec else None)
        return ops.decode_attention(*arrays[:-1], given)

    programs = ExecutableCache()
    step = CachedFunction(programs, "a step", run, is_pure=True)
    step({}, *arrays, prefix_lens, spec=False)
    assert not caplog.messages  # it has a kernel
    for spec in ("one program", "another"):
        step({}, *arrays, prefix_lens, spec=spec)
    programs.close()
    assert caplog.messages == [
        "a step: attention goes through XLA's own operations and is slower: "
        "decode_attention, cpu-ffi: prefix_lens is not implemented"
    ]


def test_a_prefix_is_seen_behind_the_window_of_a_decode_step():
    case = decode_case(batch=4, lens=(40, 3, 20, 0), window=5, sinks=True, page=16)
    case.options["prefix_lens"] = jnp.asarray((7, 9, 0, 3), jnp.int32)
    out, pool = ops.decode_attention(*case.args)
    expected, expected_pool = exact_decode(case)
    assert_close(out, expected)
    np.testing.assert_array_equal(np.asarray(pool, np.float64), expected_pool)


def test_static_fields_are_part_of_the_tree_and_arrays_are_its_leaves():
    args = AttentionArgs(0.5, 9, None, sinks=jnp.zeros(4), kv_scales=KVScales(jnp.ones(2), jnp.ones(2)))
    leaves, structure = jax.tree.flatten(args)
    assert [leaf.shape for leaf in leaves] == [(4,), (2,), (2,)]
    assert structure != jax.tree.structure(dataclasses.replace(args, window=10))
    assert structure == jax.tree.structure(jax.tree.map(lambda leaf: leaf + 1, args))
