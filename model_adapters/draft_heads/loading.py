"""Loads draft heads, from their own checkpoint or from the end of a model's."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from transformers import LlamaConfig, PreTrainedModel

from model_adapters.draft_heads.eagle3 import NUM_HIDDEN, Eagle3Head
from model_adapters.draft_heads.head_sharding import head_sharding
from model_adapters.draft_heads.loaded_head import LoadedHead
from model_adapters.draft_heads.mtp import mtp_class
from model_adapters.draft_heads.mtp_prefixed import PREFIX, one_attention_layer, prefixed_mtp_class
from model_adapters.errors import CheckpointError, InvalidArgumentError, TorchaxServeError, UnsupportedArgumentError
from model_adapters.loading.checkpoint import Checkpoint, weight_files
from model_adapters.loading.file_names import CONFIG
from model_adapters.loading.formats.placement import StoredWeights
from model_adapters.loading.load_report import some
from model_adapters.loading.loaded_model import LoadedModel
from model_adapters.loading.loader import harvest
from model_adapters.loading.memory import PeakMemory
from model_adapters.loading.model_class import module_of, read_config_json
from model_adapters.loading.model_files import AnyCheckpoint, ModelFiles
from model_adapters.loading.model_source import ModelSource
from model_adapters.loading.tensor_match import TensorMatch
from model_adapters.loading.weight_sink import DevicePlacement, WeightSink
from model_adapters.ops.compressed_weight import Weight
from model_adapters.program.model_program import ModelProgram
from model_adapters.sharding.model_sharding import ModelSharding

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

_REFUSED = ("norm_before_fc", "norm_output", "parallel_drafting")
"""Settings of other heads by the name EAGLE-3, which compute something else."""


def load_eagle3(
    source: ModelSource, target: LoadedModel, *, allow_pickle: bool, refuse_uneven: bool = False
) -> LoadedHead:
    """Returns the EAGLE-3 head in the folder of `source`, for the model `target`.

    Raises:
        CheckpointError: the files are no EAGLE-3 head, or tensors are missing or of other shapes.
        InvalidArgumentError: the head is of a model of another size or vocabulary.
    """
    assert source.path is not None
    content = read_config_json(source.path / CONFIG)
    said = _flat(content)
    refused = [name for name in _REFUSED if said.get(name)]
    if refused:
        raise UnsupportedArgumentError(
            f"speculative_config: model: expected an EAGLE-3 head without {refused[0]}, got {source.name}; "
            "choose another head"
        )
    config = LlamaConfig.from_dict({name: value for name, value in said.items() if name != "auto_map"})
    layers = _captured_layers(content, target)
    checkpoint = Checkpoint.of(weight_files(source.path, explicit=None, extra=(), allow_pickle=allow_pickle))
    names = {name: _eagle3_name(name) for name in checkpoint.entries}
    _check_eagle3(source.name, set(names.values()))
    _check_target(source.name, config, {names[name]: entry for name, entry in checkpoint.entries.items()}, target)
    config.draft_vocab_size = _shape(checkpoint, names, "lm_head.weight")[0]
    has_map = "d2t" in names.values()
    if not has_map and config.draft_vocab_size != config.vocab_size:
        raise CheckpointError(
            f"{source.name}: expected d2t, the tokens of {config.draft_vocab_size} columns of lm_head, as the "
            f"vocabulary has {config.vocab_size} tokens, found none; get the head's files again"
        )
    shared = {}
    if "embed_tokens.weight" not in names.values():
        shared["embed_tokens.weight"] = _tensor_name(target.module, "embedding")
    loaded = _Read(Eagle3Head, config, source.name, checkpoint, target, shared, refuse_uneven)
    program, weights = loaded.tensors({name: own for name, own in names.items() if own not in ("d2t", "t2d")})
    ids = loaded.token_ids(names) if has_map else None
    return LoadedHead(source.name, program, weights, shared, layers, ids, _kv_shape(config, program.sharding))


def load_mtp(target: LoadedModel, *, refuse_uneven: bool = False) -> LoadedHead:
    """Returns the multi-token-prediction layer in the checkpoint of `target`.

    Raises:
        InvalidArgumentError: the model has no checkpoint, or none with such a layer.
        UnsupportedArgumentError: it has several, or in a form that is not supported.
        CheckpointError: tensors are missing or of other shapes.
    """
    module, name = target.module, target.source.name
    folder = target.files_folder
    if folder is None or target.source.gguf is not None:
        raise InvalidArgumentError(
            f"speculative_config: method 'mtp': expected a model with a folder of safetensors files, got {name}; "
            "serve it by its folder or its name on the hub"
        )
    source = ModelSource("folder", name, folder)
    config = copy.deepcopy(module.config.get_text_config())
    files = ModelFiles.of(source, trust_remote_code=target.trust_remote_code)
    checkpoint = files.checkpoint(type(module), files.config, allow_pickle=target.allow_pickle)
    names = list(checkpoint.sizes_in(None))
    config.architectures = None
    head_class: type[PreTrainedModel]
    if any(each.startswith(PREFIX) for each in names):
        tensors, head_class = _prefixed_names(name, names), prefixed_mtp_class(module)
        config, embedding, head = one_attention_layer(config), "embed_tokens.weight", "lm_head.weight"
    else:
        tensors, head_class = _mtp_names(name, config.num_hidden_layers, names), mtp_class(module)
        layer = f"model.layers.{config.num_hidden_layers}"
        embedding, head = f"{layer}.embed_tokens.weight", f"{layer}.shared_head.head.weight"
    parts = {embedding: "embedding", head: "head"}
    shared = {own: _tensor_name(module, part) for own, part in parts.items() if own not in tensors.values()}
    program, weights = _Read(head_class, config, name, checkpoint, target, shared, refuse_uneven).tensors(tensors)
    kv_shape = _kv_shape(config, program.sharding) if embedding == "embed_tokens.weight" else None
    has_indexer = any(hasattr(part, "indexer") for part in program.module.modules())
    return LoadedHead(f"mtp of {name}", program, weights, shared, (-1,), kv_shape=kv_shape, has_indexer=has_indexer)


def _prefixed_names(name: str, names: list[str]) -> dict[str, str]:
    """Returns the tensors of a prediction layer ``mtp.*``, each under its own name."""
    found = [each for each in names if each.startswith(PREFIX)]
    numbers = {int(match[1]) for each in found if (match := re.match(r"mtp\.layers\.(\d+)\.", each)) is not None}
    if f"{PREFIX}fc.weight" not in found or numbers != {0}:
        raise UnsupportedArgumentError(
            f"speculative_config: method 'mtp': expected mtp.fc.weight and one layer mtp.layers.0, as Qwen3-Next has "
            f"them, got layers {sorted(numbers)} and {some(tuple(found))} in {name}; leave speculative_config out"
        )
    return {each: each for each in found}


def _mtp_names(name: str, num_layers: int, names: list[str]) -> dict[str, str]:
    """Returns the tensors of a prediction layer behind the model's, each under its own name."""
    pattern = re.compile(r"model\.layers\.(\d+)\.")
    numbers = {int(match[1]) for each in names if (match := pattern.match(each)) is not None}
    behind = sorted(number for number in numbers if number >= num_layers)
    if not behind or f"model.layers.{num_layers}.eh_proj.weight" not in names:
        raise InvalidArgumentError(
            f"speculative_config: method 'mtp': expected a checkpoint with a prediction layer, model.layers."
            f"{num_layers}.eh_proj.weight or mtp.fc.weight, got none in {name}; use 'ngram', 'draft_model' or 'eagle3'"
        )
    if behind != [num_layers]:
        raise UnsupportedArgumentError(
            f"speculative_config: method 'mtp': expected one prediction layer, got {len(behind)} in {name}; leave "
            "speculative_config out"
        )
    return {each: each for each in names if each.startswith(f"model.layers.{num_layers}.")}


