"""Options from a TOML file: which value counts, and what is refused."""

import pytest
import typer
from typer.testing import CliRunner

from torchax_serve.cli.serve import serve, server_options
from torchax_serve.cli.shared.config_file import ConfigFile


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the command up to where the server would start; returns its result and the options."""
    import torchax_serve.cli.serve as module

    found = []

    def keep(*groups):
        found.append(server_options(*groups))
        raise SystemExit(0)

    monkeypatch.setattr(module, "server_options", keep)
    monkeypatch.setattr("torchax_serve.server.require_packages", lambda: None)
    app = typer.Typer()
    app.command()(serve)

    def invoke(text, *args, env=None):
        file = tmp_path / "server.toml"
        file.write_text(text)
        result = CliRunner().invoke(app, [*args, "--config", str(file)], env=env)
        return result, found[-1] if found else None

    return invoke


def test_the_command_line_comes_first_then_variables_then_the_file(run):
    text = 'port = 8001\nhost = "0.0.0.0"\nlog-format = "json"\nwatchdog = 7'
    _, options = run(text, "--port", "8003", env={"TORCHAX_SERVE_HOST": "::1", "TORCHAX_SERVE_PORT": "8002"})
    assert (options.port, options.host, options.log_format, options.watchdog_s) == (8003, "::1", "json", 7.0)
    assert options.drain_timeout_s == 30.0


def test_lists_flags_and_other_spellings(run):
    _, options = run('served_model_name = ["a", "b"]\nno-warm-up = true\nssl-certfile = "c"\nssl-keyfile = "k"')
    assert options.served_model_names == ("a", "b")
    _, options = run('served-model-name = "a"\napi-key = "alice:0123456789"\ncors-origin = "http://a"')
    assert options.served_model_names == ("a",)
    assert (options.api_keys, options.cors_origins) == ((("alice", "0123456789"),), ("http://a",))
    _, options = run('no-warm-up = true\nssl-certfile = "c"\nssl-keyfile = "k"')
    assert options.warm_up is False
    assert (str(options.tls_certificate), str(options.tls_key)) == ("c", "k")


@pytest.mark.parametrize(
    "text, reason",
    [
        ("portt = 3", "did you mean port?"),
        ("port = [3]", "port: expected one value"),
        ('served-model-name = {a = "b"}', "expected one value or a list"),
        ("[server]\nport = 3", "got 'server'"),
        ('port = "many"', "as an integer"),
        ("port = ", "expected a TOML file"),
        ('config = "other.toml"', "got 'config'"),
    ],
)
def test_what_is_refused(run, text, reason):
    result, options = run(text)
    assert result.exit_code == 2
    assert options is None
    assert reason in " ".join(result.output.replace("│", " ").split())


def test_a_missing_file_is_named():
    app = typer.Typer()

    @app.command()
    def command(config: ConfigFile = None):
        raise AssertionError("not reached")

    result = CliRunner().invoke(app, ["--config", "/nowhere.toml"])
    assert result.exit_code == 2
    assert "/nowhere.toml" in result.output
