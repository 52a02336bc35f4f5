"""`LoadReport`: what a load says about time, memory and tensors."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """Time and memory that loading took."""

    load_s: float = 0.0  # from the files (or the random stream) to arrays, download excluded
    download_s: float = 0.0
    download_bytes: int = 0
    checkpoint_bytes: int = 0  # of all tensors in the files; of the arrays where there are no files
    weights_bytes: int = 0  # of the arrays, shared ones once
    peak_host_bytes: int = 0  # highest growth of the process's resident memory while loading
    num_tensors: int = 0  # names
    num_shared: int = 0  # names whose array another name has as well
    unused_tensors: tuple[str, ...] = ()  # names in the files that the class has no place for
    missing_tensors: tuple[str, ...] = ()  # names of the class that the files lack: a head, a pooler; left out
    made_dense: tuple[str, ...] = ()  # names of weights that are quantized in the files and had to become dense
    quantization: str = ""  # which weights have how many bits, in one line; "" if all are dense
    requantized: str = ""  # what weights lost that were quantized again, in one line; "" if none were

    @property
    def lack(self) -> str:
        """The end of a sentence on tensors that the files lack; empty if they lack none.

        The sentence says what the model therefore cannot do.
        """
        return f"; its files lack {some(self.missing_tensors, 2)}" if self.missing_tensors else ""


def some(names: Any, limit: int = 6) -> str:
    """Returns the first of `names`, sorted, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(sorted(names)[:limit]) + more
