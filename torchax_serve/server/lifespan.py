"""The life of a server: loading, warm-up, serving, draining, the end.

The watchdog of the engine is here as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.loading.progress import Progress, SilentProgress
from torchax_serve.compilation import gc_pause
from torchax_serve.kv_cache.memory import share_free_memory
from torchax_serve.server.adapter_routes import restore_adapters
from torchax_serve.server.app import Application
from torchax_serve.server.batch.worker import BatchWorker
from torchax_serve.server.context import ServerContext, Stage
from torchax_serve.server.listening import HttpListener
from torchax_serve.server.model_pool import ModelPool, ModelSpec
from torchax_serve.server.model_service import ModelService, drain_engines, progress_of
from torchax_serve.server.options import ServerOptions

if TYPE_CHECKING:
    from torchax_serve.entrypoints.served_model import ServedModel  # imports torch, which a recorded start needs not

logger = logging.getLogger("torchax_serve.server")

TICK_S = 0.5
"""Seconds between looks at the engine, at the certificate's files and at the lag of the event loop."""
DEAD_S = 2.0
"""Seconds that requests have to read their error after the engine has died."""
EXIT_DONE, EXIT_CUT, EXIT_DEAD = 0, 1, 70


class Server:
    """Serves one model, or several, until a signal ends it.

    One model is loaded at once, in a thread, while the health routes already answer. Of several each is loaded by the
    first request that names it (`ModelPool`).

    Args:
        options: Of the server.
        models: The models.

    Attributes:
        context: State of the server, for tests.
    """

    def __init__(self, options: ServerOptions, models: Sequence[ModelSpec]) -> None:
        self.context = ServerContext(options)
        self._options, self._models = options, models
        app = Application(self.context)
        self._listener = HttpListener(app, options)
        self._batches = None if self.context.jobs is None else BatchWorker(app, self.context.jobs)
        self._error: BaseException | None = None
        self._is_started = False  # the model is loaded, and its programs are there
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._num_signals = 0

    @property
    def addresses(self) -> list[str]:
        """Addresses that clients can use."""
        return self._listener.addresses

    def run(self) -> int:
        """Serves until SIGTERM or SIGINT, or until the engine dies; returns the exit status.

        0: all requests were finished; 1: some were cut off at the end of the time for them; 70: the engine died.

        Raises:
            TorchaxServeError: The model cannot be loaded.
        """
        status = asyncio.run(self._main())
        if self._error is not None:
            raise self._error
        return status

    def stop(self) -> None:
        """Ends the server as SIGTERM does; from any thread, once it runs."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._on_signal)

    def _on_signal(self) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            logger.warning("a second signal: the server ends at once")
            end_children()
            logging.shutdown()
            os._exit(EXIT_CUT)
        assert self._ended is not None
        self._ended.set()

    async def _main(self) -> int:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._on_signal)
        await self._listener.start()
        logger.info("listening on %s", ", ".join(self.addresses))
        changed = [f"{name}={json.dumps(value)}" for name, value in self._options.changed().items()]
        logger.info("options that are not the defaults: %s", ", ".join(changed) or "none")
        if len(self._models) == 1:
            threading.Thread(target=self._load_model, args=(self._loop,), name="load", daemon=True).start()
        else:
            self._open_pool()
        ticker, watcher = asyncio.create_task(self._tick()), asyncio.create_task(self.context.loop_lag.watch())
        if self._batches is not None:
            self._batches.start()
        try:
            await self._ended.wait()
            return EXIT_DEAD if self.context.stage is Stage.DEAD else await self._drain()
        finally:
            ticker.cancel()
            watcher.cancel()
            self._listener.close()
            self._listener.cancel_requests()
            await asyncio.sleep(0)
            if self._batches is not None:
                await self._batches.close()
            if self.context.pool is not None:
                await self.context.pool.close()
            await asyncio.to_thread(self._close_model)
            await self._close_context()

    def _close_model(self) -> None:
        """Closes the model, unless it is still made.

        That would wait for a program or a kernel that is compiled.
        """
        if self.context.pool is None and self._is_started and self.context.stage is not Stage.DEAD:
            for service in self.context.loaded:
                service.close()

    async def _close_context(self) -> None:
        self.context.metrics.close()
        self.context.close_files()
        if self.context.profiler is not None and self.context.stage is not Stage.DEAD:
            await self.context.profiler.close()
        if self.context.tracing is not None:
            await asyncio.to_thread(self.context.tracing.close)

    def _load_model(self, loop: asyncio.AbstractEventLoop) -> None:
        """Loads and warms up the model, in a thread of its own."""
        try:
            began = time.monotonic()
            (spec,) = self._models
            service = ModelService(spec.load(), self._options, spec.names)
            loop.call_soon_threadsafe(self._set_loaded, service)
            if self._options.warm_up:
                warm_up(service.model, self.context.start)
            service.prepare()
            gc_pause.freeze_for_serving()
            loop.call_soon_threadsafe(self._set_ready, time.monotonic() - began)
        except BaseException as error:
            if self.context.stage is Stage.DRAINING:
                return  # the end of the process has cut the start off
            self._error = error
            with contextlib.suppress(RuntimeError):  # the loop has ended before
                loop.call_soon_threadsafe(self._on_signal)

    def _open_pool(self) -> None:
        """Sets the models of a server of several, none of which is loaded."""
        share_free_memory(min(len(self._models), self._options.max_loaded_models or len(self._models)))
        gc_pause.collect_rarely()
        self.context.set_pool(ModelPool(self._models, self._options, lambda spec: open_model(spec, self._options)))
        logger.info("models, loaded at their first request: %s", ", ".join(self.context.model_names))
        notify_systemd("READY=1")

    def _set_loaded(self, service: ModelService) -> None:
        self.context.set_service(service)
        if self.context.stage is Stage.LOADING:
            self.context.stage = Stage.WARMING_UP

    def _set_ready(self, duration_s: float) -> None:
        self._is_started = True
        if self.context.stage is Stage.WARMING_UP:
            self.context.stage = Stage.READY
            logger.info("%s is ready after %.1f s", self.context.loaded[0].name, duration_s)
            notify_systemd("READY=1")

    async def _drain(self) -> int:
        """Refuses new requests and waits for those that run, then for the engines.

        Returns the exit status.
        """
        context = self.context
        was_ready = context.stage is Stage.READY
        context.stage = Stage.DRAINING
        notify_systemd("STOPPING=1")
        if self._batches is not None:
            self._batches.stop()
        if not was_ready:
            return EXIT_DONE
        await asyncio.sleep(self._options.pre_stop_s)
        context.refuses_new = True
        until = time.monotonic() + self._options.drain_timeout_s
        while context.num_in_flight and time.monotonic() < until:
            await asyncio.sleep(0.02)
        have_ended = await asyncio.to_thread(drain_engines, context.loaded, max(0.0, until - time.monotonic()))
        if have_ended and not context.num_in_flight:
            return EXIT_DONE
        logger.warning("%d requests were cut off", context.num_in_flight)
        return EXIT_CUT

    async def _tick(self) -> None:
        """Looks at the engine, the certificate and the event loop from time to time."""
        while True:
            await asyncio.sleep(TICK_S)
            self.context.metrics.loop_lag_s.set(self.context.loop_lag.take())
            try:
                if await self._listener.reload_tls():
                    logger.info("the files of TLS were read again")
            except (InvalidArgumentError, OSError) as error:
                logger.warning("connections use the files of TLS of before: %s", error)
            if self.context.pool is not None:
                await self.context.pool.unload_idle()
            if (reason := dead_reason(self.context)) is not None:
                await self._die(reason)
                return
            notify_systemd("WATCHDOG=1")

    async def _die(self, reason: str) -> None:
        logger.error("%s; the process ends", reason)
        self.context.stage = Stage.DEAD
        self._listener.cancel_requests()
        await asyncio.sleep(DEAD_S)
        assert self._ended is not None
        self._ended.set()


def open_model(spec: ModelSpec, options: ServerOptions) -> ModelService:
    """Loads a model and makes it ready for requests; meant for a thread."""
    service = ModelService(spec.load(), options, spec.names)
    try:
        restore_adapters(service, spec.adapters)
        if options.warm_up:
            # Requests wait for the model: stored programs are read when they are needed, the others behind them.
            warm_up(service.model, SilentProgress(), wait=not service.model.has_stored_programs)
        service.prepare()
    except BaseException:
        service.close()
        raise
    return service


def dead_reason(context: ServerContext) -> str | None:
    """Returns why a server's engines will not answer any more; None as long as they do."""
    if context.stage is not Stage.READY:
        return None
    limit_s = context.options.watchdog_s
    for progress in progress_of(context.loaded):
        if not progress.is_alive:
            return "the engine's thread has ended"
        if limit_s and progress.is_due and not progress.is_compiling and progress.still_s > limit_s:
            return f"the engine has not moved for {progress.still_s:.0f} s"
    return None


