"""A second start answers without torch and transformers, with the tokens of the first; what it lacks brings them."""

import json
import os
import shutil
import subprocess
import sys

import hub_lookalike
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import SamplingParams, serve

NAME = "people/tiny"

# Prints the answers of a model as JSON. With "refused", importing torch, transformers or torchax raises at first.
SCRIPT = """
import json, sys

class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "torchax"):
            raise AssertionError(f"{name} is imported")

refusal = Refusal()
if sys.argv[2] == "refused":
    sys.meta_path.insert(0, refusal)
from torchax_serve import SamplingParams, serve

def answers(model):
    chat = model.chat("What is 3 plus 4?", SamplingParams(max_new_tokens=8), stream=True)
    text = "".join(chat)
    drawn = model.stream("The capital of", SamplingParams(max_new_tokens=8, temperature=1.0, seed=5, logprobs=2))
    list(drawn)
    batch = model.generate_batch(["One, two,", [5, 6, 7]], SamplingParams(max_new_tokens=4, ignore_eos=True))
    return {
        "chat": [text, chat.token_ids],
        "drawn": [drawn.token_ids, [round(each.logprob, 3) for each in drawn.logprobs]],
        "batch": [[each.text, each.token_ids] for each in batch],
    }

model = serve(sys.argv[1], **json.loads(sys.argv[3]))
found = {"answers": answers(model), "imported": "torch" in sys.modules or "transformers" in sys.modules}
found["quantization"] = model.load_report.quantization
was_refused = refusal in sys.meta_path
if was_refused:
    sys.meta_path.remove(refusal)
import torch
torch.manual_seed(11)
found["seeded"] = list(model.iter_tokens([5, 6, 7], params=SamplingParams(max_new_tokens=12, temperature=2.0)))
if was_refused:
    found["description"] = repr(model)
    found["beams"] = list(model.iter_tokens([5, 6, 7], params=SamplingParams(max_new_tokens=4, num_beams=2)))
    found["parameters"] = model.torch_model.num_parameters()
    found["template"] = model.tokenizer.chat_template
    found["after"] = answers(model)
print(json.dumps(found))
model.close()
"""


# Asks the command line for an answer, and says on stderr what it has imported. "refused" as above.
RUN = """
import sys
refused = sys.argv.pop(1)
class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "torchax"):
            raise AssertionError(f"{name} is imported")

if refused:
    sys.meta_path.insert(0, Refusal())
from torchax_serve.cli.main import main
main()
"""


def output_of(script, *arguments, environment=()):
    """What a new process prints."""
    command = [sys.executable, "-c", script, *arguments]
    variables = {**os.environ, **dict(environment)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def started(model, *, refused=False, environment=(), **options):
    """What a new process finds out that serves `model`."""
    arguments = [str(model), "refused" if refused else "", json.dumps(options)]
    return json.loads(output_of(SCRIPT, *arguments, environment=environment).splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    copied = tmp_path_factory.mktemp("second_start") / "model"
    shutil.copytree(EMBEDDED, copied)
    return copied


@pytest.fixture(scope="module")
def first(folder):
    return started(folder)


def test_a_second_start_imports_neither_torch_nor_transformers(folder, first):
    assert first["imported"]
    second = started(folder, refused=True)
    assert not second["imported"]
    assert second["answers"] == first["answers"]
    assert second["seeded"] == first["seeded"]  # by torch.manual_seed, whether the model has a torch module or not
    with serve(folder) as model:  # this process has imported transformers: it loads as ever
        assert second["description"].startswith(repr(model)[: repr(model).index(">")])
        assert second["parameters"] == model.torch_model.num_parameters()
        assert second["template"] == model.tokenizer.chat_template
        beams = model.iter_tokens([5, 6, 7], params=SamplingParams(max_new_tokens=4, num_beams=2))
        assert second["beams"] == list(beams)
    assert second["after"] == first["answers"]


# Serves a model in two ways, one after the other, and prints their tokens.
TWO = (
    SCRIPT[: SCRIPT.index("from torchax_serve import")]
    + """
from torchax_serve import SamplingParams, serve
for quantization in (None, "int4"):
    with serve(sys.argv[1], quantization=quantization) as model:
        print(list(model.iter_tokens([5, 6, 7], params=SamplingParams(max_new_tokens=4, ignore_eos=True))))
"""
)


@pytest.mark.thorough
def test_each_of_two_models_of_a_process_is_recorded(folder):
    first = output_of(TWO, str(folder), "")
    assert output_of(TWO, str(folder), "refused") == first


@pytest.mark.thorough
def test_run_imports_neither_torch_nor_transformers(folder):
    arguments = "run", str(folder), "-p", "What is 3 plus 4?", "--max-new-tokens", "8"
    first = output_of(RUN, "", *arguments)
    assert output_of(RUN, "refused", *arguments) == first


@pytest.fixture
def hub(folder, tmp_path):
    """A look-alike of the hub with the model, and the variables of processes that use it."""
    with hub_lookalike.serving() as served:
        served.repositories[NAME] = hub_lookalike.Repository(folder)
        yield served, {"HF_ENDPOINT": served.endpoint, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}


@pytest.mark.thorough
def test_a_model_of_the_hub_with_quantized_weights(hub):
    served, environment = hub
    first = started(NAME, environment=environment, quantization="int8")
    assert first["imported"] and "int8" in first["quantization"]
    del served.requests[:]
    second = started(NAME, refused=True, environment=environment, quantization="int8")
    assert not second["imported"]
    assert (second["answers"], second["quantization"]) == (first["answers"], first["quantization"])
    assert second["after"] == first["answers"]
    asked = [path for _, path in served.requests if NAME in path]
    assert asked == [f"/api/models/{NAME}"]  # whether the branch has moved


def test_changed_weights_are_loaded(folder, first):
    """Last, as it changes the folder."""
    file = folder / "model.safetensors"
    save_file({name: np.roll(array, 1) for name, array in load_file(file).items()}, file, {"format": "pt"})
    after = started(folder)
    assert after["imported"]
    with serve(folder) as model:
        expected = model.generate_batch(["One, two,", [5, 6, 7]], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert after["answers"]["batch"] == [[each.text, each.token_ids] for each in expected]
    assert after["answers"]["batch"] != first["answers"]["batch"]


def test_the_server_imports_no_torch():
    """What a second start of a server needs; the model's own torch side is imported when something asks for it."""
    code = (
        "import sys\nimport torchax_serve.server.lifespan, torchax_serve.server.app\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
