"""`TextProgram`: what batches of texts need of a model, a PyTorch module or a bundle."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from torchax_serve.compilation.executable_cache import ExecutableCache

MAX_ROWS = 32
"""Rows of a batch; a power of two."""


class TextProgram(abc.ABC):
    """Forwards of a model over batches of texts.

    Attributes:
        pools: Cache of the programs that follow a forward, such as poolings.
        max_rows: Most rows of a batch, a power of two.
    """

    pools: ExecutableCache
    max_rows = MAX_ROWS

    @property
    @abc.abstractmethod
    def class_name(self) -> str:
        """Class of the module that is called."""

    @property
    @abc.abstractmethod
    def can_pad(self) -> bool:
        """Whether texts of different lengths can be rows of one batch."""

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Token ids are below."""

    @property
    @abc.abstractmethod
    def max_positions(self) -> int | None:
        """Most tokens of a row; None for any number."""

    @property
    @abc.abstractmethod
    def num_programs(self) -> int:
        """Programs of forwards in memory."""

    def packs(self, names: Iterable[str]) -> bool:
        """Returns whether texts of different lengths can stand in one row, without padding.

        `names` are the arguments of a batch of texts.
        """
        return False

    @abc.abstractmethod
    def accepts(self, name: str) -> bool:
        """Returns whether the forward has an argument of this name."""

    @abc.abstractmethod
    def forward(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Runs a forward.

        Args:
            arrays: Arguments by name, each int32[rows, len].

        Returns:
            Fields of the output by name, on the device.
        """

    @abc.abstractmethod
    def compile(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Compiles a forward for abstract arguments; returns its output's shapes by name."""

    def forward_packed(self, arrays: Mapping[str, np.ndarray], cu_seqlens: np.ndarray) -> dict[str, Any]:
        """Runs a forward over texts in one row.

        Args:
            arrays: Arguments by name, each int32[T].
            cu_seqlens: int32[S + 1], where each text begins; tokens from the last entry on are padding.

        Returns:
            Fields of the output by name, [T, ...], on the device.
        """
        raise NotImplementedError

    def compile_packed(self, arrays: Mapping[str, Any], cu_seqlens: Any) -> dict[str, Any]:
        """Compiles a forward over texts in one row; returns its output's shapes by name."""
        raise NotImplementedError
