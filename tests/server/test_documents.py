"""The documents and the description of the interface agree with the code."""

import re
from pathlib import Path

import jsonschema
import openai
import pytest
import yaml

from torchax_serve.cli.main import COMMANDS
from torchax_serve.server.app import ROUTES
from torchax_serve.server.field_docs import with_tables
from torchax_serve.server.openapi import description
from torchax_serve.server.pooling_schemas import EmbeddingRequest
from torchax_serve.server.schemas import ChatRequest, CompletionRequest

DOCS = Path(__file__).parents[2] / "docs"


def test_tables_of_fields_are_current():
    text = (DOCS / "server.md").read_text()
    assert with_tables(text) == text, "run python -m torchax_serve.server.field_docs docs/server.md"


@pytest.mark.parametrize(
    ("parameters", "kind"),
    [
        (openai.types.chat.completion_create_params.CompletionCreateParamsBase, ChatRequest),
        (openai.types.completion_create_params.CompletionCreateParamsBase, CompletionRequest),
        (openai.types.EmbeddingCreateParams, EmbeddingRequest),
    ],
)
def test_every_parameter_of_the_client_is_known(parameters, kind):
    assert set(parameters.__annotations__) | {"stream"} <= set(kind.model_fields) | {"stream"}


def test_every_route_is_in_the_document():
    text = (DOCS / "server.md").read_text().split("## Errors")[0]
    for _, path, _ in ROUTES:
        last = path.replace(":path}", "}")
        assert f"`{last}`" in text or f"{last}`" in text or last.rpartition("/")[2] in text, path


def test_every_option_is_in_the_document():
    text = (DOCS / "server.md").read_text()
    options = {name for each in COMMANDS["serve"].params for name in each.opts if name.startswith("--")}
    assert {name for name in options if not re.search(rf"`{name}[` ]", text)} == set()
    shown = set(re.findall(r"`(--[a-z-]+)", text.partition("## Options")[2].partition("### Limits")[0]))
    assert shown - {"--help"} == options


def test_every_metric_is_in_the_document(http, client):
    client.completions.create(model="tiny", prompt="Hi", max_tokens=2)
    text = (DOCS / "server.md").read_text()
    found = set(re.findall(r"^# HELP torchax_serve_(\w+)", http.get("/metrics").text, re.MULTILINE))
    assert {name for name in found if name not in text and not name.endswith("_created")} == set()
    assert found >= {"time_to_first_token_seconds", "num_requests_running", "prefix_cache_hits"} or found


@pytest.mark.parametrize("name", ["grafana-dashboard.json", "prometheus-alerts.yaml"])
def test_dashboard_and_alerts_have_metrics_that_exist(http, client, name):
    client.completions.create(model="tiny", prompt="Hi", max_tokens=2)
    http.get("/v1/models/none")
    text = (DOCS.parent / "deploy" / name).read_text()
    yaml.safe_load(text)
    series = set(re.findall(r"^(torchax_serve_\w+)", http.get("/metrics").text, re.MULTILINE))
    used = set(re.findall(r"torchax_serve_\w+", text))
    assert used and used <= series, used - series


def test_the_page_needs_no_other_file(http):
    response = http.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"<script|<link|src=|https?://", response.text)
    for method, path, _ in ROUTES:
        assert f"{method} {path.replace(':path}', '}')}" in response.text
    assert response.text.count("<details>") == response.text.count("</details>") > 5


def test_the_description_is_true(http):
    found = http.get("/openapi.json").json()
    assert found == description(ROUTES, ("tiny",))
    assert found["components"]["schemas"]["ChatRequest"]["properties"]["model"]["enum"] == ["tiny"]
    assert set(found["paths"]) == {path.replace(":path}", "}") for _, path, _ in ROUTES}
    operations = [each for path in found["paths"].values() for each in path.values()]
    ids = [each["operationId"] for each in operations]
    links = [link for each in operations for link in each["responses"]["200"].get("links", {}).values()]
    assert len(set(ids)) == len(ids) and links and {link["operationId"] for link in links} <= set(ids)
    schema = {"$ref": "#/components/schemas/ChatRequest", "components": found["components"]}
    jsonschema.validate({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"model": "tiny", "messages": [], "audio": {}}, schema)
