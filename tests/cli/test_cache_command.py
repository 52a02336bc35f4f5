"""``torchax-serve cache``: lists, checks, shrinks and clears files that other processes have written."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from torchax_serve.cli.main import app
from torchax_serve.compilation.cache_folders import folders


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two programs, a plan and a library in the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    made = folders()
    for age, (kind, name, size) in enumerate(
        [
            ("programs", "forward-1", 5000),
            ("programs", "decode-1", 3000),
            ("plans", "a.json", 20),
            ("kernels", "k.so", 7),
        ]
    ):
        made[kind].write(name, b"x" * size)
        os.utime(made[kind].path / name, (1e9 - age, 1e9 - age))
    return made


def run(*arguments):
    done = CliRunner().invoke(app, ["cache", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_cache_list(files):
    status, out, _ = run()
    assert status == 0
    lines = out.splitlines()
    assert lines[0].split()[:5] == ["programs", "2", "files", "8.1", "kB"]
    assert lines[0].endswith(str(files["programs"].path))
    assert [line.split()[1] for line in lines[1:4]] == ["0", "1", "1"]
    assert lines[5] == "8.3 kB of at most 10.0 GB"
    found = json.loads(run("list", "--json", "--kind", "plans")[1])
    assert found["max_bytes"] == 10**10
    assert found["kinds"]["plans"]["num_files"] == 1


def test_cache_verify_finds_damage_and_prune_removes_it(files):
    assert run("verify")[:2] == (0, run("verify")[1])
    assert run("verify")[1].endswith("all files are intact\n")
    (files["programs"].path / "decode-1").write_bytes(b"x" * 3060)
    status, out, _ = run("verify")
    assert status == 1
    assert "  decode-1: it has no seal\n" in out
    assert out.endswith("1 damaged; remove them: torchax-serve cache prune\n")
    assert run("prune")[0] == 0
    assert run("verify")[0] == 0
    assert files["programs"].read("forward-1") == b"x" * 5000
    assert files["programs"].read("decode-1") is None


def test_prune_keeps_the_most_recently_used(files):
    status, out, _ = run("prune", "--max-size", "6k")
    assert status == 0
    assert "removed 1 files, 3.1 kB" in out
    assert [entry.path.name for folder in files.values() for entry in folder.entries()] == ["forward-1"]


def test_clear_removes_files_of_a_kind_or_all_and_leaves_folders_in_use(files):
    assert run("clear", "--kind", "kernels")[0] == 0
    assert files["kernels"].read("k.so") is None
    assert files["programs"].read("forward-1") is not None
    assert run("clear")[1].endswith("0 B of at most 10.0 GB\n")
    files["programs"].write("forward-1", b"again")
    assert files["programs"].read("forward-1") == b"again"


def test_untrusted_folder_is_reported_with_remedy(files):
    files["programs"].path.chmod(0o777)
    path = files["programs"].path
    assert f"  not used: {path} can be written by others than you (mode 0777)" in run()[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kind", "wheels"], "--kind: expected one of programs, xla, plans, kernels, start, got 'wheels'"),
        (["prune", "--max-size", "much"], "--max-size: expected a size such as 10GB or 500MB, got 'much'"),
        (["--max-size", "1GB"], "--max-size: expected with prune, got with list; leave it out"),
    ],
)
def test_wrong_arguments(files, arguments, said):
    assert run(*arguments) == (2, "", f"error: {said}\n")


def test_cache_limit_variable(files, monkeypatch):
    monkeypatch.setenv("TORCHAX_SERVE_CACHE_SIZE", "2GB")
    assert run()[1].endswith("of at most 2.0 GB\n")
    monkeypatch.setenv("TORCHAX_SERVE_CACHE_SIZE", "two")
    assert run()[2] == "error: TORCHAX_SERVE_CACHE_SIZE: expected a size such as 10GB or 500MB, got 'two'\n"


def test_neither_jax_nor_torch_is_imported(files):
    code = (
        "import sys; from torchax_serve.cli.cache import cache, Action; cache(Action.LIST)\n"
        "print([name for name in ('jax', 'torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
