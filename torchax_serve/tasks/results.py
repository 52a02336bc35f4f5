"""Result types of models with heads for further tasks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class ScoredLabel:
    """A label with its score."""

    label: str
    score: float


@dataclasses.dataclass(frozen=True)
class Box:
    """A box in pixels of the caller's image, its origin the upper left corner."""

    xmin: int
    ymin: int
    xmax: int
    ymax: int


def box_of(mask: np.ndarray) -> Box | None:
    """Returns the smallest box around a mask bool[height, width]; None if it is empty.

    Its right and lower ends are behind the last pixels.
    """
    columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
    return Box(int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1) if len(rows) else None


@dataclasses.dataclass(frozen=True)
class Detection:
    """An object in an image."""

    label: str
    score: float
    box: Box


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """A part of an image.

    Attributes:
        label: Of the part.
        score: Of its label; None where the model labels pixels, which have no score.
        mask: bool[height, width], of the caller's image.
    """

    label: str
    score: float | None
    mask: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class DepthMap:
    """Depths of the pixels of an image.

    Attributes:
        values: float32[height, width], in the unit of the model.
        picture: The same as a grey PIL image, the largest value white.
    """

    values: np.ndarray
    picture: Any


@dataclasses.dataclass(frozen=True, eq=False)
class PromptedMask:
    """A mask of the object at a prompt.

    Attributes:
        mask: bool[height, width], of the caller's image.
        score: The model's estimate of the overlap with the object.
    """

    mask: np.ndarray
    score: float


@dataclasses.dataclass(frozen=True, eq=False)
class Speech:
    """A spoken text.

    Attributes:
        samples: float32[num_samples], from -1 to 1.
        sampling_rate: Samples per second (Hz).
    """

    samples: np.ndarray
    sampling_rate: int


@dataclasses.dataclass(frozen=True)
class MarkedAnswer:
    """A part of a text that answers a question.

    Attributes:
        text: The part.
        score: Probability of its first token times that of its last, among those of the text.
        start: Its first character in the text.
        end: The character behind its last.
    """

    text: str
    score: float
    start: int
    end: int


@dataclasses.dataclass(frozen=True, eq=False)
class Forecast:
    """Values that come behind a series.

    Attributes:
        mean: float32[horizon]; of TimesFM 2.5 the median.
        quantiles: float32[horizon, levels].
        levels: Of the quantiles, such as 0.1 for the value that a tenth lies below.
    """

    mean: np.ndarray
    quantiles: np.ndarray
    levels: tuple[float, ...]
