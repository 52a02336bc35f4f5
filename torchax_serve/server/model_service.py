"""A loaded model of the server: names, limits, prompts and answers, off the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from model_adapters.errors import TorchaxServeError, UnsupportedModelError
from model_adapters.loading.model_source import public_name
from torchax_serve import __version__
from torchax_serve.engine.progress import EngineProgress
from torchax_serve.export.watch import WatchedBundle
from torchax_serve.multimodal.processor import media_inputs, processor_of
from torchax_serve.sampling.grammar import GrammarCompiler
from torchax_serve.sampling.token_masks import TokenMasks
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.server.answers import Answer, AnswerOptions, prepare, prepare_media, submit
from torchax_serve.server.call_ids import form_demanded, replayed
from torchax_serve.server.common_calls import reads_tools, texts_around_calls, with_calls_as_text
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.harmony import encoding_for
from torchax_serve.server.inference_statistics import InferenceStatistics
from torchax_serve.server.key_limits import ApiKey
from torchax_serve.server.messages import plain_messages
from torchax_serve.server.notes import note_once
from torchax_serve.server.options import ServerOptions
from torchax_serve.server.prompt_limits import check_len, check_prompts
from torchax_serve.server.request_checks import check_num_messages
from torchax_serve.server.response_families import response_template_for
from torchax_serve.server.response_family import ResponseFamily
from torchax_serve.server.template_roles import (
    TemplateRoles,
    has_several_calls,
    has_system_behind,
    with_one_system,
    with_single_calls,
)
from torchax_serve.text.chat import chat_prompt_ids, has_chat_template
from torchax_serve.text.chat_template import ChatOptions, check_last_message
from torchax_serve.text.messages import checked_conversation, has_media
from torchax_serve.text.prompt import encode_prompt, end_ids, position_limit
from torchax_serve.text.template_renderer import shared_renderer
from torchax_serve.text.token_text import TokenBytes

if TYPE_CHECKING:  # they import torch, which a recorded start needs not
    from torchax_serve.entrypoints.served_model import ServedModel

Result = TypeVar("Result")

"""Name of the model that comes with the package, which is no name for requests."""
NUM_THREADS = 4
"""Threads that render, tokenize and submit; most of their work is outside of Python's lock."""

_MODELS: Mapping[str, str] = {
    "chat": "a model with a chat template",
    "generate": "a model that generates text",
    "embed": "a model with embeddings",
    "rank": "a cross-encoder (ForSequenceClassification with one label) or a model whose files say how it embeds texts",
    "token_embed": "a model with embeddings of tokens",
    "classify": "a classifier of texts (ForSequenceClassification), images or sound",
    "generate_image": "a pipeline of diffusers",
    "masks": "a model that segments images (SegFormer, Mask2Former) or finds masks at points and in boxes (SAM)",
    "decide": "a model with a decision head (JevForDecision)",
    "label tokens": "a classifier of tokens (ForTokenClassification)",
    "speak": "a model that speaks, such as VITS",
    "transcribe": "a model that transcribes audio, such as Whisper",
}
"""Kinds of models that can do each task."""


class NamedRequest(Protocol):
    """A request with the name of a model."""

    model: str


class ChatPrompt(NamedTuple):
    """A rendered chat: its token ids, and arguments of ``generate`` if it has media."""

    token_ids: list[int]
    inputs: Mapping[str, Any] | None = None


