"""Tunix's own trainers on unmodified models: SFT of all weights and of an adapter, GRPO on the engine's rollouts."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from training_models import tiny_folder, torch_steps
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft import peft_trainer

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve import EngineOptions, serve
from torchax_serve.training import TrainingOptions
from torchax_serve.training.packing import TrainingBatch
from torchax_serve.training.trainable import trainable_model
from torchax_serve.training.tunix import EngineRollout, NnxCausalLM

OPTIONS = TrainingOptions(num_steps=1, seq_len=64)
LEARNING_RATE = 1e-2
IDS = np.random.default_rng(0).integers(100, 1500, (2, 16), dtype=np.int32)
MASK = np.ones_like(IDS)
CAUSAL = np.broadcast_to(np.tril(np.ones((16, 16), bool)), (2, 16, 16))
POSITIONS = np.broadcast_to(np.arange(16, dtype=np.int32), (2, 16))

# Tunix and the packages below it use what flax and others have renamed.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"))


def model_inputs(batch):
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": POSITIONS,
        "attention_mask": CAUSAL,
    }


@pytest.mark.parametrize("lora", [None, "r=4,targets=q_proj+v_proj"])
def test_its_trainer_makes_the_steps_of_pytorch(folder, lora):
    trainable = trainable_model(folder, lora, OPTIONS)
    model = NnxCausalLM(trainable)
    frozen = jax.tree.map(np.asarray, nnx.state(model.frozen))
    config = peft_trainer.TrainingConfig(eval_every_n_steps=1000, max_steps=4)
    trainer = peft_trainer.PeftTrainer(model, optax.adamw(LEARNING_RATE, weight_decay=0.0), config)
    trainer.with_gen_model_input_fn(model_inputs)
    assert trainer._lora_enabled == (lora is not None)
    trainer.train([peft_trainer.TrainingInput(input_tokens=IDS, input_mask=MASK)] * 4)

    every = TrainingBatch(IDS, np.ones_like(IDS), POSITIONS, np.ones_like(IDS))
    module = trainable.module  # with the weights of the start
    losses = torch_steps(module, [every] * 4, LEARNING_RATE)
    assert losses[-1] < losses[0] - 0.1
    theirs = dict(module.named_parameters())
    for name, array in model.arrays().items():
        np.testing.assert_allclose(np.asarray(array), theirs[name].detach().numpy(), rtol=1e-3, atol=2e-4)
    jax.tree.map(np.testing.assert_array_equal, frozen, jax.tree.map(np.asarray, nnx.state(model.frozen)))


def share_of_e(prompts, completions, **others):
    """Share of the letter e: something that the model can write more often at once."""
    return [completion.count("e") / max(8, len(completion)) for completion in completions]


@pytest.fixture(scope="module")
def served():
    with serve(engine=EngineOptions(max_model_len=128, max_num_seqs=16, page_size=16), pack_weights=False) as model:
        yield model


def learner(served, reward, num_steps):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine=functools.partial(EngineRollout, served=served),
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adam(1e-3), eval_every_n_steps=100, max_steps=num_steps, mini_batch_size=2,
            train_micro_batch_size=2,
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=12, max_prompt_length=32, temperature=1.0, top_p=1.0, top_k=0, kv_cache_size=64,
            return_logprobs=True,
        ),
    )  # fmt: skip
    actor, reference = (NnxCausalLM(trainable_model(None, None, OPTIONS)) for _ in range(2))
    cluster = rl_cluster.RLCluster(actor=actor, reference=reference, tokenizer=served.tokenizer, cluster_config=config)
    options = GRPOConfig(num_generations=8, num_iterations=1, beta=0.0, epsilon=0.2)
    return GRPOLearner(rl_cluster=cluster, reward_fns=reward, algo_config=options), cluster


def test_grpo_on_rollouts_of_the_engine(served):
    means = []

    def reward(prompts, completions, **others):
        rewards = share_of_e(prompts, completions)
        means.append(np.mean(rewards))
        return rewards

    num_steps = 6
    grpo, cluster = learner(served, reward, num_steps)
    assert grpo.should_sync_weights
    version = served.weights_version
    random = np.random.default_rng(0)
    prompts = [served.tokenizer.decode(random.integers(100, 1500, 16).tolist()) for _ in range(2)]
    grpo.train([{"prompts": np.array(prompts)}] * num_steps)

    assert cluster.rollout.num_updates == num_steps
    assert served.weights_version == version + num_steps
    assert len(means) == num_steps
    assert np.mean(means[-2:]) > means[0] + 0.05, means
    served.engine._runner._background.wait()  # for programs that are compiled ahead
    executor = served.engine._runner._executor
    assert executor.num_programs == len(executor._step_programs._programs), "each step was compiled once"
    held = served._runtimes[0].weights
    actor = cluster.actor_trainer.model
    for owner, array in actor.arrays().items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(held[owner]))

    rollout = cluster.rollout
    (row,), (tokens,), (found,) = sampled(rollout, prompts[:1])
    ids = np.concatenate([row, tokens])[row.tolist().index(served.tokenizer.bos_token_id) :][None].astype(np.int32)
    causal = np.tril(np.ones((ids.size, ids.size), bool))[None]
    logits, _ = actor(ids, np.arange(ids.size, dtype=np.int32)[None], None, causal)
    wanted = jax.nn.log_softmax(logits[0])[np.arange(-len(tokens) - 1, -1), tokens]
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def sampled(rollout, prompts, **changes):
    sizes = {"max_tokens_to_generate": 12, "max_prompt_length": 32, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    output = rollout.generate(prompts, RolloutConfig(**{**sizes, "return_logprobs": True, "seed": 1, **changes}))
    return output.left_padded_prompt_tokens, output.tokens, output.logprobs


def test_what_the_rollout_worker_cannot_do(served, folder):
    with pytest.raises(InvalidArgumentError, match="rollout_actor: expected a model without an adapter"):
        EngineRollout(NnxCausalLM(trainable_model(folder, "r=2,targets=q_proj", OPTIONS)), None, None, None, served)
    actor = NnxCausalLM(trainable_model(folder, None, OPTIONS))
    rollout = EngineRollout(actor, TokenizerAdapter(served.tokenizer), None, None, served)
    with pytest.raises(InvalidArgumentError, match=r"temperature: expected 1\.0 with return_logprobs, .*got 0\.5"):
        sampled(rollout, ["Hi"], temperature=0.5)
    with pytest.raises(InvalidArgumentError, match=r"max_prompt_length: expected at least \d+, got 1; raise it"):
        sampled(rollout, ["Hello there"], max_prompt_length=1)
    with pytest.raises(UnsupportedModelError, match="expected log-probabilities of the rollout"):
        rollout.get_per_token_logps(IDS, IDS)
    with pytest.raises(UnsupportedModelError, match="cache: expected None"):
        actor(IDS, POSITIONS, {}, CAUSAL)
    with pytest.raises(UnsupportedModelError, match="images: expected None"):
        actor(IDS, POSITIONS, None, CAUSAL, images=IDS)
