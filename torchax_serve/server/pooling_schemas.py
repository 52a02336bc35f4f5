"""Requests for embeddings, labels and scores, and for tokens."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from torchax_serve.server.request_fields import (
    FAIL_FAST,
    ApiRequest,
    Ids,
    ModelName,
    Objects,
    Strings,
    honoured,
    no_effect,
    refused,
)

_USER = no_effect("who asks is told by the API key")
_MODEL = honoured("a name in `/v1/models`, another one is 404; without it, the served one")
_SPECIAL = refused("expected true; give token ids for other texts", True)
_ACTIVATED = refused("expected true; scores are probabilities as the checkpoint's files say", True)
_CUT = "tokens that texts are cut to; -1: the model's length; `null` cuts them as the checkpoint's files say"
_FILES = 'of a model of images or sound an object or several, `{"type": "image_url", ...}`, with one file each'
_INPUT_TYPE = honoured("how a multi-vector model reads texts, `document` by default; of pages what the inputs are")
_MESSAGES = honoured("in place of `input`, of a model of images: one message with one part, or a list of such")
Texts = str | Ids | Strings | Annotated[list[Ids], FAIL_FAST]


TextsOrFiles = Texts | dict[str, Any] | Objects
_Scored = str | Strings | dict[str, Any] | Objects | None


def texts_of(given: Any) -> list[Any]:
    """Returns one text or token ids, or a list of them, as a list."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    return list(given)


class PoolingRequest(ApiRequest):
    """Fields that all requests of this module share."""

    model: Annotated[ModelName, _MODEL] = ""
    user: Annotated[str | None, _USER] = None
    request_id: Annotated[str | None, no_effect("the header X-Request-Id is taken")] = None
    priority: Annotated[int | None, no_effect("texts are computed in their order")] = None
    truncate_prompt_tokens: Annotated[int | None, honoured(_CUT)] = None
    truncation_side: Annotated[Any, refused("expected right, at which texts are cut", "right")] = None
    padding: Annotated[Any, refused("expected do_not_pad; padding changes no result", "do_not_pad")] = None
    mm_processor_kwargs: Annotated[Any, refused("expected none; inputs are texts", {})] = None
    cache_salt: Annotated[str | None, no_effect("texts share nothing")] = None

    @property
    def cut(self) -> bool | int | None:
        """Whether long texts are cut, or to how many tokens; None follows the checkpoint."""
        return True if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens


class EmbeddingRequest(PoolingRequest):
    """Body of ``/v1/embeddings``."""

    routes: ClassVar[tuple[str, ...]] = ("/v1/embeddings",)
    input: Annotated[TextsOrFiles | None, honoured(f"a text, token ids, or a list of one of these; {_FILES}")] = None
    messages: Annotated[list[Any] | None, _MESSAGES] = None
    dimensions: Annotated[int | None, honoured("leading values of each embedding")] = None
    input_type: Annotated[Literal["query", "document"] | None, _INPUT_TYPE] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, honoured("base64: little-endian float32; of embeddings of tokens one each")
    ] = None
    normalize: Annotated[bool | None, honoured("length 1; by default as the checkpoint's files say")] = None
    pooling: Annotated[str | None, honoured("`mean`, `cls`, `lasttoken` ...; by default as the checkpoint says")] = None
    add_special_tokens: Annotated[Any, _SPECIAL] = None
    embed_dtype: Annotated[Any, refused("expected float32", "float32")] = None
    endianness: Annotated[Any, refused("expected little", "little", "native")] = None
    use_activation: Annotated[bool | None, honoured("as `normalize`")] = None


class ClassifyRequest(PoolingRequest):
    """Body of ``/classify``."""

    routes: ClassVar[tuple[str, ...]] = ("/classify",)
    input: Annotated[TextsOrFiles, honoured(f"a text, token ids, or a list of one of these; {_FILES}")]
    labels: Annotated[
        Strings | None, honoured("texts to choose from, of a model of images without labels of its own")
    ] = None
    add_special_tokens: Annotated[Any, _SPECIAL] = None
    use_activation: Annotated[Any, _ACTIVATED] = None
    messages: Annotated[Any, refused("expected none; give input")] = None


