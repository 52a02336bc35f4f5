"""LangChain's standard tests of chat models, at a server: no test of the suite, as they need packages of their own.

    python3.11 -m venv lc && lc/bin/pip install langchain-openai langchain-tests pytest-asyncio pytest-socket
    SERVER=http://127.0.0.1:8000 MODEL=qwen3-0.6b lc/bin/pytest --noconftest -o addopts= -o asyncio_mode=auto \
        -o asyncio_default_test_loop_scope=session tests/reliability/langchain_standard.py

Those that call tools, fill schemas or answer with JSON need a model that can. langchain-openai keeps a client between
tests, so that they have one event loop.
"""

import os

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestServed(ChatModelIntegrationTests):
    """The tests, with what the server has."""

    supports_json_mode = True
    has_tool_choice = True
    returns_usage_metadata = True

    @property
    def structured_output_kwargs(self):
        return {"method": "json_schema"}

    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        server = {"base_url": f"{os.environ['SERVER']}/v1", "api_key": "none", "model": os.environ["MODEL"]}
        return {**server, "temperature": 0, "max_tokens": 200, "stream_usage": True, "max_retries": 0, "timeout": 300}
