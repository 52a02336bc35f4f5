"""The page at ``/`` and the numbers that it shows. What a person does there is in ``tests/page``."""

import html.parser
import re

import httpx
import pytest
from typer.testing import CliRunner

from torchax_serve.cli.main import app
from torchax_serve.server.page import FILES, FOLDER


class Elements(html.parser.HTMLParser):
    """Ids, references and inline code of a page."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.references, self.inline, self._tag = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self._tag = tag
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            elif name in ("src", "href"):
                self.references.append(value)
            elif name == "style" or name.startswith("on"):
                self.inline.append((tag, name))

    def handle_data(self, data):
        if self._tag in ("script", "style") and data.strip():
            self.inline.append((self._tag, data))


@pytest.fixture(scope="module")
def elements():
    return Elements((FOLDER / "index.html").read_text())


def test_every_file_is_served_without_a_key_and_runs_no_other_code(start_server):
    server = start_server(api_keys=(("a", "key-0123456"),))
    for path, (name, kind) in FILES.items():
        answer = httpx.get(f"{server.url}{path}", timeout=60)
        assert answer.status_code == 200 and answer.headers["content-type"] == kind
        assert answer.content == (FOLDER / name).read_bytes()
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
        assert "unsafe" not in policy and answer.headers["x-content-type-options"] == "nosniff"
    assert httpx.get(f"{server.url}/stats", timeout=60).status_code == 401


def test_the_page_needs_nothing_from_elsewhere(elements):
    assert elements.inline == []
    served = {path.removeprefix("/") for path in FILES}
    assert {each for each in elements.references if not each.startswith("data:")} <= served | {"docs"}
    for name, _ in FILES.values():
        assert not re.search(r"https?://", (FOLDER / name).read_text())


def test_what_models_write_is_never_html(elements):
    script = (FOLDER / "page.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", script)
    used = set(re.findall(r'at\("([a-z-]+)"\)', script))
    assert used <= set(elements.ids) and len(elements.ids) == len(set(elements.ids))


def test_stats_are_those_of_the_engine(http, client, model):
    client.completions.create(model="tiny", prompt="Hi", max_tokens=4)
    found = http.get("/stats").json()
    (entry,) = found["models"]
    stats = model.engine.stats()
    assert (entry["name"], entry["status"], entry["takes_images"]) == ("tiny", "loaded", False)
    assert entry["num_new_tokens"] == stats.scheduler.num_new_tokens > 0
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.torch_model.state_dict().values())
    assert entry["size_bytes"] >= stats.cache_bytes + 0.5 * weights > stats.cache_bytes > 0
    memory = found["memory"]
    assert 0 < memory["process_bytes"] < memory["total_bytes"] and memory["available_bytes"] < memory["total_bytes"]


def test_top_shows_a_server_and_says_when_there_is_none(server):
    result = CliRunner().invoke(app, ["top", "--url", server.url, "--once"])
    assert result.exit_code == 0, result.output
    assert "tiny" in result.output and "tokens/s" in result.output and "process" in result.output
    result = CliRunner().invoke(app, ["top", "--url", server.url, "--json"])
    assert '"num_requests"' in result.output
    result = CliRunner().invoke(app, ["top", "--url", "http://127.0.0.1:9", "--once"])
    assert result.exit_code != 0 and "--url: expected a server at http://127.0.0.1:9" in result.output
