"""Spoken texts of SpeechT5: a spectrogram, made in one program, and a vocoder's wave."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import AutoConfig, EncoderDecoderCache, SpeechT5HifiGan
from transformers.cache_utils import Cache, CacheLayerMixin

from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.errors import CheckpointError, InvalidArgumentError
from torchax_serve.runtime.model_runtime import ModelRuntime

CLASS_NAME = "SpeechT5ForTextToSpeech"
VOCODER = "vocoder"
"""Folder next to the weights, with the files of the vocoder."""
TEXT_STEP = 16
"""Tokens between two lengths of programs; padding is masked."""
THRESHOLD = 0.5
MAX_LEN_RATIO = 20.0
"""Probability of the end, and most frames for a token, by default in `SpeechT5ForTextToSpeech.generate_speech`."""


class SpectrogramSpeaker:
    """Speaks texts with a SpeechT5 and its vocoder.

    Args:
        module: The model, a `torchax_serve.generation.jax_model.JaxModelMixin`.
        runtime: Of the model.
        vocoder: The vocoder on JAX.
    """

    def __init__(self, module: Any, runtime: ModelRuntime, vocoder: Any) -> None:
        self._config, self._runtime, self._vocoder = module.config, runtime, vocoder
        self._prenet = module.speecht5.decoder.prenet
        self._max_num_frames = self._prenet.encode_positions.max_len
        module.frames_in_one_program = _Frames(module)
        self.sampling_rate = int(vocoder.config.sampling_rate)

    def speak(self, ids: torch.Tensor, speaker_embedding: np.ndarray) -> np.ndarray:
        """Returns the samples of a text, float32[num_samples].

        The random numbers of the decoder's prenet are those that PyTorch draws.

        Args:
            ids: int64[1, num_tokens].
            speaker_embedding: float32[dim].

        Raises:
            InvalidArgumentError: the text is too long.
        """
        config, num_tokens = self._config, ids.shape[1]
        if num_tokens > config.max_text_positions:
            raise InvalidArgumentError(
                f"texts: expected at most {config.max_text_positions} tokens, got {num_tokens}; speak its sentences"
            )
        padded = min(-(-num_tokens // TEXT_STEP) * TEXT_STEP, config.max_text_positions)
        most = min(int(num_tokens * MAX_LEN_RATIO / config.reduction_factor), self._max_num_frames)
        capacity = min(int(padded * MAX_LEN_RATIO / config.reduction_factor), self._max_num_frames)
        inputs = {
            "input_ids": torch.nn.functional.pad(ids, (0, padded - num_tokens), value=config.pad_token_id),
            "attention_mask": (torch.arange(padded) < num_tokens)[None].int(),
            "speaker_embeddings": torch.from_numpy(speaker_embedding)[None],
            "kept": self._dropout(most, capacity),
            "max_num_frames": torch.tensor(most, dtype=torch.int32),
        }
        frames, num_frames = self._runtime.call_method("frames_in_one_program", inputs)
        spectrogram = frames[: int(num_frames)].reshape(1, -1, config.num_mel_bins)
        (spectrogram,) = self._runtime.call_method("speech_decoder_postnet.postnet", {"hidden_states": spectrogram})
        with torch.no_grad():
            return np.asarray(self._vocoder(spectrogram.float()).numpy(), np.float32).reshape(-1)

    def _dropout(self, num_steps: int, capacity: int) -> torch.Tensor:
        """Returns which values of a step's last frame the prenet keeps.

        They are bool[capacity, num_layers, units]. It draws for all frames of each step, as the model's code does.
        """
        widths = [layer.out_features for layer in self._prenet.layers]
        share = self._config.speech_decoder_prenet_dropout
        kept = torch.zeros(capacity, len(widths), max(widths), dtype=torch.bool)
        for step in range(num_steps):
            for index, width in enumerate(widths):
                kept[step, index, :width] = torch.bernoulli(torch.empty(step + 1, width), p=share)[-1] == 1
        return kept


def read_vocoder(folder: Path | None, name: str) -> SpeechT5HifiGan:
    """Returns the vocoder that lies next to the weights of a model.

    Raises:
        InvalidArgumentError: there is none.
        CheckpointError: its files are broken.
    """
    path = None if folder is None else folder / VOCODER
    if path is None or not (path / "config.json").is_file():
        raise InvalidArgumentError(
            f"{name} writes spectrograms, which a vocoder makes sound of: expected its files in the folder {VOCODER} "
            "next to the weights, got none; download microsoft/speecht5_hifigan there"
        )
    try:
        return SpeechT5HifiGan.from_pretrained(
            path, config=AutoConfig.from_pretrained(path, local_files_only=True), local_files_only=True
        ).eval()
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the files in {path} make no vocoder ({str(error).splitlines()[0]}): get them again"
        ) from error


def checked_speaker(given: Any, dim: int, name: str) -> np.ndarray:
    """Returns a speaker embedding as float32[dim].

    Raises:
        InvalidArgumentError: none, one of another size, or values that are no finite numbers.
    """
    if given is None:
        raise InvalidArgumentError(
            f"speaker_embedding: expected float[{dim}], an x-vector of the voice, which {name} needs, got none; take "
            "one such as those of the data set Matthijs/cmu-arctic-xvectors"
        )
    try:
        found = np.asarray(given, np.float32)
    except (TypeError, ValueError):
        found = np.empty(0, np.float32)
    if found.shape != (dim,) or not np.isfinite(found).all():
        got = "values that are no numbers" if found.shape == (dim,) else f"shape {list(found.shape)}"
        raise InvalidArgumentError(f"speaker_embedding: expected float[{dim}] for {name}, got {got}")
    return found


class _Frames:
    """The loop over frames, as a method of the model inside a trace.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        speaker_embeddings: torch.Tensor,
        kept: torch.Tensor,
        max_num_frames: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns frames [capacity, reduction_factor, mel bins], and how many are the text's."""
        model, config = self._model, self._model.config
        encoded = model.speecht5.encoder(input_values=input_ids, attention_mask=attention_mask, return_dict=True)
        source, decoder = encoded.last_hidden_state, model.speecht5.decoder
        cross = [_projected(layer.encoder_attn, source) for layer in decoder.wrapped_decoder.layers]
        masks, most = jax_view(kept), jax_view(max_num_frames)
        capacity = masks.shape[0]
        dtype = jax_view(source).dtype
        size = (config.reduction_factor, config.num_mel_bins)
        shape = (1, config.decoder_attention_heads, capacity, config.hidden_size // config.decoder_attention_heads)
        empty = [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in cross]

        def goes_on(carry: Any) -> jax.Array:
            index, has_ended, *_ = carry
            return (index < most) & ~has_ended

        def step(carry: Any) -> Any:
            index, _, last, frames, states = carry
            with _one_frame(decoder.prenet, index, masks[index]):
                hidden = decoder.prenet(torch_view(last), speaker_embeddings)
            cache = _fixed_cache(states, cross, index)
            seen = jnp.where(jnp.arange(capacity) <= index, 0.0, jnp.finfo(dtype).min).astype(dtype)
            output = decoder.wrapped_decoder(
                hidden_states=hidden,
                attention_mask=torch_view(seen[None, None, None]),
                encoder_hidden_states=source,
                encoder_attention_mask=attention_mask,
                cache=cache,
                use_cache=True,
                return_dict=True,
            ).last_hidden_state[:, 0]
            postnet = model.speech_decoder_postnet
            frame = jax_view(postnet.feat_out(output)).reshape(size)
            has_ended = jax_view(torch.sigmoid(postnet.prob_out(output))).sum() >= THRESHOLD
            layers: Any = cache.self_attention_cache.layers
            own = [(jax_view(each.keys), jax_view(each.values)) for each in layers]
            return index + 1, has_ended, frame[None, -1:], frames.at[index].set(frame), own

        frames = jnp.zeros((capacity, *size), dtype)
        carry = (jnp.int32(0), jnp.bool_(False), jnp.zeros((1, 1, size[1]), dtype), frames, empty)
        num_frames, _, _, frames, _ = jax.lax.while_loop(goes_on, step, carry)
        return torch_view(frames), torch_view(num_frames)


class _FixedLayer(CacheLayerMixin):
    """Keys and values of all frames that there may be, one of which is written.

    Args:
        keys: [1, heads, capacity, dim].
        values: The same.
        index: int32[], where new ones are written.
    """

    is_sliding = False
    keys: Any
    values: Any

    def __init__(self, keys: jax.Array, values: jax.Array, index: Any) -> None:
        super().__init__()
        self.keys, self.values, self._index = torch_view(keys), torch_view(values), index

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Does nothing: the arrays are there."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Writes the keys and values of a frame, and returns those of all."""
        self.keys, self.values = self._written(self.keys, key_states), self._written(self.values, value_states)
        return self.keys, self.values

    def _written(self, stored: Any, new: Any) -> Any:
        found = jax.lax.dynamic_update_slice_in_dim(jax_view(stored), jax_view(new), self._index, axis=2)
        return torch_view(found)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the length of the keys, and where they begin."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        """Returns the length of the keys."""
        return int(self.keys.shape[2])

    def get_max_length(self) -> int:
        """Returns the length of the keys."""
        return int(self.keys.shape[2])


def _fixed_cache(states: Any, cross: Any, index: jax.Array) -> EncoderDecoderCache:
    """Returns the cache of a step, whose keys and values of the encoder's output are there."""
    own = Cache(layers=[_FixedLayer(keys, values, index) for keys, values in states])
    source = Cache(layers=[_FixedLayer(jax_view(keys), jax_view(values), index) for keys, values in cross])
    found = EncoderDecoderCache(own, source)
    found.is_updated = dict.fromkeys(range(len(cross)), True)
    return found


def _projected(attention: Any, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values of the encoder's output, [1, heads, num_tokens, dim] each."""
    shape = (1, -1, attention.num_heads, attention.head_dim)
    keys, values = attention.k_proj(source).view(shape), attention.v_proj(source).view(shape)
    return keys.transpose(1, 2), values.transpose(1, 2)


@contextlib.contextmanager
def _one_frame(prenet: Any, index: jax.Array, kept: jax.Array) -> Iterator[None]:
    """Makes the prenet compute the frame at `index` alone, with the given dropout.

    Args:
        prenet: Of the decoder.
        index: int32[].
        kept: bool[num_layers, units].
    """
    positions = prenet.encode_positions
    table, rows = positions.pe, iter(kept)

    def dropout(values: torch.Tensor, share: float) -> torch.Tensor:
        mask = torch_view(next(rows)[: values.shape[-1]])
        return torch.where(mask, values, 0) * 1 / (1 - share)

    positions.pe = torch_view(jax.lax.dynamic_slice_in_dim(jax_view(table), index, 1, axis=1))
    prenet._consistent_dropout = dropout
    try:
        yield
    finally:
        positions.pe = table
        del prenet._consistent_dropout
