"""A GGUF file that two systems read as it is."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class GgufModel:
    """What a benchmark asks of a file.

    Attributes:
        path: of the file.
        title: name of the model, as the file says it.
        dtype: type that most of its weights have.
        bits: of a weight, scales included, over all tensors.
        shape: configuration, as transformers has it.
    """

    path: Path
    title: str
    dtype: str
    bits: float
    shape: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> GgufModel:
        from model_adapters.loading.formats.gguf_file import GgufFile
        from model_adapters.loading.formats.gguf_model import config_of

        file = GgufFile.read(path)
        numbers: Counter[str] = Counter()
        for tensor in file.tensors.values():
            numbers[tensor.type_name] += math.prod(tensor.shape)
        num_bytes = sum(tensor.num_bytes for tensor in file.tensors.values())
        title = str(file.metadata.get("general.name", path.stem))
        bits = 8 * num_bytes / numbers.total()
        return cls(path, title, numbers.most_common(1)[0][0], bits, config_of(file).to_dict())
