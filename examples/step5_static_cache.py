"""Step 5: generation with a static cache: two compiled programs, one for the prompt and one for every further token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer, StaticCache
from transformers.generation.utils import ALL_CACHE_NAMES

from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import extract_jax

NUM_NEW_TOKENS = 12
CACHE = ALL_CACHE_NAMES[0]  # "cache"; before transformers 5.24, "past_key_values"

tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
model = AutoModelForCausalLM.from_pretrained(EMBEDDED).eval()
question = [{"role": "user", "content": "What is JAX?"}]
prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="np", return_dict=True)

weights, forward = extract_jax(model)  # also makes transformers' caches pytrees, so that they go in and out of a jit


@functools.partial(jax.jit, donate_argnames="cache")  # the old cache's memory becomes the new one's
def step(weights, cache, input_ids):
    output = forward(weights, (input_ids,), {CACHE: cache, "use_cache": True})
    return output[CACHE], output.logits[:, -1].argmax(-1)[:, None]


cache = StaticCache(config=model.config, max_cache_len=prompt.input_ids.shape[1] + NUM_NEW_TOKENS)
cache = jax.tree.map(jnp.asarray, cache)
cache, token = step(weights, cache, jnp.asarray(prompt.input_ids))  # prefill: all tokens of the prompt at once
new_tokens = [int(token[0, 0])]
end_ids = np.atleast_1d(model.generation_config.eos_token_id)  # one, or several
while len(new_tokens) < NUM_NEW_TOKENS and new_tokens[-1] not in end_ids:
    cache, token = step(weights, cache, token)  # decode: shapes stay as they are, so nothing is compiled again
    new_tokens.append(int(token[0, 0]))

print(tokenizer.decode(new_tokens, skip_special_tokens=True))
