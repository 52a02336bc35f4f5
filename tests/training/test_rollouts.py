"""Reinforcement learning on the live engine: the reward of a simple task rises, and nothing is compiled anew."""

import numpy as np
import pytest

from model_adapters.errors import InvalidArgumentError
from torchax_serve import EngineOptions, serve
from torchax_serve.training import RolloutLoop, RolloutOptions, TrainingOptions
from torchax_serve.training.trainable import trainable_model

OPTIONS = TrainingOptions(num_steps=1, seq_len=64)
# Tokens in no order: the model has no clear answer to them, so that answers differ and can be compared.
PROMPTS = [[2, *map(int, np.random.default_rng(seed).integers(100, 1500, 20))] for seed in range(2)]


def share_of_e(prompt, completion):
    """Share of the letter e: something that the model can write more often at once."""
    return completion.count("e") / max(8, len(completion))


def test_the_reward_rises_and_the_engine_has_the_trained_weights():
    model = trainable_model(None, None, OPTIONS)
    engine = EngineOptions(max_model_len=128, max_num_seqs=16, page_size=16)
    with serve(engine=engine, pack_weights=False) as served:
        options = RolloutOptions(group_size=8, max_new_tokens=12, learning_rate=1e-3, seed=1)
        loop = RolloutLoop(served, model, share_of_e, options)
        first = loop.round(PROMPTS)
        reports = [first, *(loop.round(PROMPTS) for _ in range(7))]
        assert [report.weights_version for report in reports] == list(range(1, 9))
        assert all(report.rewards.shape == (2, 8) for report in reports)
        assert max(report.max_logprob_gap for report in reports) < 1e-4
        means = [report.rewards.mean() for report in reports]
        assert np.mean(means[-2:]) > means[0] + 0.05, means
        served.engine._runner._background.wait()  # for programs that are compiled ahead
        executor = served.engine._runner._executor
        assert executor.num_programs == len(executor._step_programs._programs), "each step was compiled once"
        held = served._runtimes[0].weights
        for owner, array in loop.trained.items():
            np.testing.assert_array_equal(np.asarray(array), np.asarray(held[owner]))


def test_what_cannot_run_is_refused():
    with pytest.raises(InvalidArgumentError, match="group_size: expected at least 2"):
        RolloutOptions(group_size=1)
    model = trainable_model(None, "r=2,targets=q_proj", OPTIONS)
    with pytest.raises(InvalidArgumentError, match="expected one without an adapter"):
        RolloutLoop(None, model, share_of_e)
