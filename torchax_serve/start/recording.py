"""Makes the record of a model whose engine has been built, on a thread of its own."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from model_adapters.loading import LoadedModel
from model_adapters.loading.file_names import has_decision_files
from model_adapters.loading.modules_json import modules_root
from model_adapters.ops.compressed_weight import Weight
from torchax_serve.compilation.yielding import rested, yield_to_requests
from torchax_serve.generation.routing import ModelCapabilities
from torchax_serve.multimodal.placeholders import MODALITIES
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.start.model_record import ModelRecord
from torchax_serve.start.record import FileState, StartFolder, StartRecord, states_of
from torchax_serve.start.recorded_objects import PROBES, TokenizerRecord
from torchax_serve.start.weights_file import NotStorableError, file_of, named_tensors

logger = logging.getLogger("torchax_serve")

CONFIG_NAMES = (
    "model_type",
    "is_encoder_decoder",
    "vocab_size",
    "max_position_embeddings",
    "max_target_positions",
    "max_seq_len",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    *(name for modality in MODALITIES for name in modality.token_fields),
)
"""Attributes of a configuration that requests read."""
_TOKENIZER_METHODS = (
    "__call__",
    "_encode_plus",
    "decode",
    "_decode",
    "convert_ids_to_tokens",
    "get_chat_template",
    "get_vocab",
    "apply_chat_template",
    "special_tokens_map",
    "added_tokens_decoder",
    "backend_tokenizer",
)
"""Methods of transformers' fast tokenizers; a class with others of its own is not recorded."""


class NotRecordableError(Exception):
    """A model that starts as before; the message says why."""


def record_in_background(folder: StartFolder, loaded: LoadedModel, runtime: ModelRuntime) -> threading.Thread:
    """Writes the record of a model that the engine runs packed.

    A failure costs the next start its time alone.

    Args:
        folder: Where it is written.
        loaded: The model as it was loaded.
        runtime: The same, with its weights and programs.
    """
    weights = dict(runtime.weights)  # as they are now: a script may change the model later
    files = states_of(folder.checkpoint, _source_files(runtime))
    is_changed = runtime.num_changes > 0 or runtime.watch.change() is not None

    def run() -> None:
        yield_to_requests()
        try:
            if is_changed:
                raise NotRecordableError("the model has been changed")
            folder.write(_record(folder, loaded, runtime, weights, files))
        except Exception as error:  # whatever tokenizers and configurations raise
            logger.info("%s: no start record (%s: %s)", loaded.source.name, type(error).__name__, error)

    thread = threading.Thread(target=run, name="record-start")
    thread.start()
    return thread


def _source_files(runtime: ModelRuntime) -> list[Path]:
    return sorted(Path(inspect.getfile(type(runtime.program.module))).parent.glob("*.py"))


def _record(
    folder: StartFolder,
    loaded: LoadedModel,
    runtime: ModelRuntime,
    weights: dict[str, Weight],
    files: tuple[FileState, ...] | None,
) -> StartRecord:
    """Returns the record; writes the file of weights.

    Raises:
        NotRecordableError: the model has more than a record holds.
    """
    if files is None:
        raise NotRecordableError("its folder has too many files")
    identity = runtime.steps.executables.identity
    if identity is None:
        raise NotRecordableError("its programs are not kept")
    if "packed" not in runtime.steps.executables.functions:
        raise NotRecordableError("it does not run packed")
    if loaded.files_folder is not None and modules_root(loaded.files_folder) is not None:
        raise NotRecordableError("it embeds texts, for which a start loads torch")
    if has_decision_files(loaded.files_folder):
        raise NotRecordableError("its files ask questions, for which a start loads torch")
    report = loaded.report
    if report.unused_tensors or report.missing_tensors or report.made_dense:
        raise NotRecordableError("its load report has something to say")
    model, tensors = model_record(loaded, runtime, weights)
    try:
        num_bytes, pieces = file_of(tensors)
    except NotStorableError as error:
        raise NotRecordableError(str(error)) from error
    seal = folder.write_weights(num_bytes, rested(pieces))
    if seal is None:
        raise NotRecordableError("its weights take too much of the cache")
    return StartRecord(files, identity, seal, model)


