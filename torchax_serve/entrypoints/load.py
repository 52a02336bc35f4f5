"""Loads models with their torch modules, and chooses the class that serves them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh
from transformers import PreTrainedModel

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.loading import LoadedModel, load_model
from model_adapters.loading.compress_weights import prepare_weights
from model_adapters.loading.model_source import ModelSource
from model_adapters.lora.merge import merge_adapter
from model_adapters.tested_releases import log_newer_releases
from torchax_serve.distributed.hosts.leader import Leader
from torchax_serve.distributed.hosts.options import Hosts
from torchax_serve.distributed.hosts.startup import (
    check_same_model,
    joined,
    load_digest,
    mesh_of_hosts,
    shared_arguments,
)
from torchax_serve.distributed.mesh import mesh_for
from torchax_serve.engine.adapters import AdapterOptions
from torchax_serve.engine.options import EngineOptions
from torchax_serve.entrypoints.audio_model import AudioModel
from torchax_serve.entrypoints.base_model import BaseModel
from torchax_serve.entrypoints.draft import with_draft_model
from torchax_serve.entrypoints.encoder_model import EncoderModel
from torchax_serve.entrypoints.live_adapters import LiveAdapters, enable_adapters
from torchax_serve.entrypoints.page_model import CLASSES, PageModel
from torchax_serve.entrypoints.series_model import SeriesModel
from torchax_serve.entrypoints.served_model import ServedModel, record_start
from torchax_serve.entrypoints.speech_model import SpeechModel, is_speech_model
from torchax_serve.entrypoints.vision_model import VisionModel
from torchax_serve.scheduler.speculative_config import SpeculativeConfig, refuse_heads
from torchax_serve.start.record import StartFolder
from torchax_serve.tasks.heads import OF_IMAGES, OF_SERIES, OF_SOUND, methods_of
from torchax_serve.tasks.spectrograms import CLASS_NAME


def load_served_model(
    model: str | os.PathLike[str] | PreTrainedModel | None,
    engine: EngineOptions | None,
    mesh: Mesh | Mapping[str, int] | None,
    tensor_parallel: int | None,
    pack_weights: bool,
    loading: dict[str, Any],
    start_folder_of: Callable[[ModelSource], StartFolder | None] | None = None,
    adapter: str | os.PathLike[str] | None = None,
    adapters: AdapterOptions | None = None,
) -> ServedModel:
    """Returns a model on the devices of this host; errors as of `serve`.

    Args:
        model, engine, mesh, tensor_parallel, pack_weights, adapter: As of `serve`.
        adapters: Adapters that requests can name; None: none.
        loading: Arguments of `load_model` by name.
        start_folder_of: Returns where the record of this start is written; None: nowhere.
    """
    loaded = load_checkpoint(model, mesh_for(mesh, tensor_parallel), pack_weights, loading, adapter)
    engine = with_draft_model(engine, loaded, loading, pack_weights)
    served = model_class_for(loaded.module)(loaded, engine)
    if adapters is not None:
        try:
            _enable_adapters(served, adapters)
        except BaseException:
            served.close()
            raise
    folder = None if start_folder_of is None else start_folder_of(loaded.source)
    if folder is not None and type(served) is ServedModel:
        record_start(served, folder)
    return served


def load_checkpoint(
    model: str | os.PathLike[str] | PreTrainedModel | None,
    mesh: Mesh | None,
    pack_weights: bool,
    loading: dict[str, Any],
    adapter: str | os.PathLike[str] | None = None,
) -> LoadedModel:
    """Returns the torch module and the weights of a model; arguments as of `load_served_model`."""
    log_newer_releases()
    loaded = load_model(model, mesh=mesh, **loading)
    if adapter is not None:
        merge_adapter(loaded, adapter)
    if pack_weights:
        prepare_weights(loaded)
    return loaded


def _enable_adapters(served: BaseModel, options: AdapterOptions) -> None:
    """Enables adapters; raises UnsupportedModelError for a model that does not generate."""
    if not isinstance(served, LiveAdapters):
        raise UnsupportedModelError(
            f"adapters: expected a model that generates, {served.name} is an encoder; merge one: "
            "serve(model, adapter=...)"
        )
    enable_adapters(served, options)


def serve_on_hosts(
    hosts: Hosts,
    model: str | os.PathLike[str] | PreTrainedModel | None,
    engine: EngineOptions | None,
    mesh: Mesh | Mapping[str, int] | None,
    tensor_parallel: int | None,
    loading: dict[str, Any],
) -> ServedModel:
    """Returns a model whose weights are sharded over the devices of `hosts`.

    This process is their leader.

    Raises:
        InvalidArgumentError: `hosts` names another process as the leader.
        UnsupportedArgumentError: a model or a head is to draft.
    """
    if not hosts.is_leader:
        raise InvalidArgumentError(
            f"hosts: expected host_id 0, the leader's, got {hosts.host_id}; call follow() on the other hosts"
        )
    log_newer_releases()
    if engine is not None:
        refuse_heads(SpeculativeConfig.parse(engine.speculative), "a model on several hosts")
    with joined(hosts, model, shared_arguments(loading, mesh, tensor_parallel)) as followers:
        loaded = load_model(model, mesh=mesh_of_hosts(hosts, mesh, tensor_parallel), **loading)
        check_same_model(followers, load_digest(loaded))
    assert loaded.sharding is not None
    return model_class_for(loaded.module)(loaded, engine, Leader(loaded.sharding.mesh, followers))


def model_class_for(module: PreTrainedModel) -> type[ServedModel]:
    """Returns the served model class for `module`: by its head, text, transcripts, or labels."""
    methods = set(methods_of(type(module).__name__))
    if type(module).__name__ in CLASSES:
        return PageModel
    if is_speech_model(module):
        return SpeechModel
    if not module.can_generate() and methods & OF_IMAGES:
        return VisionModel
    if methods & OF_SOUND and (not module.can_generate() or type(module).__name__ == CLASS_NAME):
        return AudioModel
    if methods & OF_SERIES:
        return SeriesModel
    return ServedModel if module.can_generate() else EncoderModel
