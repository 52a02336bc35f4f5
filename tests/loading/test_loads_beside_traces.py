"""Loads and traces in several threads: transformers sets the default dtype, ties and initialisations of all of them."""

import threading

import pytest
import torch
from loading_models import tiny_folder, tiny_model
from transformers.models.llama import modeling_llama

from model_adapters.loading.loader import load_model
from torchax_serve import to_jax

SECONDS = 1.5  # in which a load or a trace of a tiny model ends, unless it waits


@pytest.fixture
def within_mlp(monkeypatch):
    """Runs a function at the first call of a Llama's MLP."""

    def at_first_call(function):
        of_class, calls = modeling_llama.LlamaMLP.forward, []

        def forward(self, x):
            calls.append(self)
            if len(calls) == 1:
                function()
            return of_class(self, x)

        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)

    return at_first_call


def test_a_trace_does_not_see_the_dtype_of_a_load(tmp_path, within_mlp):
    tiny_folder(tmp_path, "gemma3", torch.bfloat16)
    load_model(tmp_path)  # what it imports is there from now on
    loaded, seen = [], []
    load = threading.Thread(target=lambda: loaded.append(load_model(tmp_path)))

    def begin_load():
        load.start()
        load.join(SECONDS)
        seen.append((load.is_alive(), torch.get_default_dtype()))

    eager, ids = tiny_model("llama"), torch.arange(8)[None]
    expected = eager(ids).logits
    within_mlp(begin_load)
    logits = to_jax(eager)(ids).logits
    load.join(60)
    assert seen == [(True, torch.float32)] and len(loaded) == 1
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_load_does_not_lose_its_settings_to_another(tmp_path, monkeypatch):
    """A build that begins in the middle of another one would leave the dtype and the ties of the first behind."""
    first, second = tiny_folder(tmp_path / "a", "llama_tied", torch.bfloat16), tiny_folder(tmp_path / "b", "llama_tied")
    alone = [load_model(path) for path in (first, second)]
    of_class, is_first = modeling_llama.LlamaModel.__init__, []
    loaded = {}
    other = threading.Thread(target=lambda: loaded.update(second=load_model(second)))

    def build(self, config):
        if not is_first:
            is_first.append(True)
            other.start()
            other.join(SECONDS)
        of_class(self, config)

    monkeypatch.setattr(modeling_llama.LlamaModel, "__init__", build)
    loaded["first"] = load_model(first)
    other.join(60)
    assert torch.get_default_dtype() == torch.float32
    for expected, found in zip(alone, (loaded["first"], loaded["second"]), strict=True):
        assert expected.weights.keys() == found.weights.keys()
        assert all((expected.weights[name] == found.weights[name]).all() for name in expected.weights)
        assert expected.dtype == found.dtype
