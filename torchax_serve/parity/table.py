"""The table of what was checked: read from the package, and written as docs/models.md."""

from __future__ import annotations

import importlib.resources
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable
from typing import Any

from packaging.version import Version

from torchax_serve.parity.causes import CAUSES
from torchax_serve.parity.result import PASSED, Result

RESULTS = importlib.resources.files(__package__) / "results"
ROADS = {
    "paged": "engine, packed on the paged cache",
    "gathered": "engine, each request on what is gathered from its pages",
    "generate": "one request after the other",
}
HEADINGS = ("type", "class", "road", "logits", "tokens", "cache", "TP plan", "kernels", "compile, s")


Sweep = tuple[dict[str, str], dict[str, Result]]
"""Versions of libraries, and results by model type."""


def read(path: Traversable) -> Sweep:
    """The sweep in a file."""
    content = json.loads(path.read_text())
    return content["versions"], {name: Result(**fields) for name, fields in content["results"].items()}


def all_shipped() -> list[Sweep]:
    """The sweeps that come with the package, one for a version of transformers, the newest first."""
    files = [path for path in RESULTS.iterdir() if path.name.endswith(".json")]
    return sorted((read(path) for path in files), key=lambda sweep: Version(sweep[0]["transformers"]), reverse=True)


def shipped() -> Sweep:
    """The sweep with the newest transformers that comes with the package."""
    return all_shipped()[0]


def road_counts(results: Mapping[str, Result]) -> dict[str, int]:
    """How many types pass on each road."""
    counts = Counter(result.road for result in results.values() if result.status == PASSED)
    return {road: counts[road] for road in ROADS}


def tokens_said(result: Result) -> str:
    """Which greedy tokens are eager PyTorch's, in words."""
    parts = {"padded": result.padded_equal, "alone": result.alone_equal, "engine": result.engine_equal}
    compared = {name: same for name, same in parts.items() if same is not None}
    if not compared:
        return "not compared"
    wrong = [name for name, same in compared.items() if not same]
    return f"differ ({', '.join(wrong)})" if wrong else f"equal ({', '.join(compared)})"


def row(result: Result) -> tuple[str, ...]:
    """The cells of a type, in the order of `HEADINGS`."""
    difference = "" if result.forward_difference is None else f"{result.forward_difference:.0e}"
    return (
        result.model_type,
        result.class_name,
        result.road or "",
        difference,
        tokens_said(result) if result.status in (PASSED, "failed") else result.status,
        " + ".join(result.cache_kinds) or "none",
        "yes" if result.has_tp_plan else "",
        ", ".join(sorted({name.partition(" ")[0] for name in result.kernels})),
        "" if result.compile_s is None else f"{result.compile_s:.1f}",
    )


def markdown(
    versions: Mapping[str, str],
    results: Mapping[str, Result],
    others: Sequence[tuple[Mapping[str, str], Mapping[str, Result]]] = (),
) -> str:
    """docs/models.md, whole; `others` are sweeps with other versions."""
    passed = [result for result in results.values() if result.status == PASSED]
    counts = road_counts(results)
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [_INTRODUCTION.format(passed=len(passed), total=len(results), versions=said)]
    lines += [f"* `{road}`, {ROADS[road]}: {number}" for road, number in counts.items()]
    lines += ["", "## What does not pass", ""]
    rest = [result for result in results.values() if result.status != PASSED]
    lines += [_REPRODUCTION, ""] if rest else ["Nothing."]
    lines += [_failure(result) for result in rest]
    for other_versions, other in others:
        lines += ["", *_differences(results, other_versions, other)]
    lines += ["", "## The table", "", _LEGEND, "", f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
    lines += [f"| {' | '.join(row(results[name]))} |" for name in sorted(results)]
    noted = [result for result in results.values() if result.notes and result.status == PASSED]
    if noted:
        lines += ["", "## What transformers cannot do here", ""]
        lines += [f"* `{result.model_type}`: {_inline('; '.join(result.notes))}" for result in noted]
    single = [result for result in passed if result.road == "generate"]
    if single:
        lines += ["", "## Why one after the other", ""]
        lines += [f"* `{result.model_type}`: {_inline(result.road_reason or '')}" for result in single]
    return "\n".join(lines) + "\n"


def _differences(results: Mapping[str, Result], versions: Mapping[str, str], other: Mapping[str, Result]) -> list[str]:
    """What a sweep with other versions found otherwise."""
    passed = sum(result.status == PASSED for result in other.values())
    lines = [f"## transformers {versions['transformers']}", "", f"{passed} of {len(other)} types pass."]
    if missing := sorted(set(results) - set(other)):
        lines += ["", f"Not known there: {', '.join(f'`{name}`' for name in missing)}."]
    if gone := sorted(set(other) - set(results)):
        lines += ["", f"Known there only: {', '.join(f'`{name}`' for name in gone)}."]
    changed = [
        f"* `{name}`: {theirs.status}, {theirs.road or 'no road'}"
        + (f": {_inline(theirs.error)}" if theirs.error else "")
        for name, theirs in sorted(other.items())
        if name in results and (theirs.status, theirs.road) != (results[name].status, results[name].road)
    ]
    return [*lines, "", *(changed or ["Every other type ends as above."])]


def _failure(result: Result) -> str:
    """What became of a type that does not pass, with the cause if somebody has found it."""
    said = _inline(result.error or f"logits or tokens {tokens_said(result)}")
    cause = CAUSES.get(result.model_type, "Not looked into.")
    return f"* `{result.model_type}` ({result.status}). {cause} Said: {said}"


def _inline(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def summary(results: Mapping[str, Result]) -> dict[str, Any]:
    """Numbers for people and programs."""
    passed = sum(result.status == PASSED for result in results.values())
    return {"passed": passed, "checked": len(results), "roads": road_counts(results)}


_INTRODUCTION = """\
# Models

Every model type that transformers knows as a causal language model is checked: a tiny model with random weights and a
layer of every kind, its code untouched, on a CPU in float32, beside eager PyTorch. **{passed} of {total} types pass.**
To pass, logits under `jax.jit` are within 1e-4 of PyTorch's, and 16 greedy tokens are the same in a batch padded on the
left, for a prompt alone, and on the engine among other requests. Different prompts must have different answers, and the
choices be clear: `torchax-serve models TYPE` shows the smallest gap between the first two logits.

The table is generated by `python benchmarks/parity.py --again`; without the option, the types that have no result yet
are checked. It was made with {versions}. One type of it:

```bash
torchax-serve models llama
```

The roads of the types that pass ([engine.md](engine.md) describes them):
"""

_REPRODUCTION = "Each is reproduced by `python benchmarks/parity.py --again TYPE`, which says what it met."

_LEGEND = """\
*logits*: the largest difference to PyTorch's. *tokens*: what was compared. *cache*: what layers keep: all keys and
values (`full`), those of a window (`window`), a recurrent state (`state`); with `none` every token computes the whole
sequence anew. *TP plan*: the configuration says how weights are cut for tensor parallelism. *kernels*: ops that ran in
more than their reference. *compile*: tracing, lowering and compiling all programs of the check, by LLVM's quickest
settings, two types at a time."""
