"""Ids of requests and tokens."""

from __future__ import annotations

RequestId = int | str
"""Name of a request: unique among those that have not ended."""

MAX_TOKEN_ID = 2**31 - 1
"""Largest token id: ids are int32 on the device."""
