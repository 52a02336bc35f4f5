"""Any Hugging Face PyTorch model, its code untouched, served by JAX at hardware speed.

>>> from torchax_serve import serve
>>> model = serve()                                     # the small model that comes with the package
>>> model.chat("What is 3 plus 4?")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_adapters.errors import (
    ChatTemplateError,
    CheckpointError,
    DeadlineError,
    HostsError,
    InvalidArgumentError,
    ModelNotFoundError,
    NoTokenLeftError,
    OutOfMemoryError,
    QueueDeadlineError,
    QueueFullError,
    QueueTokensError,
    RequestError,
    TorchaxServeError,
    UnsafeImageError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from pytree_registry.lazy_exports import lazy_exports
from torchax_serve.compilation import gc_pause

if TYPE_CHECKING:
    from model_adapters.bridge.extract import extract_jax
    from model_adapters.lowerings.missing import lower
    from torchax_serve.distributed.hosts.follow import follow
    from torchax_serve.distributed.hosts.options import Hosts
    from torchax_serve.engine.options import EngineOptions
    from torchax_serve.entrypoints.audio_model import AudioModel
    from torchax_serve.entrypoints.encoder_model import EncoderModel
    from torchax_serve.entrypoints.image_model import ImageModel
    from torchax_serve.entrypoints.module_model import ModuleModel
    from torchax_serve.entrypoints.page_model import PageModel
    from torchax_serve.entrypoints.series_model import SeriesModel
    from torchax_serve.entrypoints.serve import serve
    from torchax_serve.entrypoints.served_model import ServedModel
    from torchax_serve.entrypoints.speech_model import SpeechModel
    from torchax_serve.entrypoints.to_jax import to_jax
    from torchax_serve.entrypoints.vision_model import VisionModel
    from torchax_serve.outputs import Completion
    from torchax_serve.sampling_params import SamplingParams
    from torchax_serve.text import TextStream

__version__ = "0.1.0"

__all__ = [
    "AudioModel",
    "ChatTemplateError",
    "CheckpointError",
    "Completion",
    "DeadlineError",
    "EncoderModel",
    "EngineOptions",
    "Hosts",
    "HostsError",
    "ImageModel",
    "InvalidArgumentError",
    "ModelNotFoundError",
    "ModuleModel",
    "NoTokenLeftError",
    "OutOfMemoryError",
    "PageModel",
    "QueueDeadlineError",
    "QueueFullError",
    "QueueTokensError",
    "RequestError",
    "SamplingParams",
    "SeriesModel",
    "ServedModel",
    "SpeechModel",
    "TextStream",
    "TorchaxServeError",
    "UnsafeImageError",
    "UnsupportedArgumentError",
    "UnsupportedModelError",
    "VisionModel",
    "extract_jax",
    "follow",
    "lower",
    "serve",
    "to_jax",
]

# torch, jax and transformers take seconds to import; the help of the command line must not wait for them.
__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "AudioModel": ".entrypoints.audio_model",
        "Completion": ".outputs",
        "EncoderModel": ".entrypoints.encoder_model",
        "EngineOptions": ".engine.options",
        "Hosts": ".distributed.hosts.options",
        "ImageModel": ".entrypoints.image_model",
        "ModuleModel": ".entrypoints.module_model",
        "PageModel": ".entrypoints.page_model",
        "SamplingParams": ".sampling_params",
        "SeriesModel": ".entrypoints.series_model",
        "ServedModel": ".entrypoints.served_model",
        "SpeechModel": ".entrypoints.speech_model",
        "TextStream": ".text",
        "VisionModel": ".entrypoints.vision_model",
        "extract_jax": "model_adapters.bridge.extract",
        "follow": ".distributed.hosts.follow",
        "lower": "model_adapters.lowerings.missing",
        "serve": ".entrypoints.serve",
        "to_jax": ".entrypoints.to_jax",
    },
    gc_pause.paused_for_imports,
)
