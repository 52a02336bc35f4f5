"""Recurrences over a dense cache: numbers and states of transformers' functions, kernels where they may run."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from thorough import except_for
from transformers.models.falcon_h1 import modeling_falcon_h1 as falcon_h1
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.minimax import modeling_minimax as minimax
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from model_adapters.bridge.views import computing, jax_view, torch_view
from model_adapters.ops import registry
from model_adapters.program.batch_recurrences import lightning_attention, of_batch, tracing
from model_adapters.program.model_program import CallSpec
from parity_sweep.tiny.models import tiny_model
from torchax_serve import to_jax

BATCH, LENGTH = 3, 70
TYPES = {
    "qwen3_5_text": "gated_delta_rule",
    "kimi_linear": "gated_delta_rule",
    "falcon_h1": "state_space",
    "mamba2": "state_space",
    "mamba": "selective_scan",
    "jamba": "selective_scan",
}
EACH_TYPE = pytest.mark.parametrize("model_type", except_for(["qwen3_5_text", "falcon_h1", "mamba"], TYPES))

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def positive(*shape, dtype=torch.float32):
    return torch.nn.functional.softplus(normal(*shape)).to(dtype)


def delta(dtype, length, has_state, *, by_column=False):
    heads = 4
    return {
        "query": normal(BATCH, length, 4 if by_column else 2, 8, dtype=dtype),
        "key": normal(BATCH, length, 4 if by_column else 2, 8, seed=1, dtype=dtype),
        "value": normal(BATCH, length, heads, 12, dtype=dtype),
        "g": -positive(BATCH, length, heads, *([8] if by_column else [])),
        "beta": torch.sigmoid(normal(BATCH, length, heads)).to(dtype),
        "initial_state": normal(BATCH, heads, 8, 12) if has_state else None,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


def space(dtype, length, has_state):
    return {
        "hidden_states": normal(BATCH, length, 4, 16, dtype=dtype),
        "dt": normal(BATCH, length, 4, dtype=dtype),
        "A": -positive(4),
        "B": normal(BATCH, length, 2, 8, dtype=dtype),
        "C": normal(BATCH, length, 2, 8, seed=1, dtype=dtype),
        "chunk_size": 16,
        "D": normal(4, dtype=dtype),
        "dt_bias": normal(4, seed=1, dtype=dtype),
        "initial_states": normal(BATCH, 4, 16, 8) if has_state else None,
        "dt_softplus": True,
        "dt_limit": (0.1, 0.9),
        "return_final_states": True,
    }


def space_step(dtype, has_gate):
    return {
        "state": normal(BATCH, 4, 16, 8),
        "hidden_states": normal(BATCH, 4, 16, dtype=dtype),
        "dt": normal(BATCH, 4, dtype=dtype)[..., None].expand(-1, -1, 16),
        "A": -positive(4)[:, None, None].expand(-1, 16, 8),
        "B": normal(BATCH, 2, 8, dtype=dtype),
        "C": normal(BATCH, 2, 8, seed=1, dtype=dtype),
        "D": normal(4, dtype=dtype)[:, None].expand(-1, 16),
        "dt_bias": normal(4, seed=1, dtype=dtype)[:, None].expand(-1, 16),
        "dt_softplus": True,
        "z": normal(BATCH, 4, 16, seed=2, dtype=dtype) if has_gate else None,
    }


def scan(dtype, length):
    return {
        "hidden_states": normal(BATCH, 24, length, dtype=dtype),
        "dt": normal(BATCH, 24, length, seed=1, dtype=dtype),
        "A": -positive(24, 8),
        "B": normal(BATCH, 8, length, dtype=dtype),
        "C": normal(BATCH, 8, length, seed=1, dtype=dtype),
        "D": normal(24),
        "z": normal(BATCH, 24, length, seed=2, dtype=dtype),
        "delta_bias": normal(24, seed=1),
        "delta_softplus": True,
        "return_last_state": True,
    }


def scan_step(dtype):
    columns = {name: scan(dtype, 1)[name][..., 0] for name in ("hidden_states", "dt", "B", "C", "z")}
    others = {"A": -positive(24, 8), "D": normal(24), "dt_bias": normal(24, seed=1), "dt_softplus": True}
    return {"state": normal(BATCH, 24, 8)} | columns | others


CALLS = {
    "prompt": (qwen3_5, "torch_chunk_gated_delta_rule", lambda dtype: delta(dtype, LENGTH, False)),
    "chunk": (qwen3_5, "torch_chunk_gated_delta_rule", lambda dtype: delta(dtype, LENGTH, True)),
    "token": (qwen3_5, "torch_recurrent_gated_delta_rule", lambda dtype: delta(dtype, 1, True)),
    "prompt by column": (
        kimi_linear,
        "chunk_kimi_delta_attention",
        lambda dtype: delta(dtype, 20, True, by_column=True),
    ),
    "token by column": (
        kimi_linear,
        "recurrent_kimi_delta_attention",
        lambda dtype: delta(dtype, 1, True, by_column=True),
    ),
    "space prompt": (falcon_h1, "mamba2_chunk_scan", lambda dtype: space(dtype, LENGTH, False)),
    "space chunk": (falcon_h1, "mamba2_chunk_scan", lambda dtype: space(dtype, LENGTH, True)),
    "space token": (falcon_h1, "mamba2_selective_state_update", lambda dtype: space_step(dtype, False)),
    "gated space token": (falcon_h1, "mamba2_selective_state_update", lambda dtype: space_step(dtype, True)),
    "scan prompt": (mamba, "mamba_selective_scan", lambda dtype: scan(dtype, LENGTH)),
    "scan token": (mamba, "mamba_selective_state_update", scan_step),
}


def results_of(made, given):
    """Output and state: the function's second result, or the argument that it has written."""
    return made if isinstance(made, tuple) else (made, given["state"])


