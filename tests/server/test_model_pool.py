"""Several models: which are loaded when, and that no request loses its own."""

import asyncio
import dataclasses
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_adapters.errors import CheckpointError
from torchax_serve.server.errors import ApiError
from torchax_serve.server.model_pool import ModelPool, ModelSpec

NAMES = ("a", "b", "c", "d")


@dataclasses.dataclass
class Limits:
    max_loaded_models: int | None = None
    model_memory_bytes: int | None = None
    model_idle_timeout_s: float | None = None


class Service:
    """A loaded model that knows who uses it."""

    def __init__(self, name, num_bytes):
        self.name, self.num_bytes = name, num_bytes
        self.num_users, self.is_closed = 0, False

    def close(self):
        assert not self.num_users, f"{self.name} was closed with requests"
        self.is_closed = True


class Pool:
    """A pool of models that do nothing, and checks of what is loaded."""

    def __init__(self, limits, sizes=(1, 1, 1, 1), fails=()):
        self.limits, self.sizes, self.fails = limits, dict(zip(NAMES, sizes, strict=True)), set(fails)
        self.opened, self.most, self.lock = [], 0, threading.Lock()
        specs = [
            ModelSpec((name, f"{name}-alias"), lambda: None, "/secret/folder", size)
            for name, size in self.sizes.items()
        ]
        self.pool = ModelPool(specs, limits, self.open)

    def open(self, spec):
        name = spec.names[0]
        if name in self.fails:
            self.fails.discard(name)
            raise CheckpointError("/secret/folder: expected weights, found none")
        with self.lock:
            self.opened.append(Service(name, self.sizes[name]))
            self.check()
        return self.opened[-1]

    def check(self):
        live = [service for service in self.opened if not service.is_closed]
        assert self.limits.max_loaded_models is None or len(live) <= self.limits.max_loaded_models
        total = sum(service.num_bytes for service in live)
        assert self.limits.model_memory_bytes is None or total <= self.limits.model_memory_bytes
        assert len({service.name for service in live}) == len(live)

    async def ask(self, name, waits=1):
        model = self.pool.find(name)
        service = await self.pool.take(model)
        try:
            assert service.name == model.name and not service.is_closed
            service.num_users += 1
            for _ in range(waits):
                await asyncio.sleep(0)
                assert not service.is_closed
            return service
        finally:
            service.num_users -= 1
            self.pool.release(model)


requests = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 4), st.integers(0, 6), st.booleans()), min_size=1, max_size=40
)


@settings(max_examples=60, deadline=None)
@given(requests, st.sampled_from([Limits(1), Limits(2), Limits(None, 4), Limits(3, 5), Limits(2, None, 0.0)]))
def test_every_request_has_its_model_and_none_is_closed_under_it(asked, limits):
    async def run():
        made = Pool(limits, sizes=(1, 2, 3, 4))
        tasks = []
        for name, pause, waits, goes in asked:
            tasks.append(task := asyncio.create_task(made.ask(name, waits)))
            for _ in range(pause):
                await asyncio.sleep(0)
            if goes:
                task.cancel()
            if pause == 3:
                await made.pool.unload_idle()
        found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert all(isinstance(each, Service | asyncio.CancelledError) for each in found), found
        assert all(model.num_users == 0 for model in made.pool.models)
        await made.pool.close()
        return made

    assert all(service.is_closed for service in asyncio.run(run()).opened)  # also one that a thread has still loaded


def test_the_model_used_longest_ago_makes_room():
    async def run():
        made = Pool(Limits(2))
        for name in ("a", "b", "a", "c"):
            await made.ask(name)
        assert [each.name for each in made.pool.models if each.service] == ["a", "c"]
        assert [service.name for service in made.opened] == ["a", "b", "c"]

    asyncio.run(run())


def test_a_model_with_requests_all_the_time_does_not_keep_another_one_out():
    async def run():
        made = Pool(Limits(1))
        stop = False

        async def keep_asking():
            while not stop:
                await made.ask("a", 20)

        busy = [asyncio.create_task(keep_asking()) for _ in range(3)]
        for _ in range(50):
            await asyncio.sleep(0)
        await asyncio.wait_for(made.ask("b"), 30)
        stop = True
        await asyncio.wait_for(asyncio.gather(*busy), 30)

    asyncio.run(run())


def test_a_client_that_goes_as_its_model_is_handed_out_makes_room():
    async def run():
        made = Pool(Limits(1))
        await made.ask("a")
        gone = made.pool.find("b")
        asked = asyncio.create_task(made.pool.take(gone))
        other = asyncio.create_task(made.ask("c"))
        while not gone.num_users:  # until it is handed out, while the client has not run yet and c waits for room
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait_for(other, 30)
        assert asked.cancelled() and gone.num_users == 0

    asyncio.run(run())


def test_requests_that_come_together_load_a_model_once():
    async def run():
        made = Pool(Limits())
        found = await asyncio.gather(*(made.ask("a") for _ in range(20)), *(made.ask("a-alias") for _ in range(20)))
        assert len({id(each) for each in found}) == len(made.opened) == 1

    asyncio.run(run())


def test_a_model_that_cannot_be_loaded_is_an_error_for_those_who_asked_and_is_tried_again():
    async def run():
        made = Pool(Limits(1), fails="b")
        asked = [asyncio.create_task(made.ask(name)) for name in ("a", "b", "b")]
        first, *others = await asyncio.gather(*asked, return_exceptions=True)
        assert first.name == "a"
        for error in others:
            assert isinstance(error, ApiError) and error.status == 503
            assert "the model b cannot be loaded: its folder: expected weights" in error.message
            assert "secret" not in error.message
        assert (await made.ask("b")).name == "b"

    asyncio.run(run())


def test_a_model_that_is_larger_than_the_limit_is_told_and_others_stay():
    async def run():
        made = Pool(Limits(None, 10), sizes=(3, 20, 3, 3))
        await made.ask("a")
        with pytest.raises(ApiError, match="--model-memory"):
            await made.ask("b")
        assert made.pool.find("a").service is not None

    asyncio.run(run())


def test_a_model_with_requests_is_not_unloaded_and_the_last_one_is():
    async def run():
        made = Pool(Limits())
        model = made.pool.find("a")
        await made.pool.take(model)
        with pytest.raises(ApiError, match="without requests, a has 1"):
            await made.pool.unload(model)
        made.pool.release(model)
        await made.pool.unload(model)
        await made.pool.unload(model)
        assert model.status == "unloaded"
        assert (await made.ask("a")).name == "a"

    asyncio.run(run())


def test_idle_models_go_after_their_time():
    async def run():
        made = Pool(Limits(None, None, 0.05))
        await made.ask("a")
        held = await made.pool.take(made.pool.find("b"))
        await made.pool.unload_idle()
        assert made.pool.find("a").service is not None
        await asyncio.sleep(0.06)
        await made.pool.unload_idle()
        assert made.pool.find("a").service is None
        assert made.pool.find("b").service is held

    asyncio.run(run())


def test_waiting_requests_end_with_the_server():
    async def run():
        opening = threading.Event()

        class Slow(Pool):
            def open(self, spec):
                opening.wait(30)
                return super().open(spec)

        made = Slow(Limits())
        asked = asyncio.create_task(made.ask("a"))
        await asyncio.sleep(0.01)
        await made.pool.close()
        opening.set()
        with pytest.raises(ApiError, match="the server ends"):
            await asked

    random.seed(0)
    asyncio.run(run())
