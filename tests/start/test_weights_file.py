"""The file of weights: read by the safetensors library, and mapped as it was written."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from model_adapters.ops.compressed_weight import compress_weight
from model_adapters.ops.cpu import ffi
from model_adapters.ops.cpu.huge_pages import move_into_huge_pages
from model_adapters.ops.quantized_weight import QuantizedWeight, Scheme
from torchax_serve.start.weights_file import PADDING, NotStorableError, file_of, mapped, named_tensors


def written(path, weights):
    names, tensors = named_tensors(weights)
    num_bytes, pieces = file_of(tensors)
    path.write_bytes(b"".join(pieces))
    assert path.stat().st_size == num_bytes
    return names


@pytest.fixture
def weights():
    table = jax.random.normal(jax.random.key(0), (64, 64), jnp.bfloat16)
    odd = jnp.arange(15, dtype=jnp.float32).reshape(3, 5)
    found = {"table": table, "tied": table, "odd": odd, "number": jnp.int32(7), "empty": jnp.zeros((0, 4))}
    scheme = Scheme(bits=8, group=64, dtype="float32")
    found["quantized"] = QuantizedWeight(table.astype(jnp.float8_e4m3fn), jnp.ones((64, 1)), None, None, scheme)
    if ffi.packing_unsupported_reason() is None:
        found["packed"] = compress_weight(table, keeps_plain=True)
    return found


def test_the_weights_are_those_that_were_stored(weights, tmp_path):
    again, _ = mapped(tmp_path / "w", written(tmp_path / "w", weights))
    assert again.keys() == weights.keys()
    assert jax.tree.structure(again) == jax.tree.structure(weights)
    for old, new in zip(jax.tree.leaves(weights), jax.tree.leaves(again), strict=True):
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        np.testing.assert_array_equal(np.asarray(new), np.asarray(old))


def test_what_was_shared_is_shared(weights, tmp_path):
    again, _ = mapped(tmp_path / "w", written(tmp_path / "w", weights))
    assert again["tied"] is again["table"]
    if "packed" in again:
        assert again["packed"].plain is again["table"]


def test_arrays_lie_in_the_mapped_file(weights, tmp_path):
    again, _ = mapped(tmp_path / "w", written(tmp_path / "w", weights))
    size = sum(array.nbytes for array in {id(x): x for x in jax.tree.leaves(again)}.values() if array.nbytes)
    begins = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(again) if array.nbytes]
    assert max(begins) - min(begins) < size + 64 * len(begins)
    assert all(begin % 64 == 0 for begin in begins)


def test_the_file_is_one_of_safetensors(weights, tmp_path):
    del weights["quantized"]  # the library has no float8 of NumPy
    written(tmp_path / "w", weights)
    arrays = load_file(tmp_path / "w")
    _, tensors = named_tensors(weights)
    assert {"table", "odd", "number", "empty"} <= tensors.keys()
    assert {name for name in arrays if not name.startswith(PADDING)} == tensors.keys()
    for name, leaf in tensors.items():
        np.testing.assert_array_equal(arrays[name].view(np.asarray(leaf).dtype), np.asarray(leaf))


def test_parts_of_weights_are_named_after_them(weights):
    names, tensors = named_tensors(weights)
    assert (names["tied"], names["quantized"].scale) == ("table", "quantized:scale")
    assert {"quantized:values", "quantized:scale"} <= tensors.keys()
    assert "tied" not in tensors


def test_a_dtype_that_the_format_lacks(tmp_path):
    with pytest.raises(NotStorableError, match="int4"):
        file_of({"w": jnp.zeros((4, 4), jnp.int4)})


def test_a_file_that_is_too_short(weights, tmp_path):
    names = written(tmp_path / "w", weights)
    (tmp_path / "w").write_bytes((tmp_path / "w").read_bytes()[:-64])
    with pytest.raises(OSError, match="too short"):
        mapped(tmp_path / "w", names)


def test_pages_are_exchanged_while_others_read(tmp_path):
    weights = {"w": jax.random.normal(jax.random.key(1), (4 << 20,))}
    again, content = mapped(tmp_path / "w", written(tmp_path / "w", weights))
    address, expected = again["w"].unsafe_buffer_pointer(), float(jnp.sum(weights["w"]))
    wrong, is_done = [], threading.Event()

    def read():
        while not is_done.is_set():
            if float(jnp.sum(again["w"])) != expected:
                wrong.append(True)

    reader = threading.Thread(target=read)
    reader.start()
    moved = move_into_huge_pages(content)
    is_done.set()
    reader.join()
    assert not wrong
    assert moved == 0 or moved > content.nbytes - (4 << 20)
    assert again["w"].unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(np.asarray(again["w"]), np.asarray(weights["w"]))
