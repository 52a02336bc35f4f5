"""Tests share compiled programs of equal models, and of no others."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import shared_programs
import torch
from model_identity import identity_of
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from torchax_serve import EngineOptions, SamplingParams, serve

ENGINE = EngineOptions(max_model_len=64, max_num_seqs=4, page_size=8, max_num_batched_tokens=32)
PROMPT, NEW = [5, 9, 3, 21], 6


def llama(**changes):
    sizes = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1}
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**sizes | {"num_attention_heads": 2, "eos_token_id": None} | changes))
    return model.eval()


def identity(model, kind="object"):
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    weights = {name: SimpleNamespace(shape=each.shape, dtype=each.dtype) for name, each in state.items()}
    return identity_of(
        SimpleNamespace(source=SimpleNamespace(kind=kind), module=model, weights=weights, config=model.config)
    )


def test_equal_models_with_other_weights_have_one_identity():
    first, second = llama(), llama()
    with torch.no_grad():
        second.lm_head.weight.mul_(2)
    second.generation_config.max_new_tokens = 3
    assert identity(first) == identity(second) is not None


class OwnMlp(LlamaMLP):
    def forward(self, x):
        return super().forward(x) * 2


def _of_own_class(model):
    model.model.layers[0].mlp = OwnMlp(model.config)


def _with_own_forward(model):
    model.model.layers[0].mlp.forward = lambda x: x


def _with_hook(model):
    model.model.norm.register_forward_hook(lambda module, args, output: output * 2)


def _with_unknown_attribute(model):
    model.something = object()


@pytest.mark.parametrize("change", [_of_own_class, _with_own_forward, _with_hook, _with_unknown_attribute])
def test_what_cannot_be_described_has_no_identity(change):
    model = llama()
    change(model)
    assert identity(model) is None


def test_a_model_of_files_has_an_identity_of_its_own():
    assert identity(llama(), kind="folder") is None


CHANGES = {
    "an attribute": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.5),
    "a number of a config": lambda model: setattr(model.model.layers[0].self_attn.config, "rms_norm_eps", 0.5),
    "a function of a library": lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.ReLU()),
    "a buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(2),
    "the mode": lambda model: model.model.layers[0].mlp.train(),
    "the dtype": lambda model: model.to(torch.bfloat16),
    "a shape": lambda model: setattr(model, "lm_head", torch.nn.Linear(24, 64, bias=False)),
    "a method in place of another": lambda model: setattr(model.model.norm, "forward", functools.partial(torch.relu)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_other_models_have_other_identities(what):
    model = llama()
    CHANGES[what](model)
    assert identity(model) != identity(llama())


def tokens_and_traces(model):
    with serve(model, engine=ENGINE) as served:
        (answer,) = served.generate_batch([PROMPT], SamplingParams(max_new_tokens=NEW, temperature=0))
        programs = served._runtimes[0].steps.executables
        programs.background.wait()  # what it compiles ahead
        programs.wait_for_writes()
        return list(answer.token_ids), sum(programs.num_traces.values()), programs.num_loaded


def expected(model):
    ids = torch.tensor([PROMPT])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return output[0, len(PROMPT) :].tolist()


@pytest.fixture
def folder():
    if (name := os.environ.get(shared_programs.VARIABLE)) is None:
        pytest.skip("this run shares no programs (--own-programs)")
    return Path(name)


def turned():
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    return model


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_an_equal_model_traces_nothing_and_has_its_own_weights(folder, is_in_memory):
    tokens_and_traces(llama())
    if not is_in_memory:
        shared_programs.let_go()
    found, num_traces, num_loaded = tokens_and_traces(turned())
    assert (found, num_traces) == (expected(turned()), 0)
    assert found != expected(llama())
    assert num_loaded >= 2


def test_another_model_makes_its_own(folder):
    tokens_and_traces(llama())
    other = llama()
    other.model.layers[0].self_attn.scaling = 1.5
    found, num_traces, _ = tokens_and_traces(other)
    assert found == expected(other) and num_traces >= 2


def test_a_damaged_program_is_made_anew(folder):
    own = functools.partial(llama, hidden_size=32)  # of this test alone: other processes read what lies there
    shared_programs.let_go()
    tokens_and_traces(own())
    for file in [each for each in shared_programs.let_go() if each.parent == folder]:  # not those of sampling
        file.write_bytes(file.read_bytes()[:-100])
    found, num_traces, _ = tokens_and_traces(own())
    assert found == expected(own()) and num_traces >= 2


@pytest.mark.own_programs
def test_a_marked_test_shares_nothing():
    assert not shared_programs.is_shared_now()
    for _ in range(2):
        found, num_traces, num_loaded = tokens_and_traces(llama())
        assert found == expected(llama()) and num_traces >= 2 and num_loaded == 0


def test_a_test_that_replaces_functions_shares_nothing(folder, monkeypatch):
    assert not shared_programs.is_shared_now()


def test_the_folder_goes_with_the_run(tmp_path):
    (tmp_path / "test_one.py").write_text(
        "import os, shared_programs\n"
        "def test_one():\n"
        "    name = os.environ[shared_programs.VARIABLE]\n"
        "    print('folder', name, os.path.isdir(name))\n"
    )
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-n", "0", "-p", "shared_programs_alone", "test_one.py"]
    (tmp_path / "shared_programs_alone.py").write_text(
        "from shared_programs import pytest_configure, pytest_unconfigure\n"
        "def pytest_addoption(parser):\n    parser.addoption('--own-programs', action='store_true')\n"
    )
    paths = os.pathsep.join([str(root / "tests"), str(root), str(tmp_path)])
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    name, existed = done.stdout.split("folder ", 1)[1].split()[:2]
    assert existed == "True" and not Path(name).exists() and name != os.environ.get(shared_programs.VARIABLE)
