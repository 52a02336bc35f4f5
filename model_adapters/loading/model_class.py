"""Configurations and model classes from the ``config.json`` of a folder.

The classes are those of transformers or of the repository.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from model_adapters.errors import CheckpointError, InvalidArgumentError, UnsupportedModelError
from model_adapters.program.trace_context import trace_lock

_CAUSAL = dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_IMAGE_TEXT = dict(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)

_CODE = re.compile(r"(?:[\w.-]+/[\w.-]+--)?[\w-]+\.\w+")  # possibly in another repository of the hub
_FILES_WITH_CODE = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")

# what a class is for, by the mapping of transformers that lists it; the first that does decides
_TASKS: dict[str, str] = {
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "a sequence-to-sequence model (encoder and decoder)",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES": "a speech-to-text model",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": "a model of images and text",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES": "a model of several modalities",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "an encoder that fills in masked words",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "a text classifier",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "a token classifier",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": "a model that marks answers in a text",
    "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES": "a multiple-choice model",
    "MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES": "a next-sentence classifier",
    "MODEL_FOR_CTC_MAPPING_NAMES": "a speech recogniser (CTC)",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES": "an audio classifier",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "an image classifier",
    "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES": "a text-to-audio model",
    "MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES": "a text-to-speech model",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES": "a model with the heads of its pre-training",
    "MODEL_MAPPING_NAMES": "a base model without a language-model head",
}


def _class_names(mapping: Mapping[str, Any]) -> set[str]:
    return {name for value in mapping.values() for name in (value if isinstance(value, tuple | list) else (value,))}


def read_config_json(file: Path) -> dict[str, Any]:
    """Returns the object in a ``config.json``; raises `CheckpointError` where there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        adapter = (file.parent / "adapter_config.json").is_file()
        remedy = (
            "it holds an adapter: merge it into its base model (peft's merge_and_unload) and save that"
            if adapter
            else "give the folder that save_pretrained wrote or a hub download made"
        )
        if file.is_symlink():
            remedy = "it links to a file that is gone; download the model again"
        raise CheckpointError(f"{file.parent} holds no {file.name}, so it is not a model folder: {remedy}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable as JSON ({error}): get the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds {type(content).__name__}, expected a JSON object: get the file again")
    return content


def _refuse_what_is_not_honoured(content: Mapping[str, Any], file: Path, *, allow_quantized: bool) -> None:
    for name in () if allow_quantized else ("quantization_config", "compression_config"):
        settings = content.get(name)
        if settings:
            method = settings.get("quant_method", "unnamed method") if isinstance(settings, dict) else settings
            raise UnsupportedModelError(
                f"{file} asks for quantized weights ({name}: {method}), which are not supported: "
                "use the unquantized checkpoint of this model"
            )
    if (file.parent / "adapter_config.json").is_file():
        raise UnsupportedModelError(
            f"{file.parent} holds an adapter beside the model (adapter_config.json), which would not be applied: "
            "merge it (peft's merge_and_unload) or remove that file"
        )


def load_config(file: Path, *, trust_remote_code: bool, allow_quantized: bool = False) -> PreTrainedConfig:
    """Returns the configuration in `file` (a ``config.json`` by whatever name).

    With `allow_quantized` what it says about quantization is taken off: the caller reads the weights by it.

    Raises:
        CheckpointError: not readable, or with values that its class refuses.
        UnsupportedModelError: an architecture that transformers does not know, quantized weights, or code of its own
            without `trust_remote_code`.
    """
    content = read_config_json(file)
    _refuse_what_is_not_honoured(content, file, allow_quantized=allow_quantized)
    auto_map = content.get("auto_map")
    auto_map = auto_map if isinstance(auto_map, dict) else {}
    if trust_remote_code:
        _check_code_paths(file)
    model_type = content.get("model_type")
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    if not known and "AutoConfig" in auto_map:
        if not trust_remote_code:
            raise UnsupportedModelError(
                f"{file.parent} brings code of its own (auto_map: {auto_map['AutoConfig']}): "
                "read it, then pass trust_remote_code=True to run it"
            )
    elif not known:
        config_class = _config_class_of(content.get("architectures"))
        if config_class is None:
            raise UnsupportedModelError(
                f"transformers {transformers.__version__} does not know the architecture of {file} "
                f"(model_type {model_type!r}, architectures {content.get('architectures')!r}): "
                "install a transformers that has it, or correct the file"
            )
        return _made(lambda: config_class.from_dict(content), file)
    # a file by another name than config.json can be given as itself, code of the repository needs the folder
    where = file.parent if trust_remote_code and "AutoConfig" in auto_map else file
    return _made(
        lambda: AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code, local_files_only=True), file
    )


