"""``/v1/systemone``: probabilities of the answers to typed questions about one state.

Each question is a chat whose message has the state in front. What counts is how likely the labels of its options are as
the first token of the answer. The first question is read alone: the others find the state in the prefix cache. Images
stand where the texts name them, as in transformers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve.outputs import TokenLogprobs
from torchax_serve.sampling_params import MAX_LOGPROBS, SamplingParams
from torchax_serve.server.answers import Answer, AnswerOptions, prepare, prepare_media, submit
from torchax_serve.server.chat import read_variables
from torchax_serve.server.context import ServerContext, context_of
from torchax_serve.server.decision_questions import (
    MAX_ASSETS,
    MAX_QUESTIONS,
    Content,
    ImageAsset,
    Question,
    check_assets,
    parts_of,
    questions_of,
    text_of,
)
from torchax_serve.server.dialect_requests import names_of_fields
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.formats import finish_reason_of
from torchax_serve.server.model_requests import read_for_model
from torchax_serve.server.model_service import ChatPrompt, ModelService
from torchax_serve.server.prompt_limits import check_len, check_prompts
from torchax_serve.server.request_fields import ApiRequest, ModelName, honoured
from torchax_serve.server.response_parsing import begun_answer
from torchax_serve.server.sampling import sampling_params
from torchax_serve.server.schemas import CompletionRequest
from torchax_serve.server.sse import until_disconnect
from torchax_serve.server.thinking_budget import PROMPT_END_TOKENS, text_of_tokens
from torchax_serve.tasks.decisions import DecisionFiles
from torchax_serve.text.chat_template import ChatOptions

NUM_AT_ONCE = 8
"""Questions of one request that the engine has at once: a long state times all of them would fill its queue."""
NUM_LABELS_AT_ONCE = 4
"""Labels of a question that are read at once."""


class SystemOneRequest(ApiRequest):
    """Body of ``/v1/systemone``."""

    routes: ClassVar[tuple[str, ...]] = ("/v1/systemone",)
    model: Annotated[ModelName, honoured("a name in `/v1/models`, another one is 404; without it, the served one")] = ""
    state: Annotated[Content, honoured("what the questions are about: a text, or JSON that is read as its text")]
    questions: Annotated[
        dict[str, Any],
        honoured(f"1 to {MAX_QUESTIONS} questions by name, each with `type`, `instructions` and `criteria`"),
    ]
    instructions: Annotated[str | None, honoured("a text between the state and each question")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, honoured("variables of the chat template; `enable_thinking` is false by default")
    ] = None
    cache_salt: Annotated[str | None, honoured("prefixes are found by requests with the same salt alone")] = None
    priority: Annotated[int | None, honoured("lower runs first, 0 by default")] = None
    assets: Annotated[
        dict[str, ImageAsset] | None,
        honoured(f"at most {MAX_ASSETS} images (`data_base64`) by the placeholder that they replace in any text"),
    ] = None


class AskedPrompt(NamedTuple):
    """A question with its prompt.

    Attributes:
        question: The question.
        prompt: Its prompt.
        temperature: Divides the scores of its options.
        names: Names of its options in the order of a head's scores; empty for a model without a head.
    """

    question: Question
    prompt: ChatPrompt
    temperature: float = 1.0
    names: Sequence[str] = ()


class _Reading(NamedTuple):
    """What a model says to a question.

    Attributes:
        logprobs: Log-probabilities of the labels as the first token, among all tokens.
        is_label: Whether the likeliest token is a label.
        num_cached: Tokens of the prompt that were in the cache.
    """

    logprobs: list[float]
    is_label: bool
    num_cached: int


async def systemone(request: Request) -> Response:
    """Answers typed questions about a state by probabilities."""
    context = context_of(request)
    service, body = await read_for_model(request, SystemOneRequest, ("chat", "decide"))
    service.settle_name(body, request.state.key, may_be_adapter=True)
    questions = questions_of(body.questions)
    with names_of_fields({"messages": "state"}):
        asked = await until_disconnect(request.receive, service.run(_asked, service, body, questions))
    if "decide" in service.tasks:
        return _response(body, asked, await until_disconnect(request.receive, _head_scores(request, service, asked)))
    reader = _Reader(request, context, service, body)
    readings = await until_disconnect(request.receive, reader.all(asked))
    scores = [reading.logprobs for reading in readings]
    return _response(body, asked, scores, readings)


def _response(
    body: SystemOneRequest,
    asked: Sequence[AskedPrompt],
    scores: Sequence[Sequence[float]],
    readings: Sequence[_Reading] = (),
) -> Response:
    """Returns the answers by the scores of the options; a head reads no tokens."""
    answers, diagnostics = {}, {}
    for each, row in zip(asked, scores, strict=True):
        answers[each.question.name] = each.question.answer(_softmax([score / each.temperature for score in row]))
    for each, reading in zip(asked, readings, strict=bool(readings)):
        mass = sum(map(math.exp, reading.logprobs))
        diagnostics[each.question.name] = {"label_mass": mass, "argmax_is_label": reading.is_label}
    return JSONResponse(
        {
            "id": f"decision-{uuid.uuid4().hex}",
            "object": "structured_decision",
            "created": int(time.time()),
            "model": body.model,
            "answers": answers,
            "usage": {
                "input_tokens": sum(len(each.prompt.token_ids) for each in asked),
                "input_tokens_details": {"cached_tokens": sum(reading.num_cached for reading in readings)},
                "output_tokens": len(readings),
            },
            "diagnostics": diagnostics,
        }
    )


def _asked(service: ModelService, body: SystemOneRequest, questions: Sequence[Question]) -> list[AskedPrompt]:
    """Returns each question with its prompt; called in a thread.

    Raises:
        ApiError: 400 if one is too long, no text names an image, or the model would not begin with a label.
    """
    files = getattr(service.model, "decision_files", None)
    asked = _by_template(service, body, questions) if files is None else _by_files(service, files, body, questions)
    check_prompts(service, [each.prompt.token_ids for each in asked], 1, 1, "state", counted="questions")
    return asked


def _by_files(
    service: ModelService, files: DecisionFiles, body: SystemOneRequest, questions: Sequence[Question]
) -> list[AskedPrompt]:
    """Returns each question with its prompt, as the checkpoint's files say."""
    for name in ("instructions", "chat_template_kwargs", "assets"):
        if getattr(body, name):
            message = f"{name}: expected none, as the files of {service.name} say how its questions are asked"
            raise bad_request(message, name, "unsupported_parameter")
    check_len(service, [text_of(body.state)], "state", is_cut=False)
    try:
        found = {each.name: each for each in files.asked(body.state, body.questions)}
        if "decide" in service.tasks:
            files.head(service.model.device_weights).check(list(found.values()))
    except (InvalidArgumentError, UnsupportedModelError) as error:
        raise bad_request(str(error), "questions", "invalid_value") from error
    asked = []
    for question in questions:
        each = found[question.name]
        options = tuple(option._replace(label=each.labels[option.name]) for option in question.options)
        prompt = ChatPrompt(each.token_ids)
        asked.append(AskedPrompt(question._replace(options=options), prompt, each.temperature, tuple(each.labels)))
    return asked


