"""The options that say which model to load and how, shared by every command that loads one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

_LOADING = "Loading"

RevisionOption = Annotated[
    str | None,
    typer.Option("--revision", help="Branch, tag or commit of a hub model.", rich_help_panel=_LOADING),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype", help="auto (that of the checkpoint), float32, bfloat16 or float16.", rich_help_panel=_LOADING
    ),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="HF_TOKEN",
        show_default=False,
        help="Hub token for gated and private models; better given by the variable than on the command line.",
        rich_help_panel=_LOADING,
    ),
]
OfflineOption = Annotated[
    bool,
    typer.Option(
        "--offline",
        envvar="HF_HUB_OFFLINE",
        help="Use only files that are already on this machine.",
        rich_help_panel=_LOADING,
    ),
]
TrustRemoteCodeOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python code that comes with the model. Only for authors you trust.",
        rich_help_panel=_LOADING,
    ),
]
AllowPickleOption = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        help="Load weights from pickle files (.bin, .pt). Only from authors you trust.",
        rich_help_panel=_LOADING,
    ),
]
CacheDirOption = Annotated[
    Path | None,
    typer.Option("--cache-dir", help="Folder for downloads, in place of the hub's default.", rich_help_panel=_LOADING),
]
TensorParallelOption = Annotated[
    int | None,
    typer.Option("--tensor-parallel", help="Devices that share the model.", rich_help_panel=_LOADING),
]


@dataclass(frozen=True)
class LoadOptions:
    """What the loading options said; `serve_kwargs` are the keyword arguments of `torchax_serve.serve`."""

    revision: str | None = None
    dtype: str = "auto"
    token: str | None = None
    offline: bool = False
    trust_remote_code: bool = False
    allow_pickle: bool = False
    cache_dir: Path | None = None
    tensor_parallel: int | None = None

    def serve_kwargs(self) -> dict[str, Any]:
        """The keyword arguments of `torchax_serve.serve`."""
        return {
            "revision": self.revision,
            "dtype": self.dtype,
            "token": self.token or None,
            "local_files_only": True if self.offline else None,
            "trust_remote_code": self.trust_remote_code,
            "allow_pickle": self.allow_pickle,
            "cache_dir": str(self.cache_dir) if self.cache_dir else None,
            "tensor_parallel": self.tensor_parallel,
        }
