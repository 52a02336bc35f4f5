"""Fixtures of the server's tests."""

from running_server import client, http, model, server, start_server

__all__ = ["client", "http", "model", "server", "start_server"]
