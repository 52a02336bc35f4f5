"""Steps read and write pools in place; what checks that finds those that do not."""

import jax
import jax.numpy as jnp
import pytest
import torch
from thorough import except_for

from parity_sweep.pool_copies import check_pools, passes_of
from parity_sweep.tiny.models import prompts, tiny_model
from torchax_serve import EngineOptions, SamplingParams, serve

ENGINE = EngineOptions(
    max_num_seqs=4, page_size=4, kv_cache_memory_bytes=1 << 20, max_model_len=64, max_num_batched_tokens=16
)
TYPES = ["llama", "gemma3_text", "deepseek_v3", "deepseek_v32", "qwen3_moe"]
TYPES += ["qwen3_5_text", "falcon_h1", "mamba2", "mamba", "bloom"]
TYPES += ["inkling_text", "minimax", "recurrent_gemma", "zamba", "zaya"]
SHARED = "gemma3n_text"  # whose last layers attend to the keys of another one


@pytest.mark.own_programs  # whose text is read
@pytest.mark.parametrize("model_type", except_for(["falcon_h1", "bloom", SHARED], [*TYPES, SHARED]))
def test_no_step_in_bfloat16_passes_over_a_pool(model_type):
    ids = [each[0].tolist() for each in prompts()]
    params = SamplingParams(max_new_tokens=4, temperature=0, ignore_eos=True)
    with serve(tiny_model(model_type).to(torch.bfloat16), engine=ENGINE) as model:
        model.generate_batch(ids, params)
        check_pools(model)


@pytest.mark.parametrize(
    "step",
    [
        lambda pool, new: pool.at[jnp.array([1])].set(new),  # not donated: the old one has to stay
        lambda pool, new: (pool.astype(jnp.float32) + 1).astype(pool.dtype),
        lambda pool, new: jnp.swapaxes(pool, 1, 2),
    ],
    ids=["copied", "converted", "turned"],
)
def test_a_pass_over_a_pool_is_found(step):
    pool, new = jnp.zeros((64, 8, 8, 16), jnp.bfloat16), jnp.zeros((1, 8, 8, 16), jnp.bfloat16)
    program = jax.jit(step).lower(pool, new).compile()
    assert list(passes_of([program], {pool.shape}))
