"""Downloads of the files that a model needs from the Hugging Face Hub into its cache.

Errors say in one line why a download failed. The hub's listing of a repository is requested once, and the files that
are needed are downloaded concurrently, each by the hub's own client at the listed commit, which resumes an interrupted
download. This is what `huggingface_hub.snapshot_download` does, but for its second listing, which not all mirrors and
compatible servers support.
"""

from __future__ import annotations

import fnmatch
import logging
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import ModelInfo, constants, errors
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from model_adapters.errors import CheckpointError, IsPipelineError
from model_adapters.loading import checkpoint
from model_adapters.loading.file_names import CONFIG, MODULES, PIPELINE_INDEX, inside
from model_adapters.loading.gguf_names import is_gguf_only, language_models, pick
from model_adapters.loading.hub_request import HubRequest, hub_errors, is_unreachable
from model_adapters.loading.model_class import read_config_json
from model_adapters.loading.modules_json import read_modules, transformer_path
from model_adapters.loading.progress import Advance, Progress, hub_bar_class

logger = logging.getLogger("torchax_serve")

NUM_CONNECTIONS = 8

# in addition to the weights: configurations, vocabularies in their various formats, chat templates
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "additional_chat_templates/*.jinja")
_CODE_FILES = ("*.py", "custom_generate/*.py", "custom_generate/requirements.txt")


def fetch(request: HubRequest, progress: Progress) -> tuple[Path, int]:
    """Returns the cached folder with a model's files, and the number of downloaded bytes.

    For a repository of GGUF files the path is that of one file instead. Without a network a complete cached copy is
    used.

    Raises:
        ModelNotFoundError: no such repository or revision, no access, no network and no cached copy.
        CheckpointError: no ``config.json``, pickle files only, an index without its files, a cache that cannot be
            written or lacks files.
    """
    with hub_errors(request):
        info = None if request.offline else _info(request, request.revision)
        if info is None:
            return _cached(request), 0
        listed = {each.rfilename for each in info.siblings or []}
        if request.gguf is not None or is_gguf_only(listed):
            return _gguf(request, info, progress)
        if PIPELINE_INDEX in listed and CONFIG not in listed:
            raise IsPipelineError(
                f"model: expected one of transformers, got {request.hub_id}, a pipeline of diffusers; use "
                "torchax-serve draw, or serve() in Python"
            )
        # by the revision's name, so that the cache knows where it leads to
        first = hub_file(request, CONFIG if CONFIG in listed or MODULES not in listed else MODULES, request.revision)
        folder = first.parent
        if info.sha != folder.name:  # the branch has moved between the two calls
            info = _info(request, folder.name) or info
        files = {each.rfilename: each.size or 0 for each in info.siblings or []}
        names = dict.fromkeys(_names(request, folder, files))
        missing = {name: files[name] for name in names if not (folder / name).exists()}
        if missing:
            with progress.stage(f"downloading {request.hub_id}", sum(missing.values())) as advance:
                download(request, list(missing), folder.name, advance)
        return folder, sum(missing.values())


def _gguf(request: HubRequest, info: ModelInfo, progress: Progress) -> tuple[Path, int]:
    """Returns the GGUF file that is asked for, and the bytes that had to be downloaded for it."""
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or []}
    name = pick(sizes, request.gguf, request.hub_id, _HOW)
    commit = info.sha or request.revision or "main"
    try:
        return hub_file(request, name, commit, local=True), 0
    except errors.LocalEntryNotFoundError:
        pass
    if request.gguf is None:
        logger.warning("%s: %s is taken, one of %d GGUF files", request.hub_id, name, len(language_models(sizes)))
    with progress.stage(f"downloading {request.hub_id}", sizes[name]) as advance:
        download(request, [name], request.revision, advance)  # by its name, so that the cache knows where it leads to
    return hub_file(request, name, request.revision, local=True), sizes[name]


_HOW = "name one behind a colon, organisation/name:Q4_K_M"


def _cached_gguf(request: HubRequest) -> Path | None:
    """Returns a GGUF file of the cached copy; None without a copy.

    Also None if the request names no GGUF file and the copy does not consist of GGUF files alone.
    """
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                request.hub_id,
                revision=request.revision,
                cache_dir=None if request.cache_dir is None else Path(request.cache_dir),
                local_files_only=True,
            )
        )
    except errors.LocalEntryNotFoundError:
        return None
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    if request.gguf is None and not is_gguf_only(names):
        return None
    return folder / pick(names, request.gguf, f"the cached copy of {request.hub_id}", _HOW)


def download(request: HubRequest, names: list[str], commit: str | None, advance: Advance) -> None:
    """Downloads files concurrently; the first error, or Ctrl-C, stops all of them."""
    lock, stopped = threading.Lock(), threading.Event()

    def counted(amount: int) -> None:
        if stopped.is_set():
            raise _StoppedError
        with lock:
            advance(amount)

    bar = hub_bar_class(counted)
    with ThreadPoolExecutor(NUM_CONNECTIONS, thread_name_prefix="download") as pool:
        tasks = [pool.submit(hub_file, request, name, commit, bar) for name in names]
        try:
            for task in as_completed(tasks):
                task.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


class _StoppedError(Exception):
    """Ends a download whose result is no longer needed."""


