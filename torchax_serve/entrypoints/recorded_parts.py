"""What a `RecordedModel` is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from model_adapters.ops.compressed_weight import Weight
from torchax_serve.compilation.executable_cache import ExecutableCache
from torchax_serve.start.model_record import ModelRecord

if TYPE_CHECKING:
    from torchax_serve.entrypoints.served_model import ServedModel


@dataclasses.dataclass(frozen=True)
class RecordedParts:
    """What a `RecordedModel` is made of.

    Attributes:
        name: Name by which the model was loaded.
        record: The model.
        weights: Its weights by qualified name.
        content: The mapped file of weights, uint8[n]; None if there is none to be moved into huge pages.
        load: Loads the model with its torch module.
        executables: Makes the cache of programs; takes what is called before each trace.
        sharding: How the model lies on a mesh; None for one device.
        replicas: Further replicas, each on devices of its own.
    """

    name: str
    record: ModelRecord
    weights: dict[str, Weight]
    content: np.ndarray | None
    load: Callable[[], ServedModel]
    executables: Callable[[Callable[[], object]], ExecutableCache]
    sharding: Any = None
    replicas: tuple[RecordedReplica, ...] = ()


@dataclasses.dataclass(frozen=True)
class RecordedReplica:
    """A replica of a model on devices of its own.

    Attributes:
        weights: Its weights by qualified name.
        executables: Its programs.
        sharding: How it lies on its devices.
    """

    weights: dict[str, Weight]
    executables: ExecutableCache
    sharding: Any
