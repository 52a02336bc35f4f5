"""The tables of docs/generate.md: each row's arguments go where the table says. Nothing is decoded."""

import functools
import pathlib
import re

import pytest
import torch
import transformers
from cache_name import CACHE
from documents import ROOT
from transformers import AutoModelForCausalLM, DynamicCache, GenerationMixin, LogitsProcessorList, StaticCache
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

import model_adapters.errors
from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import serve
from torchax_serve.generation import sample_call
from torchax_serve.generation.routing import Path, Route
from torchax_serve.generation.sample_call import HONOURED_OPTIONS
from torchax_serve.generation.static_batch import StaticBatchLoop
from torchax_serve.request_params import PLAN_OPTIONS

TEXT = (ROOT / "docs" / "generate.md").read_text()
STATIC, TRANSFORMERS, REFUSED = (
    TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    for heading in ("The static batch", "transformers' loop over the compiled forward", "Refused")
)


def rows(section):
    """(arguments, remark) of each row of the section's table."""
    found = re.findall(r"^\| `(.+?)` \| ?(.*?) ?\|$", section, re.M)
    assert len(found) == section.count("\n|") - 2  # the heading and the line below it
    return found


class StaticBatchUsed(Exception):
    pass


class TransformersLoopUsed(Exception):
    pass


class NoToken(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.fixture(scope="module")
def served():
    with serve() as model:
        yield model


@pytest.fixture
def routes(monkeypatch):
    """What `route` says of each sampling loop that a call ends in."""
    found = []

    def record(model, call):
        found.append(route(model, call))
        return found[-1]

    route = sample_call.route
    monkeypatch.setattr(sample_call, "route", record)
    return found


@pytest.fixture
def call(served, monkeypatch):
    """Calls ``generate`` with the arguments of a row; the loops raise instead of running."""

    def static_batch(*args, **kwargs):
        raise StaticBatchUsed

    def transformers_loop(*args, **kwargs):
        raise TransformersLoopUsed

    def custom_generate(model, input_ids, **kwargs):
        assert model is served.torch_model
        raise TransformersLoopUsed

    def call(arguments, *, stub=True):
        if stub:
            monkeypatch.setattr(StaticBatchLoop, "run", static_batch)
            for name in ("_sample", "_beam_search", "_assisted_decoding"):
                # transformers reads the signature of its own loop
                monkeypatch.setattr(
                    GenerationMixin, name, functools.wraps(getattr(GenerationMixin, name))(transformers_loop)
                )
        ids = served.tokenizer("Gemma is a model", return_tensors="pt").input_ids
        given = {
            "tokenizer": served.tokenizer,
            "streamer": transformers.TextStreamer(served.tokenizer),
            "stopping_criteria": StoppingCriteriaList([NoToken()]),
            "logits_processor": LogitsProcessorList([transformers.TopKLogitsWarper(3)]),
            "left_padded": torch.tensor([[0, 0, *[1] * (ids.shape[1] - 2)]]),
            "hole_in_the_middle": torch.tensor([[1, 0, *[1] * (ids.shape[1] - 2)]]),
            "all_padding": torch.zeros_like(ids),
            "assistant": AutoModelForCausalLM.from_pretrained(EMBEDDED) if "assistant" in arguments else None,
            "allow": lambda row, tokens: [5, 6],
            "watermarking_config": transformers.WatermarkingConfig(),
            "custom_generate": custom_generate,
            "pathlib": pathlib,
            "own_cache": DynamicCache(config=served.config),
            "static_cache": StaticCache(config=served.config, max_cache_len=32),
            "inputs_embeds": torch.zeros(1, 4, served.config.hidden_size),
            "empty": torch.zeros(1, 0, dtype=torch.long),
            "too_long": torch.zeros(1, served.config.max_position_embeddings + 1, dtype=torch.long),
            "out_of_range": torch.tensor([[served.config.vocab_size]]),
        }
        kwargs = eval(f"dict({arguments})", given)
        if "cache" in kwargs:
            kwargs[CACHE] = kwargs.pop("cache")
        if not {"inputs", "inputs_embeds"} & set(kwargs):
            kwargs["input_ids"] = ids
        served.generate(**{"max_new_tokens": 4, **kwargs})

    return call


@pytest.mark.parametrize("arguments", [arguments for arguments, _ in rows(STATIC)])
def test_static_batch_arguments(call, routes, arguments):
    with pytest.raises(StaticBatchUsed):
        call(arguments)
    assert routes == [Route(Path.STATIC_BATCH)]


@pytest.mark.parametrize("arguments", [arguments for arguments, _ in rows(TRANSFORMERS)])
def test_transformers_loop_arguments(call, routes, arguments):
    with pytest.raises(TransformersLoopUsed):
        call(arguments)
    for chosen in routes:  # none where transformers calls another function than its sampling loop
        assert chosen.path is Path.TRANSFORMERS and chosen.reason


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")
@pytest.mark.parametrize(("arguments", "remark"), rows(REFUSED))
def test_refused_arguments(call, arguments, remark):
    name = re.match(r"`(\w+)`", remark)[1]
    kind = ValueError if name == "ValueError" else getattr(model_adapters.errors, name)
    with pytest.raises(kind) as error:
        call(arguments, stub=False)
    assert type(error.value) is kind
    argument = arguments.partition("=")[0]
    assert name != "UnsupportedArgumentError" or argument in str(error.value)


def test_static_batch_table_names_every_option():
    named = set(re.findall(r"(\w+)(?==)|`(\w+)`", "\n".join(f"{a} {b}" for a, b in rows(STATIC))))
    named = {one or other for one, other in named}
    assert named >= PLAN_OPTIONS | HONOURED_OPTIONS
