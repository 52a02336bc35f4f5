"""Models of a server by name: loaded by requests, unloaded when others need their memory."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from model_adapters.errors import TorchaxServeError
from torchax_serve.server.errors import ApiError
from torchax_serve.server.options import ServerOptions

if TYPE_CHECKING:
    from torchax_serve.entrypoints.served_model import ServedModel
    from torchax_serve.server.model_service import ModelService

logger = logging.getLogger("torchax_serve.server")


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A model that a server can load.

    Attributes:
        names: Names that requests may use, the first of which answers show; empty: the name it is loaded by.
        load: Loads the model; called in a thread.
        source: What it is loaded by: a short name, a hub id or a folder.
        file_bytes: Bytes of its weights' files: what it takes before it has been loaded once.
        adapters: Folders of the adapters that requests can name, by name, as they are changed while it is served.
    """

    names: tuple[str, ...]
    load: Callable[[], ServedModel]
    source: str = ""
    file_bytes: int = 0
    adapters: dict[str, str] = dataclasses.field(default_factory=dict, compare=False)


class PooledModel:
    """A model of a `ModelPool`, loaded or not.

    Attributes:
        spec: How it is loaded.
        service: The loaded model; None while it is not.
        num_users: Requests that use it.
        is_leaving: Whether it takes no more requests, as others wait for its memory; it stays if another goes first.
        is_closing: Whether it is being unloaded.
        num_bytes: Bytes that it takes, or took when it was loaded last.
        used_s: When a request began or ended to use it last, monotonic.
        load_s: Seconds that its last load took.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.service: ModelService | None = None
        self.num_users = 0
        self.is_leaving = self.is_loading = self.is_closing = False
        self.num_bytes, self.used_s, self.load_s = spec.file_bytes, 0.0, 0.0
        self._waiters: deque[asyncio.Future[ModelService]] = deque()

    @property
    def name(self) -> str:
        """The name that answers show."""
        return self.spec.names[0]

    @property
    def status(self) -> str:
        """``loaded``, ``loading`` or ``unloaded``."""
        if self.service is not None:
            return "loaded"
        return "loading" if self.is_loading else "unloaded"

    @property
    def is_open(self) -> bool:
        """Whether it is loaded, and takes requests."""
        return self.service is not None and not (self.is_leaving or self.is_closing)

    @property
    def is_wanted(self) -> bool:
        """Whether requests wait for it."""
        return any(not each.done() for each in self._waiters)

    def join(self) -> asyncio.Future[ModelService]:
        """Returns the model once it is loaded, with the caller as its user, or why it cannot be."""
        waiter: asyncio.Future[ModelService] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def hand_out(self, service: ModelService) -> None:
        """Gives the loaded model to all requests that wait."""
        self.service = service
        for waiter in self._taken_waiters():
            self.num_users += 1
            waiter.set_result(service)

    def fail(self, error: ApiError) -> None:
        """Ends all requests that wait with an error."""
        for waiter in self._taken_waiters():
            waiter.set_exception(error)

    def _taken_waiters(self) -> list[asyncio.Future[ModelService]]:
        found = [each for each in self._waiters if not each.done()]
        self._waiters.clear()
        return found


class ModelPool:
    """Models by name, of which some are loaded. All calls come from the event loop's thread.

    Requests that name a model which is not loaded wait for it. Models are loaded one after the other, in the order in
    which they were asked for. The one that was used longest ago leaves for the next: it takes no new requests, which
    wait in turn, and is unloaded when those that it has have ended. So no request is cut off, and none waits for ever.

    Args:
        specs: The models.
        limits: Models and bytes that may be loaded at once, and the time after which an idle one is unloaded.
        open_model: Loads a model and makes it ready; called in a thread.
    """

    def __init__(
        self, specs: Sequence[ModelSpec], limits: ServerOptions, open_model: Callable[[ModelSpec], ModelService]
    ) -> None:
        self.models = [PooledModel(spec) for spec in specs]
        self.changing_adapters = asyncio.Lock()  # held while an adapter is loaded or unloaded
        self._limits, self._open = limits, open_model
        self._wanted: deque[PooledModel] = deque()
        self._changed = asyncio.Event()  # a request has ended
        self._loads: asyncio.Task[None] | None = None
        self._unloading = asyncio.Lock()
        self._lock = threading.Lock()
        self._is_closed = False
        self._untaken: ModelService | None = None  # loaded by the thread, and not yet given to requests

    def find(self, name: str) -> PooledModel | None:
        """Returns the model that a request names, itself or by an adapter; None if there is none."""
        return next((each for each in self.models if name in each.spec.names or name in each.spec.adapters), None)

    async def take(self, model: PooledModel) -> ModelService:
        """Returns a model, loaded, and counts the caller as its user until `release`.

        Raises:
            ApiError: It cannot be loaded.
        """
        if model.service is not None and model.is_open:
            model.num_users += 1
            model.used_s = time.monotonic()
            return model.service
        self._want(model)
        waiter = model.join()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(model)  # it was handed out in the moment in which its client went
            raise

    def release(self, model: PooledModel) -> None:
        """Ends a use that `take` has begun."""
        model.num_users -= 1
        model.used_s = time.monotonic()
        self._changed.set()

    async def unload(self, model: PooledModel) -> None:
        """Unloads a model that no request uses.

        Raises:
            ApiError: 409 if one does.
        """
        if model.num_users or not await self._unload(model):
            raise ApiError(
                409, f"expected a model without requests, {model.name} has {model.num_users}; ask again later"
            )

    async def unload_idle(self) -> None:
        """Unloads the models that nobody has used for the time that the options allow."""
        limit_s, now = self._limits.model_idle_timeout_s, time.monotonic()
        for model in self.models:
            is_idle = model.is_open and not model.num_users
            if limit_s is not None and is_idle and now - model.used_s >= limit_s:
                logger.info("%s was idle for %.0f s", model.name, now - model.used_s)
                await self._unload(model)

    async def close(self) -> None:
        """Ends loading, and unloads all models."""
        with self._lock:
            self._is_closed, untaken = True, self._untaken
        if self._loads is not None:
            self._loads.cancel()
        if untaken is not None:
            await asyncio.to_thread(_close, untaken)
        for model in self.models:
            model.fail(_server_ends())
            if model.service is not None:
                await self._unload(model)

    def _want(self, model: PooledModel) -> None:
        if model not in self._wanted:
            self._wanted.append(model)
        if self._loads is None or self._loads.done():
            self._loads = asyncio.create_task(self._load_wanted())

    async def _load_wanted(self) -> None:
        """Loads the models that requests wait for, until none is left."""
        await asyncio.sleep(0)  # the request that has started this waits from now on
        while self._wanted:
            model = self._wanted[0]
            if model.is_wanted:
                try:
                    await self._load(model)
                except Exception as error:  # of loading, which may be anything; the next request tries again
                    model.fail(_load_error(model, error))
            # Taken off only now: a request that came meanwhile has been handed the model, or waits again.
            self._wanted.popleft()
            if model.is_wanted:
                self._want(model)

    async def _load(self, model: PooledModel) -> None:
        async with self._unloading:
            pass  # a model that is being unloaded is loaded again
        if model.service is None:
            await self._make_room(model)
            began = time.monotonic()
            model.is_loading = True
            try:
                service = await asyncio.to_thread(self._opened, model.spec)
            finally:
                model.is_loading = False
            self._untaken = None
            model.service, model.num_bytes = service, service.num_bytes
            model.load_s, model.used_s = time.monotonic() - began, time.monotonic()
            logger.info("%s was loaded in %.1f s", model.name, model.load_s)
            if (limit := self._limits.model_memory_bytes) is not None and model.num_bytes > limit:
                await self._unload(model)
                raise _too_large(model, limit)
            await self._unload_beyond(model)
        model.hand_out(model.service)

    def _opened(self, spec: ModelSpec) -> ModelService:
        """Loads a model, in a thread; closes it at once if the server has ended meanwhile."""
        service = self._open(spec)
        with self._lock:
            if not self._is_closed:
                self._untaken = service
                return service
        _close(service)
        raise _server_ends()

    async def _make_room(self, wanted: PooledModel) -> None:
        """Unloads models until `wanted` fits beside the others, those used longest ago first."""
        if (limit := self._limits.model_memory_bytes) is not None and wanted.num_bytes > limit:
            raise _too_large(wanted, limit)
        while not self._fits(wanted):
            await self._unload_one()

    async def _unload_beyond(self, newest: PooledModel) -> None:
        """Unloads idle models while all take more than the limit, once the newest is known."""
        idle = [each for each in self.models if each.is_open and each is not newest and not each.num_users]
        for each in sorted(idle, key=lambda each: each.used_s):
            if self._limits.model_memory_bytes is not None and self._num_bytes() > self._limits.model_memory_bytes:
                await self._unload(each)

    def _num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.models if each.service is not None)

    async def _unload_one(self) -> None:
        """Waits until a loaded model has no requests, and unloads it."""
        while True:
            async with self._unloading:
                pass  # what is being unloaded makes room as well
            loaded = sorted((each for each in self.models if each.service is not None), key=lambda each: each.used_s)
            if not loaded:
                break
            if (idle := next((each for each in loaded if not each.num_users), None)) is not None:
                await self._unload(idle)
                break
            # No idle one: the one used longest ago takes no more requests, and the first that has none left goes.
            loaded[0].is_leaving = True
            self._changed.clear()
            await self._changed.wait()
        for each in self.models:
            if each.is_leaving:
                each.is_leaving = False
                if each.service is not None:  # another one went: requests that wait for this one have it again
                    each.hand_out(each.service)

    def _fits(self, wanted: PooledModel) -> bool:
        most, limit = self._limits.max_loaded_models, self._limits.model_memory_bytes
        num_loaded = sum(each.service is not None for each in self.models)
        has_place = most is None or num_loaded < most
        return has_place and (limit is None or wanted.num_bytes + self._num_bytes() <= limit)

    async def _unload(self, model: PooledModel) -> bool:
        """Closes a model in a thread, while requests for it wait; False if one uses it meanwhile."""
        async with self._unloading:
            if model.num_users:
                return False
            if (service := model.service) is not None:
                model.is_closing = True
                try:
                    await asyncio.to_thread(_close, service)
                except Exception:
                    logger.exception("%s did not end in order", model.name)
                model.service, model.is_closing = None, False
                logger.info("%s was unloaded", model.name)
        self._changed.set()
        return True


def _close(service: ModelService) -> None:
    """Closes a model and gives its memory back."""
    import gc

    from model_adapters.loading.memory import give_back_freed

    service.close()
    gc.collect()
    give_back_freed()


def _load_error(model: PooledModel, error: Exception) -> ApiError:
    """Returns the answer to requests for a model that cannot be loaded."""
    if isinstance(error, ApiError):
        return error
    logger.error("%s cannot be loaded: %s", model.name, error)
    text = str(error) if isinstance(error, TorchaxServeError) else type(error).__name__
    if model.spec.source:
        # Clients may not know paths of this machine.
        text = text.replace(model.spec.source, "its folder" if "/" in model.spec.source else model.name)
    return ApiError(503, f"the model {model.name} cannot be loaded: {text}", code="model_load_failed")


def _server_ends() -> ApiError:
    return ApiError(503, "the server ends; send the request to another one")


def _too_large(model: PooledModel, limit: int) -> ApiError:
    message = f"the model {model.name} cannot be loaded: it takes {model.num_bytes / 1e9:.1f} GB, and models may take "
    return ApiError(503, f"{message}{limit / 1e9:.1f} GB together (--model-memory)", code="model_load_failed")
