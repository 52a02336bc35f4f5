"""Events of the prefix cache: read by a ZeroMQ subscriber with vLLM's definitions, they say what a prompt will find."""

import queue
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from engine_models import VOCAB_SIZE, tiny_model
from ports import free_port

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve import EngineOptions, SamplingParams, serve
from torchax_serve.engine.adapters import Adapters
from torchax_serve.engine.kv_events import KVEventPublisher, KVEventsConfig, endpoint_of
from torchax_serve.scheduler import CacheGroup, ClearedBlocks, RemovedBlocks, StoredBlocks
from torchax_serve.validation import extras

PAGE = 8
LAYOUT = {"max_model_len": 64, "max_num_seqs": 2, "page_size": PAGE, "max_num_batched_tokens": 32}
PARAMS = SamplingParams(max_new_tokens=2, temperature=0.0)
PROMPTS = [[int(t) for t in np.random.default_rng(seed).integers(3, VOCAB_SIZE, 41)] for seed in range(5)]
GROUPS = (CacheGroup("full", None, 8), CacheGroup("window", 16, 8))


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """The definitions of vLLM 0.23 and later, `vllm/distributed/kv_events.py`; those of batches have no names."""


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Router:
    """What a gateway keeps of one server: its blocks by the tokens up to their end."""

    def __init__(self, config):
        self._context = zmq.Context()
        self._subscribed = self._context.socket(zmq.SUB)
        self._subscribed.subscribe(config.get("topic", ""))
        self._subscribed.connect(config["endpoint"].replace("*", "127.0.0.1"))
        self._missed = self._context.socket(zmq.DEALER)  # one question has many answers
        self._missed.connect(config["replay_endpoint"])
        self.batches = {}
        self.prefixes = {}  # tokens up to the end of a block, by its hash
        self.mediums = {}  # where it is, by its hash
        self.num_cleared = 0

    def close(self):
        self._context.destroy(linger=0)

    def receive(self, timeout_s=10.0):
        """Takes one batch."""
        assert self._subscribed.poll(1000 * timeout_s), "no batch has come"
        topic, number, payload = self._subscribed.recv_multipart()
        self._apply(int.from_bytes(number, "big"), payload)
        return topic

    def replay(self, first=0):
        """Asks for all batches from a number on, and returns their numbers."""
        self._missed.send_multipart((b"", first.to_bytes(8, "big")))
        asked, socket = [], self._missed
        while True:
            assert socket.poll(10_000), "no answer has come"
            _, number, payload = socket.recv_multipart()
            if number == b"\xff" * 8:
                assert payload == b""
                return asked
            asked.append(int.from_bytes(number, "big"))
            self._apply(asked[-1], payload)

    def follow(self, num_batches):
        """Takes batches until there are as many; those that it did not subscribe to in time are asked for."""
        until = time.monotonic() + 10
        while len(self.batches) < num_batches and time.monotonic() < until:
            self.replay(len(self.batches))
        assert sorted(self.batches) == list(range(num_batches))

    def _apply(self, number, payload):
        if number in self.batches:
            return
        batch = self.batches[number] = msgspec.msgpack.decode(payload, type=KVEventBatch)
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.num_cleared += 1
                self.prefixes, self.mediums = {}, {}
            elif isinstance(event, BlockStored):
                self._store(event)
            else:
                for each in event.block_hashes:
                    self.mediums[each].remove(event.medium)

    def _store(self, event):
        size, before = (
            event.block_size,
            () if event.parent_block_hash is None else self.prefixes[event.parent_block_hash],
        )
        assert len(event.token_ids) == size * len(event.block_hashes) == size * len(event.extra_keys)
        for index, each in enumerate(event.block_hashes):
            before += tuple(event.token_ids[index * size : (index + 1) * size])
            assert self.prefixes.setdefault(each, before) == before
            assert event.medium not in self.mediums.setdefault(each, [])
            self.mediums[each].append(event.medium)

    def found(self, prompt):
        """Tokens of a prompt that the server has, by what it has told."""
        known = {prefix for each, prefix in self.prefixes.items() if self.mediums[each]}
        num = 0
        while num + PAGE < len(prompt) and tuple(prompt[: num + PAGE]) in known:
            num += PAGE
        return num


def num_batches(served):
    """Batches so far, those of steps whose tokens have been read among them."""
    return served.engine.call(lambda scheduler, runner: served.engine.stats().num_event_batches)


