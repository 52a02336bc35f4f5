"""Builds the wheel of torchax-serve-kernels.

It has a library for each level of a kind of processor.

    python packaging/kernels/build.py --out wheels
    python packaging/kernels/build.py --out wheels --machine aarch64 \\
        --compiler 'python -m ziglang c++ -target aarch64-linux-gnu.2.28' --platform manylinux_2_28_aarch64

Run it in an environment with the jax for which the libraries are. One compiler runs at a time. `auditwheel show` says
which platform a library that was linked to this system's glibc fits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

import jax
import jax.ffi

from model_adapters.ops.cpu import build, prebuilt
from model_adapters.ops.cpu.targets import TARGETS

HERE = Path(__file__).resolve().parent


def compile_level(level: prebuilt.Level, compiler: list[str], library: Path) -> None:
    """Compiles all C++ files for a level into `library`."""
    command = [*compiler, *build.FLAGS, *level.flags, f"-I{jax.ffi.include_dir()}"]
    with tempfile.TemporaryDirectory() as scratch:
        objects = []
        for source in build.sources():
            objects.append(str(Path(scratch) / f"{source.stem}.o"))
            subprocess.run([*command, "-c", str(source), "-o", objects[-1]], check=True)
        subprocess.run([*command, "-shared", "-s", *objects, "-o", str(library)], check=True)
    content = library.read_bytes()
    if missing := [target for target in TARGETS if target.encode() not in content]:
        raise SystemExit(f"{library.name}: expected all kernels, got none named {', '.join(missing)}")


def make_package(levels: list[prebuilt.Level], compiler: list[str], project: Path) -> None:
    """Compiles libraries into the package of `project`, and writes what they were built from."""
    folder = project / prebuilt.PACKAGE
    libraries = {}
    for level in levels:
        print(f"{level.name}: {shlex.join(level.flags)}", flush=True)
        library = folder / f"{level.name}.so"
        compile_level(level, compiler, library)
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
        libraries[level.name] = {"file": library.name, "sha256": digest, "flags": list(level.flags)}
    version = tomllib.loads((project / "pyproject.toml").read_text())["project"]["version"]
    made = subprocess.run([*compiler, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[0]
    manifest = {
        "version": version,
        "sources": build.sources_digest(),
        "headers": prebuilt.headers_digest(),
        "jax": jax.__version__,
        "compiler": made,
        "libraries": libraries,
    }
    (folder / prebuilt.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def main() -> None:
    """Builds the wheel that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the wheel")
    parser.add_argument("--machine", default=platform.machine(), help="kind of processor; this one's")
    parser.add_argument("--levels", help="names of levels with commas; all of the kind")
    parser.add_argument("--compiler", help="command of the C++ compiler; $CXX, g++, clang++ or c++")
    own = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    parser.add_argument("--platform", default=own, help=f"platform of the wheel's name; {own}")
    asked = parser.parse_args()
    levels = [each for each in prebuilt.LEVELS if each.machine == asked.machine]
    if asked.levels is not None:
        names = asked.levels.split(",")
        if unknown := set(names) - {each.name for each in levels}:
            parser.error(f"--levels: expected of {', '.join(each.name for each in levels)}, got {', '.join(unknown)}")
        levels = [each for each in levels if each.name in names]
    if not levels:
        parser.error(f"--machine: expected {' or '.join({each.machine for each in prebuilt.LEVELS})}")
    compiler = build.find_compiler() if asked.compiler is None else shlex.split(asked.compiler)
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        project = Path(scratch) / "project"
        shutil.copytree(HERE, project, ignore=shutil.ignore_patterns("__pycache__", "*.so", "build.py"))
        shutil.copy(HERE.parents[1] / "LICENSE", project)
        make_package(levels, compiler, project)
        make = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
        environment = os.environ | {"KERNELS_PLATFORM": asked.platform}
        command = [sys.executable, "-c", make, str(asked.out.resolve())]
        subprocess.run(command, cwd=project, env=environment, check=True)


if __name__ == "__main__":
    main()
