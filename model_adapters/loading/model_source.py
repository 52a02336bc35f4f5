"""The sources of models that a name can mean.

They are the embedded model, a short name, a hub id, a folder and a configuration file.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from model_adapters.errors import InvalidArgumentError, ModelNotFoundError, UnsupportedModelError
from model_adapters.loading.bundle_folder import is_bundle
from model_adapters.loading.file_names import CONFIG
from model_adapters.loading.gguf_names import SUFFIX, gguf_in, split_tag
from model_adapters.loading.hub_cache import snapshot
from model_adapters.loading.short_names import near_matches, short_name

if TYPE_CHECKING:
    from model_adapters.loading.hub_request import HubRequest
    from model_adapters.loading.progress import Progress


EMBEDDED = Path(__file__).parents[2] / "torchax_serve" / "embedded"
"""The folder of the distribution's own small model, an ordinary model folder."""

EMBEDDED_NAME = "the embedded model"
"""The name of the embedded model, as shown to people."""

Kind = Literal["embedded", "hub", "folder", "object", "config", "bundle"]
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
"""Form of a hub id."""
_FORMS = "a short name, a hub id (organisation/name), a folder, a GGUF file, or nothing for the embedded model"


@dataclass(frozen=True)
class ModelSource:
    """The source of a model."""

    kind: Kind
    name: str  # as to be shown to people
    path: Path | None = None  # the folder with its files; of kind "config" the file; of kind "object" None
    hub_id: str | None = None
    revision: str | None = None  # the commit, for kind "hub"
    download_bytes: int = 0  # that were not in the cache
    download_s: float = 0.0
    gguf: Path | None = None  # the GGUF file that is the model; `path` is the folder around it

    @property
    def folder(self) -> Path | None:
        """The folder whose files belong to the model; None if there is none.

        The files are the tokenizer, code and generation configuration.
        """
        return self.path if self.kind in ("embedded", "hub", "folder") and self.gguf is None else None


def resolve(
    name_or_path: str | os.PathLike[str] | None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool | None = None,
    progress: Progress | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    with_weights: bool = True,
    with_code: bool = False,
    allow_pickle: bool = False,
) -> ModelSource:
    """Returns the source of a model; downloads a hub model's files into the hub's cache.

    Args:
        name_or_path: None for the embedded model, a short name of `SHORT_NAMES` (any case), a folder, a JSON file with
            a configuration, or a hub id. What exists as a folder or file is taken as that.
        revision: branch, tag or commit; for models of the hub only.
        token: as huggingface_hub takes it; None for the one it has stored.
        local_files_only: take only what is in the cache; None follows ``HF_HUB_OFFLINE``.
        progress: shown while downloading.
        cache_dir: in place of the hub's own cache.
        with_weights: False leaves the weights where they are.
        with_code: also the Python files of the repository.
        allow_pickle: also weights in pickle files, where there are no others.

    Raises:
        ModelNotFoundError: nothing has that name (near matches are listed), no access, no network.
        InvalidArgumentError: a revision of something that has none.
        CheckpointError: the repository lacks what a model needs.
        UnsupportedModelError: it is a bundle.
    """
    source = parse_name(name_or_path, revision)
    if isinstance(source, ModelSource):
        if source.kind == "bundle":
            raise UnsupportedModelError(
                f"{source.name} is a bundle, which has programs and no PyTorch model: serve it, or name the model that "
                "it was exported from"
            )
        return source
    # What downloads and shows progress is imported where it is needed: names are checked before anything else.
    from model_adapters.loading.hub import fetch
    from model_adapters.loading.hub_request import HubRequest
    from model_adapters.loading.progress import SilentProgress

    hub_id = source
    name = str(name_or_path).strip()
    may_unpickle, tag = allow_pickle and with_weights, split_tag(name)[1]
    request = HubRequest(
        hub_id, revision, token, local_files_only, cache_dir, with_weights, with_code, may_unpickle, tag
    )
    start = time.perf_counter()
    folder, download_bytes = fetch(request, progress or SilentProgress())
    took = time.perf_counter() - start
    if folder.suffix == SUFFIX:
        file, commit = folder, _commit_of(folder)
        return ModelSource("hub", name, file.parent, hub_id, commit, download_bytes, took, gguf=file)
    return ModelSource("hub", name, _model_folder(folder), hub_id, folder.name, download_bytes, took)


def cached_source(name: str, request: HubRequest) -> ModelSource | None:
    """Returns the source of a hub model at the commit that was downloaded last.

    None if that is none, or a GGUF file.

    Imports neither torch nor transformers, and sends no request.

    Args:
        name: Name of the model, to be shown to people.
        request: What would be fetched.
    """
    folder = None if request.gguf is not None else snapshot(request.hub_id, request.revision, request.cache_dir)
    if folder is None:
        return None
    return ModelSource("hub", name, _model_folder(folder), request.hub_id, folder.name)


