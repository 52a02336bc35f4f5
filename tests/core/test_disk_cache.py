"""Sealed files: what was written comes back, or nothing does."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from model_adapters import disk_cache
from model_adapters.disk_cache import SEAL_BYTES, SealedFolder, keep_within
from model_adapters.errors import InvalidArgumentError
from torchax_serve.compilation.cache_folders import Evictor, parse_size

CONTENT = bytes(range(256)) * 3


@pytest.fixture
def folder(tmp_path):
    made = SealedFolder(tmp_path / "cache" / "kept")
    made.write("one", CONTENT)
    return made


@pytest.fixture
def warnings_of(caplog, monkeypatch):
    monkeypatch.setattr(disk_cache, "_WARNED", set())
    caplog.set_level(logging.WARNING, "torchax_serve")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "torchax_serve"]


def test_what_was_written_comes_back_and_is_the_users_alone(folder):
    assert folder.read("one") == CONTENT
    assert SealedFolder(folder.path).read("one") == CONTENT
    assert folder.read("two") is None
    folder.write("one", b"")
    assert folder.read("one") == b""
    for each in [folder.path, folder.path.parent]:
        assert each.stat().st_mode & 0o777 == 0o700
    assert {each.stat().st_mode & 0o777 for each in folder.path.iterdir()} == {0o600}


def test_a_bit_flipped_anywhere_is_found(folder):
    whole = (folder.path / "one").read_bytes()
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        (folder.path / "one").write_bytes(damaged)
        assert folder.damage("one") is not None
        assert folder.read("one") is None, place
        assert not (folder.path / "one").exists()
        (folder.path / "one").touch(0o600)
    folder.write("one", CONTENT)
    assert folder.read("one") == CONTENT


def test_a_file_cut_or_lengthened_anywhere_is_found(folder):
    whole = (folder.path / "one").read_bytes()
    for length in [*range(0, len(whole), 11), len(whole) - SEAL_BYTES, len(whole) - 1]:
        (folder.path / "one").write_bytes(whole[:length])
        (folder.path / "one").chmod(0o600)
        assert folder.read("one") is None, length
    for other in (whole + b"\0", b"\0" + whole, whole[:-SEAL_BYTES] + whole):
        (folder.path / "one").write_bytes(other)
        (folder.path / "one").chmod(0o600)
        assert folder.read("one") is None


def test_files_of_other_names_other_folders_and_other_keys_are_foreign(folder, tmp_path):
    other = SealedFolder(tmp_path / "other")
    other.write("one", b"another program")
    (other.path / "one").rename(folder.path / "two")
    assert folder.read("two") is None
    (folder.path / "one").rename(folder.path / "three")
    assert folder.read("three") is None
    folder.write("one", CONTENT)
    (folder.path / ".key").unlink()
    assert folder.read("one") is None
    folder.write("one", CONTENT)
    assert folder.read("one") == CONTENT


def test_any_number_of_damaged_files_is_one_warning(folder, tmp_path, warnings_of):
    other = SealedFolder(tmp_path / "other")
    for each in (folder, other):
        for name in ("one", "two"):
            each.write(name, CONTENT)
            (each.path / name).write_bytes(CONTENT)
            assert each.read(name) is None
    (line,) = warnings_of()
    assert f"{folder.path / 'one'} is damaged (it has no seal); it is made anew" in line


def test_a_damaged_key_is_replaced(folder):
    (folder.path / ".key").write_bytes(b"short")
    assert folder.read("one") is None
    folder.write("one", CONTENT)
    assert folder.read("one") == CONTENT


def test_a_key_that_cannot_be_read_is_named_and_removes_nothing(folder, warnings_of):
    (folder.path / ".key").unlink()
    (folder.path / ".key").mkdir()
    assert folder.read("one") is None
    with pytest.raises(OSError, match="cannot be read"):
        folder.write("two", CONTENT)
    assert f"{folder.path / '.key'} cannot be read (it is no file); remove it" in warnings_of()[0]
    assert (folder.path / "one").exists()


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_that_others_can_write_is_neither_read_nor_written(folder, mode, warnings_of):
    folder.path.chmod(mode)
    assert folder.read("one") is None
    assert SealedFolder(folder.path).read("one") is None
    with pytest.raises(OSError, match=rf"can be written by others than you \(mode 0{mode:o}\)"):
        folder.write("two", CONTENT)
    (line,) = warnings_of()
    assert line.endswith(f"if nobody has, run: chmod -R go-w {folder.path}")
    folder.path.chmod(0o700)
    assert folder.read("one") == CONTENT  # nothing was removed


@pytest.mark.parametrize("name", ["one", ".key"])
def test_a_file_that_others_can_write_is_not_read(folder, name, warnings_of):
    (folder.path / name).chmod(0o602)
    assert folder.read("one") is None
    assert f"{folder.path / name} can be written by others than you (mode 0602)" in warnings_of()[0]


@pytest.mark.parametrize("name", ["one", ""])
def test_what_belongs_to_somebody_else_is_not_read(folder, name, warnings_of, monkeypatch):
    if os.geteuid() == 0:
        os.chown(folder.path / name, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert folder.read("one") is None
    assert "belongs to user" in warnings_of()[0]


def test_links_pipes_and_folders_in_a_files_place_are_not_read(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (folder.path / "one").rename(elsewhere)
    (folder.path / "one").symlink_to(elsewhere)
    assert folder.read("one") is None
    assert elsewhere.exists()
    os.mkfifo(folder.path / "pipe", 0o600)
    assert folder.read("pipe") is None
    (folder.path / "folder").mkdir()
    assert folder.read("folder") is None


HAMMER = """
import sys
from pathlib import Path
from model_adapters.disk_cache import SealedFolder
folder, me = SealedFolder(Path(sys.argv[1])), sys.argv[2]
seen = set()
for turn in range(150):
    for name in ("a", "b"):
        content = folder.read(name)
        if content is not None:
            assert len(set(content)) == 1 and len(content) == 100_000, (len(content), set(content))
            seen.add(content[:1])
        folder.write(name, me.encode() * 100_000)
