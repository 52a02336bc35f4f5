"""Programs that outlive the process: found by what they were made from, refused when anything of it differs."""

import os
import subprocess
import sys

import jax
import pytest
import torch
from tiny_models import prompts, tiny_model

from model_adapters.ops import use
from torchax_serve import program_cache, serve, to_jax

RUN = """
import sys, torch
from torchax_serve import serve
with serve(sys.argv[1]) as model:
    steps = model.torch_model._jax_runtime.steps
    ids = torch.arange(3, 9)[None]
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)[0].tolist()
    steps.cache.flush()
    print(tokens, dict(steps.num_traces), steps.cache.num_loaded)
"""


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder that programs are kept in."""
    folder = tmp_path / "compiled"
    monkeypatch.setattr("torchax_serve.open_model.programs_dir", lambda: folder / "programs")
    return folder / "programs"


@pytest.fixture
def checkpoint(tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def generate(checkpoint, **kwargs):
    """(tokens, traces by function, programs read from the folder) of one life of a model."""
    with serve(checkpoint, **kwargs) as model:
        steps = model.torch_model._jax_runtime.steps
        ids = prompts()[0][1:]
        output = model.generate(ids, max_new_tokens=5)
        steps.cache.flush()
        return output.tolist(), dict(steps.num_traces), steps.cache.num_loaded


def test_a_second_process_neither_traces_nor_compiles(checkpoint, tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    lines = [
        subprocess.run(
            [sys.executable, "-c", RUN, str(checkpoint)], env=environment, capture_output=True, text=True, check=True
        ).stdout.splitlines()[-1]
        for _ in range(2)
    ]
    tokens = tiny_model("qwen3").generate(torch.arange(3, 9)[None], max_new_tokens=6)[0].tolist()
    assert lines == [f"{tokens} {{'forward': 1, 'decode': 1}} 0", f"{tokens} {{}} 2"]


def test_a_second_model_of_the_same_folder_takes_the_first_ones_programs(checkpoint, kept):
    first, second = generate(checkpoint), generate(checkpoint)
    assert first[1:] == ({"forward": 1, "decode": 1}, 0)
    assert second == (first[0], {}, 2)


@pytest.mark.parametrize("change", ["dtype", "config", "source", "xla flags", "precision"])
def test_a_program_of_something_else_is_not_taken(checkpoint, kept, change, monkeypatch):
    generate(checkpoint)
    kwargs = {}
    if change == "dtype":
        kwargs["dtype"] = "bfloat16"
    if change == "config":
        file = checkpoint / "config.json"
        file.write_text(file.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.1'))
        assert "0.1" in file.read_text()
    if change == "source":
        monkeypatch.setattr(program_cache, "_installed", lambda: "another state of this project's code")
    if change == "xla flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    with jax.default_matmul_precision("highest" if change == "precision" else None):
        assert generate(checkpoint, **kwargs)[1:] == ({"forward": 1, "decode": 1}, 0)


def test_an_implementation_chosen_by_hand_is_compiled_anew_and_not_kept(checkpoint, kept):
    with use("decode_attention", "reference"):
        assert generate(checkpoint)[2] == 0
    assert not kept.exists()


@pytest.mark.parametrize("content", [b"", b"no program", None])
def test_a_damaged_file_costs_a_compilation_and_is_replaced(checkpoint, kept, content):
    tokens, *_ = generate(checkpoint)
    for file in kept.iterdir():
        file.write_bytes(file.read_bytes()[:1000] if content is None else content)
    jax.clear_caches()
    again = generate(checkpoint)
    assert again == (tokens, {"forward": 1, "decode": 1}, 0)


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(checkpoint, kept):
    kept.parent.mkdir()
    kept.write_text("a file where the folder should be")
    assert generate(checkpoint) == generate(checkpoint)


def test_programs_of_an_object_are_not_kept(kept):
    to_jax(tiny_model("llama")).generate(prompts()[0][1:], max_new_tokens=3)
    with serve(tiny_model("llama")) as model:
        model.generate(prompts()[0][1:], max_new_tokens=3)
    assert not kept.exists()


def test_what_tracing_found_out_comes_with_the_program(tmp_path, kept):
    """opt counts positions by a mask, which shows at the first trace of a decode step."""
    tiny_model("opt").save_pretrained(tmp_path / "opt")
    first = generate(tmp_path / "opt")
    with serve(tmp_path / "opt") as model:
        output = model.generate(prompts()[0][1:], max_new_tokens=5, return_dict_in_generate=True, output_logits=True)
        assert output.sequences.tolist() == first[0]
        assert model.torch_model._jax_runtime.program.needs_mask
        logits = model(prompts()[0][1:])
        assert type(logits).__name__ == "CausalLMOutputWithPast"
