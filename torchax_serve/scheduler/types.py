"""A request to the scheduler: what was asked (`Request`), and how far it has come (`RequestState`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    pass


RequestId = int | str


FinishReason = Literal["stop", "length", "abort", "deadline", "error"]


MAX_TOKEN_ID = 2**31 - 1
