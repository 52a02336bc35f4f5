"""Repositories as the hub has them: which files are fetched, at which revision, and what an interruption leaves."""

import json
import shutil

import hub_lookalike
import numpy as np
import pytest
import torch
from huggingface_hub import constants
from loading_models import tiny_folder, tiny_model
from safetensors.torch import save_file

from model_adapters.errors import CheckpointError, ModelNotFoundError
from model_adapters.loading import load_model, resolve

NAME = "people/tiny"
OTHER = "f" * 40
TYPES = "sentence_transformers.models."


@pytest.fixture
def hub(server, monkeypatch, tmp_path):
    server.repositories.clear()
    server.requests.clear()
    server.ranges.clear()
    server.status, server.pause_s, server.most_at_once = None, 0.0, 0
    hub_lookalike.point_at(monkeypatch, server.endpoint)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    server.repositories[NAME] = hub_lookalike.Repository(tiny_folder(tmp_path / "repository", "bert"))
    return server


@pytest.fixture
def repository(hub):
    return hub.repositories[NAME]


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def put(folder, *names, content=None):
    """Writes files; without `content` each has its own, since the cache keeps equal ones once."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(json.dumps({"of": name}).encode() if content is None else content)


def modules(folder, *entries):
    lines = [
        {"idx": index, "name": str(index), "path": path, "type": TYPES + kind}
        for index, (path, kind) in enumerate(entries)
    ]
    put(folder, "modules.json", content=json.dumps(lines).encode())


# what lies in repositories of embedding models beside what is needed
BESIDE = [
    ".gitattributes",
    "README.md",
    "data_config.py",
    "train_script.py",
    "onnx/model.onnx",
    "onnx/config.json",
    "openvino/openvino_model.xml",
    "openvino/openvino_model.bin",
    "pytorch_model.bin",
    "rust_model.ot",
    "tf_model.h5",
    "flax_model.msgpack",
    "model.Q8_0.gguf",
    "original/consolidated.00.pth",
    "original/params.json",
    "original/tokenizer.model",
    "consolidated.safetensors",
    "model.fp16.safetensors",
    "2_Dense/pytorch_model.bin",
    "assets/picture.png",
    "runs/Jan01/events.out.tfevents",
]


def test_a_repository_of_sentence_transformers(hub, repository, cache):
    folder = repository.folder
    put(folder, *BESIDE, content=b"not wanted")
    modules(folder, ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("3_Normalize", "Normalize"))
    needed = ["1_Pooling/config.json", "2_Dense/config.json", "sentence_bert_config.json", "vocab.txt"]
    needed += ["config_sentence_transformers.json", "special_tokens_map.json", "tokenizer_config.json"]
    put(folder, *needed)
    save_file({"linear.weight": torch.ones(2, 2)}, folder / "2_Dense" / "model.safetensors")
    source = resolve(NAME, cache_dir=cache)
    expected = {*needed, "config.json", "modules.json", "model.safetensors", "2_Dense/model.safetensors"}
    assert sorted(hub.fetched()) == sorted(expected)
    assert {path.relative_to(source.path).as_posix() for path in source.path.rglob("*") if path.is_file()} == expected


def test_weights_of_a_layer_in_a_pickle_file_come_where_they_may(hub, repository, cache):
    modules(repository.folder, ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"))
    put(repository.folder, "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/pytorch_model.bin")
    resolve(NAME, cache_dir=cache)
    assert "2_Dense/pytorch_model.bin" not in hub.fetched()
    resolve(NAME, cache_dir=cache, allow_pickle=True)
    assert "2_Dense/pytorch_model.bin" in hub.fetched()


def test_a_model_in_a_folder_of_its_own(hub, repository, cache, tmp_path):
    """As early releases of sentence-transformers wrote them."""
    whole = tmp_path / "whole"
    shutil.copytree(repository.folder, whole / "0_Transformer")
    put(whole, "0_Transformer/vocab.txt", "1_Pooling/config.json", "0_Transformer/pytorch_model.bin", "README.md")
    modules(whole, ("0_Transformer", "Transformer"), ("1_Pooling", "Pooling"))
    repository.folder = whole
    loaded = load_model(NAME, cache_dir=cache)
    assert loaded.source.revision == hub_lookalike.COMMIT
    assert loaded.source.path.name == "0_Transformer"
    assert type(loaded.module).__name__ == "BertForMaskedLM"
    assert sorted(hub.fetched()) == [
        "0_Transformer/config.json",
        "0_Transformer/model.safetensors",
        "0_Transformer/vocab.txt",
        "1_Pooling/config.json",
        "modules.json",
    ]
    assert load_model(NAME, cache_dir=cache, local_files_only=True).source.path == loaded.source.path
    assert load_model(whole).source.path == whole / "0_Transformer"


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", "1_Pooling/../../elsewhere", 3])
def test_modules_outside_of_the_repository(hub, repository, cache, path):
    modules(repository.folder, ("", "Transformer"), (path, "Pooling"))
    with pytest.raises(CheckpointError, match=r"modules\.json names .*, expected a path within its own folder"):
        resolve(NAME, cache_dir=cache)


def test_weights_outside_of_the_repository(hub, repository, cache):
    config = json.loads((repository.folder / "config.json").read_text())
    put(repository.folder, "config.json", content=json.dumps({**config, "transformers_weights": "../x"}).encode())
    with pytest.raises(CheckpointError, match=r"config\.json names '\.\./x', expected a path within its own folder"):
        resolve(NAME, cache_dir=cache)


def test_shards_and_what_lies_beside_them(hub, repository, cache, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    shards = [path.name for path in (tmp_path / "sharded").glob("model-*.safetensors")]
    put(tmp_path / "sharded", *BESIDE, "model-00001-of-00009.gguf", "pytorch_model.bin.index.json", content=b"no")
    repository.folder = tmp_path / "sharded"
    resolve(NAME, cache_dir=cache)
    expected = ["config.json", "generation_config.json", "model.safetensors.index.json", *shards]
    assert sorted(hub.fetched()) == sorted(expected)


def test_files_come_side_by_side(hub, repository, cache, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    repository.folder = tmp_path / "sharded"
    hub.pause_s = 0.05
    loaded = load_model(NAME, cache_dir=cache)
    assert 2 <= hub.most_at_once <= 8
    assert loaded.source.download_bytes >= loaded.report.checkpoint_bytes


def test_revisions_are_kept_beside_each_other(hub, repository, cache, tmp_path):
    tiny_folder(tmp_path / "other", "bert", torch.bfloat16)
    repository.branches["v2"] = (OTHER, tmp_path / "other")
    first, second = (load_model(NAME, revision=revision, cache_dir=cache) for revision in ("main", "v2"))
    assert (first.source.revision, second.source.revision) == (hub_lookalike.COMMIT, OTHER)
    assert (str(first.dtype), str(second.dtype)) == ("float32", "bfloat16")
    hub.requests.clear()
    for revision, dtype in (("v2", "bfloat16"), (None, "float32"), (OTHER, "bfloat16")):
        loaded = load_model(NAME, revision=revision, cache_dir=cache, local_files_only=True)
        assert str(loaded.dtype) == dtype
    assert hub.requests == []
    repository.folder = tmp_path / "other"  # the branch moves to another commit
    repository.branches["main"] = (OTHER, tmp_path / "other")
    assert load_model(NAME, cache_dir=cache).source.revision == OTHER


def test_a_download_that_is_cut_goes_on_where_it_was(hub, repository, cache, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # before the client's next attempt
    whole = (repository.folder / "model.safetensors").stat().st_size
    repository.cut["model.safetensors"] = 1000
    loaded = load_model(NAME, cache_dir=cache)
    assert hub.ranges == ["bytes=1000-"]
    assert (loaded.source.path / "model.safetensors").stat().st_size == whole


class Cutting(dict):
    """Cuts every answer with a file."""

    def pop(self, name, default=None):
        return self.get(name, default)


def test_a_download_that_never_ends_is_one_line_and_what_has_come_stays(hub, repository, cache, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    repository.cut = Cutting({"model.safetensors": 0})
    with pytest.raises(ModelNotFoundError, match=r"cannot reach .* for people/tiny") as caught:
        load_model(NAME, cache_dir=cache)
    assert "\n" not in str(caught.value)
    repository.cut = {}
    hub.requests.clear()
    assert load_model(NAME, cache_dir=cache).report.num_tensors
    assert hub.fetched() == ["model.safetensors"]


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        (401, ModelNotFoundError, "has no model people/tiny, or it is private"),
        (403, ModelNotFoundError, "people/tiny is gated"),
        (404, CheckpointError, "lacks model.safetensors"),
        (410, ModelNotFoundError, "answered 410 for people/tiny"),
        (500, ModelNotFoundError, "answered 500 for people/tiny"),
        (504, ModelNotFoundError, "answered 504 for people/tiny"),
    ],
)
def test_a_file_that_the_hub_refuses(hub, repository, cache, monkeypatch, status, error, said):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    repository.broken["model.safetensors"] = (status, "EntryNotFound" if status == 404 else None)
    with pytest.raises(error, match=said) as caught:
        load_model(NAME, cache_dir=cache)
    assert "\n" not in str(caught.value)
    repository.broken.clear()
    assert load_model(NAME, cache_dir=cache).report.num_tensors


def test_a_copy_without_its_modules_offline(hub, repository, cache):
    resolve(NAME, cache_dir=cache, with_weights=False)
    with pytest.raises(CheckpointError, match=r"cached copy of people/tiny is incomplete.*run once with the network"):
        load_model(NAME, cache_dir=cache, local_files_only=True)


def test_names_that_lead_out_of_the_cache_are_not_written(hub, repository, cache, tmp_path):
    repository.listed = ("../../../../evil.json", "/evil.json")
    resolve(NAME, cache_dir=cache)
    assert not list(tmp_path.rglob("evil.json"))


def test_weights_are_the_same_as_those_of_the_folder(hub, repository, cache):
    by_hub, by_folder = load_model(NAME, cache_dir=cache), load_model(repository.folder)
    assert by_hub.weights.keys() == by_folder.weights.keys()
    for name, array in by_hub.weights.items():
        np.testing.assert_array_equal(array, by_folder.weights[name])
