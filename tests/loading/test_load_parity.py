"""Against transformers' own `from_pretrained`: every tensor, and a forward."""

import jax
import numpy as np
import pytest
import torch
from loading_models import CONFIGS, tiny_folder
from thorough import except_for

from model_adapters.bridge.extract import functional_call
from model_adapters.bridge.views import named_tensors
from model_adapters.loading import load_model


def as_numpy(tensor):
    tensor = tensor.detach()
    return tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def check_same_tensors(loaded, reference):
    expected = named_tensors(reference)
    assert loaded.weights.keys() == expected.keys()
    for name, tensor in expected.items():
        array = loaded.weights[name]
        wanted = {torch.int64: "int32"}.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        assert (str(array.dtype), array.shape) == (wanted, tuple(tensor.shape)), name
        np.testing.assert_array_equal(np.asarray(array).astype(as_numpy(tensor).dtype), as_numpy(tensor), err_msg=name)
    names = {}
    for name, tensor in expected.items():
        names.setdefault(id(tensor), []).append(name)
    for tied in names.values():
        assert len({id(loaded.weights[name]) for name in tied}) == 1, f"not shared: {tied}"
    assert loaded.report.num_shared == len(expected) - len(names)


def logits_of(module, weights, name, ids):
    forward = functional_call(module)
    fixed = {"return_dict": False} if name == "bert" else {"return_dict": False, "use_cache": False}
    inputs = {"input_ids": ids} if name != "t5" else {"input_ids": ids, "decoder_input_ids": ids}
    return jax.jit(lambda weights, inputs: forward(weights, (), {**inputs, **fixed})[0])(weights, inputs)


# torchax asks JAX for the int64 of torch code and gets int32, which JAX remarks upon
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
@pytest.mark.parametrize("name", except_for(list(CONFIGS)[::2], CONFIGS))
def test_every_tensor_and_a_forward_in_float32(name, tmp_path):
    tiny_folder(tmp_path, name)
    loaded = load_model(tmp_path)
    reference = type(loaded.module).from_pretrained(tmp_path, dtype="auto")
    check_same_tensors(loaded, reference)
    assert all(tensor.is_meta for tensor in named_tensors(loaded.module).values())
    assert not loaded.module.training

    if name in ("mixtral", "qwen3_moe"):  # the default experts call an operator that torchax has no lowering for
        loaded.module.set_experts_implementation("batched_mm")
    ids = np.arange(3, 15, dtype=np.int32)[None]
    inputs = {"input_ids": torch.tensor(ids).long()}
    if name == "t5":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        expected = reference(**inputs).logits.numpy()
    got = np.asarray(logits_of(loaded.module, loaded.weights, name, ids))
    np.testing.assert_allclose(got, expected, atol=2e-6 * max(1.0, np.abs(expected).max()), rtol=0)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe", "mamba", "t5"])
def test_every_tensor_in_bfloat16_from_shards(name, tmp_path):
    tiny_folder(tmp_path, name, torch.bfloat16, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load_model(tmp_path)
    check_same_tensors(loaded, type(loaded.module).from_pretrained(tmp_path, dtype="auto"))
    assert loaded.dtype == jax.numpy.bfloat16


@pytest.mark.parametrize("name", ["llama_tied", "t5", "gemma3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_given_dtype_casts_what_transformers_casts(name, dtype, tmp_path):
    tiny_folder(tmp_path, name)
    loaded = load_model(tmp_path, dtype=dtype)
    check_same_tensors(loaded, type(loaded.module).from_pretrained(tmp_path, dtype=getattr(torch, dtype)))
    kept = {str(array.dtype) for array in loaded.weights.values() if array.dtype == "float32"}
    if (name, dtype) == ("t5", "float16"):  # T5 keeps its `wo` in float32 then
        assert loaded.weights["encoder.block.0.layer.1.DenseReluDense.wo.weight"].dtype == "float32"
        assert kept


def test_generation_defaults_come_along(tmp_path):
    tiny_folder(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.generation_config.eos_token_id == 2
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "do_sample": true, "eos_token_id": [2, 5]}')
    loaded = load_model(tmp_path)
    assert (loaded.generation_config.temperature, loaded.generation_config.eos_token_id) == (0.25, [2, 5])
    assert loaded.generation_config is loaded.module.generation_config
