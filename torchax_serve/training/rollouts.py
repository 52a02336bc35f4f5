"""Reinforcement learning with a serving model: rollouts, optax's steps, new weights.

The objective is that of GRPO (Shao et al., 2024): answers to one prompt are compared with each other, and the ratio of
probabilities is clipped as in PPO (Schulman et al., 2017).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from model_adapters.errors import InvalidArgumentError, TorchaxServeError
from torchax_serve.buckets import next_bucket
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.training.inputs import Inputs, inputs_of
from torchax_serve.training.packing import TrainingBatch
from torchax_serve.training.trainable import Arrays, TrainableModel

if TYPE_CHECKING:
    from torchax_serve.entrypoints.served_model import ServedModel

Reward = Callable[[str, str], float]
"""Returns the reward of a completion; arguments are the prompt and the completion."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Sizes of a round.

    Attributes:
        group_size: Answers to each prompt.
        max_new_tokens: Most tokens of an answer.
        clip: Most by which the ratio of probabilities differs from 1 where it still has a gradient.
        learning_rate: Of Adam.
        max_grad_norm: Gradients of a larger norm are scaled down to it.
        seed: Seed of sampling.
    """

    group_size: int = 8
    max_new_tokens: int = 64
    clip: float = 0.2
    learning_rate: float = 1e-5
    max_grad_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise InvalidArgumentError(f"group_size: expected at least 2, which are compared, got {self.group_size}")
        if self.max_new_tokens < 1:
            raise InvalidArgumentError(f"max_new_tokens: expected a number >= 1, got {self.max_new_tokens}; correct it")


@dataclasses.dataclass(frozen=True)
class RoundReport:
    """What happened in a round.

    Attributes:
        rewards: Reward of each answer, float64[num_prompts, group_size].
        completions: The answers, by prompt.
        loss: Objective, with the sign of a loss.
        max_logprob_gap: Largest difference between a sampled token's log-probability by the engine and by the trainer.
        weights_version: Version of the weights that the engine has afterwards.
    """

    rewards: np.ndarray
    completions: list[list[str]]
    loss: float
    max_logprob_gap: float
    weights_version: int


class RolloutLoop:
    """Rounds of rollout, reward, step and new weights.

    The engine answers other requests meanwhile.

    Answers are sampled from the model's own distribution (temperature 1, no truncation), so that the engine's
    log-probabilities are those of the distribution that was sampled.

    Args:
        served: The model that serves, with the weights of `model`.
        model: The same model to train, without an adapter.
        reward: Reward of an answer.
        options: Sizes of a round.
    """

    def __init__(
        self, served: ServedModel, model: TrainableModel, reward: Reward, options: RolloutOptions | None = None
    ) -> None:
        if model.module is not model.base:
            raise InvalidArgumentError(
                "model: expected one without an adapter, whose weights are those of the engine, got one with an "
                "adapter; "
                "merge it first"
            )
        self._served, self._model, self._reward = served, model, reward
        self._options = options or RolloutOptions()
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(self._options.max_grad_norm), optax.adam(self._options.learning_rate)
        )
        self.trained: Arrays = model.trained
        self._state = self._optimizer.init(self.trained)
        self._inputs = inputs_of(model, packing=False)
        self._step = jax.jit(self._update, donate_argnums=(0, 1))
        self._num_rounds = 0

    def round(self, prompts: Sequence[str | Sequence[int]]) -> RoundReport:
        """Runs one round on `prompts`.

        Raises:
            TorchaxServeError: a token was sampled with other weights than the trainer's; the loss is not finite.
        """
        options = self._options
        rows = [prompt for prompt in prompts for _ in range(options.group_size)]
        outputs = self._served.generate_batch(rows, [self._sampling(row) for row in range(len(rows))])
        self._num_rounds += 1
        rewards = np.array([self._reward(_text(row), out.text) for row, out in zip(rows, outputs, strict=True)], float)
        grouped = rewards.reshape(len(prompts), options.group_size)
        spread = grouped.std(1, keepdims=True)
        advantages = ((grouped - grouped.mean(1, keepdims=True)) / (spread + 1e-4)).reshape(-1).astype(np.float32)
        batch, logprobs = self._batch(rows, outputs)
        self.trained, self._state, loss, gap = self._step(
            self.trained, self._state, self._model.frozen, batch, logprobs, advantages
        )
        if not np.isfinite(float(loss)):
            raise TorchaxServeError(
                f"round {self._num_rounds}: expected a finite loss, got {float(loss)}; lower learning_rate"
            )
        named = {name: array for owner, array in self.trained.items() for name in self._model.names[owner]}
        version = self._served.set_weights(named, partial=True)
        texts = [out.text for out in outputs]
        size = options.group_size
        completions = [texts[begin : begin + size] for begin in range(0, len(texts), size)]
        return RoundReport(grouped, completions, float(loss), float(gap), version)

    def _sampling(self, row: int) -> SamplingParams:
        seed = (self._options.seed * 1_000_003 + self._num_rounds) * 65_537 + row
        return SamplingParams(
            max_new_tokens=self._options.max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, seed=seed, logprobs=0
        )

    def _batch(self, rows: Sequence[Any], outputs: Sequence[Any]) -> tuple[TrainingBatch, np.ndarray]:
        """Returns prompts with answers, and the answers' log-probabilities, float32[rows, row_len]."""
        tokenizer: Any = self._served.tokenizer
        prompts = [tokenizer.encode(row) if isinstance(row, str) else list(row) for row in rows]
        length = next_bucket(max(len(p) + len(out.token_ids) for p, out in zip(prompts, outputs, strict=True)))
        tokens, segments, learned = (np.zeros((len(rows), length), np.int32) for _ in range(3))
        logprobs = np.zeros((len(rows), length), np.float32)
        version = self._served.weights_version
        for row, (prompt, out) in enumerate(zip(prompts, outputs, strict=True)):
            if out.prompt_len != len(prompt) or any(each.weights_version != version for each in out.logprobs):
                raise TorchaxServeError(
                    f"expected answers by weights of version {version} to prompts of the tokenizer's tokens, got "
                    "others; "
                    "let nothing else call set_weights"
                )
            end = len(prompt) + len(out.token_ids)
            tokens[row, :end], segments[row, :end] = [*prompt, *out.token_ids], 1
            learned[row, len(prompt) : end] = 1
            logprobs[row, len(prompt) : end] = [each.logprob for each in out.logprobs]
        positions = np.tile(np.arange(length, dtype=np.int32), (len(rows), 1))
        return TrainingBatch(tokens, segments, positions, learned), logprobs

    def _update(
        self,
        trained: Arrays,
        state: Any,
        frozen: Arrays,
        batch: TrainingBatch,
        sampled: jax.Array,
        advantages: jax.Array,
    ) -> tuple[Arrays, Any, jax.Array, jax.Array]:
        """Returns weights and optimizer state after a step, and its loss.

        The last value is the largest gap of log-probabilities.
        """
        mask = batch.learned[:, 1:].astype(jnp.float32)

        def loss_of(trained: Arrays) -> tuple[jax.Array, jax.Array]:
            logprobs = token_logprobs(self._model, self._inputs, trained, frozen, batch)
            ratio = jnp.exp((logprobs - sampled[:, 1:]) * mask)
            clipped = jnp.clip(ratio, 1 - self._options.clip, 1 + self._options.clip)
            objective = jnp.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
            gap = jnp.max(jnp.abs(logprobs - sampled[:, 1:]) * mask)
            return -jnp.sum(objective * mask) / jnp.maximum(jnp.sum(mask), 1.0), gap

        (loss, gap), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained)
        updates, state = self._optimizer.update(gradients, state, trained)
        return optax.apply_updates(trained, updates), state, loss, gap


def token_logprobs(
    model: TrainableModel, inputs: Inputs, trained: Arrays, frozen: Arrays, batch: TrainingBatch
) -> jax.Array:
    """Returns log-probabilities of tokens given those before, float32[num_rows, row_len - 1].

    The first token has none.
    """
    logits = model.forward(model.weights(trained, frozen), (), inputs(batch))[0][:, :-1].astype(jnp.float32)
    return jnp.take_along_axis(jax.nn.log_softmax(logits, -1), batch.tokens[:, 1:, None], -1)[..., 0]


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else " ".join(map(str, prompt))
