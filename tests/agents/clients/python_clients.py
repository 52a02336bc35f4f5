"""Other projects' clients of Python through Anthropic's and OpenAI's Responses interface.

``python python_clients.py http://127.0.0.1:8000 litellm | openai-agents | open-responses``
"""

import asyncio
import json
import os
import sys
import urllib.request

os.environ.setdefault("OPENAI_API_KEY", "none")
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it fetches a table otherwise
MODEL = "scripted"
NO_LINE = "I have no line for this."
TOOLS = {
    "clock": {"type": "object", "properties": {}},
    "weather": {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]},
}
QUESTION = "Please answer by both tools"


def litellm(url):
    import litellm as library

    messages = [{"role": "user", "content": "Hi"}]
    anthropic = {"model": f"anthropic/{MODEL}", "api_base": url, "api_key": "none", "max_tokens": 40}
    answer = library.completion(messages=messages, **anthropic)
    assert answer.choices[0].message.content == NO_LINE and answer.usage.completion_tokens > 3
    chunks = library.completion(messages=messages, stream=True, **anthropic)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == NO_LINE
    tools = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in TOOLS.items()]
    anthropic["max_tokens"] = 200
    called = library.completion(messages=[{"role": "user", "content": QUESTION}], tools=tools, **anthropic)
    calls = called.choices[0].message.tool_calls
    assert [(each.function.name, json.loads(each.function.arguments)) for each in calls] == EXPECTED
    told = asyncio.run(library.anthropic.messages.acreate(messages=messages, **anthropic))
    assert told["content"][0]["text"] == NO_LINE
    responses = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "max_output_tokens": 200}
    answer = library.responses(input="Hi", **responses)
    assert answer.output[0].content[0].text == NO_LINE and answer.usage.output_tokens > 3
    events = list(library.responses(input="Hi", stream=True, **responses))
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == NO_LINE
    flat = [{"type": "function", "name": name, "parameters": each} for name, each in TOOLS.items()]
    called = library.responses(input=QUESTION, tools=flat, **responses)
    calls = [each for each in called.output if each.type == "function_call"]
    assert [(each.name, json.loads(each.arguments)) for each in calls] == EXPECTED


EXPECTED = [("clock", {}), ("weather", {"days": 3})]


def openai_agents(url):
    import openai
    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

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
        called.append(f"weather {days}")
        return "It is sunny"

    async def run():
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        model = OpenAIResponsesModel(model=MODEL, openai_client=client)
        settings = ModelSettings(max_tokens=200)
        agent = Agent(name="a", instructions="Use tools.", model=model, tools=[clock, weather], model_settings=settings)
        result = await Runner.run(agent, QUESTION, max_turns=4)
        streamed = Runner.run_streamed(agent, QUESTION, max_turns=4)
        async for _ in streamed.stream_events():
            pass
        return result.final_output, streamed.final_output

    assert asyncio.run(run()) == ("It is noon, and sunny.",) * 2
    assert sorted(called) == ["clock", "clock", "weather 3", "weather 3"]


def open_responses(url):
    """The requests of Open Responses' compliance tests; answers and events are read by its schema's types."""
    import openresponses_types.types as types
    from pydantic import TypeAdapter

    found = [each for name, each in vars(types).items() if name.endswith("StreamingEvent")]
    kinds = {next(iter(each.model_fields["type"].annotation)).value: each for each in found}
    user = {"type": "message", "role": "user"}
    location = {"type": "string", "description": "The city and state, e.g. San Francisco, CA"}
    parameters = {"type": "object", "properties": {"location": location}, "required": ["location"]}
    tool = {"type": "function", "name": "get_weather", "description": "Get the weather", "parameters": parameters}
    weather = {"input": [user | {"content": "What's the weather like in San Francisco?"}], "tools": [tool]}
    pirate = {"type": "message", "role": "system", "content": "You are a pirate. Always respond in pirate speak."}
    said = {"type": "message", "role": "assistant", "content": "Hello Alice! How can I help you today?"}
    alice = [user | {"content": "My name is Alice."}, said, user | {"content": "What is my name?"}]
    cases = {
        "basic-response": {"input": [user | {"content": "Say hello in exactly 3 words."}]},
        "system-prompt": {"input": [pirate, user | {"content": "Say hello."}]},
        "tool-calling": weather,
        "multi-turn": {"input": alice},
    }
    resource = TypeAdapter(types.ResponseResource)
    for name, body in cases.items():
        whole = resource.validate_json(post(url, body | {"stream": False}))
        assert whole.status == "completed" and whole.output, name
        events = [
            json.loads(line[6:])
            for line in post(url, body | {"stream": True}).decode().splitlines()
            if line[:7] == "data: {"
        ]
        for event in events:
            kinds[event["type"]].model_validate(event)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed"
        final = resource.validate_python(events[-1]["response"])
        assert [each.type for each in final.output] == [each.type for each in whole.output]
        if name == "tool-calling":
            assert whole.output[0].type == "function_call" and json.loads(whole.output[0].arguments)
            found = {event["type"] for event in events}
            assert {f"response.function_call_arguments.{end}" for end in ("delta", "done")} <= found
            for end in ("added", "done"):
                of_end = [event for event in events if event["type"] == f"response.output_item.{end}"]
                assert any(event["item"]["type"] == "function_call" for event in of_end)


def post(url, body):
    data = json.dumps({"model": MODEL, **body}).encode()
    request = urllib.request.Request(f"{url}/v1/responses", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.read()


if __name__ == "__main__":
    {"litellm": litellm, "openai-agents": openai_agents, "open-responses": open_responses}[sys.argv[2]](sys.argv[1])
    print("ok")
