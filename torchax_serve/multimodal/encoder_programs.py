"""Compiles image encoders as separate programs, which run before the prefill.

transformers' ``generate`` encodes images first if the model accepts their features in place of pixels. That call runs a
compiled program here, whose shapes depend on the images only; the shapes of the prefill depend on the number of
features only.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from model_adapters.bridge.views import is_view
from model_adapters.program.module_watch import TEMPORARY

MODALITIES = ("image", "video")
_PATCHED = threading.RLock()
_RUN: contextvars.ContextVar[Callable[[str, dict[str, Any]], Any] | None] = contextvars.ContextVar("run", default=None)


@contextlib.contextmanager
def encoders_run_by(run: Callable[[str, dict[str, Any]], Any]) -> Iterator[None]:
    """Runs the encoders of this thread's calls through `run` inside the block.

    `run` may know some of their outputs.
    """
    token = _RUN.set(run)
    try:
        yield
    finally:
        _RUN.reset(token)


@contextlib.contextmanager
def compiled_encoders(model: Any, run: Callable[[str, dict[str, Any]], Any]) -> Iterator[None]:
    """Runs the model's image and video encoders through `run` inside the block.

    The function replaces ``get_image_features`` and ``get_video_features`` of the model.

    Args:
        model: a transformers model.
        run: as `torchax_serve.runtime.model_runtime.ModelRuntime.call_method`.
    """
    run = _RUN.get() or run
    base: torch.nn.Module = model.base_model
    prefix = next(name for name, child in model.named_modules() if child is base)
    names = [name for name in (f"get_{modality}_features" for modality in MODALITIES) if hasattr(base, name)]

    def compiled(name: str) -> Callable[..., Any]:
        path = f"{prefix}.{name}" if prefix else name
        theirs = getattr(base, name)

        @functools.wraps(theirs)
        def encode(*args: Any, **given: Any) -> Any:
            if args or any(is_view(value) for value in given.values()):
                return theirs(*args, **given)  # called by model code that is being traced, here or on another thread
            return run(path, {key: value for key, value in given.items() if value is not None})

        setattr(encode, TEMPORARY, True)
        return encode

    with _PATCHED:
        replaced = {name: compiled(name) for name in names}
        vars(base).update(replaced)
        try:
            yield
        finally:
            for name in names:
                vars(base).pop(name, None)
