"""Finds the model types that a change names."""

from __future__ import annotations

import re
from collections.abc import Collection
from fnmatch import fnmatch

from transformers.models.auto.configuration_auto import model_type_to_module_name

from model_adapters import quirks

READ = ("model_adapters/*", "torchax_serve/parity/*.py", "benchmarks/parity_sweep/*.py")
"""Patterns of the files that serve and check types, subfolders included."""


def types_named_in(diff: str, types: Collection[str]) -> list[str]:
    """Lists the types that a change names, sorted.

    Args:
        diff: Output of ``git diff``; changed lines and names of files count, of the files that `READ`
            matches. A quirk that several architectures share names them all.
        types: Model types of transformers, or names that begin with one and a colon. ``a_b`` in a file's name is
            ``a-b`` as well.
    """
    found: set[str] = set()
    is_read = False
    for line in diff.splitlines():
        if line.startswith("diff --git "):
            name = re.sub(r"^\w/", "", line.rpartition(" ")[2])  # without git's prefix, if it writes one
            is_read = any(fnmatch(name, pattern) for pattern in READ)
        elif not is_read:
            continue
        elif line.startswith(("+++ ", "--- ")):
            stem = line.rpartition("/")[2].partition(".")[0]
            found |= {stem, stem.replace("_", "-")}
        elif line.startswith(("+", "-")):
            found |= set(re.findall(r"""["'`]([\w.-]+)["'`]""", line))
    named = [name for name in quirks.names() if name in found]
    folders = frozenset().union(*(quirks.architectures_of(name) for name in named))
    found |= folders
    by_name = {name: name.partition(":")[0] for name in types}
    return sorted(name for name, each in by_name.items() if each in found or model_type_to_module_name(each) in folders)
