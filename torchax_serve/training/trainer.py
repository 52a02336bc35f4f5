"""`train`: fine-tunes a model on conversations.

A run that was ended goes on from its last checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from model_adapters.errors import InvalidArgumentError, TorchaxServeError
from model_adapters.jax_settings import programs_run
from torchax_serve.profiling.picture import check_plot
from torchax_serve.training.chats import RowChecks, digest, encode_rows, read_rows
from torchax_serve.training.checkpoints import Checkpoints
from torchax_serve.training.inputs import inputs_of
from torchax_serve.training.lora import parse_lora
from torchax_serve.training.options import TrainingOptions
from torchax_serve.training.packing import Packer, TrainingBatch
from torchax_serve.training.parallel import Layout
from torchax_serve.training.step import Step, TrainState, make_step, optimizer_of
from torchax_serve.training.trainable import Arrays, TrainableModel, trainable_model

LOSSES = "losses.jsonl"
"""File of a run with a line for each step."""


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What is known of a step that is done.

    Attributes:
        step: Number of steps done.
        num_steps: Number of steps of the run.
        loss: Mean loss of the learned tokens, natural logarithm.
        grad_norm: Norm of the gradients before clipping.
        num_tokens: Tokens of the batch without padding.
        step_s: Seconds of the step; the first one's are mostly those of compilation.
    """

    step: int
    num_steps: int
    loss: float
    grad_norm: float
    num_tokens: int
    step_s: float


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """The end of a run.

    Attributes:
        out: Folder with the adapter as peft writes it, or with the model as transformers does.
        losses: Loss of each step, those before a resumption included.
        is_complete: Whether all steps were done; else the run was asked to stop.
        model: The model, with the trained weights.
    """

    out: Path
    losses: list[float]
    is_complete: bool
    model: TrainableModel

    def plot(self, file: str | os.PathLike[str]) -> None:
        """Writes the loss curve as a picture; needs matplotlib."""
        plot_losses(self.losses, Path(file))


def train(
    model: Any,
    data: str | os.PathLike[str] | Iterable[Any],
    *,
    out: str | os.PathLike[str],
    options: TrainingOptions,
    lora: Any = None,
    optimizer: optax.GradientTransformation | None = None,
    report: Callable[[StepReport], None] = lambda report: None,
    stop: Callable[[], bool] = lambda: False,
    **loading: Any,
) -> TrainingResult:
    """Fine-tunes `model` on `data`, and writes the result into `out`.

    The folder also holds checkpoints, from which the same call goes on after it was ended, and the losses.

    Args:
        model: A name as `torchax_serve.serve` takes it, or a model of transformers or peft; None: the embedded model.
        data: A JSONL file, or dicts: ``{"messages": [...]}`` with answers to learn, or ``{"text": "..."}``.
        out: Folder of the run.
        options: Sizes, optimizer and devices.
        lora: A text such as ``r=16,alpha=32,targets=q_proj+v_proj``, or a ``peft.LoraConfig``; None: all parameters.
        optimizer: In the place of AdamW by `options`.
        report: Called after each step.
        stop: Called before each step; true ends the run after a checkpoint.
        **loading: Of a name: revision, token, local_files_only, cache_dir.

    Raises:
        InvalidArgumentError: data, options or adapter that do not fit, or not those of the run in `out`.
        UnsupportedModelError: a model that cannot be trained so.
        TorchaxServeError: the loss is not finite; the state before that step is in the last checkpoint.
    """
    rows = read_rows(data)
    if isinstance(lora, str):
        parse_lora(lora)  # before a model is loaded for it
    folder = _checked_folder(Path(out), model)
    prepared = trainable_model(model, lora, options, **loading)
    deciding = {**options.deciding(), "model": prepared.name, "data": digest(rows), "lora": _described(lora)}
    packer = _packer(prepared, rows, options)
    folder.mkdir(parents=True, exist_ok=True)
    run = _Run(prepared, packer, options, optimizer or optimizer_of(options))
    checkpoints = Checkpoints(folder, options.num_checkpoints, deciding)
    try:
        with programs_run():
            run.resume(checkpoints)
            is_complete = run.steps(checkpoints, folder, report, stop)
    finally:
        checkpoints.close()
    if is_complete:
        prepared.write_back(run.state.trained)
        saved: Any = prepared.module
        saved.save_pretrained(folder)
        if prepared.tokenizer is not None:
            prepared.tokenizer.save_pretrained(folder)
    return TrainingResult(folder, run.losses, is_complete, dataclasses.replace(prepared, trained=run.state.trained))


def _checked_folder(out: Path, model: Any) -> Path:
    """Returns the folder of the run.

    Raises:
        InvalidArgumentError: it is a file, or the folder of the model.
    """
    if out.exists() and not out.is_dir():
        raise InvalidArgumentError(f"out: expected a folder, got the file {out}; name another")
    if isinstance(model, str | os.PathLike) and out.exists() and Path(model).exists() and out.samefile(model):
        raise InvalidArgumentError(f"out: expected another folder than the model's, got {out}; name another")
    return out


def _described(lora: Any) -> str | None:
    values = lora.to_dict() if hasattr(lora, "to_dict") else lora
    if isinstance(values, dict):
        values = sorted((key, sorted(v) if isinstance(v, set) else v) for key, v in values.items())
    return None if lora is None else str(values)


