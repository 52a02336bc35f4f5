"""``/infill``: the text in a gap, as llama.cpp's server has it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import pydantic
from starlette.requests import Request
from starlette.responses import JSONResponse

from torchax_serve.server.answers import Answer, AnswerOptions
from torchax_serve.server.context import ServerContext, context_of, follow
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.fim_prompts import fim_tokens_of
from torchax_serve.server.formats import finish_reason_of
from torchax_serve.server.infill_limits import LineLimits, chosen_samplers, limited_steps
from torchax_serve.server.model_requests import read_for_model
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.notes import note_once
from torchax_serve.server.prompt_limits import check_len
from torchax_serve.server.request_fields import ApiRequest, ModelName, Strings, honoured, no_effect, refused
from torchax_serve.server.sampling import renamed_error, sampling_params
from torchax_serve.server.schemas import CompletionRequest
from torchax_serve.server.sse import EventStream, event, until_disconnect
from torchax_serve.text.infill import ContextFile
from torchax_serve.text.text_stream import AnswerStep
from torchax_serve.validation.argument_checks import short_repr

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
MAX_FILES = 256
"""Most files in front of a prompt."""
_FIELDS = (
    *("index", "content", "tokens", "stop", "model", "tokens_predicted", "tokens_evaluated", "tokens_cached", "prompt"),
    *("truncated", "stop_type", "stopping_word", "has_new_line"),
)


class InputExtra(pydantic.BaseModel):
    """A file in front of the prompt."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    filename: str = "tmp"
    text: str = ""
    time: Any = None  # when an editor has seen the text; nobody reads it


class InfillRequest(ApiRequest):
    """Body of ``/infill``."""

    routes: ClassVar[tuple[str, ...]] = ("/infill",)
    model: Annotated[ModelName, honoured("a name in `/v1/models`, another one is 404; without it, the served one")] = ""
    input_prefix: Annotated[str, honoured("text before the gap")]
    input_suffix: Annotated[str, honoured("text behind the gap")]
    input_extra: Annotated[list[InputExtra] | None, honoured("files in front, each with `filename` and `text`")] = None
    prompt: Annotated[str | None, honoured("beginning of the text in the gap, which the answer continues")] = None
    n_predict: Annotated[
        int | None, honoured("most tokens of the answer; by default and with -1, all there is room for")
    ] = None
    stream: Annotated[bool | None, honoured("the answer as server-sent events, a piece per step of the engine")] = None
    temperature: Annotated[float | None, honoured("0 is greedy; by default as the model's generation config")] = None
    top_k: Annotated[int | None, honoured("sample from so many tokens; 0 and -1 switch it off")] = None
    top_p: Annotated[float | None, honoured("nucleus sampling, above 0 and up to 1")] = None
    min_p: Annotated[float | None, honoured("tokens with this fraction of the likeliest one's probability")] = None
    repeat_penalty: Annotated[float | None, honoured("above 0; 1 switches it off")] = None
    presence_penalty: Annotated[float | None, honoured("-2 to 2")] = None
    frequency_penalty: Annotated[float | None, honoured("-2 to 2")] = None
    seed: Annotated[int | None, honoured("equal requests with equal seeds have equal answers; -1: any")] = None
    stop: Annotated[Strings | None, honoured("strings that end the answer, at most 64")] = None
    ignore_eos: Annotated[bool | None, honoured("an end-of-sequence token does not end the answer")] = None
    return_tokens: Annotated[bool | None, honoured("`tokens` of the answer; else the list is empty")] = None
    response_fields: Annotated[
        Strings | None, honoured("the only fields of a complete answer; names that it does not have are left out")
    ] = None
    cache_prompt: Annotated[bool | None, no_effect("prefixes are found without it")] = None
    id_slot: Annotated[int | None, no_effect("slots are chosen by the engine")] = None
    samplers: Annotated[
        Strings | None,
        honoured("the samplers that are used, in the order here; others are off; `infill` is not applied"),
    ] = None
    n_indent: Annotated[
        int | None, honoured("spaces or tabs of each new line; the answer ends at a line that has less")
    ] = None
    n_probs: Annotated[Any, refused("expected 0; /v1/completions has logprobs", 0)] = None
    n_keep: Annotated[Any, refused("expected 0; prompts are not cut", 0)] = None
    t_max_prompt_ms: Annotated[Any, no_effect("llama.cpp's server does not limit that time either")] = None
    t_max_predict_ms: Annotated[
        int | None, honoured("milliseconds behind the first token; then the answer ends with its next line")
    ] = None
    typical_p: Annotated[Any, refused("expected 1", 1)] = None
    logit_bias: Annotated[Any, refused("expected none; /v1/completions has it", [], {})] = None
    grammar: Annotated[Any, refused("expected none; /v1/completions has structured_outputs", "")] = None
    json_schema: Annotated[Any, refused("expected none; /v1/completions has structured_outputs", {})] = None


class _Started(NamedTuple):
    """An answer that runs, and the text of its prompt."""

    answer: Answer
    prompt: str


async def infill(request: Request) -> Any:
    """Writes the text in a gap."""
    context = context_of(request)
    service, body = await read_for_model(request, InfillRequest, "generate")
    service.settle_name(body, request.state.key, may_be_adapter=True)
    _check(body)
    plain = _as_completion(body)
    try:
        work = service.run(_start, context, service, body, plain, request.state.key_name)
        started = await until_disconnect(request.receive, work)
    except ApiError as error:
        raise _in_words_of(body, error) from error
    except ValueError as error:
        raise _in_words_of(body, renamed_error(error, plain)) from error
    follow(request, plain, [started.answer])
    if body.stream:
        return EventStream(_events(context, body, started), context.options.keep_alive_s)
    return JSONResponse(await until_disconnect(request.receive, _complete(context, body, started)))


