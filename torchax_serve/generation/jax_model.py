"""`to_jax`: an existing model object whose ``forward`` and ``generate`` run on JAX.

The object's class is replaced by a subclass of itself. ``generate`` stays transformers' own, with its preparations and
checks; only the cache, the forward and the sampling loop are replaced. So signature, defaults, errors and return types
are those of transformers by construction.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
)
from transformers.generation.stopping_criteria import StoppingCriteriaList

from model_adapters.bridge.extract import extract_jax
from model_adapters.bridge.host_arrays import check_floats
from model_adapters.bridge.views import in_torch_mode
from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from model_adapters.once import once
from model_adapters.program.call_signature import (
    PATCHED,
    TORCH_CLASS,
    forward_of,
    generate_cache_name,
    with_cache_named,
)
from model_adapters.program.module_watch import PREPARES
from model_adapters.quantization.loading import quantize_weights
from model_adapters.quantization.rules import parse_rules
from torchax_serve.generation.jax_forward import call_forward, following
from torchax_serve.generation.model_copies import state_to_copy, torch_state
from torchax_serve.generation.sample_call import CUSTOM, SampleCall, StaticBatchStart, static_batch_start
from torchax_serve.generation.static_batch import StaticBatchLoop
from torchax_serve.generation.submodule_overrides import compile_submodules, reject_generators
from torchax_serve.generation.whisper_fallback import WhisperFallback
from torchax_serve.multimodal.encoder_programs import compiled_encoders
from torchax_serve.multimodal.placeholders import check_has_media
from torchax_serve.runtime.call_arguments import all_on_host, on_host
from torchax_serve.runtime.capabilities import as_transformers_output
from torchax_serve.runtime.compiled_encoder import CompiledEncoder
from torchax_serve.runtime.model_generate import absorb_processors, without_model_options
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.runtime.padding import check_rows

# Values of cache_implementation that mean the cache on the device. Checkpoints still have the last names.
_CACHES_ON_DEVICE = (None, "dynamic", "static", "hybrid", "hybrid_chunked", "sliding_window")


def model_to_jax(model: PreTrainedModel, *, quantization: Any = None) -> PreTrainedModel:
    """Makes a model of transformers run on JAX and returns it; see `torchax_serve.to_jax`.

    Args:
        model: a model of transformers, or a ``PeftModel`` around one.
        quantization: preset, file or list of rules.

    Raises:
        InvalidArgumentError: `model` is neither, or is on another device than the CPU; rules that do not fit it.
        UnsupportedModelError: weights in float64.
    """
    if not isinstance(model, PreTrainedModel):
        return _unwrapped_to_jax(model, quantization)
    rules = parse_rules(quantization)
    if isinstance(model, JaxModelMixin):
        if rules is not None:
            raise InvalidArgumentError(
                "quantization: expected a model in PyTorch, got one that runs on JAX already; load it anew"
            )
        return model
    if model.device.type != "cpu":
        raise InvalidArgumentError(
            f'expected a model on the CPU, got one on {model.device}; call model.to("cpu") first'
        )
    check_floats(model)
    model.eval()
    weights, _ = extract_jax(model)
    if rules is not None:
        quantize_weights(model, weights, rules)
    return run_on_jax(model, ModelRuntime(model, weights))


def _unwrapped_to_jax(model: Any, quantization: Any) -> Any:
    """Makes the model inside a peft wrapper run on JAX; returns the wrapper.

    Raises:
        InvalidArgumentError: `model` is no such wrapper.
    """
    if hasattr(type(model), "torch_model") or "torch_model" in getattr(model, "__dict__", {}):
        raise InvalidArgumentError(
            f"expected a transformers PreTrainedModel, got a {type(model).__name__}, which runs on JAX already; use it "
            "as it is, or its torch_model"
        )
    get_base_model = getattr(model, "get_base_model", None)
    inner: Any = get_base_model() if callable(get_base_model) else None
    if not isinstance(inner, PreTrainedModel):
        raise InvalidArgumentError(
            f"expected a transformers PreTrainedModel, got {type(model).__name__}; load one first"
        )
    model.eval()
    model_to_jax(inner, quantization=quantization)
    return model


def run_on_jax(model: PreTrainedModel, runtime: ModelRuntime) -> PreTrainedModel:
    """Gives `model` the class whose forward and generation are run by `runtime`."""
    if not isinstance(model, JaxModelMixin):
        if (patched := vars(model).pop("forward", None)) is not None:  # a script has replaced the forward
            vars(model)[PATCHED] = patched
            runtime.follow_module()
        compile_submodules(model, runtime.call_method)
        model.__class__ = _jax_class(type(model))
    vars(model)["_jax_runtime"] = runtime
    runtime.watch.take()
    return model


class JaxModelMixin:
    """Mixin in front of a transformers class; see `model_to_jax`."""

    _jax_runtime: ModelRuntime
    _engine_rows: Any = None
    """`EngineRows`, which run loops over tokens on an engine, set by `ServedModel`; transformers reads annotations."""

    @property
    def device(self) -> torch.device:
        """Device of the callers' tensors: the CPU, wherever the weights are."""
        device = super().device  # type: ignore[misc]
        return device if device.type != "meta" and in_torch_mode() else torch.device("cpu")

    @torch.compiler.disable  # compiled already
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's hooks and forward, as torch does."""
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Checks the prompt and calls transformers' ``generate``."""
        runtime = self._jax_runtime
        if in_torch_mode():
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        with following(runtime):
            return self._generate(args, kwargs)

    def _generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reject_generators(kwargs)
        args = tuple(on_host("inputs", value) for value in args)
        kwargs = all_on_host(kwargs)
        given = inspect.signature(GenerationMixin.generate).bind(self, *args, **kwargs).arguments
        custom = given.get("custom_generate")
        if not (custom is None or isinstance(custom, str) or callable(custom)):
            raise InvalidArgumentError(
                f"custom_generate: expected a folder or hub id as a string, or a function, got {custom!r}; "
                "of a path, pass str(path)"
            )
        prompt = given.get("inputs")
        ids = kwargs.get("input_ids") if prompt is None else prompt
        if not self._jax_runtime.program.names.has_encoder:  # an encoder checks its own tokens
            self._jax_runtime.limits.check_prompt(ids)
        check_has_media(self._jax_runtime.config, ids, [name for name, value in kwargs.items() if value is not None])
        if (mask := kwargs.get("attention_mask")) is not None and mask.numel():
            check_rows(mask)
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Raises UnsupportedArgumentError; transformers' ``generate_batch`` begins with it."""
        raise UnsupportedArgumentError(
            "generate_batch or cache_implementation='paged' (continuous batching of transformers): expected generate, "
            "since that batching has a cache and attention of PyTorch's own; serve(model).generate_batch batches "
            "continuously on JAX"
        )

    def refresh(self) -> None:
        """Recompiles programs and copies arrays again, for changes that no call detects.

        An example is a change of globals that model code reads.
        """
        self._jax_runtime.refresh()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns torch's ``state_dict``, with values copied from the device if only it has them."""
        state = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        if in_torch_mode() or (values := torch_state(self)) is None:
            return state
        prefix = kwargs.get("prefix", "")
        for name in state:
            state[name] = values.get(name.removeprefix(prefix), state[name])
        return state

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (type(self)._torch_class,), state_to_copy(self)  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        weights, _ = extract_jax(self)  # type: ignore[arg-type]
        run_on_jax(self, ModelRuntime(self, weights))  # type: ignore[arg-type]

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        """Returns transformers' encoder; outside a trace its forward runs on JAX, too."""
        encoder = super().get_encoder(*args, **kwargs)  # type: ignore[misc]
        if encoder is self or in_torch_mode() or "_jax_runtime" not in vars(self):  # a copy gets its runtime at the end
            return encoder
        return CompiledEncoder(self._jax_runtime, encoder)

    def load_custom_generate(
        self, pretrained_model_name_or_path: str | None = None, trust_remote_code: bool | None = None, **kwargs: Any
    ) -> Any:
        """Loads generation code.

        It raises where transformers would ask on the terminal whether to trust the code.
        """
        if not trust_remote_code:
            raise UnsupportedArgumentError(
                f"custom_generate={pretrained_model_name_or_path!r} would run Python code of that repository: read it, "
                "then pass trust_remote_code=True with it"
            )
        return super().load_custom_generate(  # type: ignore[misc]
            pretrained_model_name_or_path, trust_remote_code=trust_remote_code, **kwargs
        )

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        runtime = getattr(self, "_jax_runtime", None)
        if runtime is None:  # called on a submodule, such as an audio codec, with a cache of transformers
            owner: Any = self
            return GenerationMixin._prepare_cache_for_generation(
                owner, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        runtime.limits.check_positions(max_cache_length)
        implementation = generation_config.cache_implementation
        if implementation not in _CACHES_ON_DEVICE:
            raise UnsupportedArgumentError(
                f"cache_implementation={implementation!r} is not supported here; leave it out: the cache is on the "
                "device"
            )
        name = generate_cache_name(runtime.program.cache_name) or ""
        if PREPARES in vars(self):  # replaced by a script (peft) that fills a transformers cache with a learned prefix
            return super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        if (
            runtime.cache_support.is_supported
            and generation_config.use_cache is not False
            and model_kwargs.get(name) is None
        ):
            model_kwargs[name] = runtime.cache_support.new(1)
            return None
        generation_config.cache_implementation = None
        if (
            name
            and not (runtime.cache_support.is_supported or runtime.cache_support.uses_native_cache)
            and model_kwargs.get(name) is None
        ):
            generation_config.use_cache = model_kwargs["use_cache"] = False  # every step computes all tokens
        return super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    def _prepare_multimodal_encoder_kwargs_for_generation(self, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        with compiled_encoders(self, self._jax_runtime.call_method):
            kwargs = super()._prepare_multimodal_encoder_kwargs_for_generation(model_kwargs)  # type: ignore[misc]
        # Without the outputs of encoders that did not run.
        return {name: value for name, value in kwargs.items() if not (isinstance(value, dict) and not value)}

    def _get_logits_processor(self, generation_config: GenerationConfig, **kwargs: Any) -> Any:
        prompt_len = kwargs.get("input_ids_seq_length")
        custom = kwargs.get("logits_processor") or []
        if custom and prompt_len is not None:
            kept, custom = absorb_processors(generation_config, custom, prompt_len)
            kwargs["logits_processor"] = LogitsProcessorList(kept)
        if custom:
            setattr(generation_config, CUSTOM, "logits_processor")
        for name in ("prefix_allowed_tokens_fn", "negative_prompt_ids"):
            if kwargs.get(name) is not None:
                setattr(generation_config, CUSTOM, name)
        return super()._get_logits_processor(generation_config=generation_config, **kwargs)  # type: ignore[misc]

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput | torch.Tensor:
        if synced_gpus:
            raise UnsupportedArgumentError("synced_gpus=True is not supported here: one process decodes by itself")
        model_kwargs.pop("tokenizer", None)  # generate has made the stop strings of it
        runtime = self._jax_runtime
        config = without_model_options(self, generation_config)
        request = SampleCall(input_ids, logits_processor, stopping_criteria, config, streamer, model_kwargs)
        if isinstance(start := static_batch_start(runtime, request), StaticBatchStart):
            sequences = None if self._engine_rows is None else self._engine_rows(request, start)
            return StaticBatchLoop(runtime, request, start).run() if sequences is None else sequences
        loop = functools.partial(
            super()._sample,  # type: ignore[misc]
            input_ids,
            logits_processor,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )
        rows = self._engine_rows
        output = loop(stopping_criteria=stopping_criteria) if rows is None else rows.run_loop(loop, request)
        return as_transformers_output(output)

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        return as_transformers_output(super()._beam_search(*args, **kwargs))  # type: ignore[misc]

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        return as_transformers_output(super()._assisted_decoding(*args, **kwargs))  # type: ignore[misc]


def _blank(cls: type[PreTrainedModel]) -> PreTrainedModel:
    """Returns an object of `cls` that runs on JAX, without state."""
    made: Any = _jax_class(cls)
    blank: PreTrainedModel = made.__new__(made)
    return blank


@once
def _jax_class(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Returns the subclass of `cls` that runs on JAX, with the same name.

    transformers finds things by that name.
    """

    @torch.compiler.disable
    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        _, signature = forward_of(self)
        given: dict[str, Any] = {}
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            is_rest = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            given.update(value if is_rest else {name: value})
        given = {name: value for name, value in given.items() if value is not None}
        return call_forward(self, with_cache_named(given, self._jax_runtime.program.cache_name))

    namespace = {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__, TORCH_CLASS: cls}
    falls_back = hasattr(cls, "generate_with_fallback")  # Whisper's; importing its module takes time
    mixins = (JaxModelMixin, WhisperFallback) if falls_back else (JaxModelMixin,)
    return type(cls.__name__, (*mixins, cls), namespace)
