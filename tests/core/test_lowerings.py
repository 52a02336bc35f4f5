"""Torch operators that are lowered here, beside torch itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from model_adapters.bridge.extract import extract_jax
from model_adapters.bridge.traced_length import TracedLength
from model_adapters.bridge.views import jax_view, to_jax_array, to_torch_tensor, torch_mode, torch_view
from model_adapters.errors import UnsupportedModelError
from model_adapters.lowerings import install
from model_adapters.program import moe
from model_adapters.program.moe import group_ends, route_and_combine

pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")


def traced(function, *arrays):
    """`function` over torch views, under jit."""
    install.install()

    def run(*arrays):
        with torch_mode(torch.nn.Identity(), {}):
            return jax_view(function(*torch_view(arrays)))

    return to_torch_tensor(jax.jit(run)(*arrays))


def as_arrays(*tensors):
    return [jnp.asarray(x.float().numpy()).astype(str(x.dtype).removeprefix("torch.")) for x in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, "bool", "additive", "causal"])
@pytest.mark.parametrize("shape", [(2, 4, 5, 8), (4, 5, 8), (2, 3, 4, 5, 8)])
def test_attention(dtype, mask, shape):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    given = {"is_causal": mask == "causal"}
    if mask in ("bool", "additive"):
        seen = torch.rand(5, 5, generator=generator) < 0.6
        seen[:, 0] = True
        given["attn_mask"] = seen if mask == "bool" else torch.zeros(5, 5, dtype=dtype).masked_fill(~seen, -1e4)
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(q, k, v, **given)
    in_trace = {
        name: torch_view(jnp.asarray(x.numpy())) if name == "attn_mask" and x.dtype == torch.bool else x
        for name, x in given.items()
    }
    if mask == "additive":
        in_trace["attn_mask"] = torch_view(as_arrays(given["attn_mask"])[0])
    found = traced(lambda q, k, v: attend(q, k, v, **in_trace), *as_arrays(q, k, v))
    torch.testing.assert_close(found, expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "alpha", "in_place"), [(0, 1, False), (-1, 0.5, False), (1, 2, True)])
def test_index_add(dtype, dim, alpha, in_place):
    """With an index that is known on the host, as models compute it from the sizes of images."""
    generator = torch.Generator().manual_seed(0)
    x, source = (torch.randn(3, 3, generator=generator).to(dtype) for _ in range(2))
    index = torch.tensor([2, 0, 2])

    def add(x, source):
        if not in_place:
            return torch.index_add(x, dim, index, source, alpha=alpha)
        sums = x * 1
        sums.index_add_(dim, index, source, alpha=alpha)
        return sums

    found = traced(add, *as_arrays(x, source))
    torch.testing.assert_close(found, add(x, source), atol=1e-6 if dtype == torch.float32 else 2e-2, rtol=1e-5)


def test_attention_that_sees_nothing_is_zero():
    q = jnp.ones((1, 1, 2, 4))
    mask = jnp.array([[True, True], [False, False]])
    found = traced(
        lambda q, mask: torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask[None, None]), q, mask
    )
    np.testing.assert_array_equal(found[0, 0, 1], 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_type_as_leaves_the_tensor_alone(dtype):
    def run(x):
        y = x.transpose(0, 1)
        changed = x.type_as(torch.zeros(1, dtype=dtype)) + y.type_as(torch.zeros(1, dtype=dtype)).transpose(0, 1)
        assert changed.dtype == dtype
        return x

    assert traced(run, jnp.full((2, 3), 1.5)).dtype == torch.float32


def test_a_view_is_indexed_by_a_tensor():
    x = torch.arange(24.0).reshape(2, 3, 4)
    found = traced(lambda x, i: x.transpose(1, 2)[:, i, :], jnp.asarray(x.numpy()), jnp.array([2]))
    assert torch.equal(found, x.transpose(1, 2)[:, [2], :])


def test_tensors_of_the_host_are_constants():
    found = traced(lambda x: torch.full((3,), 2.0) * x + torch.tensor([1.0, 2.0, 3.0]), jnp.arange(3.0))
    assert found.tolist() == [1, 4, 7]


def test_stored_lengths():
    table = torch.arange(40).reshape(1, 40)

    def run(offset, table):
        past = TracedLength.of(jax_view(offset), 16)
        assert past > 0 and past != 0 and past
        assert (past == 0) is False
        assert (past + 3 > 19) is False
        positions = torch.arange(past, past + 3, dtype=torch.long, device=table.device)
        assert positions.shape == (3,)
        return positions * 100 + table[:, past : 3 + past][0]

    found = traced(run, jnp.int32(7), jnp.asarray(table.numpy()))
    assert found.tolist() == [707, 808, 909]


def test_stored_lengths_of_other_caches_are_not_taken_for_known():
    def run(a, b):
        a, b = TracedLength.of(jax_view(a), 16), TracedLength.of(jax_view(b), 16)
        assert a.distance(b + 2) is None
        assert (a + 1).distance(a + 4) == 3
        return a + b

    assert traced(run, jnp.int32(7), jnp.int32(8)).item() == 15


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x[1:4:2].masked_fill_(x[1:4:2] > 5, -1.0),
        lambda x: x[:, 1:].masked_fill_(torch.arange(6) > 1, -1.0),
        lambda x: x[1:3].clamp_(4, 9),
        lambda x: x[2][1:].masked_fill_(torch.arange(6) > 1, -1.0),
        lambda x: x[0, 1:].add_(3.0),
    ],
)
def test_writing_into_a_view_writes_into_what_is_viewed(write):
    def run(x):
        x = x * 1.0
        write(x)
        return x

    x = torch.arange(90.0).reshape(5, 3, 6)
    expected = run(x)
    torch.testing.assert_close(traced(run, jnp.asarray(x.numpy())), expected, atol=0, rtol=0)
    assert not torch.equal(expected, x)


WRITES = {
    "behind": lambda x, y: x.__setitem__((slice(None), slice(2, None)), y[:, 2:]),
    "within two axes": lambda x, y: x.__setitem__((slice(1, 3), slice(1, 4)), y[1:3, 1:4]),
    "broadcast": lambda x, y: x.__setitem__((..., slice(1, 3)), y[:1, :1]),
    "from the end": lambda x, y: x.__setitem__(slice(-2, None), y[:2]),
    "nothing": lambda x, y: x.__setitem__(slice(3, 3), y[:0]),
    "every second": lambda x, y: x.__setitem__(slice(None, None, 2), y[::2]),
    "a row": lambda x, y: x.__setitem__(1, y[0]),
    "all": lambda x, y: x.__setitem__(slice(None), y),
    "an integer": lambda x, y: x.__setitem__((slice(None), slice(1, 3)), 7),
}


@pytest.mark.parametrize("name", WRITES)
def test_values_are_written_into_slices(name):
    def run(x, y):
        x = x * 1.0
        WRITES[name](x, y)
        return x

    x, y = torch.arange(20.0).reshape(4, 5), -torch.arange(20.0).reshape(4, 5)
    torch.testing.assert_close(traced(run, *as_arrays(x, y)), run(x, y), atol=0, rtol=0)


def test_a_product_of_arrays_of_which_a_part_is_rotated_in_place():
    """Norms, a rotation of the later positions and the scores of attention: one program, as CogView4 has it."""

    def rotated(x):
        x = torch.nn.functional.layer_norm(x.transpose(1, 2), (4,))
        part = x[:, :, 16:]
        first, second = part.unflatten(-1, (2, 2)).unbind(-2)
        x[:, :, 16:] = part * 0.3 + torch.cat([-second, first], -1) * 0.7
        return x

    def scores(q, k):
        return rotated(q) @ rotated(k).transpose(2, 3)

    torch.manual_seed(0)
    q, k = (torch.randn(1, 32, 4, 4) for _ in range(2))
    torch.testing.assert_close(traced(scores, *as_arrays(q, k)), scores(q, k), atol=1e-4, rtol=0)


def test_flatten_counts_axes_from_the_end():
    x = torch.arange(90.0).reshape(5, 3, 6)
    found = traced(lambda x: x.flatten(0, -2), jnp.asarray(x.numpy()))
    assert torch.equal(found, x.flatten(0, -2))


@pytest.mark.parametrize("sorts", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_routed_experts(num_tokens, sorts, monkeypatch):
    if sorts:  # as on other platforms, and on a mesh
        monkeypatch.setattr(moe, "routes", lambda: False)
    generator = torch.Generator().manual_seed(0)
    x, ids = torch.randn(num_tokens, 8, generator=generator), torch.randint(0, 4, (num_tokens, 2), generator=generator)
    weights, matrices = torch.rand(num_tokens, 2, generator=generator), torch.randn(3, 8, 8, generator=generator)
    expected = torch.zeros_like(x)
    for token in range(num_tokens):
        for choice in range(2):
            expert = int(ids[token, choice])
            made = x[token] @ matrices[expert] if expert < 3 else x[token]
            expected[token] += weights[token, choice] * made

    def run(x, ids, weights, matrices):
        def experts(rows, product, of):
            return torch.where((of >= 3)[:, None], rows, product(rows, matrices, is_transposed=True))

        return route_and_combine(x, ids, weights, 3, experts)

    found = traced(run, *(jnp.asarray(y.numpy()) for y in (x, ids.int(), weights, matrices)))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_group_ends():
    assert traced(lambda ids: group_ends(ids, 3), jnp.array([[2, 0], [2, 5]])).tolist() == [1, 1, 3]


def test_extracted_functions_take_host_tensors():
    class Module(torch.nn.Module):
        def forward(self, x):
            return x + torch.arange(3)

    weights, function = extract_jax(Module())
    assert jax.jit(function)(weights, (jnp.zeros(3),)).tolist() == [0, 1, 2]


def test_integers_that_32_bits_do_not_hold_are_refused():
    with pytest.raises(UnsupportedModelError, match="got 4294967296 in a tensor of 64-bit ones"):
        to_jax_array(torch.tensor([1, 1 << 32]))
    assert to_jax_array(torch.tensor([-(1 << 31), (1 << 31) - 1])).tolist() == [-(1 << 31), (1 << 31) - 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_embedding(dtype, padding_idx):
    table = torch.randn(50, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids = torch.tensor([[0, 49, 3], [7, 7, 12]])
    embed = torch.nn.functional.embedding
    found = traced(lambda table: embed(torch_view(jnp.asarray(ids.numpy())), table, padding_idx), *as_arrays(table))
    assert torch.equal(found, embed(ids, table, padding_idx))


def test_embedding_has_its_gradient():
    install.install()
    table = jnp.asarray(np.random.default_rng(0).normal(size=(9, 4)), jnp.bfloat16)

    def total(table):
        with torch_mode(torch.nn.Identity(), {}):
            rows = torch.nn.functional.embedding(torch_view(jnp.asarray([2, 5, 2])), torch_view(table))
            return jax_view(rows).astype(jnp.float32).sum()

    expected = np.zeros((9, 4))
    expected[2], expected[5] = 2, 1
    np.testing.assert_array_equal(jax.grad(total)(table).astype(np.float32), expected)


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_a_loop_makes_no_other_table_of_an_embedding(padding_idx):
    install.install()
    size = (4096, 64)

    def last(table, first):
        def step(_, ids):
            with torch_mode(torch.nn.Identity(), {}):
                rows = torch.nn.functional.embedding(torch_view(ids), torch_view(table), padding_idx)
                return jnp.argmax(jax_view(rows), axis=-1).astype(jnp.int32)

        return jax.lax.fori_loop(0, 4, step, first)

    args = jax.ShapeDtypeStruct(size, jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.int32)
    temporary = jax.jit(last).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert temporary < size[0] * size[1], "the table once more, in whatever dtype"


CONVOLUTIONS = {
    "plain": (torch.nn.Conv1d, (2, 8, 13), {"kernel_size": 3}),
    "by_channel": (torch.nn.Conv1d, (2, 8, 13), {"kernel_size": 4, "groups": 8, "padding": 3}),
    "by_channel_strided": (torch.nn.Conv1d, (2, 8, 13), {"kernel_size": 3, "groups": 8, "stride": 2, "dilation": 2}),
    "two_for_each_channel": (torch.nn.Conv1d, (2, 4, 13), {"kernel_size": 3, "groups": 4}),
    "without_a_batch": (torch.nn.Conv1d, (8, 13), {"kernel_size": 3, "groups": 8}),
    "same": (torch.nn.Conv2d, (2, 8, 9, 7), {"kernel_size": 3, "padding": "same", "groups": 2}),
    "three_axes": (torch.nn.Conv3d, (2, 8, 5, 6, 7), {"kernel_size": (1, 2, 3), "stride": (1, 2, 1)}),
    "transposed": (torch.nn.ConvTranspose1d, (2, 8, 6), {"kernel_size": 3, "stride": 2, "output_padding": 1}),
    "transposed_in_groups": (torch.nn.ConvTranspose2d, (2, 8, 5, 4), {"kernel_size": 3, "groups": 2, "padding": 1}),
    "transposed_by_channel": (torch.nn.ConvTranspose3d, (1, 8, 3, 4, 2), {"kernel_size": 2, "groups": 8}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name, dtype):
    kind, shape, options = CONVOLUTIONS[name]
    torch.manual_seed(0)
    num_channels = shape[0 if name == "without_a_batch" else 1]
    layer = kind(num_channels, 8, **options).to(dtype).eval()
    x = torch.randn(shape).to(dtype)
    weights, function = extract_jax(layer)
    with torch.no_grad():
        expected = layer(x).float().numpy()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    np.testing.assert_allclose(
        np.asarray(function(weights, (*as_arrays(x),))).astype("float32"), expected, atol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
@pytest.mark.parametrize("stable", [True, False])
def test_equal_values_in_descending_order(dtype, stable):
    """Short rows, in which PyTorch keeps the order of equal values also where it does not promise to."""
    x = torch.randint(-2, 3, (5, 16), generator=torch.Generator().manual_seed(0)).to(dtype)
    if dtype.is_floating_point:
        x[0, ::5], x[1, ::3], x[2, 4], x[3, ::2] = torch.nan, -0.0, -torch.inf, torch.inf
    for dim in (0, 1):
        values, order = x.sort(dim=dim, descending=True, stable=stable)
        found = traced(lambda x, dim=dim: x.sort(dim=dim, descending=True, stable=stable)[1], to_jax_array(x))
        assert torch.equal(found.long(), order)
        found = traced(lambda x, dim=dim: x.sort(dim=dim, descending=True, stable=stable)[0], to_jax_array(x))
        torch.testing.assert_close(found, values, rtol=0, atol=0, equal_nan=True)