def _check(body: InfillRequest) -> None:
    """Raises ApiError, 400, for values that the request may not have."""
    if body.n_predict is not None and (body.n_predict < -1 or body.n_predict == 0):
        message = f"n_predict: expected at least 1, or -1 for all there is room for, got {body.n_predict}"
        raise bad_request(message, "n_predict", "invalid_value")
    for name in ("n_indent", "t_max_predict_ms"):
        if (getattr(body, name) or 0) < 0:
            raise bad_request(f"{name}: expected 0 or more, got {getattr(body, name)}", name, "invalid_value")
    if len(body.input_extra or ()) > MAX_FILES:
        message = f"input_extra: expected at most {MAX_FILES} files, got {len(body.input_extra or ())}"
        raise bad_request(message, "input_extra", "invalid_value")
    for name in body.response_fields or ():
        if name not in _FIELDS:
            note_once(f"/infill: response_fields has {short_repr(name[:100])}, which answers do not have; left out")


def _as_completion(body: InfillRequest) -> CompletionRequest:
    """Returns the sampling options of a request as those of a plain completion."""
    options = {name: getattr(body, name) for name in _SAMPLING}
    if body.samplers is not None:
        options = chosen_samplers(body.samplers, options)
    options["repetition_penalty"] = options.pop("repeat_penalty")
    return CompletionRequest(
        model=body.model,
        prompt=body.input_prefix,
        stream=body.stream,
        **options,
        seed=None if body.seed == -1 else body.seed,
        stop=body.stop,
        ignore_eos=body.ignore_eos,
    )


def _in_words_of(body: InfillRequest, error: Exception) -> Exception:
    """Returns an error about a field of a plain completion as one about the request's own."""
    names = {"repetition_penalty": "repeat_penalty", "max_tokens": "n_predict"}
    if isinstance(error, ApiError) and error.param in names:
        own = names[error.param]
        error.message, error.param = error.message.replace(error.param, own), own
    return error


def _start(
    context: ServerContext, service: ModelService, body: InfillRequest, plain: CompletionRequest, key_name: str | None
) -> _Started:
    """Tokenizes and submits a request; called in a thread."""
    tokens = fim_tokens_of(service, "input_suffix")
    tokenizer: Any = service.model.text_tokenizer
    files = [ContextFile(each.filename, each.text) for each in body.input_extra or ()]
    texts = [body.input_prefix, body.input_suffix, body.prompt or "", *(text for file in files for text in file)]
    check_len(service, texts, "input_prefix", is_cut=False)
    before, behind, start = texts[:3]
    prompt_ids = tokens.prompt_ids(tokenizer, before, behind, start=start, files=files)
    room = None if service.max_model_len is None else max(1, service.max_model_len - len(prompt_ids))
    most = room if body.n_predict in (None, -1) else body.n_predict
    params = sampling_params(plain, service, context.options, key_name, max_new_tokens=most)
    params = dataclasses.replace(params, stop_token_ids=list(tokens.ends) or None)
    options = AnswerOptions(first_token_timeout_s=context.options.first_token_timeout_s)
    answers = service.start([prompt_ids], params, options, field="input_prefix")
    return _Started(answers[0], tokenizer.decode(prompt_ids))


def _steps(body: InfillRequest, started: _Started) -> AsyncGenerator[AnswerStep]:
    most_s = body.t_max_predict_ms / 1000 if body.t_max_predict_ms else None
    return limited_steps(started.answer, LineLimits(body.n_indent or 0, most_s))


async def _complete(context: ServerContext, body: InfillRequest, started: _Started) -> dict[str, Any]:
    """Returns the body of the complete answer."""
    steps = []
    async with contextlib.aclosing(_steps(body, started)) as found:
        async for step in found:
            context.metrics.step(started.answer, step)
            steps.append(step)
    answer = _last(body, started, steps)
    wanted = answer if body.response_fields is None else body.response_fields
    return {name: answer[name] for name in wanted if name in answer}


async def _events(context: ServerContext, body: InfillRequest, started: _Started) -> AsyncGenerator[bytes]:
    """Yields the events of a streamed answer; the last one has all but the text and tokens."""
    steps = []
    async with contextlib.aclosing(_steps(body, started)) as found:
        async for step in found:
            context.metrics.step(started.answer, step)
            steps.append(step)
            if step.text:
                yield event(_piece(body, started, [step]) | {"stop": False})
    yield event(_last(body, started, steps) | {"content": "", "tokens": []})


def _piece(body: InfillRequest, started: _Started, steps: Sequence[AnswerStep]) -> dict[str, Any]:
    return {
        "index": 0,
        "content": "".join(step.text for step in steps),
        "tokens": [token_id for step in steps for token_id in step.token_ids] if body.return_tokens else [],
        "stop": True,
        "model": body.model,
        "tokens_predicted": started.answer.num_tokens,
        "tokens_evaluated": len(started.answer.prompt_ids),
    }


def _last(body: InfillRequest, started: _Started, steps: Sequence[AnswerStep]) -> dict[str, Any]:
    found = _piece(body, started, steps)
    last = steps[-1]
    is_word = isinstance(last.stop, str)
    kind = "limit" if finish_reason_of(last.finish_reason) == "length" else "word" if is_word else "eos"
    return found | {
        "tokens_cached": started.answer.num_cached_tokens,
        "prompt": started.prompt,
        "truncated": False,
        "stop_type": kind,
        "stopping_word": last.stop if is_word else "",
        "has_new_line": "\n" in found["content"],
    }
