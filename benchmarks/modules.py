"""Modules of other libraries beside eager PyTorch: what `to_jax` returns for random weights, and gradients.

    python benchmarks/modules.py                        # all that have no row yet
    python benchmarks/modules.py --library timm         # of one library
    python benchmarks/modules.py --again "timm vgg11"   # one of them, again
    python benchmarks/modules.py --failed               # those that are not right, again
    python benchmarks/modules.py --show                 # counts, and what differs

`module_parity/libraries.py` names the packages; one that is not installed is left out. Modules have few layers and
small inputs where their library allows it. Weights are random, those that libraries set to zero or one as well. A row
says whether outputs are within 1e-4 of PyTorch's, relative to the largest number of an output, and gradients of a
weighted sum of the outputs by weights and inputs within 1e-3. A worker process checks one module after the other; a
module that ends the process or takes too long is a row that says so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import time
import warnings
from collections import Counter
from pathlib import Path

from module_parity.libraries import LIBRARIES, PACKAGES, cases_of, library_of
from parity_sweep.sweep import QUICK_COMPILATION

RESULTS = Path(__file__).with_name("results") / "modules.json"
TIME_LIMIT_S = 300
"""Seconds for one module, of which most take some."""
MODULES_PER_WORKER = 25
"""Modules after which a worker is replaced, whose compiled programs stay in memory."""


def work(connection):
    """The loop of a worker process: a name in, a row out."""
    warnings.filterwarnings("ignore")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILATION}"  # each program runs once
    import torch

    from module_parity.compare import compared

    torch.set_num_threads(1)
    known = {}
    while True:
        name = connection.recv()
        library = library_of(name)
        if library not in known:
            known[library] = cases_of(library)
        connection.send(compared(known[library][name]))


class Worker:
    """A process that compares one module after the other."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.num_done = 0

    def row_of(self, name):
        """The row of a module, and whether the process can go on."""
        self.connection.send(name)
        try:
            if not self.connection.poll(TIME_LIMIT_S):
                return {"status": "timed out", "error": f"no answer within {TIME_LIMIT_S} s"}, False
            row = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(10)
            return {"status": "crashed", "error": f"the process ended with status {self.process.exitcode}"}, False
        self.num_done += 1
        return row, self.num_done < MODULES_PER_WORKER

    def end(self):
        """Ends the process."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def rows_of(names):
    """Yields name and row of each module."""
    worker = None
    try:
        for name in names:
            worker = worker or Worker()
            row, goes_on = worker.row_of(name)
            yield name, row
            if not goes_on:
                worker.end()
                worker = None
    finally:
        if worker is not None:
            worker.end()


def is_right(row):
    """Whether outputs and gradients are PyTorch's."""
    return row["status"] == "passed" and ("no_gradients" in row or has_right_gradients(row))


def has_right_gradients(row):
    """Whether gradients are PyTorch's."""
    return row.get("gradients") is not None and row["gradients"] <= 1e-3


def show(rows):
    """Prints what is not right, and a table of counts by library."""
    for name, row in rows.items():
        if not is_right(row):
            print(name, {key: value for key, value in row.items() if key != "seconds"})
    print("| Library | modules | right outputs | right gradients |\n|---|---|---|---|")
    for library in LIBRARIES:
        own = [row for name, row in rows.items() if library_of(name) == library]
        compared = [row for row in own if row["status"] not in ("impossible", "too large")]
        outputs = sum(row["status"] == "passed" for row in compared)
        gradients = sum(map(has_right_gradients, compared))
        wanted = sum("no_gradients" not in row for row in compared)
        print(f"| {library} | {len(compared)} | {outputs} | {gradients} of {wanted} |")
    print(dict(Counter(row["status"] for row in rows.values())))


def save(path, rows):
    """Writes the rows, with the versions of what they were measured with; those of packages not here stay."""
    known = json.loads(path.read_text())["versions"] if path.exists() else {}
    versions = {name: _version(name) or known.get(name) for name in (*PACKAGES, "torch", "jax", "torchax")}
    content = {
        "versions": {name: version for name, version in versions.items() if version},
        "modules": dict(sorted(rows.items())),
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=LIBRARIES, action="append", help="of these alone")
    parser.add_argument("--again", nargs="*", default=[], metavar="NAME", help="these, again")
    parser.add_argument("--failed", action="store_true", help="also those that are not right")
    parser.add_argument("--most", type=int, help="number of modules of this run")
    parser.add_argument("--show", action="store_true", help="compare none")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = json.loads(options.results.read_text())["modules"] if options.results.exists() else {}
    names = list(options.again)
    if not names and not options.show:
        for library in options.library or LIBRARIES:
            try:
                known = cases_of(library)
            except ImportError as error:
                print(f"{library}: left out, {error}")
                continue
            names += [name for name in known if name not in rows or (options.failed and not is_right(rows[name]))]
    began = time.monotonic()
    for name, row in rows_of(names[: options.most]):
        rows[name] = row
        save(options.results, rows)
        differences = "  ".join(f"{row[key]:.0e}" for key in ("outputs", "gradients") if row.get(key) is not None)
        said = f"{name:40} {row['status']:8} {differences} {row.get('error', '')}"
        print(f"{time.monotonic() - began:6.0f} s  {said}", flush=True)
    show(rows)


if __name__ == "__main__":
    main()