@pytest.fixture
def config(tmp_path):
    where = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/missed", "topic": "kv@tiny"}
    return {"enable_kv_cache_events": True, **where}


@pytest.fixture
def router(config):
    made = Router(config)
    yield made
    made.close()


def test_a_subscriber_knows_what_each_prompt_will_find(config, router):
    engine = EngineOptions(
        **LAYOUT, kv_cache_memory_bytes=14 * 2048, kv_offloading_bytes=1 << 14, kv_events_config=config
    )
    model = tiny_model("llama")
    with serve(model, engine=engine) as served:
        seen = set()
        for turn in [0, 1, 0, 2, 3, 4, 3, 0, 1, 2, 4, 4]:
            prompt = PROMPTS[turn][: 41 - turn]
            router.follow(num_batches(served))
            expected = router.found(prompt)
            before = served.engine.stats().scheduler.num_hit_tokens
            served.generate_batch([prompt], [PARAMS])
            assert served.engine.stats().scheduler.num_hit_tokens - before == expected, turn
            seen.add(expected)
        assert len(seen) > 1  # some were found, some were not
        router.follow(num_batches(served))
        events = [event for batch in router.batches.values() for event in batch.events]
        assert {event.medium for event in events if isinstance(event, BlockRemoved)} == {"GPU", "CPU"}
        assert {batch.data_parallel_rank for batch in router.batches.values()} == {0}
        assert router.receive() == b"kv@tiny"
        served.set_weights({name: tensor * 0.9 for name, tensor in model.state_dict().items()})
        served.generate_batch([PROMPTS[0]], [PARAMS])
        router.follow(num_batches(served))
        assert router.num_cleared == 1 and router.found(PROMPTS[0]) == 40
        assert router.replay(3) == list(range(3, len(router.batches)))
        assert served.engine.stats().num_dropped_batches == 0


def test_hashes_are_equal_in_two_servers(config, tmp_path):
    hashes = []
    for name in ("one", "two"):
        own = {**config, "endpoint": f"ipc://{tmp_path}/{name}", "replay_endpoint": f"ipc://{tmp_path}/{name}-missed"}
        with serve(tiny_model("llama"), engine=EngineOptions(**LAYOUT, kv_events_config=own)) as served:
            router = Router(own)
            served.generate_batch([PROMPTS[0]], [PARAMS])
            router.follow(num_batches(served))
            hashes.append(router.prefixes)
            router.close()
    assert hashes[0] == hashes[1] and len(hashes[0]) == 5


def published(config, router, *events):
    publisher = KVEventPublisher(KVEventsConfig.parse(config), GROUPS, 2)
    publisher.publish(list(events))
    router.follow(1)
    publisher.close()
    return router.batches[0].events


def test_windows_adapters_and_salts_have_vllms_fields(config, router):
    adapters = Adapters(2)
    adapters.add("first", "/one", 0)
    adapters.add("tuned", "/two", 1)
    salt = adapters.use("tuned").salt + "tenant"
    first, second, removed, cleared = published(
        config,
        router,
        StoredBlocks(0, "GPU", [11, 12], None, [1, 2, 3, 4], salt),
        StoredBlocks(1, "CPU", [13], 12, [5, 6], ""),
        RemovedBlocks(1, "CPU", [13]),
        ClearedBlocks(),
    )
    assert (first.lora_id, first.lora_name) == (2, "tuned")
    assert first.extra_keys == [("tuned", "tenant"), ("tuned",)]
    assert (first.group_idx, first.kv_cache_spec_kind, first.kv_cache_spec_sliding_window) == (
        0,
        "full_attention",
        None,
    )
    assert (second.group_idx, second.kv_cache_spec_kind, second.kv_cache_spec_sliding_window) == (
        1,
        "sliding_window",
        16,
    )
    assert (second.lora_id, second.lora_name, second.parent_block_hash) == (None, None, 12)
    assert second.extra_keys == [None]
    assert removed == BlockRemoved([13], "CPU", 1) and isinstance(cleared, AllBlocksCleared)