async def _head_scores(request: Request, service: ModelService, asked: Sequence[AskedPrompt]) -> list[list[float]]:
    """Returns the scores of each question's options by the model's head."""
    options, model = context_of(request).options, service.model
    rows = await model.aembed(
        [each.prompt.token_ids for each in asked],
        pooling="last",
        normalize=False,
        truncate=False,
        timeout_s=options.request_timeout_s,
        queue_timeout_s=options.queue_timeout_s,
    )
    if request.state.usage is not None:
        request.state.usage.charge(sum(len(each.prompt.token_ids) for each in asked))
    files = model.decision_files
    assert files is not None  # of a model with a head
    head = files.head(model.device_weights)
    found = []
    for each, row in zip(asked, rows, strict=True):
        scores = dict(zip(each.names, head.scores(row, each.question.kind, len(each.names)).tolist(), strict=True))
        found.append([scores[option.name] for option in each.question.options])
    return found


def _by_template(service: ModelService, body: SystemOneRequest, questions: Sequence[Question]) -> list[AskedPrompt]:
    """Returns each question with its prompt by the model's chat template."""
    given = dict(body.chat_template_kwargs or {})
    if "enable_thinking" in service.template:
        given.setdefault("enable_thinking", False)
    options = ChatOptions.of(None, None, read_variables(service, given), False)
    front = [part for part in (text_of(body.state), body.instructions) if part is not None]
    texts = ["\n\n".join([*front, question.text]) for question in questions]
    assets = body.assets or {}
    check_assets(assets, texts)
    contents = [parts_of(text, assets) if assets else text for text in texts]
    found = [service.chat_prompt([{"role": "user", "content": content}], options) for content in contents]
    family = service.family
    if family is not None and family.is_harmony:
        raise _unread(service, "messages whose channel stands in front")
    if family is not None and family.reasoning_markers is not None:
        end = text_of_tokens(service, found[0].token_ids[-PROMPT_END_TOKENS:])
        if family.reasoning_markers.is_open(begun_answer(family, end)):
            raise _unread(service, "answers that begin with reasoning")
    return list(map(AskedPrompt, questions, found))


def _unread(service: ModelService, got: str) -> ApiError:
    expected = "expected a model whose answer can begin with a label"
    return ApiError(400, f"/v1/systemone: {expected}, got {service.name}, which writes {got}", param="model")


