"""Requests to an engine, made of a generation config as those of ``generate`` are."""

from torchax_serve.request_params import RequestParams
from torchax_serve.sampling_params import NO_PARAMS
from torchax_serve.scheduler import Request


def engine_request(prompt_ids, config, given=None, *, seed=None, source_ids=(), encoded=None, **more):
    """A request for a continuation; an encoder's input is token ids or its output."""
    params = RequestParams.of_generation_config(config, given or NO_PARAMS, seed=seed)
    return Request.of(prompt_ids, params, request_input=tuple(source_ids) if encoded is None else encoded, **more)
