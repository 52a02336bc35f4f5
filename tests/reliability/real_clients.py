"""Runs other projects' clients against a server; no test of pytest, since they need an environment of their own.

    pip install langchain-openai litellm instructor openai-agents llama-index-llms-openai-like
    python tests/reliability/real_clients.py http://127.0.0.1:8000 MODEL

MODEL needs a chat template with tools. Each check prints a line; the exit status is the number of those that failed.
"""

import asyncio
import os
import sys
import traceback
from typing import Literal

os.environ.setdefault("OPENAI_API_KEY", "none")
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
QUESTION = "What is 3 plus 4?"


def langchain(url, model):
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Person(BaseModel):
        good: bool
        color: Literal["red", "blue"]

    chat = ChatOpenAI(base_url=f"{url}/v1", model=model, temperature=0, max_tokens=200, max_retries=0)
    answer = chat.invoke([("system", "Be short."), ("human", QUESTION)])
    assert isinstance(answer.content, str) and answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == chat.invoke(QUESTION).content
    called = chat.bind_tools([Person], tool_choice="Person").invoke(QUESTION)
    assert called.tool_calls[0]["name"] == "Person"
    schema = Person.model_json_schema() | {"additionalProperties": False}
    found = chat.with_structured_output({"title": "Person", **schema}, method="json_schema").invoke(QUESTION)
    assert set(found) == {"good", "color"}


def litellm(url, model):
    import litellm as library

    fields = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 20}
    messages = [{"role": "user", "content": QUESTION}]
    answer = library.completion(messages=messages, **fields)
    pieces = [
        chunk.choices[0].delta.content or "" for chunk in library.completion(messages=messages, stream=True, **fields)
    ]
    assert "".join(pieces) == answer.choices[0].message.content
    embedding = library.embedding(
        model=f"openai/{model}", api_base=f"{url}/v1", api_key="none", input=["a", "b"], extra_body={"pooling": "mean"}
    )
    assert len(embedding.data) == 2


def instructor(url, model):
    import instructor as library
    import openai
    from pydantic import BaseModel, Field

    class Grade(BaseModel):
        grade: int = Field(ge=1, le=5)

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    for mode in (library.Mode.JSON_SCHEMA, library.Mode.TOOLS):
        found = library.from_openai(client, mode=mode).chat.completions.create(
            model=model, response_model=Grade, messages=[{"role": "user", "content": QUESTION}], max_tokens=200
        )
        assert 1 <= found.grade <= 5


def agents(url, model):
    import openai
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    called = []

    @function_tool
    def clock() -> str:
        """Tells the time."""
        called.append("clock")
        return "noon"

    @function_tool
    def weather(days: int) -> str:
        """Tells the weather."""
        called.append("weather")
        return "sunny"

    async def run():
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        settings = ModelSettings(tool_choice="required", max_tokens=120, parallel_tool_calls=False, temperature=0)
        agent = Agent(
            name="a",
            instructions="Use the tools.",
            model=OpenAIChatCompletionsModel(model=model, openai_client=client),
            tools=[clock, weather],
            model_settings=settings,
        )
        result = await Runner.run(agent, QUESTION, max_turns=4)
        assert isinstance(result.final_output, str)
        streamed = Runner.run_streamed(agent, QUESTION, max_turns=4)
        async for _ in streamed.stream_events():
            pass
        assert isinstance(streamed.final_output, str)

    asyncio.run(run())
    assert called


def llamaindex(url, model):
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=model, api_base=f"{url}/v1", api_key="none", is_chat_model=True, max_tokens=20, temperature=0.0
    )
    answer = llm.chat([ChatMessage(role="user", content=QUESTION)]).message.content
    assert [chunk.message.content for chunk in llm.stream_chat([ChatMessage(role="user", content=QUESTION)])][
        -1
    ] == answer


def main():
    url, model = sys.argv[1:3]
    failed = 0
    for check in (langchain, litellm, instructor, agents, llamaindex):
        try:
            check(url, model)
            print(f"{check.__name__}: ok", flush=True)
        except Exception:
            failed += 1
            print(f"{check.__name__}: failed\n{traceback.format_exc()}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
