"""`LiveWeights`: new weights for a serving model, and the memory of its cache released."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Literal

import jax

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve.engine.engine import Engine
from torchax_serve.engine.options import EngineOptions
from torchax_serve.engine.weight_update import between_steps, engines_in, exchange, sleep, wake
from torchax_serve.entrypoints.base_model import BaseModel


class LiveWeights(BaseModel):
    """Methods of a `ServedModel` that exchange its weights between two steps of its engines."""

    _engine_options: EngineOptions | None
    _engine: Any
    _single_engine: Engine | None
    _engine_lock: threading.RLock
    _update_lock: threading.Lock  # of calls that exchange weights
    _engine_weights: dict[str, Any] | None = None  # of an engine on stored programs

    @property
    def weights_version(self) -> int:
        """Number of calls of `set_weights` so far.

        `TokenLogprobs.weights_version` says which one a token is from.
        """
        self._loaded_or_raise()
        return self._runtimes[0].weights_version

    def set_weights(
        self, weights: Mapping[str, Any], *, when: Literal["idle", "now"] = "idle", partial: bool = False
    ) -> int:
        """Exchanges the weights while the model serves.

        Compiles nothing, and returns the new `weights_version`.

        Cached prefixes are dropped, since they were computed by the weights of before. The arrays are copied: they may
        be donated afterwards. A call of ``generate`` on another thread goes on with the new weights.

        Args:
            weights: JAX, NumPy or PyTorch arrays by name of the ``state_dict``, in any float dtype. A weight with
                several names needs one of them; buffers may be left out.
            when: "idle" waits until the requests that have begun have ended, and lets no other begin before; "now"
                lets them go on with the new weights on the pages that they have, also in the middle of a prompt.
            partial: Whether parameters may be missing, which then stay as they are.

        Raises:
            InvalidArgumentError: names, shapes or dtypes are not the model's; nothing is exchanged.
            UnsupportedModelError: weights that are quantized or compressed, a cache in int8, several hosts.
        """
        self._followed()
        with self._update_lock:
            try:
                return self._set_weights(weights, when, partial=partial)
            except Exception:
                self._loaded_or_raise()  # one that another thread has closed has lost its weights, and says only that
                raise

    def _set_weights(self, weights: Mapping[str, Any], when: str, *, partial: bool) -> int:
        from torchax_serve.runtime.new_weights import checked_weights, laid_out, write_into_module

        if when not in ("idle", "now"):
            raise InvalidArgumentError(f"when: expected 'idle' or 'now', got {when!r}")
        self._check_exchangeable()
        runtime = self._runtimes[0]
        given = checked_weights(runtime.program.module, runtime.weights, weights, partial=partial)
        new = [laid_out(each, given) for each in self._runtimes]
        jax.block_until_ready(new)
        pairs: list[Any] = [(each.weights, arrays) for each, arrays in zip(self._runtimes, new, strict=True)]
        if self._engine_weights is not None:
            pairs.append((self._engine_weights, new[0]))
        version = runtime.weights_version + 1

        def apply() -> None:
            exchange(pairs)
            write_into_module(self._runtimes, given)
            for each in self._runtimes:
                each.weights_version = version
                if each.lora is not None:
                    each.lora.follow(each.weights)

        with self._engine_lock:
            engines = engines_in(self._single_engine, self._engine)
            if not engines:  # nor can one be made meanwhile
                apply()
        if engines:
            between_steps(engines, apply, version, when_idle=when == "idle")
        return version

    def _check_exchangeable(self) -> None:
        """Raises UnsupportedModelError if the weights cannot be exchanged."""
        if self._leader is not None:
            raise UnsupportedModelError(
                "set_weights: expected a model on one host, this one is on several; serve the new weights instead"
            )
        if self._engine_options is not None and self._engine_options.kv_cache_dtype is not None:
            raise UnsupportedModelError(
                "set_weights: expected a cache in the model's dtype, got kv_cache_dtype='int8', whose scales were "
                "measured with the weights of before; leave it out of EngineOptions"
            )
        if not self._module.can_generate():
            raise UnsupportedModelError(
                "set_weights: expected a model with a head, this one generates with its token embeddings; load the "
                "class with a head"
            )

    def sleep(self) -> None:
        """Waits for running requests, then releases the engine's cache until `wake`.

        Requests are refused meanwhile. Weights and programs stay; `set_weights` works.
        """
        self._change_cache(sleep)

    def wake(self) -> None:
        """Allocates the engine's cache again.

        Requests are taken from then on. Does nothing if the model is awake.
        """
        self._change_cache(wake)

    def _change_cache(self, change: Any) -> None:
        self._loaded_or_raise()
        if self._leader is not None:
            raise UnsupportedModelError("sleep: expected a model on one host, this one is on several; close it instead")
        with self._engine_lock:
            engines = engines_in(self._single_engine, self._engine)
        change(engines)
