"""Speech to text: sounds in, their words out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoFeatureExtractor, FeatureExtractionMixin, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES

from model_adapters.errors import CheckpointError, InvalidArgumentError, UnsupportedModelError
from torchax_serve.model import ServedModel

SOUND_INPUTS = ("input_features", "input_values")


def is_speech_model(module: PreTrainedModel) -> bool:
    """Whether `module` has an encoder of sounds beside a decoder of text."""
    names = MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES.values()
    return bool(type(module).__name__ in names and module.config.is_encoder_decoder and module.can_generate())


class SpeechModel(ServedModel):
    """A model that writes down what it hears; made by `serve`."""

    @functools.cached_property
    def feature_extractor(self) -> FeatureExtractionMixin:
        """What makes the model's inputs of samples, from the checkpoint's own files.

        Raises:
            InvalidArgumentError: the model came without one.
            CheckpointError: its files are there and do not make one.
        """
        loaded = self._open()
        folder = loaded.files_folder
        files = ("preprocessor_config.json", "processor_config.json")
        if folder is None or not any((folder / name).is_file() for name in files):
            raise InvalidArgumentError(
                f"{self.name} has no feature extractor ({' or '.join(files)}), and sounds need one; put its files "
                "beside the weights, or give features to generate()"
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
        self, audio: np.ndarray | Sequence[np.ndarray], *, sampling_rate: int, **options: Any
    ) -> str | list[str]:
        """The words in `audio`.

        Args:
            audio: samples float[num_samples] of one channel, or several such arrays.
            sampling_rate: samples per second, which must be those that the model hears.
            options: of ``generate``, such as ``language`` and ``task`` of Whisper, or ``max_new_tokens``.

        Returns:
            The text of one array, or a list of texts in their order.

        Raises:
            InvalidArgumentError: no samples, more than one channel, values that are no numbers, another sampling rate.
            UnsupportedModelError: the model was served without a tokenizer.
        """
        sounds = [audio] if isinstance(audio, np.ndarray) else audio
        if isinstance(sounds, str | bytes) or not isinstance(sounds, Sequence):
            raise InvalidArgumentError(
                f"audio: expected a numpy array of samples or a list of such, got {type(audio).__name__}; read the "
                "file with a library for sounds first"
            )
        arrays = [_samples(sound, index) for index, sound in enumerate(sounds)]
        if not arrays:
            raise InvalidArgumentError("audio: expected at least one array of samples, got an empty list")
        if self.tokenizer is None:
            raise UnsupportedModelError(
                f"{self.name} has no tokenizer to write text with; put its tokenizer files beside the weights"
            )
        tokens = self.generate(**self._features(arrays, sampling_rate), **options)
        tokens = getattr(tokens, "sequences", tokens)
        texts = [text.strip() for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]
        return texts[0] if isinstance(audio, np.ndarray) else texts

    def _features(self, arrays: list[np.ndarray], sampling_rate: int) -> dict[str, Any]:
        """Inputs of ``generate``."""
        extractor: Any = self.feature_extractor
        wanted = getattr(extractor, "sampling_rate", None)
        if wanted is not None and sampling_rate != wanted:
            raise InvalidArgumentError(
                f"sampling_rate: expected {wanted} samples per second, which this model hears, got {sampling_rate!r}; "
                "resample the audio first"
            )
        options: dict[str, Any] = {"sampling_rate": sampling_rate, "return_tensors": "pt"}
        further: dict[str, Any] = {}
        chunk_len = getattr(extractor, "n_samples", None)  # of Whisper, which would cut off what is longer
        if chunk_len is not None and max(array.size for array in arrays) > chunk_len:
            options |= {"truncation": False, "padding": "longest", "return_attention_mask": True}
            further = {"return_timestamps": True}  # by which transformers finds where the next piece begins
        elif chunk_len is None:
            options |= {"padding": True}
        features = extractor(arrays, **options)
        given = {name: value for name, value in features.items() if isinstance(value, torch.Tensor)}
        return {**given, **further}


def _samples(sound: Any, index: int) -> np.ndarray:
    """`sound` as float32[num_samples], checked."""
    if not isinstance(sound, np.ndarray):
        raise InvalidArgumentError(f"audio[{index}]: expected a numpy array of samples, got {type(sound).__name__}")
    if sound.ndim != 1:
        raise InvalidArgumentError(
            f"audio[{index}]: expected one channel, float[num_samples], got shape {list(sound.shape)}; take the mean "
            "of the channels"
        )
    if sound.size == 0:
        raise InvalidArgumentError(f"audio[{index}]: expected samples, got none; leave out sounds of zero length")
    if not np.issubdtype(sound.dtype, np.floating) or not np.isfinite(sound).all():
        raise InvalidArgumentError(
            f"audio[{index}]: expected floating-point samples from -1 to 1, got {sound.dtype}"
            + ("" if not np.issubdtype(sound.dtype, np.floating) else " with values that are no numbers")
            + "; divide integers by the largest one"
        )
    return sound.astype(np.float32)
