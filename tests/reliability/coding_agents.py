"""Coding agents against a server of a model that says the lines of a script.

``python tests/reliability/coding_agents.py [claude] [codex]`` runs the commands of npm (``npm install
@anthropic-ai/claude-code @openai/codex``; their folder is on PATH). Each has to fix a file; Claude Code does it in
three turns, and again in nineteen. From the second turn on nine tenths of each prompt come from the prefix cache.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from running_server import RunningServer
from scripted_model import call, write_scripted_model

from torchax_serve import EngineOptions, serve
from torchax_serve.server import metrics

NUM_STEPS = 18
MIN_CACHED = 0.9
TIMEOUT_S = 1200


def script(note):
    """The lines of both agents; a result of a tool that no line follows is the end."""
    fix = f"sed -i s/wrold/world/ {note}"
    found = {
        "": "All done.",
        " fix the note": call("Read", file_path=str(note)),
        " to read": call("Edit", old_string="wrold", new_string="world", file_path=str(note)),
        " fix it by a command": call("exec_command", cmd=fix),
        f" step {NUM_STEPS}": call("Bash", command=fix),
    }
    for number in range(1, NUM_STEPS):
        arguments = json.dumps({"description": str(number), "command": f"echo at step {number + 1}"})
        found[f" step {number}"] = f'{number}<tool_call>{{"name": "Bash", "arguments": {arguments}}}</tool_call>'
    return found


def claude(url, text, folder):
    """Runs Claude Code."""
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": "scripted",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "scripted",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    run(["claude", "-p", text, "--allowedTools", "Read,Edit,Bash"], folder, variables)


def codex(url, text, folder):
    """Runs Codex."""
    provider = {"name": "local", "base_url": f"{url}/v1", "env_key": "LOCAL_KEY", "wire_api": "responses"}
    settings = {"model": "scripted", "model_provider": "local"}
    settings |= {f"model_providers.local.{name}": value for name, value in provider.items()}
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    options += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    run(["codex", "exec", *options, text], folder, {"LOCAL_KEY": "none"})


def run(command, folder, variables):
    environment = {**os.environ, "HOME": str(folder.parent), **variables}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    print(done.stdout)
    assert done.returncode == 0 and "All done." in done.stdout, done.stderr


RUNS = {
    "claude": [(claude, "Please fix the note", 3), (claude, "Please begin at step 1", NUM_STEPS + 1)],
    "codex": [(codex, "Please fix it by a command", 2)],
}


def main(names):
    folder = Path(tempfile.mkdtemp(prefix="agents-"))
    work, turns = folder / "work", []
    work.mkdir()
    note = work / "note.txt"
    path = write_scripted_model(folder / "model", script(note), num_back=40, max_len=65536, is_system_first=True)
    original = metrics.Metrics.step

    def step(self, answer, step):
        if step.finish_reason is not None:
            turns.append((len(answer.prompt_ids), answer.num_cached_tokens))
        original(self, answer, step)

    metrics.Metrics.step = step
    with serve(path, engine=EngineOptions(max_model_len=65536)) as model:
        server = RunningServer(model, served_model_names=("scripted",))
        for agent, text, num_turns in [each for name in names for each in RUNS[name]]:
            note.write_text("hello wrold to read")
            turns.clear()
            agent(server.url, text, work)
            assert note.read_text() == "hello world to read"
            shares = [num_cached / num_tokens for num_tokens, num_cached in turns]
            print(f"{agent.__name__}: {len(turns)} turns, cached {[round(share, 3) for share in shares]}")
            assert len(turns) >= num_turns and min(shares[1:]) >= MIN_CACHED
        server.stop()


if __name__ == "__main__":
    main(sys.argv[1:] or list(RUNS))
