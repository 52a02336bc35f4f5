"""Requests whose text repeats, so that drafts are found; and what comes of requests."""

import random

import transformers
from engine_models import VOCAB_SIZE
from engine_requests import engine_request

from torchax_serve import SamplingParams


def request(prompt, max_new_tokens=30, seed=0, vocab_size=VOCAB_SIZE, **options):
    params = SamplingParams(**options)
    config = transformers.GenerationConfig(max_new_tokens=max_new_tokens)
    return engine_request(prompt, params.merged_into(config), params, seed=seed)


def repeating_prompts(number, seed=0):
    rng = random.Random(seed)
    pieces = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(3, 9))] for _ in range(number)]
    return [piece * 3 + piece[:2] for piece in pieces]


def joined(outputs):
    """Returns the tokens and the log-probabilities of the outputs of a request."""
    tokens = [token for out in outputs for token in out.token_ids]
    return tokens, [scored for out in outputs for scored in out.logprobs or ()]


def answers_of(model, requests):
    """Returns tokens and log-probabilities of each request; all come at once."""
    return [joined(list(handle)) for handle in model.engine.submit_all(requests)]


def tokens_of(model, requests):
    return [handle.result() for handle in model.engine.submit_all(requests)]
