"""Compiled forward with transformers' arguments and outputs.

Changes of the model take effect before the forward runs.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import torch
from transformers.utils import ModelOutput

from model_adapters.bridge.views import named_tensors
from model_adapters.caches.device_cache import DeviceCache
from model_adapters.errors import TorchaxServeError
from model_adapters.jax_settings import programs_run
from model_adapters.program.call_signature import CallSignature, TensorOutput, cache_field_of, keeps_cache_with_labels
from model_adapters.program.model_program import CallSpec
from torchax_serve.multimodal.mrope_positions import positions_on_host
from torchax_serve.runtime.call_arguments import all_on_host, check_surroundings
from torchax_serve.runtime.eager import raise_for_call
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.runtime.module_changes import check_evaluates

FLAGS = ("output_hidden_states", "output_attentions")
FOLLOWED: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar("followed", default=frozenset())
"""Ids of the runtimes whose modules were checked for changes at the start of the present call."""


@contextlib.contextmanager
def following(runtime: ModelRuntime) -> Iterator[None]:
    """Applies changes of the model at the start of a call; nested calls of it skip that."""
    runtime.process.check()  # before any lock, which a thread of the parent may have held at the fork
    before = FOLLOWED.get()
    if id(runtime) in before:
        yield
        return
    with programs_run():
        if not runtime.weights:  # freed by `close`: an object has its own tensors, and runs on JAX again
            if any(tensor.is_meta for tensor in named_tensors(runtime.program.module).values()):
                raise TorchaxServeError("expected a model that is served, this one was closed; call serve() again")
            runtime.refresh()
        check_surroundings()
        runtime.follow_module()
        check_evaluates(runtime.program.module)
        token = FOLLOWED.set(before | {id(runtime)})
        try:
            yield
        finally:
            FOLLOWED.reset(token)


def call_forward(model: Any, given: dict[str, Any]) -> ModelOutput | tuple[Any, ...] | torch.Tensor:
    """Runs the forward of a model on JAX.

    Args:
        model: a `torchax_serve.generation.jax_model.JaxModelMixin`.
        given: arguments by name, torch tensors on the CPU among them.
    """
    with following(model._jax_runtime):
        return _forward_followed(model, all_on_host(given))


def _forward_followed(model: Any, given: dict[str, Any]) -> ModelOutput | tuple[Any, ...] | torch.Tensor:
    runtime: ModelRuntime = model._jax_runtime
    cache_name = runtime.program.cache_name
    original = {name: value for name, value in given.items() if not isinstance(value, DeviceCache)}
    return_dict = given.pop("return_dict", model.config.return_dict)
    use_cache = given.pop("use_cache", getattr(runtime.text_config, "use_cache", False))
    if (cache_name is None or runtime.cache_support.uses_native_cache) and runtime.program.accepts("use_cache"):
        given["use_cache"] = bool(use_cache)  # its state goes through arguments and output fields
    cache = given.pop(cache_name, None) if cache_name is not None else None
    if cache_name is not None and runtime.cache_support.uses_native_cache:
        if cache is not None and jax.tree.leaves(cache):
            given[cache_name] = cache  # an empty one is made by the model's code
        cache = None
    shifted = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    has_cache = _returns_cache(type(model)._torch_class.forward, runtime.program.names, shifted, given)
    if cache is None and use_cache and runtime.cache_support.is_supported and has_cache:
        cache = runtime.cache_support.new(1)
    if (positions := positions_on_host(model, given, cache)) is not None:
        given["position_ids"] = positions
    hidden, attentions = (bool(given.pop(flag, getattr(model.config, flag, False))) for flag in FLAGS)
    spec = CallSpec(output_hidden_states=hidden, output_attentions=attentions)
    try:
        fields = runtime.forward(given, spec, cache)
    except Exception as error:
        # A first call, with the arguments that PyTorch would get.
        is_first = not isinstance(cache, DeviceCache) or not cache.length
        is_repeatable = is_first and not runtime.watch.hooked
        raise_for_call(runtime, type(model)._torch_class, original, error, is_repeatable=is_repeatable)
        raise
    output_class = runtime.program.output_class
    if output_class is TensorOutput:
        return fields["tensor"]
    field = cache_field_of(output_class)
    if cache is not None and field is not None:
        fields[field] = cache
    output = output_class(**fields)
    return output if return_dict else output.to_tuple()


def _returns_cache(forward: Any, names: CallSignature, shifted: Any, given: dict[str, Any]) -> bool:
    """Tells whether PyTorch returns a cache for these arguments, of which labels may be one.

    A decoder behind an encoder gets its tokens from the labels here, by `shifted`, where its forward would make them.
    """
    if given.get("labels") is None:
        return True
    if not keeps_cache_with_labels(forward):
        return False
    if all(given.get(name) is None for name in (names.ids, names.embeds)) and names.has_encoder:
        if shifted is None:
            return False
        given[names.ids] = shifted(labels=given["labels"])
    return True
