"""The device caches of a model, or why it has none."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, LinearAttentionCacheLayerMixin
from transformers.utils import ModelOutput

from model_adapters.caches import native_cache
from model_adapters.caches.compressed_layer import CompressedLayer
from model_adapters.caches.device_cache import DeviceCache
from model_adapters.caches.encoder_mask import mask_over_audio
from model_adapters.errors import UnsupportedArgumentError, UnsupportedModelError
from model_adapters.ops.compressed_weight import Weights
from model_adapters.program.call_signature import cache_field_of
from model_adapters.program.model_program import CallSpec
from torchax_serve.runtime.encoder_output import output_of
from torchax_serve.runtime.step_functions import BatchPosition, DecodeSpec, StepFunctions


class CacheSupport:
    """Makes caches of fixed shapes for a model whose code runs on them.

    Args:
        steps: of the model.
        weights: by name.
        config: of the model.
        text_config: of the layers that a cache is of.
    """

    def __init__(self, steps: StepFunctions, weights: Weights, config: Any, text_config: Any) -> None:
        self._steps, self._program, self._weights = steps, steps.program, weights
        self._config, self._text_config = config, text_config

    @functools.cached_property
    def unsupported_reason(self) -> str | None:
        """Reason why this model runs without a cache, every token anew; None if it has one."""
        if self._program.cache_name is None or (
            self._config.is_encoder_decoder and not self._program.names.has_encoder
        ):
            return "its forward takes no cache that transformers' other models take"
        if (reason := native_cache.reason(self._program.module)) is not None:
            return reason
        try:
            self.new(16)
        except (UnsupportedModelError, AttributeError, KeyError, TypeError) as error:
            return f"its cache has no static form: {type(error).__name__}: {error}"
        module = self._program.module
        if getattr(module, "_can_compile_fullgraph", False) or native_cache.allows_fixed_shapes(module):
            return None  # transformers itself compiles it on a cache of fixed shapes, or it is known to run there
        return self._steps.executables.memoize("cache", "", self._probe)

    def _probe(self) -> str | None:
        """Traces a first forward and a step after it."""
        states, one = self.new(16).states, jax.ShapeDtypeStruct((1,), np.int32)
        names = self._program.names
        spec = DecodeSpec(CallSpec(), self._program.accepts(names.positions))

        def both(weights: Any, ids: jax.Array, token: jax.Array, context: Any) -> Any:
            given = {names.ids: ids, **context}
            _, after = self._program.forward(weights, states, jnp.int32(0), given, CallSpec())
            carry = BatchPosition(jnp.full(1, 3, jnp.int32), jnp.int32(3), jnp.zeros(1, jnp.int32))
            for _ in range(2):
                assert after is not None
                _, after, carry = self._steps.decode_once(weights, after, token, carry, context, spec)
            return after

        try:
            ids = jax.ShapeDtypeStruct((1, 3), np.int32)
            jax.eval_shape(both, self._weights, ids, one, self.abstract_encoder_output())
            self._program.check_no_leaked_tensors()
        except Exception as error:  # whatever model code raises on a cache that is not its own
            return f"on a cache of fixed shapes, {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return None

    def abstract_encoder_output(self) -> dict[str, Any]:
        """Shapes of an encoder's output, to trace with."""
        if not self._program.names.has_encoder:
            return {}
        width = self._config.get_text_config(encoder=True)
        width = getattr(width, "hidden_size", None) or self._text_config.hidden_size
        dtype = str(self._program.module.dtype).removeprefix("torch.")
        hidden: Any = jax.ShapeDtypeStruct((1, 8, width), dtype)
        mask = jax.ShapeDtypeStruct((1, 8), np.int32)
        context: dict[str, Any] = {"encoder_outputs": output_of(hidden, mask, mask_over_audio(self._program.module))}
        if self._program.accepts("attention_mask"):
            context["attention_mask"] = mask
        return context

    @property
    def is_supported(self) -> bool:
        """Whether a device cache can be made for this model."""
        return self.unsupported_reason is None

    @functools.cached_property
    def uses_native_cache(self) -> bool:
        """Whether transformers' own growing cache is used, with one program per length."""
        return self._program.cache_name is not None and native_cache.reason(self._program.module) is not None

    @functools.cached_property
    def is_recurrent(self) -> bool:
        """Whether the cache of this model has recurrent layers."""
        states = self.new(16).states if self.is_supported else ()
        return any(isinstance(layer, LinearAttentionCacheLayerMixin | CompressedLayer) for layer in states)

    @functools.cached_property
    def is_compressed(self) -> bool:
        """Whether layers attend to entries that compress blocks of tokens."""
        states = self.new(16).states if self.is_supported else ()
        return any(isinstance(layer, CompressedLayer) for layer in states)

    def new(self, capacity: int) -> DeviceCache:
        """Returns an empty cache with room for `capacity` tokens per row."""
        return DeviceCache(self._text_config, capacity, with_encoder=self._program.names.has_encoder)

    def to_device(self, cache: Cache) -> DeviceCache:
        """Returns the device form of a cache that the caller holds."""
        if isinstance(cache, DeviceCache):
            return cache
        wanted = EncoderDecoderCache if self._program.names.has_encoder else DynamicCache
        own = cache.self_attention_cache if type(cache) is EncoderDecoderCache else cache
        if type(cache) is not wanted or type(own) is not DynamicCache:
            raise UnsupportedArgumentError(
                f"{self._program.cache_name}: expected a {wanted.__name__} or a cache that this model returned, "
                f"got {type(cache).__name__}" + (f" of a {type(own).__name__}" if own is not cache else "")
            )
        return DeviceCache.from_dynamic(cache, self._text_config)


def as_transformers_output(output: Any) -> Any:
    """Returns `output` with a `DeviceCache` converted to transformers' own cache class."""
    name = cache_field_of(type(output)) if isinstance(output, ModelOutput) else None
    cache = None if name is None else getattr(output, name)
    if name is not None and isinstance(cache, DeviceCache):
        setattr(output, name, cache.to_dynamic())
    return output
