"""Adapters that requests can name: their slots, and the requests that use them."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import threading
from collections.abc import Mapping, Sequence

from model_adapters.errors import InvalidArgumentError, TorchaxServeError
from torchax_serve.scheduler.config import check_int

SALT_MARK = "\ud800"
"""Begins and ends the part of a prefix's salt that is an adapter's: a surrogate, which no salt of a user can have."""

_IN_SALT = re.compile(f"{SALT_MARK}(\\d+):(.*?){SALT_MARK}", re.DOTALL)


def adapter_in_salt(salt: str) -> tuple[int, str] | None:
    """Returns version and name of the adapter in a salt of prefixes; None if there is none."""
    match = _IN_SALT.search(salt)
    return None if match is None else (int(match[1]), match[2])


def salt_without_adapter(salt: str) -> str:
    """Returns a salt of prefixes without the part of an adapter."""
    return _IN_SALT.sub("", salt)


@dataclasses.dataclass(eq=False)
class LoadedAdapter:
    """An adapter on the device.

    Attributes:
        name: Name by which requests ask for it.
        path: Folder that it was read from.
        index: Its place among the matrices of all adapters.
        version: Number of adapters that were loaded before it, by which prefixes of its cache are told apart.
        num_uses: Requests with it that have not ended.
        is_closing: Whether it is being unloaded, and no further request takes it.
    """

    name: str
    path: str
    index: int
    version: int
    num_uses: int = 0
    is_closing: bool = False


class AdapterUse:
    """The use of an adapter by one request, until `release` or the end of this object.

    Args:
        adapters: All adapters.
        adapter: The one.
    """

    def __init__(self, adapters: Adapters, adapter: LoadedAdapter) -> None:
        self._adapters: Adapters | None = adapters
        self._adapter = adapter

    @property
    def adapter_id(self) -> int:
        """One more than the adapter's place: 0 stands for none."""
        return self._adapter.index + 1

    @property
    def salt(self) -> str:
        """Part of the salt of the request's prefixes."""
        return f"{SALT_MARK}{self._adapter.version}:{self._adapter.name}{SALT_MARK}"

    def release(self) -> None:
        """Ends the use. Calling it twice does nothing."""
        adapters, self._adapters = self._adapters, None
        if adapters is not None:
            adapters._release(self._adapter)

    def __del__(self) -> None:
        self.release()  # of a request that was refused, or dropped before it entered


class Adapters:
    """The loaded adapters of a model by name. All methods are thread-safe.

    Args:
        max_loras: Maximum number of adapters.
    """

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._versions = itertools.count()
        self._by_name: dict[str, LoadedAdapter] = {}
        self._changed = threading.Condition(threading.RLock())  # a finalizer may run where the lock is held

    @property
    def max_loras(self) -> int:
        """Maximum number of adapters."""
        return self._max_loras

    def all(self) -> list[LoadedAdapter]:
        """Returns the adapters that requests can name."""
        with self._changed:
            return [adapter for adapter in self._by_name.values() if not adapter.is_closing]

    def use(self, name: str) -> AdapterUse:
        """Returns the use of an adapter by a new request.

        Raises:
            InvalidArgumentError: there is none of that name, or it is being unloaded.
        """
        with self._changed:
            adapter = self._by_name.get(name)
            if adapter is None or adapter.is_closing:
                state = "is being unloaded" if adapter else "is not loaded"
                names = ", ".join(sorted(each.name for each in self.all())) or "none is"
                raise InvalidArgumentError(
                    f"adapter: expected one that is loaded ({names}), got {name!r}, which {state}; load_adapter() "
                    "loads one"
                )
            adapter.num_uses += 1
            return AdapterUse(self, adapter)

    def _release(self, adapter: LoadedAdapter) -> None:
        with self._changed:
            adapter.num_uses -= 1
            self._changed.notify_all()

    def free_index(self, name: str) -> int:
        """Returns a free place for an adapter `name`.

        Raises:
            InvalidArgumentError: the name is taken, or all places are.
        """
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(f"adapter: expected a name, got {name!r}")
        with self._changed:
            if name in self._by_name:
                raise InvalidArgumentError(
                    f"adapter: expected a new name, got {name!r}, which is loaded; call unload_adapter({name!r}) first"
                )
            taken = {adapter.index for adapter in self._by_name.values()}
            if len(taken) == self._max_loras:
                raise InvalidArgumentError(
                    f"adapter: expected at most {self._max_loras} adapters (max_loras), got one more; unload one of "
                    f"{', '.join(sorted(self._by_name))}, or serve the model with a larger max_loras"
                )
            return min(set(range(self._max_loras)) - taken)

    def add(self, name: str, path: str, index: int) -> None:
        """Lets requests name an adapter whose matrices are in their place."""
        with self._changed:
            self._by_name[name] = LoadedAdapter(name, path, index, next(self._versions))

    def unload(self, name: str, timeout_s: float | None) -> None:
        """Refuses new requests with an adapter, waits for those that have it, and frees its place.

        Args:
            name: Its name.
            timeout_s: Seconds to wait at most; None: as long as it takes.

        Raises:
            InvalidArgumentError: there is none of that name, or no number of seconds.
            TorchaxServeError: it is in use for longer; it stays then.
        """
        is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
        if timeout_s is not None and not (is_number and 0 <= timeout_s <= threading.TIMEOUT_MAX):
            raise InvalidArgumentError(f"timeout_s: expected seconds >= 0 or None, got {timeout_s!r}")
        with self._changed:
            adapter = self._by_name.get(name) if isinstance(name, str) else None
            if adapter is None or adapter.is_closing:
                names = ", ".join(sorted(each.name for each in self.all())) or "none is"
                raise InvalidArgumentError(f"adapter: expected one that is loaded ({names}), got {name!r}")
            adapter.is_closing = True
            try:
                if not self._changed.wait_for(lambda: not adapter.num_uses, timeout_s):
                    raise TorchaxServeError(
                        f"adapter: expected {name!r} without requests after {timeout_s:g} s, got {adapter.num_uses} "
                        "that run or wait; it stays loaded, so unload it again later"
                    )
                del self._by_name[name]
            finally:
                adapter.is_closing = False


