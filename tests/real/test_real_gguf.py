"""GGUF files as they are in the wheels, beside transformers' dequantization of the same files."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import texts
import torch
from fetch import gguf_of
from test_real_start import QUESTION, RUN
from transformers import AutoModelForCausalLM

from model_adapters.loading import load_model
from model_adapters.ops.compressed_weight import unpacked
from torchax_serve import SamplingParams, serve


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def pair(request):
    """A name, its file, and transformers' model of it in float32."""
    file = gguf_of(request.param)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    return request.param, file, theirs


def test_every_number_and_the_bytes(pair, found):
    name, file, theirs = pair
    loaded = load_model(file, dtype="float32")
    for parameter, tensor in theirs.state_dict().items():
        np.testing.assert_array_equal(
            np.asarray(unpacked(loaded.weights[parameter])), tensor.numpy(), err_msg=parameter
        )
    assert not loaded.report.unused_tensors and not loaded.report.missing_tensors
    size = file.stat().st_size
    assert loaded.report.weights_bytes < 1.2 * size
    found(name, "GGUF file as it is: weights in memory", f"{loaded.report.weights_bytes / size:.2f} of the file")


LOAD = """import sys
import jax
from model_adapters.loading import load_model, loader
jax.devices()
loaded = [load_model(sys.argv[1]) for _ in range(2)]  # both stay: the second one cannot use memory of the first
print(*(each.report.peak_host_bytes for each in loaded))"""


def test_a_load_takes_a_fifth_more_than_the_file_at_most(found):
    """Memory that is resident for it; the first of a process also imports the classes of the model and the reader."""
    file = gguf_of("smollm2")
    done = subprocess.run([sys.executable, "-c", LOAD, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = (int(line) / file.stat().st_size for line in done.stdout.split())
    found("smollm2", "GGUF file as it is: memory of the host while loading, at most", f"{second:.2f} of the file")
    found("smollm2", "GGUF file as it is: the same with imports of the first load", f"{first:.2f} of the file")
    assert 0.9 < second < 1.2 and first < 1.5  # less than the weights take would mean that nothing was measured


def test_tokens_are_those_of_the_dequantized_model(pair, found):
    name, file, theirs = pair
    with serve(file) as model:
        prompts = texts.prompts(model.tokenizer)[:8]
        answers = model.generate_batch(prompts, SamplingParams(temperature=0, max_new_tokens=8))
        same = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = torch.tensor([prompt])
            wanted = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
            got = list(answer.token_ids)
            assert got == wanted[0, len(prompt) : len(prompt) + len(got)].tolist()
            same += 1
    found(name, "GGUF file as it is: greedy tokens beside transformers in float32", f"{same} of {same} prompts equal")


def test_a_piped_question_to_the_file(tmp_path, found):
    """``torchax-serve run FILE`` answers, and its second start has the first token soon."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "XLA_FLAGS": ""}
    command = [sys.executable, "-c", RUN, "run", str(gguf_of("smollm2")), "--json", "--max-new-tokens", "24"]
    for _ in range(2):
        done = subprocess.run(command, env=environment, input=QUESTION, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["text"] == "The capital of France is Paris."
    assert answer["stats"]["ttft_s"] < 5
    taken = 1024 * int(re.search(r"^VmHWM:\s+(\d+) kB", done.stderr, re.M)[1])
    found(
        "smollm2", "`run` on the GGUF file, peak memory of a second start, libraries included", f"{taken / 1e9:.2f} GB"
    )
    assert taken < 0.7e9  # 0.17 are libraries, 0.29 with JAX's plug-in for CUDA
