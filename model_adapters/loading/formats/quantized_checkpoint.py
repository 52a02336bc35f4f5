"""Quantized weights of a folder, each as one tensor for transformers' loader."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from model_adapters.errors import CheckpointError, TorchaxServeError
from model_adapters.loading.checkpoint import Checkpoint, TensorEntry, TensorReader
from model_adapters.loading.formats import awq, bitsandbytes, compressed_tensors, fp8, gptq, hqq, mxfp4, torchao
from model_adapters.loading.formats.parts import QuantizedParts, check_numbers
from model_adapters.loading.formats.quantized_tensor import QuantizedTensor
from model_adapters.loading.formats.settings import QuantizationSettings, matches
from model_adapters.loading.formats.weight_groups import WeightGroup
from model_adapters.loading.progress import Advance

logger = logging.getLogger("torchax_serve")

_Read = Callable[[WeightGroup, Mapping[str, torch.Tensor], QuantizationSettings], QuantizedParts]
_Find = Callable[[Mapping[str, Any], QuantizationSettings], list[WeightGroup]]

_FORMATS: dict[str, tuple[_Find, _Read]] = {
    "awq": (awq.find, awq.read),
    "bitsandbytes": (bitsandbytes.find, bitsandbytes.read),
    "compressed-tensors": (compressed_tensors.find, compressed_tensors.read),
    "fbgemm_fp8": (fp8.find, fp8.read),
    "fp8": (fp8.find, fp8.read),
    "gptq": (gptq.find, gptq.read),
    "hqq": (hqq.find, hqq.read),
    "mxfp4": (mxfp4.find, mxfp4.read),
    "mxfp8": (mxfp4.find_fp8, mxfp4.read_fp8),
    "torchao": (torchao.find, torchao.read),
}
"""Of each method: finds the weights among the tensors' names; makes the parts of one."""

_SIGNS = (".qweight", ".weight_packed", "_scale_inv", ".weight_scale", "_blocks", ".absmax", ".SCB", ".W_q")
"""Ends of names that only quantized checkpoints have."""

_CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".output_scale")


class QuantizedCheckpoint:
    """The tensors of a checkpoint whose configuration states a quantization."""

    def __init__(self, plain: Checkpoint, settings: QuantizationSettings) -> None:
        self._plain, self._settings, self.made_dense = plain, settings, list[str]()
        find, self._read = _FORMATS[settings.method]
        self._groups = find(plain.entries, settings)
        self._check()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return self._plain.num_bytes

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the first tensor of 16 or 32 bits that is no part of a quantized weight."""
        taken = self._taken
        kinds = (torch.float32, torch.bfloat16, torch.float16)
        found = (entry.dtype for name, entry in self._plain.entries.items() if name not in taken)
        return next((dtype for dtype in found if dtype in kinds), None)

    def sizes_in(self, dtype: torch.dtype | None) -> dict[str, int]:
        """Returns bytes of each tensor, those of quantized weights as they are in the file."""
        as_stored, taken = self._plain.sizes_in(None), self._taken
        return {name: as_stored[name] if name in taken else size for name, size in self._plain.sizes_in(dtype).items()}

    @property
    def _taken(self) -> set[str]:
        return {name for group in self._groups for name in group.tensors.values()}

    def _check(self) -> None:
        """Raises CheckpointError where tensors and configuration contradict each other."""
        settings, entries = self._settings, self._plain.entries
        if not self._groups:
            raise CheckpointError(
                f"{settings.file} states a quantization ({settings.method}), and the files hold no tensor of it: "
                "remove quantization_config, or get the weights again"
            )
        taken = self._taken
        for group in self._groups:
            if group.weight in entries and group.weight not in taken:
                raise CheckpointError(f"{group.weight} is in the files both quantized and dense: get the weights again")
        for name, entry in entries.items():
            if name not in taken and _is_of_8_bits(name, entry):
                raise CheckpointError(f"{name} is in {entry.dtype} without a scale: get the weights again")
        modules = {name.rpartition(".")[0] for name in entries}
        for pattern in settings.left_out:
            if not any(matches(pattern, module) for module in modules):
                logger.info("%s: quantization_config leaves out %s, which the files lack", settings.file, pattern)

    @contextlib.contextmanager
    def readers(self, advance: Advance) -> Iterator[dict[str, TensorReader | QuantizedReader]]:
        """A lazy reader for each tensor that is not quantized and each weight that is."""
        with self._plain.readers(advance) as plain:
            taken = self._taken
            unused = [name for name in plain if name.endswith(_CACHE_SCALES) and name not in taken]
            if unused or self._settings.values.get("kv_cache_scheme"):
                logger.warning("%s: its scales of a quantized KV cache are not used", self._settings.file)
            readers: dict[str, TensorReader | QuantizedReader] = {
                name: reader for name, reader in plain.items() if name not in taken and name not in unused
            }
            for group in self._groups:
                parts = {role: plain[name] for role, name in group.tensors.items()}
                readers[group.weight] = QuantizedReader(group, parts, self._read, self._settings, self.made_dense)
            yield readers


@dataclasses.dataclass(frozen=True)
class QuantizedReader:
    """Reads the tensors of one weight by ``reader[...]``."""

    group: WeightGroup
    readers: Mapping[str, TensorReader]
    read: _Read
    settings: QuantizationSettings
    made_dense: list[str]

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensors = {role: reader[...] for role, reader in self.readers.items()}
        try:
            parts = check_numbers(self.group.weight, self.read(self.group, tensors, self.settings))
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, TorchaxServeError):
                raise
            found = ", ".join(
                f"{role} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
                for role, tensor in tensors.items()
            )
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(
                f"{self.group.weight}: its tensors ({found}) do not make a weight in {self.settings.method} as "
                f"quantization_config describes it ({reason}): get config.json and the weights again"
            ) from error
        if parts.values.dtype == torch.float8_e4m3fn and (num_nan := fp8.count_nan(parts.values)):
            logger.warning(
                "%s: %d of %d numbers are NaN, and stay so: get the weights again if its maker did not mean it",
                self.group.weight,
                num_nan,
                parts.values.numel(),
            )
        return QuantizedTensor(parts, torch.float32, self.group.weight, self.made_dense)


def _is_of_8_bits(name: str, entry: TensorEntry | torch.Tensor) -> bool:
    """Returns whether a tensor holds numbers of 8 bits that need a scale; masks do not."""
    is_weight = name.endswith(("weight", "_proj"))
    return entry.dtype == torch.float8_e4m3fn or (is_weight and entry.dtype in (torch.int8, torch.uint8))


def require_plain(entries: Mapping[str, TensorEntry | torch.Tensor], file: Any) -> None:
    """Raises CheckpointError for quantized tensors without a stated quantization."""
    for name, entry in entries.items():
        if (name.endswith(_SIGNS) and entry.dtype != torch.bool) or _is_of_8_bits(name, entry):
            raise CheckpointError(
                f"{name} is part of a quantized weight, and {file} has no quantization_config: get config.json again"
            )
