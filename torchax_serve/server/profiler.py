"""Profiles of a running server, by the names of its model's modules."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_adapters.errors import InvalidArgumentError
from torchax_serve.server.errors import ApiError
from torchax_serve.validation.folders import writable_folder

if TYPE_CHECKING:
    from torchax_serve.profiling import Profile, ProfileSession

logger = logging.getLogger("torchax_serve.server")

MAX_PROFILE_S = 60.0
"""Seconds after which a profile ends by itself: it grows in memory until it is written."""


class Profiler:
    """Profiles of a server, one at a time. All calls come from the event loop's thread.

    Args:
        folder: Where profiles are written, each in a folder of its own; it is made if there is none.

    Raises:
        InvalidArgumentError: Nothing can be written there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = writable_folder("profile_dir", folder)
        self._lock = asyncio.Lock()  # held while one starts or is written
        self._running: ProfileSession | None = None
        self._timer: asyncio.TimerHandle | None = None  # of the profile that runs
        self._last: asyncio.Task[None] | None = None  # writes a profile whose time is over

    async def start(self, model: Any) -> None:
        """Starts a profile of `model`.

        Its programs get the names of modules first, which takes their compilation.

        Raises:
            ApiError: 409 if one runs already, 503 if the folder cannot be written to.
        """
        async with self._lock:
            if self._running is not None:
                raise ApiError(409, "expected no running profile, found one; POST /stop_profile ends it")
            self._running = await asyncio.to_thread(self._start, model)
            self._timer = asyncio.get_running_loop().call_later(MAX_PROFILE_S, self._end_late)
            logger.info("a profile has started")

    async def stop(self) -> Profile:
        """Ends the profile, writes and returns it.

        Raises:
            ApiError: 409 if none runs.
        """
        async with self._lock:
            if self._running is None or self._timer is None:
                raise ApiError(409, "expected a running profile, found none; POST /start_profile starts one")
            self._timer.cancel()
            session, self._running, self._timer = self._running, None, None
            profile = await asyncio.to_thread(session.stop)
            logger.info("a profile was written")
            return profile

    async def take(self, model: Any, seconds: float) -> Profile:
        """Returns a profile of the next `seconds` seconds; errors of `start`."""
        await self.start(model)
        await asyncio.sleep(seconds)
        return await self.stop()

    async def close(self) -> None:
        """Writes the profile that runs, if any."""
        with contextlib.suppress(ApiError):
            await self.stop()

    def _end_late(self) -> None:
        logger.warning("a profile has run for %.0f s and ends", MAX_PROFILE_S)
        self._last = asyncio.ensure_future(self.close())

    def _start(self, model: Any) -> ProfileSession:
        from torchax_serve.profiling.session import ProfileRunningError

        session: ProfileSession = model.profile(self._folder)
        session.profile.measures_bandwidth = False  # which would hold up what the server answers
        try:
            session.start()
        except InvalidArgumentError as error:
            raise ApiError(503, "expected --profile-dir to be a folder for new files, found none") from error
        except ProfileRunningError as error:
            raise ApiError(409, "expected no other profile of this process, found one; end it first") from error
        return session
