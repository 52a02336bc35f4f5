"""A model whose answers a person can foresee: it says its prompt back; asked to be slow, it counts until stopped.

Run as a program it is the command line with this model in place of every other.
"""

import itertools
import sys
import time
import types
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))  # of a program this folder is

from text_handles import IteratorHandle

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}({{ m['content'] }}){% endfor %}"
    "{% if add_generation_prompt %}a({% endif %}"
)


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<pad>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def replace_loading(modules, serve):
    """Makes commands load models by `serve`, in a table like ``sys.modules``; what loads them is not imported."""
    name = "torchax_serve.entrypoints.serve"
    modules[name] = types.ModuleType(name)
    modules[name].serve_without_pipelines = serve


class FakeModel:
    name = "fake"

    def __init__(self, chat_template=TEMPLATE, max_position_embeddings=4096):
        self.tokenizer = self.text_tokenizer = byte_tokenizer()
        self.tokenizer.chat_template = chat_template
        self.config = LlamaConfig(
            vocab_size=len(self.tokenizer), max_position_embeddings=max_position_embeddings, num_hidden_layers=1
        )
        self.request_defaults = GenerationConfig(eos_token_id=1, pad_token_id=0)
        self.requests = []
        self.engine = types.SimpleNamespace(description="cache of 7 pages")
        self.load_report = types.SimpleNamespace(quantization=None)
        self.closed = False

    def submit_prompt(self, request, fork_of=None):
        self.requests.append((request.params.config, request.params.seed))
        return IteratorHandle(request, self.new_ids(request.prompt_ids, request.max_new_tokens))

    def new_ids(self, prompt_ids, limit):
        prompt = self.tokenizer.decode(prompt_ids)
        text = itertools.chain.from_iterable(f"{i} " for i in itertools.count()) if "slow" in prompt else prompt
        for character in itertools.islice(text, limit):
            if "slow" in prompt:
                time.sleep(0.02)
            yield from self.tokenizer(character)["input_ids"]
        if "slow" not in prompt and len(prompt) < limit:
            yield 1

    def stats(self):
        return f"{len(self.requests)} asked" if self.requests else None

    def close(self):
        self.closed = True


if __name__ == "__main__":
    import fcntl
    import os
    import termios

    from torchax_serve.cli.main import main

    if os.environ.get("OWN_TERMINAL"):  # so that the terminal turns Ctrl-C into a signal for this process
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    replace_loading(sys.modules, lambda name, **options: FakeModel())
    sys.argv[0] = "torchax-serve"
    main()
