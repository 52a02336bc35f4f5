"""The HTTP server of a bundle that is watched, by OpenAI's client: a new version comes while an answer is streamed."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest
from exported import ENGINE, with_other_weights
from ports import free_port
from transformers import AutoTokenizer

from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import SamplingParams, serve

ROOT = Path(__file__).parents[2]
QUESTION = [{"role": "user", "content": "What is 3 plus 4?"}]
PROMPT, LONG = "Once upon a time", 100
START = """
import sys
class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "torchax"):
            raise AssertionError(f"{name} is imported")
sys.meta_path.insert(0, Refusal())
from torchax_serve.cli.main import main
sys.argv = ["torchax-serve", *sys.argv[1:]]
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A bundle with a version 1."""
    out = tmp_path_factory.mktemp("bundles") / "embedded"
    with serve(EMBEDDED, dtype="float32", engine=ENGINE, pack_weights=False) as model:
        model.export(out, reference=False)
    return out


@pytest.fixture(scope="module")
def client(folder):
    port = free_port()
    command = [sys.executable, "-c", START, "serve", str(folder), "--watch", "--port", str(port)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            wait_for(lambda: is_ready(port, process), 300)
            yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=300)
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def is_ready(port, process):
    assert process.poll() is None, process.stderr.read()
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    except httpx.HTTPError:
        return False


def wait_for(condition, within_s):
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.2)


def greedy_text(folder, prompt, num_tokens):
    """What the model in a folder of transformers answers here, with PyTorch to trace it."""
    with serve(folder, dtype="float32", engine=ENGINE, pack_weights=False) as model:
        params = SamplingParams(max_new_tokens=num_tokens, temperature=0, ignore_eos=True)
        (found,) = model.generate_batch([prompt], params)
        return found.text


def asked(client, prompt, num_tokens, **options):
    model = client.models.list().data[0].id
    extra = {"ignore_eos": True}
    return client.completions.create(
        model=model, prompt=prompt, max_tokens=num_tokens, temperature=0, extra_body=extra, **options
    )


def test_a_new_version_while_an_answer_is_streamed(folder, client):
    ids = AutoTokenizer.from_pretrained(EMBEDDED)(PROMPT)["input_ids"]
    stream = asked(client, ids, LONG, stream=True)
    pieces = [next(stream).choices[0].text]
    checkpoint = with_other_weights(folder, 2)
    pieces += [piece.choices[0].text for piece in stream if piece.choices]
    old, new = (greedy_text(each, ids, LONG) for each in (EMBEDDED, checkpoint))
    assert "".join(pieces) == old != new

    wait_for(lambda: asked(client, ids, LONG).choices[0].text != old, 120)
    assert asked(client, ids, LONG).choices[0].text == new
    shutil.copytree(folder / "2", folder / ".partial-3")
    (folder / ".partial-3" / "weights.safetensors").write_bytes(b"")
    (folder / ".partial-3").rename(folder / "3")  # damaged: it is passed over
    time.sleep(3)
    assert asked(client, ids, LONG).choices[0].text == new


def test_chats_and_what_a_bundle_cannot_do(client):
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=8, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content and len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    found = [
        client.chat.completions.create(model=model, messages=QUESTION, max_tokens=8, temperature=0.9, seed=5)
        for _ in range(2)
    ]
    assert found[0].choices[0].message.content == found[1].choices[0].message.content
    with pytest.raises(openai.APIStatusError) as refused:
        client.embeddings.create(model=model, input="text")
    assert refused.value.status_code in (400, 404)
