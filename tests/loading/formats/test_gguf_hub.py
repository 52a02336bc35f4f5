"""Repositories of GGUF files, against a look-alike of the hub on this machine."""

import json
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from model_adapters.errors import ModelNotFoundError
from model_adapters.loading import load_model, resolve
from torchax_serve.cli.main import app

sys.path.insert(0, str(Path(__file__).parents[1]))

import hub_lookalike

pytest.importorskip("gguf", reason="the format's own tool is part of the extra dev")

from gguf_files import tiny_model, write_gguf

NAME = "people/tiny-GGUF"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    model = tiny_model("llama", num_hidden_layers=1)
    for name, kind in (("Q8_0", "Q8_0"), ("Q4_0", "Q4_0"), ("Q4_K_M", "Q4_K")):
        write_gguf(folder / f"tiny-{name}.gguf", model, "llama", kind)
    (folder / "README.md").write_text("a card")
    (folder / "mmproj-tiny-f16.gguf").write_bytes(b"images")
    return folder


@pytest.fixture
def hub(server, monkeypatch, tmp_path, files):
    server.repositories.clear()
    server.requests.clear()
    server.status = None
    hub_lookalike.point_at(monkeypatch, server.endpoint)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    server.repositories[NAME] = hub_lookalike.Repository(files)
    return server


@pytest.fixture(scope="module")
def server():
    with hub_lookalike.serving() as hub:
        yield hub


def test_the_type_behind_the_colon_is_fetched_and_nothing_else(hub, tmp_path):
    loaded = load_model(f"{NAME}:Q4_0", cache_dir=tmp_path)
    assert set(hub.fetched()) == {"tiny-Q4_0.gguf"}
    assert (loaded.source.kind, loaded.source.hub_id, loaded.source.revision) == ("hub", NAME, hub_lookalike.COMMIT)
    assert loaded.source.download_bytes == loaded.source.gguf.stat().st_size
    assert loaded.report.quantization.startswith("8 weights int4") or "int4" in loaded.report.quantization
    assert loaded.tokenizer().chat_template and loaded.module.name_or_path == NAME
    assert resolve(f"{NAME}:Q4_0", cache_dir=tmp_path).download_bytes == 0
    assert len(hub.fetched()) == 1


def test_q8_0_is_taken_where_none_is_named_with_one_line(hub, tmp_path, caplog):
    found = resolve(NAME, cache_dir=tmp_path)
    assert found.gguf.name == "tiny-Q8_0.gguf"
    assert [record.getMessage() for record in caplog.records if record.name == "torchax_serve"] == [
        f"{NAME}: tiny-Q8_0.gguf is taken, one of 3 GGUF files"
    ]


def test_a_cached_file_is_used_without_the_network(hub, tmp_path):
    resolve(f"{NAME}:Q4_0", cache_dir=tmp_path)
    hub.status = 503
    for options in ({"local_files_only": True}, {}):
        found = resolve(f"{NAME}:Q4_0", cache_dir=tmp_path, **options)
        assert found.gguf.name == "tiny-Q4_0.gguf" and found.revision == hub_lookalike.COMMIT
    with pytest.raises(ModelNotFoundError, match=r"the cached copy of .* holds no GGUF file 'Q8_0'"):
        resolve(f"{NAME}:Q8_0", cache_dir=tmp_path, local_files_only=True)


def test_a_type_that_the_repository_lacks_is_one_line_that_lists_its_files(hub, tmp_path):
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(f"{NAME}:Q5_K_M", cache_dir=tmp_path)
    said = str(caught.value)
    assert said.startswith(f"{NAME} holds no GGUF file 'Q5_K_M': name one behind a colon, organisation/name:Q4_K_M")
    assert "there are tiny-Q4_0.gguf, tiny-Q4_K_M.gguf, tiny-Q8_0.gguf" in said and "\n" not in said
    assert hub.fetched() == []


def test_the_command_line_answers_with_the_type_behind_the_colon(hub, tmp_path, files, monkeypatch):
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)

    def run(model):
        options = ["-p", "abc", "--max-new-tokens", "6", "--greedy", "--json", "--cache-dir", str(tmp_path)]
        done = CliRunner().invoke(app, ["run", str(model), *options])
        assert done.exit_code == 0, done.stderr
        assert "9 weights int4 (groups of 32)" in done.stderr, done.stderr
        return json.loads(done.stdout)["token_ids"]

    assert run(f"{NAME}:Q4_K_M") == run(files / "tiny-Q4_K_M.gguf")
    assert set(hub.fetched()) == {"tiny-Q4_K_M.gguf"}


def test_a_repository_with_dense_weights_too_is_no_gguf_model(hub, tmp_path, files):
    from loading_models import tiny_folder

    folder = tiny_folder(tmp_path / "both")
    (folder / "m-Q8_0.gguf").write_bytes((files / "tiny-Q8_0.gguf").read_bytes())
    hub.repositories["people/both"] = hub_lookalike.Repository(folder)
    assert resolve("people/both", cache_dir=tmp_path / "cache").gguf is None
    assert resolve("people/both:Q8_0", cache_dir=tmp_path / "cache").gguf.name == "m-Q8_0.gguf"
