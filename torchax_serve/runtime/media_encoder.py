"""Encoders of images and audio as programs that run once for each prompt.

What they compute is found again by the digest of pixels and samples: the same image in another prompt, or in another
turn of a conversation, is not encoded twice.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import hashlib
import threading
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import jax
import numpy as np
import torch

from model_adapters import quirks
from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.ops.compressed_weight import Weights
from model_adapters.program.call_spec import CallSpec
from model_adapters.program.media import VISIBLE, language_model_inputs, language_model_name
from model_adapters.program.model_program import CHECKS, ModelProgram
from model_adapters.quirks.quirk import Quirk
from torchax_serve.compilation.executable_cache import CachedFunction
from torchax_serve.multimodal.placeholders import unmet
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.runtime.static_args import StaticArgPolicy, StaticArgs, all_hold, split_traced_and_static

MAX_CACHE_BYTES = 256 << 20
"""Bytes of features that are found again, on the host, and of encoders' outputs as many: some hundred images each."""
_TEXT = frozenset({"input_ids", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids"})


Value = TypeVar("Value")


class HostCache(Generic[Value]):
    """Values by digest up to a number of bytes.

    Those that were not used for the longest time go first.

    Args:
        max_bytes: Most bytes of all values together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._values: collections.OrderedDict[str, tuple[Value, int]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, digest: str) -> Value | None:
        """Returns the value of `digest`; None if it is not there."""
        with self._lock:
            if digest not in self._values:
                return None
            self._values.move_to_end(digest)
            return self._values[digest][0]

    def put(self, digest: str, value: Value, num_bytes: int) -> None:
        """Stores a value of `num_bytes`."""
        with self._lock:
            _, before = self._values.pop(digest, (None, 0))
            self._values[digest] = value, num_bytes
            self.num_bytes += num_bytes - before
            while self.num_bytes > self._max_bytes:
                _, (_, freed) = self._values.popitem(last=False)
                self.num_bytes -= freed


@dataclasses.dataclass(frozen=True, eq=False)
class MediaFeatures:
    """Features of the images or audio of one prompt.

    Attributes:
        features: float[n, width], in the order of their placeholders; of a model whose first layers add some, those of
            the layers behind the first, side by side.
        is_media: bool[prompt_len], tokens with a feature.
        sees_until: int32[prompt_len], last position that a token sees if that is behind its own; None: no token does.
    """

    features: np.ndarray
    is_media: np.ndarray
    sees_until: np.ndarray | None


@dataclasses.dataclass(frozen=True, eq=False)
class CachedFeatures:
    """Cached features, and the ids int[n] of their placeholders, in the order of the features.

    `reach` int32[n] says by how many features a token sees ahead.
    """

    features: np.ndarray
    token_ids: np.ndarray
    reach: np.ndarray | None


class MediaEncoder:
    """The encoders of a model, up to its language model.

    Args:
        runtime: Runtime of the model.

    Attributes:
        num_hits, num_encoded: Prompts whose features were found, and those that were encoded.
        num_encoder_runs: Runs of encoders that are programs of their own.
    """

    def __init__(self, runtime: ModelRuntime) -> None:
        self._runtime, program = runtime, runtime.program
        self._static = StaticArgPolicy(program.names.per_token_args, runtime.steps.executables, runtime.weights)
        self._step = CachedFunction(runtime.steps.executables, "media", self._language_model_inputs)
        self._features: HostCache[CachedFeatures] = HostCache(MAX_CACHE_BYTES)
        self._outputs: HostCache[Any] = HostCache(MAX_CACHE_BYTES)
        self.num_hits = self.num_encoded = self.num_encoder_runs = 0

    @property
    def unsupported_reason(self) -> str | None:
        """Reason why features are not known apart from the model's forward; None if they are."""
        if self._runtime.program.names.has_encoder:
            return "it is an encoder-decoder model"
        if language_model_name(self._runtime.program.module) is None:
            return "no part of the model takes embeddings and no images"
        return None

    def _language_model_inputs(
        self, weights: Weights, inputs: dict[str, jax.Array], spec: CallSpec
    ) -> dict[str, jax.Array]:
        program: ModelProgram = self._runtime.program
        return language_model_inputs(program, weights, inputs, spec)

    def encode(self, prompt_ids: np.ndarray, given: Mapping[str, Any], digest: str) -> MediaFeatures:
        """Returns the features of a prompt, computed or found.

        Args:
            prompt_ids: int[prompt_len].
            given: Arguments of the prompt's forward, tensors on the CPU.
            digest: What `digest_of` returned for its images or audio.

        Raises:
            InvalidArgumentError: placeholders and features do not fit each other.
            UnsupportedModelError: the language model gets more than embeddings.
        """
        digest = self._of_weights(digest)
        known = self._features.get(digest)
        if known is not None and (found := _placed(prompt_ids, known)) is not None:
            self.num_hits += 1
            return found
        made = self._encoded(given)
        self.num_encoded += 1
        self._store(digest, prompt_ids, made)
        return made

    def run_encoder(self, path: str, given: dict[str, Any]) -> Any:
        """Returns the output of an encoder, as `ModelRuntime.call_method`, computed or found."""
        digest = self._of_weights(f"{path} {digest_of(given)}")
        output = self._outputs.get(digest)
        if output is None:
            output = self._runtime.call_method(path, given)
            self.num_encoder_runs += 1
            self._outputs.put(digest, output, sum(getattr(each, "nbytes", 0) for each in jax.tree.leaves(output)))
        return copy.copy(output)

    def _of_weights(self, digest: str) -> str:
        return f"{digest} {self._runtime.weights_version} {self._runtime.num_changes}"

    def _encoded(self, given: Mapping[str, Any]) -> MediaFeatures:
        given = {name: value for name, value in given.items() if name not in self._runtime.ignored_args}

        def call(known: StaticArgs) -> tuple[tuple[dict[str, Any]], CallSpec]:
            arrays, rest = split_traced_and_static(given, known)
            return (arrays,), CallSpec(static_args=rest)

        fields = self._static.run(
            dict(given), call, self._language_model_inputs, self._step, lambda fields: fields.get(CHECKS)
        )
        if not all_hold(fields.get(CHECKS)):
            raise InvalidArgumentError(unmet(self._runtime.config, dict(given)))
        if not np.asarray(fields.get("is_of_text", True)):
            raise UnsupportedModelError("its language model gets more of images than embeddings")
        is_media = np.asarray(fields["is_media"])
        masks = {name.removeprefix(VISIBLE): fields[name] for name in fields if name.startswith(VISIBLE)}
        until = _spans(
            {kind: np.asarray(mask) for kind, mask in masks.items()}, quirks.of(self._runtime.program.module)
        )
        features = [np.asarray(fields["embeds"])[is_media], *np.asarray(fields.get("deepstack", ()))]
        if any(len(part) != len(features[0]) for part in features):
            raise UnsupportedModelError("its first layers add features to other tokens than those of images")
        return MediaFeatures(np.concatenate(features, -1), is_media, until)

    def _store(self, digest: str, prompt_ids: np.ndarray, made: MediaFeatures) -> None:
        reach = None
        if made.sees_until is not None:
            ahead = made.sees_until - np.arange(len(prompt_ids))
            if (ahead[~made.is_media] > 0).any():
                return  # text sees ahead, too: what the tokens of an image see depends on the text
            reach = ahead[made.is_media]
        tokens = prompt_ids[made.is_media]
        if not len(tokens) or np.isin(prompt_ids[~made.is_media], tokens).any():
            return  # where features stand is not known by the tokens
        self._features.put(digest, CachedFeatures(made.features, tokens, reach), made.features.nbytes)


def _placed(prompt_ids: np.ndarray, known: CachedFeatures) -> MediaFeatures | None:
    """Returns known features at the placeholders of another prompt.

    None if it has others, or those of an image and a video, or of sounds, in another order.
    """
    is_media = np.isin(prompt_ids, known.token_ids)
    if not np.array_equal(prompt_ids[is_media], known.token_ids):
        return None
    until = None
    if known.reach is not None:
        until = np.arange(len(prompt_ids), dtype=np.int32)
        until[is_media] += known.reach
    return MediaFeatures(known.features, is_media, until)


def _spans(visible: Mapping[str, np.ndarray], quirk: Quirk) -> np.ndarray | None:
    """Returns what `_sees_until` does of the masks bool[len, len] of kinds of layers.

    Raises:
        UnsupportedModelError: tokens see others behind them in other layers than those of the quirk.
    """
    spans = {kind: found for kind, mask in visible.items() if (found := _sees_until(mask)) is not None}
    if not spans:
        return None
    first, *others = spans.values()
    wanted = visible.keys() if quirk.spans_in is None else {quirk.spans_in}
    if spans.keys() != wanted or not all(np.array_equal(first, each) for each in others):
        raise UnsupportedModelError("its layers differ in what the tokens of an image see")
    return first


def _sees_until(visible: np.ndarray) -> np.ndarray | None:
    """Returns the last position that each token sees, int32[len], of `visible` bool[len, len].

    None for its own.

    Raises:
        UnsupportedModelError: a token does not see all tokens from its own to the last one.
    """
    length = len(visible)
    own = np.arange(length)
    last = length - 1 - visible[:, ::-1].argmax(1)
    ahead = (own[None] > own[:, None]) & (own[None] <= last[:, None])
    if not visible[own, own].all() or not visible[ahead].all():
        raise UnsupportedModelError("what its tokens see is more than causal and not the rest of an image")
    return last.astype(np.int32) if (last > own).any() else None


def digest_of(inputs: Mapping[str, Any]) -> str:
    """Returns a digest of a prompt's pixels and samples: of all tensors but those of text."""
    found = hashlib.sha256()
    for name, value in sorted(inputs.items()):
        if name in _TEXT or value is None:
            continue
        for leaf in jax.tree.leaves(value, is_leaf=lambda leaf: isinstance(leaf, torch.Tensor)):
            found.update(f"{name} ".encode())
            if isinstance(leaf, torch.Tensor):
                found.update(f"{leaf.dtype} {tuple(leaf.shape)} ".encode())
                found.update(leaf.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            else:
                found.update(repr(leaf).encode())
    return found.hexdigest()


def page_ids(
    prompt_ids: np.ndarray, is_media: np.ndarray, digest: str, positions: np.ndarray | None = None
) -> tuple[int, ...]:
    """Returns the ids by which cached pages of a prompt are found, as many as tokens.

    Those of placeholders are no token's. They are made of the digest, the number of the feature, its `positions`
    int32[axes, prompt_len], and the token, by which an image is told from a video.
    """
    ids = prompt_ids.tolist()
    for number, position in enumerate(np.flatnonzero(is_media).tolist()):
        places = None if positions is None else positions[:, position].tolist()
        made = hashlib.sha256(f"{digest} {number} {ids[position]} {places}".encode()).digest()[:8]
        ids[position] = int.from_bytes(made, "big") % (2**63 - 2**31) + 2**31
    return tuple(ids)
