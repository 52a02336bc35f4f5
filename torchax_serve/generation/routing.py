"""Routing of calls: engine, static batch, transformers' loop or a repository's ``generate``.

`route` is a pure function of two records: what the model can do, and what the call asks. Facts that are expensive to
learn (they build the engine or run model code), or that are defined only if no earlier rule applies, are functions;
`route` calls them in the order of its rules.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from model_adapters.errors import UnsupportedModelError
from model_adapters.loading import has_own_generate

if TYPE_CHECKING:
    from torchax_serve.engine.data_parallel import DataParallelEngines
    from torchax_serve.engine.engine import Engine
    from torchax_serve.runtime.model_runtime import ModelRuntime


class Path(enum.Enum):
    """Execution path of a call."""

    ENGINE = "engine"
    """On the engine, in a batch with requests of other callers."""
    STATIC_BATCH = "static batch"
    """In `torchax_serve.generation.static_batch.StaticBatchLoop`: the rows of one call, one program per token."""
    TRANSFORMERS = "transformers' loop"
    """In transformers' own loop, which calls the compiled forward and samples on the host."""
    PREPARED = "prepared by generate"
    """One prompt for ``generate``, which checks and completes it; the loop it ends in is routed again."""
    REPOSITORY = "the repository's generate"
    """In the ``generate`` that comes with the model's repository."""


@dataclasses.dataclass(frozen=True)
class Route:
    """The answer of `route`.

    Attributes:
        path: How the call runs.
        reason: Why no faster path takes the call; None if there is no faster one.
    """

    path: Path
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class ModelCapabilities:
    """Capabilities of a model that decide how its calls run.

    Attributes:
        unbatchable_reason: Why each token must come from a call of the model object itself, such as a forward hook.
        has_repository_generate: Whether the model's repository brings its own ``generate``.
        has_encoder: Whether the model is an encoder-decoder.
        encoder_reads_tokens: Whether its encoder takes token ids and the decoder masks the encoder's output.
        recomputes_sequence: Whether the model computes a sequence again when it grows past a length (Phi-3's LongRoPE).
    """

    unbatchable_reason: str | None = None
    has_repository_generate: bool = False
    has_encoder: bool = False
    encoder_reads_tokens: bool = False
    recomputes_sequence: bool = False

    @classmethod
    def of(cls, runtime: ModelRuntime) -> ModelCapabilities:
        """Reads the record from the runtime of a model, as the model is now."""
        program = runtime.program
        has_encoder = program.names.has_encoder
        encoder = runtime.encoder if has_encoder else None
        return cls(
            unbatchable_reason=runtime.why_stepwise,
            has_repository_generate=has_own_generate(program.module),
            has_encoder=has_encoder,
            encoder_reads_tokens=encoder is not None and encoder.is_masked,
            recomputes_sequence=program.rope is not None and bool(program.rope.lengths.recompute_len),
        )


@dataclasses.dataclass(frozen=True)
class EngineFacts:
    """Limits of an engine.

    Attributes:
        unsupported_reason: Why the model has no engine; None if it has one.
        max_encoder_len: Most tokens of an encoder input; None without an encoder.
        can_hold: Whether a request of a length (prompt and answer, in tokens) fits.
    """

    unsupported_reason: str | None = None
    max_encoder_len: int | None = None
    can_hold: Callable[[int], bool] = lambda length: True

    @classmethod
    def of(cls, engine: Engine | DataParallelEngines) -> EngineFacts:
        """Reads the limits of `engine`."""
        return cls(None, engine.max_encoder_len, engine.can_hold)

    @classmethod
    def of_engine(cls, get_engine: Callable[[], Engine | DataParallelEngines]) -> EngineFacts:
        """Reads the limits of the engine that a function returns, or why there is none."""
        try:
            return cls.of(get_engine())
        except UnsupportedModelError as error:
            return cls(str(error))


@dataclasses.dataclass(frozen=True)
class PromptCall:
    """One prompt of ``chat``, ``stream``, ``generate_batch`` or ``iter_tokens``.

    Attributes:
        prompt_len: Number of tokens of the prompt.
        engine: Returns the engine's limits; builds the engine if there is none yet.
        unsupported_options: Names of the generation options that the engine does not honour.
        ends_in_loop: Whether the class's ``generate`` prepares the prompt for one loop over tokens and does no more.
    """

    prompt_len: int
    engine: Callable[[], EngineFacts] = EngineFacts
    unsupported_options: Sequence[str] = ()
    ends_in_loop: bool = True


@dataclasses.dataclass(frozen=True)
class LoopCall:
    """Rows that ``generate`` has prepared for its sampling loop.

    Attributes:
        has_fresh_cache: Whether the cache is an empty device cache of this model.
        returns_attentions: Whether attentions or hidden states are returned.
        prefills_in_chunks: Whether the prompt is prefilled in chunks, or the model drafts for another one.
        embeddings: Name of the forward's argument for embeddings, if it is given.
        has_irregular_mask: Returns whether the attention mask is more than padding on the left; raises
            InvalidArgumentError for a mask of another length than the tokens.
        custom_argument: Name of an argument that brings Python code for the scores, such as ``logits_processor``.
        unsupported_options: Names of the generation options that the static batch does not honour.
        has_media: Whether the forward gets more than text.
        media_reason: Returns why the static batch cannot take the media, or None; runs the model's
            ``prepare_inputs_for_generation``.
        has_encoder_output: Returns whether the encoder's output is an array; called for encoder-decoders only.
    """

    has_fresh_cache: bool = True
    returns_attentions: bool = False
    prefills_in_chunks: bool = False
    embeddings: str | None = None
    has_irregular_mask: Callable[[], bool] = lambda: False
    custom_argument: str | None = None
    unsupported_options: Sequence[str] = ()
    has_media: bool = False
    media_reason: Callable[[], str | None] = lambda: None
    has_encoder_output: Callable[[], bool] = lambda: True


