"""Requests for ``/api/chat``, ``/api/generate``, ``/api/embed`` and others, as Ollama's."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pydantic

from torchax_serve.server.dialect_requests import FastList, OpenPart, OpenRequest
from torchax_serve.server.request_fields import Objects, Strings, honoured, no_effect, refused

LATEST = ":latest"
"""Tag that clients write behind names without one."""
_KEPT = "the model stays loaded as long as the server runs"
_FORMAT = "`json`, or a JSON schema that the answer is held to"
_THINK = "whether the answer has reasoning, or its effort; by default as the model does"
_STREAM = "`false`: one object; else an object a line, a line per step of the engine"
_SENT = pydantic.BeforeValidator(lambda given: "" if given is None else given)


class OllamaFunction(OpenPart):
    """Function of a call."""

    name: str
    arguments: dict[str, Any] | None = None


class OllamaCall(OpenPart):
    """A call of the assistant."""

    id: str | None = None
    function: OllamaFunction


class OllamaMessage(OpenPart):
    """A message; images are base64."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[str, _SENT] = ""
    thinking: str | None = None
    images: Strings | None = None
    tool_calls: FastList[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaOptions(OpenPart):
    """Options of sampling; those of loading have no effect.

    Attributes:
        num_predict: Most tokens of the answer; negative: as many as there is room for.
        repeat_last_n: Tokens that `repeat_penalty` looks back on; -1: all, which is what it does here.
    """

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    penalize_newline: bool | None = None
    num_keep: int | None = None
    num_ctx: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    embedding_only: bool | None = None


class OllamaRequest(OpenRequest):
    """Fields that ``/api/chat`` and ``/api/generate`` share."""

    model: Annotated[str, honoured("a name in `/api/tags`, also with `:latest` behind it; another one is 404")]
    stream: Annotated[bool | None, honoured(_STREAM)] = None
    format: Annotated[Literal["", "json"] | dict[str, Any] | None, honoured(_FORMAT)] = None
    options: Annotated[
        OllamaOptions | None,
        honoured(
            "`num_predict`, `temperature`, `top_k`, `top_p`, `min_p`, `seed`, `stop`, `repeat_penalty`, "
            "`presence_penalty`, `frequency_penalty`; those of loading, such as `num_ctx`, have no effect; `mirostat`, "
            "`tfs_z`, `typical_p`, and `repeat_last_n` with a penalty, are refused"
        ),
    ] = None
    think: Annotated[bool | Literal["low", "medium", "high"] | None, honoured(_THINK)] = None
    keep_alive: Annotated[float | int | str | None, no_effect(_KEPT)] = None
    logprobs: Annotated[bool | None, honoured("log-probabilities of the answer's tokens")] = None
    top_logprobs: Annotated[int | None, honoured("those of so many likeliest tokens, at most `--max-logprobs`")] = None
    truncate: Annotated[bool | None, no_effect("a prompt that is too long is an error")] = None
    shift: Annotated[bool | None, no_effect("an answer ends where the model has no more room")] = None


class OllamaChatRequest(OllamaRequest):
    """Body of ``/api/chat``."""

    routes: ClassVar[tuple[str, ...]] = ("/api/chat",)
    messages: Annotated[
        FastList[OllamaMessage] | None, honoured("the conversation, oldest first; without any, nothing is answered")
    ] = None
    tools: Annotated[Objects | None, honoured("functions, at most 1024")] = None


class GenerateRequest(OllamaRequest):
    """Body of ``/api/generate``."""

    routes: ClassVar[tuple[str, ...]] = ("/api/generate",)
    prompt: Annotated[str, _SENT, honoured("message of the user; empty: nothing is answered")] = ""
    system: Annotated[str | None, honoured("system prompt")] = None
    images: Annotated[Strings | None, honoured("images of the message, in base64")] = None
    raw: Annotated[bool | None, honoured("the prompt is continued as it is, without the chat template")] = None
    suffix: Annotated[
        str | None, honoured("text behind the answer, for tokenizers with tokens for it (FIM); others refuse it")
    ] = None
    template: Annotated[Any, refused("expected none; the model's own chat template is used", "")] = None
    context: Annotated[Any, refused("expected none; /api/chat takes earlier messages", [])] = None
    width: Annotated[Any, refused("expected none; answers are text", 0)] = None
    height: Annotated[Any, refused("expected none; answers are text", 0)] = None
    steps: Annotated[Any, refused("expected none; answers are text", 0)] = None


class EmbedRequest(OpenRequest):
    """Body of ``/api/embed``."""

    routes: ClassVar[tuple[str, ...]] = ("/api/embed",)
    model: Annotated[str, honoured("a name in `/api/tags`; another one is 404")]
    input: Annotated[str | Strings, honoured("a text, or a list of texts")]
    truncate: Annotated[bool | None, honoured("`false`: a text that is too long is an error, not cut")] = None
    dimensions: Annotated[int | None, honoured("leading values of each embedding")] = None
    options: Annotated[dict[str, Any] | None, no_effect("embeddings are not sampled")] = None
    keep_alive: Annotated[float | int | str | None, no_effect(_KEPT)] = None


class ShowRequest(OpenRequest):
    """Body of ``/api/show``."""

    routes: ClassVar[tuple[str, ...]] = ("/api/show",)
    model: Annotated[str, honoured("a name in `/api/tags`; another one is 404")] = ""
    name: Annotated[str | None, honoured("the same, as older clients write it")] = None
    verbose: Annotated[bool | None, no_effect("there is one form")] = None


class PullRequest(OpenRequest):
    """Body of ``/api/pull``."""

    routes: ClassVar[tuple[str, ...]] = ("/api/pull",)
    model: Annotated[
        str, honoured("a short name, or a hub id, which may have the type of a GGUF file behind it, `:Q4_K_M`")
    ] = ""
    name: Annotated[str | None, honoured("the same, as older clients write it")] = None
    stream: Annotated[bool | None, honoured("`false`: one object at the end; else an object a line")] = None
    insecure: Annotated[Any, refused("expected false; the hub is asked over HTTPS", False)] = None


class DeleteRequest(OpenRequest):
    """Body of ``/api/delete``."""

    routes: ClassVar[tuple[str, ...]] = ("/api/delete",)
    model: Annotated[str, honoured("a short name, or a hub id without a tag, of a model on this machine")] = ""
    name: Annotated[str | None, honoured("the same, as older clients write it")] = None
