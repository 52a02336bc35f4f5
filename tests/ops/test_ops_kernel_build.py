"""The kernels' build: kept, rebuilt, done once, and done without."""

import contextlib
import errno
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import tomllib
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from ops_oracle import decode_case, exact_decode

from model_adapters import unwritable_cache
from model_adapters.disk_cache import SealedFolder
from model_adapters.ops import decode_attention, registry
from model_adapters.ops.cpu import build, ffi
from torchax_serve.compilation.xla_cache import enable_compile_cache

HERE = Path(__file__).parent


@cache
def real_library():
    """The library of this machine; built when a test needs it rather than when tests are collected."""
    return build.library_path()


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has not looked for kernels yet, with an empty cache folder."""
    real_library()  # in the user's folder
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(ffi, "_loaded", _forgetful(ffi._loaded.__wrapped__))
    return tmp_path


def _forgetful(find):
    found = []

    def loaded():
        if not found:
            found.append(find())
        return found[0]

    return loaded


def fake_compiler(folder, on_link=None):
    """A compiler that 'links' by handing over the real library, and notes every link."""
    on_link = on_link or f'cp "{real_library()}" "$out"'
    path = folder / "fake-c++"
    path.write_text(f"""#!/bin/sh
case "$*" in *--version*) echo fake 1.0; exit 0;; esac
for word; do [ "$last" = -o ] && out="$word"; last="$word"; done
case "$*" in *-shared*) echo linked >> "{folder}/links"; sleep 0.3; {on_link};; *) : > "$out";; esac
""")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def links(folder):
    noted = folder / "links"
    return len(noted.read_text().splitlines()) if noted.exists() else 0


def assert_falls_back(caplog, reason, remedy="install g++ or set CXX"):
    case = decode_case()
    with caplog.at_level(logging.INFO, logger="torchax_serve"):
        for _ in range(2):
            out, _ = decode_attention(*case.args)
    np.testing.assert_allclose(out, exact_decode(case)[0], rtol=2e-5, atol=2e-5)
    assert registry.implementation_for("decode_attention", *case.args).name == "reference"
    lines = [record.getMessage() for record in caplog.records if record.name == "torchax_serve"]
    line = lines.pop()
    assert all("not kept" in other for other in lines)
    assert reason in line
    assert line.endswith(f"; {remedy}.")


def test_no_compiler(fresh, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(fresh))
    assert_falls_back(caplog, "no C++ compiler found (looked for g++, clang++, c++)")


def test_cxx_names_nothing(fresh, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert_falls_back(caplog, "the C++ compiler that CXX names, 'no-such-compiler', is not there")


def test_compilation_fails(fresh, monkeypatch, caplog):
    monkeypatch.setenv("CXX", fake_compiler(fresh, on_link="echo 'ld: error: no space' >&2; exit 3"))
    assert_falls_back(caplog, "failed with status 3: ld: error: no space")
    assert not list((fresh / "cache").rglob("*.so"))


@pytest.fixture
def unwritable(fresh, monkeypatch):
    """A cache folder that cannot be made, a folder for temporary ones, and a process that has not said so yet."""
    (fresh / "a file").write_text("")
    (fresh / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "a file"))
    monkeypatch.setenv("CXX", fake_compiler(fresh))
    monkeypatch.setattr(tempfile, "tempdir", str(fresh / "temporary"))
    monkeypatch.setattr(unwritable_cache, "_WARNED", [])
    register = jax.ffi.register_ffi_target

    def register_first(*args, **kwargs):  # a process that has loaded kernels before keeps those
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            register(*args, **kwargs)

    monkeypatch.setattr(jax.ffi, "register_ffi_target", register_first)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield fresh
    jax.config.update("jax_compilation_cache_dir", before)


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_without_a_cache_folder_kernels_are_built_in_a_temporary_one(unwritable, caplog):
    """It belongs to the user alone, and is gone once the library is loaded; one warning says so for programs too."""
    path = build.library_path()
    assert path == build.library_path() and links(unwritable) == 1
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700 and path.is_relative_to(unwritable / "temporary")
    case = decode_case()
    assert registry.implementation_for("decode_attention", *case.args).name != "reference"
    np.testing.assert_allclose(decode_attention(*case.args)[0], exact_decode(case)[0], rtol=2e-5, atol=2e-5)
    assert not list((unwritable / "temporary").iterdir())
    assert enable_compile_cache(unwritable / "a file" / "programs") is None
    (line,) = warnings_in(caplog)
    folder = unwritable / "a file/torchax-serve/kernels"
    assert line.startswith(f"compiled kernels are not kept: {folder} cannot be made (Not a directory); until")


def test_a_full_disk_has_kernels_too(unwritable, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(unwritable))
    in_cache = build.cache_folder().path

    def write(folder, name, content):
        if folder.path == in_cache:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        real_write(folder, name, content)

    real_write = SealedFolder.write
    monkeypatch.setattr(SealedFolder, "write", write)
    assert ffi._open(build.library_path()).tas_linear_max_rows(4) >= 0
    build.remove_temporary()
    assert not list((unwritable / "temporary").iterdir())
    assert f"{in_cache}: No space left on device" in warnings_in(caplog)[0]


def test_neither_a_cache_folder_nor_a_temporary_one(unwritable, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(unwritable / "a file"))
    assert_falls_back(
        caplog,
        "no temporary folder can be written either (Not a directory)",
        "choose folders by XDG_CACHE_HOME and TMPDIR",
    )


def test_a_library_that_does_not_load_even_when_rebuilt(fresh, monkeypatch, caplog):
    monkeypatch.setenv("CXX", fake_compiler(fresh, on_link='echo nonsense > "$out"'))
    assert_falls_back(caplog, "invalid ELF header")
    assert links(fresh) == 2


@pytest.mark.parametrize("damage", ["truncated", "one bit", "no seal", "empty"])
def test_a_damaged_library_is_built_again_and_never_loaded(fresh, monkeypatch, damage):
    monkeypatch.setenv("CXX", fake_compiler(fresh))
    path = build.library_path()
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 4
    unsealed = real_library().read_bytes()
    bad = {"truncated": content[:-1], "one bit": bytes(flipped), "no seal": unsealed, "empty": b""}
    path.write_bytes(bad[damage])
    assert build.library_path() == path
    assert path.read_bytes() == content
    assert links(fresh) == 2
    assert ffi._open(path).tas_linear_max_rows(4) >= 0


def test_a_library_that_exists_is_found_without_a_compiler(fresh, monkeypatch):
    monkeypatch.setattr(build, "COMPILERS", (fake_compiler(fresh),))
    path = build.library_path()
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    assert build.library_path() == path
    monkeypatch.setattr(build, "COMPILERS", (fake_compiler(fresh, on_link="echo 'ld: error' >&2; exit 3"),))
    assert build.library_path() == path
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler found"):
        build.library_path()


def test_a_library_that_others_could_have_written_is_not_loaded(fresh, monkeypatch, caplog):
    monkeypatch.setenv("CXX", fake_compiler(fresh))
    folder = build.library_path().parent
    folder.chmod(0o777)
    remedy = f"if nobody has, run: chmod -R go-w {folder}"
    assert_falls_back(caplog, f"{folder} can be written by others than you (mode 0777)", remedy)


def test_built_once_and_named_by_what_it_depends_on(fresh, monkeypatch):
    monkeypatch.setenv("CXX", fake_compiler(fresh))
    first = build.library_path()
    assert build.library_path() == first
    assert links(fresh) == 1
    other_flags = build.library_path(("-O1",))
    copied = fresh / "sources"
    shutil.copytree(build.FOLDER, copied)
    assert build.library_path(code=copied) == first
    (copied / "simd.h").write_text((copied / "simd.h").read_text() + "\n")
    assert len({first, other_flags, build.library_path(code=copied)}) == 3
    names = sorted(path.name for path in first.parent.iterdir())
    assert sorted(Path(name).suffix for name in names if name != ".key") == [".lock"] * 3 + [".so"] * 3
    assert ".key" in names
    assert {path.stat().st_mode & 0o777 for path in first.parent.iterdir()} == {0o600}


def test_two_processes_at_once_build_once(fresh):
    environment = {**os.environ, "CXX": fake_compiler(fresh)}
    script = "from model_adapters.ops.cpu import build; print(build.library_path())"
    running = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = [process.communicate(timeout=300)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert paths[0] == paths[1]
    assert Path(paths[0]).read_bytes().startswith(real_library().read_bytes())
    assert links(fresh) == 1


NARROWER = {"x86_64": ["-mno-avx512f", "-mno-avx"], "aarch64": ["-O1"]}


@pytest.mark.thorough
@pytest.mark.parametrize("flag", NARROWER.get(platform.machine(), ["-O1"]))
def test_the_kernels_are_right_without_the_widest_instructions(flag):
    """A part of the grid once more, in a process whose compiler leaves instructions out."""
    environment = {**os.environ, "CXX": f"{build.find_compiler()[0]} {flag}"}
    shapes = [f"{shape}-{dtype}" for shape in ("24-3", "80-8", "256-1", "16-16") for dtype in ("float32", "bfloat16")]
    grid = HERE / "test_ops_decode_attention.py::test_kernel_over_dims_and_groups"
    paged = HERE / "test_paged_attention.py::test_kernel_over_dims_groups_and_pages"
    pages = ("64-1-16", "80-2-32", "80-4-16", "96-3-64", "128-8-16", "256-16-32")
    tests = [f"{grid}[{shape}]" for shape in shapes] + [f"{paged}[{shape}]" for shape in pages]
    tests.append(str(HERE / "test_ops_linear.py::test_kernel"))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "44 passed" in done.stdout


def test_the_sources_are_part_of_the_package():
    declared = tomllib.loads((HERE / "../../pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    package = build.FOLDER.parents[1]
    shipped = {path for pattern in declared["model_adapters"] for path in package.glob(pattern)}
    assert {path for path in build.FOLDER.iterdir() if path.suffix in (".cc", ".h")} <= shipped
