"""Results in a file next to these scripts, with the versions and the processor that they depend on."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[1] / "benchmarks"))

from model_adapters.ops.cpu import ffi  # noqa: E402
from processors import processor  # noqa: E402

LIBRARIES = ("jax", "jaxlib", "torch", "torchax", "transformers")


def versions():
    """What programs and answers depend on besides this project: which kernels are used is the processor's, too."""
    here = {"has_cpu_kernels": ffi.missing() is None, "processor": processor()}
    return {**{name: version(name) for name in LIBRARIES}, **here}


def write(path, found):
    """Writes results by kind, model and name, a line for each model."""
    kinds = {"versions": {"installed": versions()}, **found}
    blocks = []
    for kind, models in kinds.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(value, sort_keys=True)}" for name, value in models.items()]
        blocks.append(f"{json.dumps(kind)}: {{\n" + ",\n".join(lines) + "\n}")
    path.write_text("{" + ",\n".join(blocks) + "}\n")


def read(path):
    """Results by kind, and whether they are of the versions installed here."""
    found = json.loads(path.read_text())
    return found, found.pop("versions")["installed"] == versions()


def differences(old, new, tolerance=0.0, where=""):
    """The places where two JSON values differ, numbers by more than `tolerance`."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from differences(old.get(key, "<absent>"), new.get(key, "<absent>"), tolerance, f"{where} / {key}")
    elif not _is_close(old, new, tolerance):
        yield f"{where}:\n  was {str(old)[:600]}\n  is  {str(new)[:600]}"


def _is_close(old, new, tolerance):
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(_is_close(a, b, tolerance) for a, b in zip(old, new, strict=True))
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_is_close(old[key], new[key], tolerance) for key in old)
    if isinstance(old, float) and isinstance(new, float):
        return old == new or abs(old - new) <= tolerance
    return old == new
