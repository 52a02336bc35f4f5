"""Many threads on one served model: `generate`, a batch by itself, beside requests on the engine."""

import threading

import jax
import jax.numpy as jnp
import pytest
import torch
import transformers
from engine_models import VOCAB_SIZE, expected_tokens, tiny_model
from thorough import thorough
from threads import at_once

from model_adapters.program.model_program import CallSpec
from torchax_serve import EngineOptions, serve, to_jax

SMALL = EngineOptions(max_model_len=64, max_num_seqs=4, page_size=8, max_num_batched_tokens=32)
NEW = 6


def prompts():
    generator = torch.Generator().manual_seed(7)
    lengths = (3, 40, 17, 9, 33, 5, 26, 12)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


# One packed and one per-sequence; opt also counts its positions by a mask that it makes.
@pytest.mark.parametrize("name", ["opt", thorough("bloom")])
def test_generate_and_the_engine_at_once(name):
    """From the first call on: programs of both are traced while those of the other are traced and run."""
    with serve(tiny_model(name), engine=SMALL) as model:

        def generate(prompt):
            ids = torch.tensor([prompt] * 2)
            given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
            rows = model.generate(ids, **given)[:, len(prompt) :].tolist()
            assert rows[0] == rows[1]
            return rows[0]

        def stream(prompt):
            return list(model.iter_tokens(prompt, transformers.GenerationConfig(max_new_tokens=NEW)))

        def four_times(item):
            index, prompt = item
            ways = (generate, stream) if index % 2 else (stream, generate)
            return [ways[turn % 2](prompt) for turn in range(4)]

        found = at_once(four_times, list(enumerate(prompts())))
        left = [
            f"{part}.{key}"
            for part, module in model.torch_model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, torch.Tensor) and hasattr(value, "jax")
        ]
        assert left == []
    assert found == [[expected_tokens(name, prompt, NEW)] * 4 for prompt in prompts()]


def test_a_trace_that_another_one_waits_for_leaves_nothing_on_the_module(monkeypatch):
    model = to_jax(tiny_model("llama"))
    program = model._jax_runtime.program
    forward = program._forward_of_class
    is_inside, may_go_on = threading.Event(), threading.Event()

    def keeping(**kwargs):
        output = forward(**kwargs)
        model.model.scratch = output.logits
        is_inside.set()
        may_go_on.wait(60)
        return output

    monkeypatch.setattr(program, "_forward_of_class", keeping)
    weights, ids = model._jax_runtime.weights, jnp.full((1, 7), 5)

    def trace():  # as the engine does, past the programs of `forward`, which are traced one by one
        jax.eval_shape(lambda ids: program.forward(weights, None, None, {"input_ids": ids}, CallSpec())[0], ids)

    threads = [threading.Thread(target=model, args=(torch.tensor([[5, 6]]),)), threading.Thread(target=trace)]
    threads[0].start()
    assert is_inside.wait(60)
    threads[1].start()
    threads[1].join(1)  # for it to get as far as it can
    may_go_on.set()
    for thread in threads:
        thread.join(60)
    assert getattr(model.model, "scratch", None) is None
