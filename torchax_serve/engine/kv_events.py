"""Publishes events of the prefix cache over ZeroMQ, in vLLM's wire format.

Gateways route requests by them.

A message has three frames: the topic, the batch's number in 8 bytes, and the batch in MessagePack: time, events and
rank of the replica, as `vllm.distributed.kv_events.KVEventBatch` of vLLM 0.23 and later. An event is a map with the
names of vLLM's fields. A batch that was missed can be asked for again at the second socket.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from model_adapters.errors import InvalidArgumentError
from torchax_serve.engine.adapters import adapter_in_salt, salt_without_adapter
from torchax_serve.scheduler.block_events import BlockEvent, ClearedBlocks, RemovedBlocks, StoredBlocks
from torchax_serve.scheduler.config import CacheGroup
from torchax_serve.validation.extras import require_package

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger("torchax_serve")

NAME = "kv_events_config"
EXAMPLE = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'
CLOSE_S = 1.0
"""Seconds that batches have to leave before the sockets are closed."""
POLL_S = 0.1
"""Seconds between looks at the socket for batches that were missed."""
END_NUMBER = (-1).to_bytes(8, "big", signed=True)
"""Number that ends the answer to a request for missed batches."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """Which events of the prefix cache are published, and where: vLLM's `KVEventsConfig`.

    Attributes:
        enable_kv_cache_events: Whether there are events at all.
        publisher: "zmq", or "null" for none; None: "zmq" if there are events.
        endpoint: ZeroMQ address of the publishing socket. One with ``*`` or ``::``, and those of ``ipc``, are bound,
            others connected to. Each further replica of the process has the next port.
        replay_endpoint: Address to bind the socket for missed batches to; None: they cannot be asked for.
        buffer_steps: Last batches that are kept for it.
        hwm: Batches that wait for a slow subscriber; further ones are dropped for it.
        max_queue_size: Batches that wait to be published; further ones are dropped and counted.
        topic: First frame of each message, which subscribers filter by.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.enable_kv_cache_events, bool):
            raise _invalid("enable_kv_cache_events", "true or false", self.enable_kv_cache_events)
        if self.publisher not in (None, "zmq", "null"):
            raise _invalid("publisher", "zmq or null", self.publisher)
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            is_none = value is None and name == "replay_endpoint"
            if not is_none and not (isinstance(value, str) and value.partition("://")[0] in ("tcp", "ipc")):
                raise _invalid(name, "tcp://HOST:PORT or ipc://PATH", value)
            if isinstance(value, str) and value.startswith("tcp") and not value.rpartition(":")[2].isdecimal():
                raise _invalid(name, "tcp://HOST:PORT", value)
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise _invalid(name, "a whole number >= 1", value)
        if not isinstance(self.topic, str):
            raise _invalid("topic", "a text", self.topic)

    @property
    def publishes(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @classmethod
    def parse(cls, value: Any) -> KVEventsConfig | None:
        """Returns the config for `value`, a config, a mapping with its fields, or None.

        Raises:
            InvalidArgumentError: a value is out of its range, or a key is unknown.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise InvalidArgumentError(f"{NAME}: expected a mapping such as {EXAMPLE}, got {value!r}")
        fields = [field.name for field in dataclasses.fields(cls)]
        if unknown := [key for key in value if key not in fields]:
            raise InvalidArgumentError(
                f"{NAME}: expected keys of {', '.join(fields)}, got {unknown[0]!r}; leave it out"
            )
        return cls(**value)


def _invalid(name: str, expected: str, got: Any) -> InvalidArgumentError:
    return InvalidArgumentError(f"{NAME}: {name}: expected {expected}, got {got!r}")


def endpoint_of(endpoint: str, rank: int) -> str:
    """Returns the address of a replica: the next ports, or names, belong to the further ones."""
    if not rank:
        return endpoint
    if endpoint.startswith("ipc"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


class KVEventPublisher:
    """Publishes the events of one engine, from a thread of its own.

    `publish` never waits: with `max_queue_size` batches in the queue one more is dropped, which the numbers of the
    others show, as they show what a slow subscriber has missed.

    Args:
        config: What is published, and where.
        groups: Groups of layers of the engine's cache.
        page_size: Tokens of a page.
        rank: Number of the replica in this process.

    Attributes:
        num_batches: Batches so far.
        num_dropped: Of these, those that were dropped.

    Raises:
        InvalidArgumentError: an address cannot be used.
        UnsupportedArgumentError: a package is missing.
    """

    def __init__(self, config: KVEventsConfig, groups: Sequence[CacheGroup], page_size: int, rank: int = 0) -> None:
        for module in ("zmq", "msgspec"):
            require_package(module, NAME, extra="events", package={"zmq": "pyzmq"}.get(module))
        import msgspec
        import zmq

        self.num_batches = self.num_dropped = 0
        self._groups, self._page_size, self._rank = groups, page_size, rank
        self._topic, self._encode = config.topic.encode(), msgspec.msgpack.Encoder().encode
        self._queue: queue.Queue[tuple[int, float, list[BlockEvent]] | None] = queue.Queue(config.max_queue_size)
        self._sent: collections.deque[tuple[int, bytes]] = collections.deque(maxlen=config.buffer_steps)
        self._numbers = itertools.count()
        self._is_closing = False
        self._context = zmq.Context()
        try:
            self._publishing = self._context.socket(zmq.PUB)
            self._publishing.set_hwm(config.hwm)
            own = endpoint_of(config.endpoint, rank)
            is_bound = "*" in own or "::" in own or own.startswith("ipc")
            _use(self._publishing, own, "endpoint", is_bound=is_bound)
            self._replaying: zmq.Socket[bytes] | None = None
            if config.replay_endpoint is not None:
                self._replaying = self._context.socket(zmq.ROUTER)
                _use(self._replaying, endpoint_of(config.replay_endpoint, rank), "replay_endpoint", is_bound=True)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        if is_bound and own.startswith("tcp") and not any(each in own for each in ("127.0.0.1", "[::1]", "localhost")):
            logger.warning("%s: whoever reaches %s reads the tokens of all prompts: it needs no key", NAME, own)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: list[BlockEvent]) -> None:
        """Sends a batch, or drops it if too many wait."""
        number = next(self._numbers)
        self.num_batches = number + 1
        try:
            self._queue.put_nowait((number, time.time(), events))
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Sends what waits, for a second at most, and closes the sockets."""
        self._is_closing = True
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)  # wakes the thread
        self._thread.join(2 * CLOSE_S)

    def _run(self) -> None:
        """Sends batches until it is closed, and answers requests for missed ones between them."""
        until = None
        while until is None or (time.monotonic() < until and not self._queue.empty()):
            if self._is_closing and until is None:
                until = time.monotonic() + CLOSE_S
            if self._replaying is not None and self._replaying.poll(0):
                self._replay(self._replaying)
            with contextlib.suppress(queue.Empty):
                entry = self._queue.get(timeout=POLL_S)
                if entry is not None:
                    self._send(*entry)
        self._context.destroy(linger=int(1000 * CLOSE_S))

    def _send(self, number: int, sent_s: float, events: list[BlockEvent]) -> None:
        batch = self._encode([sent_s, [self._wire_event(event) for event in events], self._rank])
        # A PUB socket never waits: what is too much for a subscriber, it does not get.
        self._publishing.send_multipart((self._topic, number.to_bytes(8, "big"), batch))
        self._sent.append((number, batch))

    def _wire_event(self, event: BlockEvent) -> dict[str, Any]:
        if isinstance(event, ClearedBlocks):
            return {"type": "AllBlocksCleared"}
        if isinstance(event, RemovedBlocks):
            removed = {"block_hashes": event.block_hashes, "medium": event.medium, "group_idx": event.group}
            return {"type": "BlockRemoved", **removed}
        adapter, window = adapter_in_salt(event.salt), self._groups[event.group].window
        stored = {
            "type": "BlockStored",
            "block_hashes": event.block_hashes,
            "parent_block_hash": event.parent_hash,
            "token_ids": event.token_ids,
            "block_size": self._page_size,
            "lora_id": None if adapter is None else adapter[0] + 1,
            "medium": event.medium,
            "lora_name": None if adapter is None else adapter[1],
            "extra_keys": _extra_keys(event, None if adapter is None else adapter[1]),
            "group_idx": event.group,
            "kv_cache_spec_kind": "full_attention" if window is None else "sliding_window",
        }
        return stored if window is None else {**stored, "kv_cache_spec_sliding_window": window}

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        """Answers a request by all batches from a number on, then `END_NUMBER`; drops another one."""
        import zmq

        frames = socket.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            logger.warning("%s: expected a request of 8 bytes, the number of a batch, got another", NAME)
            return
        first = int.from_bytes(frames[2], "big")
        answers = [(number.to_bytes(8, "big"), batch) for number, batch in self._sent if number >= first]
        with contextlib.suppress(zmq.Again):  # the rest is more than the asker takes; it misses the end and asks again
            for answer in [*answers, (END_NUMBER, b"")]:
                socket.send_multipart((frames[0], b"", *answer), flags=zmq.NOBLOCK)


def _extra_keys(event: StoredBlocks, adapter: str | None) -> list[list[str] | None]:
    """Returns what the hash of each block covers beside tokens, as vLLM does.

    That is the adapter and, of the first block of a prompt, the salt.
    """
    of_all = [] if adapter is None else [adapter]
    salt = salt_without_adapter(event.salt)
    keys = [of_all or None] * len(event.block_hashes)
    if event.parent_hash is None and salt:
        keys[0] = [*of_all, salt]
    return keys


def _use(socket: zmq.Socket[bytes], endpoint: str, name: str, *, is_bound: bool) -> None:
    """Binds or connects a socket; raises InvalidArgumentError where that fails."""
    import zmq

    try:
        (socket.bind if is_bound else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        message = f"{NAME}: {name}: expected an address that is free, got {endpoint!r} ({error.strerror})"
        raise InvalidArgumentError(f"{message}; choose another") from error
