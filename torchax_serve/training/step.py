"""One training step as a pure function: loss of learned tokens, gradients, update."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from torchax_serve.training.inputs import Inputs
from torchax_serve.training.options import TrainingOptions
from torchax_serve.training.packing import TrainingBatch
from torchax_serve.training.parallel import Layout, partitionable
from torchax_serve.training.trainable import Arrays, TrainableModel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step replaces; its arrays are donated.

    Attributes:
        step: Number of steps done, int32[].
        trained: Float32 weights by name.
        optimizer: optax's state.
    """

    step: jax.Array
    trained: Arrays
    optimizer: Any


Step = Callable[[TrainState, Arrays, TrainingBatch], tuple[TrainState, dict[str, jax.Array]]]


def optimizer_of(options: TrainingOptions) -> optax.GradientTransformation:
    """Returns AdamW with the options' schedule, after clipping of the gradients' norm."""
    rate, warmup, rest = options.learning_rate, options.warmup_steps, max(1, options.num_steps - options.warmup_steps)
    falling = {
        "constant": optax.constant_schedule(rate),
        "linear": optax.linear_schedule(rate, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(rate, rest),
    }[options.schedule]
    schedule = optax.join_schedules([optax.linear_schedule(0.0, rate, max(1, warmup)), falling], [warmup])
    adamw = optax.adamw(
        schedule if warmup else falling,
        weight_decay=options.weight_decay,
        mask=lambda trained: jax.tree.map(lambda array: array.ndim > 1, trained),
    )
    clip = [] if options.max_grad_norm is None else [optax.clip_by_global_norm(options.max_grad_norm)]
    return optax.chain(*clip, adamw)


def token_losses(
    model: TrainableModel, inputs: Inputs, trained: Arrays, frozen: Arrays, batch: TrainingBatch
) -> jax.Array:
    """Returns the sum of the losses of all learned tokens of `batch`, float32[].

    A token is predicted from those before it in its segment.
    """
    output = model.forward(model.weights(trained, frozen), (), inputs(batch))
    logits = output[0][:, :-1].astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.tokens[:, 1:])
    return jnp.sum(losses * learned_mask(batch))


def learned_mask(batch: TrainingBatch) -> jax.Array:
    """Returns 1 where a token is predicted and learned, float32[num_rows, row_len - 1].

    It is predicted from the one before it.
    """
    same = batch.segments[..., 1:] == batch.segments[..., :-1]
    return (same & (batch.learned[..., 1:] > 0) & (batch.segments[..., 1:] > 0)).astype(jnp.float32)


def make_step(
    model: TrainableModel, inputs: Inputs, optimizer: optax.GradientTransformation, layout: Layout | None
) -> Step:
    """Returns the function of a step.

    ``step(state, frozen, batch)`` takes batches [num_micro_batches, num_rows, row_len] and returns the new state and
    the step's ``loss`` (mean over learned tokens), ``grad_norm`` and ``is_finite``. If a number is not finite, the
    state stays as it was.
    """

    def loss_sum(trained: Arrays, frozen: Arrays, batch: TrainingBatch) -> jax.Array:
        with contextlib.nullcontext() if layout is None else partitionable():
            return token_losses(model, inputs, trained, frozen, batch)

    def step(state: TrainState, frozen: Arrays, batch: TrainingBatch) -> tuple[TrainState, dict[str, jax.Array]]:
        gradient_of = jax.value_and_grad(loss_sum)

        def add(total: Any, part: TrainingBatch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient_of(state.trained, frozen, part)), None

        parts: Any = batch
        if batch.tokens.shape[0] == 1:
            total = gradient_of(state.trained, frozen, jax.tree.map(lambda field: field[0], parts))
        else:
            zero = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, state.trained)
            total, _ = jax.lax.scan(add, zero, parts)
        count = jnp.maximum(jnp.sum(learned_mask(batch)), 1.0)
        loss, gradients = jax.tree.map(lambda array: array / count, total)
        norm = jnp.sqrt(sum(jnp.sum(array * array) for array in jax.tree.leaves(gradients)))
        is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.trained)
        new = TrainState(state.step + 1, optax.apply_updates(state.trained, updates), optimizer_state)
        kept = jax.tree.map(lambda after, before: jnp.where(is_finite, after, before), new, state)
        return kept, {"loss": loss, "grad_norm": norm, "is_finite": is_finite}

    return step
