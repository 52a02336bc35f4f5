"""Downloads of pipelines of diffusers from the Hugging Face Hub into its cache."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants

from model_adapters.errors import CheckpointError
from model_adapters.loading.checkpoint import pickle_only
from model_adapters.loading.file_names import PIPELINE_INDEX
from model_adapters.loading.hub import download, hub_file, is_small
from model_adapters.loading.hub_cache import snapshot
from model_adapters.loading.hub_request import HubRequest, hub_errors, is_unreachable
from model_adapters.loading.progress import Progress

_SAFE = re.compile(r"[^.]+\.safetensors")
"""Name of a file of weights without a variant, such as fp16."""
_PICKLED = re.compile(r"[^.]+\.bin")


def fetch_pipeline(request: HubRequest, progress: Progress) -> Path:
    """Returns the cached folder of a pipeline.

    Downloads what it lacks: the weights of its models as safetensors.

    Without a network the cached copy is used.

    Raises:
        ModelNotFoundError: no such repository or revision, no access, no network and no cached copy.
        CheckpointError: no pipeline, or pickle files only.
    """
    cached = snapshot(request.hub_id, request.revision, request.cache_dir)
    with hub_errors(request):
        try:
            if request.offline and cached is not None:
                return _checked(cached, request)
            info = huggingface_hub.HfApi(token=request.token).model_info(
                request.hub_id,
                revision=request.revision,
                files_metadata=True,
                timeout=constants.DEFAULT_ETAG_TIMEOUT,
            )
        except Exception as error:
            if cached is None or not is_unreachable(error):
                raise
            return _checked(cached, request)
        sizes = {each.rfilename: each.size or 0 for each in info.siblings or []}
        if PIPELINE_INDEX not in sizes:
            raise _no_pipeline(request)
        # by the revision's name, so that the cache knows where it leads to
        index = hub_file(request, PIPELINE_INDEX, request.revision)
        missing = [name for name in _names(request, index, sizes) if not (index.parent / name).exists()]
        if missing:
            with progress.stage(f"downloading {request.hub_id}", sum(sizes[name] for name in missing)) as advance:
                download(request, missing, index.parent.name, advance)
        return index.parent


def _checked(folder: Path, request: HubRequest) -> Path:
    if not (folder / PIPELINE_INDEX).is_file():
        raise _no_pipeline(request)
    return folder


def _no_pipeline(request: HubRequest) -> CheckpointError:
    return CheckpointError(
        f"{request.hub_id} holds no {PIPELINE_INDEX}, so it is not a pipeline of diffusers: give the id of one"
    )


def _names(request: HubRequest, index: Path, sizes: Mapping[str, int]) -> list[str]:
    """Returns the names of the files that the components in `index` need."""
    components = [name for name, value in json.loads(index.read_text()).items() if _is_component(value)]
    found: list[str] = []
    for component in components:
        inside = {name.removeprefix(f"{component}/"): name for name in sizes if name.startswith(f"{component}/")}
        found += [name for name in inside.values() if is_small(name, component, request)]
        found += [name for rest, name in inside.items() if rest.endswith(".safetensors.index.json")]
        safe = [name for rest, name in inside.items() if _SAFE.fullmatch(rest)]
        pickled = [name for rest, name in inside.items() if _PICKLED.fullmatch(rest)]
        if pickled and not safe and not request.allow_pickle:
            raise pickle_only(f"{request.hub_id}/{component}")
        found += safe or pickled
    return list(dict.fromkeys(found))


def _is_component(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
