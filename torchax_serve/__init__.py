"""Any Hugging Face PyTorch model, its code untouched, served at the speed of the hardware by JAX.

>>> from torchax_serve import serve
>>> model = serve()                                     # the small model that comes with the package
>>> model.chat("What is 3 plus 4?")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from model_adapters.errors import (
    ChatTemplateError,
    CheckpointError,
    HostsError,
    InvalidArgumentError,
    ModelNotFoundError,
    OutOfMemoryError,
    QueueFullError,
    TorchaxServeError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from torchax_serve.compilation import gc_pause

if TYPE_CHECKING:
    from model_adapters.bridge.extract import extract_jax
    from torchax_serve.distributed.hosts.follow import follow
    from torchax_serve.distributed.hosts.options import Hosts
    from torchax_serve.engine.options import EngineOptions
    from torchax_serve.engine.request_handle import RequestError
    from torchax_serve.entrypoints.encoder_model import EncoderModel
    from torchax_serve.entrypoints.serve import serve
    from torchax_serve.entrypoints.served_model import ServedModel
    from torchax_serve.entrypoints.speech_model import SpeechModel
    from torchax_serve.generation.jax_model import to_jax
    from torchax_serve.sampling_params import SamplingParams
    from torchax_serve.text import Completion, TextStream

__version__ = "0.1.0"

__all__ = [
    "ChatTemplateError",
    "CheckpointError",
    "Completion",
    "EncoderModel",
    "EngineOptions",
    "Hosts",
    "HostsError",
    "InvalidArgumentError",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "QueueFullError",
    "RequestError",
    "SamplingParams",
    "ServedModel",
    "SpeechModel",
    "TextStream",
    "TorchaxServeError",
    "UnsupportedArgumentError",
    "UnsupportedModelError",
    "extract_jax",
    "follow",
    "serve",
    "to_jax",
]

_HOME = {
    "Completion": "torchax_serve.text",
    "EncoderModel": "torchax_serve.entrypoints.encoder_model",
    "EngineOptions": "torchax_serve.engine.options",
    "Hosts": "torchax_serve.distributed.hosts.options",
    "RequestError": "torchax_serve.engine.request_handle",
    "SamplingParams": "torchax_serve.sampling_params",
    "ServedModel": "torchax_serve.entrypoints.served_model",
    "SpeechModel": "torchax_serve.entrypoints.speech_model",
    "TextStream": "torchax_serve.text",
    "extract_jax": "model_adapters.bridge.extract",
    "follow": "torchax_serve.distributed.hosts.follow",
    "serve": "torchax_serve.entrypoints.serve",
    "to_jax": "torchax_serve.generation.jax_model",
}


def __getattr__(name: str) -> Any:
    # torch, jax and transformers take seconds to import; the command line's help must not wait for them.
    if name in _HOME:
        with gc_pause.paused_for_imports():
            value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
