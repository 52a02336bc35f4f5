"""`LiveAdapters`: adapters of requests, loaded and unloaded while a model serves."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from model_adapters.errors import UnsupportedModelError
from torchax_serve.engine.adapters import DEFAULT_LORA_RANK, AdapterOptions, Adapters
from torchax_serve.engine.weight_update import engines_in
from torchax_serve.entrypoints.live_weights import LiveWeights

if TYPE_CHECKING:
    from model_adapters.lora.adapter_files import AdapterFiles

REMEDY = "merge it with peft's merge_and_unload, and serve the result"


class LiveAdapters(LiveWeights):
    """Methods of a `ServedModel` that change the adapters which requests can name."""

    _adapters: Adapters | None = None
    _adapter_lock: threading.Lock  # of calls that load adapters

    @property
    def adapters(self) -> dict[str, str]:
        """Folders of the adapters that requests can name, by name."""
        return {} if self._adapters is None else {each.name: each.path for each in self._adapters.all()}

    @property
    def adapters_in_use(self) -> tuple[int, list[str]]:
        """How many adapters there may be, and the names of those that requests have now."""
        if self._adapters is None:
            return 0, []
        return self._adapters.max_loras, sorted(each.name for each in self._adapters.all() if each.num_uses)

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Loads a LoRA adapter, which requests name by ``SamplingParams(adapter=name)``.

        Compiles nothing.

        Requests go on meanwhile; the exchange is between two of their steps.

        Args:
            name: A name that no loaded adapter has.
            path: Folder of the adapter, as peft writes it.

        Raises:
            InvalidArgumentError: no adapter, or one of another model, rank or layers; the name or all places are taken.
            CheckpointError: its files are not readable.
            UnsupportedModelError: an adapter of a kind that requests cannot have, or a model without adapters.
        """
        from model_adapters.lora.adapter_files import read_adapter

        adapters = self._adapters_or_raise("load_adapter")
        adapters.free_index(name)  # before the files are read
        self._load(adapters, name, read_adapter(path, REMEDY))

    def unload_adapter(self, name: str, timeout_s: float | None = None) -> None:
        """Refuses new requests with an adapter, waits for those that have it, and frees its place.

        Args:
            name: Its name.
            timeout_s: Seconds to wait at most; None: as long as it takes.

        Raises:
            InvalidArgumentError: no adapter of that name is loaded.
            TorchaxServeError: requests have it for longer than `timeout_s`; it stays loaded.
            UnsupportedModelError: a model without adapters.
        """
        self._adapters_or_raise("unload_adapter").unload(name, timeout_s)

    def _adapters_or_raise(self, call: str) -> Adapters:
        self._loaded_or_raise()
        if self._adapters is None:
            raise UnsupportedModelError(
                f"{call}: expected a model served with room for adapters, this one is not; "
                "serve(model, adapters={name: path}) or serve(model, max_loras=...)"
            )
        return self._adapters

    def _load(self, adapters: Adapters, name: str, files: AdapterFiles) -> None:
        with self._adapter_lock:
            index = adapters.free_index(name)
            puts = []
            for runtime in self._runtimes:
                assert runtime.lora is not None
                puts.append(runtime.lora.loaded(files, index))
            self._put(puts)
            adapters.add(name, str(files.path), index)

    def _put(self, puts: Sequence[Callable[[], None]]) -> None:
        """Calls each function between two steps of its replica's engine."""
        with self._engine_lock:
            engines = engines_in(self._engine)
            if not engines:  # nor can one be made meanwhile
                for put in puts:
                    put()
                return
        for engine, put in zip(engines, puts, strict=True):
            engine.call(lambda scheduler, runner, put=put: put())  # type: ignore[misc]


def enable_adapters(model: LiveAdapters, options: AdapterOptions) -> None:
    """Makes room for adapters in `model`, which has had no request, and loads the first ones.

    Raises:
        UnsupportedModelError: a model whose requests cannot have adapters.
        TorchaxServeError: as of `LiveAdapters.load_adapter`.
    """
    from model_adapters.lora.adapter_files import read_adapter
    from model_adapters.lora.stacks import LoraStacks, targets_of

    program = model._runtimes[0].program
    if model._leader is not None or program.names.has_encoder or not program.module.can_generate():
        kind = "on several hosts" if model._leader is not None else "an encoder-decoder, or without a head"
        raise UnsupportedModelError(
            f"adapters: expected a decoder with a head on one host, this model is {kind}; merge one: "
            "serve(model, adapter=...)"
        )
    files = {name: read_adapter(path, REMEDY) for name, path in options.adapters.items()}
    ranks = [parts["A"].shape[0] for adapter in files.values() for parts in adapter.factors.values()]
    targets = options.lora_target_modules or targets_of(list(files.values()))
    max_loras = options.max_loras or max(1, len(files))
    max_rank = options.max_lora_rank or max(ranks, default=DEFAULT_LORA_RANK)
    for runtime in model._runtimes:
        program = runtime.program
        stacks = LoraStacks(program.module, runtime.weights, program.sharding, targets, max_loras, max_rank)
        for adapter in files.values():
            stacks.check(adapter)
        runtime.lora = stacks
    model._adapters = Adapters(max_loras)
    for name, adapter in files.items():
        model._load(model._adapters, name, adapter)