def model_record(
    loaded: LoadedModel, runtime: ModelRuntime, weights: Mapping[str, Weight]
) -> tuple[ModelRecord, dict[str, jax.Array]]:
    """Returns what requests need of a packed model, and the tensors of its weights by name.

    Args:
        loaded: The model as it was loaded.
        runtime: The same, with its programs.
        weights: Weights by qualified name.

    Raises:
        NotRecordableError: its requests need more.
    """
    if loaded.generation_config is None:
        raise NotRecordableError("it returns embeddings, labels or scores and writes no text")
    if runtime.encoder is not None:
        raise NotRecordableError("it has an encoder")
    if runtime.program.rope is not None:
        raise NotRecordableError("its rotary frequencies depend on the length")
    if ModelCapabilities.of(runtime) != ModelCapabilities():
        raise NotRecordableError("its requests do not all run on the engine")
    if loaded.has_processor:
        raise NotRecordableError("it has a processor of images or audio")
    config, absent = _config_of(loaded)
    values, defaults = _generation_config_of(loaded)
    names, tensors = named_tensors(weights)
    record = ModelRecord(
        weights=names,
        tokenizer=_tokenizer_of(loaded),
        config=config,
        config_absent=absent,
        generation_config=values,
        generation_defaults=defaults,
        sampling_rules=dataclasses.asdict(runtime.sampling_rules),
        limits=dataclasses.asdict(runtime.limits),
        quantization=loaded.report.quantization,
        requantized=loaded.report.requantized,
        described=(type(loaded.module).__name__, config["model_type"], str(loaded.module.dtype).removeprefix("torch.")),
    )
    return record, tensors


def _config_of(loaded: LoadedModel) -> tuple[dict[str, Any], tuple[str, ...]]:
    config = loaded.config
    if config.get_text_config(decoder=True) is not config or config.get_text_config(encoder=True) is not config:
        raise NotRecordableError("its configuration has parts")
    present = {name: getattr(config, name) for name in CONFIG_NAMES if hasattr(config, name)}
    if any(isinstance(present.get(name), int) for modality in MODALITIES for name in modality.token_fields):
        raise NotRecordableError("it takes images or audio")
    return _plain(present), tuple(name for name in CONFIG_NAMES if name not in present)


def _generation_config_of(loaded: LoadedModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values of the checkpoint's generation config, and transformers' defaults."""
    from model_adapters.loading.formats import gguf_model
    from model_adapters.loading.loader import generation_config_of

    folder = loaded.source.folder  # read again: a script may have changed that of the module
    if loaded.source.kind == "object":
        config: Any = loaded.generation_config
    elif folder is None:
        config = gguf_model.generation_config_of(loaded.config)
    else:
        config = generation_config_of(folder, loaded.module)
    return _plain(vars(config)), _plain(config._get_default_generation_params())


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Returns `values`, which have to be of JSON.

    Raises:
        NotRecordableError: one is not.
    """
    try:
        copied: dict[str, Any] = json.loads(json.dumps(values))
    except (TypeError, ValueError) as error:
        raise NotRecordableError(f"a configuration has objects ({error})") from error
    if copied != values:
        raise NotRecordableError("a configuration has values that JSON changes")
    return copied


def _tokenizer_of(loaded: LoadedModel) -> TokenizerRecord | None:
    """Returns the record of a tokenizer that is fast and of no class with methods of its own.

    Raises:
        NotRecordableError: it is another, or the recorded one encodes or decodes a text differently.
    """
    tokenizer = loaded.load_tokenizer()
    if tokenizer is None:
        return None
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or hasattr(tokenizer, "_switch_to_input_mode"):
        raise NotRecordableError("its tokenizer is not a fast one")
    for name in _TOKENIZER_METHODS:
        if getattr(type(tokenizer), name) is not getattr(PreTrainedTokenizerFast, name):
            raise NotRecordableError(f"its tokenizer has a {name} of its own")
    if tokenizer.clean_up_tokenization_spaces and type(tokenizer.backend_tokenizer.model).__name__ != "BPE":
        raise NotRecordableError("its tokenizer cleans texts up")
    special = {
        name: [str(each) for each in value] if isinstance(value, list) else str(value)
        for name, value in tokenizer.special_tokens_map.items()
    }
    backend = tokenizer.backend_tokenizer.to_str()
    own = _plain({"response_template": getattr(tokenizer, "response_template", None)})
    record = TokenizerRecord(backend, _template(tokenizer, None), _template(tokenizer, [{}]), special, **own)
    _check_equal(tokenizer, record)
    return record


def _template(tokenizer: PreTrainedTokenizerBase, tools: list[Any] | None) -> str | None:
    if not tokenizer.chat_template:
        return None
    template = tokenizer.get_chat_template(None, tools)
    if not isinstance(template, str) or not isinstance(tokenizer.chat_template, str):
        raise NotRecordableError("its tokenizer has several chat templates")
    return template


def _check_equal(tokenizer: PreTrainedTokenizerBase, record: TokenizerRecord) -> None:
    backend = record.tokenizer()
    texts = [*PROBES, " ".join(map(str, tokenizer.all_special_tokens)), record.chat_template or ""]
    for text in texts:
        for with_special in (True, False):
            ids = backend.encode(text, add_special_tokens=with_special).ids
            if ids != tokenizer(text, add_special_tokens=with_special)["input_ids"]:
                raise NotRecordableError("its tokenizer does more than its backend")
            for skipped in (True, False):
                own = tokenizer.decode(ids, skip_special_tokens=skipped, clean_up_tokenization_spaces=False)
                if backend.decode(ids, skip_special_tokens=skipped) != own:
                    raise NotRecordableError("its tokenizer decodes otherwise than its backend")
