"""Every operator of PyTorch's own tests beside PyTorch, by extract_jax: benchmarks/results/operators.json.

python benchmarks/operators.py                  # those that have no result yet
python benchmarks/operators.py --again          # all of them
python benchmarks/operators.py --again cumsum   # one of them
python benchmarks/operators.py --dtype bfloat16 # samples of another dtype: results/operators_bfloat16.json
python benchmarks/operators.py --again --failed # those that had another outcome than the same numbers
"""

import argparse
import importlib.metadata
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.operator_parity.compare import DIFFERS, FAILS, SAME, all_operators, check_operator

RESULTS = Path(__file__).parent / "results" / "operators.json"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="operators, as PyTorch's tests name them; all if none is named")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--failed", action="store_true", help="of these, those with another outcome than equal numbers")
    parser.add_argument("--samples", type=int, default=1000, help="samples of each operator at most, spread over all")
    parser.add_argument("--gradients", type=int, default=1000, help="of these, samples whose gradients are compared")
    parser.add_argument("--dtype", default="float32", help="of the samples; gradients are compared in float32")
    parser.add_argument("--output", type=Path, help="where the results are")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    output = arguments.output or RESULTS.with_stem(
        "operators" if dtype == torch.float32 else f"operators_{arguments.dtype}"
    )
    operators = all_operators(dtype)
    stored = json.loads(output.read_text()) if output.exists() else {"operators": {}}
    known = stored["operators"]
    for name in arguments.names or operators:
        if name in known and (not arguments.again or (arguments.failed and set(known[name]) == {SAME})):
            continue
        began = time.monotonic()
        counts, messages = check_operator(operators[name], arguments.samples, arguments.gradients, dtype)
        known[name] = counts | {f"{outcome}, first": message for outcome, message in messages.items()}
        print(f"{time.monotonic() - began:5.1f} s  {name:40} {known[name]}", flush=True)
        versions = {package: importlib.metadata.version(package) for package in ("torch", "torchax", "jax")}
        stored = {"versions": versions, "operators": dict(sorted(known.items()))}
        output.write_text(json.dumps(stored, indent=1) + "\n")
    wrong = [name for name, result in known.items() if DIFFERS in result or FAILS in result]
    print(f"{len(known)} operators; other numbers or another error than a refusal: {', '.join(wrong) or 'none'}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
