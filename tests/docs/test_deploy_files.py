"""The files of ``deploy``: their variables are options of the server, and what they promise holds together."""

import json
import re
import tomllib

import typer
import yaml
from documents import ROOT

from torchax_serve.cli.main import app
from torchax_serve.server.app import PUBLIC

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
DEPLOYMENT, SERVICE = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())
POD = DEPLOYMENT["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]


def test_every_variable_is_an_option_of_the_server():
    known = {param.envvar for param in typer.main.get_command(app).commands["serve"].params}
    named = {each["name"] for each in CONTAINER["env"]}
    named |= set(re.findall(r"TORCHAX_SERVE_[A-Z_]+", DOCKERFILE))
    assert named and named <= known


def test_what_probes_and_scrapers_ask_for_needs_no_key():
    """Neither an annotation nor a probe can give one."""
    given = {each["name"]: each.get("value") for each in CONTAINER["env"]}
    keyless = PUBLIC | ({"/metrics"} if given.get("TORCHAX_SERVE_METRICS_WITHOUT_KEY") == "true" else set())
    asked = {CONTAINER[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    annotations = POD["metadata"]["annotations"]
    if annotations["prometheus.io/scrape"] == "true":
        asked.add(annotations["prometheus.io/path"])
    assert "TORCHAX_SERVE_API_KEY" in given
    assert asked <= keyless
    ports = {each["name"]: each["containerPort"] for each in CONTAINER["ports"]}
    assert annotations["prometheus.io/port"] == str(ports["http"])
    assert SERVICE["spec"]["selector"] == POD["metadata"]["labels"]


def test_the_image_has_the_build_of_torch_for_cpus():
    """That of PyPI for Linux on x86-64 brings CUDA, several gigabytes; what is installed first stays."""
    installs = re.findall(r"pip install ((?:[^&\n\\]|\\\n)*)", DOCKERFILE)
    assert "https://download.pytorch.org/whl/cpu" in DOCKERFILE
    first = next(each for each in installs if "torch" in each)
    assert "--index-url" in first and installs.index(first) == 0
    assert installs[-1].strip() == '--no-cache-dir ".[${EXTRAS}]"'


def stages():
    """Instructions of each stage of the Dockerfile, lines joined and comments left out."""
    lines = re.sub(r"\\\n", " ", "\n".join(x for x in DOCKERFILE.splitlines() if not x.startswith("#"))).splitlines()
    found = []
    for name, _, rest in (line.partition(" ") for line in lines if line.strip()):
        if name == "FROM":
            found.append([])
        found[-1].append((name, rest.strip()))
    return found


def test_the_image_runs_as_nobody_and_says_how_it_is():
    known = {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "ENV", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "CMD"}
    build, final = stages()
    assert {name for name, _ in build + final} <= known
    of = {name: [rest for each, rest in final if each == name] for name in known}
    names = [name for name, _ in final]
    assert of["USER"] == ["10001"] and "RUN" not in names[names.index("USER") :]
    assert of["STOPSIGNAL"] == ["SIGTERM"] and json.loads(of["CMD"][0])[2].startswith(
        "exec /venv/bin/torchax-serve serve"
    )
    (health,) = of["HEALTHCHECK"]
    assert "/readyz" in json.loads(health.partition("CMD ")[2])[2]
    declared = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.M))
    assert declared == {"TORCH_INDEX", "EXTRAS", "MODEL", "PLATFORMS"}
    assert set(re.findall(r"--build-arg (\w+)=", DOCKERFILE)) <= declared
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE)
    assert len(named) == 3 and {each for text in named for each in text.split(",")} <= set(extras)
