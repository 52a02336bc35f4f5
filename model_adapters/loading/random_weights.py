"""Random weights for a configuration, from the architecture's own distributions.

They are made tensor by tensor.

transformers initialises "missing" weights: an empty checkpoint makes all of them missing. Small tensors (norms, biases,
state-space parameters) and buffers are then made by transformers as always. For a large parameter nothing is allocated:
it stays on the meta device, the call of an init function on it is recorded instead of run, and its values are made
later: by torch where arrays live on the CPU, else on the device they are for. A seed gives the same
values of a parameter whatever else the model holds (other ones on another kind of device).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
import transformers.utils.logging as transformers_logging
from transformers import PreTrainedModel, core_model_loading, initialization, modeling_utils

from model_adapters.loading.weight_sink import replaced

LARGE = 2**18
"""The fewest elements of a parameter that is drawn on the device."""
_ON_DEVICE = ("normal_", "uniform_", "trunc_normal_", "zeros_", "ones_", "constant_")
_BLOCK = 2**22  # elements drawn at once, which limits memory for random bits


@dataclass(frozen=True)
class InitCall:
    """One call of an init function of torch on all of a parameter."""

    name: str
    original: Any
    options: dict[str, Any]

    @classmethod
    def of(cls, name: str, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InitCall:
        """Returns the call with its arguments by name, defaults filled in."""
        bound = inspect.signature(original).bind(None, *args, **kwargs)
        bound.apply_defaults()
        options = dict(bound.arguments)
        options.pop("tensor", None)
        options.pop("generator", None)
        return cls(name, original, options)


class RandomInit:
    """Recorder of the initialisation of large parameters, which draws them afterwards."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._calls: dict[int, InitCall] = {}  # by storage: `.data` and the parameter itself share one
        self._computed: set[str] = set()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records transformers' initialisation of large parameters inside the context."""
        load_parameter = modeling_utils._load_parameter_into_model

        def load_small(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> None:
            owner, _, attribute = name.rpartition(".")
            if (
                tensor.numel() < LARGE
                or name in self._computed
                or attribute not in model.get_submodule(owner)._parameters
            ):
                load_parameter(model, name, tensor)

        self._calls.clear()  # of storages that are gone
        functions = dict(initialization.TORCH_INIT_FUNCTIONS)
        verbosity = transformers_logging.get_verbosity()
        with (
            torch.random.fork_rng(devices=[]),
            replaced(modeling_utils, "_load_parameter_into_model", load_small),
            replaced(initialization, "copy_", self._recorder("copy_", initialization.copy_)),
            replaced(
                initialization, "TORCH_INIT_FUNCTIONS", {name: self._recorder(name, f) for name, f in functions.items()}
            ),
        ):
            torch.manual_seed(self._seed)
            transformers_logging.set_verbosity_error()  # it warns of the tied weights that no checkpoint gave
            try:
                yield
            finally:
                transformers_logging.set_verbosity(verbosity)

    def has_recorded(self, module: PreTrainedModel) -> bool:
        """Tells whether all init calls on parameters of `module` can be run later.

        If not, the module must be built again. A few architectures compute values on the device of the parameter and
        copy them in; the next time those parameters, however large, are allocated and so get their values at once.
        """
        names = {_storage_id(tensor): name for name, tensor in module.named_parameters() if tensor.is_meta}
        found = {
            names[storage]
            for storage, call in self._calls.items()
            if storage in names and call.name == "copy_" and call.options["other"].is_meta
        }
        self._computed |= found
        self._calls = {storage: call for storage, call in self._calls.items() if storage in names}
        return not found

    def _recorder(self, name: str, original: Any) -> Any:
        @functools.wraps(original)
        def record(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not tensor.is_meta or getattr(tensor, "_is_hf_initialized", False):
                return original(tensor, *args, **kwargs)
            fills_storage = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
            if fills_storage:  # a row set to zero (padding) says nothing about the rest, and is ignored
                self._calls[_storage_id(tensor)] = InitCall.of(name, original, args, kwargs)
            return tensor

        return record

    def draw(
        self, name: str, tensor: torch.Tensor, dtype: torch.dtype, default_std: float, *, on_device: bool
    ) -> jax.Array | torch.Tensor:
        """Returns values for the parameter `name`, given as `tensor` on the meta device.

        A parameter that no init function of torch has touched gets a normal distribution of `default_std`.

        Returns:
            With `on_device` an array on the default device, but for the rarer init functions; else a torch tensor,
            filled by torch itself, which on a CPU is several times faster.
        """
        call = self._calls.get(_storage_id(tensor)) or InitCall.of(
            "normal_", initialization.TORCH_INIT_FUNCTIONS["normal_"], (0.0, default_std), {}
        )
        key = zlib.crc32(name.encode())
        if on_device and call.name in _ON_DEVICE:
            return self._draw_on_device(call, key, tuple(tensor.shape), jnp.dtype(str(dtype).removeprefix("torch.")))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(self._seed ^ key)
            # decompositions, which some of the rarer functions use, exist in float32 only
            values = torch.empty(tensor.shape, dtype=dtype if call.name in _ON_DEVICE else torch.float32)
            call.original(values, **call.options)
        return values.to(dtype)

    def _draw_on_device(self, call: InitCall, crc: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        options = call.options
        if call.name in ("zeros_", "ones_", "constant_"):
            return jnp.full(shape, options["val"] if call.name == "constant_" else float(call.name == "ones_"), dtype)
        # "rbg" is the generator that GPUs and TPUs have in hardware
        key = jax.random.fold_in(jax.random.key(self._seed, impl="rbg"), crc)
        if call.name == "normal_":
            return _draw(key, shape, dtype, "normal", options["mean"], options["std"])
        if call.name == "uniform_":
            return _draw(key, shape, dtype, "uniform", options["a"], options["b"])
        low, high = ((options[side] - options["mean"]) / options["std"] for side in ("a", "b"))
        return _draw(key, shape, dtype, "truncated", options["mean"], options["std"], (low, high))


def _storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 6))
def _draw(
    key: jax.Array,
    shape: tuple[int, ...],
    dtype: Any,
    kind: str,
    first: float,
    second: float,
    cut: tuple[float, float] = (-2.0, 2.0),
) -> jax.Array:
    """Returns values of `shape` from a distribution of the given kind.

    It is normal(mean, std), uniform[low, high) or the normal cut at `cut` standard deviations.
    """

    def block(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if kind == "uniform":
            return jax.random.uniform(key, shape, jnp.float32, first, second).astype(dtype)
        if kind == "truncated":
            values = jax.random.truncated_normal(key, *cut, shape, jnp.float32)
        else:
            values = jax.random.normal(key, shape, jnp.float32)
        return (first + second * values).astype(dtype)

    numel = functools.reduce(int.__mul__, shape, 1)
    rows = shape[0]
    parts = next((n for n in range(1, rows + 1) if rows % n == 0 and numel // n <= _BLOCK), rows)
    if parts == 1:
        return block(key, shape)
    part_shape = (rows // parts, *shape[1:])
    return jax.lax.map(lambda each: block(each, part_shape), jax.random.split(key, parts)).reshape(shape)


def planned_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Returns the weights with another dtype than `dtype`, by name.

    The model's own ``_keep_in_fp32_modules`` decides which these are.
    """
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return {}
    pattern, by_group, _ = core_model_loading.build_glob_alternation(list(plan))
    found = {name: pattern.search(name) for name in model.state_dict()}
    return {name: plan[by_group[match.lastgroup]] for name, match in found.items() if match and match.lastgroup}
