"""`TaskModel`: common part of models whose heads are for images or sound."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.loading import LoadedModel
from torchax_serve.distributed.hosts.leader import Leader
from torchax_serve.engine.options import EngineOptions
from torchax_serve.entrypoints.module_model import ModuleModel
from torchax_serve.entrypoints.served_model import ServedModel
from torchax_serve.generation.jax_forward import following
from torchax_serve.modules.named_dims import BATCH, MAX_ROWS
from torchax_serve.modules.plan import ModulePlan
from torchax_serve.pooling.queue import QueuedTexts
from torchax_serve.tasks.checkpoint_readers import FILES, CheckpointFiles, checkpoint_reader
from torchax_serve.tasks.heads import Head, heads_of, methods_of
from torchax_serve.tasks.host_forward import PARTS, on_host
from torchax_serve.tasks.plain_forward import PLAIN_MODEL, inputs_of_noise, plain_module
from torchax_serve.tasks.task_pipeline import TaskPipeline
from torchax_serve.validation.argument_hints import refuses_unknown


class TaskModel(ServedModel):
    """A model with a head for images or sound; made by `serve`.

    It does not generate text.

    Attributes:
        methods: Names of the methods that it has for its heads.
        outputs_seen: Dtype and number of dimensions of the outputs of the last `infer`, by name.
    """

    writes_text = False

    def __init__(
        self, loaded: LoadedModel, engine_options: EngineOptions | None = None, leader: Leader | None = None
    ) -> None:
        super().__init__(loaded, engine_options, leader)
        self.embeds = False
        self.methods = methods_of(self.class_name)
        self.outputs_seen: dict[str, tuple[np.dtype[Any], int]] = {}
        self._pipelines: dict[Hashable, TaskPipeline] = {}
        self._readers: dict[str, Any] = {}

    @property
    def main_input(self) -> str:
        """Name of the forward's argument for images or samples."""
        return str(self._module.main_input_name)

    @refuses_unknown
    def infer(
        self,
        inputs: Mapping[str, np.ndarray],
        *,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> dict[str, np.ndarray]:
        """Returns the outputs of the model's forward by name, for tensors that a processor has made.

        Args:
            inputs: Arguments of the forward by name, with a first dimension for the rows.
            timeout_s: seconds after which the call ends with an error, looked at before the forward; None: never.
            queue_timeout_s: the same for a call that has not begun by then.

        Raises:
            InvalidArgumentError: the forward has no such argument.
            QueueFullError: too many inputs are waiting.
            DeadlineError: a time limit has passed.
        """
        ((found, _),) = self._inferring(inputs).run(timeout_s, queue_timeout_s)
        return dict(found)

    async def ainfer(
        self,
        inputs: Mapping[str, np.ndarray],
        *,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> dict[str, np.ndarray]:
        """Works as `infer` without blocking the event loop."""
        found, _ = await self.atimed_infer(inputs, timeout_s=timeout_s, queue_timeout_s=queue_timeout_s)
        return found

    async def atimed_infer(
        self,
        inputs: Mapping[str, np.ndarray],
        *,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> tuple[dict[str, np.ndarray], int]:
        """Works as `ainfer`, and returns also the nanoseconds of the forward."""
        ((found, forward_ns),) = await self._inferring(inputs).run_async(timeout_s, queue_timeout_s)
        return dict(found), forward_ns

    def export(
        self,
        out: str | os.PathLike[str],
        *,
        inputs: Mapping[str, np.ndarray] | None = None,
        engine: EngineOptions | None = None,
        **options: Any,
    ) -> Path:
        """Writes weights and the programs of the forward as a bundle that runs without torch.

        Returns the version's folder. ``serve(out)`` takes the forward's arguments as arrays of NumPy and returns the
        tensors of its output by name.

        Args:
            out: folder of the bundle, new or with other versions.
            inputs: arguments of the forward by name, as `infer` takes them, whose sizes the programs have; None: those
                that the checkpoint's processor makes of one image or recording.
            engine: its `max_num_seqs` is the largest number of rows; powers of two up to it have programs. None: 32.
            options: `platforms`, `weights`, `native`, `reference` and `advance`, as of `ServedModel.export`.

        Raises:
            UnsupportedModelError: a mesh, or a forward that reads values of tensors.
            TorchaxServeError: the disk is full, or a package is missing.
        """
        most = MAX_ROWS if engine is None or engine.max_num_seqs is None else engine.max_num_seqs
        sizes = [1 << power for power in range(most.bit_length())]
        with self._as_module("export", inputs) as (model, given):
            return model.export(out, kwargs=given, sizes={BATCH: sizes}, **options)

    def plan(self, inputs: Mapping[str, np.ndarray] | None = None) -> ModulePlan:
        """Returns bytes and arithmetic of a forward, which is compiled and not run.

        Args:
            inputs: As of `export`.

        Raises:
            UnsupportedModelError: as of `export`.
        """
        with self._as_module("plan", inputs) as (model, given):
            return model.plan(kwargs=given)

    @contextlib.contextmanager
    def _as_module(
        self, caller: str, inputs: Mapping[str, np.ndarray] | None
    ) -> Iterator[tuple[ModuleModel, dict[str, torch.Tensor]]]:
        """Gives the forward as a module of tensors, and arguments for it; errors name the `caller`."""
        if self.runtime.program.sharding is not None:
            raise UnsupportedModelError(
                f"{caller}: expected a model on one device, got one on a mesh; serve it without"
            )
        found: Mapping[str, Any] = self._noise() if inputs is None else inputs
        self._check_inputs(found)
        given = {name: torch.as_tensor(value) for name, value in found.items()}
        given = {name: each.to(self.dtype) if each.is_floating_point() else each for name, each in given.items()}
        dims = {name: (BATCH, *[None] * (value.ndim - 1)) for name, value in given.items()}
        module = plain_module(self._module, list(given))
        weights = {f"{PLAIN_MODEL}.{name}": each for name, each in self.runtime.weights.items()}
        with ModuleModel(module, dims=dims, name=self.name, weights=weights) as model:
            yield model, given

    def _noise(self) -> dict[str, torch.Tensor]:
        return inputs_of_noise(self._module, CheckpointFiles.of(self._loaded_or_raise()))

    def _check_inputs(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Raises InvalidArgumentError for names that are no arguments of the forward."""
        program = self.runtime.program
        if self.main_input not in inputs or (unknown := [name for name in inputs if not program.accepts(name)]):
            got = ", ".join(inputs) or "none"
            raise InvalidArgumentError(
                f"inputs: expected {self.main_input} and other arguments of {self.class_name}.forward, got {got}"
                + (f"; it has no {unknown[0]}" if self.main_input in inputs else "")
            )

    def _inferring(self, inputs: Mapping[str, np.ndarray]) -> QueuedTexts:
        self._check_inputs(inputs)

        def call(items: Sequence[Any]) -> list[tuple[dict[str, np.ndarray], int]]:
            found = []
            for item in items:
                began_ns = time.monotonic_ns()
                outputs = self._forward_arrays(item)
                found.append((outputs, time.monotonic_ns() - began_ns))
            return found

        return self._call_on_queue(object(), call, [dict(inputs)])

    def _forward_arrays(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Runs a forward, arrays in and out; floats are float32."""
        given = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        given = {name: value.to(self.dtype) if value.is_floating_point() else value for name, value in given.items()}
        module = self._pipeline(heads_of(self.class_name)[0]).model if self.class_name in PARTS else self._module
        with torch.no_grad():
            fields = module(**given, return_dict=True)
        found = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
        made = {name: (value.float() if value.is_floating_point() else value).numpy() for name, value in found.items()}
        self.outputs_seen = {name: (array.dtype, array.ndim) for name, array in made.items()}
        return made

    def _head_for(self, method: str, *, takes_labels: bool = False) -> Head:
        """Returns the head for a method.

        Raises:
            UnsupportedModelError: the model has none; names the methods that it has.
            InvalidArgumentError: it has one, but labels are given and not taken, or the other way round.
        """
        found = [head for head in heads_of(self.class_name) if head.method == method]
        if not found:
            known = ", ".join(self.methods) or "none for its head"
            raise UnsupportedModelError(
                f"{method}: expected a model with a head for it, got {self.name}, a {self.class_name}, whose methods "
                f"are {known}"
            )
        if (head := next((each for each in found if each.takes_labels == takes_labels), None)) is not None:
            return head
        own = list((self._config.id2label or {}).values())[:5]
        expected, remedy = (
            (f"none for a model with labels of its own ({', '.join(own)} ...)", "leave them out")
            if takes_labels
            else (f"texts for {self.name}, which has no labels of its own", "give labels=[...]")
        )
        raise InvalidArgumentError(f"labels: expected {expected}, got {'some' if takes_labels else 'none'}; {remedy}")

    def _call_on_queue(
        self, key: Hashable, function: Callable[[Sequence[Any]], Sequence[Any]], items: Sequence[Any]
    ) -> QueuedTexts:
        """Returns the call of a function, which waits for its turn on the queue."""
        self._followed()

        def call(given: Sequence[Any]) -> Sequence[Any]:
            with following(self.runtime):
                return function(given)

        return QueuedTexts(self._pooling_queue, key, call, items)

    def _pipeline(self, head: Head) -> TaskPipeline:
        # A copy on the host has the weights of its time; all others read those that the runtime has now.
        weights = (self.runtime.weights_version, self.runtime.num_changes) if self.class_name in PARTS else None
        key = head.pipeline, weights
        if key not in self._pipelines:
            if weights is not None:
                self._pipelines.clear()
            self._pipelines[key] = self._made_pipeline(head)
        return self._pipelines[key]

    def _made_pipeline(self, head: Head) -> TaskPipeline:
        if self.class_name not in PARTS:
            return TaskPipeline(head.pipeline, self._module, self._parts(head))
        module = on_host(self._module, self.runtime)
        return TaskPipeline(head.pipeline, module, self._parts(head), max_rows=1)

    def _parts(self, head: Head) -> dict[str, Any]:
        """Returns what reads the inputs of a head, by the argument of its pipeline."""
        made = {name: self._reader(name) for name in head.readers}
        return made | ({"tokenizer": self._own_tokenizer()} if head.reads_texts else {})

    def _reader(self, name: str) -> Any:
        """Returns the checkpoint's image processor or feature extractor.

        Raises:
            InvalidArgumentError: the model came without one.
            CheckpointError: its files are broken.
        """
        if name not in self._readers:
            found = checkpoint_reader(CheckpointFiles.of(self._loaded_or_raise()), name)
            if found is None:
                raise InvalidArgumentError(
                    f"{self.name} has no {name.replace('_', ' ')} ({' or '.join(FILES)}), which makes the model's "
                    "inputs; put its files next to the weights"
                )
            self._readers[name] = found
        return self._readers[name]

    def _own_tokenizer(self) -> Any:
        """Returns the tokenizer; raises InvalidArgumentError if the model came without one."""
        if self.tokenizer is None:
            raise InvalidArgumentError(
                f"{self.name} has no tokenizer, which makes the model's inputs of texts; put its files next to the "
                "weights"
            )
        return self.tokenizer


def one_or_all(is_single: bool, results: list[Any]) -> Any:
    """Returns the only result of a call with one input, or the list of those of several."""
    return results[0] if is_single else results
