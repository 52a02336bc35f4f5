"""``/v1/chat/completions``."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse

from model_adapters.errors import ChatTemplateError
from torchax_serve.sampling_params import MAX_INT, SamplingParams
from torchax_serve.server.answers import Answer, AnswerOptions
from torchax_serve.server.beam_answers import beam_answers, check_beams
from torchax_serve.server.chat_answer import ChatCompletion
from torchax_serve.server.common_calls import has_calls, reads_tools, with_tools_as_text
from torchax_serve.server.context import ServerContext, context_of, follow
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.harmony import HarmonyParser
from torchax_serve.server.model_requests import read_for_model
from torchax_serve.server.model_service import ChatPrompt, ModelService
from torchax_serve.server.notes import note_once
from torchax_serve.server.options import ServerOptions
from torchax_serve.server.remote_files import with_remote_files
from torchax_serve.server.request_checks import check_counts, truncated
from torchax_serve.server.response_parsing import AnswerParser
from torchax_serve.server.sampling import renamed_error, sampling_params
from torchax_serve.server.schemas import ChatRequest
from torchax_serve.server.sse import EventStream, until_disconnect
from torchax_serve.server.structured import Grammar, grammar_of, masks_of
from torchax_serve.server.template_roles import with_users_joined
from torchax_serve.server.thinking_budget import (
    PROMPT_END_TOKENS,
    asked_budget,
    effort_budget,
    text_of_tokens,
    with_budget,
)
from torchax_serve.server.tools import ToolPlan, plan_tools, reasoning_end
from torchax_serve.text.chat_template import RESERVED, ChatOptions
from torchax_serve.text.prompt import DEFAULT_CHAT_MAX_NEW_TOKENS
from torchax_serve.validation.argument_checks import short_repr


class StartedChat(NamedTuple):
    """Answers that run, and a parser for each; None for plain text."""

    answers: list[Answer]
    parsers: list[AnswerParser | HarmonyParser | None]


async def chat_completions(request: Request) -> Any:
    """Answers a conversation."""
    context = context_of(request)
    service, body = await read_for_model(request, ChatRequest, "chat")
    completion = ChatCompletion(context, service, body, *await start_chat(request, service, body))
    if body.stream:
        return EventStream(completion.events(), context.options.keep_alive_s)
    return JSONResponse(await until_disconnect(request.receive, completion.complete()))


async def start_chat(
    request: Request, service: ModelService, body: ChatRequest, *, bounds_answer: bool = False
) -> StartedChat:
    """Checks a chat and submits its answers, which count for the request's key.

    With `bounds_answer`, an answer that would be longer than the model allows is bounded, not refused.

    Raises:
        ApiError: The chat is not valid, or cannot run.
        ClientDisconnect: The client has gone.
    """
    context = context_of(request)
    service.settle_name(body, request.state.key, may_be_adapter=True)
    check_counts(body, context.options.request)
    check_beams(body)
    body = await with_files(body, context.options)
    try:
        work = service.run(_start_answers, context, service, body, request.state.key_name, bounds_answer)
        started = await until_disconnect(request.receive, work)
    except ValueError as error:
        raise renamed_error(error, body) from error
    follow(request, body, started.answers)
    return started


async def with_files(body: ChatRequest, options: ServerOptions) -> ChatRequest:
    """Returns a request with the files that its messages name, if any may be fetched."""
    if not options.media_hosts:
        return body
    return body.model_copy(update={"messages": await with_remote_files(body.messages, options.media_hosts)})


def chat_options(service: ModelService, body: ChatRequest, plan: ToolPlan) -> ChatOptions:
    """Returns the options of the chat template in a request."""
    variables = read_variables(service, body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        if "reasoning_effort" in service.template:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
        if "enable_thinking" in service.template:
            variables.setdefault("enable_thinking", body.reasoning_effort != "none")
    tools = list(plan.tools) if reads_tools(service.template) else None
    options = ChatOptions.of(tools or None, body.documents, variables, bool(body.continue_final_message))
    return dataclasses.replace(options, may_follow_assistant=True)


def read_variables(service: ModelService, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the variables that the chat template reads; others cannot change the prompt."""
    found = {}
    for name, value in (given or {}).items():
        if name in RESERVED or re.search(rf"\b{re.escape(name)}\b", service.template):
            found[name] = value
        else:
            note_once(
                f"chat_template_kwargs: the chat template does not read {short_repr(name)}, which changes no answer"
            )
    return found


def render_chat(service: ModelService, body: ChatRequest, plan: ToolPlan) -> ChatPrompt:
    """Returns the prompt of a request's conversation."""
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise bad_request(
            "add_generation_prompt: expected true, or continue_final_message with it; an answer begins a message",
            "add_generation_prompt",
            "invalid_value",
        )
    options, is_cut = chat_options(service, body, plan), body.truncate_prompt_tokens is not None
    if reads_tools(service.template) or not (plan.tools or has_calls(body.messages)):
        return service.chat_prompt(body.messages, options, is_cut=is_cut)
    found = with_tools_as_text(body.messages, plan.tools, service.template)
    if has_calls(body.messages) and not service.roles.takes_users_in_a_row:  # results are messages of the user now
        found = [with_users_joined(each) for each in found]
    *others, last = found
    for messages in others:
        with contextlib.suppress(ChatTemplateError):
            return service.chat_prompt(messages, options, is_cut=is_cut)
    return service.chat_prompt(last, options, is_cut=is_cut)


