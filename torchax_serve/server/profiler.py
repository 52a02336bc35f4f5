"""Profiles of a running server by the JAX profiler, which XProf and TensorBoard show."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from torchax_serve.server.errors import ApiError

logger = logging.getLogger("torchax_serve.server")

MAX_PROFILE_S = 60.0
"""Seconds after which a profile ends by itself: it grows in memory until it is written."""


class Profiler:
    """Profiles of a server, one at a time. All calls come from the event loop's thread.

    Args:
        folder: Where profiles are written, each in a folder of its own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = asyncio.Lock()  # held while one starts or is written
        self._timer: asyncio.TimerHandle | None = None  # of the profile that runs
        self._last: asyncio.Task[None] | None = None  # writes a profile whose time is over

    async def start(self) -> None:
        """Starts a profile.

        Raises:
            ApiError: 409 if one runs already.
        """
        async with self._lock:
            if self._timer is not None:
                raise ApiError(409, "expected no running profile, found one; POST /stop_profile ends it")
            await asyncio.to_thread(self._start_trace)
            self._timer = asyncio.get_running_loop().call_later(MAX_PROFILE_S, self._end_late)
            logger.info("a profile has started")

    async def stop(self) -> None:
        """Ends the profile and writes it.

        Raises:
            ApiError: 409 if none runs.
        """
        import jax

        async with self._lock:
            if self._timer is None:
                raise ApiError(409, "expected a running profile, found none; POST /start_profile starts one")
            self._timer.cancel()
            self._timer = None
            await asyncio.to_thread(jax.profiler.stop_trace)
            logger.info("a profile was written")

    async def close(self) -> None:
        """Writes the profile that runs, if any."""
        with contextlib.suppress(ApiError):
            await self.stop()

    def _end_late(self) -> None:
        logger.warning("a profile has run for %.0f s and ends", MAX_PROFILE_S)
        self._last = asyncio.ensure_future(self.close())

    def _start_trace(self) -> None:
        import jax

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of Python in the trace would slow down what is measured
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(self._folder, profiler_options=options)
        except OSError as error:
            raise ApiError(503, "expected --profile-dir to be a folder for new files, found none") from error
        except RuntimeError as error:
            raise ApiError(409, "expected no other profile of this process, found one; end it first") from error
