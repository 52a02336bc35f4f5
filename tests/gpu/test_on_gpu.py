"""Kernels and the engine on a GPU, beside float64 loops and eager PyTorch on the CPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from ops_oracle import assert_close
from paged_oracle import exact_paged, paged_case
from test_gpu_kernels import LONG, MIXED, as_bits, check_decode, run

from model_adapters.ops import AttentionArgs, decode_attention, grouped_matmul, paged_attention
from torchax_serve import EngineOptions, SamplingParams, serve, to_jax

NEW = 24
TEXTS = ("Hello", "3 + 4 =", "The", "What is 2 + 5?", "one two three", "A", "Count: 1, 2,", "x")


@pytest.mark.parametrize(
    "shape",
    [
        {"dim": 64, "page": 16, "sinks": True},
        {"dim": 128, "value_dim": 64, "page": 64, "window": 70, "group": 3, "spare": 64},
        {"dim": 64, "page": 128, "softcap": 5.0, "dtype": "float16", "heads": 1},
        {"dim": 128, "page": 64, "group": 8},
        {"dim": 192, "value_dim": 128, "page": 32, "group": 1},
        {"dim": 128, "page": 64, "group": 12, "heads": 1, "sinks": True},
        {"dim": 128, "page": 64, "group": 4, "heads": 1, "q_lens": (1, 1, 1), "kv_lens": (3, 300, 65)},
    ],
    ids=lambda shape: "-".join(f"{k}={v}" for k, v in shape.items() if not isinstance(v, tuple)),
)
def test_mosaic_decode(shape):
    check_decode(paged_case(**{**LONG, "dtype": "bfloat16", **shape}), implementation="gpu-mosaic")


def on_device(seed, dtype, *shape):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.parametrize("implementation", ["gpu-triton", "gpu-mosaic"])
@pytest.mark.parametrize("lens", [(1, 17, 63, 64, 65, 700, 1500, 2048), (2048,) * 8], ids=["mixed", "long"])
def test_decode_at_the_size_of_a_model_is_the_reference_in_float32(implementation, lens):
    batch, heads, group, dim, page = 8, 8, 4, 128, 64
    pages = 2048 // page
    q = on_device(0, jnp.bfloat16, batch, heads * group, dim)
    k, v = (on_device(seed, jnp.bfloat16, batch, heads, dim) for seed in (1, 2))
    pool = on_device(3, jnp.bfloat16, batch * pages, heads, page, 2 * dim)
    table = jax.random.permutation(jax.random.key(4), batch * pages).reshape(batch, pages).astype(jnp.int32)
    rest = (table, jnp.asarray(lens, jnp.int32), jnp.zeros(batch, jnp.int32), AttentionArgs(dim**-0.5))
    out, new_pool = run(decode_attention, q, k, v, pool, *rest, implementation=implementation)
    exact = [x.astype(jnp.float32) for x in (q, k, v, pool)]
    with jax.default_matmul_precision("highest"):
        expected, expected_pool = run(decode_attention, *exact, *rest, implementation="reference")
    assert_close(out, np.asarray(expected, np.float64))
    np.testing.assert_array_equal(np.asarray(new_pool, np.float32), np.asarray(expected_pool))


@pytest.mark.parametrize(
    "shape",
    [
        {"dim": 64, "page": 16, "sinks": True, "padding": 5},
        {"dim": 128, "value_dim": 64, "page": 64, "window": 70, "group": 3, "spare": 64},
        {"dim": 64, "page": 128, "softcap": 5.0, "dtype": "float16", "heads": 1, "group": 8},
        {"dim": 128, "page": 64, "group": 4, "window": 300, "q_lens": (0, 1, 300, 77), "kv_lens": (0, 700, 901, 77)},
        {"dim": 192, "value_dim": 128, "page": 32, "group": 1, "q_lens": (500, 130), "kv_lens": (500, 650)},
        {"dim": 256, "page": 64, "group": 2, "q_lens": (1, 256, 3), "kv_lens": (513, 256, 260)},
        {"dim": 128, "page": 64, "group": 4, "q_lens": (1100,), "kv_lens": (1100,)},
    ],
    ids=lambda shape: "-".join(f"{k}={v}" for k, v in shape.items() if not isinstance(v, tuple)),
)
def test_mosaic_prefill(shape):
    """Weights of the softmax are rounded to 16 bits: a sum is off by at most that of what it adds."""
    case = paged_case(**{**MIXED, "dtype": "bfloat16", **shape})
    out, pool = run(paged_attention, *case.args, implementation="gpu-mosaic")
    expected, expected_pool = exact_paged(case)
    sizes = case.pool.at[..., case.q.shape[2] :].set(jnp.abs(case.pool[..., case.q.shape[2] :]))
    added, _ = exact_paged(dataclasses.replace(case, v=jnp.abs(case.v), pool=sizes))
    bound = 2**-8 * (np.abs(expected) + np.asarray(added, np.float64))
    assert (np.abs(np.asarray(out, np.float64) - expected) <= bound + 1e-6).all()
    np.testing.assert_array_equal(as_bits(pool), as_bits(expected_pool))


@pytest.fixture(scope="module")
def served():
    with serve(engine=EngineOptions(max_num_seqs=8, max_model_len=256)) as model:
        yield model


@pytest.fixture(scope="module")
def eager(served):
    return transformers.AutoModelForCausalLM.from_pretrained(served.config.name_or_path).eval()


def eager_tokens(eager, ids):
    with torch.no_grad():
        out = eager.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NEW, eos_token_id=None)
    return out[0, len(ids) :].tolist()


def test_engine_tokens_are_those_of_eager(served, eager):
    prompts = [served.tokenizer(text).input_ids for text in TEXTS]
    params = SamplingParams(max_new_tokens=NEW, temperature=0.0, ignore_eos=True)
    found = [list(each.token_ids) for each in served.generate_batch(prompts, params)]
    assert found == [eager_tokens(eager, ids) for ids in prompts]


def test_a_request_alone_has_the_tokens_it_has_in_a_batch(served):
    params = [SamplingParams(max_new_tokens=NEW, temperature=0.8, seed=i, ignore_eos=True) for i in range(len(TEXTS))]
    together = [list(each.token_ids) for each in served.generate_batch(TEXTS, params)]
    alone = [list(served.generate_batch([text], one)[0].token_ids) for text, one in zip(TEXTS, params, strict=True)]
    assert together == alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generate_is_a_drop_in(dtype):
    config = transformers.LlamaConfig(
        vocab_size=199,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    eager = transformers.LlamaForCausalLM(config).eval().to(dtype)
    ids = torch.randint(0, 199, (3, 17))
    with torch.no_grad():
        expected = eager(ids).logits.float().numpy()
        tokens = eager.generate(ids, do_sample=False, max_new_tokens=NEW).numpy()
    model = to_jax(eager)
    got = np.asarray(model(ids).logits.float())
    bound = 1e-4 if dtype == torch.float32 else 0.05
    assert np.abs(got - expected).max() < bound * np.abs(expected).max()
    if dtype == torch.float32:
        assert model.generate(ids, do_sample=False, max_new_tokens=NEW).tolist() == tokens.tolist()


@pytest.mark.parametrize("layout", ["ekn", "enk"])
@pytest.mark.parametrize("num_rows", [64, 4096])
def test_products_of_experts_are_those_of_each(num_rows, layout):
    """Against a product for each expert; a few have no rows."""
    num_experts, num_in, num_out = 64, 1024, 512
    x = on_device(0, jnp.bfloat16, num_rows, num_in)
    weight = on_device(1, jnp.bfloat16, num_experts, num_in, num_out) / num_in**0.5
    sizes = np.random.default_rng(0).multinomial(num_rows - 5, np.repeat([0, 1 / 48, 0], [8, 48, 8]))
    laid = weight if layout == "ekn" else jnp.swapaxes(weight, 1, 2)
    found = jax.jit(grouped_matmul, static_argnames="layout")(x, laid, jnp.asarray(sizes, jnp.int32), layout=layout)
    rows, matrices = (np.asarray(each.astype(jnp.float32)) for each in (x, weight))
    ends = np.cumsum(sizes)
    wanted = [rows[end - size : end] @ matrices[n] for n, (end, size) in enumerate(zip(ends, sizes, strict=True))]
    assert_close(found, np.concatenate([*wanted, np.zeros((5, num_out))]))
