"""Fields of the server in requests to replicas of Ray Serve: the same meaning, or a refusal by name."""

import json

import pytest

from torchax_serve.distributed.ray import openai_fields
from torchax_serve.distributed.ray.http_requests import KNOWN, BadHttpRequest, params_of, parse_request
from torchax_serve.server.errors import ApiError
from torchax_serve.server.options import ServerOptions
from torchax_serve.server.request_fields import notes_of
from torchax_serve.server.sampling import sampling_params
from torchax_serve.server.schemas import ChatRequest, CompletionRequest

KINDS = {
    "chat": (ChatRequest, {"messages": [{"role": "user", "content": "hi"}]}),
    "text": (CompletionRequest, {"prompt": "hi"}),
}
FIELDS = {kind: notes_of(model) for kind, (model, _) in KINDS.items()}
VALUES = {
    "stop": ["a", ["a", "b", ""], "", []],
    "stop_token_ids": [[3, 5]],
    "ignore_eos": [True],
    "max_tokens": [7],
    "max_completion_tokens": [7],
    "min_tokens": [2],
    "temperature": [0, 0.7],
    "top_p": [0.5],
    "top_k": [-1, 0, 40],
    "min_p": [0.1],
    "presence_penalty": [1.5],
    "frequency_penalty": [-1],
    "repetition_penalty": [1.2],
    "logit_bias": [{"3": 5}],
    "allowed_token_ids": [[1, 2]],
    "seed": [7, -1, -(2**63), 2**64 - 1],
    "priority": [-3],
    "cache_salt": ["x"],
}
"""Values of the fields that a replica takes."""


def of_server(kind, fields):
    model, base = KINDS[kind]
    request = model.parse({"model": "tiny", **base, **fields})
    limit = getattr(request, "max_completion_tokens", None)
    salt, most = request.cache_salt, request.max_tokens if limit is None else limit
    return sampling_params(request, None, ServerOptions(), max_new_tokens=most, cache_salt=salt)


def of_replica(kind, fields):
    body = json.dumps({**KINDS[kind][1], **fields}).encode()
    return params_of(parse_request(body, 1 << 20))


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_the_server_has_a_place(kind):
    for name, note in FIELDS[kind].items():
        if name in ("messages", "prompt") or name in openai_fields.CHAT:
            continue
        assert (name in openai_fields.NO_EFFECT) == (note.effect == "no effect"), name
        is_taken = name in VALUES
        assert is_taken == (name not in openai_fields.NO_EFFECT | set(openai_fields.REFUSED)), name
        assert not is_taken or note.effect == "honoured", name
        assert of_replica(kind, {name: None}) == of_replica(kind, {}), name
    assert set(FIELDS["chat"]) | set(FIELDS["text"]) >= openai_fields.KNOWN


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_replica_takes_means_the_same(kind):
    for name, values in VALUES.items():
        for value in values if name in FIELDS[kind] else ():
            found, expected = of_replica(kind, {name: value}), of_server(kind, {name: value})
            assert found.stop_strings == expected.stop_strings
            for field in set(KNOWN) - {"prompt", "messages", "stop"}:
                ours, theirs = getattr(found, field), getattr(expected, field)
                ours, theirs = (tuple(each) if isinstance(each, list) else each for each in (ours, theirs))
                assert ours == theirs, (name, value, field)
    for name in openai_fields.NO_EFFECT & set(FIELDS[kind]):
        assert of_replica(kind, {name: "x"}) == of_replica(kind, {}), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_others_are_refused_by_name(kind):
    for name in set(openai_fields.REFUSED) & set(FIELDS[kind]):
        with pytest.raises(BadHttpRequest) as caught:
            of_replica(kind, {name: {"some": "value"}})
        assert (caught.value.status, caught.value.param) == (400, name)
    for name, value in openai_fields.HARMLESS.items():
        assert of_replica(kind, {name: value}) == of_replica(kind, {})


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "hot"},
        {"top_k": -2},
        {"max_tokens": -1},
        {"seed": 2**64},
        {"stop": [1]},
        {"logit_bias": {"x": 1}},
    ],
)
def test_what_one_refuses_the_other_refuses(fields):
    with pytest.raises(BadHttpRequest):
        of_replica("chat", fields)
    with pytest.raises(ApiError):
        of_server("chat", fields)
