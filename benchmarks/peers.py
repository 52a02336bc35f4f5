"""The peers of `serving.py` and `curves.py`: installs each in an environment of its own, and says what is there.

python benchmarks/peers.py install FOLDER                  # all; downloads about 4 GB, compiles llama.cpp
python benchmarks/peers.py install FOLDER llama-cpp onnx   # some
python benchmarks/peers.py show FOLDER
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from serving_peers.environments import INSTALL_S, RECIPES, install, record_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["install", "show"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}; default: all")
    what = "seconds that a command of an installation may take; default: %(default)g"
    parser.add_argument("--timeout", type=float, default=INSTALL_S, metavar="S", help=what)
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in RECIPES]:
        parser.error(f"NAME: expected some of {', '.join(RECIPES)}, got {', '.join(unknown)}")
    if not options.timeout > 0:
        parser.error(f"--timeout: expected seconds > 0, got {options.timeout:g}")
    folder = options.folder.resolve()
    failed = False
    for name in options.names or RECIPES:
        if options.command == "install":
            print(f"{name}: installing", file=sys.stderr, flush=True)
            install(name, folder, options.timeout)
        record = record_of(name, folder)
        failed |= record["error"] is not None
        print(f"{name}: {record['error'] or 'installed, ' + str(len(record['versions'])) + ' packages'}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
