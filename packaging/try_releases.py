"""Runs the core of the suite with oldest, today's and newest releases of the libraries underneath.

    python packaging/try_releases.py                          # all three, on this Python
    python packaging/try_releases.py newest --python python3.14

Each set is installed in an environment of its own, in a copy of this folder that is removed afterwards: `oldest` has
the lowest torch, jax and transformers that pyproject.toml takes, `today` what its extra ``dev`` takes, `newest` the
same without upper bounds for those three. Ends with one line for each set: Python, releases, numbers of tests. pip's
settings hold, so that torch's CPU build can be given by a folder of wheels. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETS = ("oldest", "today", "newest")
VARIED = ("torch", "jax", "transformers")
"""Packages of which the sets have other releases."""
CORE = (
    "tests/engine/test_engine.py",
    "tests/core",
    "tests/cli",
    "tests/ops/test_ops_linear.py",
    "tests/ops/test_ops_lowerings.py",
    "tests/ops/test_ops_recurrent.py",
    "tests/ops/test_paged_attention.py",
    "tests/server/test_chat.py",
    "tests/server/test_completions.py",
    "tests/server/test_metrics.py",
    "tests/server/test_structured.py",
)
"""What is run beside the fast tests: whatever meets the interfaces of Python, PyTorch, JAX and transformers."""
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "runs", "*.egg-info", ".*_cache", "__pycache__")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_REPORT = """
import importlib.metadata as m, platform
print("Python", platform.python_version(), *(f"{n} {m.version(n)}" for n in ("torch", "jax", "transformers")), sep=", ")
"""


def requirements_of(which: str, project: dict) -> list[str]:
    """Returns what pip is asked for to install a set.

    Raises:
        SystemExit: A varied package has no lower bound.
    """
    if which == "today":
        return [".[dev]"]
    needed, dev = project["dependencies"], project["optional-dependencies"]["dev"]
    if which == "oldest":
        return [".[dev]", *(f"{name}=={_lower_bound(name, needed)}" for name in VARIED)]
    # The project itself and not its extra, whose upper bounds would hold.
    extras = [each.replace(f"{project['name']}[", ".[") for each in dev]
    return [re.sub(r",?<[^,;\s]+", "", each) if _name(each) in VARIED else each for each in extras]


def _name(requirement: str) -> str:
    found = _NAME.match(requirement)
    return found[0] if found else ""


def _lower_bound(name: str, requirements: Sequence[str]) -> str:
    """Returns the lowest version of a package that any of the requirements has."""
    bounds = [found[1] for each in requirements if _name(each) == name and (found := re.search(r">=([\d.]+)", each))]
    if not bounds:
        raise SystemExit(f"pyproject.toml: expected a lower bound (>=) for {name}, got none")
    return min(bounds, key=lambda version: [int(part) for part in version.split(".")])


def try_set(which: str, python: str, tests: Sequence[str]) -> tuple[str, bool]:
    """Returns what was run with its numbers, and whether all of it passed."""
    requirements = requirements_of(which, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
    with tempfile.TemporaryDirectory(prefix="torchax-serve-releases-") as scratch:
        copy = Path(scratch) / "project"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        own = copy / ".venv" / "bin" / "python"
        _run([python, "-m", "venv", ".venv"], copy)
        _run([own, "-m", "pip", "install", "--quiet", *requirements], copy)
        releases = subprocess.run([own, "-c", _REPORT], cwd=copy, check=True, capture_output=True, text=True).stdout
        runs = [_tested(own, arguments, copy) for arguments in (["-m", "fast"], list(tests))]
    numbers = "; ".join(line for line, _ in runs)
    return f"{which}: {releases.strip()}: {numbers}", all(passed for _, passed in runs)


def _run(command: Sequence[str | Path], folder: Path) -> None:
    if status := subprocess.run(command, cwd=folder, check=False).returncode:
        raise SystemExit(f"status {status}: {' '.join(map(str, command))}")


def _tested(python: Path, arguments: Sequence[str], folder: Path) -> tuple[str, bool]:
    """Returns the last line of a run of the tests, which is shown as it goes, and whether all passed."""
    command = [python, "-m", "pytest", *arguments]
    last = ""
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as running:
        for line in running.stdout or ():
            print(line, end="", flush=True)
            last = line.strip(" =\n") or last
    return last, running.returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sets that are asked for and returns the exit status: 0 if every test passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", default=SETS, metavar="oldest|today|newest", help="without any, all three")
    parser.add_argument("--python", default=sys.executable, help="interpreter; without it, the one that runs this")
    parser.add_argument("--tests", nargs="+", default=CORE, help="tests beside the fast ones; without it, the core")
    given = parser.parse_args(arguments)
    if unknown := set(given.sets) - set(SETS):
        parser.error(f"expected sets of {', '.join(SETS)}, got {', '.join(sorted(unknown))}")
    found = [try_set(which, given.python, given.tests) for which in given.sets]
    print("", *(line for line, _ in found), sep="\n")
    return 0 if all(passed for _, passed in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
