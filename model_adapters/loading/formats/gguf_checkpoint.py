"""The weights of a GGUF file, by the names of transformers' classes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import torch
from transformers import PreTrainedModel

from model_adapters.loading.checkpoint import SafetensorsReader, TensorEntry
from model_adapters.loading.formats.gguf_blocks import QUANTIZED_TYPES, plain_tensor, unpack_blocks
from model_adapters.loading.formats.gguf_file import GgufFile, GgufTensor
from model_adapters.loading.formats.gguf_model import processor_of, tensor_names, unused_keys
from model_adapters.loading.formats.parts import QuantizedParts, check_numbers
from model_adapters.loading.formats.quantized_tensor import QuantizedTensor
from model_adapters.loading.progress import Advance

logger = logging.getLogger("torchax_serve")

_NUM_READ_THREADS = min(4, os.cpu_count() or 1)
_NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are part of the configuration."""


class GgufCheckpoint:
    """The tensors of a GGUF file for a class of transformers.

    Args:
        file: The header.
        module: A module of the class on the meta device, for the names and shapes of its parameters.
    """

    def __init__(self, file: GgufFile, module: PreTrainedModel) -> None:
        self.file, self.made_dense = file, list[str]()
        self._processor = processor_of(file, module.config)
        self._names = tensor_names(file, module, self._processor)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        if unused := unused_keys(file):
            logger.warning("%s: keys of the header that are not used: %s", file.path.name, ", ".join(unused))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the file."""
        return sum(tensor.num_bytes for tensor in self.file.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the model computes in by default.

        On CPUs it is float32, as in llama.cpp.
        """
        return torch.float32 if jax.default_backend() == "cpu" else torch.bfloat16

    @property
    def parameter_names(self) -> set[str]:
        """Names of the module's parameters that are in the file."""
        return {self._names.get(name, name) for name in self.file.tensors}

    def sizes_in(self, dtype: torch.dtype | None) -> dict[str, int]:
        """Returns bytes of each tensor as it is stored: quantized ones stay as they are."""
        return {name: tensor.num_bytes for name, tensor in self.file.tensors.items()}

    @contextlib.contextmanager
    def readers(self, advance: Advance) -> Iterator[dict[str, GgufReader]]:
        """A lazy reader for each parameter.

        `advance` gets the bytes as they are read. Leaving closes the file.
        """
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(_NUM_READ_THREADS, thread_name_prefix="weights"))
            descriptor = os.open(self.file.path, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            stack.callback(pool.shutdown, wait=True, cancel_futures=True)

            def reader(name: str) -> SafetensorsReader:
                found = self.file.tensors[name]
                shape = (found.num_bytes,)
                entry = TensorEntry(name, torch.uint8, shape, self.file.path, found.offset, found.num_bytes)
                return SafetensorsReader(entry, descriptor, pool, advance)

            sources: dict[str, list[tuple[GgufTensor, SafetensorsReader]]] = {}
            for name, tensor in sorted(self.file.tensors.items(), key=_gate_before_up):
                if name not in _NOT_WEIGHTS:
                    sources.setdefault(self._names.get(name, name), []).append((tensor, reader(name)))
            yield {
                name: GgufReader(name, parts, self._processor, self._shapes.get(name), self.made_dense)
                for name, parts in sources.items()
            }


def _gate_before_up(item: tuple[str, Any]) -> tuple[str, str]:
    """Sorts the two tensors of fused experts, of which transformers has the gate first."""
    return item[0].replace("ffn_gate_exps", "ffn_exps_0").replace("ffn_up_exps", "ffn_exps_1"), item[0]


@dataclasses.dataclass(frozen=True)
class GgufReader:
    """Reads one parameter by ``reader[...]``."""

    name: str
    sources: list[tuple[GgufTensor, SafetensorsReader]]
    processor: Any
    expected: tuple[int, ...] | None
    made_dense: list[str]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter, or of the tensor where the class has none."""
        return self.sources[0][0].shape if self.expected is None else self.expected

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensors = [self._one(tensor, reader[...]) for tensor, reader in self.sources]
        if "_exps." in self.sources[0][0].name and hasattr(self.processor, "fuse"):
            return self.processor.fuse(tensors)
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)

    def _one(self, tensor: GgufTensor, data: torch.Tensor) -> torch.Tensor:
        if tensor.type_name not in QUANTIZED_TYPES:
            return self._processed(tensor.name, plain_tensor(data, tensor.type_name, tensor.shape))
        parts = unpack_blocks(data, tensor.type_name, tensor.shape)
        placed = self._ordered(tensor.name, parts) if len(tensor.shape) > 1 else None
        if placed is None:
            if self.name not in self.made_dense:
                self.made_dense.append(self.name)
            return self._processed(tensor.name, parts.dense())
        return QuantizedTensor(check_numbers(self.name, placed), torch.float32, self.name, self.made_dense)

    def _ordered(self, name: str, parts: QuantizedParts) -> QuantizedParts | None:
        """Returns `parts` with rows in transformers' order.

        None where more than the order of rows changes.
        """
        if parts.values.ndim == 3 and "_exps" in name:  # experts as transformers has them
            return parts
        rows = np.arange(parts.values.shape[0], dtype=np.int64)
        try:
            store: dict[str, Any] = {"tensors": {}}
            order = self.processor.process(weights=rows[:, None], name=name, parsed_parameters=store).weights
        except (ValueError, KeyError, TypeError, IndexError):  # it needs all columns
            return None
        if order.shape == (1, rows.size):
            return dataclasses.replace(parts, transposed=not parts.transposed) if (order[0] == rows).all() else None
        if order.shape != (rows.size, 1) or not np.array_equal(np.sort(order[:, 0]), rows):
            return None
        if (order[:, 0] == rows).all():
            return parts
        taken = torch.from_numpy(order[:, 0].copy())
        return parts.by_row(lambda part: part.index_select(0, taken))

    def _processed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a dense tensor as transformers has it."""
        if "_exps" in name or tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            return tensor
        store: dict[str, Any] = {"tensors": {}}
        numbers = tensor.float().numpy()
        found = self.processor.process(weights=numbers, name=name, tensor_key_mapping={}, parsed_parameters=store)
        values = found.weights if found.name is not None else next(iter(store["tensors"].values()))
        made = torch.as_tensor(np.ascontiguousarray(values))
        return (
            made if self.expected is None or made.numel() != int(np.prod(self.expected)) else made.view(self.expected)
        )
