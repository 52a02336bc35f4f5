"""AdamW with a cosine schedule, jitted with donated state, and checkpoints that a later run goes on from."""

from __future__ import annotations

import json
import os
import signal
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from embedded_training.model import Loss, Params
from embedded_training.packing import Batch
from model_adapters.errors import CheckpointError, InvalidArgumentError


@dataclass(frozen=True)
class TrainingPlan:
    """All that decides the result of a training run."""

    num_steps: int
    num_rows: int = 16
    row_len: int = 160
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_rows", "row_len", "learning_rate"):
            if getattr(self, name) <= 0:
                raise InvalidArgumentError(f"expected {name} above 0, got {getattr(self, name)}")


@dataclass
class History:
    """What a run has measured, kept with its checkpoint: one entry per step, and totals over all its parts."""

    losses: list[float] = field(default_factory=list)
    num_tokens: int = 0
    train_s: float = 0.0


def optimizer(plan: TrainingPlan) -> optax.GradientTransformation:
    """AdamW behind gradient clipping; no decay on norms, whose weights are offsets from one in Gemma."""
    warmup = min(100, max(1, plan.num_steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, plan.learning_rate, warmup, max(plan.num_steps, warmup + 1), 0.02 * plan.learning_rate
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            schedule,
            b2=0.98,
            weight_decay=plan.weight_decay,
            mask=lambda params: jax.tree.map(lambda array: array.ndim > 1, params),
        ),
    )


def training_step(loss: Loss, transform: optax.GradientTransformation) -> Callable[..., tuple[Any, Any, jax.Array]]:
    """The jitted ``step(params, opt_state, batch) -> (params, opt_state, loss)``; both states are donated."""

    def step(params: Params, opt_state: Any, batch: Batch) -> tuple[Params, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = transform.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return jax.jit(step, donate_argnums=(0, 1))


class Trainer:
    """A training run whose state lies in `workdir`; a run that was stopped goes on where its checkpoint was written."""

    def __init__(self, plan: TrainingPlan, params: Params, loss: Loss, workdir: Path):
        self.plan = plan
        self._transform = optimizer(plan)
        self._step = training_step(loss, self._transform)
        self._file = workdir / "checkpoint.npz"
        self.params = params
        self.opt_state = self._transform.init(params)
        self.step = 0
        self.history = History()
        workdir.mkdir(parents=True, exist_ok=True)
        if self._file.exists():
            self._restore()

    def run(
        self,
        batch_of: Callable[[int], Batch],
        report: Callable[[int, float, int, float], None],
        checkpoint_every: int = 100,
    ) -> bool:
        """Trains to the plan's end, or until SIGINT; returns whether the end was reached. Saves in both cases.

        `report` gets the number of steps done, the loss, and this step's tokens and seconds.
        """
        with _interrupt_noted() as interrupted:
            while self.step < self.plan.num_steps and not interrupted:
                begin = time.perf_counter()
                batch = batch_of(self.step)
                self.params, self.opt_state, value = self._step(self.params, self.opt_state, jax.device_put(batch))
                loss, step_s = float(value), time.perf_counter() - begin
                num_tokens = int(np.count_nonzero(batch.segment))
                self.step += 1
                self.history.losses.append(loss)
                self.history.num_tokens += num_tokens
                self.history.train_s += step_s
                report(self.step, loss, num_tokens, step_s)
                if self.step % checkpoint_every == 0:
                    self.save()
            self.save()
        return self.step >= self.plan.num_steps

    def save(self) -> None:
        """Writes the checkpoint; the file in place is whole at every moment."""
        leaves = jax.tree.leaves((self.params, self.opt_state))
        about = {"plan": asdict(self.plan), "step": self.step, "history": asdict(self.history)}
        partial = self._file.with_suffix(".partial")
        with partial.open("wb") as out:
            np.savez(out, about=np.array(json.dumps(about)), **{f"leaf_{i}": leaf for i, leaf in enumerate(leaves)})
        os.replace(partial, self._file)

    def _restore(self) -> None:
        try:
            with self._file.open("rb") as file, np.load(file) as stored:
                about = json.loads(str(stored["about"]))
                leaves = [jnp.array(stored[f"leaf_{i}"]) for i in range(len(stored.files) - 1)]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"expected a training checkpoint, got {self._file} ({error}); remove it") from error
        if about["plan"] != asdict(self.plan):
            parts = [f"{k}={v}" for k, v in about["plan"].items() if v != asdict(self.plan).get(k)]
            raise InvalidArgumentError(
                f"the checkpoint in {self._file.parent} was made with {', '.join(parts)}; "
                "give the same settings to go on, or another --workdir to start anew"
            )
        structure = jax.tree.structure((self.params, self.opt_state))
        expected = [leaf.shape for leaf in jax.tree.leaves((self.params, self.opt_state))]
        if [leaf.shape for leaf in leaves] != expected:
            raise CheckpointError(f"the checkpoint {self._file} is of a model with other shapes; remove it")
        self.params, self.opt_state = jax.tree.unflatten(structure, leaves)
        self.step, self.history = about["step"], History(**about["history"])


@contextmanager
def _interrupt_noted() -> Iterator[list[int]]:
    """Inside, Ctrl-C adds to the list that is handed out instead of raising, so that a step is never cut in two."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
