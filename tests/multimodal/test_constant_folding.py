"""Values that are known while a program is made: constants, selections, checks, and what is lowered for images."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from model_adapters.bridge.views import default_env, jax_view, torch_view
from model_adapters.errors import UnsupportedModelError
from model_adapters.lowerings import constant_folding, deferred_checks, install
from model_adapters.program.static_tensors import StaticTensor, can_be_static
from torchax_serve.runtime.static_args import StaticArgs, split_traced_and_static


@pytest.fixture(autouse=True)
def installed():
    install.install()


def traced(function, *arrays):
    """`function` over torch views under ``jax.jit``, values known."""

    def run(*arrays):
        with default_env(), constant_folding.enabled():
            return jax_view(function(*torch_view(arrays)))

    return jax.jit(run)(*arrays)


def test_grids_are_read_in_a_trace():
    grid = torch.tensor([[1, 2], [2, 3]])

    def split(x):
        sizes = grid.to(x.device).prod(-1).tolist()  # on the device of traced values, and known all the same
        return torch.cat([part.sum(0, keepdim=True) for part in torch.split(x, sizes)])

    x = np.arange(16.0, dtype=np.float32).reshape(8, 2)
    np.testing.assert_array_equal(traced(split, jnp.asarray(x)), np.stack([x[:2].sum(0), x[2:].sum(0)]))


def test_boolean_index_by_a_static_mask():
    mask = torch.tensor([True, False, True])
    out = traced(lambda x: x[mask.to(x.device)], jnp.arange(6.0).reshape(3, 2))
    np.testing.assert_array_equal(out, [[0, 1], [4, 5]])


def test_in_place_writes_to_static_values_happen_once():
    def count(x):
        known = torch.zeros(3, device=x.device)
        known += 1
        known[1] = 5
        return x + known

    np.testing.assert_array_equal(traced(count, jnp.zeros(3)), [1, 5, 1])


def test_values_computed_from_shapes_are_static():
    def picked(x):
        mask = torch.zeros_like(x[:, 0])
        mask[1] = 1
        return x[(mask == 1).flatten()] * int(mask.sum())

    np.testing.assert_array_equal(traced(picked, jnp.arange(6.0).reshape(3, 2)), [[2, 3]])


def test_masked_fill_with_a_traced_mask():
    def filled(x):
        whole = torch.zeros(2, 3, device=x.device)[:, :]
        whole[x > 1] = 5.0
        return whole

    x = jnp.asarray([[0.0, 2.0, 3.0], [1.0, 0.0, 4.0]])
    np.testing.assert_array_equal(traced(filled, x), np.where(np.asarray(x) > 1, 5.0, 0.0))


def test_traced_values_written_to_a_host_tensor_are_kept():
    np.testing.assert_array_equal(traced(lambda x: torch.zeros(3).add_(x), jnp.arange(3.0)), [0, 1, 2])


def test_host_table_is_indexed_by_traced_indices():
    table = torch.tensor([7, 8, 9])
    np.testing.assert_array_equal(traced(lambda i: table[i.to("cpu")], jnp.array([2, 0])), [9, 7])


@pytest.mark.parametrize("count", [2, 3])
def test_deferred_checks_run_after_the_program(count):
    def run(ids, x):
        with default_env(), deferred_checks.collect() as met:
            selected = torch_view(x)[torch_view(ids) == 1]
            torch._check_tensor_all(selected.numel() == count * 2, lambda: "never seen in a trace")
        return jnp.stack(met)

    assert jax.jit(run)(jnp.array([1, 0, 1]), jnp.ones((3, 2))).tolist() == [count == 2]


@pytest.mark.parametrize("zero", [False, True])
def test_traced_mask_selection_must_select_everything(zero):
    def run(x):
        with default_env(), constant_folding.enabled(), deferred_checks.collect() as met:
            real = torch_view(x)[(torch_view(x) != 0).any(-1)]
            return jax_view(real * 2), jnp.stack(met)

    x = jnp.array([[1.0, 2.0], [0.0, 0.0 if zero else 3.0]])
    out, met = jax.jit(run)(x)
    np.testing.assert_array_equal(out, x * 2)
    assert met.all() == (not zero)


def test_traced_mask_selection_without_deferred_checks_is_refused():
    def run(x):
        with default_env():
            return jax_view(torch_view(x)[torch_view(x) > 0] * 2)

    with pytest.raises(UnsupportedModelError, match="a selection whose size is known after the step"):
        jax.jit(run)(jnp.ones(3))


def test_static_tensors_are_hashable():
    one, same = StaticTensor.of(torch.tensor([[1, 2]])), StaticTensor.of(torch.tensor([[1, 2]]))
    others = [torch.tensor([[1, 3]]), torch.tensor([1, 2]), torch.tensor([[1, 2]], dtype=torch.int32)]
    assert one == same and hash(one) == hash(same) and repr(one) == repr(same)
    assert all(StaticTensor.of(other) != one and repr(StaticTensor.of(other)) != repr(one) for other in others)
    assert torch.equal(one.tensor(), torch.tensor([[1, 2]]))
    assert StaticTensor.of(torch.empty(0, 3, dtype=torch.long)).tensor().shape == (0, 3)
    assert not can_be_static(torch.ones(2)) and not can_be_static(torch.ones(1 << 17, dtype=torch.long))


def test_static_arguments_of_a_call():
    given = {
        "input_ids": torch.ones(1, 3, dtype=torch.long),
        "attention_mask": torch.ones(1, 3, dtype=torch.long),
        "image_grid_thw": torch.ones(1, 3, dtype=torch.long),
        "pixel_values": torch.ones(2, 2),
        "sizes": [1, 2],
    }
    names = {known: [name for name, _ in split_traced_and_static(given, known)[1]] for known in StaticArgs}
    assert names[StaticArgs.NOTHING] == ["sizes"]
    assert names[StaticArgs.GRIDS] == ["image_grid_thw", "sizes"]
    assert names[StaticArgs.MASKS] == ["attention_mask", "image_grid_thw", "sizes"]
    assert names[StaticArgs.TEXT] == ["attention_mask", "image_grid_thw", "input_ids", "sizes"]
    assert dict(split_traced_and_static(given)[1])["sizes"] == (1, 2)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(3, 9), (8, 8), (12, 5)])
def test_smoothed_resampling(mode, size):
    x = torch.randn(2, 3, 6, 7)

    def resample(tensor):
        return torch.nn.functional.interpolate(tensor, size=size, mode=mode, antialias=True)

    def run(array):
        with default_env():
            return jax_view(resample(torch_view(array)))

    np.testing.assert_allclose(jax.jit(run)(jnp.asarray(x.numpy())), resample(x).numpy(), atol=2e-6)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag(mode):
    weight, bags, weights = torch.randn(5, 4), torch.tensor([[0, 1], [4, 4], [2, 3]]), torch.rand(3, 2)
    weights = weights if mode == "sum" else None

    def run(weight, bags, weights):
        with default_env():
            args = (torch_view(bags), torch_view(weight))
            given = None if weights is None else torch_view(weights)
            return jax_view(torch.nn.functional.embedding_bag(*args, mode=mode, per_sample_weights=given))

    ours = run(*(None if x is None else jnp.asarray(x.numpy()) for x in (weight, bags, weights)))
    theirs = torch.nn.functional.embedding_bag(bags, weight, mode=mode, per_sample_weights=weights)
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-6)
