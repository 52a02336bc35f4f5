"""Quantized weights on a GPU: products beside float64, the engine's tokens beside eager PyTorch with dense weights."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from test_quantized_accelerators import FORMS, case, check, make, run

from model_adapters.ops import on_platform
from model_adapters.ops.quantized_weight import Scheme, dequantize, make_quantized
from model_adapters.quantization.device_layout import lay_out
from torchax_serve import EngineOptions, SamplingParams, serve
from torchax_serve.runtime.eager import EagerReference

SIZES = [(256, 512, 1), (1024, 4096, 16), (1024, 4096, 64), (7168, 8192, 8), (896, 2560, 33)]
"""Rows and columns of a weight, and rows of activations."""


@pytest.mark.parametrize(("out", "columns", "num_rows"), SIZES)
@pytest.mark.parametrize("form", ["int4 by 32", "int8 by 64"])
def test_the_kernel_multiplies_as_float64(form, out, columns, num_rows):
    plain, held, x, bias = case(form, out, columns, num_rows, "gpu")
    got, name = run(x, held, bias, "gpu")
    assert name == "gpu-quantized"
    check(got, x, plain, bias)


@pytest.mark.parametrize("num_rows", [1, 64, 200])
@pytest.mark.parametrize("form", ["int8 by row", "int4 by row", "nf4 by 64", "fp4 by 32", "uint4 by 64", "int4 by 32"])
def test_xla_multiplies_as_float64(form, num_rows):
    plain, held, x, bias = case(form, 640, 2048, num_rows, "gpu")
    got, name = run(x, held, bias, "gpu")
    assert name == ("gpu-quantized" if form == "int4 by 32" and num_rows <= 64 else "quantized")
    wanted = np.asarray(x, np.float64) @ np.asarray(dequantize(plain, jnp.float32), np.float64).T + np.float64(bias)
    assert np.linalg.norm(got - wanted) < 2**-8 * np.linalg.norm(wanted)  # sums and their scaled values are bfloat16


@pytest.mark.parametrize("act_dtype", ["none", "float8_e4m3fn"])
def test_float8_multiplies_as_float64(act_dtype):
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.standard_normal((640, 2048)), jnp.float8_e4m3fn)
    scale = rng.uniform(0.01, 0.03, (640, 1)).astype(np.float32)
    scheme = Scheme(8, 2048, act_dtype, dtype="bfloat16", source="fp8")
    plain = make_quantized("w", values, scale, scheme=scheme)
    with on_platform("gpu"):
        held = lay_out(plain)
    assert held.values.dtype == jnp.float8_e4m3fn
    x = jnp.asarray(rng.standard_normal((16, 2048)), jnp.bfloat16)
    got, _ = run(x, held, platform="gpu")
    wanted = np.asarray(x, np.float64) @ np.asarray(dequantize(plain, jnp.float32), np.float64).T
    error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
    assert error < (2**-8 if act_dtype == "none" else 0.04)  # rounding x to three bits of mantissa: 0.026


@pytest.mark.parametrize("form", [name for name in FORMS if "activations" in name])
def test_rounded_activations_multiply_as_on_a_cpu(form):
    plain = make(form, out=256, columns=512 if "by row" not in form else 256)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((16, plain.num_columns)), jnp.float32)
    with on_platform("gpu"):
        held = lay_out(plain)
    wanted, _ = run(x, plain, platform="cpu")
    got, _ = run(x, held, platform="gpu")
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama whose products the kernel takes, with weights that make the best token clear."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=320, max_position_embeddings=256)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    model.save_pretrained(folder)
    return folder


ENGINE = EngineOptions(max_num_seqs=8, max_model_len=128, page_size=16)
PROMPTS = [[int(token) for token in np.random.default_rng(i).integers(3, 320, 9 + 5 * i)] for i in range(8)]
GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("preset", ["int8", "int4", "fp8", "nf4", "w8a8"])
def test_the_engine_takes_the_likeliest_token_of_the_weights_made_dense(llama, preset):
    """Of the eager model in float32; activations in bfloat16 may choose one that is nearly as likely."""
    with serve(llama, dtype="bfloat16", quantization=preset, engine=ENGINE) as model:
        answers = [list(answer.token_ids) for answer in model.generate_batch(PROMPTS, GREEDY)]
    with serve(llama, dtype="float32", quantization=preset) as model:
        eager = EagerReference(model._loaded).module
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            with torch.no_grad():
                logits = eager(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            behind = logits.max(-1).values - logits[torch.arange(len(answer)), torch.tensor(answer)]
            assert behind.max() < (0.1 if preset != "w8a8" else 0.2) * logits.std()


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_pages_in_8_bits_change_log_probabilities_little(llama, dtype):
    params = SamplingParams(max_new_tokens=1, temperature=0.0, prompt_logprobs=0)
    found = []
    for kv_cache_dtype in (None, dtype):
        options = EngineOptions(max_num_seqs=8, max_model_len=128, page_size=16, kv_cache_dtype=kv_cache_dtype)
        with serve(llama, dtype="float32", engine=options) as model:
            answers = model.generate_batch(PROMPTS, params)
        found.append(np.array([each.logprob for answer in answers for each in answer.prompt_logprobs if each]))
    assert 0 < np.abs(found[0] - found[1]).mean() < 0.05