class ModelService:
    """A served model.

    Args:
        model: The model, ready for requests.
        options: Of the server.
        names: Names that requests may use; empty: those of the options, or the one it was loaded by.

    Attributes:
        model: The model; of a bundle that is watched the version in use.
        root: Name of the model that was loaded; of a folder without its path.
        names: Names that requests may use.
        name: The first of them, which answers show.
        created: When it was ready, in seconds since 1970.
        fingerprint: ``system_fingerprint`` of answers: equal for equal versions and models.
        options: Of the server.
        inference: Counts and times of ``/v2/models/{model}/infer``.
        harmony: Encoding of openai-harmony for a model whose answers it parses, once `prepare` has run; else None.
    """

    def __init__(self, model: ServedModel | WatchedBundle, options: ServerOptions, names: tuple[str, ...] = ()) -> None:
        self._held = model
        if isinstance(model, WatchedBundle):
            model.follow = functools.partial(setattr, self, "model")
        self.model: ServedModel = model.current if isinstance(model, WatchedBundle) else model
        self.root = public_name(model.name)
        self.names = names or options.served_model_names or (self.root,)
        self.name = self.names[0]
        self.created = int(time.time())
        digest = hashlib.sha256(f"{__version__} {self.name} {self.model.dtype_name}".encode())
        self.fingerprint = f"fp_{digest.hexdigest()[:10]}"
        self.harmony: Any | None = None
        self.options = options
        self.inference = InferenceStatistics()
        self._silent_ids: dict[tuple[str, int], frozenset[int]] = {}  # by the name of a family, number of fields
        self._pool = concurrent.futures.ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="request")

    async def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Calls a function in a thread and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(function, *args))

    def close(self) -> None:
        """Ends the threads and the model."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._held.close()

    def prepare(self) -> None:
        """Makes what first requests would wait for: the template process and token tables."""
        if "chat" in self.tasks:
            shared_renderer().start()
        if self.model.text_tokenizer is None or "generate" not in self.tasks:
            return
        assert self.token_bytes.max_token_chars
        self.harmony = encoding_for(self.family)
        if importlib.util.find_spec("llguidance") is not None:
            with contextlib.suppress(UnsupportedModelError):
                assert self.grammars is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights and of the engines' caches."""
        caches = sum(engine.stats().cache_bytes for engine in self.model.running_engines)
        return weight_counts(self.model)[0] + caches

    @functools.cached_property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of the model: ``generate``, ``chat``, ``transcribe``, ``embed``, ``rank`` ..."""
        if not self.model.writes_text:
            if (methods := getattr(self.model, "methods", None)) is not None:
                return _tasks_of_methods(methods)
            found = [*_encoder_tasks(self.model.class_name, self.model.config.num_labels)]
            return (*found, "rank") if found == ["embed"] and self._ranks else tuple(found)
        if self.model.transcribes and not self.model.embeds:  # which reads no texts
            return ("transcribe",)
        found = ["generate", "embed"] if self.model.embeds else ["generate"]
        if self.model.text_tokenizer is not None and self.template:
            found.append("chat")
        if self.model.transcribes:
            found.append("transcribe")
        return (*found, "rank") if self._ranks else tuple(found)

    @functools.cached_property
    def embeds_tokens(self) -> bool:
        """Whether the model's files say that each token of a text has an embedding (ColBERT)."""
        model = self.model
        return not hasattr(type(model), "aembed_images") and bool(getattr(model, "embeds_tokens", False))

    @property
    def _ranks(self) -> bool:
        """Whether the model's files say how it scores pairs, by embeddings or logits."""
        return self.model.scores_by_logits or self.model.embeds_by_files

    def require(self, task: str | Sequence[str], route: str) -> None:
        """Raises ApiError, 404, unless the model can do `task`, or one of several."""
        tasks = [task] if isinstance(task, str) else task
        if not any(each in self.tasks for each in tasks):
            own = ", ".join(self.tasks)
            raise ApiError(404, f"{route}: expected {_MODELS[tasks[0]]}, got {self.name}, whose tasks are {own}")

    def settle_name(self, body: NamedRequest, key: ApiKey | None = None, *, may_be_adapter: bool = False) -> None:
        """Gives a request without a name the served model's; raises as `check_name`."""
        if not body.model:
            body.model = next((name for name in self.names if key is None or key.allows(name)), self.name)
            note_once(f"model: requests without a name are answered by {body.model}")
        self.check_name(body.model, key, may_be_adapter=may_be_adapter)

    def check_name(self, name: str, key: ApiKey | None = None, *, may_be_adapter: bool = False) -> None:
        """Raises ApiError, 404, unless `model` is one of this service's that the key may use.

        With `may_be_adapter` it may be the name of an adapter as well.
        """
        is_known = name in self.names or (may_be_adapter and name in adapters_of(self))
        if not is_known or not (key is None or key.allows(name)):
            raise unknown_model(name)

    @functools.cached_property
    def max_model_len(self) -> int | None:
        """Largest number of tokens of prompt and answer; None without a limit."""
        if not self.model.writes_text:
            return position_limit(self.model)
        try:
            return self.model.engine.max_model_len
        except UnsupportedModelError:
            return position_limit(self.model)

    @functools.cached_property
    def token_bytes(self) -> TokenBytes:
        """Bytes of the tokenizer's tokens."""
        return TokenBytes(self.model.text_tokenizer)

    @functools.cached_property
    def special_ids(self) -> dict[str, int]:
        """Ids of the tokenizer's special tokens by their text."""
        tokenizer: Any = self.model.text_tokenizer
        return {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}

    def silent_ids(self, family: ResponseFamily) -> frozenset[int]:
        """Returns the special tokens that are no text of a family, and so none of its answers'."""
        key = (family.name, len(family.template["fields"]))
        if key not in self._silent_ids:
            found = {index for text, index in self.special_ids.items() if not family.has_text(text)}
            self._silent_ids[key] = frozenset(found)
        return self._silent_ids[key]

    @functools.cached_property
    def family(self) -> ResponseFamily | None:
        """How answers spell reasoning and tool calls; None for plain text."""
        if self.model.text_tokenizer is None:
            return None
        return response_template_for(self.model.text_tokenizer, self.options.response_template)

    @functools.cached_property
    def template(self) -> str:
        """Source of the chat template, the tokenizer's or the processor's; empty without one."""
        tokenizer, processor = self.model.text_tokenizer, self._processor
        found = getattr(tokenizer, "chat_template", None) or getattr(processor, "chat_template", None)
        return found if isinstance(found, str) else str(found or "")

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, *, is_cut: bool = False
    ) -> ChatPrompt:
        """Returns the prompt of a conversation, as OpenAI's interface has it.

        With `is_cut` it may be longer than the model allows.
        """
        check_num_messages(len(messages), self.options.request, "messages")
        if not messages:
            message = 'messages: expected at least one, such as {"role": "user", "content": "Hi"}, got none'
            raise bad_request(message, "messages", "invalid_value")
        check_len(self, [text for message in messages for text in _texts_of(message)], "messages", is_cut=is_cut)
        extractor = getattr(self._processor, "feature_extractor", None)
        id_form = form_demanded(self.template, "any" if self.family is None else self.family.id_form)
        rate, form = getattr(extractor, "sampling_rate", None), None if self.family is None else self.family.call
        reads_names = form is not None and form.argument is not None
        plain = plain_messages(replayed(messages, id_form), self.template, rate, reads_names=reads_names)
        if reads_tools(self.template) and "tool_calls" not in self.template:
            plain = with_calls_as_text(plain, texts_around_calls(self.family, self.template))
        if has_several_calls(plain) and not self.roles.takes_several_calls:
            note_once("the chat template shows one call of a message; several ones are shown as messages of their own")
            plain = with_single_calls(plain)
        if has_system_behind(plain) and not self.roles.takes_system_anywhere:
            note_once("the chat template takes one system message, the first; further ones are merged into it")
            plain = with_one_system(plain)
        if not has_media(plain):
            return ChatPrompt(chat_prompt_ids(self.model, plain, options=options))
        conversation = checked_conversation(plain, None)
        check_last_message(conversation, options)
        if self._processor is None:
            message = f"messages: expected texts, got images, videos or audio, which {self.name} does not take; leave "
            message += "them out"
            raise bad_request(message, "messages", "invalid_value")
        try:
            inputs = media_inputs(self.model, conversation, options)
        except UnsupportedModelError as error:
            raise bad_request(f"messages: {error}", "messages", "invalid_value") from error
        return ChatPrompt(inputs["input_ids"][0].tolist(), inputs)

    @functools.cached_property
    def roles(self) -> TemplateRoles:
        """Roles that the chat template takes; a processor's template is taken to have no limits."""
        takes_all = not has_chat_template(self.model)
        return TemplateRoles(lambda probe: takes_all or chat_prompt_ids(self.model, probe))

    @functools.cached_property
    def takes_images(self) -> bool:
        """Whether messages may have images."""
        return getattr(self._processor, "image_processor", None) is not None

    @functools.cached_property
    def _processor(self) -> Any:
        """Processor of images, videos and audio; None for a model of texts."""
        if hasattr(type(self.model), "agenerate_image"):  # a pipeline, whose parts are its own
            return None
        try:
            return processor_of(self.model)
        except TorchaxServeError:
            return None

    def plain_prompt(self, prompt: str | Sequence[int], *, is_cut: bool = False) -> list[int]:
        """Returns the token ids of a plain prompt; `is_cut` is as of `chat_prompt`."""
        if isinstance(prompt, str):
            check_len(self, [prompt], "prompt", is_cut=is_cut)
        return encode_prompt(self.model, prompt)

    @functools.cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiler of grammars for the model's tokenizer."""
        return GrammarCompiler(self.model.text_tokenizer, self.model.engine.vocab_size, end_ids(self.model))

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        options: AnswerOptions,
        masks: Callable[[Sequence[int]], TokenMasks] | None = None,
        inputs: Mapping[str, Any] | None = None,
        *,
        field: str = "prompt",
    ) -> list[Answer]:
        """Submits the answers to `prompts`: all of them or, on an error, none.

        `field` of the request has the prompts; `masks` makes the masks of an answer to a prompt.

        Raises:
            ApiError: 400 if there are too many answers, or prompt and answer are longer than the model allows.
        """
        check_prompts(self, prompts, options.num_answers, params.max_new_tokens, field)
        if inputs is not None:  # of the only prompt, which has images or audio
            prepared = prepare_media(self.model, inputs, params, options)
        else:
            prepared = [request for prompt in prompts for request in prepare(self.model, prompt, params, options)]
        if masks is not None:
            each = options.num_answers
            prepared = [dataclasses.replace(row, masks=masks(prompts[i // each])) for i, row in enumerate(prepared)]
        return submit(self.model, prepared, options)


def unknown_model(name: str) -> ApiError:
    """Returns the answer to a request for a model that there is not, or not for its key."""
    message = f"the model {name[:100]!r} does not exist; GET /v1/models lists those that do"
    return ApiError(404, message, param="model", code="model_not_found")


def weight_counts(model: ServedModel) -> tuple[int, int]:
    """Returns the bytes of a model's weights on its devices, and their numbers."""
    import jax

    if (counted := getattr(type(model), "weight_counts", None)) is not None:  # a pipeline
        found: tuple[int, int] = counted(model)
        return found
    leaves = [leaf for leaf in jax.tree.leaves(dict(model.device_weights)) if hasattr(leaf, "nbytes")]
    return sum(leaf.nbytes for leaf in leaves), sum(leaf.size for leaf in leaves)


def adapters_of(service: ModelService) -> Mapping[str, str]:
    """Returns the folders of the adapters that requests can name as their model, by name."""
    return {name: path for name, path in service.model.adapters.items() if name not in service.names}


def adapter_of(service: ModelService, name: str) -> str | None:
    """Returns the adapter that a request's `model` names; None for the model itself."""
    return name if name not in service.names and name in adapters_of(service) else None


def scoped_salt(key_name: str | None, salt: str | None) -> str | None:
    """Returns the salt of cached prefixes, one for each API key; None without key and salt."""
    if key_name is None and not salt:
        return None
    return hashlib.sha256(f"{key_name or ''}\0{salt or ''}".encode()).hexdigest()


def _texts_of(message: Mapping[str, Any]) -> list[str]:
    """Returns the texts of a message."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else ()
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    return [text for text in texts if isinstance(text, str)]


def progress_of(services: Sequence[ModelService]) -> list[EngineProgress]:
    """Returns the progress of the engines that have been made."""
    return [engine.progress() for service in services for engine in service.model.running_engines]


def drain_engines(services: Sequence[ModelService], timeout_s: float) -> bool:
    """Drains the engines that exist, as `Engine.drain`, in `timeout_s` for all together."""
    until = time.monotonic() + timeout_s
    engines = [engine for service in services for engine in service.model.running_engines]
    return all([engine.drain(max(0.0, until - time.monotonic())) for engine in engines])  # noqa: C419


def _encoder_tasks(class_name: str, num_labels: int | None) -> tuple[str, ...]:
    if class_name.endswith("ForSequenceClassification"):
        return ("classify", "rank") if num_labels == 1 else ("classify",)
    if class_name.endswith("ForDecision"):
        return ("decide", "embed")
    return ("label tokens",) if class_name.endswith("ForTokenClassification") else ("embed",)


def _tasks_of_methods(methods: Sequence[str]) -> tuple[str, ...]:
    """Returns the tasks of a model with heads for images or sound."""
    names = {"classify_images": "classify", "classify_audio": "classify", "embed_images": "embed"}
    names |= {"embed_queries": "token_embed", "embed_pages": "token_embed", "score_pages": "rank"}
    return tuple(dict.fromkeys(names.get(method, method) for method in methods if method != "transcribe"))
