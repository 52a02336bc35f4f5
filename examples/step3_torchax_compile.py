"""Step 3: `torchax.compile`, the shorter way to a compiled module that takes and gives torch tensors."""

import warnings

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model_adapters.loading.model_source import EMBEDDED
from pytree_registry.torchax_import import import_torchax

torchax = import_torchax()
warnings.simplefilter("ignore", FutureWarning)  # torchax.compile reads every attribute, deprecated ones too


class Logits(torch.nn.Module):
    """Flags are constants in here, and the result is a plain tensor: all that `torchax.compile` needs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids, use_cache=False, return_dict=False)[0]


tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
model = AutoModelForCausalLM.from_pretrained(EMBEDDED).eval()
input_ids = tokenizer("Gemma is", return_tensors="pt").input_ids

with torchax.default_env(), torch.no_grad():
    compiled = torchax.compile(Logits(model).to("jax"))
    logits = compiled(input_ids.to("jax"))

print("most likely next token:", repr(tokenizer.decode(int(logits.jax()[0, -1].argmax()))))
