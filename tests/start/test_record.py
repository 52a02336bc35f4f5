"""When a start record is used: while every file is as it was."""

import os
import shutil
import time

import jax.numpy as jnp
import pytest

from model_adapters import disk_cache
from torchax_serve.compilation.cache_folders import EVICTOR
from torchax_serve.start import record as record_module
from torchax_serve.start.model_record import ModelRecord
from torchax_serve.start.record import StartFolder, StartRecord, states_of
from torchax_serve.start.weights_file import file_of

ARGUMENTS = {"dtype": "auto", "strict": "False", "pack_weights": "True"}


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "model"
    (folder / "part").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "part" / "weights").write_text("1234")
    return folder


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "modeling.py"
    file.write_text("pass")
    return file


@pytest.fixture
def start_folder(checkpoint, source, tmp_path, monkeypatch):
    monkeypatch.setattr(record_module, "programs_dir", lambda: tmp_path / "cache" / "programs")
    folder = StartFolder(checkpoint, ARGUMENTS)
    seal = folder.write_weights(*file_of({"w": jnp.ones(8)}))
    files = states_of(checkpoint, [source])
    written = StartRecord(
        files, "id", seal, ModelRecord({"w": "w"}, None, {}, (), {}, {}, {}, {}, "", "", ("llama", "float32"))
    )
    folder.write(written)
    assert folder.read() == written
    return folder


def test_a_changed_file(start_folder, checkpoint):
    os.utime(checkpoint / "part" / "weights", ns=(1, 1))
    assert start_folder.read() is None


def test_a_new_file(start_folder, checkpoint):
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    assert start_folder.read() is None


def test_a_removed_file(start_folder, checkpoint):
    (checkpoint / "config.json").unlink()
    assert start_folder.read() is None


def test_changed_source_of_the_models_class(start_folder, source):
    source.write_text("pass  # differently")
    assert start_folder.read() is None


def test_weights_that_were_removed_or_replaced(start_folder):
    shutil.copy(start_folder.weights_path, start_folder.weights_path.with_name("other"))
    start_folder.write_weights(*file_of({"w": jnp.zeros(8)}))
    assert start_folder.read() is None
    start_folder.weights_path.unlink()
    assert start_folder.read() is None


def test_weights_that_another_process_has_written_again(start_folder):
    written = start_folder.read()
    time.sleep(0.02)  # as below
    start_folder.write_weights(*file_of({"w": jnp.ones(8)}))
    assert start_folder.read() == written


@pytest.mark.parametrize("damage", ["flip", "cut", "other"])
def test_damaged_weights(start_folder, damage, caplog, monkeypatch):
    """Weights are not read through at a start; what writes to them leaves its time."""
    monkeypatch.setattr(disk_cache, "_WARNED", set())
    file = start_folder.weights_path
    assert start_folder.read() is not None and start_folder.read() is not None  # a use is no change
    content = file.read_bytes()
    time.sleep(0.02)  # the clock of a file system may have steps of some milliseconds
    flipped = bytes([content[0] ^ 1]) + content[1:]
    file.write_bytes({"flip": flipped, "cut": content[:-100], "other": b""}[damage])
    assert start_folder.read() is None
    (line,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert f"{file} is damaged" in line.getMessage()


def test_a_damaged_record(start_folder):
    file = next(start_folder.weights_path.parent.glob("record-*"))
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    file.write_bytes(content)
    assert start_folder.read() is None


def test_files_that_others_may_write(start_folder):
    start_folder.weights_path.chmod(0o666)
    assert start_folder.read() is None


def test_other_arguments_have_another_record(start_folder, checkpoint):
    assert StartFolder(checkpoint, ARGUMENTS).read() is not None
    assert StartFolder(checkpoint, {**ARGUMENTS, "dtype": "float32"}).read() is None


@pytest.mark.thorough
def test_weights_too_large_for_the_cache_are_not_kept(start_folder, monkeypatch):
    monkeypatch.setattr(EVICTOR, "max_bytes", 1000)
    assert start_folder.write_weights(*file_of({"w": jnp.zeros(200)})) is None
