"""What is wrong with a bundle is said in one line, before anything of it is loaded."""

import errno
import json
import os
import shutil
from collections import namedtuple

import pytest
import transformers
from exported import ENGINE, manifest_of
from typer.testing import CliRunner

from model_adapters.errors import (
    CheckpointError,
    InvalidArgumentError,
    ModelNotFoundError,
    TorchaxServeError,
    UnsupportedModelError,
)
from model_adapters.loading.model_source import EMBEDDED
from model_adapters.ops.cpu import ffi
from torchax_serve import EngineOptions, SamplingParams, serve
from torchax_serve.cli.main import app
from torchax_serve.export import bundle_model, versions, writer
from torchax_serve.export.bundle_model import load_bundle
from torchax_serve.export.targets import parse_platforms


@pytest.fixture
def damaged(bundle, tmp_path, monkeypatch):
    """A copy of the version, of which nothing may be loaded."""

    def not_to_be_called(*args):
        raise AssertionError("something is loaded")

    monkeypatch.setattr(ffi, "load_from", not_to_be_called)
    monkeypatch.setattr(bundle_model, "read_weights", not_to_be_called)
    shutil.copytree(bundle / "1", tmp_path / "bundle" / "1")
    return tmp_path / "bundle" / "1"


def refused(folder, error, *parts):
    with pytest.raises(error) as caught:
        serve(folder)
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "pattern",
    ["programs/*/packed-*", "weights.safetensors", "native/kernels-*.so", "native/linear.cc", "tokenizer.json"],
)
def test_a_flipped_bit(damaged, pattern):
    (path, *_) = sorted(damaged.glob(pattern)) or [None]
    if path is None:
        pytest.skip("there is no C++ compiler, so the bundle has no kernels")
    flip(path)
    refused(damaged.parent, CheckpointError, str(path), "expected sha256")


def test_a_changed_manifest(damaged):
    path = damaged / "manifest.json"
    path.write_text(path.read_text().replace('"page_size": 16', '"page_size": 32'))
    refused(damaged, CheckpointError, str(path), "expected sha256")
    path.write_text(path.read_text()[:-40])
    refused(damaged, CheckpointError, str(path), "damaged")


def test_weights_that_were_right_before(bundle, tmp_path):
    folder = tmp_path / "bundle"
    shutil.copytree(bundle, folder)
    load_bundle(folder).close()
    flip(folder / "1" / "weights.safetensors")
    refused(folder, CheckpointError, "weights.safetensors", "expected sha256")


def test_a_missing_and_a_short_file(damaged):
    path = damaged / "weights.safetensors"
    os.truncate(path, 1000)
    refused(damaged, CheckpointError, str(path), "got 1000")
    path.unlink()
    refused(damaged, CheckpointError, str(path), "No such file")


def test_code_that_the_manifest_does_not_list(damaged):
    if not (damaged / "native").is_dir():
        pytest.skip("there is no C++ compiler, so the bundle has no kernels")
    (damaged / "native" / "more.cc").write_text("int x;")
    refused(damaged, CheckpointError, "more.cc", "remove it")


def test_a_newer_format(damaged):
    path = damaged / "manifest.json"
    content = json.loads(path.read_text())
    content["format_version"], content["made_with"]["torchax-serve"] = 2, "7.0"
    path.write_text(json.dumps(content))
    refused(damaged, CheckpointError, "format 1, got format 2, made by torchax-serve 7.0", "update")


def test_a_bundle_that_was_not_finished(damaged):
    damaged.rename(damaged.with_name(".partial-123"))
    refused(damaged.parent, CheckpointError, "not finished")


def test_another_platform(damaged):
    path = damaged / "manifest.json"
    content = json.loads(path.read_text())
    for variant in content["variants"].values():
        variant["platform"], variant["chip"] = "tpu", "v6e"
    del content["digest"]
    content["digest"] = bundle_model.read_manifest.__globals__["_digest"](content)
    path.write_text(json.dumps(content))
    refused(damaged, UnsupportedModelError, "--platform cpu")


def test_a_version_that_there_is_not(bundle):
    with pytest.raises(CheckpointError, match="expected a version out of 1, got 7"):
        load_bundle(bundle, version=7)


@pytest.mark.parametrize("options", [{"max_num_seqs": 9}, {"max_model_len": 64}, {"kv_cache_dtype": "int8"}])
def test_sizes_of_the_engine_are_those_of_the_bundle(bundle, options):
    (name, value) = next(iter(options.items()))
    with pytest.raises(InvalidArgumentError, match=f"{name}: expected .* as the bundle was exported with, got {value}"):
        serve(bundle, engine=EngineOptions(**options))


