"""The results of loading: the module without weights, the weights, and a report."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
import jax.numpy as jnp
import torch
from huggingface_hub.errors import HFValidationError
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from model_adapters.errors import CheckpointError, UnsupportedModelError
from model_adapters.loading.formats.gguf_file import GgufFile
from model_adapters.loading.formats.gguf_model import tokenizer_of
from model_adapters.loading.load_report import LoadReport
from model_adapters.loading.memory import PeakMemory
from model_adapters.loading.model_class import require_causal_module
from model_adapters.loading.model_source import ModelSource
from model_adapters.loading.tensor_match import TensorMatch
from model_adapters.ops.compressed_weight import Weight
from model_adapters.quantization.loading import WeightQuantizer, describe_losses, describe_weights
from model_adapters.sharding.model_sharding import ModelSharding

T = TypeVar("T")

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


@dataclass(frozen=True)
class LoadedModel:
    """A torch module without weights, and the weights.

    `weights` holds every parameter, buffer and plain tensor attribute by qualified name; tied names share one array.
    JAX without 64-bit types has int64 buffers as int32 and float64 ones as float32.
    """

    module: PreTrainedModel  # eval mode; on the meta device unless the caller passed the object
    weights: dict[str, Weight]
    source: ModelSource
    config: PreTrainedConfig
    generation_config: GenerationConfig | None  # None for a model that does not generate
    dtype: Any  # numpy dtype of the floating-point weights (``jnp.dtype("bfloat16")`` …)
    report: LoadReport
    trust_remote_code: bool = False
    sharding: ModelSharding | None = None  # how `weights` lie on a mesh; None: on one device
    allow_pickle: bool = False  # whether further pickle files may be read too
    _tokenizers: list[PreTrainedTokenizerBase | None] = field(default_factory=list, repr=False, compare=False)
    _processors: list[Any] = field(default_factory=list, repr=False, compare=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)
    _made: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    _making: Any = field(default_factory=threading.RLock, repr=False, compare=False)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Returns the model's tokenizer, loaded at the first call; None if its folder has none.

        Raises:
            CheckpointError: the files are there and do not make a tokenizer.
        """
        with self._lock:
            if not self._tokenizers:
                self._tokenizers.append(self.load_tokenizer())
            return self._tokenizers[0]

    def once(self, kind: type[T], make: Callable[[], T]) -> T:
        """Returns the result of `make`, called once for each `kind`, and stored on the model."""
        with self._making:
            if kind not in self._made:
                self._made[kind] = make()
            return self._made[kind]

    @property
    def files_folder(self) -> Path | None:
        """The folder whose files belong to the model.

        For an object that the caller passed, it is the folder that the object was loaded from.
        """
        return self.source.folder if self.source.kind != "object" else _folder_of(self.config.name_or_path)

    def processor(self) -> Any:
        """Returns the model's processor, such as one of text and images.

        None if the model's folder has none.

        Raises:
            CheckpointError: the files are there and do not make a processor.
        """
        with self._lock:
            if not self._processors:
                self._processors.append(self._load_processor())
            return self._processors[0]

    @property
    def has_processor(self) -> bool:
        """Whether the model's folder has a processor."""
        folder = self.files_folder
        return folder is not None and any((folder / name).is_file() for name in _PROCESSOR_FILES)

    def _load_processor(self) -> Any:
        folder = self.files_folder
        if not self.has_processor:
            return None
        try:
            return AutoProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=self.trust_remote_code
            )
        except Exception as error:  # processors raise whatever they like, and miss libraries for images
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            raise CheckpointError(
                f"the processor files in {folder} do not make a processor ({lines[0]}): get them again, or pip "
                "install 'torchax-serve[images]'"
            ) from error

    def load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Returns a new tokenizer of the model's files; errors as of `tokenizer`."""
        if self.source.gguf is not None:
            return tokenizer_of(GgufFile.read(self.source.gguf))
        folder = self.files_folder
        if folder is None or not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            return None
        try:
            return AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=self.trust_remote_code
            )
        except Exception as error:  # tokenizer classes and the Rust library raise whatever they like
            if "trust_remote_code" in str(error) and not self.trust_remote_code:
                raise UnsupportedModelError(
                    f"the tokenizer in {folder} brings code of its own: read it, then pass trust_remote_code=True"
                ) from error
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            raise CheckpointError(
                f"the tokenizer files in {folder} do not make a tokenizer ({lines[0]}): get them again"
            ) from error


def _folder_of(name_or_path: str | None) -> Path | None:
    """Returns the folder that an object was loaded from; None if unknown.

    The name is that of the folder itself, or of a model in the hub's cache.
    """
    if not name_or_path:
        return None
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    try:
        cached = huggingface_hub.try_to_load_from_cache(name_or_path, "config.json")
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def require_causal_lm(loaded: LoadedModel) -> None:
    """Raises `UnsupportedModelError` unless the model is a causal language model.

    The error says what the model is for.
    """
    require_causal_module(loaded.module, loaded.source.name, loaded.report.lack)


def numpy_dtype(dtype: torch.dtype) -> Any:
    """Returns the numpy dtype of a torch dtype (bfloat16 and float8 as ml_dtypes has them)."""
    return jnp.dtype(str(dtype).removeprefix("torch."))


def report_of(
    weights: dict[str, Weight],
    peak: PeakMemory,
    source: ModelSource,
    load_s: float,
    checkpoint_bytes: int | None,
    match: TensorMatch | None = None,
    quantizer: WeightQuantizer | None = None,
) -> LoadReport:
    """Returns the report of a load; `checkpoint_bytes` and `match` are None without files.

    `quantizer` says which weights were quantized while they were loaded, if any.
    """
    num_dense = None if quantizer is None else quantizer.selection.num_dense
    lost = "" if quantizer is None else describe_losses(quantizer.losses)
    unique = {id(array): array.nbytes for array in weights.values()}
    weights_bytes = sum(unique.values())
    return LoadReport(
        load_s=load_s,
        download_s=source.download_s,
        download_bytes=source.download_bytes,
        checkpoint_bytes=weights_bytes if checkpoint_bytes is None else checkpoint_bytes,
        weights_bytes=weights_bytes,
        peak_host_bytes=peak.growth_bytes,
        num_tensors=len(weights),
        num_shared=len(weights) - len(unique),
        unused_tensors=() if match is None else match.unused,
        missing_tensors=() if match is None else match.missing,
        quantization="; ".join(filter(None, (describe_weights(weights, num_dense), lost))),
        requantized=lost,
    )
