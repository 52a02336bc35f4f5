"""Writes docs/pictures/page.png: the page of a server with two models, one of which answers.

``python tests/page/screenshot.py``, after ``python tests/page/fetch.py``.
"""

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from fetch import chromium_folder
from playwright.sync_api import sync_playwright
from scripted_model import write_scripted_model

from torchax_serve import serve
from torchax_serve.server.lifespan import Server
from torchax_serve.server.model_pool import ModelSpec
from torchax_serve.server.options import ServerOptions

SCRIPT = {
    " leap year?": "<think>A common year has 365 days, and a leap year one more.</think>It has 366 days.",
    "": "I do not know.",
}


def main() -> None:
    folder = chromium_folder()
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder / "lib"), "FONTCONFIG_FILE": str(folder / "fonts.conf")}
    with tempfile.TemporaryDirectory() as root:
        write_scripted_model(Path(root) / "scripted", SCRIPT)
        scripted = ModelSpec(("scripted",), lambda: serve(Path(root) / "scripted"), "scripted")
        options = ServerOptions(port=0, warm_up=False, response_template="think")
        server = Server(options, [scripted, ModelSpec(("tiny",), serve)])
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.addresses:
            time.sleep(0.05)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=folder / "chromium", args=["--no-sandbox", "--no-zygote"], env=environment
            )
            page = browser.new_page(viewport={"width": 1200, "height": 760})
            page.goto(server.addresses[0])
            page.locator("#models tr").first.wait_for()
            page.get_by_label("message", exact=True).fill("How many days has a leap year?")
            page.get_by_role("button", name="send").click()
            page.locator(".speed").wait_for()
            page.locator("summary").click()
            page.wait_for_timeout(1500)
            page.screenshot(path=Path(__file__).parents[2] / "docs" / "pictures" / "page.png")
            browser.close()
        server.stop()
        thread.join(60)


if __name__ == "__main__":
    main()
