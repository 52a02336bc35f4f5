"""Step 2: `extract_jax` makes the model a pure function of its weights; `jax.jit` compiles it."""

import time

import jax
import jax.numpy as jnp
from transformers import AutoModelForCausalLM, AutoTokenizer

from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import extract_jax

tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
model = AutoModelForCausalLM.from_pretrained(EMBEDDED).eval()
input_ids = jnp.asarray(tokenizer("Gemma is", return_tensors="np").input_ids)

weights, forward = extract_jax(model)  # a dict of arrays, and a function (weights, args, kwargs)


def logits(weights, input_ids):
    # The flag stays out of the arguments: JAX would trace it, and `if use_cache:` needs to know its value.
    return forward(weights, (input_ids,), {"use_cache": False}).logits


def best_of(function, repeats=3):
    """Seconds of the fastest call after the first, which compiles."""
    jax.block_until_ready(function(weights, input_ids))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(weights, input_ids))
        times.append(time.perf_counter() - start)
    return min(times)


compiled = jax.jit(logits)  # weights are an argument: captured, they would become constants of the program
eager_s, compiled_s = best_of(logits), best_of(compiled)
print(f"op by op {1e3 * eager_s:.1f} ms, compiled {1e3 * compiled_s:.1f} ms")
print("most likely next token:", repr(tokenizer.decode(int(compiled(weights, input_ids)[0, -1].argmax()))))
