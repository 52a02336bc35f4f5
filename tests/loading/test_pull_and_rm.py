"""``pull``, ``models --downloaded`` and ``rm``, against a look-alike of the hub on this machine."""

import json
import os
import time

import hub_lookalike
import pytest
from hub_lookalike import point_at
from huggingface_hub import constants
from loading_models import tiny_folder
from test_load_hub import NAME
from typer.testing import CliRunner

from model_adapters.loading import downloads as hub_downloads
from torchax_serve.cli.main import app
from torchax_serve.cli.shared import downloads
from torchax_serve.cli.shared.model_name import complete_downloaded, complete_model

OTHER = "fedcba9876543210fedcba9876543210fedcba98"


@pytest.fixture
def hub(server, monkeypatch, tmp_path):
    server.repositories.clear()
    server.requests.clear()
    server.status = None
    point_at(monkeypatch, server.endpoint)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)
    folder = tiny_folder(tmp_path / "repository")
    (folder / "model.gguf").write_bytes(b"not for us")
    server.repositories[NAME] = hub_lookalike.Repository(folder)
    return server


@pytest.fixture
def call(tmp_path):
    def run(command, *arguments, status=0, **kwargs):
        result = CliRunner().invoke(
            app, [command, *arguments, "--cache-dir", str(tmp_path / "cache")], env={"HF_TOKEN": None}, **kwargs
        )
        assert result.exit_code == status, result.output
        assert "Traceback" not in result.stderr
        return result

    return run


def listed(call):
    return json.loads(call("models", "--downloaded", "--json").stdout)["downloaded"]


def test_a_pulled_model_is_listed_and_shown(hub, call, tmp_path):
    assert "No model of the hub is in" in call("list").stderr
    call("pull", NAME)
    assert json.loads(call("list", "--json").stdout)["downloaded"] == listed(call)
    shown = json.loads(call("show", NAME, "--json").stdout)
    config = json.loads((tmp_path / "repository" / "config.json").read_text())
    assert (shown["type"], shown["architectures"]) == (config["model_type"], config["architectures"])
    assert (shown["vocabulary"], shown["layers"]) == (config["vocab_size"], config["num_hidden_layers"])
    assert config["model_type"] in call("show", NAME).stdout
    assert json.loads(call("show", str(tmp_path / "repository"), "--json").stdout)["type"] == config["model_type"]
    assert "is not in" in call("show", "people/other", status=2).stderr
    (tmp_path / "empty").mkdir()
    assert "without one" in call("show", str(tmp_path / "empty"), status=2).stderr
    (tmp_path / "empty" / "config.json").write_text("[]")
    assert "expected a JSON object" in call("show", str(tmp_path / "empty"), status=2).stderr


def test_a_model_is_pulled_listed_and_removed(hub, call, tmp_path):
    assert "No model of the hub is in" in call("models", "--downloaded").stderr
    pulled = call("pull", NAME)
    folder = tmp_path / "cache" / "models--people--tiny"
    assert pulled.stdout == f"{folder / 'snapshots' / hub_lookalike.COMMIT}\n"
    assert " in " in pulled.stderr
    assert "model.safetensors" in hub.fetched()
    assert "model.gguf" not in hub.fetched()
    num_fetched = len(hub.fetched())
    assert call("pull", NAME).stderr == "nothing to download: all of it is here\n"
    assert len(hub.fetched()) == num_fetched
    (model,) = listed(call)
    assert (model["hub_id"], model["short_name"], model["is_partial"]) == (NAME, None, False)
    assert [revision["commit"] for revision in model["revisions"]] == [hub_lookalike.COMMIT]
    assert model["revisions"][0]["names"] == ["main"]
    on_disk = sum(os.lstat(path).st_size for path in (folder / "blobs").iterdir())
    assert model["size_bytes"] == model["revisions"][0]["size_bytes"] == on_disk
    table = call("models", "--downloaded").stdout
    assert NAME in table
    assert "just now" in table
    assert f"main, {hub_lookalike.COMMIT[:12]}" in table
    done = call("rm", NAME, "--yes")
    assert (done.stdout, done.stderr.split(",")[0]) == ("", f"{NAME} deleted")
    assert not folder.exists()
    assert listed(call) == []


