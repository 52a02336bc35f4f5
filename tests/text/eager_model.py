"""What text in, text out asks of a model, by eager transformers: a tiny random Llama with the test's tokenizers."""

import functools

import torch
from text_handles import IteratorHandle
from tokenizers_of_test import byte_level_bpe
from transformers import LlamaConfig, LlamaForCausalLM

TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)


_greedy_ids = {}  # eager decoding takes most of the time of these tests


class EagerModel:
    name = "tiny"

    def __init__(self, module, tokenizer):
        self.module, self.config = module, module.config
        self.tokenizer = self.text_tokenizer = tokenizer
        self.request_defaults = module.generation_config
        self.max_new_tokens_seen = []
        self.num_decoded = 0
        self.closed = False

    def submit_prompt(self, request, fork_of=None):
        assert request.generate_inputs is None
        return IteratorHandle(request, self.new_tokens(request))

    def new_tokens(self, request):
        """Yields the new token ids, the end-of-sequence token included."""
        prompt_ids, generation_config, seed = request.prompt_ids, request.params.config, request.params.seed
        if seed is not None:
            torch.manual_seed(seed)
        self.max_new_tokens_seen.append(generation_config.max_new_tokens)
        try:
            for token_id in self._new_ids(tuple(prompt_ids), generation_config):
                self.num_decoded += 1
                yield token_id
        finally:
            self.closed = True

    def _new_ids(self, prompt_ids, config):
        key = (self.config.vocab_size, prompt_ids, config.to_json_string())
        if config.do_sample or key not in _greedy_ids:
            _greedy_ids[key] = self.module.generate(torch.tensor([prompt_ids]), generation_config=config)[0].tolist()
        return _greedy_ids[key][len(prompt_ids) :]

    def generate(self, **kwargs):
        return self.module.generate(**kwargs)


@functools.cache
def _module(vocab_size):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def eager_model(make_tokenizer=byte_level_bpe, chat_template=TEMPLATE):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = chat_template
    return EagerModel(_module(len(tokenizer)), tokenizer)
