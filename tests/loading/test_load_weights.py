"""What becomes of the weights: sharing, dtypes, placement, memory, and an end by Ctrl-C."""

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from loading_models import edit_json, tiny_folder, tiny_model
from safetensors.torch import load_file, save_file
from thorough import thorough
from transformers import core_model_loading, modeling_utils

from model_adapters.bridge.host_arrays import shares_memory
from model_adapters.bridge.views import named_tensors
from model_adapters.errors import CheckpointError, InvalidArgumentError, OutOfMemoryError, UnsupportedModelError
from model_adapters.loading import load_model, memory, weight_sink
from model_adapters.loading import random_weights as random_init

ROOT = Path(__file__).resolve().parents[2]


def test_a_loaded_object_shares_its_memory():
    model = tiny_model("llama_tied").train()
    loaded = load_model(model)
    assert loaded.module is model
    assert not model.training
    assert loaded.source.kind == "object"
    for name, tensor in named_tensors(model).items():
        assert not tensor.is_meta
        assert shares_memory(loaded.weights[name], tensor), name
    assert loaded.weights["lm_head.weight"] is loaded.weights["model.embed_tokens.weight"]
    assert loaded.tokenizer() is None


def test_arguments_that_a_loaded_object_cannot_honour():
    model = tiny_model("llama")
    for argument in ({"revision": "main"}, {"dtype": "bfloat16"}, {"random_weights": True}, {"strict": True}):
        with pytest.raises(InvalidArgumentError, match=f"{next(iter(argument))} was given with a loaded model"):
            load_model(model, **argument)
    with pytest.raises(InvalidArgumentError, match="is on meta, expected the CPU"):
        load_model(model.to("meta"))


def test_a_quantized_object_is_refused():
    model = tiny_model("llama")
    model.is_quantized = True
    with pytest.raises(UnsupportedModelError, match="is quantized"):
        load_model(model)


def test_the_dtype_is_that_of_the_files_where_the_configuration_has_none(tmp_path):
    tiny_folder(tmp_path, dtype=torch.bfloat16)
    edit_json(tmp_path / "config.json", dtype=None)
    assert load_model(tmp_path).dtype == jax.numpy.bfloat16
    edit_json(tmp_path / "config.json", dtype="float32")
    loaded = load_model(tmp_path)
    assert {str(array.dtype) for array in loaded.weights.values()} == {"float32"}
    edit_json(tmp_path / "config.json", dtype="float64")
    assert load_model(tmp_path).dtype == np.float32


@pytest.mark.parametrize("dtype", ["float64", "int8", "double", 3, None])
def test_dtypes_that_weights_cannot_have(dtype, tmp_path):
    with pytest.raises(InvalidArgumentError, match="expected 'auto', 'bfloat16', 'float16' or 'float32'"):
        load_model(tiny_folder(tmp_path), dtype=dtype)


@pytest.mark.parametrize("dtype", ["bf16", torch.bfloat16, jax.numpy.bfloat16, np.dtype("bfloat16")], ids=str)
def test_ways_to_say_bfloat16(dtype, tmp_path):
    assert load_model(tiny_folder(tmp_path), dtype=dtype).dtype == jax.numpy.bfloat16


@pytest.mark.parametrize("equal", [True, False])
def test_both_of_two_tied_names_in_the_file(equal, tmp_path, monkeypatch):
    """transformers ties them where they are equal and keeps both where they are not; equal ones leave torch at once."""
    tiny_folder(tmp_path, "llama_tied")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if equal else embedding + 1
    save_file(tensors, file, metadata={"format": "pt"})
    at_the_end = []
    tie = modeling_utils.PreTrainedModel.tie_weights

    def observed(model, *args, **options):
        at_the_end.append(model.lm_head.weight.is_meta and model.model.embed_tokens.weight.is_meta)
        return tie(model, *args, **options)

    monkeypatch.setattr(modeling_utils.PreTrainedModel, "tie_weights", observed)
    loaded = load_model(tmp_path)
    assert at_the_end[-1] == equal
    assert (loaded.weights["lm_head.weight"] is loaded.weights["model.embed_tokens.weight"]) == equal
    np.testing.assert_array_equal(loaded.weights["lm_head.weight"], tensors["lm_head.weight"].numpy())


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe"])
def test_the_caller_places_each_array_once(name, tmp_path):
    tiny_folder(tmp_path, name, torch.bfloat16)
    plain = load_model(tmp_path)
    seen = {}

    def put(name, array):
        assert isinstance(array, np.ndarray)
        assert name not in seen
        seen[name] = array.shape
        return jax.device_put(array, jax.devices()[0])

    placed = load_model(tmp_path, device_put=put)
    assert seen.keys() <= placed.weights.keys()
    assert len(seen) == placed.report.num_tensors - placed.report.num_shared
    for key, array in plain.weights.items():
        assert placed.weights[key].dtype == array.dtype
        np.testing.assert_array_equal(placed.weights[key].astype(np.float32), array.astype(np.float32), err_msg=key)


