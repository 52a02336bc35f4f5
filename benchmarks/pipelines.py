"""Every pipeline that diffusers' own tests build tiny, on JAX and in eager PyTorch: results and docs/models.md.

python benchmarks/pipelines.py ../diffusers/tests                  # the pipelines that have no result yet
python benchmarks/pipelines.py ../diffusers/tests FluxPipeline     # one of them, again

The folder is that of a clone of https://github.com/huggingface/diffusers; what its tests load from the hub is replaced
by random models and tokenizers of bytes.
"""

import argparse
import functools
import importlib.metadata
import time
from pathlib import Path

from parity_sweep import models_page, pipelines_table, sweep
from pipeline_parity import check

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = {name: importlib.metadata.version(name) for name in ("diffusers", "transformers", "torch", "jax", "torchax")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path, help="folder tests of a clone of diffusers")
    parser.add_argument("pipelines", nargs="*", help="pipeline classes; those without a result if none is named")
    parser.add_argument("--failed", action="store_true", help="also those that did not pass")
    parser.add_argument("--families", action="store_true", help="only the first pipeline of each folder")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    tests = arguments.tests.resolve()
    known = check.pipelines_in(tests)
    if not known:
        parser.error(f"expected the folder tests of a clone of diffusers, got {arguments.tests}")
    if unknown := sorted(set(arguments.pipelines) - set(known)):
        parser.error(f"expected one of {', '.join(known)}, got {unknown[0]}")
    first = {path.parent: name for name, (path, _) in reversed(known.items())}
    names = arguments.pipelines or (sorted(first.values()) if arguments.families else sorted(known))
    path = Path(str(pipelines_table.RESULTS)) / f"diffusers-{VERSIONS['diffusers']}.json"
    path.parent.mkdir(exist_ok=True)
    began = time.monotonic()

    def again(result):
        return result is None or bool(arguments.pipelines) or (arguments.failed and result.status != "passed")

    def say(result):
        seconds, difference = time.monotonic() - began, result.forward_difference
        shown = "" if difference is None else f"{difference:.0e}"
        print(f"{seconds:5.0f} s  {result.model_type:40} {result.status:10} {shown:6} {result.error or ''}", flush=True)

    results = sweep.update(
        path,
        names,
        VERSIONS,
        again=again,
        say=say,
        num_workers=arguments.workers,
        work=functools.partial(check.work, tests=tests),
    )
    passed = sum(result.status == "passed" for result in results.values())
    print(f"{passed} of {len(results)} pass, {time.monotonic() - began:.0f} s")
    models_page.write(ROOT)


if __name__ == "__main__":
    main()
