"""Installed libraries of kernels: taken where they fit, named where they do not, and built into a wheel."""

import hashlib
import json
import logging
import os
import platform
import re
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest

from model_adapters.ops.cpu import build, prebuilt

ROOT = Path(__file__).resolve().parents[2]
EPYC_2 = "flags\t\t: fpu sse4_2 movbe f16c abm avx fma bmi1 avx2 bmi2"
AVX512 = f"{EPYC_2} avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"
BF16 = f"{AVX512} avx512_bf16"
AMX = f"{BF16} amx_tile amx_bf16 amx_int8"
NOW = prebuilt.level_of(build.cpuinfo())
pytestmark = pytest.mark.skipif(NOW is None, reason="no library is built for a processor as old as this one")


@cache
def real_library():
    """The library of this machine; built when a test needs it rather than when tests are collected."""
    return build.library_path(()) if os.environ.get("CXX") else build.library_path()


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Installs a package with this machine's library; returns a function that changes its manifest."""
    real_library()  # in the user's folder
    monkeypatch.delenv("CXX", raising=False)
    folder = tmp_path / "site" / prebuilt.PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    library = folder / f"{NOW.name}.so"
    library.write_bytes(real_library().read_bytes())
    entry = {"file": library.name, "sha256": hashlib.sha256(library.read_bytes()).hexdigest(), "flags": []}
    manifest = {"version": "0.1.0", "sources": build.sources_digest(), "headers": prebuilt.headers_digest()}
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))

    def write(**changes):
        prebuilt._package.cache_clear()
        prebuilt._note.cache_clear()
        (folder / prebuilt.MANIFEST).write_text(json.dumps(manifest | {"libraries": {NOW.name: entry}} | changes))
        return library

    yield write
    prebuilt._package.cache_clear()
    prebuilt._note.cache_clear()


def test_a_library_that_fits_needs_no_compiler_and_no_cache_folder(install, tmp_path):
    library = install()
    assert build.library_path() == library
    script = (
        "import jax.numpy as jnp\nfrom model_adapters.ops.cpu import build, ffi\n"
        "build.COMPILERS = ()\nassert ffi.missing() is None\nprint(build.library_path())"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(library.parents[1]), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(library), done.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sources": "0"}, r"was built from other C\+\+ files \(version 0.1.0\)"),
        ({"headers": "0"}, "was built for other headers of XLA than those of jaxlib"),
        ({"libraries": {}}, "has no library for this processor"),
        ({"libraries": {NOW.name: {"file": "no.so", "sha256": "0"}}} if NOW else {}, "is damaged .no.so: No such file"),
        ({"libraries": {NOW.name: {"file": f"{NOW.name}.so", "sha256": "0"}}} if NOW else {}, "is damaged"),
    ],
)
def test_one_that_does_not_fit_is_noted_once_and_compiled_as_without(install, caplog, changes, reason):
    install(**changes)
    with caplog.at_level(logging.WARNING, "torchax_serve"):
        for _ in range(2):
            with pytest.raises(build.BuildError, match=r"no C\+\+ compiler found"):
                build.library_path()
    (line,) = [each.message for each in caplog.records if "torchax-serve-kernels" in each.message]
    assert re.search(f"^the installed torchax-serve-kernels {reason}.*kernels are compiled$", line)


def test_a_compiler_that_is_asked_for_is_used(install, monkeypatch):
    install()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="that CXX names"):
        build.library_path()
    monkeypatch.delenv("CXX")
    with pytest.raises(build.BuildError):
        build.library_path(rebuild=True)  # as after one that could not be loaded
    with pytest.raises(build.BuildError):
        build.library_path(("-O1",))


def test_a_manifest_that_is_none_is_named(install, caplog):
    library = install()
    (library.parent / prebuilt.MANIFEST).write_text("{")
    assert prebuilt.prebuilt_library(build.sources_digest(), build.cpuinfo()) is None
    assert "torchax-serve-kernels has no readable manifest.json" in caplog.text


@pytest.mark.parametrize(
    ("machine", "vendor", "flags", "level"),
    [
        ("x86_64", "GenuineIntel", AMX, "x86_64-amx"),
        ("x86_64", "GenuineIntel", BF16, "x86_64-avx512"),
        ("x86_64", "AuthenticAMD", BF16, "x86_64-avx512bf16"),
        ("x86_64", "GenuineIntel", AVX512, "x86_64-avx512"),
        ("x86_64", "AuthenticAMD", EPYC_2, "x86_64-avx2"),
        ("x86_64", "GenuineIntel", "flags : sse4_2 avx", None),
        ("aarch64", "", "Features : fp asimd asimddp", "aarch64-dotprod"),
        ("aarch64", "", "Features : fp asimd", "aarch64"),
        ("riscv64", "", AMX, None),
    ],
)
def test_a_processor_has_the_widest_level_of_its_instructions(monkeypatch, machine, vendor, flags, level):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    found = prebuilt.level_of([f"vendor_id\t: {vendor}", flags])
    assert (None if found is None else found.name) == level


def test_the_wheel_has_what_an_installation_looks_for(tmp_path):
    """Built by a compiler that links by handing over the real library, and installed by pip."""
    script = tmp_path / "compiler"
    script.write_text(f"""#!{sys.executable}
import shutil, sys
if "--version" in sys.argv: print("compiler 1.0"); sys.exit()
out = sys.argv[sys.argv.index("-o") + 1]
if "-shared" in sys.argv: shutil.copyfile({str(real_library())!r}, out)
else: open(out, "w").close()
""")
    script.chmod(0o755)
    command = [sys.executable, ROOT / "packaging/kernels/build.py", "--out", tmp_path / "wheels"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    options = ["--compiler", str(script), "--levels", NOW.name, "--platform", "manylinux_2_36_x86_64"]
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert wheel.name == "torchax_serve_kernels-0.1.0-py3-none-manylinux_2_36_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert names == {f"{prebuilt.PACKAGE}/{name}" for name in ("__init__.py", "manifest.json", f"{NOW.name}.so")}
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
        archive.extractall(tmp_path / "site")
    check = "from model_adapters.ops.cpu import build; print(build.library_path())"
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    environment.pop("CXX", None)
    done = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / "site" / prebuilt.PACKAGE / f"{NOW.name}.so"), done.stderr
    wrong = subprocess.run([*command, "--levels", "mmx"], env=environment, capture_output=True, text=True)
    assert wrong.returncode == 2 and "--levels: expected of" in wrong.stderr
