"""Loads the draft model or head of an engine's options and checks that it fits."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator
from typing import Any

from model_adapters.draft_heads.gemma_assistant import ASSISTANTS, assistant_of, has_assistant
from model_adapters.draft_heads.loaded_head import LoadedHead
from model_adapters.errors import CheckpointError, InvalidArgumentError, ModelNotFoundError
from model_adapters.loading import LoadedModel, load_model
from model_adapters.loading.compress_weights import prepare_weights
from model_adapters.loading.load_report import some
from model_adapters.loading.model_source import resolve
from torchax_serve.engine.options import EngineOptions
from torchax_serve.engine.replica_runtimes import split_runtimes
from torchax_serve.entrypoints.torch_model import programs_of
from torchax_serve.executors.speculation.loaded_draft import LoadedDraft
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.scheduler import SpeculativeConfig
from torchax_serve.scheduler.speculative_config import refuse_drafts

logger = logging.getLogger("torchax_serve")

_SHARED = (
    "token",
    "local_files_only",
    "trust_remote_code",
    "allow_pickle",
    "cache_dir",
    "progress",
    "random_weights",
    "refuse_uneven",
)
"""Arguments of `load_model` that a draft model has from the model it drafts for."""


def with_draft_model(
    engine: EngineOptions | None, target: LoadedModel, loading: dict[str, Any], pack_weights: bool
) -> EngineOptions | None:
    """Returns the options with their draft model or head loaded, if they have one.

    Args:
        engine: Options of the engine.
        target: Model that is drafted for.
        loading: Arguments of `load_model` that it was loaded with.
        pack_weights: As of `serve`.

    Raises:
        InvalidArgumentError: the vocabularies differ, or a head is of another model.
        UnsupportedArgumentError: the model does not generate.
        CheckpointError: a head lacks tensors.
    """
    config = None if engine is None else SpeculativeConfig.parse(engine.speculative)
    if config is not None and not target.module.can_generate():
        refuse_drafts(config, f"{type(target.module).__name__}, which does not generate")
    if engine is None or config is None or config.looks_up:
        return engine
    if config.method == "eagle3" or config.model is None:
        return _with_head(engine, config, _head(config, target, loading))
    if config.method == "mtp" and not has_assistant(target):
        raise InvalidArgumentError(
            f"speculative_config: model: expected None with method 'mtp' for {type(target.module).__name__}, got "
            f"{config.model if isinstance(config.model, str | os.PathLike) else 'a model object'}; leave model out, "
            "only those of Gemma 4 have an assistant"
        )
    mesh = None if target.sharding is None else target.sharding.mesh
    with _named():
        loaded = load_model(config.model, mesh=mesh, **{name: loading[name] for name in _SHARED if name in loading})
    name = "the model object" if loaded.source.kind == "object" else str(config.model)
    if config.method == "mtp" or loaded.config.model_type in ASSISTANTS:
        return _with_head(engine, config, _assistant(name, loaded, target))
    _check_vocabulary(name, loaded, target)
    if pack_weights:
        prepare_weights(loaded)
    if loaded.sharding is None:
        runtimes = [ModelRuntime(loaded.module, loaded.weights, programs_of(loaded))]
    else:
        runtimes = split_runtimes(loaded.module, loaded.weights, loaded.sharding)
    return dataclasses.replace(engine, speculative=dataclasses.replace(config, model=LoadedDraft(name, runtimes)))


def _with_head(engine: EngineOptions, config: SpeculativeConfig, head: LoadedHead) -> EngineOptions:
    """Returns the options with a loaded head; logs how it lies on a mesh."""
    if line := head.mesh_description:
        logger.info("%s", line)
    return dataclasses.replace(engine, speculative=dataclasses.replace(config, model=head))


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Prefixes an error of a wrong name or object with the argument of the draft model."""
    try:
        yield
    except (InvalidArgumentError, ModelNotFoundError) as error:
        raise type(error)(f"speculative_config: model: {error}") from error


def _head(config: SpeculativeConfig, target: LoadedModel, loading: dict[str, Any]) -> LoadedHead:
    """Returns the draft head that `config` names."""
    from model_adapters.draft_heads.loading import load_eagle3, load_mtp

    uneven = {"refuse_uneven": bool(loading.get("refuse_uneven"))}
    if config.method == "mtp":
        return load_mtp(target, **uneven)
    allow_pickle = bool(loading.get("allow_pickle"))
    named = {name: loading[name] for name in ("token", "local_files_only", "cache_dir", "progress") if name in loading}
    with _named():
        source = resolve(config.model, allow_pickle=allow_pickle, **named)
    return load_eagle3(source, target, allow_pickle=allow_pickle, **uneven)


def _assistant(name: str, loaded: LoadedModel, target: LoadedModel) -> LoadedHead:
    """Returns a model that was loaded to draft from the served model's keys, as its draft head."""
    if missing := loaded.report.missing_tensors:  # what is there may have been loaded as another model
        raise CheckpointError(
            f"{name}: expected all tensors of the draft model, {len(missing)} missing: {some(missing)}; get its files "
            "again"
        )
    if loaded.config.model_type not in ASSISTANTS:
        raise InvalidArgumentError(
            f"speculative_config: model: expected None or an assistant of Gemma 4 with method 'mtp', got {name}; use "
            "method 'draft_model'"
        )
    return assistant_of(loaded, target)


def _check_vocabulary(name: str, draft: LoadedModel, target: LoadedModel) -> None:
    ours, theirs = target.tokenizer(), draft.tokenizer()
    if ours is not None and theirs is not None:
        if ours.get_vocab() == theirs.get_vocab():
            return
        sizes = len(ours.get_vocab()), len(theirs.get_vocab())
    else:
        sizes = tuple(each.config.get_text_config().vocab_size for each in (target, draft))
        if sizes[0] == sizes[1]:
            return
    raise InvalidArgumentError(
        f"speculative_config: model: expected the vocabulary of the served model, {sizes[0]} tokens, got another of "
        f"{sizes[1]} tokens from {name}; choose a draft model of the same family"
    )