def read_prompt(
    service: ModelService, body: ChatRequest, plan: ToolPlan, max_new_tokens: int | None = None
) -> ChatPrompt:
    """Returns the prompt that a request's answer reads, cut if the request says so.

    Args:
        service: The model.
        body: The request.
        plan: Its tools.
        max_new_tokens: Most tokens of the answer, for which there has to be room.
    """
    prompt = render_chat(service, body, plan)
    if prompt.inputs is None:
        ids = truncated(prompt.token_ids, body, service.max_model_len, max_new_tokens)
        return prompt._replace(token_ids=ids)
    if body.truncate_prompt_tokens is not None:
        message = "truncate_prompt_tokens: expected null with images, videos or audio, whose tokens cannot be cut"
        raise bad_request(message, "truncate_prompt_tokens", "invalid_value")
    return prompt


def max_tokens_of(body: ChatRequest) -> int | None:
    """Returns the most tokens of a request's answer; None as the model's config says."""
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _start_answers(
    context: ServerContext, service: ModelService, body: ChatRequest, key_name: str | None, bounds_answer: bool
) -> StartedChat:
    """Renders, tokenizes and submits a request; called in a thread."""
    params = sampling_params(
        body,
        service,
        context.options,
        key_name,
        max_new_tokens=_within_int(max_tokens_of(body)) if bounds_answer else max_tokens_of(body),
    )
    plan = plan_tools(body, service.family, service.special_ids, template=service.template)
    prompt = read_prompt(service, body, plan, params.max_new_tokens)
    if bounds_answer:
        params = _bounded(params, service.max_model_len, len(prompt.token_ids))
    family = plan.family
    is_parsed = family is not None and body.skip_special_tokens is not False
    num_shown = len(prompt.token_ids) if body.continue_final_message else PROMPT_END_TOKENS
    prompt_end = text_of_tokens(service, prompt.token_ids[-num_shown:]) if family is not None else ""
    options = AnswerOptions(
        num_answers=body.n or 1,
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop=bool(body.include_stop_str_in_output),
        is_parsed=is_parsed,
        silent_ids=service.silent_ids(family) if is_parsed and family is not None else (),
        default_max_new_tokens=service.max_model_len or DEFAULT_CHAT_MAX_NEW_TOKENS,
        first_token_timeout_s=context.options.first_token_timeout_s,
    )
    grammar = _grammar(context, body, plan)
    after = None
    if grammar is not None and family is not None:
        after = reasoning_end(family, prompt_end, lambda ids: text_of_tokens(service, ids))
    masks = masks_of(lambda: service.grammars, grammar, lambda _: after)
    room = _room(service, params, len(prompt.token_ids))
    budget = asked_budget(body)
    is_effort = budget is None and body.thinking_token_budget is None
    if is_effort:
        budget = effort_budget(body, service.template, family, room)
    if body.use_beam_search:
        if budget is not None:
            raise bad_request("reasoning_effort: expected none next to use_beam_search", "reasoning_effort")
        answers = beam_answers(service, [prompt.token_ids], params, body, options, has_media=prompt.inputs is not None)
    else:
        made = with_budget(service, family, budget, room, lambda _: prompt_end, masks, is_effort=is_effort)
        answers = service.start([prompt.token_ids], params, options, made, prompt.inputs, field="messages")
    parsers = [_parser(service, prompt_end, plan) if is_parsed else None for _ in answers]
    return StartedChat(answers, parsers)


def _within_int(asked: int | None) -> int | None:
    return None if asked is None else min(asked, MAX_INT)


def _room(service: ModelService, params: SamplingParams, prompt_len: int) -> int | None:
    """Returns the most tokens of an answer; None without a limit."""
    asked, most = params.max_new_tokens, service.max_model_len
    return asked if asked is not None or most is None else max(0, most - prompt_len)


def _bounded(params: SamplingParams, max_model_len: int | None, prompt_len: int) -> SamplingParams:
    """Returns parameters of an answer that has room behind its prompt, if any has."""
    asked, room = params.max_new_tokens, None if max_model_len is None else max_model_len - prompt_len
    if asked is None or room is None or asked <= room:
        return params
    # A prompt that leaves no room is refused, as one that asks for any answer.
    return dataclasses.replace(params, max_new_tokens=room if room > 0 else None)


def _grammar(context: ServerContext, body: ChatRequest, plan: ToolPlan) -> Grammar | None:
    asked = grammar_of(body, context.options.request)
    if asked is not None and plan.grammar is not None:
        raise ApiError(
            400, f"{asked.field}: expected none with forced or strict tool calls, got both", param=asked.field
        )
    return asked or plan.grammar


def _parser(service: ModelService, prompt_end: str, plan: ToolPlan) -> AnswerParser | HarmonyParser:
    assert plan.family is not None
    if service.harmony is not None:
        reads_tools = bool(plan.tools)
        return HarmonyParser(service.harmony, prompt_end, reads_tools=reads_tools, max_tool_calls=plan.max_calls)
    return AnswerParser(plan.family, prompt_end, plan.tools, plan.max_calls)
