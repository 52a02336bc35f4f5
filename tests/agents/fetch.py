"""Fetches coding agents and a client of Ollama from npm's registry into the user's cache folder.

``python tests/agents/fetch.py`` prints the folder, in which ``node_modules/.bin`` has the programs. Releases stand
in ``package.json``.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

WANTED = Path(__file__).with_name("package.json")
PROGRAMS = ("claude", "codex", "opencode")
TIMEOUT_S = 300


def packages_folder() -> Path:
    """The folder with ``node_modules``, made at the first call.

    Raises:
        RuntimeError: node or npm are missing, the registry does not answer, or a program does not run on this machine.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchax-serve" / "agents"
    folder = root / hashlib.sha256(WANTED.read_bytes()).hexdigest()[:16]
    if folder.is_dir():
        return folder
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise RuntimeError("expected node and npm, which fetch the agents, found none")
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as name:
        made = Path(name) / "made"
        made.mkdir()
        shutil.copy(WANTED, made)
        _run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"], made)
        for program in PROGRAMS:  # each is a link to a program of this kind of processor
            _run([str(made / "node_modules" / ".bin" / program), "--version"], made, HOME=name)
        made.rename(folder)
    return folder


def _run(command: list[str], folder: Path, **variables: str) -> None:
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1:]}")


if __name__ == "__main__":
    print(packages_folder())
