"""Takes finished weights: a parameter leaves the torch module as soon as it is set.

transformers' own loading runs as it is (``from_pretrained`` on lazy readers), so that its renamings, conversions, casts
and initialisations of buffers all happen; two of its functions are wrapped for the time of one load:

* ``set_param_for_module`` puts a finished tensor into the module. Behind it the tensor becomes a JAX array and a tensor
  on the meta device takes its place, so the host never holds more torch tensors than the loader has in hand.
* ``log_state_dict_report`` prints a table and raises on some of its lines; here it only keeps what it was given.

The loader's read-ahead threads are switched off by its documented environment variable: they read as far ahead as they
can, without bound.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard

import jax
import torch
from jax.experimental.layout import Format
from jax.sharding import Sharding, SingleDeviceSharding
from transformers import PreTrainedModel, core_model_loading, modeling_utils
from transformers.utils.loading_report import LoadStateDictInfo

from model_adapters.bridge.host_arrays import to_jax_zero_copy, to_numpy
from model_adapters.bridge.views import to_jax_array
from model_adapters.errors import UnsupportedArgumentError
from model_adapters.loading.formats.placement import StoredWeights
from model_adapters.loading.formats.quantized_tensor import QuantizedTensor
from model_adapters.loading.memory import PeakMemory, give_back_freed
from model_adapters.ops.compressed_weight import Weight
from model_adapters.ops.memory_layout import inputs_first, put
from model_adapters.program.trace_context import trace_lock
from model_adapters.quantization.loading import WeightQuantizer

DevicePut = Callable[[str, Any], jax.Array]
"""``(name, array on the host or on the default device) -> array where it is to live``."""

_IN_FLIGHT_BYTES = 512 * 2**20
_TRIM_BYTES = 8 * 2**20  # of weights landed between two looks at what the C library could give back


class DevicePlacement:
    """Puts arrays where they are to live.

    Waits before too many copies from the host are under way.

    Args:
        device_put: Places each array; None is the default device.
        quantizer: Quantizes some of them, on the default device.
        stored: Places weights that are quantized in the checkpoint.
        experts: Names of the experts' weights [experts, out, in], which `memory_layout` places on the default device.
    """

    def __init__(
        self,
        device_put: DevicePut | None,
        quantizer: WeightQuantizer | None = None,
        *,
        stored: StoredWeights | None = None,
        experts: frozenset[str] = frozenset(),
    ) -> None:
        self._device_put, self._quantizer, self._experts = device_put, quantizer, experts
        self._stored = StoredWeights() if stored is None else stored
        self._in_flight: deque[jax.Array] = deque()

    def __call__(self, name: str, tensor: torch.Tensor) -> Weight:
        """The JAX array of a CPU tensor; on the CPU backend the very memory where that can be."""
        if isinstance(tensor, QuantizedTensor):
            requantized = self._quantizer is not None and self._quantizer.takes(name)
            if not requantized and self._stored.takes(name, tensor):
                return self._as_stored(name, tensor)
            parts, tensor = tensor.parts, tensor.parts.dense(tensor.dtype)
            if requantized:
                assert self._quantizer is not None
                return self._quantizer(name, to_jax_array(tensor), was=f"{parts.source} in {parts.bits} bits")
        if self._quantizer is not None and self._quantizer.takes(name):
            return self._quantizer(name, to_jax_array(tensor))
        if self._device_put is not None:
            return self._bounded(self._device_put(name, to_numpy(tensor)))
        if isinstance(place := self._place(name), Format):
            return self._bounded(put(to_numpy(tensor), place))
        if jax.default_backend() == "cpu":
            return to_jax_zero_copy(tensor)
        return self._bounded(jax.device_put(to_numpy(tensor)))

    def of_array(self, name: str, array: jax.Array) -> Weight:
        """Returns the same for an array that was made on the default device."""
        if self._quantizer is not None and self._quantizer.takes(name):
            return self._quantizer(name, array)
        if self._device_put is not None:
            return self._bounded(self._device_put(name, array))
        place = self._place(name)
        return self._bounded(put(array, place)) if isinstance(place, Format) else array

    def _place(self, name: str) -> Sharding | Format | None:
        """Returns where an expert's weight is placed on the default device; None: as others are."""
        return inputs_first(SingleDeviceSharding(jax.local_devices()[0])) if name in self._experts else None

    def _as_stored(self, name: str, tensor: QuantizedTensor) -> Weight:
        if self._device_put is not None and self._stored.sharding is None:
            raise UnsupportedArgumentError(
                f"{name} is quantized in the checkpoint; expected no device_put, got one: leave it out, or "
                "pass quantization='none' for dense weights"
            )
        return self._stored(name, tensor)

    def _bounded(self, array: jax.Array) -> jax.Array:
        self._in_flight.append(array)
        while self._in_flight and sum(each.nbytes for each in self._in_flight) > _IN_FLIGHT_BYTES:
            self._in_flight.popleft().block_until_ready()
        return array