def _flat(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a head; speculators keeps those of its layer apart."""
    inner = content.get("transformer_layer_config")
    flat = {**content, **inner} if isinstance(inner, dict) else dict(content)
    flat.pop("transformer_layer_config", None)
    flat.pop("architectures", None)
    flat.pop("model_type", None)
    return flat


def _captured_layers(content: dict[str, Any], target: LoadedModel) -> tuple[int, ...]:
    """Returns which hidden states a head was trained with.

    At the top they are counted as vLLM does, by the layer that reads them; in ``eagle_config`` as SGLang does, by the
    layer that returns them.
    """
    num_layers = target.config.get_text_config().num_hidden_layers
    nested = content.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    if nested.get("use_aux_hidden_state", True) is not True:
        raise UnsupportedArgumentError(
            "speculative_config: model: expected an EAGLE-3 head of three hidden states, got one with "
            "use_aux_hidden_state false; choose another head"
        )
    given = content.get(LAYER_IDS)
    if given is None and nested.get(LAYER_IDS) is not None:
        given = [number + 1 for number in nested[LAYER_IDS] if type(number) is int]
    layers = (2, num_layers // 2, num_layers - 3) if given is None else tuple(given)
    if len(layers) != NUM_HIDDEN or any(type(each) is not int or not 0 <= each < num_layers for each in layers):
        source = "by default" if given is None else f"in {LAYER_IDS}"
        raise InvalidArgumentError(
            f"speculative_config: model: expected {NUM_HIDDEN} hidden states of a model of {num_layers} layers, each "
            f"from 0 to {num_layers - 1}, got {list(layers)} {source}; choose the head of this model"
        )
    return layers


def _eagle3_name(name: str) -> str:
    """Returns the head's name of a tensor in a file: that of EAGLE, of SGLang or of speculators."""
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _check_eagle3(name: str, names: set[str]) -> None:
    needed = {"fc.weight", "lm_head.weight", "norm.weight", "midlayer.hidden_norm.weight"}
    if missing := sorted(needed - names):
        raise CheckpointError(
            f"{name}: expected an EAGLE-3 head, whose tensors have {some(tuple(sorted(needed)), 4)}, missing "
            f"{', '.join(missing)}; give the folder of a head, or get its files again"
        )


def _check_target(name: str, config: Any, entries: Mapping[str, Any], target: LoadedModel) -> None:
    """Raises InvalidArgumentError if a head is of another model."""
    theirs = target.config.get_text_config()
    width = tuple(entries["fc.weight"].shape)[-1]
    if width != NUM_HIDDEN * theirs.hidden_size:
        raise InvalidArgumentError(
            f"speculative_config: model: expected a head of {NUM_HIDDEN} hidden states of {theirs.hidden_size} "
            f"columns, the served model's, got fc with {width} from {name}; choose the head of this model"
        )
    config.target_hidden_size = theirs.hidden_size
    if config.vocab_size != theirs.vocab_size:
        raise InvalidArgumentError(
            f"speculative_config: model: expected the vocabulary of the served model, {theirs.vocab_size} tokens, got "
            f"another of {config.vocab_size} tokens from {name}; choose the head of this model"
        )
    if "embed_tokens.weight" not in entries and config.hidden_size != theirs.hidden_size:
        raise InvalidArgumentError(
            f"speculative_config: model: expected a head with embed_tokens, or of the served model's "
            f"{theirs.hidden_size} columns to share its own, got {config.hidden_size} from {name}; choose another head"
        )


def _shape(checkpoint: Checkpoint, names: Mapping[str, str], wanted: str) -> tuple[int, ...]:
    return next(tuple(checkpoint.entries[name].shape) for name, own in names.items() if own == wanted)


def _tensor_name(module: PreTrainedModel, which: str) -> str:
    """Returns the name of a model's embedding or head matrix."""
    part: Any = module.get_input_embeddings() if which == "embedding" else module.get_output_embeddings()
    for name, each in module.named_modules():
        if each is part and part is not None:
            return f"{name}.weight"
    raise UnsupportedArgumentError(
        f"speculative_config: expected a model whose {which} can be shared with a draft head, got "
        f"{type(module).__name__}, which names none; leave speculative_config out"
    )


def _kv_shape(config: Any, sharding: ModelSharding | None) -> tuple[int, int]:
    """Returns heads and width of keys and values; a mesh may repeat heads."""
    num_heads = int(config.num_key_value_heads or config.num_attention_heads)
    if sharding is not None:
        num_heads = sharding.config_values.get("num_key_value_heads", num_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return num_heads, 2 * int(head_dim)


class _Read:
    """Reads the tensors of one head by transformers' loader, in the model's dtype."""

    def __init__(
        self,
        head_class: type[PreTrainedModel],
        config: Any,
        name: str,
        checkpoint: AnyCheckpoint,
        target: LoadedModel,
        shared: Mapping[str, str],
        refuse_uneven: bool,
    ) -> None:
        self._class, self._config, self._name, self._checkpoint = head_class, config, name, checkpoint
        self._dtype: torch.dtype = getattr(torch, str(target.dtype))
        self._shared, self._sharding = shared, None
        if target.sharding is not None:
            empty = module_of(head_class, config, self._dtype)
            model_type = target.config.get_text_config(decoder=True).model_type
            self._sharding = head_sharding(empty, target.sharding, model_type, shared, refuse_uneven=refuse_uneven)

    def tensors(self, names: Mapping[str, str]) -> tuple[ModelProgram, dict[str, Weight]]:
        """Returns the forward of the head, and its own weights, all of which are in the files.

        Args:
            names: Names in the files, and those of the head.

        Raises:
            CheckpointError: tensors are missing, have no place, or are of other shapes.
        """
        put = None if self._sharding is None else self._sharding.put
        place = DevicePlacement(put, stored=StoredWeights(self._sharding, False))
        sink = WeightSink(place, PeakMemory(), names.values())
        with self._checkpoint.readers(lambda num_bytes: None) as readers, sink.hooked():
            state = {own: readers[name] for name, own in names.items() if name in readers}
            module = self._from_pretrained(state)
        match = TensorMatch.of(module, sink.taken())
        if match.faults or match.unused:
            raise match.error(self._name)
        missing = tuple(name for name in match.missing if name not in self._shared)
        if missing:
            raise CheckpointError(
                f"{self._name}: expected all tensors of the draft head, {len(missing)} missing: {some(missing)}; get "
                "its files again"
            )
        weights = harvest(module, place, sink)
        for name in self._shared:  # transformers has drawn values for it
            weights.pop(name, None)
        return ModelProgram(module, self._sharding), weights

    def _from_pretrained(self, state: dict[str, Any]) -> PreTrainedModel:
        try:
            made: Any = self._class.from_pretrained
            return made(None, config=self._config, state_dict=state, dtype=self._dtype)
        except (TorchaxServeError, MemoryError):
            raise
        except Exception as error:  # model code meets a configuration that it was not written for
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise CheckpointError(
                f"{self._name}: the draft head cannot be built ({type(error).__name__}: {lines[0]}): check config.json"
            ) from error

    def token_ids(self, names: Mapping[str, str]) -> jax.Array:
        """Returns the token of each column of the head's logits, int32[columns].

        Raises:
            CheckpointError: ``d2t`` is of another size, leaves the vocabulary, or contradicts ``t2d``.
        """
        by_name = {own: name for name, own in names.items()}
        with self._checkpoint.readers(lambda num_bytes: None) as readers:
            offsets = np.asarray(readers[by_name["d2t"]][...])
            known = np.asarray(readers[by_name["t2d"]][...]) if "t2d" in by_name else None
        columns, vocab = self._config.draft_vocab_size, self._config.vocab_size
        ids = np.arange(len(offsets)) + offsets
        agrees = known is None or (len(known) == vocab and set(np.flatnonzero(known)) == set(ids.tolist()))
        if len(offsets) != columns or len(set(ids.tolist())) != columns or ids.min() < 0 or ids.max() >= vocab:
            raise CheckpointError(
                f"{self._name}: expected d2t to name {columns} of {vocab} tokens, one for each column of lm_head, got "
                f"{len(offsets)} offsets to tokens {ids.min()} to {ids.max()}; get the head's files again"
            )
        if not agrees:
            raise CheckpointError(
                f"{self._name}: expected t2d to mark the tokens of d2t, got others; get the head's files again"
            )
        return jax.device_put(ids.astype(np.int32), None if self._sharding is None else self._sharding.replicated())