def test_a_full_queue_drops_batches_and_never_waits(config, router, monkeypatch):
    publisher = KVEventPublisher(KVEventsConfig.parse({**config, "max_queue_size": 4}), GROUPS, 2)
    taken = publisher._queue.get
    monkeypatch.setattr(publisher._queue, "get", lambda timeout: (time.sleep(timeout), taken(timeout=0))[1])
    began = time.monotonic()
    for number in range(5000):
        publisher.publish([StoredBlocks(0, "GPU", [number], None, [1, 2], "")])
    assert time.monotonic() - began < 1
    assert publisher.num_batches == 5000 and 4900 < publisher.num_dropped < 5000
    monkeypatch.undo()
    until = time.monotonic() + 5
    while publisher._queue.qsize() and time.monotonic() < until:
        time.sleep(0.01)
    publisher.publish([ClearedBlocks()])
    until = time.monotonic() + 5
    while 5000 not in router.batches and time.monotonic() < until:
        router.replay()
    assert len(router.batches) == 5001 - publisher.num_dropped  # their numbers show what is missing
    publisher.close()
    with pytest.raises(queue.Empty):
        publisher._queue.get_nowait()


def test_a_subscriber_that_does_not_read_holds_nobody_up(config, router):
    publisher = KVEventPublisher(KVEventsConfig.parse({**config, "hwm": 2, "buffer_steps": 3}), GROUPS, 4096)
    many = list(range(4096))
    for number in range(200):
        publisher.publish([StoredBlocks(0, "GPU", [number], None, many, "")])
    until = time.monotonic() + 10
    while publisher._queue.qsize() and time.monotonic() < until:
        time.sleep(0.01)
    assert publisher.num_dropped == 0
    assert router.replay()[-3:] == [197, 198, 199]  # the last that are kept
    publisher.close()


def test_a_request_that_is_none_is_dropped(config, router, caplog):
    publisher = KVEventPublisher(KVEventsConfig.parse(config), GROUPS, 2)
    with zmq.Context() as context, context.socket(zmq.REQ) as other:
        other.linger = 0
        other.connect(config["replay_endpoint"])
        other.send(b"all")
        assert not other.poll(500)
    assert "8 bytes" in caplog.text
    publisher.publish([ClearedBlocks()])
    router.follow(1)
    publisher.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events: expected true or false, got 'yes'"),
        ({"publisher": "kafka"}, "publisher: expected zmq or null, got 'kafka'"),
        ({"endpoint": "http://here"}, "endpoint: expected tcp://HOST:PORT or ipc://PATH, got 'http://here'"),
        ({"endpoint": None}, "endpoint: expected tcp://HOST:PORT or ipc://PATH, got None"),
        ({"replay_endpoint": "tcp://*"}, r"replay_endpoint: expected tcp://HOST:PORT, got 'tcp://\*'"),
        ({"hwm": 0}, "hwm: expected a whole number >= 1, got 0"),
        ({"topic": 3}, "topic: expected a text, got 3"),
        ({"port": 1}, "expected keys of enable_kv_cache_events, .*, got 'port'"),
        ("tcp://*:5557", "expected a mapping such as"),
    ],
)
def test_what_is_no_config_is_named(fields, message):
    with pytest.raises(InvalidArgumentError, match=f"^kv_events_config: {message}"):
        EngineOptions(kv_events_config=fields)


def test_what_cannot_be_is_refused(monkeypatch):
    on = {"enable_kv_cache_events": True}
    with pytest.raises(InvalidArgumentError, match="kv_events_config: expected None with enable_prefix_caching=False"):
        EngineOptions(kv_events_config=on, enable_prefix_caching=False)
    assert EngineOptions(kv_events_config={**on, "publisher": "null"}, enable_prefix_caching=False).kv_events is None
    assert EngineOptions(kv_events_config={}).kv_events is None
    port = free_port()
    taken = KVEventsConfig(**on, endpoint=f"tcp://*:{port}")
    publisher = KVEventPublisher(taken, GROUPS, 2)
    with pytest.raises(
        InvalidArgumentError, match=rf"endpoint: expected an address that is free, got 'tcp://\*:{port}'"
    ):
        KVEventPublisher(taken, GROUPS, 2)
    publisher.close()
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedArgumentError, match=r"expected the package pyzmq, .*torchax-serve\[events\]"):
        KVEventPublisher(taken, GROUPS, 2)


def test_each_replica_has_an_address_of_its_own():
    assert endpoint_of("tcp://*:5557", 0) == "tcp://*:5557" and endpoint_of("tcp://*:5557", 2) == "tcp://*:5559"
    assert endpoint_of("ipc:///run/events", 1) == "ipc:///run/events_dp1"
