"""Features of images and audio by slot, and what the tokens of a step need of them.

An encoder has run before its request was submitted (`torchax_serve/runtime/media_encoder.py`). The features stay on
the host; a step that computes placeholder tokens is given theirs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from model_adapters.caches.packed_batch import MediaTokens
from torchax_serve.executors.request_input import MediaInput, RequestInput
from torchax_serve.scheduler import DecodeBatch, PlanRow


@dataclasses.dataclass(frozen=True)
class MediaSpec:
    """The static part of a step with placeholder tokens, or with positions on several axes.

    Attributes:
        num_axes: Axes of the positions; 0: those of text.
        sees_ahead: Whether tokens see later ones of the same image.
        width, dtype: Columns of a feature, and their dtype.
    """

    num_axes: int
    sees_ahead: bool
    width: int
    dtype: str

    def shapes(self, num_tokens: int) -> MediaTokens:
        """Returns zeros of the shapes for a step of `num_tokens` tokens."""
        ints = np.zeros(num_tokens, np.int32)
        return MediaTokens(
            features=np.zeros((num_tokens, self.width), self.dtype),  # type: ignore[arg-type]
            index=ints - 1,  # type: ignore[arg-type]
            positions=np.zeros((self.num_axes, num_tokens), np.int32) if self.num_axes else None,  # type: ignore[arg-type]
            sees_until=ints if self.sees_ahead else None,  # type: ignore[arg-type]
        )


class MediaSlots:
    """The images and audio of the requests in all slots.

    Args:
        num_slots: Number of slots.

    Attributes:
        by_slot: Images or audio by slot, of requests that have some.
        deltas: int32[num_slots], of a token behind the prompt, its position for rotary embeddings minus its position.
    """

    def __init__(self, num_slots: int) -> None:
        self.by_slot: dict[int, MediaInput] = {}
        self.deltas = np.zeros(num_slots, np.int32)

    def assign(self, slot: int, request_input: RequestInput) -> None:
        """Assigns `slot` to a request with this input."""
        self.by_slot.pop(slot, None)
        self.deltas[slot] = 0
        if isinstance(request_input, MediaInput):
            self.by_slot[slot] = request_input
            self.deltas[slot] = request_input.delta

    def has_deltas(self, rows: Sequence[PlanRow]) -> bool:
        """Returns whether a row's tokens have other positions for rotary embeddings."""
        if not self.by_slot or not self.deltas.any():
            return False
        slots = rows.slots if isinstance(rows, DecodeBatch) else [row.slot for row in rows]
        return bool(self.deltas[slots].any())

    def with_token_ids(self, rows: Sequence[PlanRow]) -> Sequence[PlanRow]:
        """Returns `rows` with token ids in place of the ids by which media's pages are found."""
        if not self.by_slot or isinstance(rows, DecodeBatch):
            return rows
        return [self._with_token_ids(row) for row in rows]

    def _with_token_ids(self, row: PlanRow) -> PlanRow:
        media = self.by_slot.get(row.slot)
        if media is None or row.token_ids is None:
            return row
        ids = media.prompt_ids[row.context_len : row.context_len + row.num_tokens]
        return row._replace(token_ids=(*ids, *row.token_ids[len(ids) :]))

    def has_prompts(self, rows: Sequence[PlanRow]) -> bool:
        """Returns whether `rows` have tokens of a prompt with media."""
        return any(row.slot in self.by_slot and row.token_ids is not None for row in rows) if self.by_slot else False

    def spec_of(self, rows: Sequence[PlanRow]) -> MediaSpec | None:
        """Returns the static part of a step with `rows`; None if its tokens are as those of text."""
        if not self.by_slot or (isinstance(rows, DecodeBatch) and not self.has_deltas(rows)):
            return None
        given = [(self.by_slot[row.slot], row) for row in rows if row.slot in self.by_slot]
        chunks = [(media, row) for media, row in given if row.context_len < len(media.prompt_ids)]
        axes = max((1 for media, _ in given if media.delta), default=0)
        axes = max((len(media.positions) for media, _ in chunks if media.positions is not None), default=axes)
        ahead = any(media.sees_until is not None for media, _ in chunks)
        if not (axes or ahead or any((media.index[_span(row)] >= 0).any() for media, row in chunks)):
            return None
        features = given[0][0].features
        return MediaSpec(axes, ahead, features.shape[1], str(features.dtype))

    def of_decode(self, rows: Sequence[PlanRow]) -> tuple[MediaSpec | None, bool]:
        """Returns the static part of a packed step that decodes `rows`, and `has_deltas`."""
        return self.spec_of(rows), self.has_deltas(rows)

    def tokens(self, rows: Sequence[PlanRow], num_tokens: int, spec: MediaSpec | None) -> MediaTokens | None:
        """Returns what the tokens of `rows`, padded to `num_tokens`, have of media.

        None without a spec.
        """
        if spec is None:
            return None
        found, begin, num_features = spec.shapes(num_tokens), 0, 0
        for row in rows:
            part, own = slice(begin, begin + row.num_tokens), np.arange(row.num_tokens) + row.context_len
            begin = part.stop
            media = self.by_slot.get(row.slot)
            if found.positions is not None:
                found.positions[:, part] = own + self.deltas[row.slot]
            if found.sees_until is not None:
                found.sees_until[part] = own
            if media is None or row.context_len >= len(media.prompt_ids):
                continue
            there, num = _span(row), len(media.index[_span(row)])
            index = media.index[there]
            is_feature = index >= 0
            chosen = media.features[index[is_feature]]
            found.features[num_features : num_features + len(chosen)] = chosen
            numbers = np.where(is_feature, np.cumsum(is_feature) - 1 + num_features, -1)
            found.index[part.start : part.start + num] = numbers
            num_features += len(chosen)
            if found.positions is not None and media.positions is not None:
                found.positions[:, part.start : part.start + num] = media.positions[:, there]
            if found.sees_until is not None and media.sees_until is not None:
                found.sees_until[part.start : part.start + num] = media.sees_until[there]
        _repeat_last(found, begin)
        return found


def _span(row: PlanRow) -> slice:
    return slice(row.context_len, row.context_len + row.num_tokens)


def _repeat_last(found: MediaTokens, end: int) -> None:
    """Makes padding equal to the last token, as kernels compute equal rows once."""
    for array in (found.index, found.positions, found.sees_until):
        if array is not None and end:
            array[..., end:] = array[..., end - 1 : end]
