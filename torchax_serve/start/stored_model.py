"""`StoredModel`: what a model is made of that starts without torch: a record or a bundle."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from model_adapters.errors import TorchaxServeError
from model_adapters.loading.load_report import LoadReport
from model_adapters.loading.memory import give_back_freed
from model_adapters.loading.model_source import ModelSource
from model_adapters.ops.compressed_weight import Weight
from model_adapters.ops.cpu.huge_pages import move_into_huge_pages
from torchax_serve.compilation.executable_cache import ExecutableCache
from torchax_serve.engine.data_parallel import DataParallelEngines
from torchax_serve.engine.engine import Engine
from torchax_serve.sampling.transformers_behaviour import TransformersBehaviour
from torchax_serve.start.model_record import ModelRecord
from torchax_serve.start.record import StartFolder
from torchax_serve.start.recorded_objects import GenerationValues, RecordedConfig, RecordedTokenizer
from torchax_serve.start.recorded_runtime import RecordedRuntime
from torchax_serve.start.torch_side import TorchSide
from torchax_serve.start.weights_file import mapped

if TYPE_CHECKING:
    from model_adapters.loading import LoadedModel

logger = logging.getLogger("torchax_serve")

POLL_S, BUSY_S = 0.25, 5.0
"""Seconds between two looks at whether the engine is idle, and until it need not be."""


@dataclasses.dataclass(frozen=True)
class StoredReplica:
    """A replica of a model on devices of its own.

    Attributes:
        weights: Its weights by qualified name.
        executables: Its programs.
        sharding: How it lies on its devices; None for one device.
    """

    weights: dict[str, Weight]
    executables: ExecutableCache
    sharding: Any


@dataclasses.dataclass(frozen=True)
class StoredModel:
    """A description, weights, programs and a tokenizer, without a torch module.

    Attributes:
        name: Name by which the model was loaded.
        record: The model.
        weights: Its weights by qualified name.
        content: The mapped file of weights, uint8[n]; None if there is none to be moved into huge pages.
        load: Loads the checkpoint with its torch module, or raises TorchaxServeError, which says why it cannot.
        executables: Makes the cache of programs; takes what is called before each trace.
        sharding: How the model lies on a mesh; None for one device.
        replicas: Further replicas, each on devices of its own.
    """

    name: str
    record: ModelRecord
    weights: dict[str, Weight]
    content: np.ndarray | None
    load: Callable[[], LoadedModel]
    executables: Callable[[Callable[[], object]], ExecutableCache]
    sharding: Any = None
    replicas: tuple[StoredReplica, ...] = ()

    @functools.cached_property
    def config(self) -> RecordedConfig:
        """What was recorded of the configuration."""
        return RecordedConfig(self.record.config, self.record.config_absent)

    @functools.cached_property
    def generation_values(self) -> GenerationValues:
        """What was recorded of the generation config."""
        return GenerationValues(self.record.generation_config, self.record.generation_defaults)

    @functools.cached_property
    def report(self) -> LoadReport:
        """What the first load said about the weights."""
        return stored_report(self.weights, self.record.quantization, self.record.requantized)

    def tokenizer(self, side: TorchSide) -> RecordedTokenizer | None:
        """Returns the tokenizer, which is made by a thread of its own; None without one."""
        record = self.record.tokenizer
        if record is None:
            return None
        backend: Future[Any] = Future()

        def make() -> None:
            try:
                made = record.tokenizer()
                give_back_freed()  # what reading its vocabulary took
                backend.set_result(made)
            except BaseException as error:
                backend.set_exception(error)

        # Not a daemon: a process that ends while a thread is inside the tokenizers library is aborted.
        threading.Thread(target=make, name="make-tokenizer").start()
        return RecordedTokenizer(side, record, backend)

    def runtimes(self, side: TorchSide, executables: ExecutableCache) -> list[RecordedRuntime]:
        """Returns what engines run on, one for each replica; the first has `executables`."""
        rules = TransformersBehaviour(**self.record.sampling_rules)
        first = StoredReplica(self.weights, executables, self.sharding)
        return [
            RecordedRuntime(side, each.weights, each.executables, self.config, self.record.limits, each.sharding, rules)
            for each in (first, *self.replicas)
        ]

    def move_when_idle(self, engine: Engine | DataParallelEngines) -> None:
        """Moves the file of weights into huge pages once `engine` has answered or worked long."""
        content = self.content
        if content is None or not isinstance(engine, Engine):
            return

        def run() -> None:
            began = time.monotonic()
            while engine.close_reason is None:
                stats = engine.stats()
                is_busy = bool(stats.scheduler.num_running) and time.monotonic() - began < BUSY_S
                if stats.num_steps and not is_busy:
                    move_into_huge_pages(content)
                    return
                time.sleep(POLL_S)

        threading.Thread(target=run, name="huge-pages", daemon=True).start()

    def close(self) -> None:
        """Frees the weights."""
        for weights in (self.weights, *(each.weights for each in self.replicas)):
            weights.clear()


def stored_model(
    source: ModelSource, folder: StartFolder, load: Callable[[], LoadedModel], is_latest: Callable[[], bool]
) -> StoredModel | None:
    """Returns the model of a start record; None if there is no valid one.

    Args:
        source: The model.
        folder: The record's place.
        load: Loads the checkpoint with its torch module.
        is_latest: Returns whether the files are those that would be loaded; called if there is a record of them.
    """
    record = folder.read()
    if record is None or not is_latest():
        return None
    try:
        weights, content = mapped(folder.weights_path, record.model.weights)
    except OSError as error:  # a file that went away meanwhile
        logger.info("a start record is not used: %s", error)
        return None

    def load_again() -> LoadedModel:
        if folder.read() is None:
            raise TorchaxServeError(
                f"expected the files of {source.name} as they were when it was loaded, and they have changed since; "
                "call serve() again"
            )
        return load()

    return StoredModel(
        name=source.name,
        record=record.model,
        weights=weights,
        content=content,
        load=load_again,
        executables=lambda load_first: ExecutableCache(folder.programs, record.identity, before_trace=load_first),
    )


def stored_report(weights: dict[str, Weight], quantization: str, requantized: str) -> LoadReport:
    """Returns the report of a load that has mapped `weights`, in no time worth a number.

    Args:
        weights: Weights by qualified name.
        quantization, requantized: What the first load said about quantized weights.
    """
    unique = {id(weight): sum(leaf.nbytes for leaf in jax.tree.leaves(weight)) for weight in weights.values()}
    num_bytes = sum(unique.values())
    return LoadReport(
        checkpoint_bytes=num_bytes,
        weights_bytes=num_bytes,
        num_tensors=len(weights),
        num_shared=len(weights) - len(unique),
        quantization=quantization,
        requantized=requantized,
    )
