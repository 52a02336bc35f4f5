"""Which model types a change is about: those that it names."""

from __future__ import annotations

import re
from collections.abc import Collection

from model_adapters import quirks


def named_in(diff: str, types: Collection[str]) -> list[str]:
    """Types that a change names, sorted.

    Args:
        diff: as ``git diff`` prints it; its changed lines count, and the names of the files. A quirk that several
            architectures share names them all.
        types: as transformers names them. ``a_b`` in a file's name is ``a-b`` as well.
    """
    found: set[str] = set()
    for line in diff.splitlines():
        if line.startswith(("+++ ", "--- ")):
            stem = line.rpartition("/")[2].partition(".")[0]
            found |= {stem, stem.replace("_", "-")}
        elif line.startswith(("+", "-")):
            found |= set(re.findall(r"""["'`]([\w.-]+)["'`]""", line))
    found |= {architecture for architecture, quirk in quirks.SHARED.items() if quirk in found}
    return sorted(found & set(types))