@pytest.mark.parametrize("argument", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_arguments_about_what_was_exported(bundle, argument):
    with pytest.raises(InvalidArgumentError, match=f"{next(iter(argument))}: expected no such argument for a bundle"):
        serve(bundle, **argument)


@pytest.mark.parametrize("mesh", [{"model": 2}, {"data": 0}, {"data": True}, {"rows": 2}])
def test_a_bundle_has_no_other_mesh(bundle, mesh):
    with pytest.raises(InvalidArgumentError, match=r"mesh: expected \{'data': N\} for a bundle"):
        serve(bundle, mesh=mesh)


def test_requests_that_need_the_pytorch_model(bundle):
    with serve(bundle) as model:
        with pytest.raises(UnsupportedModelError, match="beam search"):
            list(model.iter_tokens([5, 6], params=SamplingParams(max_new_tokens=4, num_beams=2)))
        with pytest.raises(UnsupportedModelError, match="forward"):
            model([[5, 6]])
        with pytest.raises(UnsupportedModelError, match="needs the PyTorch model"):
            model.embed("text")
        with pytest.raises(AttributeError, match="no PyTorch model"):
            assert model.hidden_size


def test_a_disk_that_is_full_at_the_start(served, bundle, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10, 9, 1)
    monkeypatch.setattr(versions.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(TorchaxServeError, match=r"free disk for the weights, got 0\.0 kB"):
        served.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_disk_that_becomes_full(served, bundle, tmp_path, monkeypatch):
    def fails(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer, "write_weights", fails)
    monkeypatch.setattr(writer.StepExporter, "export", lambda self, target: {})
    out = tmp_path / "out"
    shutil.copytree(bundle, out)
    with pytest.raises(TorchaxServeError, match="No space left on device; free some disk") as caught:
        served.export(out)
    assert "\n" not in str(caught.value)
    assert [path.name for path in out.iterdir()] == ["1"]


@pytest.mark.parametrize(
    ("platforms", "said"),
    [
        (["gpu"], "expected cpu or one of tpu:v4"),
        (["tpu"], "got 'tpu'"),
        (["tpu:h100"], "got 'tpu:h100'"),
        (["cpu", "cpu"], "name it once"),
        ([], "got none"),
    ],
)
def test_platforms(platforms, said):
    with pytest.raises(InvalidArgumentError, match=said):
        parse_platforms(platforms)


SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
T5_SIZES = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        ("BloomForCausalLM", {"vocab_size": 64, "hidden_size": 16, "n_layer": 1, "n_head": 2}, "the forward takes no"),
        ("T5ForConditionalGeneration", {**T5_SIZES, "decoder_start_token_id": 0}, "it has an encoder"),
        ("LlamaForCausalLM", {**SIZES, **HEADS, "rope_parameters": DYNAMIC}, "its rotary frequencies depend on the"),
    ],
)
def test_models_that_no_bundle_can_hold(tmp_path, kind, config, reason):
    made = getattr(transformers, kind)
    with serve(made(made.config_class(**config)).eval()) as model, pytest.raises(UnsupportedModelError) as caught:
        model.export(tmp_path / "out", engine=EngineOptions(max_model_len=64, max_num_seqs=2))
    assert f"writes text and that the engine runs packed, got {kind}: {reason}" in str(caught.value)
    assert str(caught.value).endswith("; serve the model itself")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported(served, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgumentError, match="expected a new folder or a bundle"):
        served.export(tmp_path)
    with pytest.raises(InvalidArgumentError, match="kv_cache_dtype: expected None for a bundle"):
        served.export(tmp_path / "out", engine=EngineOptions(kv_cache_dtype="int8", max_model_len=64))
    with pytest.raises(InvalidArgumentError, match="max_logprobs: expected 0 to 20 for a bundle"):
        served.export(tmp_path / "out", engine=EngineOptions(max_logprobs=-1, max_model_len=64))
    with pytest.raises(InvalidArgumentError, match="weights: expected safetensors or orbax, got 'pickle'"):
        served.export(tmp_path / "out", weights="pickle")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["export", "{bundle}", "{out}"], "got the bundle"),
        (["bundle", "info", "{out}"], "expected a bundle, got no such folder; make one"),
        (["bundle", "verify", "{bundle}", "--json"], "--json: expected with info"),
        (["export", "m", "{out}", "--no-native", "--no-reference"], "--no-reference"),
        (["serve", "--watch"], "--watch: expected a bundle"),
        (["verify", "{bundle}"], "torchax-serve bundle verify {bundle} --model NAME"),
        (["embed", "{bundle}", "text"], "which has no PyTorch model; name the model that it was exported from"),
        (["profile", "{bundle}"], "which has no PyTorch model; name the model that it was exported from"),
        (["export", str(EMBEDDED), "{out}", "--adapter", "sql=folder"], "--adapter: expected a FOLDER to add to the"),
        (["export", str(EMBEDDED), "{out}", "--platform", "tpu"], "--platform: expected cpu or one of tpu:v4"),
        (["train", "{bundle}", "--data", "{rows}", "--out", "{out}"], "is a bundle, which has programs and no PyTorch"),
    ],
)
def test_the_command_line(bundle, tmp_path, arguments, said, monkeypatch):
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "One."}')
    filled = [each.format(bundle=bundle, out=tmp_path / "out", rows=rows) for each in arguments]
    done = CliRunner().invoke(app, filled)
    assert done.exit_code == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and said.format(bundle=bundle) in last
    assert done.stderr.count("error") == 1


def test_a_bundle_is_no_model_for_training_and_the_like(bundle):
    from model_adapters.loading import load_model

    with pytest.raises((UnsupportedModelError, ModelNotFoundError), match="is a bundle"):
        load_model(bundle)


def test_the_bundle_itself_was_not_changed(bundle):
    assert manifest_of(bundle / "1")["engine"]["max_num_seqs"] == ENGINE.max_num_seqs
