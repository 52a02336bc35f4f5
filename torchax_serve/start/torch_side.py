"""Objects that stand for torch's and transformers' until more is asked than recorded."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax

ABSENT = object()
"""Value of an attribute that the object was recorded not to have."""


class TorchSide:
    """The model with its torch module, loaded at the first use of what a record does not have.

    Args:
        load: Loads the model.

    Attributes:
        loaded: The model; None until it is needed.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load, self._lock = load, threading.RLock()
        self.loaded: Any = None

    def get(self) -> Any:
        """Returns the model, which is loaded now if it was not.

        Loading waits for traces in other threads. So a thread that traces calls it once before it begins.
        """
        if self.loaded is not None:
            return self.loaded
        with self._lock:
            if self.loaded is None:
                with jax.ensure_compile_time_eval():  # may be needed inside a trace, which the arrays must not join
                    self.loaded = self._load()
            return self.loaded


class Deferred:
    """Stands for an object of the torch side; has the recorded attributes until that is loaded.

    Args:
        side: The torch side.
        pick: Returns the object of a loaded model.
        recorded: Attributes by name.
    """

    def __init__(self, side: TorchSide, pick: Callable[[Any], Any], recorded: Mapping[str, Any]) -> None:
        vars(self).update(_side=side, _pick=pick, _recorded=recorded)

    @property
    def is_loaded(self) -> bool:
        """Whether the torch side is loaded, whose object then has all attributes."""
        return self._side.loaded is not None

    def made(self) -> Any:
        """Returns the object itself."""
        return self._pick(self._side.get())

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance sees
        # Profilers and debuggers ask for the class of objects that have no attributes yet.
        return type(self.made()) if "_side" in vars(self) else type(self)

    def __getattr__(self, name: str) -> Any:
        if "_side" not in vars(self):
            raise AttributeError(name)
        if not self.is_loaded:
            if name in self._recorded:
                value = self._recorded[name]
                if value is ABSENT:
                    raise AttributeError(f"the model's configuration has no attribute {name}")
                return value
            if name.startswith("__"):  # protocols of copy, pickle and numpy look for them
                raise AttributeError(name)
        return getattr(self.made(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.made(), name, value)

    def __repr__(self) -> str:
        return repr(self.made())


class RecordedConfig(Deferred):
    """Configuration of a model of text alone."""

    def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the configuration itself, as for every model that is recorded."""
        return self.made().get_text_config(*args, **kwargs) if self.is_loaded else self


class GenerationValues:
    """Values of a generation config, to be merged with the parameters of a request."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        vars(self).update(values)
        self._defaults = defaults

    def _get_default_generation_params(self) -> Mapping[str, Any]:
        return self._defaults

    def written_into(self, config: Any) -> Any:
        """Returns a copy of `config`, a config of transformers, with these values."""
        merged = copy.deepcopy(config)
        vars(merged).update({name: value for name, value in vars(self).items() if name != "_defaults"})
        return merged


class RecordedGenerationConfig(Deferred):
    """The model's generation config. A copy has its values and no more."""

    def __copy__(self) -> Any:
        if self.is_loaded:
            return copy.copy(self.made())
        values = {name: value for name, value in self._recorded.items() if name != "_defaults"}
        return GenerationValues(values, self._recorded["_defaults"])

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(copy.copy(self), memo)
