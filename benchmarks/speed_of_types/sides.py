"""The three sides of a row: eager PyTorch, the engine with its default options, and the drop-in for ``generate``."""

from __future__ import annotations

import concurrent.futures
import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from parity_sweep.check_causal import executor_of
from speed_of_types.cases import Inputs
from torchax_serve import SamplingParams, serve, to_jax
from torchax_serve.entrypoints.served_model import ServedModel
from torchax_serve.runtime.model_generate import overrides_generate

EAGER, ENGINE, DROP_IN = "eager", "engine", "drop-in"


class Side(Protocol):
    """A way to generate."""

    name: str

    def run(self, inputs: Inputs, new_tokens: int) -> list[list[int]]:
        """The new tokens of each request."""
        ...

    def wait(self) -> None:
        """Waits for what compiles or writes in the background."""

    def close(self) -> None:
        """Frees what it holds."""


def sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model whose parameters and buffers are the model's own."""
    kept = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in kept})


class Eager:
    """transformers' ``generate`` in eager PyTorch: one batch of prompts of one length."""

    name = EAGER

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def run(self, inputs: Inputs, new_tokens: int) -> list[list[int]]:
        return _generated(self._model, inputs, new_tokens)

    def wait(self) -> None:
        pass

    def close(self) -> None:
        del self._model


class DropIn:
    """The same call of the same object after `to_jax`."""

    name = DROP_IN

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = to_jax(sharing_weights(model))

    def run(self, inputs: Inputs, new_tokens: int) -> list[list[int]]:
        return _generated(self._model, inputs, new_tokens)

    def wait(self) -> None:
        _wait(self._model._jax_runtime)

    def close(self) -> None:
        del self._model


class EngineSide:
    """The engine of `serve` with default options: requests that come together."""

    name = ENGINE

    def __init__(self, model: PreTrainedModel) -> None:
        self._served: ServedModel = serve(sharing_weights(model))
        # As of a model that was loaded by its name: nobody has its module, whose changes requests would look for.
        self._served.runtime.watch.is_held = False

    def executor(self) -> str:
        """Which executor it has, and why no faster one."""
        name, reason = executor_of(self._served)
        return name if reason is None else f"{name}: {reason}"

    def run(self, inputs: Inputs, new_tokens: int) -> list[list[int]]:
        return self._way(inputs)(inputs, new_tokens)

    def _way(self, inputs: Inputs) -> Callable[[Inputs, int], list[list[int]]]:
        if set(inputs) <= {"input_ids", "attention_mask"}:
            return self._prompts
        model = self._served.torch_model if self._served.torch_model.can_generate() else self._served._generator()
        encoder = model._jax_runtime.encoder
        is_own = encoder is not None and not encoder.is_masked and overrides_generate(model)
        return self._calls if is_own else self._requests

    def _prompts(self, inputs: Inputs, new_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
        found = self._served.generate_batch(inputs["input_ids"].tolist(), params)
        return [list(each.token_ids) for each in found]

    def _requests(self, inputs: Inputs, new_tokens: int) -> list[list[int]]:
        """Requests with sound or images."""
        config = copy.deepcopy(self._served.generation_config)
        config.update(max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
        streams = [self._served.iter_tokens((), config, inputs=one) for one in rows(inputs)]
        return [list(stream) for stream in streams]

    def _calls(self, inputs: Inputs, new_tokens: int) -> list[list[int]]:
        """Calls of a class's own ``generate``, each in a thread, as callers of a server make them."""

        def call(one: Inputs) -> list[int]:
            return _tokens(self._served.generate(**one, **_limits(new_tokens)), new_tokens)[0]

        each = rows(inputs)
        with concurrent.futures.ThreadPoolExecutor(len(each)) as pool:
            return list(pool.map(call, each))

    def wait(self) -> None:
        _wait(self._served.runtime)

    def close(self) -> None:
        self._served.close()


def rows(inputs: Inputs) -> list[Inputs]:
    """The inputs of each request of a batch."""
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    number = tensors[0].shape[0]
    return [
        {name: value[row : row + 1] if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        for row in range(number)
    ]


def _limits(new_tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}


@torch.no_grad()
def _generated(model: Any, inputs: Inputs, new_tokens: int) -> list[list[int]]:
    found = type(model).generate(model, **copy.copy(inputs), **_limits(new_tokens))
    return _tokens(found, new_tokens)


def _tokens(found: Any, new_tokens: int) -> list[list[int]]:
    sequences = found if isinstance(found, torch.Tensor) else found["sequences"]
    return sequences[:, -new_tokens:].tolist()


def _wait(runtime: Any) -> None:
    executables = runtime.steps.executables
    if executables.background is not None:
        executables.background.wait()
    executables.wait_for_writes()
