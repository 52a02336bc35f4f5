"""What every served model is, whatever it is for: weights on the device until it is closed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from model_adapters.errors import TorchaxServeError, UnsupportedModelError
from model_adapters.loading import LoadedModel
from torchax_serve.compilation.executable_cache import ExecutableCache, model_identity
from torchax_serve.compilation.xla_cache import programs_dir
from torchax_serve.distributed.hosts.leader import Leader
from torchax_serve.engine.data_parallel import split_runtimes
from torchax_serve.generation.jax_forward import following
from torchax_serve.generation.jax_model import run_on_jax
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.validation.owner_process import OwnerProcess


class MissingAttributeError(TorchaxServeError, AttributeError):
    """An attribute that transformers' models have, asked of a served one."""


class BaseModel:
    """A model that runs on JAX. A context manager: leaving it frees the weights.

    Attributes:
        torch_model: the transformers model object whose ``forward`` and ``generate`` run on JAX, for code that wants
            one (``transformers.pipeline``, lm-eval).
    """

    def __init__(self, loaded: LoadedModel, leader: Leader | None = None) -> None:
        self._leader = leader
        self._process = OwnerProcess()
        self._loaded: LoadedModel | None = loaded
        self.name = loaded.source.name
        self.config = loaded.config
        self.dtype: torch.dtype = loaded.module.dtype
        self.load_report = loaded.report
        if loaded.sharding is None:
            self._runtimes = [ModelRuntime(loaded.module, loaded.weights, programs_of(loaded))]
        else:
            self._runtimes = split_runtimes(loaded.module, loaded.weights, loaded.sharding, leader)
        self.torch_model: Any = run_on_jax(loaded.module, self._runtimes[0])

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the weights. Closing twice is fine; any other call afterwards raises."""
        self._loaded = None
        if self._leader is not None:
            self._leader.close()
        if hasattr(self, "torch_model"):
            for runtime in self._runtimes:
                runtime.weights.clear()
            del self.torch_model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer, or None if it came without one."""
        return self._loaded_or_raise().tokenizer()

    @property
    def device_description(self) -> str:
        """The device in words, such as ``cpu`` or ``TPU v6 lite x 8``."""
        sharding = None if self._loaded is None else self._loaded.sharding
        devices = jax.devices() if sharding is None else list(sharding.mesh.devices.flat)
        kind = devices[0].device_kind
        return kind if len(devices) == 1 else f"{kind} x {len(devices)}"

    def embed(self, texts: str | Sequence[str], *, pooling: str | None = None, **options: Any) -> np.ndarray:
        """Embeddings of texts; see `torchax_serve.pooling.embed`."""
        from torchax_serve.pooling import embed

        return embed(self._followed(), self._runtimes[0], texts, pooling=pooling, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, torch tensors in and out."""
        self._loaded_or_raise()
        return self.torch_model(*args, **kwargs)

    def refresh(self) -> None:
        """Makes programs and arrays anew of `torch_model`, for changes that no call notices."""
        self._loaded_or_raise()
        for runtime in self._runtimes:
            runtime.refresh()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedModelError(
            f"a {type(self).__name__} holds devices and threads and cannot be copied or pickled; call serve in the "
            "other process, or copy torch_model"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """The weights by name, as tensors on the CPU; see `torch.nn.Module.state_dict`."""
        self._loaded_or_raise()
        state: dict[str, torch.Tensor] = self.torch_model.state_dict(*args, **kwargs)
        return state

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Writes weights, configuration and tokenizer into a folder, as transformers does."""
        self._loaded_or_raise()
        self.torch_model.save_pretrained(save_directory, **kwargs)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(save_directory)

    def __getattr__(self, name: str) -> Any:
        model = vars(self).get("torch_model")
        if model is not None and not name.startswith("_") and hasattr(model, name):
            raise MissingAttributeError(
                f"a {type(self).__name__} has no attribute {name}; the transformers model is its torch_model: "
                f"pass model.torch_model, or read model.torch_model.{name}"
            )
        raise AttributeError(f"a {type(self).__name__} has no attribute {name}")

    def _followed(self) -> LoadedModel:
        """As `_loaded_or_raise`, after what has changed on `torch_model` has been taken over."""
        loaded = self._loaded_or_raise()
        with following(self._runtimes[0]):
            return loaded

    def _loaded_or_raise(self) -> LoadedModel:
        self._process.check("a model")
        if self._loaded is None:
            raise TorchaxServeError("expected an open model, this one is closed; call serve() again")
        return self._loaded


def programs_of(loaded: LoadedModel) -> ExecutableCache:
    """Where the model's programs are kept; in memory alone for an object, whose code anybody may have changed."""
    folder = programs_dir()
    if folder is None or loaded.source.kind == "object":
        return ExecutableCache()
    config_json = loaded.config.to_json_string(use_diff=False)
    return ExecutableCache(folder, model_identity(type(loaded.module), config_json, loaded.weights))
