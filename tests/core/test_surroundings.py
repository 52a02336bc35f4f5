"""What a script has set of PyTorch and JAX around a call: answers are the same, and nothing of ours is in its way."""

import contextlib
import copy

import jax
import numpy as np
import pytest
import torch
from thorough import except_for
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from model_adapters.errors import UnsupportedArgumentError, UnsupportedModelError
from torchax_serve import EngineOptions, SamplingParams, extract_jax, serve, to_jax

IDS = torch.arange(5, 13)[None]
LENGTHS = {"max_new_tokens": 3, "pad_token_id": 0, "eos_token_id": None}


def gpt2():
    """With layer norms, which are operators of several others."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=4, n_positions=64)).eval()


def bert():
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    return BertModel(BertConfig(**sizes, num_attention_heads=4)).eval()


@contextlib.contextmanager
def configured(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SURROUNDINGS = {
    "inference_mode": torch.inference_mode,
    "strict promotion": lambda: configured("jax_numpy_dtype_promotion", "strict"),
    "matmul precision": lambda: configured("jax_default_matmul_precision", "bfloat16"),
    "default dtype": lambda: default_dtype(torch.bfloat16),
    "no jit": jax.disable_jit,
    "no jit anywhere": lambda: configured("jax_disable_jit", True),
    "guarded transfers": lambda: jax.transfer_guard("disallow"),
    "guarded transfers anywhere": lambda: configured("jax_transfer_guard", "disallow"),
    "tracers watched": jax.checking_leaks,
}


@pytest.fixture(scope="module")
def expected():
    with torch.no_grad():
        logits, hidden = gpt2()(IDS).logits, bert()(IDS).last_hidden_state
    return logits, gpt2().generate(IDS, do_sample=False, **LENGTHS)[0, 8:].tolist(), hidden


@pytest.mark.parametrize("name", except_for(["no jit", "guarded transfers"], SURROUNDINGS))
def test_answers_are_the_same_in(name, expected):
    logits, tokens, hidden = expected
    options = {"do_sample": True, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1}
    greedy, sampled = SamplingParams(max_new_tokens=3, temperature=0), SamplingParams(max_new_tokens=3, seed=1, top_k=5)
    decoder, other = gpt2(), bert()
    with SURROUNDINGS[name]():
        model = to_jax(decoder)
        np.testing.assert_allclose(model(IDS).logits.tolist(), logits.tolist(), atol=1e-4)
        assert model.generate(IDS, do_sample=False, **LENGTHS)[0, 8:].tolist() == tokens
        assert model.generate(IDS, **options, **LENGTHS).shape == (1, 11)
        with serve(other) as encoder:
            embedded = encoder.embed([IDS[0].tolist()], pooling="mean")
        with serve(copy.deepcopy(decoder), engine=EngineOptions(max_num_seqs=2, max_model_len=32)) as served:
            answers = served.generate_batch([IDS[0].tolist()] * 2, [greedy, sampled])
    assert answers[0].token_ids == tokens
    assert len(answers[1].token_ids) == 3
    mean = hidden[0].mean(0).numpy()
    np.testing.assert_allclose(embedded[0] / np.linalg.norm(embedded[0]), mean / np.linalg.norm(mean), atol=1e-4)


def test_extracted_functions_run_in_inference_mode(expected):
    weights, function = extract_jax(bert())
    with torch.inference_mode():
        out = function(weights, (IDS,))
    np.testing.assert_allclose(out.last_hidden_state, expected[2].numpy(), atol=1e-4)


class Autocast(torch.nn.Module):
    def __init__(self, make):
        super().__init__()
        self.linear, self.make = torch.nn.Linear(4, 4), make

    def forward(self, x):
        with self.make(x):
            return self.linear(x)


@pytest.mark.parametrize("kind", ["cpu", "of the tensor", "all"])
def test_autocast_in_a_forward_is_refused(kind):
    kinds = {
        "cpu": lambda x: torch.autocast("cpu", torch.bfloat16),
        "of the tensor": lambda x: torch.autocast(x.device.type, torch.bfloat16),
        "all": lambda x: torch.amp.autocast(device_type="cpu"),
    }
    weights, function = extract_jax(Autocast(kinds[kind]))
    with pytest.raises(UnsupportedModelError, match=r"torch.autocast: .*convert them by \.to\(dtype\)"):
        function(weights, (np.ones((1, 4), np.float32),))


def test_autocast_that_is_switched_off_changes_nothing():
    module = Autocast(lambda x: torch.autocast(x.device.type, torch.bfloat16, enabled=False))
    weights, function = extract_jax(module)
    found = function(weights, (np.ones((1, 4), np.float32),))
    np.testing.assert_allclose(found, module(torch.ones(1, 4)).detach(), atol=1e-6)


def test_continuous_batching_of_transformers_is_refused():
    model = to_jax(gpt2())
    with pytest.raises(UnsupportedArgumentError, match=r"generate_batch.*serve\(model\)\.generate_batch"):
        model.generate_batch(inputs=[[5, 6, 7]])
    with pytest.raises(UnsupportedArgumentError, match="cache_implementation='paged'"):
        model.generate(IDS, cache_implementation="paged", **LENGTHS)