def transformed(call, transform, given):
    """Results of `of_batch` for torch tensors, as arrays, under a transform of JAX."""
    name = CALLS[call][1]
    tensors = {key: value.contiguous() for key, value in given.items() if isinstance(value, torch.Tensor)}
    arrays = {key: jnp.asarray(value.float().numpy(), str(value.dtype)[6:]) for key, value in tensors.items()}

    def run(arrays):
        views = given | {key: torch_view(value) for key, value in arrays.items()}
        return jax_view(results_of(of_batch(name, views), views))

    with computing(), torch.no_grad(), tracing(has_cache=True), registry.record_calls() as record:
        out = transform(run)(arrays)
    assert {implementation for _, implementation in record} == {"cpu-ffi"}
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("call", CALLS)
def test_results_have_values_and_dtypes_of_the_function(call, dtype):
    file, name, make = CALLS[call]
    given = make(dtype)
    found = transformed(call, jax.jit, given)
    theirs = {key: value.clone() if key == "state" else value for key, value in given.items()}
    expected = results_of(getattr(file, name)(**theirs), theirs)
    close = {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 0.06, "rtol": 0.03}
    for mine, wanted in zip(found, expected, strict=True):
        assert str(mine.dtype) == str(wanted.dtype)[6:]
        np.testing.assert_allclose(np.asarray(mine, np.float32), wanted.float().numpy(), **close)