def _packer(model: TrainableModel, rows: list[dict[str, Any]], options: TrainingOptions) -> Packer:
    config = model.base.config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and options.seq_len > most:
        raise InvalidArgumentError(
            f"seq_len: expected at most {most}, the positions of {model.name}, got {options.seq_len}; lower it"
        )
    if model.tokenizer is None:
        raise InvalidArgumentError(f"{model.name}: expected a tokenizer in the model's folder, got none; add its files")
    examples = encode_rows(model.tokenizer, model.name, rows, RowChecks(options.seq_len, options.answers))
    return Packer(examples, options.batch_size, options.seq_len, options.seed, shares_rows=options.packing)


class _Run:
    """State and step of a run.

    Args:
        model: The model.
        packer: Makes the batch of a step.
        options: Options of the run.
        optimizer: Optimizer of the trained weights.
    """

    def __init__(
        self, model: TrainableModel, packer: Packer, options: TrainingOptions, optimizer: optax.GradientTransformation
    ) -> None:
        self._packer, self._options = packer, options
        self._layout = None if options.mesh is None else Layout(model.base, options.mesh)
        inputs = inputs_of(model, packing=options.packing)
        self._frozen: Arrays = self._placed(model.frozen)
        self.state = self._first_state(self._placed(model.trained), optimizer)
        self.losses: list[float] = []
        step: Any = make_step(model, inputs, optimizer, self._layout)
        options_of_jit: dict[str, Any] = {"donate_argnums": 0}
        if self._layout is not None:
            options_of_jit["out_shardings"] = jax.tree.map(lambda array: array.sharding, self.state), None
        self.step: Step = jax.jit(step, **options_of_jit)

    def _placed(self, arrays: Arrays) -> Arrays:
        if self._layout is None:
            return arrays
        placed: dict[int, jax.Array] = {}  # an array with several names is placed once
        for name, array in arrays.items():
            if id(array) not in placed:
                placed[id(array)] = jax.device_put(array, self._layout.of_weight(name, array.shape))
        return {name: placed[id(array)] for name, array in arrays.items()}

    def _first_state(self, trained: Arrays, optimizer: optax.GradientTransformation) -> TrainState:
        state = TrainState(jnp.zeros((), jnp.int32), trained, optimizer.init(trained))
        if self._layout is None:  # on a device, as a step returns it: else the second step would be compiled anew
            return jax.device_put(state, jax.local_devices()[0])
        everywhere = self._layout.replicated()
        shardings = {name: array.sharding for name, array in trained.items()}
        states = optax.tree_map_params(
            optimizer,
            jax.device_put,
            state.optimizer,
            shardings,
            transform_non_params=lambda number: jax.device_put(number, everywhere),
        )
        return TrainState(jax.device_put(state.step, everywhere), trained, states)

    def resume(self, checkpoints: Checkpoints) -> None:
        """Takes over the last checkpoint, if there is one."""
        found = checkpoints.restore(self.state)
        if found is not None:
            self.state, self.losses = found

    def batch(self, step: int) -> TrainingBatch:
        """Returns the batch of step `step` in micro-batches."""
        parts, host = self._options.num_micro_batches, self._packer.batch(step)
        fields = (field.reshape(parts, -1, field.shape[-1]) for field in vars(host).values())
        batch = TrainingBatch(*fields)
        return batch if self._layout is None else jax.device_put(batch, self._layout.of_batch())

    def steps(
        self,
        checkpoints: Checkpoints,
        folder: Path,
        report: Callable[[StepReport], None],
        stop: Callable[[], bool],
    ) -> bool:
        """Does the steps that are left.

        Returns whether all are done. A checkpoint is saved in any case.
        """
        options = self._options
        log = folder / LOSSES
        log.write_text("".join(_line(number, loss) for number, loss in enumerate(self.losses, 1)))
        while (done := len(self.losses)) < options.num_steps and not stop():
            began, batch = time.perf_counter(), self.batch(done)
            self.state, result = self.step(self.state, self._frozen, batch)
            loss = float(result["loss"])
            if not bool(result["is_finite"]):
                checkpoints.save(done, self.state, self.losses)
                raise TorchaxServeError(
                    f"step {done + 1}: expected a finite loss and gradient, got {loss}; the state of step {done} is in "
                    f"{folder}; lower learning_rate, or set max_grad_norm"
                )
            self.losses.append(loss)
            with log.open("a") as file:
                file.write(_line(done + 1, loss))
            seconds = time.perf_counter() - began
            report(StepReport(done + 1, options.num_steps, loss, float(result["grad_norm"]), batch.num_tokens, seconds))
            if (done + 1) % options.save_every == 0:
                checkpoints.save(done + 1, self.state, self.losses)
        checkpoints.save(len(self.losses), self.state, self.losses)
        return len(self.losses) >= options.num_steps


def _line(step: int, loss: float) -> str:
    return json.dumps({"step": step, "loss": loss}) + "\n"


def plot_losses(losses: list[float], file: Path) -> None:
    """Writes the loss curve of `losses` as a picture.

    Raises:
        InvalidArgumentError: matplotlib is not installed, or does not know the suffix; there is no such folder.
    """
    check_plot(file)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss", title="training loss")
    axes.plot(range(1, len(losses) + 1), losses)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150)
