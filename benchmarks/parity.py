"""Every architecture of the installed transformers beside eager PyTorch: results and docs/models.md.

python benchmarks/parity.py                 # the types that have no result yet
python benchmarks/parity.py --again         # all of them
python benchmarks/parity.py --again llama   # one of them
python benchmarks/parity.py --task seq2seq  # another mapping than that of causal models
python benchmarks/parity.py --task configurations   # what checkpoints of one type vary beside it
python benchmarks/parity.py --part 2/6      # every sixth, from the second on; 1 if one ends otherwise than in the table
python benchmarks/parity.py --part 2/6 --since main  # and those that the changes since then name
python benchmarks/parity.py --part 2/6 --diff FILE   # the same, of changes as git diff prints them
"""

import argparse
import importlib.metadata
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from parity_sweep import changed_types, checks, models_page, sweep
from torchax_serve.parity.tasks import CAUSAL, CHECKPOINTS, TASKS, shipped

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = {name: importlib.metadata.version(name) for name in ("transformers", "torch", "jax", "torchax")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all if none is named")
    parser.add_argument(
        "--task", choices=[name for name in TASKS if name != CHECKPOINTS], default=CAUSAL, help="what is checked"
    )
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--failed", action="store_true", help="also those that did not pass")
    parser.add_argument("--part", type=part, metavar="N/M", help="check a part against the table; write nothing")
    parser.add_argument("--since", metavar="COMMIT", help="with --part, also the types that changes since COMMIT name")
    parser.add_argument("--diff", type=Path, metavar="FILE", help="with --part, also the types that this diff names")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    types = arguments.types or checks.names_of(arguments.task)
    for option in ("since", "diff"):
        if getattr(arguments, option) is not None and arguments.part is None:
            parser.error(f"--{option}: expected together with --part, got it alone; add --part")
    if arguments.part is not None:
        first, step = arguments.part
        chosen = types[first - 1 :: step]
        changes = changes_since(arguments.since) + (arguments.diff.read_text() if arguments.diff else "")
        chosen += [name for name in changed_types.types_named_in(changes, types) if name not in chosen]
        sys.exit(check_part(chosen, arguments.task, arguments.workers))
    folder = ROOT / "torchax_serve" / "parity" / "results" / ("" if arguments.task == CAUSAL else arguments.task)
    folder.mkdir(exist_ok=True)
    path = folder / f"transformers-{VERSIONS['transformers']}.json"
    began = time.monotonic()

    def again(known):
        return known is None or arguments.again or (arguments.failed and known.status != "passed")

    results = sweep.update(
        path,
        types,
        VERSIONS,
        again=again,
        say=lambda one: say(one, began),
        task=arguments.task,
        num_workers=arguments.workers,
    )
    passed = sum(result.status == "passed" for result in results.values())
    print(f"{passed} of {len(results)} pass, {time.monotonic() - began:.0f} s")
    models_page.write(ROOT)


def part(text):
    """The numbers of ``N/M``: which of how many parts."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"expected N/M with N from 1 to M, such as 2/6, got {text!r}")
    return int(number), int(count)


def changes_since(since):
    """The changes since a commit."""
    if since is None:
        return ""
    diff = subprocess.run(["git", "diff", "-U0", since], cwd=ROOT, capture_output=True, text=True)
    if diff.returncode:
        sys.exit(f"--since: expected a commit, got {since!r}: {diff.stderr.strip().splitlines()[0]}")
    return diff.stdout


def say(result, began):
    seconds = time.monotonic() - began
    print(
        f"{seconds:5.0f} s  {result.model_type:28} {result.status:10} {result.executor or '':12} {result.error or ''}",
        flush=True,
    )


def check_part(types, task, num_workers):
    """0 if every type ends as in the table."""
    _, known = shipped(task, VERSIONS["transformers"])
    for name in sorted(set(types) & set(known)):
        if missing := [each for each in known[name].packages if find_spec(each.partition(" ")[0]) is None]:
            types = [each for each in types if each != name]
            print(f"{name}: left out, for it is built from {', '.join(missing)}, which is not installed here")
    types = sorted(types, key=lambda name: -(known[name].total_s or 0.0) if name in known else 0.0)
    began, wrong = time.monotonic(), []
    for result in sweep.sweep(types, task=task, num_workers=num_workers):
        say(result, began)
        expected = known.get(result.model_type)
        if expected is None or (result.status, result.executor) != (expected.status, expected.executor):
            wrong.append(result.model_type)
    print(f"{len(types)} types, {time.monotonic() - began:.0f} s; other than the table: {', '.join(wrong) or 'none'}")
    return bool(wrong)


if __name__ == "__main__":
    main()