class _Reader:
    """Reads the labels of one request's questions.

    Args:
        request: The request.
        context: State of the server.
        service: The model.
        body: The request's body.
    """

    def __init__(self, request: Request, context: ServerContext, service: ModelService, body: SystemOneRequest) -> None:
        self._request, self._context, self._service = request, context, service
        engine = service.model.engine
        self._num_top = min(MAX_LOGPROBS, engine.vocab_size if engine.max_logprobs == -1 else engine.max_logprobs)
        self._plain = CompletionRequest(
            model=body.model, prompt="", temperature=0.0, cache_salt=body.cache_salt, priority=body.priority
        )
        key_name = request.state.key_name
        self._params = sampling_params(self._plain, service, context.options, key_name, max_new_tokens=1)
        self._options = AnswerOptions(first_token_timeout_s=context.options.first_token_timeout_s)
        self._readings: list[Answer] = []  # of all questions so far
        self._places = asyncio.Semaphore(NUM_AT_ONCE)

    async def all(self, asked: Sequence[AskedPrompt]) -> list[_Reading]:
        """Returns what the model says to each question; the first one puts the state into the cache."""
        label_ids = [self._label_ids(each.question) for each in asked]
        first = await self._read(asked[0].prompt, label_ids[0])
        rest = zip([each.prompt for each in asked[1:]], label_ids[1:], strict=True)
        tasks = [asyncio.ensure_future(self._read(prompt, labels)) for prompt, labels in rest]
        try:
            return [first, *await asyncio.gather(*tasks)]
        finally:  # one has failed, or the client has gone
            for task in tasks:
                task.cancel()

    def _label_ids(self, question: Question) -> list[int]:
        """Returns the tokens of a question's labels.

        Raises:
            ApiError: 400 for a tokenizer that spells one by several tokens, or two alike.
        """
        tokenizer: Any = self._service.model.text_tokenizer
        labels = [option.label for option in question.options]
        found = tokenizer(labels, add_special_tokens=False)["input_ids"]
        is_known = all(len(ids) == 1 and ids[0] != tokenizer.unk_token_id for ids in found)
        if not is_known or len({ids[0] for ids in found}) < len(found):
            message = f"expected a tokenizer with a token of its own for each of {', '.join(labels)}"
            raise bad_request(f"questions: {message}, which that of {self._service.name} has not", "questions")
        return [ids[0] for ids in found]

    async def _read(self, prompt: ChatPrompt, label_ids: Sequence[int]) -> _Reading:
        """Returns what the model says behind a prompt.

        Labels that are not among the likeliest tokens are read by an answer each that can be nothing else: its
        log-probability is that among all tokens.
        """
        async with self._places:
            (token,), num_cached = await self._tokens(prompt, [{"logprobs": self._num_top}], counts=True)
            likeliest = token.top or ((token.token_id, token.logprob),)
            found = {index: logprob for index, logprob in likeliest if index in label_ids}
            missing = [index for index in label_ids if index not in found]
            for begin in range(0, len(missing), NUM_LABELS_AT_ONCE):
                part = missing[begin : begin + NUM_LABELS_AT_ONCE]
                wanted = [{"logprobs": 0, "allowed_token_ids": (index,)} for index in part]
                tokens, _ = await self._tokens(prompt, wanted)
                found |= {each.token_id: each.logprob for each in tokens}
            return _Reading([found[index] for index in label_ids], likeliest[0][0] in label_ids, num_cached)

    async def _tokens(
        self, prompt: ChatPrompt, wanted: Sequence[Mapping[str, Any]], *, counts: bool = False
    ) -> tuple[list[TokenLogprobs], int]:
        """Returns the first token behind a prompt under each of some options.

        Also returns how many tokens of the prompt were cached. With `counts` the request's key and span follow the
        answers.
        """
        params = [dataclasses.replace(self._params, speculate=False, **each) for each in wanted]
        answers = await self._service.run(self._submit, prompt, params)
        try:
            if counts:
                self._follow(answers)
            found = [await self._token_of(answer) for answer in answers]
        finally:
            for answer in answers:
                answer.cancel()
        return found, answers[0].num_cached_tokens

    def _follow(self, answers: Sequence[Answer]) -> None:
        state = self._request.state
        self._readings += answers
        if state.usage is not None:
            state.usage.follow(answers)
        if state.span is not None:
            state.span.follow(self._plain, self._readings)

    def _submit(self, prompt: ChatPrompt, params: Sequence[SamplingParams]) -> list[Answer]:
        """Submits the answers to one prompt, which share its pages; called in a thread."""
        model, options = self._service.model, self._options
        if prompt.inputs is None:
            prepared = [prepare(model, prompt.token_ids, each, options)[0] for each in params]
        else:
            prepared = [prepare_media(model, prompt.inputs, each, options)[0] for each in params]
        indexed = [dataclasses.replace(each, answer_index=index) for index, each in enumerate(prepared)]
        return submit(model, indexed, options)

    async def _token_of(self, answer: Answer) -> TokenLogprobs:
        async with contextlib.aclosing(answer.__aiter__()) as steps:
            async for step in steps:
                self._context.metrics.step(answer, step)
                finish_reason_of(step.finish_reason)  # raises for a time limit
                if step.logprobs:
                    return step.logprobs[0]
        raise ApiError(500, "expected a token with its log-probability, got none")


def _softmax(logprobs: Sequence[float]) -> list[float]:
    most = max(logprobs)
    shares = [math.exp(each - most) for each in logprobs]
    return [each / sum(shares) for each in shares]
