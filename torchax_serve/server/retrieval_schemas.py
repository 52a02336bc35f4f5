"""Requests for embeddings in the forms of Cohere and text-embeddings-inference (TEI)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from torchax_serve.server.pooling_schemas import Texts
from torchax_serve.server.request_fields import (
    FAIL_FAST,
    ApiRequest,
    ModelName,
    Objects,
    Strings,
    honoured,
    no_effect,
    refused,
)

_MODEL = honoured("a name in `/v1/models`, another one is 404; without it, the served one")
_CUT = "true cuts texts that are too long, false refuses them; `null` cuts as the checkpoint's files say"
_DIRECTION = refused("expected Right, at which texts are cut", "right", "Right")
_PROMPT = honoured("one of the checkpoint's prompts")
_RAW = refused("expected false; scores are as the checkpoint's files say", False)

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class CohereEmbedRequest(ApiRequest):
    """Body of ``/v2/embed``."""

    routes: ClassVar[tuple[str, ...]] = ("/v2/embed",)
    model: Annotated[ModelName, _MODEL] = ""
    texts: Annotated[Strings | None, honoured("texts; one of `texts`, `images` and `inputs`")] = None
    images: Annotated[Strings | None, honoured("images as data URIs, of a model of images")] = None
    inputs: Annotated[
        Objects | None, honoured('objects `{"content": [...]}` with one part each, all texts or all images')
    ] = None
    input_type: Annotated[
        str | None,
        honoured("prompt of this name in the checkpoint's files; of `search_query` and `search_document` else `query` "
                 "and `document`"),
    ] = None  # fmt: skip
    embedding_types: Annotated[
        Annotated[list[EmbeddingType], FAIL_FAST] | None,
        honoured("`float` by default; `int8` and `uint8` scale each embedding to its largest value; `binary` and "
                 "`ubinary` have a bit for each value above 0"),
    ] = None  # fmt: skip
    output_dimension: Annotated[int | None, honoured("leading values of each embedding")] = None
    truncate: Annotated[
        Literal["NONE", "END", "START"] | None, honoured("`END`, the default, cuts long texts, `NONE` refuses them")
    ] = None
    max_tokens: Annotated[int | None, honoured("tokens that texts are cut to, with `truncate` `END`")] = None
    priority: Annotated[int | None, no_effect("texts are computed in their order")] = None


class TeiRequest(ApiRequest):
    """Fields that TEI's requests share."""

    model: Annotated[ModelName, _MODEL] = ""
    truncate: Annotated[bool | None, honoured(_CUT)] = None
    truncation_direction: Annotated[Any, _DIRECTION] = None


class TeiEmbedRequest(TeiRequest):
    """Body of ``/embed``."""

    routes: ClassVar[tuple[str, ...]] = ("/embed",)
    inputs: Annotated[Texts, honoured("a text, token ids, or a list of one of these")]
    normalize: Annotated[bool | None, honoured("length 1; true by default")] = None
    dimensions: Annotated[int | None, honoured("leading values of each embedding")] = None
    prompt_name: Annotated[str | None, _PROMPT] = None


class TeiTokensRequest(TeiRequest):
    """Body of ``/embed_all`` and ``/embed_sparse``."""

    routes: ClassVar[tuple[str, ...]] = ("/embed_all", "/embed_sparse")
    inputs: Annotated[Texts, honoured("a text, token ids, or a list of one of these")]
    prompt_name: Annotated[str | None, _PROMPT] = None


class TeiPredictRequest(TeiRequest):
    """Body of ``/predict``."""

    routes: ClassVar[tuple[str, ...]] = ("/predict",)
    inputs: Annotated[
        str | Annotated[list[str | Strings], FAIL_FAST],
        honoured("a text, a pair of texts, or a list of lists of one text or of two"),
    ]
    raw_scores: Annotated[Any, _RAW] = None


class SimilarityInputs(ApiRequest):
    """Texts of ``/similarity``."""

    source_sentence: Annotated[str, honoured("a text")]
    sentences: Annotated[Strings, honoured("texts that it is compared with")]


class SimilarityParameters(ApiRequest):
    """Options of ``/similarity``."""

    truncate: Annotated[bool | None, honoured(_CUT)] = None
    truncation_direction: Annotated[Literal["right", "Right"] | None, honoured("texts are cut at their end")] = None
    prompt_name: Annotated[str | None, _PROMPT] = None


class SimilarityRequest(ApiRequest):
    """Body of ``/similarity``."""

    routes: ClassVar[tuple[str, ...]] = ("/similarity",)
    model: Annotated[ModelName, _MODEL] = ""
    inputs: Annotated[SimilarityInputs, honoured("`source_sentence`, and `sentences` that it is compared with")]
    parameters: Annotated[
        SimilarityParameters | None, honoured("`truncate` and `prompt_name`, as in `/embed`; `truncation_direction`")
    ] = None