def test_what_cannot_be_pulled_is_one_line(hub, call, monkeypatch, tmp_path):
    assert "has no model people/nobody" in call("pull", "people/nobody", status=2).stderr
    assert "has no revision 'v9'" in call("pull", NAME, "--revision", "v9", status=2).stderr
    hub.repositories[NAME].token = "hf_right"
    assert "is gated and no token was given" in call("pull", NAME, status=2).stderr
    assert "the token has no access to it" in call("pull", NAME, "--token", "hf_wrong", status=2).stderr
    call("pull", NAME, "--token", "hf_right")
    here = call("pull", str(tmp_path), status=2).stderr
    assert "expected a short name or a hub id" in here
    assert "which is on this machine already" in here
    monkeypatch.setattr(constants, "is_offline_mode", lambda: True)
    assert "HF_HUB_OFFLINE switches it off" in call("pull", NAME, status=2).stderr


def test_rm_asks_and_deletes_what_is_there_alone(hub, call, monkeypatch):
    call("pull", NAME)
    assert "expected --yes where nobody can be asked" in call("rm", NAME, status=2, input="y\n").stderr
    monkeypatch.setattr("torchax_serve.cli.rm.is_terminal", lambda stream: True)
    asked = call("rm", NAME, status=1, input="n\n")
    assert f"delete {NAME}, " in asked.stderr
    assert "last used just now?" in asked.stderr
    assert asked.stderr.endswith("nothing deleted\n")
    assert len(listed(call)) == 1
    wrong = call("rm", "people/tinny", "--yes", status=2).stderr
    assert "people/tinny is not in" in wrong
    assert f"did you mean {NAME}?" in wrong
    assert "expected one of people/tiny on this machine (main, 0123456789ab), got 'v9'" in (
        call("rm", NAME, "--revision", "v9", "--yes", status=2).stderr
    )
    assert "which is no download" in call("rm", ".", "--yes", status=2).stderr
    call("rm", NAME.upper(), input="y\n")
    assert listed(call) == []


def test_one_of_two_revisions_is_deleted(hub, call, tmp_path):
    call("pull", NAME)
    repository = hub.repositories[NAME]
    (repository.folder / "config.json").write_text((repository.folder / "config.json").read_text() + "\n")
    folder = tmp_path / "cache" / "models--people--tiny"
    newer = folder / "snapshots" / OTHER
    newer.mkdir()
    blob = folder / "blobs" / "newer"
    blob.write_bytes(b"{}" * 1000)
    (newer / "config.json").symlink_to(blob)
    older = folder / "snapshots" / hub_lookalike.COMMIT
    (newer / "model.safetensors").symlink_to((older / "model.safetensors").resolve())
    (folder / "refs" / "next").write_text(OTHER)
    assert {tuple(each["names"]) for each in listed(call)[0]["revisions"]} == {("main",), ("next",)}
    call("rm", NAME, "--revision", OTHER[:8], "--yes")
    (model,) = listed(call)
    assert [each["commit"] for each in model["revisions"]] == [hub_lookalike.COMMIT]
    assert not blob.exists()
    assert (older / "model.safetensors").exists()  # shared with what is gone


def test_a_download_that_was_not_finished(call, tmp_path):
    blobs = tmp_path / "cache" / "models--people--tiny" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.incomplete").write_bytes(b"x" * 2_000_000)
    (model,) = listed(call)
    assert (model["size_bytes"], model["is_partial"], model["last_used"]) == (2_000_000, True, None)
    assert "not finished: pull it again, or rm it" in call("models", "--downloaded").stdout
    call("rm", NAME, "--yes")
    assert not blobs.parent.exists()


def test_what_cannot_be_deleted_is_an_error(call, tmp_path, monkeypatch):
    (tmp_path / "cache" / "models--people--tiny" / "blobs").mkdir(parents=True)
    monkeypatch.setattr(hub_downloads.shutil, "rmtree", lambda path, ignore_errors: None)
    assert "cannot be deleted" in call("rm", NAME, "--yes", status=2).stderr


def test_the_shell_completes_what_is_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--Qwen--Qwen3-0.6B").mkdir()
    (tmp_path / "datasets--people--texts").mkdir()
    assert complete_downloaded("qw") == ["qwen3-0.6b", "Qwen/Qwen3-0.6B"]
    assert complete_downloaded("people") == []
    assert {"qwen3-0.6b", "qwen3-1.7b", "Qwen/Qwen3-0.6B"} <= set(complete_model("qw"))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "just now"),
        (61, "1 minute ago"),
        (7300, "2 hours ago"),
        (86400 * 8, "1 week ago"),
        (86400 * 90, "3 months ago"),
    ],
)
def test_ago(seconds, words):
    assert downloads.ago(time.time() - seconds) == words
    assert downloads.ago(None) == "never"