MAX_LORAS, MAX_LORA_RANK = 256, 512
"""Largest values of the options: all matrices lie on the device."""
DEFAULT_LORA_RANK = 16
"""Maximum rank without adapters that say one, as in vLLM."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Options of the adapters that requests can name; their names are vLLM's.

    Attributes:
        adapters: Folders of the first adapters by name.
        max_loras: Maximum number of adapters; None: as many as `adapters`, at least 1.
        max_lora_rank: Maximum rank; None: the largest of `adapters`, or 16 without any.
        lora_target_modules: Last parts of the names of the layers that may have adapters, such as "q_proj"; None:
            those of `adapters`, or all linear layers without any.
    """

    adapters: Mapping[str, str | os.PathLike[str]] = dataclasses.field(default_factory=dict)
    max_loras: int | None = None
    max_lora_rank: int | None = None
    lora_target_modules: Sequence[str] | None = None

    @classmethod
    def given(
        cls, adapters: object, max_loras: int | None, max_lora_rank: int | None, lora_target_modules: object
    ) -> AdapterOptions | None:
        """Returns the options that were given; None if all are None.

        Raises:
            InvalidArgumentError: a value of another type or out of its range.
        """
        if adapters is None and max_loras is None and max_lora_rank is None and lora_target_modules is None:
            return None
        if adapters is not None and not isinstance(adapters, Mapping):
            raise InvalidArgumentError(
                f"adapters: expected folders by name, {{'sql': 'path'}}, got {type(adapters).__name__}; a single one "
                "that is added to the weights is adapter="
            )
        options = cls(
            adapters=dict(adapters or {}),
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
            lora_target_modules=lora_target_modules,  # type: ignore[arg-type]
        )
        options.check()
        return options

    def check(self) -> None:
        """Raises InvalidArgumentError for a value of another type or out of its range."""
        for name, most in (("max_loras", MAX_LORAS), ("max_lora_rank", MAX_LORA_RANK)):
            value = getattr(self, name)
            if value is not None:
                check_int(name, value, 1, "None chooses")
                if value > most:
                    raise InvalidArgumentError(f"{name}: expected at most {most}, got {value}; lower it")
        for name, path in self.adapters.items():
            if not isinstance(name, str) or not name or not isinstance(path, str | os.PathLike):
                raise InvalidArgumentError(f"adapters: expected folders by name, got {name!r}: {path!r}")
        if self.max_loras is not None and len(self.adapters) > self.max_loras:
            raise InvalidArgumentError(
                f"max_loras: expected at least {len(self.adapters)}, the number of adapters, got {self.max_loras}"
            )
        targets = self.lora_target_modules
        if targets is not None and (
            isinstance(targets, str)
            or not isinstance(targets, Sequence)
            or not targets
            or not all(isinstance(target, str) and target for target in targets)
        ):
            raise InvalidArgumentError(
                f"lora_target_modules: expected a list of names such as ['q_proj', 'v_proj'], got {targets!r}; None "
                "chooses"
            )
