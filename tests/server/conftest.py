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
collect_ignore = []
if not importlib.util.find_spec("ollama"):
    collect_ignore.append("test_ollama.py")
if not importlib.util.find_spec("transformers.decision"):  # what is compared with; in transformers from 5.23 on
    collect_ignore.append("test_decisions.py")
