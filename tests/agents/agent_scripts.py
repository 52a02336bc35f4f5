"""What the scripted model says to each coding agent: twenty turns that change a file line by line."""

import json
from typing import NamedTuple

NUM_TURNS = 20
END = "All done."


class AgentScript(NamedTuple):
    """How an agent is run, and what the model says to it.

    Attributes:
        tool: Its tool that runs a command, and the parameter with the command.
        word: Stands in front of the number of a step: a word of its own for each agent.
        further: Further arguments of the tool, which it asks for.
        arguments: Its command line, the text of the user behind it.
        variables: Of its environment.
    """

    tool: tuple[str, str]
    word: str
    further: dict
    arguments: list[str]
    variables: dict[str, str]


AGENTS = {
    "claude": AgentScript(
        ("Bash", "command"),
        "step",
        {},
        ["-p", "--allowedTools", "Read,Edit,Bash", "--"],
        {"DISABLE_AUTOUPDATER": "1", "DISABLE_TELEMETRY": "1", "DISABLE_ERROR_REPORTING": "1"},
    ),
    "codex": AgentScript(
        ("exec_command", "cmd"),
        "part",
        {},
        [
            *("exec", "-c", "check_for_update_on_startup=false", "-c", "analytics.enabled=false"),
            *("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        ],
        {},
    ),
    "opencode": AgentScript(
        ("bash", "command"),
        "place",
        {"description": "Edits"},
        ["run"],
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_SHARE": "1"},
    ),
}


def note() -> str:
    """The file before the edits: a line for each."""
    return "".join(f"line{number} old\n" for number in range(1, NUM_TURNS))


def lines(agent: AgentScript) -> dict[str, str]:
    """The lines of an agent: each edits a line of the file and tells the next step; the last is `END`."""
    name, parameter = agent.tool
    found = {}
    for number in range(1, NUM_TURNS):
        told = "" if number == NUM_TURNS - 1 else f"; echo -n at {agent.word} {number + 1}"
        arguments = {parameter: f"sed -i {number}s/old/new/ note{told}", **agent.further}
        # The number in front tells the steps apart where the last tokens are all that the model sees.
        called = json.dumps({"name": name, "arguments": arguments})
        found[f" {agent.word} {number}"] = f"{number}<tool_call>{called}</tool_call>"
    return found


def script() -> dict[str, str]:
    """All lines; a result of a tool that no line follows is the end."""
    found = {"": END}
    for agent in AGENTS.values():
        found |= lines(agent)
    return found


__all__ = ["AGENTS", "END", "NUM_TURNS", "lines", "note", "script"]