def warm_up(model: ServedModel, progress: Progress, *, wait: bool = True) -> None:
    """Compiles the programs of the model's engine, and those of an encoder's texts.

    Args:
        model: The model.
        progress: Shows the number of programs.
        wait: False: those of the engine are compiled, or read, behind requests.
    """
    if getattr(model, "embeds", True) and (not model.writes_text or model.embeds_by_files):
        _warm_up_texts(model, progress)
    if not model.writes_text:
        return
    try:
        with progress.stage("building kernels", None, "items"):
            engine = model.engine  # which needs them
        began = time.monotonic()
        engine.warm_up(progress, wait=wait)
        if not wait:
            return
        logger.info("%d programs are ready after %.1f s", engine.stats().num_programs, time.monotonic() - began)
    except UnsupportedModelError as error:
        logger.warning("requests run one at a time: %s", error)


def _warm_up_texts(model: ServedModel, progress: Progress) -> None:
    began = time.monotonic()
    if (reason := model.warm_up_texts(progress)) is None:
        logger.info("the programs of texts are ready after %.1f s", time.monotonic() - began)
    else:
        logger.warning("texts compile programs at their first use: %s", reason)


def end_children() -> None:
    """Ends the processes that this one has started, with theirs, such as a compiler of kernels.

    The end of one may start the next, of the next source file: so it looks again, for a second at most.
    """
    import psutil  # type: ignore[import-untyped]

    for _ in range(10):
        children = psutil.Process().children(recursive=True)
        if not children:
            return
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, timeout=0.1)


def notify_systemd(message: str) -> None:
    """Sends a message to systemd, if it started the process and waits for one (sd_notify)."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier, contextlib.suppress(OSError):
        notifier.sendto(message.encode(), "\0" + path[1:] if path.startswith("@") else path)
