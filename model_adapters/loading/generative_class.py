"""Classes with a head for checkpoints of base models, ``architectures: ["BartModel"]``.

To generate with such a checkpoint, users name the class with a head (``AutoModelForSeq2SeqLM``), whose weights are
those of the token embedding. The same is made here of a model that is loaded already, over the same arrays.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import transformers
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from model_adapters.bridge.views import named_tensors
from model_adapters.errors import UnsupportedModelError
from model_adapters.loading.load_report import some
from model_adapters.loading.loaded_model import LoadedModel
from model_adapters.loading.loader import generation_config_of
from model_adapters.loading.model_class import module_of
from model_adapters.ops.compressed_weight import Weight

_ZERO_AT_FIRST = "final_logits_bias"
"""A buffer of BART and similar models, zeros by their classes and not in base checkpoints."""


def generative_class(module: PreTrainedModel) -> type[PreTrainedModel] | None:
    """Returns the class with which transformers generates for the base model `module`.

    The class is that of transformers' Auto classes. None if there is none.
    """
    config = module.config
    causal, seq2seq = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )
    names: Any = (seq2seq if config.is_encoder_decoder else causal).get(config.model_type)
    base = modeling_auto.MODEL_MAPPING_NAMES.get(config.model_type)
    if names is None or type(module).__name__ not in (base if isinstance(base, tuple | list) else (base,)):
        return None
    found: type[PreTrainedModel] = getattr(transformers, names if isinstance(names, str) else names[0])
    return found if found.can_generate() else None


def with_head(loaded: LoadedModel) -> tuple[PreTrainedModel, dict[str, Weight]]:
    """Returns a generating module on the meta device for a base model, and its weights.

    None of the weights is new.

    Raises:
        UnsupportedModelError: its type has no such class, or the head has weights that the checkpoint does not hold.
    """
    module, held = loaded.module, loaded.weights
    head_class = generative_class(module)
    if head_class is None or loaded.sharding is not None:
        on_devices = "" if head_class is None else f", on one device as {head_class.__name__}"
        raise UnsupportedModelError(
            f"{type(module).__name__} does not generate text{loaded.report.lack}; embed() gives embeddings of texts, "
            f"and the model can be called on its inputs{on_devices}"
        )
    head = module_of(head_class, module.config, module.dtype)
    tensors, prefix = named_tensors(head), f"{head_class.base_model_prefix}."
    weights: dict[str, Weight] = {}
    by_tensor: dict[int, Weight] = {}
    for name, tensor in tensors.items():
        array = held.get(name.removeprefix(prefix), held.get(name))
        if array is not None:
            weights[name] = by_tensor[id(tensor)] = array
    for name, tensor in tensors.items():
        if name not in weights and id(tensor) in by_tensor:  # tied
            weights[name] = by_tensor[id(tensor)]
        elif name == _ZERO_AT_FIRST:
            weights[name] = jnp.zeros(tuple(tensor.shape), jnp.float32)
    if missing := sorted(tensors.keys() - weights.keys()):
        raise UnsupportedModelError(
            f"{type(module).__name__} does not generate text, as {head_class.__name__} would; its files lack "
            f"{some(missing, 3)}: embed() gives embeddings of texts, and the model can be called on its inputs; to "
            "generate, get a checkpoint with a head"
        )
    head.generation_config = _settings(loaded, head)
    return head, weights


def _settings(loaded: LoadedModel, head: PreTrainedModel) -> GenerationConfig:
    folder = loaded.source.folder
    return head.generation_config if folder is None else generation_config_of(folder, head)