@dataclasses.dataclass(frozen=True)
class RowsCall:
    """Rows of a static batch that the engine may take.

    A class's own ``generate`` (Whisper) has prepared them.

    Attributes:
        num_rows: Number of rows.
        max_len: Most tokens of a row, prompt and answer; None if unlimited.
        wants_tokens_only: Whether the call asks for nothing but tokens, read at the end.
        has_encoder_output: Whether an encoder has run.
        is_padded: Whether the decoder's prompts are padded.
        has_uncounted_padding: Whether a prompt has a padding id that the decoder skips when it counts positions.
        encoder_lens: Returns the encoder output's length of each row; None if the decoder does not see its beginning.
        engine: Returns the engine's limits; builds the engine if there is none yet.
    """

    num_rows: int
    max_len: int | None
    wants_tokens_only: bool = True
    has_encoder_output: bool = True
    is_padded: bool = False
    has_uncounted_padding: bool = False
    encoder_lens: Callable[[], Sequence[int] | None] = lambda: None
    engine: Callable[[], EngineFacts] = EngineFacts


def route(model: ModelCapabilities, call: PromptCall | LoopCall | RowsCall) -> Route:
    """Decides how a call runs, and says why no faster path takes it."""
    if isinstance(call, PromptCall):
        if (reason := _prompt_reason(model, call)) is None:
            return Route(Path.ENGINE)
        return Route(Path.REPOSITORY if model.has_repository_generate else Path.PREPARED, reason)
    if isinstance(call, RowsCall):
        reason = _rows_reason(call)
        return Route(Path.ENGINE) if reason is None else Route(Path.STATIC_BATCH, reason)
    reason = _loop_reason(model, call)
    return Route(Path.STATIC_BATCH) if reason is None else Route(Path.TRANSFORMERS, reason)


def engine_unsupported_reason(model: ModelCapabilities) -> str | None:
    """Returns why a model has no engine, as far as is known before its forward is inspected.

    None if nothing rules out an engine.
    """
    if model.unbatchable_reason is not None:
        return f"{model.unbatchable_reason}, which sees one call at a time; remove it, or call generate()"
    if model.has_repository_generate:
        return (
            "the model's repository brings a generate of its own, which the engine cannot run; call generate(), "
            "or load the model without trust_remote_code"
        )
    return None


def _prompt_reason(model: ModelCapabilities, call: PromptCall) -> str | None:
    """Returns why the engine does not take a prompt."""
    if call.unsupported_options:
        return f"{', '.join(call.unsupported_options)} is set"
    if model.has_encoder and not model.encoder_reads_tokens:
        return "its encoder reads no tokens"
    engine = call.engine()
    if engine.unsupported_reason is not None:
        return engine.unsupported_reason
    longest = engine.max_encoder_len
    if longest is not None and call.prompt_len > longest:
        return (
            f"its input has {call.prompt_len} tokens, and the engine has room for {longest} of each (max_encoder_len)"
        )
    return None if call.ends_in_loop else "its generate does more than it prepares for the loop over tokens"


def _loop_reason(model: ModelCapabilities, call: LoopCall) -> str | None:
    """Returns why the static batch does not take what ``generate`` has prepared."""
    if model.unbatchable_reason is not None:
        return model.unbatchable_reason
    if not call.has_fresh_cache:
        return "the cache is not a fresh one of this model"
    if call.returns_attentions:
        return "attentions or hidden states are returned"
    if call.prefills_in_chunks:
        return "the prompt is prefilled in chunks, or this is an assistant"
    if call.embeddings is not None:  # there may be no tokens that the mask is as long as
        return f"the forward gets {call.embeddings}"
    if call.has_irregular_mask():
        return "the attention mask is more than padding on the left"
    if call.custom_argument is not None:
        return f"{call.custom_argument} is given"
    if call.unsupported_options:
        return f"{', '.join(call.unsupported_options)} is set"
    if (reason := call.media_reason()) is not None:
        return reason
    if call.has_media and model.recomputes_sequence:
        return "there is more than text, and the model computes it anew when it grows"
    if model.has_encoder and not call.has_encoder_output():
        return "the encoder's output is no array"
    return None


def _rows_reason(call: RowsCall) -> str | None:
    """Returns why the engine does not take the rows of a static batch."""
    if not call.wants_tokens_only:
        return "more is asked for than tokens at the end"
    if not call.has_encoder_output:
        return "there is no encoder output"
    if call.is_padded:
        return "the decoder's prompts are padded"
    if call.has_uncounted_padding:  # then positions depend on the other tokens of a step
        return "a prompt has padding without a position"
    lens = call.encoder_lens()
    if lens is None:
        return "the decoder does not see the encoder's output from its beginning"
    engine = call.engine()
    if engine.unsupported_reason is not None:
        return engine.unsupported_reason
    if call.max_len is None or not engine.can_hold(call.max_len):
        return "the answer may be longer than the engine has room for"
    if max(lens) > (engine.max_encoder_len or 0) or len(lens) != call.num_rows:
        return "the encoder's output is longer than the engine has room for, or shared by rows"
    return None
