"""Downloaded models of the hub: sizes, last use, and removal."""

from __future__ import annotations

import dataclasses
import difflib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from model_adapters.errors import CheckpointError, ModelNotFoundError
from model_adapters.loading.hub_cache import hub_cache
from model_adapters.loading.short_names import SHORT_NAMES


@dataclasses.dataclass(frozen=True)
class Revision:
    """Downloaded commit of a model.

    Attributes:
        commit: 40 hexadecimal digits.
        names: Branches and tags of the commit.
        size_bytes: Bytes of its files; two revisions may share files.
    """

    commit: str
    names: tuple[str, ...]
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class Download:
    """Model in the hub's cache.

    Attributes:
        hub_id: Hub id, organisation/name.
        short_name: Short name of the model, if it has one.
        path: Folder of the model in the cache.
        size_bytes: Bytes on disk of all revisions together.
        last_used: Time of last use, in seconds since 1970; None if no download was finished.
        revisions: Revisions, the newest first.
        is_partial: Whether a download was not finished.
    """

    hub_id: str
    short_name: str | None
    path: Path
    size_bytes: int
    last_used: float | None
    revisions: tuple[Revision, ...]
    is_partial: bool

    def as_dict(self) -> dict[str, Any]:
        """Returns the download as plain data."""
        return {**dataclasses.asdict(self), "path": str(self.path)}


def list_downloads(cache_dir: Path | None = None) -> list[Download]:
    """Returns the models in the hub's cache, the last used first.

    There are none where there is no cache yet.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    folder = hub_cache(cache_dir)
    try:
        scanned = {repo.repo_id: repo for repo in scan_cache_dir(folder).repos if repo.repo_type == "model"}
    except CacheNotFound:
        return []
    found = [_download(hub_id, repo.repo_path, repo) for hub_id, repo in scanned.items()]
    # The scan leaves out folders in which nothing was finished; they take room all the same.
    for path in folder.glob("models--*"):
        hub_id = path.name.removeprefix("models--").replace("--", "/", 1)
        if hub_id not in scanned and path.is_dir():
            found.append(_download(hub_id, path, None))
    return sorted(found, key=lambda each: (-(each.last_used or 0), each.hub_id))


def _download(hub_id: str, path: Path, repo: Any) -> Download:
    partial = [each.stat().st_size for each in (path / "blobs").glob("*.incomplete")]
    short = next((name for name, entry in SHORT_NAMES.items() if entry.hub_id == hub_id), None)
    if repo is None:
        return Download(hub_id, short, path, sum(partial), None, (), True)
    revisions = sorted(repo.revisions, key=lambda each: -each.last_modified)
    return Download(
        hub_id,
        short,
        path,
        repo.size_on_disk + sum(partial),
        max(repo.last_accessed, repo.last_modified),
        tuple(Revision(each.commit_hash, tuple(sorted(each.refs)), each.size_on_disk) for each in revisions),
        bool(partial),
    )


def find_download(hub_id: str, cache_dir: Path | None = None) -> Download:
    """Returns the download of `hub_id`.

    Raises:
        ModelNotFoundError: it is not on this machine; names what is there and looks like it.
    """
    here = {each.hub_id.lower(): each for each in list_downloads(cache_dir)}
    if (found := here.get(hub_id.lower())) is not None:
        return found
    near = difflib.get_close_matches(hub_id.lower(), here, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(here[name].hub_id for name in near)}?" if near else "nothing like it is there"
    raise ModelNotFoundError(
        f"expected a model on this machine, and {hub_id} is not in {hub_cache(cache_dir)}; {hint} "
        "(`torchax-serve models --downloaded` lists what is)"
    )


def find_revision(download: Download, wanted: str) -> Revision:
    """Returns the revision that a branch, a tag or the beginning of a commit names.

    Raises ModelNotFoundError if there is none.
    """
    for revision in download.revisions:
        if wanted in revision.names or (len(wanted) >= 7 and revision.commit.startswith(wanted)):
            return revision
    there = ", ".join(", ".join([*each.names, each.commit[:12]]) for each in download.revisions) or "none"
    raise ModelNotFoundError(f"--revision: expected one of {download.hub_id} on this machine ({there}), got {wanted!r}")


def delete_download(download: Download, revision: Revision | None, cache_dir: Path | None = None) -> None:
    """Deletes all of `download`, or the files that only one of its revisions uses.

    Raises:
        CheckpointError: files that cannot be deleted.
    """
    if revision is None or len(download.revisions) == 1:
        shutil.rmtree(download.path, ignore_errors=True)
        _check_gone([download.path])
        return
    from huggingface_hub import scan_cache_dir

    plan = scan_cache_dir(hub_cache(cache_dir)).delete_revisions(revision.commit)
    plan.execute()  # which only logs what it cannot delete
    _check_gone([*plan.snapshots, *plan.blobs])


def _check_gone(paths: Iterable[Path]) -> None:
    if left := [path for path in paths if path.exists()]:
        raise CheckpointError(f"{left[0]} cannot be deleted; look whether you may write there, or delete it yourself")
