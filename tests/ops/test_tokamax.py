"""Tokamax's grouped product: on a CPU its own fallback, against a loop over groups and the tokens of a mixture."""

import importlib.util
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from ops_oracle import assert_close

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import grouped_matmul, registry, tokamax_kernels, use
from torchax_serve import to_jax

RNG = np.random.default_rng(0)
needs_tokamax = pytest.mark.skipif(
    importlib.util.find_spec("tokamax") is None, reason="the optional extra tokamax is not installed"
)


def inputs(rows, groups, k, n):
    x = jnp.asarray(RNG.standard_normal((rows, k), dtype=np.float32))
    return x, jnp.asarray(RNG.standard_normal((groups, k, n), dtype=np.float32) / k**0.5)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(tokamax_kernels.importlib.util, "find_spec", lambda name: object())


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(tokamax_kernels.importlib.util, "find_spec", lambda name: None)
    x, weight = inputs(4, 2, 8, 8)
    with use("grouped_matmul", "tokamax"), pytest.raises(InvalidArgumentError, match=r"torchax-serve\[tokamax\]"):
        grouped_matmul(x, weight, jnp.array([2, 2]))


def test_it_is_chosen_where_it_is_asked_for_only(installed):
    x, weight = inputs(256, 2, 128, 128)
    for platform in registry.PLATFORMS:
        with registry.on_platform(platform):
            assert registry.implementation_for("grouped_matmul", x, weight, jnp.array([2, 2]), layout="ekn").name != (
                "tokamax"
            )


def test_kernels_are_those_of_the_devices_in_use(installed):
    x, weight = inputs(256, 2, 128, 128)
    wrong = pytest.raises(InvalidArgumentError, match="those of cpu; this is for tpu")
    with registry.on_platform("tpu"), use("grouped_matmul", "tokamax"), wrong:
        grouped_matmul(x, weight, jnp.array([2, 2]))


@pytest.mark.parametrize(
    ("sizes", "dtype", "reason"),
    [
        ((100, 128, 128), "bfloat16", "multiple of 128"),
        ((128, 64, 128), "bfloat16", "multiple of 128"),
        ((128, 128, 64), "bfloat16", "multiple of 128"),
        ((128, 128, 128), "float16", "no float16"),
        ((128, 128, 128), "bfloat16", None),
    ],
)
@pytest.mark.parametrize("layout", ["ekn", "enk"])
def test_what_its_kernel_for_tpus_cannot_take(installed, monkeypatch, sizes, dtype, reason, layout):
    rows, k, n = sizes
    x, weight = (each.astype(dtype) for each in inputs(rows, 2, k, n))
    weight = weight if layout == "ekn" else jnp.swapaxes(weight, 1, 2)
    monkeypatch.setattr(tokamax_kernels.jax, "default_backend", lambda: "tpu")
    with registry.on_platform("tpu"):
        found = tokamax_kernels._unsupported_reason(x, weight, jnp.array([2, 2]), layout=layout)
    assert found is None if reason is None else reason in found


@needs_tokamax
@pytest.mark.parametrize("layout", ["ekn", "enk"])
def test_products_of_groups(layout):
    x, weight = inputs(18, 5, 40, 13)
    sizes = [3, 0, 8, 1, 4]  # two rows are in no group
    expected, begin = np.zeros((18, 13)), 0
    for group, size in enumerate(sizes):
        expected[begin : begin + size] = np.asarray(x[begin : begin + size]) @ np.asarray(weight[group])
        begin += size
    weight = weight if layout == "ekn" else jnp.swapaxes(weight, 1, 2)
    with use("grouped_matmul", "tokamax"):
        assert_close(grouped_matmul(x, weight, jnp.array(sizes, jnp.int32), layout=layout), expected)


@needs_tokamax
def test_tokens_of_a_mixture():
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=64,
    )
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    ids = torch.arange(3, 12)[None]
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    with registry.record_calls() as calls, use("grouped_matmul", "tokamax"):
        found = to_jax(model).generate(ids, max_new_tokens=8, do_sample=False)
    assert ("grouped_matmul", "tokamax") in calls
    assert found.tolist() == expected.tolist()
    assert "tokamax" in sys.modules
