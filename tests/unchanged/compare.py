"""Compares the programs and answers of this working tree with those of another commit, to the bit.

``python tests/unchanged/compare.py HEAD`` shows what uncommitted changes do to them, ``main`` what a branch does. The
other commit is checked out in a folder of its own. Each side runs its own scripts: a change may rename what they read.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import recorded

ROOT = Path(__file__).parents[2]
KINDS = {"step_digests": (), "golden_answers": ("--exact",)}


def results(tree, kind, folder, only):
    """What a script of `tree` writes."""
    path = folder / f"{kind}.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "benchmarks")])}
    script = tree / "tests" / "unchanged" / f"{kind}.py"
    command = [sys.executable, script, "write", path, *KINDS[kind], *(["--only", *only] if only else [])]
    subprocess.run(command, check=True, cwd=tree, env=environment)
    return recorded.read(path)[0]


def compare(revision, kinds, only, scratch):
    """Prints and returns the number of differences."""
    other, number = scratch / "tree", 0
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", other, revision], check=True, cwd=ROOT)
    try:
        for kind in kinds:
            found = []
            for name, tree in (("theirs", other), ("ours", ROOT)):
                (scratch / name).mkdir(exist_ok=True)
                found.append(results(tree, kind, scratch / name, only))
            places = list(recorded.differences(*found))
            print(*places, f"{kind}: {len(places)} differences", sep="\n")
            number += len(places)
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", other], check=True, cwd=ROOT)
    return number


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", help="the commit to compare with")
    parser.add_argument("--kind", choices=KINDS, nargs="*", default=list(KINDS), help="what is compared")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of models")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(bool(compare(arguments.revision, arguments.kind, arguments.only, Path(scratch))))


if __name__ == "__main__":
    main()
