"""`AudioModel`: labels of sound, transcripts of CTC models, and spoken texts."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch

from model_adapters.errors import InvalidArgumentError
from torchax_serve.entrypoints.task_model import TaskModel, one_or_all
from torchax_serve.entrypoints.to_jax import to_jax
from torchax_serve.pooling.batching import checked_texts
from torchax_serve.pooling.queue import QueuedTexts, check_wanted
from torchax_serve.tasks.results import ScoredLabel, Speech
from torchax_serve.tasks.sounds import SoundLike, is_single_sound, sounds_of
from torchax_serve.tasks.spectrograms import CLASS_NAME, SpectrogramSpeaker, checked_speaker, read_vocoder
from torchax_serve.validation.argument_hints import refuses_unknown

Sounds = SoundLike | Sequence[SoundLike]


class AudioModel(TaskModel):
    """A model with a head for sound; made by `serve`.

    A sound is a file, or samples float[num_samples] of one channel with their `sampling_rate`; files are resampled.
    Results are those of transformers' pipeline. Sounds of all threads that wait are computed together, those of equal
    lengths in a batch; each length has programs of its own, as padding would change results.
    """

    @refuses_unknown
    def classify_audio(
        self,
        audio: Sounds,
        *,
        sampling_rate: int | None = None,
        top_k: int | None = 5,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> list[ScoredLabel] | list[list[ScoredLabel]]:
        """Returns labels of a sound, the best first; of a list of sounds a list of those.

        Args:
            audio: one sound or several.
            sampling_rate: samples per second (Hz) of arrays, which must be the model's.
            top_k: number of labels; None returns all.
            timeout_s: seconds after which the call ends with an error, looked at before each forward; None: never.
            queue_timeout_s: the same for a call that has not begun by then.

        Raises:
            UnsupportedModelError: the model does not classify sound.
            InvalidArgumentError: no sound, several channels, values that are no numbers, another sampling rate.
            QueueFullError: too many inputs are waiting.
            DeadlineError: a time limit has passed.
        """
        call = self._labelling(audio, sampling_rate, top_k)
        return one_or_all(is_single_sound(audio), call.run(timeout_s, queue_timeout_s))

    @refuses_unknown
    async def aclassify_audio(
        self,
        audio: Sounds,
        *,
        sampling_rate: int | None = None,
        top_k: int | None = 5,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> list[ScoredLabel] | list[list[ScoredLabel]]:
        """Works as `classify_audio` without blocking the event loop; cancelling ends it."""
        call = self._labelling(audio, sampling_rate, top_k)
        return one_or_all(is_single_sound(audio), await call.run_async(timeout_s, queue_timeout_s))

    @refuses_unknown
    def transcribe(
        self,
        audio: Sounds,
        *,
        sampling_rate: int | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> str | list[str]:
        """Returns the words in a sound; arguments and errors as of `classify_audio`."""
        found = self._writing(audio, sampling_rate).run(timeout_s, queue_timeout_s)
        return str(found[0]) if is_single_sound(audio) else found

    @refuses_unknown
    async def atranscribe(
        self,
        audio: Sounds,
        *,
        sampling_rate: int | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> str | list[str]:
        """Works as `transcribe` without blocking the event loop; cancelling ends it."""
        found = await self._writing(audio, sampling_rate).run_async(timeout_s, queue_timeout_s)
        return str(found[0]) if is_single_sound(audio) else found

    @refuses_unknown
    def speak(
        self,
        texts: str | Sequence[str],
        *,
        seed: int | None = None,
        speaker: int | None = None,
        speaking_rate: float | None = None,
        speaker_embedding: Any = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> Speech | list[Speech]:
        """Returns a spoken text; of a list of texts a list of those.

        Args:
            texts: one text or several.
            seed: of the noise in the voice; None: a new one for each call.
            speaker: number of one of the model's speakers, from 0; None: the model's own.
            speaking_rate: larger is quicker; None: the model's own.
            speaker_embedding: float[dim], an x-vector of the voice, which SpeechT5 needs and others do not take.
            timeout_s, queue_timeout_s: as in `classify_audio`.

        Raises:
            UnsupportedModelError: the model does not speak.
            InvalidArgumentError: no text, or none that the model's tokenizer has letters for; no such speaker; an
                option that this model does not take, or a missing one; no vocoder next to the weights of SpeechT5.
            QueueFullError: too many inputs are waiting.
            DeadlineError: a time limit has passed.
        """
        call = self._speaking(texts, seed, speaker, speaking_rate, speaker_embedding)
        found = call.run(timeout_s, queue_timeout_s)
        return one_or_all(isinstance(texts, str), found)

    @refuses_unknown
    async def aspeak(
        self,
        texts: str | Sequence[str],
        *,
        seed: int | None = None,
        speaker: int | None = None,
        speaking_rate: float | None = None,
        speaker_embedding: Any = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> Speech | list[Speech]:
        """Works as `speak` without blocking the event loop; cancelling ends it between texts."""
        call = self._speaking(texts, seed, speaker, speaking_rate, speaker_embedding)
        found = await call.run_async(timeout_s, queue_timeout_s)
        return one_or_all(isinstance(texts, str), found)

    @property
    def num_speakers(self) -> int:
        """Number of speakers of a model that speaks; 1 without a choice."""
        return int(getattr(self._config, "num_speakers", 1) or 1)

    @property
    def sampling_rate(self) -> int:
        """Samples per second (Hz) that the model takes."""
        return int(self._reader("feature_extractor").sampling_rate)

    def _labelling(self, audio: Sounds, sampling_rate: int | None, top_k: int | None) -> QueuedTexts:
        head = self._head_for("classify_audio")
        if top_k is not None and (type(top_k) is not int or top_k < 1):
            raise InvalidArgumentError(f"top_k: expected a number of labels >= 1, got {top_k!r}; None returns all")

        def call(items: Sequence[Any]) -> list[list[ScoredLabel]]:
            found = self._pipeline(head).run(items, top_k=top_k)
            return [[ScoredLabel(each["label"], each["score"]) for each in row] for row in found]

        return self._call_on_queue((head.pipeline, top_k), call, sounds_of(audio, sampling_rate, self.sampling_rate))

    def _writing(self, audio: Sounds, sampling_rate: int | None) -> QueuedTexts:
        head = self._head_for("transcribe")

        def call(items: Sequence[Any]) -> list[str]:
            return [str(each["text"]) for each in self._pipeline(head).run(items)]

        return self._call_on_queue(head.pipeline, call, sounds_of(audio, sampling_rate, self.sampling_rate))

    def _speaking(
        self,
        texts: str | Sequence[str],
        seed: int | None,
        speaker: int | None,
        speaking_rate: float | None,
        speaker_embedding: Any,
    ) -> QueuedTexts:
        head = self._head_for("speak")
        if speaker is not None and (type(speaker) is not int or not 0 <= speaker < self.num_speakers):
            raise InvalidArgumentError(
                f"speaker: expected a number from 0 to {self.num_speakers - 1}, got {speaker!r}; correct it"
            )
        if speaking_rate is not None and not 0.05 <= speaking_rate <= 20:
            raise InvalidArgumentError(f"speaking_rate: expected a number from 0.05 to 20, got {speaking_rate!r}")
        if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 63):
            raise InvalidArgumentError(f"seed: expected a whole number from 0 to 2**63 - 1, got {seed!r}; correct it")
        if self.class_name == CLASS_NAME:
            return self._speaking_frames(checked_texts(texts), seed, speaking_rate, speaker_embedding)
        if speaker_embedding is not None:
            raise InvalidArgumentError(
                f"speaker_embedding: expected none for {self.name}, which takes speaker=, a number; leave it out"
            )
        options = {"speaker_id": speaker if self.num_speakers > 1 else None, "speaking_rate": speaking_rate}
        params = {"forward_params": {name: value for name, value in options.items() if value is not None}}

        def say(text: Any) -> Speech:
            (made,) = self._pipeline(head).run([text], **params)
            return Speech(np.asarray(made["audio"], np.float32).reshape(-1), int(made["sampling_rate"]))

        return self._saying(say, (head.pipeline, seed, speaker, speaking_rate), checked_texts(texts), seed)

    def _speaking_frames(
        self, texts: Sequence[Any], seed: int | None, speaking_rate: float | None, speaker_embedding: Any
    ) -> QueuedTexts:
        """Returns the call of a model that writes spectrograms."""
        if speaking_rate is not None:
            raise InvalidArgumentError(
                f"speaking_rate: expected none for {self.name}, which has one rate; leave it out"
            )
        voice = checked_speaker(speaker_embedding, self._config.speaker_embedding_dim, self.name)
        tokenizer = self._own_tokenizer()

        def say(text: Any) -> Speech:
            samples = self._spectrogram_speaker.speak(tokenizer(text, return_tensors="pt")["input_ids"], voice)
            return Speech(samples, self._spectrogram_speaker.sampling_rate)

        return self._saying(say, ("frames", seed, voice.tobytes()), texts, seed)

    def _saying(
        self, say: Callable[[Any], Speech], key: Hashable, texts: Sequence[Any], seed: int | None
    ) -> QueuedTexts:
        def call(items: Sequence[Any]) -> list[Speech]:
            found = []
            for item in items:  # one by one, so that a seed means the same in any batch
                check_wanted()
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(secrets.randbits(63) if seed is None else seed)
                    found.append(say(item))
            return found

        return self._call_on_queue(key, call, texts)

    @functools.cached_property
    def _spectrogram_speaker(self) -> SpectrogramSpeaker:
        vocoder = to_jax(read_vocoder(self._loaded_or_raise().files_folder, self.name))
        return SpectrogramSpeaker(self._module, self.runtime, vocoder)
