"""Random weights from a configuration: shapes, dtypes and distributions as transformers would make them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import torch
from loading_models import CONFIGS, edit_json, tiny_folder, tiny_model

from model_adapters.bridge.views import named_tensors
from model_adapters.errors import OutOfMemoryError
from model_adapters.loading import load_model, memory, random_weights


@pytest.fixture
def small_is_large(monkeypatch):
    """So that tiny models go through what large parameters go through."""
    monkeypatch.setattr(random_weights, "LARGE", 512)


@pytest.mark.parametrize("name", CONFIGS)
def test_names_shapes_and_dtypes_are_those_of_a_checkpoint(name, tmp_path, small_is_large):
    tiny_folder(tmp_path, name, torch.bfloat16)
    loaded, reference = load_model(tmp_path, random_weights=True), load_model(tmp_path)
    kinds = {key: (array.shape, array.dtype) for key, array in loaded.weights.items()}
    assert kinds == {key: (array.shape, array.dtype) for key, array in reference.weights.items()}
    assert loaded.report.num_shared == reference.report.num_shared
    assert all(tensor.is_meta for tensor in named_tensors(loaded.module).values())
    for key, array in loaded.weights.items():
        assert bool(jnp.isfinite(array.astype(jnp.float32)).all()), key


@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba", "t5"])
def test_spreads_are_those_of_transformers(name, tmp_path, small_is_large):
    """Mean and standard deviation of each parameter, against a model that transformers initialised."""
    tiny_folder(tmp_path, name)
    loaded = load_model(tmp_path, random_weights=True, seed=5)
    for key, tensor in named_tensors(tiny_model(name)).items():
        got, expected = np.asarray(loaded.weights[key], np.float64), tensor.detach().double().numpy()
        if expected.size < 256 or expected.std() == 0:
            np.testing.assert_allclose(got.mean(), expected.mean(), atol=0.3, err_msg=key)
            continue
        # of n normal numbers the deviation of the estimated spread is 1 / sqrt(2 n); five of them, for two estimates
        np.testing.assert_allclose(got.std(), expected.std(), rtol=5 / np.sqrt(expected.size), err_msg=key)
        assert abs(got.mean() - expected.mean()) < 7 * expected.std() / np.sqrt(expected.size), key


def test_buffers_have_their_real_values(tmp_path, small_is_large):
    tiny_folder(tmp_path)
    loaded, reference = load_model(tmp_path, random_weights=True), load_model(tmp_path)
    for name in ("model.rotary_emb.inv_freq", "model.norm.weight"):
        np.testing.assert_array_equal(loaded.weights[name], reference.weights[name])


def test_a_seed_gives_the_same_weights_again(tmp_path, small_is_large):
    tiny_folder(tmp_path)
    state = torch.random.get_rng_state()
    first, again, other = (load_model(tmp_path, random_weights=True, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    for name in first.weights:
        np.testing.assert_array_equal(first.weights[name], again.weights[name], err_msg=name)
    assert not np.array_equal(first.weights["lm_head.weight"], other.weights["lm_head.weight"])
    layers = [np.asarray(first.weights[f"model.layers.{i}.mlp.up_proj.weight"]) for i in range(2)]
    assert not np.array_equal(*layers)


def test_a_configuration_file_alone(tmp_path):
    tiny_folder(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "shape.json")
    loaded = load_model(tmp_path / "shape.json", random_weights=True, dtype="bfloat16")
    assert loaded.source.kind == "config"
    assert loaded.dtype == jnp.bfloat16
    assert loaded.tokenizer() is None
    assert type(loaded.module).__name__ == "LlamaForCausalLM"
    assert loaded.report.checkpoint_bytes == loaded.report.weights_bytes


def test_weights_that_stay_in_float32(tmp_path, small_is_large):
    tiny_folder(tmp_path, "t5")
    weights = load_model(tmp_path, random_weights=True, dtype="float16").weights
    assert weights["encoder.block.0.layer.1.DenseReluDense.wo.weight"].dtype == jnp.float32
    assert weights["encoder.block.0.layer.1.DenseReluDense.wi.weight"].dtype == jnp.float16


def test_what_does_not_fit_is_refused(tmp_path, monkeypatch):
    tiny_folder(tmp_path)
    edit_json(tmp_path / "config.json", hidden_size=2048, intermediate_size=8192, vocab_size=100_000)
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 10**8)
    with pytest.raises(OutOfMemoryError, match=r"needs 2\.\d\d GB of main memory, 100\.00 MB are free"):
        load_model(tmp_path, random_weights=True)


# --- drawing on the device, the path of GPUs and TPUs


def recorded(init, name="normal_", **options):
    """A parameter on the meta device on which `name` was called."""
    parameter = torch.nn.Parameter(torch.empty(600, 64, device="meta"))
    with init.recording():
        getattr(random_weights.initialization, name)(parameter, **options)
    return parameter


@pytest.mark.parametrize(
    ("name", "options", "distribution"),
    [
        ("normal_", {"mean": 0.5, "std": 0.2}, scipy.stats.norm(0.5, 0.2)),
        ("uniform_", {"a": -0.5, "b": 0.25}, scipy.stats.uniform(-0.5, 0.75)),
        ("trunc_normal_", {"mean": 0.1, "std": 0.5, "a": -0.4, "b": 1.1}, scipy.stats.truncnorm(-1, 2, 0.1, 0.5)),
    ],
)
@pytest.mark.parametrize("on_device", [True, False])
def test_distributions(name, options, distribution, on_device, monkeypatch):
    monkeypatch.setattr(random_weights, "_BLOCK", 10_000)  # several blocks
    init = random_weights.RandomInit(seed=3)
    parameter = recorded(init, name, **options)
    values = init.draw("weight", parameter, torch.float32, 1.0, on_device=on_device)
    assert isinstance(values, jax.Array) == on_device
    values = np.asarray(values)
    assert values.shape == (600, 64)
    assert scipy.stats.kstest(values.ravel(), distribution.cdf).pvalue > 1e-3
    assert abs(np.corrcoef(values[0], values[300])[0, 1]) < 0.5  # blocks differ


@pytest.mark.parametrize("on_device", [True, False])
def test_constants_rare_functions_and_none(on_device):
    init = random_weights.RandomInit(seed=0)

    def drawn(parameter, dtype=torch.float32):
        values = init.draw("w", parameter, dtype, 0.3, on_device=on_device)
        return np.asarray(values.float() if isinstance(values, torch.Tensor) else values.astype(jnp.float32))

    assert (drawn(recorded(init, "constant_", val=2.5)) == 2.5).all()
    assert (drawn(recorded(init, "ones_")) == 1).all()
    assert (drawn(recorded(init, "zeros_"), torch.bfloat16) == 0).all()
    orthogonal = drawn(recorded(init, "orthogonal_"))
    np.testing.assert_allclose(orthogonal.T @ orthogonal, np.eye(64), atol=1e-5)
    untouched = drawn(torch.nn.Parameter(torch.empty(600, 64, device="meta")))
    assert abs(untouched.std() - 0.3) < 0.01
