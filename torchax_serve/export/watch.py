"""Serves the newest version of a bundle, while requests of the old one end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model_adapters.errors import InvalidArgumentError, TorchaxServeError
from model_adapters.loading.bundle_folder import versions
from torchax_serve.export.bundle_model import BundleModel, load_bundle
from torchax_serve.export.layout import TEMPLATE, TEXTS, TOKENIZER, TOOLS_TEMPLATE
from torchax_serve.export.manifest import Manifest

logger = logging.getLogger("torchax_serve")

POLL_S = 2.0
"""Seconds between two looks at the folder."""
GRACE_S = 5.0
"""Seconds for which the old version takes requests that were being prepared when the new one came."""
DRAIN_S = 3600.0
"""Seconds after which requests of the old version are ended."""


class WatchedBundle:
    """The newest version of a bundle.

    Each request runs on one version from its start to its end.

    A version that cannot be loaded, or has another tokenizer, chat template or other sizes of the engine, is passed
    over with a warning.

    Attributes:
        name: Name of the bundle.
        current: The model of the version in use.
        version: Its number.
        follow: Called with the model of each further version.

    Args:
        folder: The bundle, with numbered versions.
        load: Loads the model of a version's folder.
        poll_s: Seconds between two looks at the folder.

    Raises:
        InvalidArgumentError: `folder` is one version, which never changes.
        CheckpointError, UnsupportedModelError: the newest version cannot be loaded.
    """

    def __init__(self, folder: Path, load: Callable[[Path], Any] = load_bundle, *, poll_s: float = POLL_S) -> None:
        self.name = str(folder)
        self._folder, self._load, self._poll_s = folder, load, poll_s
        found = versions(folder)
        if not found:
            raise InvalidArgumentError(
                f"{folder}: expected a bundle with numbered versions to watch, got one version; name the folder around "
                "it, or do not watch it"
            )
        self.version = self._seen = found[-1]
        self.current = self._loaded(self.version)
        if TEXTS in self.current.manifest.content:
            self.current.close()
            raise InvalidArgumentError(
                f"{folder}: expected a bundle of a model that writes text to watch, got one of an encoder; do not "
                "watch it"
            )
        self.follow: Callable[[BundleModel], object] = lambda model: None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="watch-bundle", daemon=True).start()

    def _loaded(self, version: int) -> BundleModel:
        found: BundleModel = self._load(self._folder / str(version))
        found.name = self.name
        return found

    def __repr__(self) -> str:
        return f"{self.current!r}, version {self.version}"

    def close(self) -> None:
        """Stops watching, ends requests with an error and frees the weights."""
        self._ended.set()
        with self._lock:
            self.current.close()

    def _watch(self) -> None:
        while not self._ended.wait(self._poll_s):
            try:
                newest = max(versions(self._folder), default=0)
            except OSError:  # a file system that is away for a moment
                continue
            if newest > self._seen:
                self._seen = newest
                self._take(newest)

    def _take(self, version: int) -> None:
        """Loads a version and uses it from now on; what goes wrong leaves the old one."""
        try:
            new = self._loaded(version)
            try:
                _check_alike(self.current.manifest, new.manifest)
                new.engine.warm_up()
            except BaseException:
                new.close()
                raise
        except (TorchaxServeError, OSError) as error:
            logger.warning("version %d of %s is not used: %s", version, self._folder, error)
            return
        with self._lock:
            if self._ended.is_set():
                new.close()
                return
            old, self.current, self.version = self.current, new, version
            self.follow(new)
        logger.info("version %d of %s is in use", version, self._folder)
        threading.Thread(target=self._end, args=(old,), name="end-version", daemon=True).start()

    def _end(self, old: BundleModel) -> None:
        self._ended.wait(GRACE_S)
        old.engine.drain(DRAIN_S)
        old.close()


def _check_alike(old: Manifest, new: Manifest) -> None:
    """Raises InvalidArgumentError if what servers know of a model differs between two versions."""
    same_files = all(
        old["files"].get(name, {}).get("sha256") == new["files"].get(name, {}).get("sha256")
        for name in (TOKENIZER, TEMPLATE, TOOLS_TEMPLATE)
    )
    if not same_files or old["tokenizer"] != new["tokenizer"] or old["engine"] != new["engine"]:
        raise InvalidArgumentError(
            "expected the tokenizer, chat template and engine of the version in use, got others; start the server again"
        )
