"""What models, streams and handles show in an interpreter: `repr`, signatures and `help`."""

import inspect
import pydoc
import re

import pytest
import torch

import torchax_serve
from torchax_serve import (
    EncoderModel,
    EngineOptions,
    SamplingParams,
    ServedModel,
    SpeechModel,
    TextStream,
    TorchaxServeError,
    UnsupportedArgumentError,
)
from torchax_serve.scheduler import SpeculativeConfig

GREEDY = SamplingParams(temperature=0, max_new_tokens=3)


@pytest.fixture(scope="module")
def served():
    with torchax_serve.serve() as model:
        yield model


def test_model_tells_name_type_dtype_device_and_engine():
    with torchax_serve.serve() as model:
        shown = repr(model)
        assert shown == (
            f"<ServedModel {model.name!r}: {model.config.model_type}, {str(model.dtype)[6:]}, "
            f"on {model.device_description}>"
        )
        model.stream("Gemma is", GREEDY).close()
        assert repr(model) == f"{shown[:-1]}, engine: {model.engine.description}>"
        module = model.torch_model
    assert repr(model) == shown.partition(", on ")[0] + ", closed>"
    with pytest.raises(TorchaxServeError, match="this one was closed; call serve"):
        module(torch.tensor([[1, 2]]))


def test_model_without_an_engine_says_so(served):
    handle = served.torch_model.register_forward_hook(lambda module, args, output: output)
    before, served._engine = served._engine, None
    try:
        served.stream("Gemma is", GREEDY).close()
        assert repr(served).endswith(", no engine>")
    finally:
        handle.remove()
        served._engine = before


def test_engine_tells_its_cache_and_its_requests(served):
    served.chat("Hi", GREEDY)
    assert re.fullmatch(
        r"<Engine: cache of .* pages .*; 0 running, 0 waiting, .* programs, .* tokens/s>", repr(served.engine)
    )
    assert repr(served.single_engine).startswith("<Engine: single requests: one at a time")


def test_options_show_a_draft_model_by_its_class():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    options = EngineOptions(max_num_seqs=4, speculative={"method": "draft_model", "model": module})
    shown = repr(options)
    assert "\n" not in shown
    assert "speculative=SpeculativeConfig(method='draft_model', model=<Sequential>, num_speculative_tokens=4" in shown
    named = EngineOptions(speculative={"method": "draft_model", "model": "qwen3-0.6b"})
    assert eval(repr(named), {"EngineOptions": EngineOptions, "SpeculativeConfig": SpeculativeConfig}) == named


def test_model_that_was_never_loaded_has_a_repr():
    for cls in (ServedModel, EncoderModel, SpeechModel):
        assert repr(cls.__new__(cls)) == f"<{cls.__name__}, not loaded>"


def test_stream_tells_its_tokens_text_and_state(served):
    with served.stream("Gemma is", GREEDY) as answer:
        assert repr(answer) == "<TextStream: 0 tokens, '', running>"
        next(answer)
        assert repr(answer).endswith(f"tokens, {answer.text!r}, running>")
        list(answer)
        ended = f"finish_reason={answer.stats.finish_reason!r}"
        assert repr(answer) == f"<TextStream: {len(answer.token_ids)} tokens, {answer.text!r}, {ended}>"


def test_token_stream_tells_its_request(served):
    tokens = served.iter_tokens(served.tokenizer("Gemma is").input_ids, params=GREEDY)
    prompt_len = len(served.tokenizer("Gemma is").input_ids)
    assert f": {prompt_len} prompt tokens, 0 tokens read, running>" in repr(tokens)
    assert repr(tokens).startswith("<TokenStream of <RequestHandle ")
    list(tokens)
    assert "tokens read, finish_reason='length'>" in repr(tokens)


def test_completion_shows_its_fields(served):
    (completion,) = served.generate_batch(["Gemma is"], GREEDY)
    for field in ("text=", "token_ids=[", "prompt_len=", "finish_reason='length'"):
        assert field in repr(completion)


@pytest.mark.parametrize("name", ["chat", "stream", "generate_batch", "iter_tokens", "embed"])
def test_signatures_name_every_argument(name):
    parameters = inspect.signature(getattr(ServedModel, name)).parameters.values()
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (
            lambda model: model.chat("Hi", temperature=0),
            r"chat\(\) has no argument 'temperature'; write ",
        ),
        (lambda model: model.stream("Hi", tool=[]), r"stream\(\) has no argument 'tool'"),
        (lambda model: model.generate_batch(["Hi"], parms=GREEDY), r"generate_batch\(\) .* did you mean params\?"),
    ],
)
def test_unknown_arguments_are_refused_with_a_remedy(served, call, hint):
    with pytest.raises(UnsupportedArgumentError, match=hint):
        call(served)


@pytest.mark.parametrize("name", torchax_serve.__all__)
def test_help_of_each_public_name_begins_with_a_sentence(name):
    shown = getattr(torchax_serve, name)
    first = (inspect.getdoc(shown) or "").partition("\n")[0]
    assert first.endswith((".", ":")) and len(first) <= 110
    assert first in pydoc.render_doc(shown, renderer=pydoc.plaintext)


def test_public_names_are_listed():
    assert set(torchax_serve.__all__) <= set(dir(torchax_serve))
    assert TextStream.__name__ in dir(torchax_serve)
