"""Published checkpoints' configurations, made small, beside eager PyTorch: results, and their table in docs/models.md.

python benchmarks/checkpoints.py FOLDER                   # the configurations that have no result yet
python benchmarks/checkpoints.py FOLDER --again           # all of them
python benchmarks/checkpoints.py FOLDER --again NAME      # one of them

FOLDER holds the ``config.json`` of checkpoints as <organisation>--<name>.json, with the published keys and small
sizes. Weights are random; results of configurations that it does not hold stay.
"""

import argparse
import importlib.metadata
import time
from pathlib import Path

from parity_sweep import models_page, sweep
from torchax_serve.parity.tasks import CHECKPOINTS, read

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "torchax_serve" / "parity" / "results" / CHECKPOINTS
VERSIONS = {name: importlib.metadata.version(name) for name in ("transformers", "torch", "jax", "torchax")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of small configurations")
    parser.add_argument("names", nargs="*", help="of configurations; all if none is given")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--failed", action="store_true", help="also those that did not pass")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    files = {path.stem: path.resolve() for path in sorted(arguments.folder.glob("*.json"))}
    if unknown := [name for name in arguments.names if name not in files]:
        parser.error(f"names: expected configurations in {arguments.folder}, got {', '.join(unknown)}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"transformers-{VERSIONS['transformers']}.json"
    known = read(path)[1] if path.exists() else {}
    began = time.monotonic()
    chosen = [
        str(file)
        for name, file in files.items()
        if (not arguments.names or name in arguments.names)
        and (name not in known or arguments.again or (arguments.failed and known[name].status != "passed"))
    ]
    for result in sweep.sweep(chosen, task=CHECKPOINTS, num_workers=arguments.workers):
        name = Path(result.model_type).stem if result.model_type in chosen else result.model_type
        known[name] = sweep.named(result, name)
        sweep.save(path, known, VERSIONS)
        seconds = time.monotonic() - began
        print(
            f"{seconds:5.0f} s  {name:44} {result.status:10} {result.executor or '':12} {result.error or ''}",
            flush=True,
        )
    models_page.write(ROOT)


if __name__ == "__main__":
    main()