class WeightSink:
    """Takes the tensors out of a module that is being loaded.

    Args:
        place: makes the JAX array of a finished tensor.
        peak: looked at whenever a tensor lands, when memory is at its highest.
        names: Names of all tensors in the files; those of quantized parts may have other last parts.
    """

    def __init__(self, place: DevicePlacement, peak: PeakMemory, names: Iterable[str] = ()) -> None:
        self._place, self._peak, self._names = place, peak, frozenset(names)
        self._landed: dict[int, tuple[torch.Tensor, Weight]] = {}  # by id of the meta tensor in its place
        self._since_trim = 0
        self.info: LoadStateDictInfo | None = None

    def accept(self, model: PreTrainedModel, target_name: str, tensor_bytes: int) -> None:
        """Takes the tensor just loaded as `target_name`, unless it may be tied to another.

        Which of two tied names a checkpoint holds, and whether both are equal, transformers finds out at the end and
        by their values; the few tensors in question stay in the module until then, but for those that the files have
        under one name only, and by a name of the module's, and for equal ones that the files have under all names.
        """
        self._peak.sample()
        self._since_trim += tensor_bytes
        if self._since_trim > _TRIM_BYTES:
            self._since_trim = 0
            give_back_freed()
        tied = getattr(model, "all_tied_weights_keys", {})
        group = {name for pair in tied.items() if target_name in pair for name in pair}
        if group and not self._is_under_one_name(target_name, group):
            self._accept_equal(model, tied.get(target_name, target_name))
            return
        owner, attribute = _owner_of(model, target_name)
        tensor = getattr(owner, attribute, None)
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            return  # a refused shape, or state of another kind
        setattr(owner, attribute, self._landed_as(tensor, self._place(target_name, tensor)))

    def _accept_equal(self, model: PreTrainedModel, source: str) -> None:
        """Takes `source` and its tied tensors once all are in the module, if they are equal."""
        names = [source, *(name for name, other in model.all_tied_weights_keys.items() if other == source)]
        owners = [_owner_of(model, name) for name in names]
        found = [getattr(owner, attribute, None) for owner, attribute in owners]
        tensors = [tensor for tensor in found if _is_plain(tensor)]
        if len(tensors) < len(found):
            return  # not all are there, or their parts would have to be compared
        first, *others = tensors
        if any(first.dtype != tensor.dtype or not torch.equal(first, tensor) for tensor in others):
            return
        empty = self._landed_as(first, self._place(source, first))
        for owner, attribute in owners:
            setattr(owner, attribute, empty)

    def _is_under_one_name(self, target_name: str, group: set[str]) -> bool:
        """Tells whether of the tied names in `group` the files have `target_name` alone."""
        others = {f".{name.split('.')[-2]}." for name in group - {target_name} if "." in name}
        return target_name in self._names and not any(other in f".{name}" for name in self._names for other in others)

    def _landed_as(self, tensor: torch.Tensor, array: Weight) -> torch.Tensor:
        """Returns the meta tensor that stands for `array` in the place of `tensor`."""
        empty = meta_like(tensor)
        empty._is_hf_initialized = True  # type: ignore[attr-defined]  # keeps the initialisation away from it
        self._landed[id(empty)] = (empty, array)
        return empty

    def array_for(self, tensor: torch.Tensor) -> Weight | None:
        """Returns the array that landed with `tensor` left in its place."""
        found = self._landed.get(id(tensor))
        return None if found is None else found[1]

    def taken(self) -> LoadStateDictInfo:
        """transformers' account of what was there, missing and left over.

        It is there once `hooked` has been left.
        """
        assert self.info is not None
        return self.info

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """While this is open, what transformers loads lands here. One load at a time in a process."""

        def keep_report(*, loading_info: LoadStateDictInfo, **ignored: Any) -> None:
            self.info = loading_info

        with exclusive_load():
            set_param = core_model_loading.set_param_for_module  # read here: another load may have replaced it before

            def set_and_land(
                model: PreTrainedModel,
                target_name: str,
                param_value: torch.Tensor,
                info: LoadStateDictInfo,
                quantizer: Any,
            ) -> None:
                set_param(model, target_name, param_value, info, quantizer)
                num_bytes = param_value.numel() * param_value.element_size()
                del param_value
                if all(target_name != mismatch[0] for mismatch in info.mismatched_keys):
                    self.accept(model, target_name, num_bytes)

            with (
                replaced(core_model_loading, "set_param_for_module", set_and_land),
                replaced(modeling_utils, "log_state_dict_report", keep_report),
                _read_ahead_off(),
                _without_remarks_on_missing(),
            ):
                yield


def _owner_of(model: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """Returns the module that has the tensor `name`, and the tensor's name there."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path) if path else model, attribute


def _is_plain(tensor: Any) -> TypeGuard[torch.Tensor]:
    """Returns whether `tensor` is a dense tensor with values."""
    return isinstance(tensor, torch.Tensor) and not isinstance(tensor, QuantizedTensor) and not tensor.is_meta


@contextlib.contextmanager
def exclusive_load() -> Iterator[None]:
    """Lets transformers load inside, without a progress bar, and nothing else load or trace.

    transformers patches itself and PyTorch while it builds a module (the default dtype, initialisations, the tying of
    weights), as `WeightSink.hooked` does: for all threads. A trace would read them, and one build undo another's.
    """

    def without_bar(items: Iterable[Any], **ignored: Any) -> Iterable[Any]:
        return items

    with trace_lock(), replaced(core_model_loading, "tqdm", without_bar):
        yield


@contextlib.contextmanager
def replaced(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    """`value` in place of an attribute, as long as this is open."""
    original = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, original)


@contextlib.contextmanager
def _read_ahead_off() -> Iterator[None]:
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _without_remarks_on_missing() -> Iterator[None]:
    """Keeps away transformers' guess at what missing tied tensors mean.

    They are in its account as well.
    """
    remarks = logging.getLogger(modeling_utils.__name__)

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("This checkpoint seem corrupted")

    remarks.addFilter(is_other)
    try:
        yield
    finally:
        remarks.removeFilter(is_other)


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same kind, shape and dtype on the meta device, without memory."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
