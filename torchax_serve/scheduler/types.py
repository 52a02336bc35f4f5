"""Ids of requests and tokens."""

from __future__ import annotations

RequestId = int | str
"""Name of a request: unique among those that have not ended."""

MAX_TOKEN_ID = 2**31 - 1
"""Largest token id: ids are int32 on the device."""

MAX_PAGE_ID = 2**63 - 1
"""Largest id of an image's feature, by which cached pages are found: no token has one above `MAX_TOKEN_ID`."""
