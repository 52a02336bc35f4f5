"""`BundleEncoder`: embeds, labels and ranks texts by a bundle, without torch."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, Self

import jax
import numpy as np

from model_adapters.device_arrays import to_device
from model_adapters.errors import InvalidArgumentError, TorchaxServeError, UnsupportedModelError
from model_adapters.ops.compressed_weight import Weight
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache
from torchax_serve.compilation.xla_cache import programs_dir
from torchax_serve.engine.options import EngineOptions
from torchax_serve.entrypoints.retrieval_methods import RetrievesTexts
from torchax_serve.entrypoints.text_methods import LabelsTexts
from torchax_serve.export.layout import POOLING_WEIGHT, TEXT_SIZES, TEXTS, TOKENIZER
from torchax_serve.export.manifest import Manifest
from torchax_serve.export.programs import ExportedPrograms
from torchax_serve.export.text_encoder import BundleTextEncoder
from torchax_serve.export.weights import read_weights
from torchax_serve.pooling.classification import TextHead
from torchax_serve.pooling.embedding import CHOICES, Embedder
from torchax_serve.pooling.layers import ANY_POOLING, Layer
from torchax_serve.pooling.queue import PoolingQueue
from torchax_serve.pooling.text_program import TextProgram
from torchax_serve.pooling.text_rule import TextRule
from torchax_serve.start.recorded_objects import RecordedConfig, RecordedTokenizer, TokenizerRecord
from torchax_serve.start.stored_model import stored_report
from torchax_serve.start.torch_side import TorchSide
from torchax_serve.validation.owner_process import OwnerProcess


class BundleTexts(TextProgram):
    """Forwards of a bundle.

    Args:
        described: What the manifest says about texts.
        weights: Weights by name.
        programs: The programs.
    """

    can_pad = True

    def __init__(self, described: Mapping[str, Any], weights: Mapping[str, Weight], programs: ExportedPrograms) -> None:
        self._described, self._weights = described, weights
        self.max_rows = described["max_rows"]
        self.pools = ExecutableCache(programs_dir(), programs.identity)
        executables = ExecutableCache(programs_dir(), programs.identity, exported=programs)
        self._forward = CachedFunction(executables, TEXTS, _not_traced)

    @property
    def class_name(self) -> str:
        """Class of the module that was exported."""
        return str(self._described["class"])

    @property
    def vocab_size(self) -> int:
        """Token ids are below."""
        return int(self._described["vocab_size"])

    @property
    def max_positions(self) -> int | None:
        """Most tokens of a row."""
        found: int | None = self._described["max_positions"]
        return found

    @property
    def num_programs(self) -> int:
        """Programs of forwards in memory."""
        return self._forward.num_programs

    def accepts(self, name: str) -> bool:
        """Returns whether the forward has an argument of this name."""
        return name in self._described["arguments"]

    def forward(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Runs a forward."""
        given = {name: to_device(array, np.int32) for name, array in arrays.items()}
        return {self._described["field"]: self._forward(self._weights, given, spec=None)[0]}

    def compile(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Compiles a forward; returns the shapes of its output."""
        program = self._forward.compiled(self._weights, dict(arrays), spec=None)
        return {self._described["field"]: program.out_info[0]}


def _not_traced(weights: Any, arrays: Any, spec: Any) -> NoReturn:
    raise AssertionError("programs of a bundle were traced before")


class BundleEncoder(LabelsTexts, RetrievesTexts):
    """An `EncoderModel` without the PyTorch model. A context manager that frees the weights.

    Attributes:
        name: Name of the bundle.
        manifest: The manifest of the bundle.
        class_name: Class of the model that was exported.
        dtype_name: Name of the weights' dtype.
        config: Of the model: its type, number of labels and sizes.
        max_len: Most tokens of a text.
        load_report: What the export said about the weights.
        device_weights: The weights on the device, by name.
        writes_text, transcribes, embeds, embeds_by_files, adapters, running_engines: As of an `EncoderModel`.
    """

    writes_text, transcribes, embeds = False, False, True
    adapters: Mapping[str, str] = MappingProxyType({})
    running_engines: Sequence[Any] = ()
    has_stored_programs = True

    def __init__(self, manifest: Manifest, variant: Mapping[str, Any], name: str) -> None:
        self.name, self.manifest = name, manifest
        texts, model = manifest[TEXTS], manifest["model"]
        self._texts, self._process, self._is_open = texts, OwnerProcess(), True
        self._pooling_queue = PoolingQueue()
        self.device_weights, names, self._content = read_weights(manifest)
        self._program = BundleTexts(texts, self.device_weights, ExportedPrograms(manifest, variant, names))
        self.class_name, self.model_type = model["class"], model["model_type"]
        self.dtype_name = model["dtype"]
        self.max_len: int = texts["max_len"]
        self.embeds_by_files = texts["embedding"] is not None
        self._side = TorchSide(self._no_torch_side)
        self.config = RecordedConfig(model["config"])
        self.load_report = stored_report(self.device_weights, model["quantization"], model["requantized"])
        self._described = manifest["tokenizer"]
        self._record = None
        if self._described is not None:
            backend = manifest.read_bytes(TOKENIZER).decode()
            self._record = TokenizerRecord(backend, None, None, self._described["special_tokens_map"])
        self._encoders = {lower: self._encoder(lower_case=lower) for lower in {False, self._rule().lower_case}}
        self._embedders: dict[bool, Embedder] = {}
        self._lock = threading.Lock()

    def _no_torch_side(self) -> NoReturn:
        raise UnsupportedModelError(
            f"{self.name}: expected what a bundle of an encoder has, got a request that needs the PyTorch model; "
            "serve the model itself"
        )

    def __repr__(self) -> str:
        state = f"on {self.device_description}" if self._is_open else "closed"
        return f"<BundleEncoder {self.name!r}: {self.model_type}, {self.dtype_name}, {state}>"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises UnsupportedModelError: a bundle has no forward with torch tensors."""
        self._no_torch_side()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedModelError("a BundleEncoder holds devices and threads and cannot be copied or pickled")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the weights. Closing twice does nothing."""
        if self._process.is_current:
            self._is_open = False
            self._pooling_queue.close("the model was closed")
            self.device_weights.clear()

    @property
    def device_description(self) -> str:
        """Kind of the device, such as ``cpu``."""
        return str(jax.devices()[0].device_kind)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; None if the model came without one."""
        self._followed()
        if self._record is None:
            return None
        backend: Future[Any] = Future()
        backend.set_result(self._record.tokenizer())
        return RecordedTokenizer(self._side, self._record, backend)

    text_tokenizer = tokenizer

    def stats(self) -> None:
        """Returns None: there is no engine."""

    def _processor(self) -> None:
        """Returns None: a bundle takes text alone."""

    @property
    def _is_closed(self) -> bool:
        return not self._is_open

    def _followed(self) -> Manifest:
        self._process.check("a model")
        if not self._is_open:
            raise TorchaxServeError("expected an open model, this one is closed; call serve() again")
        return self.manifest

    def _rule(self) -> TextRule:
        described = self._texts["embedding"]
        return TextRule() if described is None else TextRule(**described["rule"])

    def _encoder(self, *, lower_case: bool) -> BundleTextEncoder:
        return BundleTextEncoder(self._record, self._described, self.name, lower_case=lower_case)

    def _embedder(self, *, chooses: bool) -> Embedder:
        self._followed()
        if self._texts["head"] is not None:
            raise UnsupportedModelError(
                f"embed: expected a bundle of a model without a head, got one of {self.class_name}, whose programs "
                "return labels; serve the model itself"
            )
        if not chooses and self._texts["embedding"] is None:
            raise InvalidArgumentError(
                f"embed: {self.name} was exported without a modules.json that says how tokens become one embedding; "
                f"pass pooling, one of {CHOICES}"
            )
        with self._lock:
            if chooses not in self._embedders:
                self._embedders[chooses] = self._made(chooses=chooses)
            return self._embedders[chooses]

    def _made(self, *, chooses: bool) -> Embedder:
        rule = TextRule() if chooses else self._rule()
        layers: tuple[Layer, ...] = (ANY_POOLING,)
        weights: Any = ({},)
        if not chooses:
            described = self._texts["embedding"]
            layers = tuple(Layer(**{**each, "poolings": tuple(each["poolings"])}) for each in described["layers"])
            weights = tuple(
                {name: self.device_weights[POOLING_WEIGHT.format(number, name)] for name in names}
                for number, names in enumerate(described["weights"])
            )
        encoder = self._encoders[rule.lower_case]
        return Embedder(self.name, self._program, layers, weights, rule, encoder, self._texts["pad_id"], self.max_len)

    def _head(self) -> TextHead:
        self._followed()
        head: Mapping[str, Any] = self._texts["head"] or {}
        return TextHead(
            name=self.name,
            class_name=self.class_name,
            program=self._program,
            tokenizer=self._encoders[False],
            pad_id=self._texts["pad_id"],
            max_len=self.max_len,
            labels={int(index): label for index, label in head.get("labels", {}).items()},
            problem_type=head.get("problem_type"),
            pair_activation=head.get("pair_activation", "Sigmoid"),
            lack=head.get("lack", ""),
        )


def load_encoder(
    manifest: Manifest, variant: Mapping[str, Any], engine: EngineOptions | None, name: str
) -> BundleEncoder:
    """Loads a model that reads texts from a bundle whose files were checked.

    Args:
        manifest: The manifest of the bundle.
        variant: The part of it about the programs for this device.
        engine: Options of the caller; an encoder has no engine.
        name: Name of the model.

    Raises:
        InvalidArgumentError: other sizes than those of the bundle.
    """
    default = EngineOptions()
    for size in TEXT_SIZES if engine is not None else ():
        value, own = getattr(engine, size), manifest["engine"][size]
        if value not in (getattr(default, size), own):
            raise InvalidArgumentError(
                f"{size}: expected {own}, as the bundle was exported with, got {value}; leave it out, or export the "
                "model with that"
            )
    return BundleEncoder(manifest, variant, name)