@pytest.mark.parametrize("call", CALLS)
def test_rows_of_a_vmap_are_those_of_a_batch(call):
    given = CALLS[call][2](torch.float32)
    expected = transformed(call, jax.jit, given)
    weights = {"A", "D", "dt_bias", "delta_bias"}

    def by_row(run):
        def vmapped(arrays):
            axes = ({key: None if key in weights else 0 for key in arrays},)
            rows = {key: value if key in weights else value[:, None] for key, value in arrays.items()}
            return jax.tree.map(lambda x: x[:, 0], jax.vmap(run, axes)(rows))

        return jax.jit(vmapped)

    for mine, wanted in zip(transformed(call, by_row, given), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(wanted))


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_lightning_attention_is_that_of_minimax(platform):
    """A prompt of several blocks, and two tokens behind it, by the kernel and by the reference."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 8, "num_hidden_layers": 3, "block_size": 16}
    config = minimax.MiniMaxConfig(**sizes, layer_types=["linear_attention"] * 3)
    layer = minimax.MiniMaxLightningAttention(config, 1).eval()
    hidden, cache = normal(BATCH, LENGTH + 2, 32), minimax.MiniMaxCache()
    kept = {}
    layer.norm.register_forward_pre_hook(lambda _, given: kept.setdefault("out", []).append(given[0]))
    with torch.no_grad():
        for part in hidden.split([LENGTH, 2], dim=1):
            _, expected = layer(part, None, None, cache=cache)
        qkv = layer.act_fn(layer.qkv_proj(hidden)).reshape(BATCH, LENGTH + 2, 4, 24).split(8, dim=3)
    arrays, state, outs = [jnp.asarray(each.numpy()) for each in qkv], None, []
    slopes = jnp.asarray(layer.slope_rate.numpy())[:, 0, 0]
    with registry.on_platform(platform):
        for part in (slice(LENGTH), slice(LENGTH, None)):
            out, state = lightning_attention(*(each[:, part] for each in arrays), slopes, state)
            outs.append(out.reshape(BATCH, -1, 32))
    np.testing.assert_allclose(np.concatenate(outs, 1), torch.cat(kept["out"], 1).numpy(), atol=2e-5)
    np.testing.assert_allclose(state.mT, expected.numpy(), atol=2e-5)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_functions_stay_where_there_is_no_kernel(platform):
    given = delta(torch.float32, 8, True)
    views = given | {key: torch_view(jnp.asarray(x)) for key, x in given.items() if isinstance(x, torch.Tensor)}
    name = "torch_chunk_gated_delta_rule"
    assert of_batch(name, views) is None  # there is no cache
    with tracing(has_cache=True):
        assert of_batch(name, views) is not None
        assert of_batch("causal_conv1d_fn", views) is None
        narrow = torch_view(jax_view(views["initial_state"]).astype(jnp.bfloat16))
        assert of_batch(name, views | {"initial_state": narrow}) is None
        with registry.on_platform(platform):
            assert of_batch(name, views) is None


def models(model_type):
    eager = tiny_model(model_type)
    return eager, to_jax(copy.deepcopy(eager))


@EACH_TYPE
def test_answers_are_those_of_eager_pytorch(model_type):
    """Alone, with padding on the left, of beams, and in further turns."""
    eager, model = models(model_type)
    ids = torch.randint(5, 90, (2, 19), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :8] = 0
    with registry.record_calls() as record:
        for options in ({}, {"attention_mask": mask}, {"attention_mask": mask, "num_beams": 3}):
            given = {"max_new_tokens": 10, "do_sample": False, **options}
            assert torch.equal(model.generate(ids, **given), eager.generate(ids, **given))
    assert (TYPES[model_type], "cpu-ffi") in record
    assert (TYPES[model_type], "reference") not in record


@EACH_TYPE
def test_a_cache_goes_on_with_any_number_of_tokens(model_type):
    eager, model = models(model_type)
    ids = torch.randint(5, 90, (2, 24), generator=torch.Generator().manual_seed(1))
    found = []
    for each in (eager, model):
        with torch.no_grad():
            outputs = [each(ids[:, :9], use_cache=True)]
            for begin, end in ((9, 10), (10, 21), (21, 24)):
                cache = {name: outputs[-1][name] for name in outputs[-1] if name in ("cache", "past_key_values")}
                outputs.append(each(ids[:, begin:end], **cache))
        found.append(torch.cat([each.logits for each in outputs], dim=1))
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


@EACH_TYPE
def test_gradients_without_a_cache_are_those_of_pytorch(model_type):
    eager = tiny_model(model_type).eval()
    runtime = to_jax(copy.deepcopy(eager))._jax_runtime
    ids = torch.randint(5, 90, (2, 11), generator=torch.Generator().manual_seed(2))
    name = next(name for name, _ in eager.named_parameters() if name.endswith("A_log"))

    def loss(weight):
        weights = {**runtime.weights, name: weight}
        fields, _ = runtime.program.forward(weights, None, None, {"input_ids": jnp.asarray(ids.numpy())}, CallSpec())
        return jnp.sum(jnp.tanh(fields["logits"]))

    found = jax.jit(jax.grad(loss))(runtime.weights[name])
    torch.tanh(eager(ids, use_cache=False).logits).sum().backward()
    expected = dict(eager.named_parameters())[name].grad.numpy()
    np.testing.assert_allclose(np.asarray(found), expected, rtol=2e-3, atol=1e-4)
