"""Downloads, against a look-alike of the hub on this machine."""

import errno
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import hub_lookalike
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants
from loading_models import tiny_folder, tiny_model

from model_adapters.bridge.views import named_tensors
from model_adapters.errors import CheckpointError, InvalidArgumentError, ModelNotFoundError
from model_adapters.loading import load_model, resolve
from model_adapters.loading.hub_request import HubRequest, is_latest
from model_adapters.loading.model_source import cached_source
from model_adapters.loading.short_names import SHORT_NAMES

ROOT = Path(__file__).resolve().parents[2]
NAME = "people/tiny"


@pytest.fixture
def hub(server, monkeypatch, tmp_path):
    server.repositories.clear()
    server.requests.clear()
    server.status = None
    hub_lookalike.point_at(monkeypatch, server.endpoint)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    server.repositories[NAME] = hub_lookalike.Repository(tiny_folder(tmp_path / "repository"))
    return server


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def check_refused(cache, *parts, name=NAME, error=ModelNotFoundError, **options):
    with pytest.raises(error) as caught:
        load_model(name, cache_dir=cache, **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


class Recorder:
    """A progress that adds up."""

    def __init__(self):
        self.stages = []

    @contextmanager
    def stage(self, name, total, unit="bytes"):
        done = [0]
        yield lambda amount: done.__setitem__(0, done[0] + amount)
        self.stages.append((name.split()[0], done[0], total))


def test_whether_the_cached_copy_is_the_latest(hub, cache, tmp_path):
    request = HubRequest(NAME, cache_dir=cache)
    assert cached_source(NAME, request) is None
    found = resolve(NAME, cache_dir=cache)
    del hub.requests[:]
    source = cached_source(NAME, request)
    assert (source.folder, source.revision) == (found.folder, found.revision)
    assert is_latest(request, source.revision)
    hub.status = 503
    assert is_latest(request, source.revision), "a hub that cannot be asked"
    hub.status = 404
    assert not is_latest(request, source.revision)
    assert len([path for _, path in hub.requests if NAME in path]) >= 3

    hub.status = None
    hub.repositories[NAME].branches["main"] = "f" * 40, tiny_folder(tmp_path / "moved")
    assert not is_latest(request, source.revision)
    del hub.requests[:]
    pinned = HubRequest(NAME, source.revision, cache_dir=cache)
    assert cached_source(NAME, pinned).folder == found.folder
    assert is_latest(pinned, source.revision)
    assert is_latest(HubRequest(NAME, local_files_only=True), source.revision)
    assert not hub.requests


def test_a_model_is_downloaded_once_and_loaded(hub, cache, capfd):
    progress = Recorder()
    loaded = load_model(NAME, cache_dir=cache, progress=progress)
    for name, tensor in named_tensors(tiny_model("llama")).items():
        np.testing.assert_array_equal(loaded.weights[name], tensor.detach().numpy())
    source = loaded.source
    assert (source.kind, source.hub_id, source.revision) == ("hub", NAME, hub_lookalike.COMMIT)
    (_, downloaded, total), (_, read, size) = progress.stages
    weights = (hub.repositories[NAME].folder / "model.safetensors").stat().st_size
    assert downloaded == total == source.download_bytes > weights
    assert read == size == loaded.report.checkpoint_bytes
    assert loaded.report.download_s > 0
    shown = capfd.readouterr().err
    assert shown == ""  # no bars of other libraries

    fetched = len(hub.fetched())
    again = load_model(NAME, cache_dir=cache)
    assert len(hub.fetched()) == fetched
    assert again.report.download_bytes == 0


def test_a_short_name_leads_to_its_repository(hub, cache):
    hub.repositories[SHORT_NAMES["qwen3-0.6b"].hub_id] = hub.repositories[NAME]
    loaded = load_model("Qwen3-0.6B", cache_dir=cache)
    assert (loaded.source.name, loaded.source.hub_id) == ("Qwen3-0.6B", "Qwen/Qwen3-0.6B")
    assert loaded.module.name_or_path == "Qwen/Qwen3-0.6B"


def test_only_what_is_needed_is_fetched(hub, cache):
    folder = hub.repositories[NAME].folder
    for name in ("pytorch_model.bin", "README.md", "model.gguf", "own.py", "consolidated.safetensors", "photo.png"):
        (folder / name).write_bytes(b"not wanted")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    load_model(NAME, cache_dir=cache)
    wanted = {"config.json", "generation_config.json", "model.safetensors", "chat_template.jinja"}
    assert set(hub.fetched()) == wanted
    resolve(NAME, cache_dir=cache, with_code=True)
    assert set(hub.fetched()) == wanted | {"own.py"}


def test_shards_and_their_index(hub, cache, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    hub.repositories[NAME].folder = tmp_path / "sharded"
    loaded = load_model(NAME, cache_dir=cache)
    assert len([name for name in hub.fetched() if name.endswith(".safetensors")]) > 3
    np.testing.assert_array_equal(loaded.weights["lm_head.weight"], tiny_model("llama").lm_head.weight.detach().numpy())


def test_a_shard_that_the_repository_lacks(hub, cache, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    hub.repositories[NAME].folder = tmp_path / "sharded"
    lost = sorted((tmp_path / "sharded").glob("model-*"))[0]
    lost.unlink()
    check_refused(cache, f"lacks {lost.name}, which model.safetensors.index.json names", error=CheckpointError)


def test_pickle_files_are_not_even_fetched_unless_allowed(hub, cache):
    import torch

    folder = hub.repositories[NAME].folder
    (folder / "model.safetensors").unlink()
    torch.save(tiny_model("llama").state_dict(), folder / "pytorch_model.bin")
    check_refused(cache, "pickle files", "allow_pickle=True", error=CheckpointError)
    assert "pytorch_model.bin" not in hub.fetched()
    assert load_model(NAME, cache_dir=cache, allow_pickle=True).report.num_tensors


def test_a_repository_without_weights_or_configuration(hub, cache):
    folder = hub.repositories[NAME].folder
    (folder / "model.safetensors").rename(folder / "model.h5")
    check_refused(cache, "holds no weights: expected model.safetensors", "model.h5", error=CheckpointError)
    (folder / "config.json").unlink()
    check_refused(cache / "other", "holds no config.json, so it is not a transformers model", error=CheckpointError)


def test_random_weights_need_no_checkpoint(hub, cache):
    loaded = load_model(NAME, cache_dir=cache, random_weights=True)
    assert loaded.report.num_tensors
    assert "model.safetensors" not in hub.fetched()


def test_a_gated_repository(hub, cache):
    hub.repositories[NAME].token = "hf_right"
    check_refused(cache, "people/tiny is gated and no token was given: accept its conditions at", "hf auth login")
    check_refused(cache, "is gated and the token has no access to it", token="hf_wrong")
    assert load_model(NAME, cache_dir=cache, token="hf_right").report.num_tensors


def test_a_private_repository_and_one_that_is_not_there(hub, cache):
    check_refused(cache, "has no model people/gone, or it is private: check the spelling", name="people/gone")
    check_refused(cache, "Names like it: ", "gemma-3-1b-it", name="google/gemma-3-1b-iz")
    hub.repositories[NAME].token, hub.repositories[NAME].private = "hf_right", True
    check_refused(cache, "or it is private")
    assert load_model(NAME, cache_dir=cache, token="hf_right").report.num_tensors


def test_revisions(hub, cache):
    hub.repositories[NAME].revisions += ("v1.0",)
    assert load_model(NAME, cache_dir=cache, revision="v1.0").source.revision == hub_lookalike.COMMIT
    assert load_model(NAME, cache_dir=cache, revision=hub_lookalike.COMMIT).report.num_tensors
    check_refused(cache, "people/tiny has no revision 'v9': give a branch, tag or commit listed at", revision="v9")


@pytest.mark.parametrize("name", ["a/b--c", "a/.b", "a/b.git", "-a/b"])
def test_names_that_the_hub_cannot_have(hub, cache, name):
    check_refused(cache, "is no hub id: expected organisation/name", name=name, error=InvalidArgumentError)


def dead_endpoint():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_no_network(hub, cache, monkeypatch):
    endpoint = dead_endpoint()
    hub_lookalike.point_at(monkeypatch, endpoint)
    check_refused(cache, f"cannot reach {endpoint} for people/tiny and there is no cached copy", "check the network")
    hub_lookalike.point_at(monkeypatch, hub.endpoint)
    load_model(NAME, cache_dir=cache)
    hub_lookalike.point_at(monkeypatch, endpoint)
    assert load_model(NAME, cache_dir=cache).report.download_bytes == 0  # the cached copy


def test_a_hub_that_is_down(hub, cache):
    hub.status = 503
    check_refused(cache, f"{hub.endpoint} answered 503 for people/tiny and there is no cached copy: try again later")
    hub.status = None
    load_model(NAME, cache_dir=cache)
    hub.status = 503
    assert load_model(NAME, cache_dir=cache).report.num_tensors
    hub.status = None


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_offline(hub, cache, monkeypatch, by):
    def offline():
        if by == "environment":
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
            return {}
        return {"local_files_only": True}

    load_model(NAME, cache_dir=cache)
    hub.requests.clear()
    options = offline()
    assert load_model(NAME, cache_dir=cache, **options).report.num_tensors
    check_refused(
        cache / "other", "no cached copy of people/tiny (revision main), and the network is switched off", **options
    )
    assert hub.requests == []


def test_an_incomplete_copy_offline(hub, cache):
    resolve(NAME, cache_dir=cache, with_weights=False)
    check_refused(cache, "holds no weights", error=CheckpointError, local_files_only=True)


def test_a_cache_that_cannot_be_written(hub, tmp_path):
    (tmp_path / "file").write_text("")
    check_refused(tmp_path / "file" / "cache", "cannot be written", "HF_HOME", error=CheckpointError)


@pytest.mark.parametrize(
    ("number", "part"),
    [
        (errno.EACCES, "cannot be written"),
        (errno.EROFS, "cannot be written"),
        (errno.ENOSPC, "no space left"),
        (errno.EIO, "failed"),
    ],
)
def test_a_file_system_that_refuses(hub, cache, monkeypatch, number, part):
    def fail(*args, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    check_refused(cache, part, error=CheckpointError)


def test_ctrl_c_while_downloading(hub, cache):
    import threading

    class Interrupting(Recorder):
        @contextmanager
        def stage(self, name, total, unit="bytes"):
            def advance(amount):
                raise KeyboardInterrupt

            yield advance

    load_model(NAME, cache_dir=cache / "warm")  # what the client keeps running for later is running now
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        load_model(NAME, cache_dir=cache, progress=Interrupting())
    assert threading.active_count() <= threads
    assert load_model(NAME, cache_dir=cache).report.num_tensors  # goes on where it was


_CHILD = """
import sys
from model_adapters.errors import ModelNotFoundError
from model_adapters.loading import load_model
loaded = load_model("people/tiny")
print(loaded.source.revision, loaded.report.num_tensors)
try:
    load_model("people/gone")
except ModelNotFoundError as error:
    print(error)
"""


def test_a_mirror_by_the_environment(hub, tmp_path):
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", _CHILD], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith(hub_lookalike.COMMIT)
    assert second.startswith(f"{hub.endpoint} has no model people/gone")
    assert done.stderr == ""
