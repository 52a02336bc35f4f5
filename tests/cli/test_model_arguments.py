"""MODELs of a server's command line: names in front of them, and what several cannot have."""

import pytest

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading.model_source import public_name
from torchax_serve.cli.shared.several_models import adapters_by_model, check_several, file_bytes, named_model


def test_names_stand_in_front_of_a_model(tmp_path):
    assert named_model("chat=qwen3-0.6b") == (("chat",), "qwen3-0.6b")
    assert named_model("a,b=org/model:Q4_K_M") == (("a", "b"), "org/model:Q4_K_M")
    assert named_model("tiny=embedded") == (("tiny",), None)
    assert named_model("qwen3-0.6b") == ((), "qwen3-0.6b")
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert named_model(str(odd)) == ((), str(odd))
    assert named_model(f"name={odd}") == (("name",), str(odd))


@pytest.mark.parametrize("given", ["=model", "a=", "a,,b=model", ",a=model", "a b=model"])
def test_a_missing_name_or_model_is_told(given):
    with pytest.raises(InvalidArgumentError, match="MODEL: expected NAME=MODEL, or MODEL alone, got"):
        named_model(given)


@pytest.mark.parametrize(
    ("option", "remedy"), [("served_model_name", "NAME,OTHER_NAME=MODEL"), ("watch", "alone"), ("revision", "pull")]
)
def test_options_of_one_model_are_refused_for_several(option, remedy):
    several = [(("a",), "x"), (("b",), "y")]
    check_several(several, {})
    check_several(several[:1], {"watch": True})
    with pytest.raises(
        InvalidArgumentError, match=rf"--{option.replace('_', '-')}: expected one model, got 2.*{remedy}"
    ):
        check_several(several, {option: True})


def test_two_names_of_one_model_and_one_name_of_two():
    with pytest.raises(InvalidArgumentError, match="expected each name once, got a twice"):
        check_several([(("a",), "x"), (("b", "a"), "y")], {})
    with pytest.raises(InvalidArgumentError, match="expected each name once, got x twice"):
        check_several([((), "x"), ((), "x")], {})
    with pytest.raises(InvalidArgumentError, match="expected each name once, got embedded twice"):
        check_several([((), None), (("embedded",), "x")], {})
    with pytest.raises(InvalidArgumentError, match="--served-model-name: expected without names in MODEL, got a"):
        check_several([(("a",), "x")], {"served_model_name": ["b"]})


def test_folders_are_named_by_their_last_part(tmp_path, monkeypatch):
    for folder in ("a/x", "b/x", "b/y"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    check_several([((), "a/x"), ((), "b/y/"), ((), None)], {})
    for other in ("b/x", str(tmp_path / "b" / "x"), "./b/x/", "b/y/../x"):
        with pytest.raises(InvalidArgumentError, match="expected each name once, got x twice; write NAME=MODEL"):
            check_several([((), "a/x"), ((), other)], {})
    monkeypatch.chdir(tmp_path / "b" / "x")
    assert public_name(".") == "x" and public_name("org/name") == "org/name" and public_name("") == "embedded"


def test_adapters_belong_to_a_model(tmp_path):
    (tmp_path / "sql").mkdir()
    folder, several = f"{tmp_path}/sql", [(("a", "also"), "x"), ((), "y")]
    given = [f"sql@also={folder}", f"fr@a={folder}", f"sql@home@y={folder}"]
    assert adapters_by_model(several, given) == {"a": {"sql": folder, "fr": folder}, "y": {"sql@home": folder}}
    assert adapters_by_model(several, []) == {}
    for wrong, message in (
        (folder, "expected NAME@BASE=FOLDER where several models are served"),
        (f"sql={folder}", "expected NAME@BASE=FOLDER"),
        (f"@a={folder}", "expected NAME@BASE=FOLDER"),
        (f"sql@b={folder}", "expected one of a, also, y behind @, got 'b'"),
        (f"y@a={folder}", "expected names of their own, got y twice"),
        (f"fr@y={folder}", "expected names of their own, got fr twice"),
        ("new@a=/nowhere", "expected a folder behind =, got '/nowhere'"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            adapters_by_model(several, [*given, wrong])


def test_bytes_of_files(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "config.json").write_text("{}")
    assert file_bytes(str(tmp_path)) == 5
    assert file_bytes(str(tmp_path / "model.safetensors")) == 5
    assert file_bytes(None) == file_bytes("org/not-here") == 0
