"""Tiny models and their folders in quantized formats, packed here by plain torch."""

import json

import numpy as np
import torch
import transformers as tf
from safetensors.torch import save_file

from model_adapters.loading import load_model
from model_adapters.ops.quantized_weight import QuantizedWeight

LLAMA = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 192,  # not a multiple of the blocks of 128
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_llama(dtype=torch.bfloat16, **changes):
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**LLAMA, **changes}))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.to(dtype).eval()


def tensors_of(model):
    return {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}


def projections(model):
    return [name for name in model.state_dict() if name.endswith("_proj.weight")]


def write(folder, model, tensors, settings, metadata=None):
    """Writes a folder with `tensors`, and the configuration of `model` with `settings`."""
    folder.mkdir(parents=True, exist_ok=True)
    header = {"format": "pt", **(metadata or {})}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", header)
    content = json.loads(model.config.to_json_string())
    content |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    if settings is not None:
        content["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def replaced(model, make):
    """The tensors of `model`, each projection replaced by the parts that ``make(name, weight)`` returns."""
    tensors = tensors_of(model)
    for name in projections(model):
        tensors |= make(name.removesuffix(".weight"), tensors.pop(name))
    return tensors


def pack_words(numbers, bits, dim):
    """Numbers in int32 words along `dim`, the first in the lowest bits."""
    moved = numbers.to(torch.int64).movedim(dim, -1)
    moved = moved.reshape(*moved.shape[:-1], -1, 32 // bits)
    words = sum(moved[..., i] << (bits * i) for i in range(32 // bits))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).movedim(-1, dim).contiguous()


def check_weights(folder, expected, *, act_dtype="none", quantized=None, dtype="float32", **options):
    """Loads `folder`; the quantized weights named in `expected` must have these numbers, bit for bit."""
    loaded = load_model(folder, dtype=dtype, **options)
    for name, tensor in expected.items():
        weight = loaded.weights[name]
        assert isinstance(weight, QuantizedWeight), f"{name} is dense"
        assert weight.scheme.act_dtype == act_dtype
        got, wanted = np.asarray(weight.unpacked()), tensor.to(getattr(torch, dtype))
        assert got.shape == tuple(wanted.shape), name
        np.testing.assert_array_equal(got.astype(np.float32), wanted.detach().float().numpy(), err_msg=name)
    names = [name for name, weight in loaded.weights.items() if isinstance(weight, QuantizedWeight)]
    assert len(names) == (len(expected) if quantized is None else quantized), "other weights are quantized"
    return loaded


def dense_twin(model, expected):
    """`model` with the numbers of `expected`, in float32."""
    eager = tf.AutoModelForCausalLM.from_config(model.config).float().eval()
    eager.load_state_dict({**{name: tensor.float() for name, tensor in model.state_dict().items()}, **expected})
    return eager


def check_generates(folder, reference, *, new_tokens=8, **options):
    """Serves `folder`; its greedy tokens must be those of `reference`, a model of transformers in float32."""
    from torchax_serve import EngineOptions, SamplingParams, serve

    prompt = [5, 17, 40, 3, 61]
    with torch.no_grad():
        wanted = reference.generate(
            torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(prompt) :].tolist()
    with serve(folder, dtype="float32", engine=EngineOptions(max_num_seqs=2), **options) as model:
        sampling = SamplingParams(temperature=0, max_new_tokens=new_tokens, min_new_tokens=new_tokens)
        got = list(model.iter_tokens(prompt, params=sampling))
    assert got == wanted
