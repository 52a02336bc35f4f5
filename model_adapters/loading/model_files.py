"""The files of a model: its configuration and its checkpoint, whatever their format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading.checkpoint import Checkpoint, weight_files
from model_adapters.loading.file_names import CONFIG
from model_adapters.loading.formats.gguf_checkpoint import GgufCheckpoint
from model_adapters.loading.formats.gguf_file import GgufFile
from model_adapters.loading.formats.gguf_model import config_of
from model_adapters.loading.formats.quantized_checkpoint import QuantizedCheckpoint, require_plain
from model_adapters.loading.formats.settings import QuantizationSettings, settings_in
from model_adapters.loading.load_report import some
from model_adapters.loading.model_class import load_config, module_of, read_config_json
from model_adapters.loading.model_source import ModelSource

AnyCheckpoint = Checkpoint | QuantizedCheckpoint | GgufCheckpoint


def made_dense_in(checkpoint: AnyCheckpoint) -> tuple[str, ...]:
    """Returns the names of quantized weights that had to be made dense."""
    return () if isinstance(checkpoint, Checkpoint) else tuple(sorted(checkpoint.made_dense))


def dense_note(names: tuple[str, ...]) -> str:
    """Returns one line about quantized weights, by name, that had to be made dense."""
    return (
        f"{len(names)} quantized weights were made dense, because their parts do not fit the model's: {some(names, 3)}"
    )


@dataclass(frozen=True)
class ModelFiles:
    """What the files of a source say before a weight is read.

    Attributes:
        source: Where the files are.
        config: The configuration, without what it says about quantization.
        settings: The quantization that the configuration states, if any.
        gguf: The header of the GGUF file, if the source is one.
    """

    source: ModelSource
    config: PreTrainedConfig
    settings: QuantizationSettings | None = None
    gguf: GgufFile | None = None

    @classmethod
    def of(cls, source: ModelSource, *, trust_remote_code: bool) -> ModelFiles:
        """Reads configuration or header of `source`.

        Raises what `load_config` and `GgufFile.read` raise.
        """
        assert source.path is not None
        if source.gguf is not None:
            header = GgufFile.read(source.gguf)
            return cls(source, config_of(header), None, header)
        file = source.path if source.kind == "config" else source.path / CONFIG
        settings = settings_in(read_config_json(file), file)
        config = load_config(file, trust_remote_code=trust_remote_code, allow_quantized=True)
        return cls(source, config, settings)

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype that the configuration states."""
        said: Any = self.config.dtype
        return said

    def is_made_dense(self, quantization: Any, requantize: bool) -> bool:
        """Returns whether weights that are quantized in the files are to be dense.

        Args:
            quantization: What the caller asks for: None leaves them as they are, "none" makes them dense.
            requantize: Whether rules may put another grid on quantized weights.

        Raises:
            InvalidArgumentError: rules for weights that are quantized already, without `requantize`; or `requantize`
                without rules or without quantized weights.
        """
        method = self.settings.method if self.settings is not None else "GGUF" if self.gguf is not None else None
        asked = quantization is not None and quantization != "none"
        if method is None or not asked:
            if requantize:
                raise InvalidArgumentError(
                    f"requantize: expected quantization rules and quantized weights for {self.source.name}, got one of "
                    "them at most; leave it out"
                )
            return quantization == "none"
        if not requantize:
            raise InvalidArgumentError(
                f"quantization: {self.source.name} is quantized already ({method}), and another grid on top of it "
                "loses accuracy; leave quantization out to keep its bits, or pass requantize=True"
            )
        return False

    def checkpoint(
        self, model_class: type[PreTrainedModel], config: PreTrainedConfig, *, allow_pickle: bool
    ) -> AnyCheckpoint:
        """Returns the weight files, their headers read.

        Args:
            model_class: Class that the weights are for.
            config: Its configuration: that of the files, or the part for its text model.
            allow_pickle: See `weight_files`.
        """
        assert self.source.path is not None
        if self.gguf is not None:
            return GgufCheckpoint(self.gguf, module_of(model_class, config, torch.float32))
        explicit, extra = getattr(config, "transformers_weights", None), getattr(type(config), "extra_files", ())
        plain = Checkpoint.of(weight_files(self.source.path, explicit=explicit, extra=extra, allow_pickle=allow_pickle))
        if self.settings is not None:
            return QuantizedCheckpoint(plain, self.settings)
        require_plain(plain.entries, self.source.path / CONFIG)
        return plain
