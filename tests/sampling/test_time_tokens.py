"""Rules of Whisper's time tokens against transformers' own processor, behind random answers."""

import jax
import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import WhisperTimeStampLogitsProcessor

from torchax_serve.request_params import GREEDY, RequestParams
from torchax_serve.sampling.history import history_row
from torchax_serve.sampling.time_tokens import enforce_time_tokens
from torchax_serve.sampling_params import TIME_TOKENS, TimeTokens

VOCAB_SIZE, EOS, BEGIN, PROMPT_LEN = 40, 18, 20, 3
NUM_ROWS = 200


@pytest.mark.parametrize("max_first", [None, 4])
@pytest.mark.parametrize("by_sum", [True, False])
def test_scores_are_those_of_transformers(max_first, by_sum):
    config = GenerationConfig(eos_token_id=EOS, max_length=20)
    config.no_timestamps_token_id, config.max_initial_timestamp_index = BEGIN - 1, max_first
    processor = WhisperTimeStampLogitsProcessor(config, PROMPT_LEN, _detect_timestamp_from_logprob=by_sum)
    setattr(config, TIME_TOKENS, TimeTokens(BEGIN, EOS, max_first, by_sum))
    options = RequestParams.of_checked(config)
    rng = np.random.default_rng(0)
    # One row more, whose request has no time tokens.
    histories, expected, lens = [history_row(GREEDY, [1], [], 20)], [], [0]
    scores = rng.normal(0, 3, (NUM_ROWS + 1, VOCAB_SIZE)).astype(np.float32)
    for row in range(1, NUM_ROWS + 1):
        answer = np.where(rng.random(row % 6) < 0.6, rng.integers(BEGIN, VOCAB_SIZE, row % 6), rng.integers(0, EOS))
        prompt = rng.integers(0, VOCAB_SIZE, PROMPT_LEN)
        tokens = torch.tensor(np.concatenate([prompt, answer]))[None]
        expected.append(processor(tokens, torch.tensor(scores[row])[None])[0].numpy())
        histories.append(history_row(options, prompt.tolist(), answer.tolist(), 20))
        lens.append(len(answer))
    width = histories[1].tokens.shape[0]
    histories[0] = history_row(RequestParams(ngram_size=1), [1], [], width - 1)
    history = jax.tree.map(lambda *rows: np.stack(rows), *histories)
    found = np.asarray(jax.jit(enforce_time_tokens)(history, np.array(lens), scores))
    np.testing.assert_array_equal(found[0], scores[0])
    np.testing.assert_array_equal(found[1:], np.array(expected))
    assert len({tuple(np.isfinite(row)) for row in found}) > 20
