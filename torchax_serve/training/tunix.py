"""Tunix's trainers on unmodified models, with the engine as rollout worker.

Tunix (google-tunix) trains ``flax.nnx`` modules. `NnxCausalLM` is one over the forward of a model of transformers;
`EngineRollout` is Tunix's interface of rollout workers over a `ServedModel`. Neither package is needed by the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.rollout import base_rollout

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.training.inputs import additive_masks
from torchax_serve.training.trainable import TrainableModel

if TYPE_CHECKING:
    from torchax_serve.entrypoints.served_model import ServedModel


def _attribute(name: str) -> str:
    """Returns the name of a weight as an attribute of an nnx module."""
    return name.replace(".", "__")


class NnxCausalLM(nnx.Module):
    """A model of transformers as Tunix calls one.

    That is ``model(tokens, positions, cache, mask) -> (logits, None)``.

    Weights of an adapter are `nnx.LoRAParam`, by which Tunix knows to train them alone; other trained ones are
    `nnx.Param`. A weight with several names is one variable. Frozen weights and buffers are plain variables.

    Args:
        model: The model, as `torchax_serve.training.trainable.trainable_model` returns it.
    """

    def __init__(self, model: TrainableModel) -> None:
        self.model = nnx.static(model) if hasattr(nnx, "static") else model
        self.config = model.base.config
        kind = nnx.LoRAParam if any(".lora_" in name for name in model.trained) else nnx.Param
        self.trained = nnx.Dict({_attribute(name): kind(jnp.copy(array)) for name, array in model.trained.items()})
        self.frozen = nnx.Dict({_attribute(name): nnx.Variable(array) for name, array in model.frozen.items()})

    def arrays(self) -> dict[str, jax.Array]:
        """Returns the trained weights by name of the module."""
        return {name: self.trained[_attribute(name)][...] for name in self.model.trained}

    def __call__(
        self,
        input_tokens: Any,
        positions: Any,
        cache: Any = None,
        attention_mask: Any = None,
        segment_ids: Any = None,
        **others: Any,
    ) -> tuple[jax.Array, None]:
        """Returns logits float[batch, length, vocab] and no cache.

        Args:
            input_tokens, positions: int32[batch, length].
            cache: None: rollouts are the engine's.
            attention_mask: bool[batch, length, length], which tokens see which.
            segment_ids: int32[batch, length]: tokens see only those of their own segment; None: all of a row.
            **others: What the trainers pass to models of their own; None is accepted.
        """
        if cache is not None:
            raise UnsupportedModelError(
                "cache: expected None, as rollouts are the engine's, got one; use EngineRollout"
            )
        if unknown := [name for name, value in others.items() if value is not None]:
            raise UnsupportedModelError(f"{unknown[0]}: expected None, which this model does not take; leave it out")
        frozen = {name: self.frozen[_attribute(name)][...] for name in self.model.frozen}
        given = {"input_ids": input_tokens, "position_ids": positions, "use_cache": False, "return_dict": False}
        if segment_ids is not None:
            attention_mask = attention_mask & (segment_ids[:, :, None] == segment_ids[:, None])
        given["attention_mask"] = additive_masks(self.model, attention_mask)
        output = self.model.forward(self.model.weights(self.arrays(), frozen), (), given)
        return output[0], None


class EngineRollout(base_rollout.BaseRollout):
    """Tunix's rollout worker over an engine.

    Its use is ``ClusterConfig(rollout_engine=partial(EngineRollout, served=...))``.

    Sampling is from the model's own distribution unless the configuration says otherwise; log-probabilities are those
    before any option, so a temperature other than 1 is refused where Tunix asks for them.

    Args:
        rollout_actor: The model that Tunix trains, an `NnxCausalLM`.
        tokenizer: Tunix's adapter of the tokenizer.
        mesh: Not used: the engine has its own devices.
        rollout_config: Tunix's configuration of rollouts.
        served: The model that serves, with the actor's weights.

    Attributes:
        num_updates: Number of `update_params` calls so far.
    """

    def __init__(
        self, rollout_actor: NnxCausalLM, tokenizer: Any, mesh: Any, rollout_config: Any, served: ServedModel
    ) -> None:
        if rollout_actor.model.module is not rollout_actor.model.base:
            raise InvalidArgumentError(
                "rollout_actor: expected a model without an adapter, whose weights are those of the engine; "
                "merge it first"
            )
        self._served, self._actor, self._tokenizer = served, rollout_actor, tokenizer
        # Other arrays than the actor's: Tunix compares them to find out whether to call `update_params` at all.
        graph, state = nnx.split(rollout_actor)
        self._copy: NnxCausalLM = nnx.merge(graph, jax.tree.map(jnp.copy, state))
        self.num_updates = 0

    def generate(self, prompts: list[str], rollout_config: Any, **kwargs: Any) -> base_rollout.RolloutOutput:
        """Samples an answer to each prompt."""
        config = rollout_config
        if config.temperature != 1.0 and getattr(config, "return_logprobs", False):
            raise InvalidArgumentError(
                f"temperature: expected 1.0 with return_logprobs, as log-probabilities are the model's own, got "
                f"{config.temperature}; choose 1.0"
            )
        options = {"temperature": config.temperature, "top_p": config.top_p or 1.0, "top_k": config.top_k or 0}
        options |= {"max_new_tokens": config.max_tokens_to_generate, "logprobs": 0}
        params = [
            SamplingParams(**options, seed=(self.num_updates * 65_537 + index) * 31 + (config.seed or 0))
            for index, _ in enumerate(prompts)
        ]
        ids = [list(self._tokenizer.encode(prompt)) for prompt in prompts]
        outputs = self._served.generate_batch(ids, params)
        width = config.max_prompt_length
        padded = np.full((len(ids), width), self.pad_id(), np.int32)
        for row, prompt in zip(padded, ids, strict=True):
            if len(prompt) > width:
                raise InvalidArgumentError(f"max_prompt_length: expected at least {len(prompt)}, got {width}; raise it")
            row[width - len(prompt) :] = prompt
        return base_rollout.RolloutOutput(
            text=[output.text for output in outputs],
            logits=None,
            tokens=[np.array(output.token_ids, np.int32) for output in outputs],
            left_padded_prompt_tokens=padded,
            logprobs=[np.array([each.logprob for each in output.logprobs or ()], np.float32) for output in outputs],
        )

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises: the trainer's model computes them."""
        raise UnsupportedModelError("expected log-probabilities of the rollout or of the trainer's model; set beta or "
                                    "return_logprobs so that these are used")  # fmt: skip

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Gives the engine the weights of the actor."""
        nnx.update(self._copy, params)
        model = self._actor.model
        named = {name: array for owner, array in self._copy.arrays().items() for name in model.names[owner]}
        self._served.set_weights(named, partial=True)
        self.num_updates += 1

    def pad_id(self) -> int:
        """Returns the id of padding."""
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """Returns the id of the end of a text."""
        return int(self._tokenizer.eos_id())

    def model(self) -> NnxCausalLM:
        """Returns a copy of the actor with the weights of the engine."""
        return self._copy
