"""Weights of a model that the caller has loaded, as JAX arrays over the same memory."""

from __future__ import annotations

import time
from typing import Any

from jax.sharding import Mesh
from transformers import PreTrainedModel

from model_adapters.bridge.host_arrays import check_floats
from model_adapters.bridge.views import named_tensors
from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.loading.loaded_model import LoadedModel, numpy_dtype, report_of
from model_adapters.loading.memory import PeakMemory
from model_adapters.loading.model_source import of_object
from model_adapters.loading.weight_sink import DevicePlacement, DevicePut
from model_adapters.ops.compressed_weight import Weight
from model_adapters.ops.memory_layout import experts_by_output
from model_adapters.quantization.loading import WeightQuantizer
from model_adapters.quantization.rules import QuantizationRules
from model_adapters.quantization.selection import Selection
from model_adapters.sharding.model_sharding import ModelSharding


def without_adapters(model: Any) -> Any:
    """Returns the model inside a ``PeftModel``; anything else is returned unchanged.

    So is a model with learned prompts.
    """
    if not callable(getattr(model, "get_base_model", None)) or model.active_peft_config.is_prompt_learning:
        return model
    inner = model.get_base_model()
    return inner if isinstance(inner, PreTrainedModel) else model


def share_weights(
    module: PreTrainedModel,
    *,
    device_put: DevicePut | None,
    mesh: Mesh | None,
    refuse_uneven: bool,
    rules: QuantizationRules | None = None,
) -> LoadedModel:
    """Returns a model that the caller has loaded, with its weights as JAX arrays.

    The arrays are over the same memory where that is possible.

    Args:
        module: The model, in main memory; it is put into eval mode.
        rules: Which weights are quantized: those are copies, next to the module's own; the others share memory.
        device_put, mesh, refuse_uneven: As in `model_adapters.loading.loader.load_model`.

    Raises:
        UnsupportedModelError: the model is quantized.
        InvalidArgumentError: its tensors are not in main memory, or its rules do not fit `mesh`.
    """
    sharding = None if mesh is None else ModelSharding.of(module, mesh, refuse_uneven=refuse_uneven)
    if getattr(module, "is_quantized", False) or getattr(module, "hf_quantizer", None) is not None:
        raise UnsupportedModelError(
            f"the {type(module).__name__} that was passed is quantized, which is not supported: load it unquantized"
        )
    elsewhere = {str(t.device) for t in named_tensors(module).values() if t.device.type != "cpu"}
    if elsewhere:
        raise InvalidArgumentError(
            f"the {type(module).__name__} that was passed is on {', '.join(sorted(elsewhere))}, expected the CPU: "
            "call model.cpu() first (a model on the meta device has no weights to share)"
        )
    check_floats(module)
    selection = None if rules is None else Selection.of(module, rules)
    quantizer = None if selection is None else WeightQuantizer(selection, sharding)
    put = device_put if sharding is None else sharding.put
    place = DevicePlacement(put, quantizer, experts=experts_by_output(module))
    peak, start = PeakMemory(), time.perf_counter()
    module.eval()
    arrays: dict[int, Weight] = {}
    weights: dict[str, Weight] = {}
    for name, tensor in named_tensors(module).items():
        if id(tensor) not in arrays:
            arrays[id(tensor)] = place(name, tensor)
        weights[name] = arrays[id(tensor)]
    source = of_object(module.name_or_path or "")
    report = report_of(weights, peak, source, time.perf_counter() - start, None, quantizer=quantizer)
    generation = module.generation_config if module.can_generate() else None
    dtype = numpy_dtype(module.dtype)
    return LoadedModel(module, weights, source, module.config, generation, dtype, report, sharding=sharding)