def _config_class_of(architectures: Any) -> type[PreTrainedConfig] | None:
    """Returns the configuration class of the first architecture; None if unknown.

    For files that name no model type.
    """
    name = _first_name(architectures)
    model_class = getattr(transformers, name, None) if name else None
    return getattr(model_class, "config_class", None)


def _first_name(architectures: Any) -> str | None:
    """Returns the first of the class names that a configuration lists; None if there is none.

    Some configurations have a string in place of a list.
    """
    if isinstance(architectures, str):
        return architectures or None
    first = architectures[0] if isinstance(architectures, list | tuple) and architectures else None
    return first if isinstance(first, str) else None


def _made(make: Any, file: Path) -> PreTrainedConfig:
    try:
        config = make()
        for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
            for name in ("quantization_config", "compression_config"):
                if isinstance(part, PreTrainedConfig) and hasattr(part, name):
                    delattr(part, name)
        if "flash" in str(config._attn_implementation):  # an extension for CUDA; attention here runs on JAX
            config._attn_implementation = None
        return config
    except Exception as error:  # configuration classes check their values with whatever exception they like
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise CheckpointError(f"{file} has values that its architecture refuses ({' '.join(lines[:3])})") from error


def find_class(
    config: PreTrainedConfig, *, folder: Path | None, trust_remote_code: bool
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Returns the model class of `config` and the (sub-)configuration that it takes.

    In this order: the repository's own class (only with `trust_remote_code`), the class that ``config.architectures``
    names, the class that ``AutoModelForImageTextToText`` has for the model type, that of ``AutoModelForCausalLM``, the
    one that ``AutoModel`` has. Types such as BERT, which have a causal class as well, are encoders unless their
    configuration says ``is_decoder``.

    Raises:
        UnsupportedModelError: none of these, or the class is the repository's own and `trust_remote_code` is False.
    """
    auto_map = getattr(config, "auto_map", None) or {}
    name = _first_name(getattr(config, "architectures", None))
    reference = auto_map.get("AutoModelForCausalLM") or auto_map.get("AutoModel")
    if reference and trust_remote_code and folder is not None:
        remote = get_class_from_dynamic_module(reference, folder, local_files_only=True)
        remote.register_for_auto_class("AutoModelForCausalLM")  # type: ignore[attr-defined]
        return add_generation_mixin_to_remote_model(remote), config
    native = getattr(transformers, name, None) if name else None
    if isinstance(native, type) and issubclass(native, PreTrainedModel):
        return native, _config_for(native, config)
    if name and "For" not in name and not name.endswith("LMHeadModel") and not reference:
        name = None  # it says no task, such as HF_ColBERT over bert
    # a name of somebody's own over a type that transformers has: AutoModelForCausalLM, too, goes by the type then
    causal_by_name = name is None or name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
    sees_images = name is None or name.endswith("ForConditionalGeneration")
    mapping = {**_CAUSAL, **(_IMAGE_TEXT if sees_images else {})}
    by_type: Any = mapping.get(config.model_type) if causal_by_name else None
    if by_type is None and name is None:
        by_type = modeling_auto.MODEL_MAPPING_NAMES.get(config.model_type)
    if by_type is not None:
        found = getattr(transformers, by_type if isinstance(by_type, str) else by_type[0])
        return found, _config_for(found, config)
    if reference:
        raise UnsupportedModelError(
            f"{config.model_type!r} brings model code of its own (auto_map: {reference}): "
            "read it, then pass trust_remote_code=True to run it"
        )
    raise UnsupportedModelError(
        f"transformers {transformers.__version__} has no class {name!r} for model type {config.model_type!r}: "
        "install a transformers that has it, or correct `architectures` in config.json"
    )


def _check_code_paths(file: Path) -> None:
    """Raises CheckpointError for a reference to code outside of the folder of `file`.

    Valid references are ``module.Class``. transformers joins the first part to the folder as a path, and would follow
    one that leads out of it.
    """
    for each in (file, *(file.with_name(name) for name in _FILES_WITH_CODE)):
        auto_map = read_config_json(each).get("auto_map") if each.is_file() else None
        if not isinstance(auto_map, dict):
            continue
        for value in auto_map.values():
            for reference in value if isinstance(value, list) else [value]:
                if reference is not None and not (isinstance(reference, str) and _CODE.fullmatch(reference)):
                    raise CheckpointError(
                        f"{each}: auto_map names {reference!r}, expected module.Class in a file of the same folder: "
                        "do not trust this checkpoint"
                    )


def _config_for(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the text part of a composite configuration for the text model's class.

    For any other class the configuration is returned.
    """
    text_class: Any = config.sub_configs.get("text_config")
    if text_class and model_class.config_class is text_class and type(config) is not text_class:
        return config.get_text_config()
    return config


def module_of(model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a `model_class` module on the meta device.

    Raises CheckpointError if the code of the class does not accept `config`.
    """
    try:
        with trace_lock(), torch.device("meta"):  # transformers sets the default dtype of all threads
            module = model_class._from_config(config, dtype=dtype)
    except Exception as error:  # code of an architecture meets a configuration it was not written for
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{model_class.__name__} cannot be built from its configuration ({type(error).__name__}: {lines[0]}): "
            "check config.json"
        ) from error
    return module.eval()


def torch_dtype_of(dtype: Any) -> torch.dtype | None:
    """Returns the torch dtype of a caller's `dtype`; None for ``"auto"``.

    Raises `InvalidArgumentError`.
    """
    if isinstance(dtype, str) and dtype == "auto":
        return None
    aliases = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}
    name = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", dtype)).removeprefix("torch.")
    found = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}.get(
        aliases.get(name, name)
    )
    if found is None:
        raise InvalidArgumentError(f"dtype is {dtype!r}, expected 'auto', 'bfloat16', 'float16' or 'float32'")
    return found


def task_of(module: PreTrainedModel) -> str | None:
    """Returns a description of the model's task; None for a causal language model."""
    name = type(module).__name__
    if name in _class_names(_CAUSAL) and not getattr(module.config, "is_encoder_decoder", False):
        return None
    for mapping, task in _TASKS.items():
        if name in _class_names(getattr(modeling_auto, mapping, {})):
            return task
    if module.can_generate() and not getattr(module.config, "is_encoder_decoder", False):
        return None  # code of somebody's own that knows how to generate
    return "not a causal language model"


def require_causal_module(module: PreTrainedModel, name: str, lack: str = "") -> None:
    """Raises `UnsupportedModelError` unless the module is a causal language model.

    The error says what the model is for. `lack` names what its files lack (`LoadReport.lack`).
    """
    task = task_of(module)
    if task is None:
        return
    causal = _CAUSAL.get(module.config.model_type)
    hint = f"; {causal} is its causal sibling" if isinstance(causal, str) and causal != type(module).__name__ else ""
    raise UnsupportedModelError(
        f"{name} cannot generate text token by token: {type(module).__name__} is {task}{hint}. "
        f"Expected a causal language model (…ForCausalLM){lack}"
    )
