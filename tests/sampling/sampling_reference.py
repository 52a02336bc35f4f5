"""What transformers computes, by its own processors on CPU tensors; and the sampler of a static batch, step by step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from torchax_serve.sampling import BatchSampler
from torchax_serve.sampling.batch_sampler import BatchState
from torchax_serve.sampling.sample import append, choose

EOS = [2, 5]
PAD = 1


@functools.cache
def tiny_model(vocab_size):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=EOS,
        pad_token_id=PAD,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


def prepared_config(vocab_size, prompt_len, options):
    """The config as `generate` has it when it builds its processors."""
    model = tiny_model(vocab_size)
    config, _ = model._prepare_generation_config(GenerationConfig(**{"max_new_tokens": 8, **options}))
    model._prepare_special_tokens(config, True, device="cpu")
    return model._prepare_generated_length(
        generation_config=config,
        has_default_max_length=False,
        has_default_min_length=True,
        model_input_name="input_ids",
        input_ids_length=prompt_len,
        inputs_tensor=None,
    )


def processors_of(config, vocab_size, prompt_ids, attention_mask):
    ids = torch.tensor(prompt_ids, dtype=torch.long)
    return tiny_model(vocab_size)._get_logits_processor(
        config,
        input_ids_seq_length=ids.shape[1],
        encoder_input_ids=ids,
        device="cpu",
        model_kwargs={"attention_mask": torch.tensor(attention_mask)},
    )


def reference_scores(processors, tokens, logits):
    scores = torch.tensor(np.asarray(logits), dtype=torch.float32)
    return processors(torch.tensor(np.asarray(tokens), dtype=torch.long), scores).numpy()


def left_padded_prompts(rng, batch, prompt_len, num_tokens):
    """Random prompts over few tokens (so that they repeat) and their mask; the last row has no padding."""
    ids = rng.integers(0, num_tokens, (batch, prompt_len))
    num_padding = np.append(rng.integers(0, prompt_len, batch - 1), 0)
    mask = (np.arange(prompt_len) >= num_padding[:, None]).astype(np.int64)
    return np.where(mask == 1, ids, PAD), mask


@functools.partial(jax.jit, static_argnums=0)
def compiled_choose(spec, options, state, logits):
    return choose(spec, options, state, logits)


class Batch(BatchSampler):
    """A static batch whose scores can be read, and whose tokens are given, one step at a time."""

    def __init__(self, config, prompt_ids, *, vocab_size, seed=0, attention_mask=None):
        super().__init__(config, prompt_ids, vocab_size=vocab_size, seed=seed, attention_mask=attention_mask)

    def chosen(self, logits):
        """Tokens and processed scores for logits float[batch, vocab]; the state stays as it is."""
        spec = dataclasses.replace(self._spec, scores=True)
        return compiled_choose(spec, self._options.rows.advanced(self.state.num_new), self.state.sampler, logits)

    def append(self, tokens):
        """Goes on with tokens int[batch], whatever the scores."""
        rows = self._options.rows.advanced(self.state.num_new)
        sampler = append(self._spec, rows, self.state.sampler, jnp.asarray(tokens, jnp.int32))
        self.state = BatchState(sampler, self.state.num_new + 1, self.state.ended)
