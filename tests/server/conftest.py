"""Fixtures of the server's tests, which need the packages of the extras server and dev: without them nothing runs."""

import importlib.util

PACKAGES = (
    "starlette",
    "uvicorn",
    "httptools",
    "prometheus_client",
    "llguidance",
    "soundfile",
    "openai",
    "anthropic",
    "httpx",
)

if all(importlib.util.find_spec(package) for package in PACKAGES):
    from running_server import client, http, model, server, servers, start_server

    __all__ = ["client", "http", "model", "server", "servers", "start_server"]
else:
    collect_ignore_glob = ["test_*.py"]
if not importlib.util.find_spec("ollama"):
    collect_ignore = ["test_ollama.py"]
