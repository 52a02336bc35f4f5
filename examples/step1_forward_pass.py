"""Step 1: the first forward pass. A PyTorch model moves to JAX as it would move to a GPU, and runs op by op."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model_adapters.loading.model_source import EMBEDDED
from pytree_registry.torchax_import import import_torchax

torchax = import_torchax()  # `import torchax`, also where torch is newer than torchax's last release

tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)  # or any hub id
model = AutoModelForCausalLM.from_pretrained(EMBEDDED).eval()
input_ids = tokenizer("Gemma is", return_tensors="pt").input_ids

with torchax.default_env(), torch.no_grad():
    model.to("jax")  # every parameter is now a torch.Tensor around a jax.Array
    logits = model(input_ids.to("jax"), use_cache=False).logits

array = logits.jax()
print(f"{type(logits).__name__} around {type(array).__name__}, shape {array.shape}, on {array.device}")
print("most likely next token:", repr(tokenizer.decode(int(array[0, -1].argmax()))))
