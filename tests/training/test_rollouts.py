"""Reinforcement learning on the live engine: the reward of a simple task rises, and nothing is compiled anew."""

import numpy as np
import pytest

from model_adapters.errors import InvalidArgumentError
from torchax_serve import EngineOptions, serve
from torchax_serve.training import RolloutLoop, RolloutOptions, TrainingOptions
from torchax_serve.training.trainable import trainable_model

OPTIONS = TrainingOptions(num_steps=1, seq_len=64)
PROMPTS = ["<start_of_turn>user\nWhat is 3 plus 4?<end_of_turn>\n<start_of_turn>model\n"]


def share_of_e(prompt, completion):
    """Letters e among the first 16 characters: something that the model can do more often at once."""
    return completion[:16].count("e") / 16


def test_the_reward_rises_and_the_engine_has_the_trained_weights():
    model = trainable_model(None, None, OPTIONS)
    engine = EngineOptions(max_model_len=128, max_num_seqs=16, page_size=16)
    with serve(engine=engine, pack_weights=False) as served:
        options = RolloutOptions(group_size=16, max_new_tokens=12, learning_rate=1e-3, seed=1)
        loop = RolloutLoop(served, model, share_of_e, options)
        first = loop.round(PROMPTS)
        programs = served.stats().num_programs
        reports = [first, *(loop.round(PROMPTS) for _ in range(7))]
        assert [report.weights_version for report in reports] == list(range(1, 9))
        assert all(report.rewards.shape == (1, 16) for report in reports)
        assert max(report.max_logprob_gap for report in reports) < 1e-4
        means = [report.rewards.mean() for report in reports]
        assert np.mean(means[-2:]) > np.mean(means[:2]) + 0.05, means
        assert served.stats().num_programs == programs
        held = served._runtimes[0].weights
        for owner, array in loop.trained.items():
            np.testing.assert_array_equal(np.asarray(array), np.asarray(held[owner]))


def test_what_cannot_run_is_refused():
    with pytest.raises(InvalidArgumentError, match="group_size: expected at least 2"):
        RolloutOptions(group_size=1)
    model = trainable_model(None, "r=2,targets=q_proj", OPTIONS)
    with pytest.raises(InvalidArgumentError, match="expected one without an adapter"):
        RolloutLoop(None, model, share_of_e)
