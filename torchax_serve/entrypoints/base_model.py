"""`BaseModel`: common part of all served models.

It holds the weights on the device until it is closed.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import jax
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from model_adapters.errors import CheckpointError, TorchaxServeError, UnsupportedModelError
from model_adapters.loading import LoadedModel
from model_adapters.loading.modules_json import modules_root
from torchax_serve.compilation.executable_cache import ExecutableCache
from torchax_serve.compilation.program_signature import model_identity
from torchax_serve.compilation.xla_cache import programs_dir
from torchax_serve.distributed.hosts.leader import Leader
from torchax_serve.engine.replica_runtimes import split_runtimes
from torchax_serve.entrypoints.exportable_model import ExportableModel
from torchax_serve.entrypoints.retrieval_methods import RetrievesTexts
from torchax_serve.generation.jax_forward import following
from torchax_serve.generation.jax_model import run_on_jax
from torchax_serve.pooling.logit_score import LogitScoreRule, has_logit_score, logit_score_rule, score_pairs
from torchax_serve.pooling.queue import PoolingQueue
from torchax_serve.runtime.call_arguments import check_surroundings
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.text.prompt import TextFacts, TextModel
from torchax_serve.validation.owner_process import OwnerProcess

if TYPE_CHECKING:
    from torchax_serve.pooling.classification import TextHead
    from torchax_serve.pooling.embedding import Embedder
    from torchax_serve.profiling import ProfileSession


class MissingAttributeError(TorchaxServeError, AttributeError):
    """Error for a transformers attribute that was read on the served model.

    Read it on the model's `torch_model`.
    """


class BaseModel(RetrievesTexts, ExportableModel):
    """A model that runs on JAX. A context manager: leaving it frees the weights.

    Attributes:
        name: The name by which the model was loaded.
        class_name: Class of the transformers model.
        dtype: The weights' dtype.
        dtype_name: Its name, such as ``bfloat16``.
        load_report: Tensors that the checkpoint lacks, or has and the model does not use.
        recorded_executables: Programs of an engine that a `RecordedModel` has begun; None if there is none.
        embeds: Whether it has embeddings of texts.
        embeds_by_files: Whether the checkpoint's files say how tokens become one (``modules.json``).
        scores_by_logits: Whether they say by which tokens' logits it scores pairs (LogitScore).
    """

    embeds = True

    def __init__(self, loaded: LoadedModel, leader: Leader | None = None) -> None:
        self._leader = leader
        self._process = OwnerProcess()
        self.recorded_executables: ExecutableCache | None = None  # of an engine that a start record has begun
        self._pooling_queue = PoolingQueue()  # of texts to embed, label or score
        self._loaded: LoadedModel | None = loaded
        self.name = loaded.source.name
        self._config = loaded.config
        self._text_facts: TextFacts | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None  # once it was asked for
        self.class_name = type(loaded.module).__name__
        self.dtype: torch.dtype = loaded.module.dtype
        self.dtype_name = str(self.dtype).removeprefix("torch.")
        self.load_report = loaded.report
        self.scores_by_logits = loaded.module.can_generate() and _scores_by_logits(loaded)
        self.embeds_by_files = _has_modules(loaded) and not self.scores_by_logits
        if loaded.sharding is None:
            self._runtimes = [ModelRuntime(loaded.module, loaded.weights, programs_of(loaded))]
        else:
            self._runtimes = split_runtimes(loaded.module, loaded.weights, loaded.sharding, leader)
        self._module: Any = run_on_jax(loaded.module, self._runtimes[0])
        self.runtime.watch.is_held = loaded.source.kind == "object"

    def __repr__(self) -> str:
        known = vars(self)
        if "dtype_name" not in known:
            return f"<{type(self).__name__}, not loaded>"
        state = "closed" if self._loaded is None else f"on {self.device_description}"
        return f"<{type(self).__name__} {self.name!r}: {self._config.model_type}, {self.dtype_name}, {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the weights. Closing twice does nothing; any other call afterwards raises."""
        self._loaded = None
        if "_pooling_queue" in vars(self):  # a model that could not be made has none
            self._pooling_queue.close("the model was closed")
        if self._leader is not None:
            self._leader.close()
        if "_module" in vars(self):
            for runtime in self._runtimes:
                runtime.steps.executables.close()
                runtime.weights.clear()
            del self._module

    @property
    def torch_model(self) -> Any:
        """The transformers model object whose ``forward`` and ``generate`` run on JAX.

        For code that needs one (``transformers.pipeline``, lm-eval). From now on each request looks for changes of it.
        """
        module = self._module
        self.runtime.watch.is_held = True
        return module

    @property
    def config(self) -> Any:
        """The model's transformers configuration, a part of `torch_model`."""
        self.runtime.watch.is_held = True
        return self._config

    @property
    def runtime(self) -> ModelRuntime:
        """Runtime of the model, or of its first replica."""
        return self._runtimes[0]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer, or None if it came without one."""
        loaded = self._loaded_or_raise()
        if self._tokenizer is None:
            self._tokenizer = loaded.tokenizer()
        return self._tokenizer

    @property
    def text_facts(self) -> TextFacts:
        """What requests of text need to know of the model.

        It is read again for each request once code outside may have changed the configuration.
        """
        if self._text_facts is None or self.runtime.watch.is_held:
            self._text_facts = TextFacts.of(self.name, self._config)
        return self._text_facts

    def _processor(self) -> Any:
        """Returns the checkpoint's processor of images or audio; None if it came without one."""
        return self._loaded_or_raise().processor()

    @property
    def device_description(self) -> str:
        """Kind and number of the devices, such as ``cpu`` or ``TPU v6 lite x 8``."""
        sharding = None if self._loaded is None else self._loaded.sharding
        devices = jax.devices() if sharding is None else list(sharding.mesh.devices.flat)
        kind = devices[0].device_kind
        return kind if len(devices) == 1 else f"{kind} x {len(devices)}"

    def _embedder(self, *, chooses: bool) -> Embedder:
        from torchax_serve.pooling.module_texts import any_embedder, own_embedder

        if not self.embeds:
            raise UnsupportedModelError(
                f"embed: expected a model that reads texts, got {self.name}, a {self.class_name}"
            )
        return (any_embedder if chooses else own_embedder)(self._followed(), self._runtimes[0])

    def _scores_of_pairs(self, pairs: Sequence[tuple[str, str]], truncate: bool | int | None) -> np.ndarray:
        if not self.scores_by_logits:
            return super()._scores_of_pairs(pairs, truncate)
        loaded = self._followed()
        assert loaded.files_folder is not None
        rule = loaded.once(LogitScoreRule, functools.partial(logit_score_rule, loaded.files_folder))
        return score_pairs(cast("TextModel", self), rule, pairs, truncate=truncate)

    def _head(self) -> TextHead:
        from torchax_serve.pooling.module_texts import head_of

        return head_of(self._followed(), self._runtimes[0])

    @property
    def _is_closed(self) -> bool:
        return self._loaded is None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model's forward, with torch tensors in and out."""
        self._loaded_or_raise()
        return self._module(*args, **kwargs)

    def profile(self, folder: str | os.PathLike[str] | None = None) -> ProfileSession:
        """Profiles what runs on this model inside of a ``with`` block, by the names of its modules.

        The block gets a `torchax_serve.profiling.Profile`, whose tables are there behind it::

            with model.profile("trace/") as profile:
                model.generate_batch(prompts)
            print(profile.table(by="module"))

        Entering compiles the programs that the model has run so far once more, with names. What runs in the block for
        the first time is compiled in it.

        Args:
            folder: Where the trace is written, for XProf; None: into a folder that goes with the profile.

        Raises:
            ProfileRunningError: another profile of this process runs; on entering the block, as all others.
            InvalidArgumentError: nothing can be written to `folder`.
        """
        from torchax_serve.profiling import ProfileSession

        self._loaded_or_raise()
        caches = [runtime.steps.executables for runtime in self._runtimes]
        if (head := vars(self).get("_generates_with_head")) is not None:  # of a `ServedModel`
            caches.append(head._jax_runtime.steps.executables)
        if self.recorded_executables is not None:
            caches.append(self.recorded_executables)
        path = None if folder is None else Path(folder)
        return ProfileSession(caches, self._module, self._runtimes[0].weights, path)

    def refresh(self) -> None:
        """Makes programs and arrays again from `torch_model`, for changes that no call detects."""
        self._loaded_or_raise()
        for runtime in self._runtimes:
            runtime.refresh()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedModelError(
            f"a {type(self).__name__} holds devices and threads and cannot be copied or pickled; call serve in the "
            "other process, or copy torch_model"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Returns the weights by name, as tensors on the CPU; see `torch.nn.Module.state_dict`."""
        self._loaded_or_raise()
        state: dict[str, torch.Tensor] = self._module.state_dict(*args, **kwargs)
        return state

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Writes weights, configuration and tokenizer into a folder, as transformers does."""
        self._loaded_or_raise()
        self._module.save_pretrained(save_directory, **kwargs)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(save_directory)

    def __getattr__(self, name: str) -> Any:
        model = vars(self).get("_module")
        if model is not None and not name.startswith("_") and hasattr(model, name):
            raise MissingAttributeError(
                f"a {type(self).__name__} has no attribute {name}; the transformers model is its torch_model: "
                f"pass model.torch_model, or read model.torch_model.{name}"
            )
        raise AttributeError(f"a {type(self).__name__} has no attribute {name}")

    def _followed(self) -> LoadedModel:
        """Applies changes on `torch_model`, then returns as `_loaded_or_raise`."""
        loaded = self._loaded_or_raise()
        if not self.runtime.watch.may_have_changed():
            check_surroundings()
            return loaded
        with following(self.runtime):
            return loaded

    def _loaded_or_raise(self) -> LoadedModel:
        self._process.check("a model")
        if self._loaded is None:
            raise TorchaxServeError("expected an open model, this one is closed; call serve() again")
        return self._loaded


def _scores_by_logits(loaded: LoadedModel) -> bool:
    with contextlib.suppress(CheckpointError):  # which `embed` raises
        return has_logit_score(loaded.files_folder)
    return False


def _has_modules(loaded: LoadedModel) -> bool:
    with contextlib.suppress(CheckpointError):  # which `embed` raises
        return loaded.files_folder is not None and modules_root(loaded.files_folder) is not None
    return False


def programs_of(loaded: LoadedModel) -> ExecutableCache:
    """Returns the cache of the model's programs.

    It is on disk; in memory for an object, whose code may have changed.
    """
    folder = programs_dir()
    if folder is None or loaded.source.kind == "object":
        return ExecutableCache()
    config_json = loaded.config.to_json_string(use_diff=False)
    return ExecutableCache(folder, model_identity(type(loaded.module), config_json, loaded.weights))
