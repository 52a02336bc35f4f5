"""The Helm chart, rendered by Helm's own engine, against Kubernetes' schemas."""

import json
import re

import helm_python
import kubernetes_validate
import pytest
import typer
import yaml
from documents import ROOT

from torchax_serve.cli.main import app
from torchax_serve.server.app import PUBLIC

CHART = ROOT / "deploy" / "chart"
SIZES = sorted((CHART / "values").glob("*.yaml"))
EVERYTHING = {
    "model": "qwen3-0.6b",
    "autoscaling": {"enabled": True},
    "disruptionBudget": {"enabled": True},
    "networkPolicy": {"enabled": True},
    "events": {"enabled": True},
    "cache": {"claim": "weights"},
    "env": [{"name": "HF_TOKEN", "value": "x"}],
}


def rendered(values, name="demo"):
    """Manifests by kind; one of each."""
    with helm_python.Chart.load(CHART) as chart:
        texts = chart.render(values, name=name, namespace="ns").values()
    found = [document for text in texts for document in yaml.safe_load_all(text) if document]
    by_kind = {document["kind"]: document for document in found}
    assert len(by_kind) == len(found)
    return by_kind


def pods(manifests):
    """Templates of pods; of a LeaderWorkerSet the leader's first."""
    if "Deployment" in manifests:
        return [manifests["Deployment"]["spec"]["template"]]
    template = manifests["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return [template["leaderTemplate"], template["workerTemplate"]]


def values_of(path):
    return yaml.safe_load(path.read_text()) if path else {}


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("further", [{}, EVERYTHING], ids=["defaults", "everything"])
@pytest.mark.parametrize("path", [None, *SIZES], ids=["cpu", *(path.stem for path in SIZES)])
def test_every_manifest_is_one_of_kubernetes(path, further, version):
    manifests = rendered(values_of(path) | further)
    for kind, manifest in manifests.items():
        if kind != "LeaderWorkerSet":
            kubernetes_validate.validate(manifest, version, strict=True)
            continue
        for template in pods(manifests):  # Kubernetes has no schema of the set; its pods are as a Deployment's
            body = {"selector": {"matchLabels": template["metadata"]["labels"]}, "template": template}
            deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "pods"}, "spec": body}
            kubernetes_validate.validate(deployment, version, strict=True)
    if further:
        assert {"HorizontalPodAutoscaler", "PodDisruptionBudget", "NetworkPolicy", "Service"} <= set(manifests)


@pytest.mark.parametrize("path", [None, *SIZES], ids=["cpu", *(path.stem for path in SIZES)])
def test_arguments_and_variables_are_the_servers(path):
    parameters = typer.main.get_command(app).commands["serve"].params
    flags = {flag for parameter in parameters for flag in [*parameter.opts, *parameter.secondary_opts]}
    variables = {parameter.envvar for parameter in parameters}
    manifests = rendered(values_of(path) | EVERYTHING)
    for template in pods(manifests):
        (container,) = template["spec"]["containers"]
        assert {each.partition("=")[0] for each in container["args"] if each.startswith("--")} <= flags
        named = {each["name"] for each in container["env"]}
        assert {name for name in named if name.startswith("TORCHAX_SERVE_")} <= variables
        (events,) = [each.partition("=")[2] for each in container["args"] if "events" in each]
        assert json.loads(events)["enable_kv_cache_events"] is True
        assert container["command"][0] in (ROOT / "deploy/Dockerfile").read_text()
        limits = container["resources"]["limits"]
        wanted = values_of(path).get("accelerator")
        assert wanted is None or limits[wanted["resource"]] == str(wanted["count"])
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
        assert template["spec"]["securityContext"]["runAsNonRoot"]


def test_probes_and_scrapers_need_no_key_and_the_end_has_time():
    (template,) = pods(rendered({"termination": {"preStop": 7, "drainTimeout": 90}}))
    (container,) = template["spec"]["containers"]
    given = {each["name"]: each.get("value") for each in container["env"]}
    assert given["TORCHAX_SERVE_METRICS_WITHOUT_KEY"] == "true" and "TORCHAX_SERVE_API_KEY" in given
    probes = ("startupProbe", "readinessProbe", "livenessProbe")
    assert {container[name]["httpGet"]["path"] for name in probes} <= PUBLIC
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 1800
    assert template["spec"]["terminationGracePeriodSeconds"] == 107
    without = pods(rendered({"key": {"secret": ""}}))[0]["spec"]["containers"][0]
    assert "TORCHAX_SERVE_API_KEY" not in {each["name"] for each in without["env"]}


def test_several_hosts_are_one_leader_and_workers():
    manifests = rendered(values_of(CHART / "values" / "v6e-16.yaml"))
    leader, worker = pods(manifests)
    assert manifests["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["size"] == 4
    assert manifests["Service"]["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    assert "readinessProbe" in leader["spec"]["containers"][0]
    assert "readinessProbe" not in worker["spec"]["containers"][0]  # it has no routes
    own = leader["metadata"]["labels"].items()
    assert {"app.kubernetes.io/name": "torchax-serve", "app.kubernetes.io/instance": "demo"}.items() <= own


def test_the_cache_of_an_image_is_used_where_there_is_no_volume():
    (template,) = pods(rendered({"cache": {"enabled": False}}))
    assert [each["name"] for each in template["spec"]["volumes"]] == ["tmp"]
    assert "HOME" not in {each["name"] for each in template["spec"]["containers"][0]["env"]}


@pytest.mark.parametrize(
    "wrong",
    [{"replica": 2}, {"hosts": 0}, {"service": {"port": 99999}}, {"args": "--port 1"}, {"image": {"repository": ""}}],
)
def test_values_that_are_none_are_refused(wrong):
    with helm_python.Chart.load(CHART) as chart, pytest.raises(helm_python.HelmError):
        chart.validate_schema(wrong)


def test_helm_finds_nothing_wrong():
    found = helm_python.lint(CHART)
    assert found["errors"] == [] and {each["error"] for each in found["messages"]} <= {"icon is recommended"}


def test_the_table_of_values_has_each():
    table = (ROOT / "docs/installation.md").read_text().partition("## Helm chart")[2].partition("\n## ")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`([\w.]+)`", row)}

    def paths(values, before=""):
        for name, value in values.items():
            if isinstance(value, dict) and value and name not in ("requests", "limits"):
                yield from paths(value, f"{before}{name}.")
            else:
                yield before + name

    assert named == set(paths(values_of(CHART / "values.yaml")))
