"""What is asked of the hub, and in one line why it failed."""

from __future__ import annotations

import errno
import os
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import huggingface_hub
from huggingface_hub import constants, errors

from model_adapters.errors import CheckpointError, InvalidArgumentError, ModelNotFoundError, TorchaxServeError
from model_adapters.loading.file_names import CONFIG
from model_adapters.loading.short_names import near_matches


@dataclass(frozen=True)
class HubRequest:
    """What to fetch and on whose behalf."""

    hub_id: str
    revision: str | None = None
    token: str | bool | None = None
    local_files_only: bool | None = None
    cache_dir: str | os.PathLike[str] | None = None
    with_weights: bool = True
    with_code: bool = False
    allow_pickle: bool = False
    gguf: str | None = None  # a GGUF file of the repository, or its type

    @property
    def offline(self) -> bool:
        """Whether the network is out of bounds, by this request or by the environment."""
        return constants.is_offline_mode() if self.local_files_only is None else self.local_files_only


def status_of(error: BaseException) -> int | None:
    """Returns the status of the hub's answer; None without one."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _file_of(error: errors.EntryNotFoundError) -> str:
    """Returns the file that a refusal is about."""
    url = str(getattr(getattr(error, "response", None), "url", ""))
    return urllib.parse.unquote(url.partition("/resolve/")[2].partition("/")[2].partition("?")[0]) or CONFIG


def is_connection_error(error: BaseException) -> bool:
    """Tells whether a request never got an answer.

    The classes are those of the HTTP client, whichever the hub's release uses.
    """
    if isinstance(error, errors.OfflineModeIsEnabled | ConnectionError | TimeoutError):
        return True
    return isinstance(error, errors.HTTPError) and not isinstance(error, errors.HfHubHTTPError)


def is_unreachable(error: BaseException) -> bool:
    """Tells whether the hub cannot say anything now: a cached copy counts."""
    return is_connection_error(error) or (status_of(error) or 0) >= 500


def is_latest(request: HubRequest, commit: str) -> bool:
    """Returns whether a cached commit is what a request is for.

    That is the one that the hub has now, if it can be asked.

    False also where the hub refuses the request, which `model_adapters.loading.hub.fetch` then reports.
    """
    if request.offline or request.revision == commit:
        return True
    try:
        info = huggingface_hub.HfApi(token=request.token).model_info(
            request.hub_id, revision=request.revision, timeout=constants.DEFAULT_ETAG_TIMEOUT
        )
    except Exception as error:
        return is_unreachable(error)
    return info.sha == commit


@contextmanager
def hub_errors(request: HubRequest) -> Iterator[None]:
    """Turns what the hub's client raises into one line of ours."""
    try:
        yield
    except TorchaxServeError:
        raise
    except Exception as error:
        found = _translated(error, request)
        if found is None:
            raise
        raise found from error


def _translated(error: Exception, request: HubRequest) -> TorchaxServeError | None:
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, errors.HfHubHTTPError):
        error = error.__cause__  # the client has looked into its cache after the hub's refusal
    name, endpoint = request.hub_id, constants.ENDPOINT
    status = status_of(error)
    revision = request.revision or "main"
    if isinstance(error, errors.HFValidationError):
        return InvalidArgumentError(f"{name!r} is no hub id: expected organisation/name")
    if isinstance(error, errors.GatedRepoError) or (status == 403):
        have = "the token has no access to it" if _has_token(request) else "no token was given"
        return ModelNotFoundError(
            f"{name} is gated and {have}: accept its conditions at {endpoint}/{name}, then log in with "
            "`hf auth login`, set HF_TOKEN or pass token="
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(
            f"{name} has no revision {revision!r}: give a branch, tag or commit listed at {endpoint}/{name}"
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        near = near_matches(name)
        hint = f" Names like it: {', '.join(near)}." if near else ""
        return ModelNotFoundError(
            f"{endpoint} has no model {name}, or it is private: check the spelling, or pass a token that may read it."
            + hint
        )
    if isinstance(error, errors.LocalEntryNotFoundError) or is_connection_error(error):
        if request.offline:
            return ModelNotFoundError(
                f"no cached copy of {name} (revision {revision}), and the network is switched off "
                "(HF_HUB_OFFLINE or local_files_only): run once with the network, or name a folder"
            )
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return ModelNotFoundError(
            f"cannot reach {endpoint} for {name} and there is no cached copy ({reason}): check the network, "
            "set HF_ENDPOINT to a mirror, or name a folder"
        )
    if isinstance(error, errors.EntryNotFoundError):
        file = _file_of(error)
        if file != CONFIG:
            return CheckpointError(f"{name} (revision {revision}) lacks {file}, which its listing names: ask its owner")
        return CheckpointError(
            f"{name} (revision {revision}) holds no {CONFIG}, so it is not a transformers model: "
            "look for a repository of this model in transformers' format"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return ModelNotFoundError(
            f"{endpoint} answered {status} for {name} and there is no cached copy: try again later, or name a folder"
        )
    return _translated_os_error(error, request) if isinstance(error, OSError) else None


def _translated_os_error(error: OSError, request: HubRequest) -> TorchaxServeError:
    cache = request.cache_dir or constants.HF_HUB_CACHE
    if error.errno == errno.ENOSPC:
        return CheckpointError(f"no space left in the cache {cache} for {request.hub_id}: free some, or set HF_HOME")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT, errno.EEXIST):
        return CheckpointError(
            f"the cache {cache} cannot be written ({error.strerror}): set HF_HOME or pass cache_dir= to a folder "
            "where you may write"
        )
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return CheckpointError(f"downloading {request.hub_id} failed ({reason}): try again")


def _has_token(request: HubRequest) -> bool:
    if request.token is False:
        return False
    return isinstance(request.token, str) or huggingface_hub.get_token() is not None
