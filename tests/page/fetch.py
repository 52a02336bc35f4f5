"""Fetches a headless Chromium from npm's registry and unpacks it into the user's cache folder.

``python tests/page/fetch.py`` prints the folder. The package is @sparticuz/chromium, whose files are compressed with
Brotli, which node reads.
"""

import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "@sparticuz/chromium@153.0.0"
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{folder}/fonts</dir><cachedir>{folder}/fonts-cache</cachedir></fontconfig>
"""
UNPACK = """
const {createReadStream, createWriteStream} = require('node:fs');
const {createBrotliDecompress} = require('node:zlib');
const {pipeline} = require('node:stream/promises');
(async () => {
  for (const name of ['chromium', 'al2023.tar', 'fonts.tar', 'swiftshader.tar'])
    await pipeline(createReadStream(`package/bin/${name}.br`), createBrotliDecompress(), createWriteStream(name));
})();
"""


def chromium_folder() -> Path:
    """The folder with the program ``chromium`` and its libraries in ``lib``, made at the first call.

    Raises:
        RuntimeError: node or npm are missing, or the registry does not answer.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchax-serve" / "browsers"
    folder = root / PACKAGE.rpartition("/")[2].replace("@", "-")
    if folder.is_dir():
        return folder
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise RuntimeError("expected node and npm, which fetch and unpack the browser, found none")
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as name:
        scratch = Path(name)
        done = subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=scratch, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{PACKAGE} cannot be fetched: {done.stderr.strip().splitlines()[-1:]}")
        (archive,) = scratch.glob("*.tgz")
        _extract(archive, scratch)
        subprocess.run(["node", "-e", UNPACK], cwd=scratch, check=True)
        for part in scratch.glob("*.tar"):
            _extract(part, scratch)
        (scratch / "chromium").chmod(0o755)
        made = scratch / "made"
        made.mkdir()
        (scratch / "fonts.conf").write_text(FONTS.format(folder=folder))
        for each in ("chromium", "lib", "fonts", "fonts.conf", *(path.name for path in scratch.glob("*.so*"))):
            (scratch / each).rename(made / each)
        made.rename(folder)
    return folder


def _extract(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")


if __name__ == "__main__":
    print(chromium_folder())