print(len(seen))
"""


def test_processes_that_write_and_read_the_same_files_see_whole_ones(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(disk_cache.__file__).parents[1])}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", HAMMER, str(tmp_path / "kept"), me], env=environment, stdout=subprocess.PIPE
        )
        for me in "xyz"
    ]
    outputs = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], outputs
    assert max(int(output) for output in outputs) >= 2  # somebody has read what somebody else had written
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [".key", "a", "b"]


def test_the_least_recently_used_are_evicted(folder, tmp_path):
    other = SealedFolder(tmp_path / "other")
    for age, (where, name) in enumerate([(folder, "new"), (other, "middle"), (folder, "old")]):
        where.write(name, b"x" * 1000)
        os.utime(where.path / name, (1e9 - age, 1e9 - age))
    each = 1000 + SEAL_BYTES
    assert [entry.path.name for entry in keep_within([folder, other], 2 * each + len(CONTENT) + SEAL_BYTES)] == ["old"]
    assert other.read("middle") is not None  # which is a use
    assert [entry.path.name for entry in keep_within([folder, other], 2 * each)] == ["new"]
    assert keep_within([folder, other], 10**6) == []


def test_what_a_process_left_half_written_is_removed_in_time(folder):
    left = folder.path / f"{disk_cache.PARTIAL}1-x"
    left.write_bytes(b"half")
    keep_within([folder], 10**6)
    assert left.exists()
    os.utime(left, (1e9, 1e9))
    keep_within([folder], 10**6)
    assert not left.exists()


def test_a_process_keeps_the_limit_while_it_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, evictor = SealedFolder(tmp_path / "torchax-serve" / "compiled"), Evictor(max_bytes=20_000)
    for number in range(100):
        folder.write(f"{number:03}", b"x" * 900)
        os.utime(folder.path / f"{number:03}", (1e9 + number, 1e9 + number))
        evictor.wrote(900, folder)
    entries = sorted(entry.path.name for entry in folder.entries())
    assert 15 <= len(entries) <= 22
    assert entries[-1] == "099"
    assert entries == [f"{number:03}" for number in range(100 - len(entries), 100)]


@pytest.mark.parametrize(
    ("text", "expected"), [("10GB", 10**10), ("500 mb", 5 * 10**8), ("1.5k", 1500), ("7", 7), ("0", 0)]
)
def test_sizes(text, expected):
    assert parse_size(text, "--max-size") == expected


@pytest.mark.parametrize("text", ["", "ten", "-1", "1e9", "10 GiBs", "nan"])
def test_what_is_no_size(text):
    with pytest.raises(InvalidArgumentError, match="--max-size: expected a size such as 10GB"):
        parse_size(text, "--max-size")
