"""`TorchModel`: the part of a served model that needs torch and transformers.

Nothing else of it imports them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from model_adapters.loading import LoadedModel
from model_adapters.loading.generative_class import with_head
from torchax_serve.compilation.executable_cache import ExecutableCache
from torchax_serve.compilation.program_signature import model_identity
from torchax_serve.compilation.xla_cache import programs_dir
from torchax_serve.distributed.hosts.leader import Leader
from torchax_serve.engine.data_parallel import DataParallelEngines
from torchax_serve.engine.engine import Engine
from torchax_serve.engine.replica_runtimes import split_runtimes
from torchax_serve.generation.call_limits import draw_seed
from torchax_serve.generation.engine_rows import EngineRows, engine_request_for, prompt_call
from torchax_serve.generation.jax_forward import following
from torchax_serve.generation.jax_model import run_on_jax
from torchax_serve.generation.media_requests import media_request
from torchax_serve.generation.routing import (
    EngineFacts,
    ModelCapabilities,
    Path,
    Route,
    engine_unsupported_reason,
    route,
)
from torchax_serve.generation.single_request import single_request
from torchax_serve.multimodal.placeholders import check_has_media, placeholder_ids
from torchax_serve.runtime.call_arguments import check_surroundings
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.scheduler import Request

Engines = Engine | DataParallelEngines


class TorchModel:
    """A loaded checkpoint whose torch module runs on JAX.

    Args:
        loaded: The checkpoint.
        leader: Of the hosts that share it; None for one host.

    Attributes:
        loaded: The checkpoint.
        runtimes: One for each replica.
        module: The module, whose ``forward`` and ``generate`` run on JAX.
        has_encoder: Whether an encoder reads the prompts.
    """

    def __init__(self, loaded: LoadedModel, leader: Leader | None = None) -> None:
        self.loaded = loaded
        if loaded.sharding is None:
            self.runtimes = [ModelRuntime(loaded.module, loaded.weights, programs_of(loaded))]
        else:
            self.runtimes = split_runtimes(loaded.module, loaded.weights, loaded.sharding, leader)
        self.module: Any = run_on_jax(loaded.module, self.runtimes[0])
        self.watch = self.runtimes[0].watch
        self.watch.is_held = loaded.source.kind == "object"
        self.has_encoder = self.runtimes[0].program.names.has_encoder
        self._placeholder_ids = placeholder_ids(loaded.config)

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The checkpoint's tokenizer, or None if it came without one."""
        return self.loaded.tokenizer()

    @property
    def generator(self) -> Any:
        """The module, or one with a head tied to the token embeddings that runs on the same weights.

        Raises:
            UnsupportedModelError: the model does not generate.
        """
        return self.module if self.module.can_generate() else self._with_head

    @functools.cached_property
    def _with_head(self) -> Any:
        module, weights = with_head(self.loaded)
        programs = programs_of(dataclasses.replace(self.loaded, module=module))
        return run_on_jax(module, ModelRuntime(module, weights, programs))

    @property
    def num_changes(self) -> int:
        """How often the module has changed since it was loaded."""
        return sum(runtime.num_changes for runtime in self.runtimes)

    @property
    def last_change(self) -> str:
        """What has changed last."""
        return next((runtime.last_change for runtime in self.runtimes if runtime.last_change), "the model")

    @property
    def executables(self) -> list[ExecutableCache]:
        """The programs of all its runtimes."""
        runtimes = list(self.runtimes)
        if (head := vars(self).get("_with_head")) is not None:
            runtimes.append(head._jax_runtime)
        return [runtime.steps.executables for runtime in runtimes]

    def follow(self) -> None:
        """Applies changes on the module, if code outside may have made some."""
        if not self.watch.may_have_changed():
            check_surroundings()
            return
        with following(self.runtimes[0]):
            return

    def close(self) -> None:
        """Frees the weights."""
        if (head := vars(self).pop("_with_head", None)) is not None:
            head._jax_runtime.weights.clear()
        for runtime in self.runtimes:
            runtime.steps.executables.close()
            runtime.weights.clear()
            if runtime.lora is not None:
                runtime.lora.close()

    def run_rows_on(self, engine: Callable[[], Engines], single_engine: Callable[[], Engine]) -> None:
        """Lets rows of a ``generate`` that the class has of its own run on engines."""
        vars(self.module)["_engine_rows"] = EngineRows(self.module, engine, single_engine)

    def no_engine_reason(self) -> str | None:
        """Returns why requests of the model cannot be batched; None if they can."""
        return engine_unsupported_reason(ModelCapabilities.of(self.generator._jax_runtime))

    def check_placeholders(self, request: Request) -> None:
        """Raises InvalidArgumentError for placeholders of media in a prompt that has none."""
        if not self._placeholder_ids.isdisjoint(request.prompt_ids):
            check_has_media(self.loaded.config, request.prompt_ids, ())

    def routed_request(self, request: Request, engine: Callable[[], Engines]) -> Request | Route:
        """Returns the request as the engine takes it, or how else its prompt runs and why.

        Args:
            request: The request.
            engine: Returns the engine, or raises UnsupportedModelError.
        """
        model, params = self.generator, request.params
        if request.generate_inputs is not None:
            found = media_request(model, engine, request.generate_inputs, params.config, params.given, params.seed)
            return Route(Path.PREPARED, found) if isinstance(found, str) else found
        capabilities = ModelCapabilities.of(model._jax_runtime)
        call = prompt_call(model, request.prompt_ids, params.config, lambda: EngineFacts.of_engine(engine))
        chosen = route(capabilities, call)
        if chosen.path is not Path.ENGINE:
            return chosen
        seed = draw_seed(params.seed, do_sample=params.config.do_sample)
        found_for = engine_request_for(model, request.prompt_ids, params.config, params.given, seed)
        return found_for or route(capabilities, dataclasses.replace(call, ends_in_loop=False))

    def single_request(self, request: Request, chosen: Route) -> Request:
        """Returns a request that brings its own steps to the engine of single requests."""
        inputs: Mapping[str, Any] | None = request.generate_inputs
        if inputs is None:
            inputs = {"input_ids": torch.tensor([list(request.prompt_ids)], dtype=torch.long)}
        params = request.params
        return single_request(self.generator, chosen, inputs, params.config, params.given, params.seed)


def programs_of(loaded: LoadedModel) -> ExecutableCache:
    """Returns the cache of the model's programs.

    It is on disk; in memory for an object, whose code may have changed.
    """
    folder = programs_dir()
    if folder is None or loaded.source.kind == "object":
        return ExecutableCache()
    config_json = loaded.config.to_json_string(use_diff=False)
    return ExecutableCache(folder, model_identity(type(loaded.module), config_json, loaded.weights))
