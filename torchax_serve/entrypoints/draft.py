"""Loads the draft model of an engine's options, and compares its vocabulary."""

from __future__ import annotations

import dataclasses
from typing import Any

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading import LoadedModel, load_model
from model_adapters.loading.compress_weights import prepare_weights
from torchax_serve.engine.options import EngineOptions
from torchax_serve.entrypoints.base_model import programs_of
from torchax_serve.executors.loaded_draft import LoadedDraft
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.scheduler import SpeculativeConfig

_SHARED = ("token", "local_files_only", "trust_remote_code", "allow_pickle", "cache_dir", "progress", "random_weights")
"""Arguments of `load_model` that a draft model has from the model it drafts for."""


def with_draft_model(
    engine: EngineOptions | None, target: LoadedModel, loading: dict[str, Any], pack_weights: bool
) -> EngineOptions | None:
    """Returns the options with their draft model loaded, if they have one.

    Args:
        engine: Options of the engine.
        target: Model that is drafted for.
        loading: Arguments of `load_model` that it was loaded with.
        pack_weights: As of `serve`.

    Raises:
        InvalidArgumentError: the vocabularies differ.
    """
    config = None if engine is None else SpeculativeConfig.parse(engine.speculative)
    if engine is None or config is None or config.model is None or target.sharding is not None:
        return engine
    loaded = load_model(config.model, **{name: loading[name] for name in _SHARED if name in loading})
    name = "the model object" if loaded.source.kind == "object" else str(config.model)
    _check_vocabulary(name, loaded, target)
    if pack_weights:
        prepare_weights(loaded)
    runtime = ModelRuntime(loaded.module, loaded.weights, programs_of(loaded))
    return dataclasses.replace(engine, speculative=dataclasses.replace(config, model=LoadedDraft(name, runtime)))


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
