"""`BaseModel`: common part of all served models.

It holds the weights on the device until it is closed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import jax
import numpy as np

from model_adapters.errors import CheckpointError, TorchaxServeError, UnsupportedModelError
from model_adapters.loading.file_names import has_decision_files
from model_adapters.loading.modules_json import modules_root
from model_adapters.ops.compressed_weight import Weight
from torchax_serve.compilation.executable_cache import ExecutableCache
from torchax_serve.engine.options import EngineOptions
from torchax_serve.entrypoints.retrieval_methods import RetrievesTexts
from torchax_serve.pooling.queue import PoolingQueue
from torchax_serve.start.stored_model import StoredModel
from torchax_serve.start.torch_side import TorchSide
from torchax_serve.text.prompt import TextFacts, TextModel
from torchax_serve.validation.owner_process import OwnerProcess

if TYPE_CHECKING:  # they import torch, which a stored model needs not
    import torch
    from transformers import PreTrainedTokenizerBase

    from model_adapters.loading import LoadedModel
    from torchax_serve.distributed.hosts.leader import Leader
    from torchax_serve.entrypoints.torch_model import TorchModel
    from torchax_serve.pooling.classification import TextHead
    from torchax_serve.pooling.embedding import Embedder
    from torchax_serve.profiling import ProfileSession
    from torchax_serve.runtime.model_runtime import ModelRuntime
    from torchax_serve.tasks.decisions import DecisionFiles

logger = logging.getLogger("torchax_serve")


class MissingAttributeError(TorchaxServeError, AttributeError):
    """Error for a transformers attribute that was read on the served model.

    Read it on the model's `torch_model`.
    """


class BaseModel(RetrievesTexts):
    """A model that runs on JAX. A context manager: leaving it frees the weights.

    It is made of a loaded checkpoint, or of what is stored of one: a description, weights, programs and a tokenizer.
    The torch module of a stored model is loaded when something needs it, such as `torch_model`.

    Attributes:
        name: The name by which the model was loaded.
        class_name: Class of the transformers model.
        model_type: The model's type in transformers.
        dtype_name: Name of the weights' dtype, such as ``bfloat16``.
        has_stored_programs: Whether it was made of what is stored, programs included.
        load_report: Tensors that the checkpoint lacks, or has and the model does not use.
        embeds: Whether it has embeddings of texts.
        embeds_by_files: Whether the checkpoint's files say how tokens become one (``modules.json``).
        scores_by_logits: Whether they say by which tokens' logits it scores pairs (LogitScore).
    """

    embeds = True
    embeds_by_files = scores_by_logits = False

    def __init__(self, model: LoadedModel | StoredModel, leader: Leader | None = None) -> None:
        self._leader, self._process, self._is_open = leader, OwnerProcess(), True
        self._pooling_queue = PoolingQueue()  # of texts to embed, label or score
        self._text_facts: TextFacts | None = None
        self._tokenizer: Any = None  # of a stored model
        self._stored = model if isinstance(model, StoredModel) else None
        self.has_stored_programs = self._stored is not None
        self._executables: ExecutableCache | None = None  # of an engine on stored programs
        self.load_report = model.report
        if isinstance(model, StoredModel):
            self.name = model.name
            self.class_name, self.model_type, self.dtype_name = model.record.described
            self._side = TorchSide(self._load_torch_model)
            self._tokenizer = model.tokenizer(self._side)
            if model.record.requantized:
                logger.warning("%s: %s", self.name, model.record.requantized)
            return
        self.name, self.model_type = model.source.name, str(model.config.model_type)
        self.dtype_name = str(model.module.dtype).removeprefix("torch.")
        self.scores_by_logits = model.module.can_generate() and _scores_by_logits(model)
        self.embeds_by_files = _has_modules(model) and not self.scores_by_logits
        self.class_name = type(model.module).__name__
        self._side = TorchSide(self._load_torch_model, self._torch_model_of(model))

    def _torch_model_of(self, loaded: LoadedModel) -> TorchModel:
        from torchax_serve.entrypoints.torch_model import TorchModel

        return TorchModel(loaded, self._leader)

    def _load_torch_model(self) -> TorchModel:
        """Loads the torch module of a stored model; the arrays are those that are there already.

        Raises:
            TorchaxServeError: the files have changed since, or the model was closed.
        """
        self._check_open()
        assert self._stored is not None
        # transformers replaces its module at the end of its import: names cannot be imported from the one that another
        # thread is importing, such as the one that compiles. This waits for it.
        importlib.import_module("transformers")
        found = self._torch_model_of(self._stored.load())
        found.runtimes[0].weights.update(self._stored.weights)
        return found

    @property
    def _loaded(self) -> LoadedModel:
        return self._side.get().loaded

    @property
    def _runtimes(self) -> list[ModelRuntime]:
        return self._side.get().runtimes

    @property
    def _module(self) -> Any:
        return self._side.get().module

    @property
    def _config(self) -> Any:
        return self._side.get().loaded.config

    def __repr__(self) -> str:
        known = vars(self)
        if "dtype_name" not in known:
            return f"<{type(self).__name__}, not loaded>"
        state = f"on {self.device_description}" if self._is_open else "closed"
        return f"<{type(self).__name__} {self.name!r}: {self.model_type}, {self.dtype_name}, {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the weights. Closing twice does nothing; any other call afterwards raises."""
        self._is_open = False
        self._pooling_queue.close("the model was closed")
        if self._leader is not None:
            self._leader.close()
        torch_model, self._side.loaded = self._side.loaded, None
        for held in (torch_model, self._stored):
            if held is not None:
                held.close()

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
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        import torch

        return getattr(torch, self.dtype_name)

    @property
    def device_weights(self) -> Mapping[str, Weight]:
        """The weights on the devices of the first replica, by name."""
        if self._side.loaded is not None:
            return self._runtimes[0].weights
        return {} if self._stored is None else self._stored.weights

    @property
    def runtime(self) -> ModelRuntime:
        """Runtime of the model, or of its first replica."""
        return self._runtimes[0]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer, or None if it came without one."""
        self._check_open()
        return self._side.get().tokenizer

    @property
    def text_tokenizer(self) -> Any:
        """The same for requests of text, which need no more of it than was recorded."""
        self._check_open()
        return self._tokenizer if self._side.loaded is None else self._side.loaded.tokenizer

    @property
    def text_facts(self) -> TextFacts:
        """What requests of text need to know of the model.

        It is read again for each request once code outside may have changed the configuration.
        """
        side = self._side.loaded
        if self._text_facts is None or (side is not None and side.watch.is_held):
            config = self._stored.config if side is None and self._stored is not None else self._config
            self._text_facts = TextFacts.of(self.name, config)
        return self._text_facts

    @property
    def decision_files(self) -> DecisionFiles | None:
        """How the checkpoint's files ask typed questions; None where they do not say it.

        Raises:
            UnsupportedModelError: They ask for what is not supported.
        """
        from torchax_serve.tasks.decisions import HEAD, DecisionFiles

        loaded = None if self._stored is not None else self._loaded_or_raise()
        if loaded is None or not (self.class_name.endswith(HEAD) or has_decision_files(loaded.files_folder)):
            return None
        return loaded.once(DecisionFiles, functools.partial(DecisionFiles, loaded))

    def _processor(self) -> Any:
        """Returns the checkpoint's processor of images or audio; None if it came without one."""
        return None if self._stored is not None else self._loaded_or_raise().processor()

    @property
    def device_description(self) -> str:
        """Kind and number of the devices, such as ``cpu`` or ``TPU v6 lite x 8``."""
        if self._stored is not None:
            return jax.devices()[0].device_kind
        sharding = self._loaded.sharding if self._is_open else None
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
        from torchax_serve.pooling.logit_score import LogitScoreRule, logit_score_rule, score_pairs

        if not self.scores_by_logits:
            return super()._scores_of_pairs(pairs, truncate)
        loaded = self._followed()
        assert loaded.files_folder is not None
        rule = loaded.once(LogitScoreRule, functools.partial(logit_score_rule, loaded.files_folder))
        model = cast("TextModel", self)
        return score_pairs(model, rule, pairs, truncate=truncate, logits_of=self._logits_behind)

    def _logits_behind(self, prompts: Sequence[Sequence[int]], token_id: int) -> np.ndarray:
        """Returns the logit of a token behind each prompt, float32[num_prompts]."""
        import torch

        from torchax_serve.generation.jax_forward import following
        from torchax_serve.pooling.queue import check_wanted

        accepts, found = self.runtime.program.accepts, []
        options = {name: value for name, value in (("logits_to_keep", 1), ("use_cache", False)) if accepts(name)}
        with following(self.runtime), torch.no_grad():
            for prompt in prompts:
                check_wanted()
                logits = self._module(input_ids=torch.tensor([prompt]), **options).logits
                found.append(float(logits[0, -1, token_id]))
        return np.asarray(found, np.float32)

    def _head(self) -> TextHead:
        from torchax_serve.pooling.module_texts import head_of

        return head_of(self._followed(), self._runtimes[0])

    @property
    def _is_closed(self) -> bool:
        return not self._is_open

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
        caches = self._side.get().executables
        if self._executables is not None:
            caches.append(self._executables)
        path = None if folder is None else Path(folder)
        return ProfileSession(caches, self._module, self._runtimes[0].weights, path)

    def export(
        self,
        out: str | os.PathLike[str],
        *,
        platforms: Sequence[str] = ("cpu",),
        engine: EngineOptions | None = None,
        weights: Literal["safetensors", "orbax"] = "safetensors",
        native: bool = True,
        reference: bool = True,
        advance: Callable[[int], object] = lambda number: None,
    ) -> Path:
        """Writes programs, weights and tokenizer as a bundle that runs without torch.

        Returns the version's folder.

        Args:
            out: folder of the bundle, new or with other versions.
            platforms: platforms of the programs: ``cpu``, ``tpu:v6e``, ``cuda:h100``; their devices need not be here.
            engine: sizes of the engine, which its programs have; None: those that the model was served with.
            weights: format of the weights; safetensors are mapped.
            native: let programs for a CPU call the C++ kernels.
            reference: write programs for a CPU without kernels as well, for processors without a compiler.
            advance: called with the number of programs written since the last call.

        Raises:
            UnsupportedModelError: requests of the model need more than a bundle has.
            InvalidArgumentError: options that do not fit the model; a folder with something else in it.
            TorchaxServeError: the disk is full, or a package is missing.
        """
        from torchax_serve.export.writer import ExportRequest, export_model

        if len(self._runtimes) > 1:
            raise UnsupportedModelError(
                "export: expected one replica, got several on the axis data; serve the model without it"
            )
        if self._runtimes[0].lora is not None:
            raise UnsupportedModelError(
                "export: expected a model without adapters of requests, which a bundle has not; serve it without "
                "adapters=, or with adapter= to merge one"
            )
        options = engine or vars(self).get("_engine_options") or EngineOptions()
        request = ExportRequest(
            platforms=platforms, engine=options, weights=weights, native=native, reference=reference, advance=advance
        )
        return export_model(self._followed(), self._runtimes[0], Path(out), request).folder

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
        side = vars(self).get("_side")
        if side is not None and not name.startswith("_") and (side.loaded is None or hasattr(side.loaded.module, name)):
            raise MissingAttributeError(
                f"a {type(self).__name__} has no attribute {name}; the transformers model is its torch_model: "
                f"pass model.torch_model, or read model.torch_model.{name}"
            )
        raise AttributeError(f"a {type(self).__name__} has no attribute {name}")

    def _followed(self) -> LoadedModel:
        """Applies changes on `torch_model`, then returns as `_loaded_or_raise`."""
        loaded = self._loaded_or_raise()
        self._side.get().follow()
        return loaded

    def _loaded_or_raise(self) -> LoadedModel:
        self._check_open()
        return self._loaded

    def _check_open(self) -> None:
        self._process.check("a model")
        if not self._is_open:
            raise TorchaxServeError("expected an open model, this one is closed; call serve() again")


def _scores_by_logits(loaded: LoadedModel) -> bool:
    from torchax_serve.pooling.logit_score import has_logit_score

    with contextlib.suppress(CheckpointError):  # which `embed` raises
        return has_logit_score(loaded.files_folder)
    return False


def _has_modules(loaded: LoadedModel) -> bool:
    with contextlib.suppress(CheckpointError):  # which `embed` raises
        return loaded.files_folder is not None and modules_root(loaded.files_folder) is not None
    return False
