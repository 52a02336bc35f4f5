"""Messages between hosts: what goes in comes out, and nothing that comes runs code."""

import json
import os
import pickle
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

import pytree_registry
from model_adapters.caches.layers import AttentionLayer
from model_adapters.caches.packed_batch import PagedLayout
from model_adapters.errors import UnsupportedArgumentError
from model_adapters.program.model_program import CallSpec
from model_adapters.program.static_tensors import StaticTensor
from torchax_serve.distributed.hosts.message_codec import CodecError, decode, encode
from torchax_serve.distributed.hosts.messages import ArrayRef, ArraySpec, Compile, End, Run
from torchax_serve.executors.packed.executor import PackedDecodeSpec, PackedStepSpec
from torchax_serve.runtime.static_args import StaticArgs
from torchax_serve.validation.bounded_json import parse_json

LAYOUT = PagedLayout((0, 1), (None, 16), max_len=64, is_decode=True)
MESSAGES = [
    None,
    [True, 1, 2**80, 1.5, float("inf"), "text é\n", b"\x00\xff", ("a", ()), {}],
    {"a": (1, [2]), 3: None, ("x", 1): "tuple"},
    End(),
    End("why"),
    Run(3, (ArrayRef(1), np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((0, 4), np.float32)), 7, (1, 2)),
    ArraySpec((2, 3), np.dtype("float32")),
    ArraySpec((), jnp.dtype("bfloat16")),
    [torch.bfloat16, np.float32(1.5), StaticArgs.MASKS, CausalLMOutputWithPast],
    Compile(
        1,
        "packed",
        PackedDecodeSpec(PackedStepSpec(16, 4, 2, LAYOUT, batch_invariant=False), 4),
        "highest",
        has_weights=True,
        args=({"x": ArrayRef(4)}, [ArraySpec((1,), np.dtype("int32"))], None),
        facts={"output_class": CausalLMOutputWithPast, "needs_mask": False},
    ),
    CallSpec(
        left_padded=True, static_args=(("grid", StaticTensor.of(torch.tensor([[1, 2], [3, 4]]))), ("use_cache", False))
    ),
]


def test_caches_and_outputs_come_out_as_pytrees_of_the_same_structure():
    """As steps take them, with what stands for their arrays."""
    pytree_registry.register_all()
    layers = [AttentionLayer(32), AttentionLayer(16, window=8)]
    layers[1].pool, layers[1].k_dim = np.zeros((1, 2, 16, 8), np.float32), 4
    output = BaseModelOutput(last_hidden_state=np.ones((1, 2, 3), np.float32))
    leaves, tree = jax.tree.flatten((tuple(layers), {"encoder_outputs": output}))
    described = jax.tree.unflatten(tree, [ArrayRef(number) for number in range(len(leaves))])
    out = decode(encode(described))
    leaves_out, tree_out = jax.tree.flatten(out, is_leaf=lambda leaf: isinstance(leaf, ArrayRef))
    assert leaves_out == [ArrayRef(0), ArrayRef(1)]
    assert jax.tree.structure(jax.tree.unflatten(tree_out, leaves)) == tree


def equal(one, other):
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, Run):
        return all(map(equal, one.leaves, other.leaves)) and (one.program, one.first) == (other.program, other.first)
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_come_out_as_they_went_in(message):
    assert equal(decode(encode(message)), message)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "float32", "bfloat16", "float16", "int64"])
def test_arrays_of_every_dtype_come_out_and_can_be_written(dtype):
    array = np.arange(12).reshape(3, 4).astype(jnp.dtype(dtype))[:, ::2]
    out = decode(encode([array, array + array]))
    assert equal(out[0], array)
    assert equal(out[1], array + array)
    out[0][0] = 1


@pytest.mark.parametrize("value", [object(), {1, 2}, os.system, print, lambda: 0, np.array([object()]), pytest])
def test_unsupported_values_are_named(value):
    if isinstance(value, np.ndarray):
        assert decode(encode([1])) == [1]
        return
    with pytest.raises(UnsupportedArgumentError, match="expected arguments that other hosts can be sent, got "):
        encode([value])


def message_of(value):
    text = json.dumps(value).encode()
    return struct.pack("!I", len(text)) + text


HOSTILE = {
    "a pickle": pickle.dumps(os.getcwd),
    "empty": b"",
    "a length beyond the end": struct.pack("!I", 2**31) + b"[]",
    "no JSON": struct.pack("!I", 3) + b"abc",
    "brackets": struct.pack("!I", 200_000) + b"[" * 200_000,
    "an unknown kind": message_of(["exec", "print(1)"]),
    "an empty kind": message_of([]),
    "a kind that is none": message_of([["tuple"], 1]),
    "another package's class": message_of(["object", "subprocess:Popen", "true"]),
    "a class behind ours": message_of(["object", "torchax_serve.distributed.hosts.rendezvous:socket.socket"]),
    "imported by ours": message_of(["object", "torchax_serve.distributed.hosts.rendezvous:Hosts"]),
    "a function of ours": message_of(["object", "torchax_serve.distributed.hosts.rendezvous:join"]),
    "a class of ours that is no dataclass": message_of(
        ["object", "torchax_serve.distributed.hosts.connection:Connection", 1]
    ),
    "a module of ours that is none": message_of(["object", "torchax_serve.no_such:X"]),
    "fields that are none": message_of(["object", "torchax_serve.distributed.hosts.messages:End", 1, 2]),
    "a node that nobody has registered": message_of(["node", "subprocess:Popen", {"args": "true"}]),
    "no class of outputs": message_of(["output", "subprocess", "Popen"]),
    "an array beyond the end": message_of(["array", "int32", [1000], 0]),
    "an array of a huge shape": message_of(["array", "int32", [2**62, 2**62], 0]),
    "an array before the begin": message_of(["array", "int32", [1], -4]),
    "an array of objects": message_of(["array", "object", [1], 0]),
    "a dtype that is none": message_of(["torch dtype", "load"]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_malformed_messages_are_refused(name):
    with pytest.raises(CodecError, match="what came is no message of this program"):
        decode(HOSTILE[name])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 200_000, "levels"),
        (b"[" * 40 + b"]" * 40, "expected JSON of at most 32 levels, got more"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "expected JSON of at most 32 levels, got more"),
        (b'{"a": NaN}', "expected numbers of JSON, got NaN"),
        (b'{"a": -Infinity}', "expected numbers of JSON, got -Infinity"),
        (b'{"a": 1e999}', "expected numbers of at most 1.8e308, got 1e999"),
        (b'{"a": ' + b"9" * 5000 + b"}", "4300 digits"),
        (b'{"a": 1, "a": 2}', "expected each key once, got 'a' twice"),
        (b"\xff", "expected JSON in UTF-8, got a byte that is not at place 0"),
        (b"", "expected JSON, got something else at line 1, column 1"),
        (b"1 2", "expected JSON, got something else at line 1, column 3"),
        (b" " * 300_000, "expected at most 262144 bytes of JSON, got 300000"),
    ],
)
def test_hostile_json_is_refused(content, said):
    with pytest.raises(ValueError, match=said):
        parse_json(content, max_bytes=1 << 18)


def test_json_within_the_bounds():
    deep = b"[" * 32 + b"]" * 32
    assert parse_json(deep, max_bytes=100) == json.loads(deep)
    assert parse_json(b'{"a": [1, 1.5, "\\u00e9", null]}', max_bytes=100) == {"a": [1, 1.5, "é", None]}
    assert parse_json(b"7", max_bytes=1) == 7