@pytest.mark.parametrize("random_weights", [False, True])
def test_the_path_of_accelerators(random_weights, tmp_path, monkeypatch):
    """Copies in place of sharing, few at a time; random values drawn by JAX. A CPU stands in for the device."""
    tiny_folder(tmp_path, "qwen3_moe", torch.bfloat16)
    reference = load_model(tmp_path)
    waiting = []
    copied = weight_sink.DevicePlacement._bounded

    def watch(placement, array):
        copied(placement, array)
        waiting.append(sum(each.nbytes for each in placement._in_flight))
        return array

    monkeypatch.setattr(weight_sink.DevicePlacement, "_bounded", watch)
    monkeypatch.setattr(weight_sink, "_IN_FLIGHT_BYTES", 5000)
    monkeypatch.setattr(random_init, "LARGE", 512)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    loaded = load_model(tmp_path, random_weights=random_weights)
    assert waiting
    assert max(waiting) <= 5000
    assert {name: (a.shape, a.dtype) for name, a in loaded.weights.items()} == {
        name: (a.shape, a.dtype) for name, a in reference.weights.items()
    }
    if not random_weights:
        for name, array in reference.weights.items():
            np.testing.assert_array_equal(loaded.weights[name].astype(np.float32), array.astype(np.float32))


def test_pickled_tensors_only_when_allowed(tmp_path):
    model = tiny_model("llama_tied")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickle files .* pass allow_pickle=True"):
        load_model(tmp_path)
    loaded = load_model(tmp_path, allow_pickle=True)
    for name, tensor in named_tensors(model).items():
        np.testing.assert_array_equal(loaded.weights[name], tensor.detach().numpy())
    assert loaded.report.num_shared == 1


def test_the_report_counts(tmp_path):
    tiny_folder(tmp_path, "llama_tied")
    tensors = load_file(tmp_path / "model.safetensors")
    loaded = load_model(tmp_path)
    report = loaded.report
    assert report.checkpoint_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert report.weights_bytes == sum({id(a): a.nbytes for a in loaded.weights.values()}.values())
    assert (report.num_tensors, report.num_shared) == (len(loaded.weights), 1)
    assert (report.download_bytes, report.download_s) == (0, 0.0)
    assert report.load_s > 0


