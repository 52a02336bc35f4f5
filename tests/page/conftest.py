"""The page in a browser; collected only where the folder is named, since the browser has to be fetched.

``pip install playwright``, ``python tests/page/fetch.py``, then ``pytest -n 0 tests/page``.
"""

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium."""
    from fetch import chromium_folder
    from playwright.sync_api import sync_playwright

    folder = chromium_folder()
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder / "lib"), "FONTCONFIG_FILE": str(folder / "fonts.conf")}
    arguments = ["--no-sandbox", "--no-zygote"]
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=folder / "chromium", args=arguments, env=environment, headless=True
        )
        yield made
        made.close()
