"""Fetches coding agents and clients from npm's registry and PyPI into the user's cache folder.

``python tests/agents/fetch.py`` prints the folder, in which ``node_modules/.bin`` has the agents and ``python`` the
packages of Python, apart from those of the environment. The releases stand in ``package.json`` and
``requirements.txt``.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WANTED = [Path(__file__).with_name(name) for name in ("package.json", "requirements.txt")]
PROGRAMS = ("claude", "codex", "opencode")
TIMEOUT_S = 600


def packages_folder() -> Path:
    """The folder with ``node_modules`` and ``python``, made at the first call.

    Raises:
        RuntimeError: node or npm are missing, a registry does not answer, or a program does not run on this machine.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchax-serve" / "agents"
    folder = root / hashlib.sha256(b"".join(path.read_bytes() for path in WANTED)).hexdigest()[:16]
    if folder.is_dir():
        return folder
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise RuntimeError("expected node and npm, which fetch the agents, found none")
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as name:
        made = Path(name) / "made"
        made.mkdir()
        shutil.copy(WANTED[0], made)
        _run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"], made)
        for program in PROGRAMS:  # each is a link to a program of this kind of processor
            _run([str(made / "node_modules" / ".bin" / program), "--version"], made, HOME=name)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(made / "python")]
        _run([*pip, "--requirement", str(WANTED[1])], made)
        made.rename(folder)
    return folder


def _run(command: list[str], folder: Path, **variables: str) -> None:
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1:]}")


if __name__ == "__main__":
    print(packages_folder())
