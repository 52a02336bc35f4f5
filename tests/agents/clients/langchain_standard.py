"""LangChain's standard integration tests of a chat model, through ``/v1/chat/completions`` and ``/v1/responses``.

``SERVER=http://127.0.0.1:8000 pytest langchain_standard.py``, where langchain-openai and langchain-tests are installed.
"""

import os

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestCompletions(ChatModelIntegrationTests):
    is_responses = False

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict:
        return {
            "base_url": f"{os.environ['SERVER']}/v1",
            "api_key": "none",
            "model": "scripted",
            "max_retries": 0,
            "use_responses_api": self.is_responses,
            "stream_usage": True,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestResponses(TestCompletions):
    is_responses = True
