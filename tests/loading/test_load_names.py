"""What a name means."""

import os

import pytest
from loading_models import tiny_folder

from model_adapters.errors import InvalidArgumentError, ModelNotFoundError
from model_adapters.loading import SHORT_NAMES, load_model, model_source, resolve
from model_adapters.loading.short_names import near_matches, short_name


def test_the_table_is_well_formed():
    assert len(SHORT_NAMES) >= 40
    assert {"gemma-3-1b-it", "llama-3.1-8b-instruct", "qwen3-0.6b"} <= SHORT_NAMES.keys()
    for name, entry in SHORT_NAMES.items():
        assert name == name.lower().strip()
        assert "/" not in name
        assert model_source.HUB_ID.fullmatch(entry.hub_id)
        assert 1e7 < entry.num_parameters < 1e12
        assert entry.note
        assert "\n" not in entry.note
    assert len({entry.hub_id for entry in SHORT_NAMES.values()}) == len(SHORT_NAMES)


def test_case_does_not_matter():
    assert short_name(" Llama-3.1-8B-Instruct ").hub_id == "meta-llama/Llama-3.1-8B-Instruct"
    assert short_name("no-such-thing") is None


def test_sizes_in_names_agree_with_the_parameters():
    """A typing error of a factor of ten would show."""
    for name, entry in SHORT_NAMES.items():
        for part in name.split("-"):
            if part[:1].isdigit() and part[-1:] in "bm" and part[:-1].replace(".", "").isdigit():
                said = float(part[:-1]) * {"b": 1e9, "m": 1e6}[part[-1]]
                assert 0.7 * said < entry.num_parameters < 1.8 * said or "olmoe" in name, name


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("gemma-3-1b", "gemma-3-1b-it"), ("qwen3-0.6", "qwen3-0.6b"), ("llama-3.1-8b", "llama-3.1-8b-instruct")],
)
def test_an_unknown_name_lists_near_ones(typed, meant):
    assert meant in near_matches(typed)
    with pytest.raises(ModelNotFoundError, match=f"no model is called '{typed}': did you mean .*{meant}"):
        resolve(typed)


def test_a_name_like_none_lists_what_can_be_given():
    with pytest.raises(
        ModelNotFoundError, match=r"expected a short name, a hub id .*, a folder, a GGUF file, or nothing"
    ) as caught:
        resolve("zzzzqqqq")
    assert "did you mean" not in str(caught.value)


def test_a_folder_a_file_and_nothing(tmp_path):
    folder = tiny_folder(tmp_path / "model")
    for given in (folder, str(folder)):
        found = resolve(given)
        assert (found.kind, found.path, found.folder, found.name) == ("folder", folder, folder, str(folder))
    config = resolve(folder / "config.json")
    assert (config.kind, config.path, config.folder) == ("config", folder / "config.json", None)
    with pytest.raises(InvalidArgumentError, match="is a configuration without weights: pass its folder, or random"):
        load_model(folder / "config.json")
    with pytest.raises(ModelNotFoundError, match="is a file, expected the folder around it"):
        resolve(folder / "model.safetensors")


def test_a_relative_folder_wins_over_a_hub_id(tmp_path, monkeypatch):
    tiny_folder(tmp_path / "some" / "model")
    monkeypatch.chdir(tmp_path)
    assert resolve("some/model").kind == "folder"


def test_a_folder_with_a_short_name_is_taken_only_if_it_is_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert model_source._local_source("gpt2") is None
    tiny_folder(tmp_path / "gpt2")
    assert resolve("gpt2").kind == "folder"


@pytest.mark.parametrize("name", ["./gone", "/gone/away", "~/gone/away", "a/b/c", "back\\slash", os.sep + "x" * 400])
def test_folders_that_are_not_there(name):
    with pytest.raises(ModelNotFoundError):
        resolve(name)


@pytest.mark.parametrize("name", ["", "  ", "nul\0byte", 3, ["gpt2"], b"gpt2"])
def test_what_is_no_name(name):
    with pytest.raises(InvalidArgumentError, match="expected a short name, a hub id"):
        resolve(name)


def test_a_revision_of_something_that_has_none(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"revision='v1' was given with .* leave it out"):
        resolve(tiny_folder(tmp_path), revision="v1")


def test_no_name_means_the_embedded_model(tmp_path, monkeypatch):
    assert model_source.EMBEDDED.parts[-2:] == ("torchax_serve", "embedded")
    monkeypatch.setattr(model_source, "EMBEDDED", tiny_folder(tmp_path / "embedded"))
    found = resolve(None)
    assert (found.kind, found.folder) == ("embedded", tmp_path / "embedded")
    assert load_model().report.num_tensors
    monkeypatch.setattr(model_source, "EMBEDDED", tmp_path / "gone")
    with pytest.raises(ModelNotFoundError, match="lacks its embedded model"):
        resolve(None)
