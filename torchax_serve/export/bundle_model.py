"""`BundleModel`: a served model from a bundle, which needs neither torch nor transformers."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from model_adapters.errors import InvalidArgumentError, TorchaxServeError, UnsupportedModelError
from model_adapters.loading.bundle_folder import version_folder
from model_adapters.ops.cpu import build, ffi
from torchax_serve.compilation.executable_cache import ExecutableCache
from torchax_serve.compilation.xla_cache import enable_compile_cache, programs_dir
from torchax_serve.engine.options import EngineOptions
from torchax_serve.entrypoints.served_model import ServedModel
from torchax_serve.export.layout import GENERATION_CONFIG, MODULE, TEMPLATE, TEXTS, TOKENIZER, TOOLS_TEMPLATE
from torchax_serve.export.manifest import Manifest, check_files, read_manifest, require_flatbuffers
from torchax_serve.export.mesh import BundleSharding
from torchax_serve.export.programs import ExportedPrograms
from torchax_serve.export.weights import read_weights
from torchax_serve.sampling_params import MAX_LOGPROBS
from torchax_serve.start.model_record import ModelRecord
from torchax_serve.start.recorded_objects import RecordedConfig, TokenizerRecord
from torchax_serve.start.stored_model import StoredModel, StoredReplica
from torchax_serve.start.weights_file import TensorNames

if TYPE_CHECKING:
    from torchax_serve.export.bundle_encoder import BundleEncoder
    from torchax_serve.export.bundle_module import BundleModule

logger = logging.getLogger("torchax_serve")

_POLICIES = (
    "enable_prefix_caching",
    "kv_offloading_bytes",
    "max_num_waiting",
    "max_num_waiting_tokens",
    "max_decode_slowdown",
    "tpot_target_ms",
    "ttft_target_ms",
)
"""Options of the engine that no program depends on, but for the states of prefixes of recurrent layers."""


class BundleModel(ServedModel):
    """A `ServedModel` for requests of text, without the PyTorch model.

    Attributes:
        manifest: The manifest of the bundle.

    Args:
        manifest: The manifest of the bundle.
        stored: What the model is made of.
        engine_options: Options of the engine.
    """

    embeds = False

    _stored: StoredModel

    def __init__(self, manifest: Manifest, stored: StoredModel, engine_options: EngineOptions) -> None:
        self.manifest = manifest
        super().__init__(stored, engine_options)

    @property
    def config(self) -> RecordedConfig:
        """What was recorded of the configuration."""
        return self._stored.config

    @property
    def generation_config(self) -> Any:
        """What was recorded of the generation config."""
        return self._stored.generation_values

    @property
    def tokenizer(self) -> Any:
        """What was recorded of the tokenizer."""
        return self.text_tokenizer

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a model of a bundle has no attribute {name}, as it has no PyTorch model; serve the model itself for that"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises UnsupportedModelError: a bundle has no forward with torch tensors."""
        raise UnsupportedModelError(
            f"{self.name}: expected chat, stream, generate_batch or iter_tokens of a bundle, got a call of forward, "
            "which needs the PyTorch model; serve the model itself"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedModelError("a BundleModel holds devices and threads and cannot be copied or pickled")


def load_bundle(
    folder: Path,
    engine: EngineOptions | None = None,
    *,
    version: int | None = None,
    name: str | None = None,
    num_replicas: int = 1,
) -> BundleModel | BundleEncoder | BundleModule:
    """Loads a model from a bundle; imports neither torch nor transformers.

    Returns a `BundleEncoder` if the model writes no text, and a `BundleModule` of a module of another library.

    Args:
        folder: The bundle, or the folder of one of its versions.
        engine: Options of the engine; sizes are those of the bundle.
        version: Number of the version; None: the highest.
        name: Name of the model; None: the folder.
        num_replicas: Number of replicas, each on devices of its own.

    Raises:
        CheckpointError: the bundle is damaged, incomplete, or of a newer format.
        UnsupportedModelError: it has no programs for this device.
        InvalidArgumentError: an option of the engine that its programs do not have.
    """
    require_flatbuffers()
    enable_compile_cache()
    manifest = read_manifest(version_folder(folder, version))
    variants = _variants_here(manifest)
    check_files(manifest)
    variant = _chosen(manifest, variants)
    called = str(folder) if name is None else name
    if num_replicas > 1 and not {TEXTS, MODULE}.isdisjoint(manifest.content):
        raise InvalidArgumentError(
            f"mesh: expected one replica of a bundle that writes no text, got data {num_replicas}; start a server for "
            "each"
        )
    if MODULE in manifest.content:
        from torchax_serve.export.bundle_module import BundleModule

        if engine is not None:
            raise InvalidArgumentError("engine: expected None for a bundle of a module, which has none; leave it out")
        return BundleModule(manifest, variant, called)
    if TEXTS in manifest.content:
        from torchax_serve.export.bundle_encoder import load_encoder

        return load_encoder(manifest, variant, engine, called)
    options = _engine_options(manifest, variant, engine)
    return BundleModel(manifest, _stored(manifest, variant, called, num_replicas), options)


def _stored(manifest: Manifest, variant: Mapping[str, Any], name: str, num_replicas: int) -> StoredModel:
    """Returns what a model that writes text is made of, its weights on the devices."""
    shardings = [BundleSharding.of(manifest["mesh"], replica) for replica in range(num_replicas)]
    sharding = shardings[0] if num_replicas > 1 or manifest["mesh"] is not None else None
    weights, names, content = read_weights(manifest, sharding)
    exported = ExportedPrograms(manifest, variant, names)
    replicas = tuple(
        StoredReplica(read_weights(manifest, each)[0], ExecutableCache(mesh=each.mesh, exported=exported), each)
        for each in shardings[1:]
    )

    def load() -> NoReturn:
        raise UnsupportedModelError(
            f"{name}: expected a request for the engine, got one that needs the PyTorch model (beam search, guidance, "
            "images, a tokenizer's other methods), which a bundle has not; serve the model itself"
        )

    return StoredModel(
        name=name,
        record=_record(manifest, names),
        weights=weights,
        content=content,
        load=load,
        executables=_executables(exported, sharding),
        sharding=sharding,
        replicas=replicas,
    )


def _executables(
    exported: ExportedPrograms, sharding: BundleSharding | None
) -> Callable[[Callable[[], object]], ExecutableCache]:
    mesh = None if sharding is None else sharding.mesh
    return lambda load_first: ExecutableCache(programs_dir(), exported.identity, mesh, exported=exported)


def _variants_here(manifest: Manifest) -> list[Mapping[str, Any]]:
    """Returns the programs for the platform of this process, those with kernels first.

    Raises:
        UnsupportedModelError: there are none.
    """
    device = jax.local_devices()[0]
    platform = {"gpu": "cuda"}.get(device.platform, device.platform)
    found = [each for each in manifest["variants"].values() if each["platform"] == platform]
    found = [each for each in found if each["chip"] is None or _is_chip(each["chip"], device.device_kind)]
    if not found:
        listed = ", ".join(manifest["variants"])
        raise UnsupportedModelError(
            f"{manifest.folder}: expected a device out of {listed}, for which the bundle has programs, got "
            f"{device.device_kind} ({platform}); export the model for it: --platform {platform}"
        )
    return sorted(found, key=lambda each: not each["uses_kernels"])


def _is_chip(chip: str, device_kind: str) -> bool:
    """Returns whether JAX's name of a device, such as ``TPU v6 lite``, is of a chip."""
    kind = device_kind.lower().replace(" lite", "e").replace(" ", "")
    return chip in ("tpuv5p" if kind == "tpuv5" else kind)


def _chosen(manifest: Manifest, variants: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the programs to be run, with their kernels loaded.

    Raises:
        UnsupportedModelError: they need kernels that cannot be built here.
    """
    best = variants[0]
    if best["platform"] != "cpu" or not best["uses_kernels"]:
        return best
    library = manifest["native"]["libraries"].get(build.machine_key())
    ffi.load_from(manifest.folder / "native", None if library is None else manifest.folder / library)
    if (reason := ffi.missing()) is None:
        return best
    if len(variants) == 1:
        raise UnsupportedModelError(
            f"{manifest.folder}: expected C++ kernels for this processor, and there are none: {reason}; install a "
            "compiler, or export the bundle with programs without kernels"
        )
    return variants[1]


def _engine_options(manifest: Manifest, variant: Mapping[str, Any], asked: EngineOptions | None) -> EngineOptions:
    """Returns the options of the engine: sizes of the bundle, policies of the caller.

    Raises:
        InvalidArgumentError: another size than the bundle's.
    """
    sizes = {**manifest["engine"], "kv_cache_memory_bytes": variant["kv_cache_memory_bytes"]}
    policies: tuple[str, ...] = _POLICIES
    if asked is not None and 0 <= asked.max_logprobs <= MAX_LOGPROBS:  # programs return as many for all of these
        policies += ("max_logprobs",)
    elif asked is not None:
        raise InvalidArgumentError(
            f"max_logprobs: expected 0 to {MAX_LOGPROBS} for a bundle, whose programs return so many, got "
            f"{asked.max_logprobs}; lower it"
        )
    if (states := variant.get("states")) is not None:  # of which there are as many as are kept of prefixes
        sizes["enable_prefix_caching"] = states["enable_prefix_caching"]
        policies = tuple(name for name in policies if name not in sizes)
    if asked is None:
        return EngineOptions(**sizes)
    default = EngineOptions()
    for field in dataclasses.fields(EngineOptions):
        value = getattr(asked, field.name)
        if field.name in policies or value in (getattr(default, field.name), sizes.get(field.name)):
            continue
        raise InvalidArgumentError(
            f"{field.name}: expected {sizes.get(field.name)}, as the bundle was exported with, got {value}; leave it "
            "out, or export the model with that"
        )
    return EngineOptions(**sizes, **{name: getattr(asked, name) for name in policies})


def _record(manifest: Manifest, names: TensorNames) -> ModelRecord:
    model = manifest["model"]
    return ModelRecord(
        weights=names,
        tokenizer=_tokenizer(manifest),
        config=model["config"],
        config_absent=tuple(model["config_absent"]),
        generation_config=json.loads(manifest.read_bytes(GENERATION_CONFIG)),
        generation_defaults=model["generation_defaults"],
        sampling_rules=model["sampling_rules"],
        limits=model["limits"],
        quantization=model["quantization"],
        requantized=model["requantized"],
        described=(model["class"], model["model_type"], model["dtype"]),
    )


def _tokenizer(manifest: Manifest) -> TokenizerRecord | None:
    described = manifest["tokenizer"]
    if described is None:
        return None
    texts = {
        name: manifest.read_bytes(name).decode() if name in manifest["files"] else None
        for name in (TOKENIZER, TEMPLATE, TOOLS_TEMPLATE)
    }
    backend = texts[TOKENIZER]
    if backend is None:
        raise TorchaxServeError(f"{manifest.folder}: expected {TOKENIZER} in the bundle, got none; export it again")
    return TokenizerRecord(
        backend,
        texts[TEMPLATE],
        texts[TOOLS_TEMPLATE] or texts[TEMPLATE],
        described["special_tokens_map"],
        described["response_template"],
    )
