"""Forwards whose shapes depend on values: they run on the host, their parts on JAX."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torchax_serve.generation.model_copies import with_values
from torchax_serve.runtime.model_runtime import ModelRuntime

PARTS: dict[str, tuple[str, ...]] = {
    # The durations of the letters, which the host adds up, decide the length of the sound.
    "VitsModel": ("text_encoder", "flow", "decoder"),
}
"""Parts that run on JAX, by the class of the model; all have shapes that their arguments decide."""


def on_host(model: Any, runtime: ModelRuntime) -> Any:
    """Returns a copy of the model whose forward runs on the host, and whose `PARTS` run on JAX.

    It shares the weights that the model has now. Random numbers are those of torch on the host.

    Args:
        model: A `torchax_serve.generation.jax_model.JaxModelMixin`.
        runtime: Of the model.
    """
    module = with_values(model)
    for path in PARTS[type(module).__name__]:
        part = module.get_submodule(path)
        part.forward = _compiled(functools.partial(runtime.call_method, f"{path}.forward"), part.forward)
    return module


def _compiled(run: Callable[[dict[str, Any]], Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        return run({name: value for name, value in given.items() if value is not None})

    return forward