def _cached(request: HubRequest) -> Path:
    """Returns the folder of a cached copy.

    Raises LocalEntryNotFoundError without a copy, CheckpointError if it has no weights.
    """
    if (file := _cached_gguf(request)) is not None:
        return file
    try:
        folder = hub_file(request, CONFIG, request.revision, local=True).parent
    except errors.LocalEntryNotFoundError:
        folder = hub_file(request, MODULES, request.revision, local=True).parent
    model = folder / transformer_path(folder, lambda path: (folder / path / CONFIG).is_file())
    if request.with_weights:
        config = read_config_json(model / CONFIG)
        try:
            checkpoint.weight_files(
                model, explicit=config.get("transformers_weights"), extra=(), allow_pickle=request.allow_pickle
            )
        except CheckpointError as error:
            raise CheckpointError(
                f"the cached copy of {request.hub_id} is incomplete, and the network is switched off or away "
                f"({error}): run once with the network"
            ) from error
    return folder


def _info(request: HubRequest, revision: str | None) -> ModelInfo | None:
    """Returns the hub's description of the repository; None if a cached copy is used.

    The cached copy is used if the hub does not answer. This request is the first because it fails at once: a
    download without a network is tried again for half a minute.
    """
    try:
        return huggingface_hub.HfApi(token=request.token).model_info(
            request.hub_id, revision=revision, files_metadata=True, timeout=constants.DEFAULT_ETAG_TIMEOUT
        )
    except Exception as error:
        if not is_unreachable(error):
            raise
        if _cached_gguf(request) is not None:
            return None
        try:
            hub_file(request, CONFIG, revision, local=True)
        except errors.LocalEntryNotFoundError:
            try:
                hub_file(request, MODULES, revision, local=True)
            except errors.LocalEntryNotFoundError:
                raise error from None
        return None


def hub_file(
    request: HubRequest, name: str, revision: str | None, bar: type | None = None, *, local: bool = False
) -> Path:
    """Returns a file of the cached copy, which is downloaded unless it is there or `local`."""
    return Path(
        huggingface_hub.hf_hub_download(
            request.hub_id,
            name,
            revision=revision,
            token=request.token,
            cache_dir=None if request.cache_dir is None else Path(request.cache_dir),
            local_files_only=local,
            tqdm_class=bar or hub_bar_class(lambda amount: None),
        )
    )


def _names(request: HubRequest, folder: Path, files: dict[str, int]) -> list[str]:
    """Returns the names of those files of a repository that are needed.

    `folder` is the cached copy of the repository.
    """
    commit = folder.name
    if MODULES in files:
        hub_file(request, MODULES, commit)
    model = transformer_path(folder, lambda path: _joined(path, CONFIG) in files)
    config = hub_file(request, _joined(model, CONFIG), commit)
    names = [name for name in files if is_small(name, "", request) or is_small(name, model, request)]
    if request.with_weights:
        names += _weight_names(request, files, config, model)
    for module in read_modules(folder / MODULES) if MODULES in files else []:
        if module.path != model:
            names += _of_module(request, files, module.path)
    return names


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def is_small(name: str, folder: str, request: HubRequest) -> bool:
    """Tells whether a file belongs to a model in `folder` and has none of its weights."""
    start = _joined(folder, "")
    if not name.startswith(start):
        return False
    rest = name[len(start) :]
    if "/" not in rest and rest.endswith(".index.json"):
        return False  # an index comes with the weights it names
    patterns = _SMALL_FILES + (_CODE_FILES if request.with_code else ())
    return any(fnmatch.fnmatchcase(rest, pattern) and rest.count("/") == pattern.count("/") for pattern in patterns)


def _of_module(request: HubRequest, files: dict[str, int], folder: str) -> list[str]:
    """Returns the files of a module that follows the model.

    Examples are pooling and a layer with its own weights.
    """
    names = [name for name in files if is_small(name, folder, request)] if folder else []
    safe, pickled = _joined(folder, checkpoint.SAFE_FILE), _joined(folder, checkpoint.PICKLE_FILE)
    if not folder or not request.with_weights:
        return names
    if safe in files:
        return [*names, safe]
    return [*names, pickled] if pickled in files and request.allow_pickle else names


def _weight_names(request: HubRequest, files: dict[str, int], config: Path, model: str) -> list[str]:
    """Returns the weight files of one format.

    The format is safetensors if there are such files; pickle files are used only if allowed.
    """
    explicit = read_config_json(config).get("transformers_weights")
    candidates = [inside(explicit, config)] if explicit else [checkpoint.SAFE_FILE, checkpoint.SAFE_INDEX]
    pickles = [checkpoint.PICKLE_FILE, checkpoint.PICKLE_INDEX]
    if request.allow_pickle and not explicit:
        candidates += pickles
    found = next((name for name in candidates if _joined(model, name) in files), None)
    if found is None and any(_joined(model, name) in files for name in pickles):
        raise checkpoint.pickle_only(request.hub_id)
    if found is None:
        there = ", ".join(sorted(name for name in files if "/" not in name)[:12])
        raise CheckpointError(f"{request.hub_id} holds no weights: expected {' or '.join(candidates)}, found {there}")
    names = [_joined(model, found)]
    if found.endswith(".index.json"):
        index = hub_file(request, names[0], _commit_of(config, model))
        names += [_joined(model, name) for name in checkpoint.shard_names(index)]
        lost = [name for name in names if name not in files]
        if lost:
            raise CheckpointError(f"{request.hub_id} lacks {', '.join(lost[:3])}, which {found} names: ask its owner")
    # few architectures have some of their weights in further files, which are small
    return names + [name for extra in _extra_names(config) if (name := _joined(model, extra)) in files]


def _commit_of(config: Path, model: str) -> str:
    """Returns the name of the cached copy's folder, which is the commit."""
    return config.parents[len(Path(model).parts)].name


def _extra_names(config: Path) -> tuple[str, ...]:
    model_type: Any = read_config_json(config).get("model_type")
    return getattr(CONFIG_MAPPING[model_type], "extra_files", ()) if model_type in CONFIG_MAPPING else ()
