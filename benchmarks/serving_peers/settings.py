"""How a serving system is laid out, the same for all of them."""

from __future__ import annotations

import dataclasses
import json
import sys


@dataclasses.dataclass(frozen=True)
class SystemSettings:
    """What every system is told.

    Attributes:
        folder: the checkpoint, in the dtype it is served in.
        kv_cache_bytes: of keys and values.
        kv_token_bytes: of one token's keys and values in all layers, for systems that count otherwise than in bytes.
        max_len: prompt and answer of one request, in tokens.
        options: of this system alone; each reads those it knows and refuses others.
    """

    folder: str
    kv_cache_bytes: int
    kv_token_bytes: int
    max_len: int
    options: dict[str, object] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def settings_of_process(*known: str) -> SystemSettings:
    """From the command line of a system's process.

    Raises:
        SystemExit: an option that is not among the `known`.
    """
    settings = SystemSettings(**json.loads(sys.argv[1]))
    if unknown := settings.options.keys() - set(known):
        sys.exit(f"expected options among {sorted(known)}, got {sorted(unknown)}; leave them out")
    return settings
