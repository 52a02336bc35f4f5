"""`SpeechModel`: transcribes audio."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoFeatureExtractor, FeatureExtractionMixin, PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES

from model_adapters.caches.native_cache import allows_fixed_shapes
from model_adapters.errors import CheckpointError, InvalidArgumentError, UnsupportedModelError
from model_adapters.loading import LoadedModel
from torchax_serve.distributed.hosts.leader import Leader
from torchax_serve.engine.options import EngineOptions
from torchax_serve.entrypoints.served_model import ServedModel
from torchax_serve.generation.call_limits import CallLimits, call_limits
from torchax_serve.generation.call_pool import CallPool
from torchax_serve.generation.concurrent_calls import checking, options_of_each, run_concurrently
from torchax_serve.generation.media_requests import media_answers
from torchax_serve.generation.queued_call import run_on_queue
from torchax_serve.generation.sequence_steps import GenerateWatch
from torchax_serve.generation.transcript_pieces import TranscriptPieces, TranscriptStream
from torchax_serve.generation.transcript_times import TimedTranscription, check_times
from torchax_serve.multimodal.audio import check_rate, checked_samples
from torchax_serve.multimodal.decode_inputs import in_dtype
from torchax_serve.multimodal.transcription import transcription_inputs
from torchax_serve.outputs import Transcript


def is_speech_model(module: PreTrainedModel) -> bool:
    """Returns whether `module` writes text about audio.

    Such a model is an encoder-decoder, or a decoder with audio inputs.
    """
    if not module.can_generate():
        return False
    if module.config.is_encoder_decoder:
        return type(module).__name__ in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES.values()
    inputs: Any = module.input_modalities
    outputs: Any = module.output_modalities
    return "audio" in _modalities(inputs) and "text" in _modalities(outputs)


def _modalities(declared: str | Sequence[str]) -> tuple[str, ...]:
    return (declared,) if isinstance(declared, str) else tuple(declared)


class SpeechModel(ServedModel):
    """A model that transcribes audio; made by `serve`."""

    transcribes = True

    def __init__(
        self, loaded: LoadedModel, engine_options: EngineOptions | None = None, leader: Leader | None = None
    ) -> None:
        super().__init__(loaded, engine_options, leader)
        self.embeds = not self._config.is_encoder_decoder  # whose encoder reads audio alone

    @functools.cached_property
    def feature_extractor(self) -> FeatureExtractionMixin:
        """Feature extractor of the checkpoint, which computes the model's inputs from samples.

        Raises:
            InvalidArgumentError: the model came without one.
            CheckpointError: its files are broken.
        """
        loaded = self._loaded_or_raise()
        folder = loaded.files_folder
        files = ("preprocessor_config.json", "processor_config.json")
        if folder is None or not any((folder / name).is_file() for name in files):
            raise InvalidArgumentError(
                f"{self.name} has no feature extractor ({' or '.join(files)}), and audio needs one; put its files "
                "next to the weights, or give features to generate()"
            )
        try:
            return AutoFeatureExtractor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=loaded.trust_remote_code
            )
        except Exception as error:  # classes of feature extractors raise whatever they like
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise CheckpointError(
                f"the files in {folder} do not make a feature extractor ({lines[0]}): get them again"
            ) from error

    def transcribe(
        self,
        audio: np.ndarray | Sequence[np.ndarray],
        *,
        sampling_rate: int,
        priority: int = 0,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        **options: Any,
    ) -> str | list[str]:
        """Returns the words in `audio`, which waits for its turn on the engine's queue.

        Args:
            audio: samples float[num_samples] of one channel, or several such arrays.
            sampling_rate: samples per second (Hz), which must be the model's.
            priority: lower runs first; 0 is usual.
            timeout_s: seconds after which the transcription is ended with an error; None: never.
            queue_timeout_s: the same for a transcription that has not begun by then.
            **options: options of ``generate``, such as ``language`` and ``task`` of Whisper, or ``max_new_tokens``; for
                a decoder with audio inputs also those of its processor's ``apply_transcription_request``, such as
                ``prompt``.

        Returns:
            The text of one array, or a list of texts in their order.

        Raises:
            InvalidArgumentError: no samples, more than one channel, nan or infinite values, another sampling rate.
            UnsupportedModelError: the model was served without a tokenizer, or its processor has no prompt for
                transcription.
            QueueFullError: too many requests are waiting.
            DeadlineError: a time limit has passed.
        """
        limits = CallLimits(priority, timeout_s, queue_timeout_s)
        return self._transcribe(audio, sampling_rate, options, limits)

    async def atranscribe(
        self,
        audio: np.ndarray | Sequence[np.ndarray],
        *,
        sampling_rate: int,
        priority: int = 0,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        **options: Any,
    ) -> str | list[str]:
        """Works as `transcribe`, without blocking the event loop.

        Cancelling it ends the work within a step.
        """
        limits = CallLimits(priority, timeout_s, queue_timeout_s)
        call = functools.partial(self._transcribe, audio, sampling_rate, options, limits)
        return await self._call_pool.run(self._call_pool.submit(call, limits), limits)

    def astream_transcript(
        self,
        audio: np.ndarray,
        *,
        sampling_rate: int,
        priority: int = 0,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        **options: Any,
    ) -> TranscriptStream:
        """Returns the words in one array of samples piece by piece, for ``async for``.

        They are submitted at once.

        The pieces joined are the text of `transcribe`, whose arguments and errors these are. There is one for each step
        of the decoding, or for each window of audio that is longer than one. Leaving the loop ends the work within a
        step.
        """
        is_cut = isinstance(audio, np.ndarray) and self._has_windows([audio], options)
        pieces = TranscriptPieces(self._module, self._writer(), is_cut=is_cut)
        return TranscriptStream(
            self._call_pool,
            functools.partial(self._transcribe, audio, sampling_rate, options),
            functools.partial(CallLimits, priority, timeout_s, queue_timeout_s),
            pieces,
        )

    def transcribe_with_times(
        self,
        audio: np.ndarray,
        *,
        sampling_rate: int,
        words: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        **options: Any,
    ) -> Transcript:
        """Returns the words in one array of samples with the times of segments, for Whisper.

        Args:
            audio: as in `transcribe`; one array.
            sampling_rate: as in `transcribe`.
            words: whether each word has times, too, by the cross-attention of ``alignment_heads``.
            priority: as in `transcribe`.
            timeout_s: as in `transcribe`.
            queue_timeout_s: as in `transcribe`.
            **options: as in `transcribe`.

        Raises:
            UnsupportedModelError: the model does not write times, or has none of words.
            TorchaxServeError: as `transcribe`.
        """
        limits = CallLimits(priority, timeout_s, queue_timeout_s)
        return self._transcribe_with_times(audio, sampling_rate, words, options, limits)

    async def atranscribe_with_times(
        self,
        audio: np.ndarray,
        *,
        sampling_rate: int,
        words: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        **options: Any,
    ) -> Transcript:
        """Works as `transcribe_with_times`, without blocking the event loop.

        Cancelling it ends the work.
        """
        limits = CallLimits(priority, timeout_s, queue_timeout_s)
        call = functools.partial(self._transcribe_with_times, audio, sampling_rate, words, options, limits)
        return await self._call_pool.run(self._call_pool.submit(call, limits), limits)

    @functools.cached_property
    def _call_pool(self) -> CallPool:
        options = self._engine_options or EngineOptions()
        return CallPool(self._max_num_seqs, options.max_num_waiting)

    @property
    def _max_num_seqs(self) -> int:
        return (self._engine_options or EngineOptions()).max_num_seqs

    def close(self) -> None:
        """Ends transcriptions with an error and frees the weights; see `ServedModel.close`."""
        super().close()
        if self._process.is_current and (pool := vars(self).pop("_call_pool", None)) is not None:
            pool.close()

    def _transcribe(
        self,
        audio: np.ndarray | Sequence[np.ndarray],
        sampling_rate: int,
        options: Mapping[str, Any],
        limits: CallLimits,
    ) -> str | list[str]:
        clips = [audio] if isinstance(audio, np.ndarray) else audio
        if isinstance(clips, str | bytes) or not isinstance(clips, Sequence):
            raise InvalidArgumentError(
                f"audio: expected a numpy array of samples or a list of such, got {type(audio).__name__}; read the "
                "file with an audio library first"
            )
        arrays = [checked_samples(clip, f"audio[{index}]") for index, clip in enumerate(clips)]
        if not arrays:
            raise InvalidArgumentError("audio: expected at least one array of samples, got an empty list")
        tokenizer, further = self._writer(), dict(options)
        if len(arrays) > 1 and self._config.is_encoder_decoder and self._has_windows(arrays, options):
            calls = list(zip(arrays, options_of_each(options, len(arrays)), strict=True))
            draws = bool(options.get("do_sample") or options.get("temperature"))
            one = functools.partial(self._transcribe_one, sampling_rate, limits)
            return run_concurrently(one, calls, limits, self._max_num_seqs, draws=draws)
        tokens: Any = None
        if self._config.is_encoder_decoder:
            inputs, prompt_len = self._features(arrays, sampling_rate), 0
        elif (tokens := self._answers_on_engine(arrays, sampling_rate, options, limits)) is None:
            inputs = transcription_inputs(self, arrays, sampling_rate, further)
            prompt_len = inputs["input_ids"].shape[1] if "input_ids" in inputs else 1  # the token that all begin with
        if tokens is None:
            tokens = self._generate_on_queue({**inputs, **further}, limits)
            tokens = getattr(tokens, "sequences", tokens)[:, prompt_len:]
        texts = [text.strip() for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]
        return texts[0] if isinstance(audio, np.ndarray) else texts

    def _answers_on_engine(
        self, arrays: list[np.ndarray], sampling_rate: int, options: Mapping[str, Any], limits: CallLimits
    ) -> list[list[int]] | None:
        """Returns the tokens of each array; None if the engine does not take such prompts."""
        if allows_fixed_shapes(self._module):  # audio comes with every token
            return None
        each = [dict(one) for one in options_of_each(options, len(arrays))]
        pairs = zip(arrays, each, strict=True)
        prompts = [transcription_inputs(self, [array], sampling_rate, further) for array, further in pairs]
        return media_answers(self._module, lambda: self.engine, prompts, each[0], limits)

    def _transcribe_one(
        self, sampling_rate: int, limits: CallLimits, call: tuple[np.ndarray, Mapping[str, Any]]
    ) -> str:
        found = self._transcribe(call[0], sampling_rate, call[1], limits)
        assert isinstance(found, str)
        return found

    def _transcribe_with_times(
        self, audio: np.ndarray, sampling_rate: int, words: bool, options: Mapping[str, Any], limits: CallLimits
    ) -> Transcript:
        array, tokenizer = checked_samples(audio, "audio"), self._writer()
        check_times(self._module, tokenizer, words=words)
        inputs = self._features([array], sampling_rate, with_mask=True)
        inputs.pop("return_timestamps", None)
        timed = TimedTranscription(self._module, tokenizer, inputs, array.size / sampling_rate, words=words)

        if self._decodes_on_engine(options):
            with call_limits(limits):
                return timed.run(limits.check, **options)

        def call(watch: GenerateWatch) -> Transcript:
            limits.begin()
            criteria = StoppingCriteriaList([*options.get("stopping_criteria", ()), watch.criterion()])
            return timed.run(watch.check, **{**options, "stopping_criteria": criteria})

        return run_on_queue(self.single_engine, call, limits)

    def _writer(self) -> Any:
        """Returns the tokenizer; raises UnsupportedModelError if there is none."""
        if self.tokenizer is None:
            raise UnsupportedModelError(
                f"{self.name} has no tokenizer to write text with; put its tokenizer files next to the weights"
            )
        return self.tokenizer

    def _has_windows(self, arrays: Sequence[np.ndarray], options: Mapping[str, Any]) -> bool:
        """Returns whether each of `arrays` goes on by itself.

        That is in windows, one of which begins where another has ended, or at temperatures of its own.
        """
        length = getattr(self.feature_extractor, "n_samples", None)
        if length is None:
            return False
        tries_again = isinstance(options.get("temperature"), list | tuple)
        return tries_again or self._has_times(options) or any(array.size > length for array in arrays)

    def _has_times(self, options: Mapping[str, Any]) -> bool:
        return bool(options.get("return_timestamps") or getattr(self.generation_config, "return_timestamps", False))

    def _decodes_on_engine(self, options: Mapping[str, Any]) -> bool:
        """Returns whether each loop of a ``generate`` call has a place in a queue of its own.

        Beams are ranked at their end, by scores of all of them: the call is one request.
        """
        num_beams = options.get("num_beams", self.generation_config.num_beams) or 1
        return num_beams == 1 and self._module._engine_rows is not None

    def _generate_on_queue(self, arguments: dict[str, Any], limits: CallLimits) -> Any:
        """Returns the result of ``generate``.

        Its rows run on the engine, or the call on the engine of single requests.
        """
        if self._decodes_on_engine(arguments):
            if self._has_times(arguments):
                arguments = arguments | {"monitor_progress": checking(limits, arguments.get("monitor_progress"))}
            with call_limits(limits):
                return self.generate(**arguments)
        num_beams = arguments.get("num_beams", self.generation_config.num_beams) or 1

        def call(watch: GenerateWatch) -> Any:
            limits.begin()
            if num_beams == 1 and "streamer" not in arguments:
                return self.generate(**arguments, streamer=watch.streamer(limits.on_tokens))
            criteria = [*arguments.get("stopping_criteria", ()), watch.criterion()]
            return self.generate(**arguments | {"stopping_criteria": StoppingCriteriaList(criteria)})

        return run_on_queue(self.single_engine, call, limits)

    def _features(self, arrays: list[np.ndarray], sampling_rate: int, *, with_mask: bool = False) -> dict[str, Any]:
        """Returns inputs of ``generate`` for an encoder-decoder: features and their masks."""
        extractor: Any = self.feature_extractor
        check_rate(getattr(extractor, "sampling_rate", None), sampling_rate)
        options: dict[str, Any] = {"sampling_rate": sampling_rate, "return_tensors": "pt"}
        options |= {"return_attention_mask": True} if with_mask else {}
        further: dict[str, Any] = {}
        chunk_len = getattr(extractor, "n_samples", None)  # of Whisper, which cuts longer audio
        longest = max(array.size for array in arrays)
        if chunk_len is not None and longest > chunk_len:
            if getattr(self.generation_config, "no_timestamps_token_id", None) is None:
                raise InvalidArgumentError(
                    f"audio: expected at most {chunk_len / sampling_rate:g} s of audio for {self.name}, whose "
                    "generation_config.json names no no_timestamps_token_id to continue after it, got "
                    f"{longest / sampling_rate:g} s; cut it into pieces"
                )
            options |= {"truncation": False, "padding": "longest", "return_attention_mask": True}
            further = {"return_timestamps": True}  # by which transformers finds where the next piece begins
        elif chunk_len is None:
            options |= {"padding": True}
        features = extractor(arrays, **options)
        given = {name: value for name, value in features.items() if isinstance(value, torch.Tensor)}
        return {**in_dtype(given, self.dtype), **further}