def _commit_of(file: Path) -> str:
    """Returns the commit of a file in the hub's cache: the folder below ``snapshots``."""
    parts = file.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts else file.parent.name


def _model_folder(folder: Path) -> Path:
    """Returns `folder`, or the subfolder that its ``modules.json`` calls the model.

    The subfolder is returned if `folder` has no ``config.json``.
    """
    from model_adapters.loading.modules_json import transformer_path

    return folder / transformer_path(folder, lambda path: (folder / path / CONFIG).is_file())


def parse_name(name_or_path: str | os.PathLike[str] | None, revision: str | None = None) -> ModelSource | str:
    """Returns the source of a model on this machine, or the hub id of a name.

    Sends no request to the hub. Imports neither torch nor jax nor transformers.

    Raises:
        ModelNotFoundError: no name has that form (near matches are listed).
        InvalidArgumentError: a revision of something that has none.
    """
    source = _local_source(name_or_path)
    if source is None:
        return _hub_id(str(name_or_path))
    if revision is not None:
        raise InvalidArgumentError(
            f"revision={revision!r} was given with {source.name}, which is no model of the hub: leave it out"
        )
    return source


def _local_source(name_or_path: str | os.PathLike[str] | None) -> ModelSource | None:
    """Returns the source of a model on this machine; None if the hub has to be asked."""
    if name_or_path is None:
        if not (EMBEDDED / CONFIG).is_file():
            raise ModelNotFoundError(
                f"this installation lacks its embedded model (in {EMBEDDED}): install it again, or name a model"
            )
        return ModelSource("embedded", EMBEDDED_NAME, EMBEDDED)
    if hasattr(name_or_path, "torch_model"):
        raise InvalidArgumentError("the model is served already; use it as it is, or close it and serve it anew")
    if hasattr(name_or_path, "get_base_model"):
        raise InvalidArgumentError(
            f"the model is a {type(name_or_path).__name__} with prompts that it has learned, which are no part of the "
            "model inside: call to_jax(model).generate, or pass model.get_base_model(), which is without them"
        )
    if not isinstance(name_or_path, str | os.PathLike):
        raise InvalidArgumentError(f"the model is a {type(name_or_path).__name__}, expected {_FORMS}")
    text = os.fspath(name_or_path)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise InvalidArgumentError(f"the model's name is {text!r}, expected {_FORMS}")
    if isinstance(name_or_path, str) and short_name(text) is not None and not (Path(text) / CONFIG).is_file():
        return None
    path = Path(text).expanduser()
    try:
        if path.is_dir():
            if is_bundle(path):
                return ModelSource("bundle", text, path)
            if (found := gguf_in(path)) is not None:
                return ModelSource("folder", text, path, gguf=found)
            return ModelSource("folder", text, _model_folder(path))
        if path.is_file():
            if path.suffix == SUFFIX:
                return ModelSource("folder", text, path.parent, gguf=path)
            if path.suffix != ".json":
                raise ModelNotFoundError(
                    f"{text} is a file, expected the folder around it, a .gguf file, or a .json configuration for "
                    "random weights"
                )
            return ModelSource("config", text, path)
    except OSError as error:  # such as a name too long for a file
        raise ModelNotFoundError(f"{text[:80]!r} leads to no model ({error.strerror}): expected {_FORMS}") from error
    if not isinstance(name_or_path, str) or text.startswith((".", "~", os.sep)) or text.count("/") > 1 or "\\" in text:
        raise ModelNotFoundError(f"there is no folder {text}: expected {_FORMS}")
    return None


def _hub_id(name: str) -> str:
    entry = short_name(name)
    if entry is not None:
        return entry.hub_id
    hub_id, _ = split_tag(name)
    if HUB_ID.fullmatch(hub_id.strip()):
        return hub_id.strip()
    near = near_matches(name)
    hint = f"did you mean {', '.join(near)}? Expected" if near else "expected"
    raise ModelNotFoundError(f"no model is called {name!r}: {hint} {_FORMS}")


def bundle_folder(name_or_path: object) -> Path | None:
    """Returns the folder of a bundle; None for anything else."""
    if not isinstance(name_or_path, str | os.PathLike):
        return None
    path = Path(os.fspath(name_or_path)).expanduser()
    return path if path.is_dir() and is_bundle(path) else None


def public_name(model: str | None) -> str:
    """Returns the name that requests use for a model.

    Of a folder it is the last part, so that no path is shown.

    Args:
        model: What it is loaded by, or the name of its source; None or empty: the embedded model.
    """
    if not model or model == EMBEDDED_NAME:
        return "embedded"
    return os.path.basename(os.path.abspath(model)) if os.path.isdir(model) else model


def of_object(name: str) -> ModelSource:
    """Returns the source of a model that the caller has loaded."""
    return ModelSource("object", name or "a model in memory")