class TokenPoolingRequest(PoolingRequest):
    """Body of ``/pooling``."""

    routes: ClassVar[tuple[str, ...]] = ("/pooling",)
    input: Annotated[
        TextsOrFiles | Annotated[list[str | dict[str, Any]], FAIL_FAST] | None,
        honoured("a text, token ids, or a list of one of these; of a model that finds pages images as well"),
    ] = None
    messages: Annotated[list[Any] | None, _MESSAGES] = None
    encoding_format: Annotated[Any, refused("expected float", "float")] = None
    add_special_tokens: Annotated[Any, _SPECIAL] = None
    use_activation: Annotated[
        bool | None, honoured("embeddings of length 1; by default as the checkpoint's files say; of labels true")
    ] = None
    task: Annotated[
        Literal["token_classify", "token_embed", "embed"] | None,
        honoured("labels or embeddings of tokens, or an embedding of each text; by default what tokens have"),
    ] = None
    input_type: Annotated[Literal["query", "document"] | None, _INPUT_TYPE] = None
    dimensions: Annotated[int | None, honoured("leading values of an embedding, of the task `embed`")] = None
    embed_dtype: Annotated[Any, refused("expected float32", "float32")] = None
    endianness: Annotated[Any, refused("expected little", "little", "native")] = None


class RerankRequest(PoolingRequest):
    """Body of ``/v1/rerank``, ``/v2/rerank`` and ``/rerank``."""

    routes: ClassVar[tuple[str, ...]] = ("/v1/rerank", "/v2/rerank", "/rerank")
    query: Annotated[str, honoured("the text that documents are ranked for")]
    documents: Annotated[
        Annotated[list[str | dict[str, Any]], FAIL_FAST] | None,
        honoured('texts, or objects `{"text": ...}`; images of pages as `{"image": URL}`, `{"content": [...]}`'),
    ] = None
    texts: Annotated[Strings | None, honoured("texts in place of `documents`: the answer is a list, as TEI's")] = None
    top_n: Annotated[int | None, honoured("documents to return; 0 and by default all")] = None
    return_documents: Annotated[bool | None, honoured("whether results have the documents' texts")] = None
    truncate: Annotated[
        bool | None,
        honoured("next to `texts`: true cuts them, false refuses long ones; `null` as the checkpoint's files say"),
    ] = None
    return_text: Annotated[bool | None, honoured("next to `texts`: whether results have them")] = None
    raw_scores: Annotated[Any, refused("expected false; scores are as the checkpoint's files say", False)] = None
    truncation_direction: Annotated[Any, refused("expected Right, at which texts are cut", "right", "Right")] = None
    max_tokens_per_doc: Annotated[Any, refused("expected null; documents are cut to the model's length")] = None
    max_chunks_per_doc: Annotated[Any, refused("expected null; a document is one text")] = None
    use_activation: Annotated[Any, _ACTIVATED] = None


class ScoreRequest(PoolingRequest):
    """Body of ``/v1/score`` and ``/score``."""

    routes: ClassVar[tuple[str, ...]] = ("/v1/score", "/score")
    text_1: Annotated[str | Strings | None, honoured("a text, or as many as `text_2` has")] = None
    text_2: Annotated[_Scored, honoured('a text or several; images of pages as `{"content": [...]}`')] = None
    queries: Annotated[str | Strings | None, honoured("as `text_1`")] = None
    documents: Annotated[_Scored, honoured("as `text_2`")] = None
    items: Annotated[_Scored, honoured("as `text_2`")] = None
    data_1: Annotated[str | Strings | None, honoured("as `text_1`")] = None
    data_2: Annotated[_Scored, honoured("as `text_2`")] = None
    use_activation: Annotated[Any, _ACTIVATED] = None


class TokenizeRequest(ApiRequest):
    """Body of ``/tokenize``."""

    routes: ClassVar[tuple[str, ...]] = ("/tokenize",)
    model: Annotated[str | None, _MODEL] = None
    prompt: Annotated[str | None, honoured("a text; in place of `messages`")] = None
    messages: Annotated[Objects | None, honoured("a conversation; in place of `prompt`")] = None
    add_special_tokens: Annotated[bool | None, honoured("special tokens of the tokenizer; a chat has its own")] = None
    add_generation_prompt: Annotated[Any, refused("expected true", True)] = None
    continue_final_message: Annotated[bool | None, honoured("the prompt continues the last message")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, honoured("variables of the chat template")] = None
    tools: Annotated[Objects | None, honoured("tools of the chat template")] = None
    return_token_strs: Annotated[bool | None, honoured("the text of each token")] = None
    chat_template: Annotated[Any, refused("expected null; the model's own template is used")] = None
    media_io_kwargs: Annotated[Any, refused("expected none; prompts are texts here", {})] = None
    mm_processor_kwargs: Annotated[Any, refused("expected none; prompts are texts here", {})] = None


class DetokenizeRequest(ApiRequest):
    """Body of ``/detokenize``."""

    routes: ClassVar[tuple[str, ...]] = ("/detokenize",)
    model: Annotated[str | None, _MODEL] = None
    tokens: Annotated[Ids, honoured("token ids")]