@pytest.mark.parametrize(("kind", "megabytes"), [("dense", 130), thorough("moe", 260)])
def test_peak_memory_is_at_most_a_quarter_above_the_checkpoint(kind, megabytes, tmp_path):
    script = ROOT / "benchmarks" / "load_memory.py"
    runpy.run_path(str(script))["write"](kind, megabytes, tmp_path)
    command = [sys.executable, str(script), "--step", "load", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["files_bytes"] > 0.8e6 * megabytes
    assert result["num_files"] > 1
    # what is measured must hold the weights at least: a figure below means that nothing was measured
    assert 0.8 < result["peak_growth_bytes"] / result["files_bytes"] <= 1.25, result


@pytest.mark.thorough
@pytest.mark.parametrize(("preset", "megabytes", "bits"), [("int8", 260, "8.03"), ("int4", 520, "4.25")])
def test_peak_memory_of_quantized_files_on_a_mesh_is_a_fifth_above_them(preset, megabytes, bits, tmp_path):
    """Both tied names are in the files, as other tools write them; the table counts once."""
    script = ROOT / "benchmarks" / "load_memory.py"
    runpy.run_path(str(script))["write"]("dense", megabytes, tmp_path, preset)
    tensors = load_file(tmp_path / "big" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "big" / "model.safetensors", metadata={"format": "pt"})
    table = tensors["lm_head.weight"].nbytes
    command = [sys.executable, str(script), "--step", "load", "--devices", "4", "--folder", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["num_devices"] == 4 and result["quantization"].endswith(f"{bits} bits a number")
    assert 0.9 < result["peak_growth_bytes"] / (result["files_bytes"] - table) <= 1.2, result


def test_weights_that_do_not_fit_are_refused_before_reading(tmp_path, monkeypatch):
    tiny_folder(tmp_path)
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 80_000)
    with pytest.raises(OutOfMemoryError, match=r"needs 9\d\.\d kB of main memory, 80\.0 kB are free: free memory"):
        load_model(tmp_path)
    assert load_model(tmp_path, dtype="bfloat16").dtype == jax.numpy.bfloat16  # half of it fits


def test_memory_that_runs_out_while_loading(tmp_path, monkeypatch):
    tiny_folder(tmp_path)

    def fail(*args, **options):
        raise MemoryError("no more")

    monkeypatch.setattr("model_adapters.loading.weight_sink.to_jax_zero_copy", fail)
    with pytest.raises(OutOfMemoryError, match=r"memory ran out while loading .*: no more"):
        load_model(tmp_path)


def test_a_container_limits_the_memory(tmp_path):
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("2500000\n")
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 200000\n")
    assert memory.free_host_bytes(tmp_path) == 700_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_host_bytes(tmp_path) > 1e6
    old = tmp_path / "v1"
    (old / "memory").mkdir(parents=True)
    for name, text in {"limit_in_bytes": "900000", "usage_in_bytes": "100000", "stat": "total_inactive_file 1"}.items():
        (old / "memory" / f"memory.{name}").write_text(text)
    assert memory.free_host_bytes(old) == 800_001


class Interrupting:
    """A progress that presses Ctrl-C after some bytes."""

    def __init__(self, after):
        self.left = after

    @contextmanager
    def stage(self, name, total, unit="bytes"):
        def advance(amount):
            self.left -= amount
            if self.left < 0:
                raise KeyboardInterrupt

        yield advance


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("after", [0, 20_000, 60_000])
def test_an_interrupted_load_leaves_nothing_behind(name, after, tmp_path):
    tiny_folder(tmp_path, name)
    set_param, report = core_model_loading.set_param_for_module, modeling_utils.log_state_dict_report
    gc.collect()  # what earlier tests have left
    threads, files = threading.active_count(), os.listdir("/proc/self/fd")
    environment = dict(os.environ)
    with pytest.raises(KeyboardInterrupt):
        load_model(tmp_path, progress=Interrupting(after))
    assert core_model_loading.set_param_for_module is set_param
    assert modeling_utils.log_state_dict_report is report
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= len(files)
    assert dict(os.environ) == environment
    assert load_model(tmp_path).report.num_tensors  # and the next one works


_INTERRUPTED = """
import sys, threading, time
from contextlib import contextmanager
from model_adapters.loading import load_model

class Slow:
    @contextmanager
    def stage(self, name, total, unit="bytes"):
        def advance(amount):
            print("loading", flush=True)
            time.sleep(30)  # in which the signal comes
        yield advance

before = threading.active_count()
try:
    load_model(sys.argv[1], progress=Slow())
except KeyboardInterrupt:
    print("interrupted", threading.active_count() - before, flush=True)
"""


def test_a_real_ctrl_c_ends_the_load(tmp_path):
    tiny_folder(tmp_path, "qwen3_moe", max_shard_size="20KB")
    child = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "loading\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert "interrupted 0" in out, err
    assert child.returncode == 0


def test_experts_of_a_layer_are_merged_at_load(tmp_path):
    """The file holds one tensor per expert, the module one for all: what transformers' conversions are for."""
    tiny_folder(tmp_path, "qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    gates = [tensors[f"model.layers.0.mlp.experts.{i}.gate_proj.weight"] for i in range(4)]
    ups = [tensors[f"model.layers.0.mlp.experts.{i}.up_proj.weight"] for i in range(4)]
    merged = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
    got = load_model(tmp_path).weights["model.layers.0.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(got, merged.numpy())
