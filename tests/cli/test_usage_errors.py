"""What is said of a wrong command line: one line that names the flag, before anything heavy is imported."""

import os
import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from torchax_serve.cli.main import COMMANDS, app
from torchax_serve.cli.shared.errors import with_exit_status
from torchax_serve.cli.shared.flag_names import HINTS, flags_of, in_flags

PROGRAM = "from torchax_serve.cli.main import main; main()"
HEAVY = {"torch", "jax", "transformers", "torchax", "numpy", "prompt_toolkit"}


@pytest.fixture(autouse=True)
def keep_this_process_as_it_is(monkeypatch):
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)


def said_of(*arguments):
    result = CliRunner().invoke(app, arguments, env={"HF_TOKEN": None, "HF_HUB_OFFLINE": None})
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    return line.removeprefix("error: ")


WRONG = [
    ("run no-such-model Hi", "no model is called 'no-such-model'"),
    ("run ./no-such-folder Hi", "there is no folder ./no-such-folder"),
    ("run gemma-3-1b Hi", "did you mean gemma-3-1b-it"),
    ("run Hi --dtype int8", "--dtype: expected auto, float32, bfloat16 or float16, got 'int8'"),
    ("run Hi --dtype fp16", "did you mean float16?"),
    ("run Hi --top-k many", "--top-k: expected a whole number, got 'many'"),
    ("run Hi --top-p much", "--top-p: expected a number, got 'much'"),
    ("run Hi --top-p 2", "--top-p: expected a number > 0 and <= 1, got 2.0; 1.0 switches it off"),
    ("run Hi --max-tokens 0", "--max-new-tokens: expected a whole number >= 1"),
    ("run Hi --tp 0", "--tensor-parallel: expected a whole number >= 1, got "),
    ("run Hi --greedy --temp 0.5", "--greedy: expected without --temperature"),
    ("run Hi --raw --system Kind", "--system: expected without --raw"),
    ("run Hi --host-id 1", "expected --coordinator beside the other options of hosts"),
    ("run Hi --dtype", "--dtype: expected a value behind it, got none"),
    ("run --revision v1 -p Hi", "--revision v1 was given with the embedded model"),
    ("run Hi --nonsense", "run has no option --nonsense; torchax-serve run --help explains"),
    ("run Hi --tempreature 1", "did you mean --temperature?"),
    ("embed Hi --max-num-batched-tokens 64", "embed has no option --max-num-batched-tokens: serve and run have it"),
    ("run Hi --gpu-memory-utilization 0.9", "run has no option --gpu-memory-utilization: memory is measured"),
    ("serve --enable-lora", "serve has no option --enable-lora: give --adapter NAME=FOLDER"),
    ("serve --tool-call-parser hermes", "--response-template of serve names an unknown format"),
    ("serve --generation-config vllm", "generation_config.json of the model holds the defaults"),
    ("serve --load-format gguf", "safetensors and GGUF are recognized"),
    ("run Hi --pooling cls", "run has no option --pooling; embed has it"),
    ("cache nope", "ACTION: expected list, verify, prune or clear, got 'nope'"),
    ("help run", "there is no command 'help'; use torchax-serve --help"),
    ("version", "there is no command 'version'; use torchax-serve --version"),
    ("embed", "MODEL: expected one, got none"),
    (
        "embed qwen3-0.6b Hi --pooling middle",
        "--pooling: expected mean, cls, last, max, mean_sqrt_len or weighted_mean",
    ),
    ("verify --tokens -1", "--tokens: expected a whole number >= 0, got "),
    ("verify --tolerance 0", "--tolerance: expected a number > 0, got 0.0"),
    ("verify qwen3-0.6b --random-weights x.json", "--random-weights: expected without MODEL, got qwen3-0.6b"),
    ("bench --random-weights none.json", "--random-weights: expected a configuration"),
    ("bench --repeats 0", "--repeats: expected a whole number >= 1, got 0"),
    ("bench --batch 0", "--batch: expected whole numbers >= 1, got 0"),
    ("bench --against vllm", "--against: expected hf, got 'vllm'"),
    ("plan", "expected --topology, such as v6e:2x4 or h200:8, or --for SLOTSxLEN; got neither"),
    ("plan --topology v9:2x2", "--topology: expected one of v4:"),
    ("plan --topology v6e:2by2", "--topology: expected v6e:<shape> such as v6e:2x2"),
    ("plan --topology cpu:4 --mesh model=3", "--mesh: expected axes that multiply out to the 4 devices"),
    (
        "plan --topology cpu:1 --kv-cache-dtype int4",
        "--kv-cache-dtype: expected auto, float32, bfloat16, float16",
    ),
    ("plan --topology cpu:1 --max-num-seqs 0", "--max-num-seqs: expected a whole number >= 1, got "),
    ("export --out here", "export has no option --out; write torchax-serve export MODEL OUT"),
    ("plan --topology cpu:1 --slots 8", "plan has no option --slots: use --max-num-seqs"),
    ("plan --topology cpu:1 --max-len 8", "plan has no option --max-len: use --max-model-len"),
    ("plan --topology cpu:1 --page-len 8", "plan has no option --page-len: use --page-size"),
    ("deploy --slots 8", "deploy has no option --slots: use --max-num-seqs"),
    ("run --max-len 8", "run has no option --max-len: use --max-model-len, which serve, run"),
    ("plan --topology cpu:1 --prefill 0", "--prefill: expected positive numbers"),
    ("plan --for 64", "--for: expected SLOTSxLEN such as 64x8192, got '64'"),
    ("plan --for 64x128 --topology v6e:2x2", "--topology: expected without --for"),
    ("deploy --replicas 3:1", "--replicas: expected 1 <= LEAST <= MOST, got 3 and 1"),
    ("deploy --max-num-seqs 0", "--max-num-seqs: expected a whole number >= 1, got "),
    ("deploy no-such-model", "no model is called 'no-such-model'"),
    ("deploy --dtype int8", "--dtype: expected auto, float32"),
    ("models --mesh model=2", "--mesh: expected together with --sharding"),
    ("models llama --sharding --mesh pipe=2", "--mesh: expected axes out of data, model, expert"),
    ("models --downloaded --all", "--downloaded: expected without --all"),
    ("pull no-such-model", "no model is called 'no-such-model'"),
    ("rm no-such-model --yes", "no model is called 'no-such-model'"),
    ("modles", "there is no command 'modles'; did you mean models?"),
    ("chat", "there is no command 'chat'; use torchax-serve run"),
    ("ls", "use torchax-serve models"),
    ("show", "MODEL: expected one, got none"),
    ("convert", "use torchax-serve quantize"),
    ("create", "use torchax-serve quantize"),
    ("lora", "use torchax-serve train"),
    ("stop", "Ctrl-C or SIGTERM ends a server"),
    ("qwen3-0.6b", "to ask a model, put run before it"),
    ("--nonsense", "torchax-serve has no option --nonsense"),
]


@pytest.mark.parametrize(("line", "expected"), WRONG)
def test_a_wrong_command_line_is_answered_in_one_line(line, expected):
    assert expected in said_of(*line.split())


def test_nothing_heavy_is_imported_for_a_wrong_command_line():
    """All of them in one process: none imports torch, jax or transformers."""
    lines = [line for line, _ in WRONG]
    code = f"""
import contextlib, io, sys
from typer.testing import CliRunner
from torchax_serve.cli.main import app
statuses = [CliRunner().invoke(app, line.split()).exit_code for line in {lines!r}]
print(statuses, *(name for name in sys.modules if "." not in name))
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_OFFLINE")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    statuses, _, modules = done.stdout.partition("] ")
    assert set(re.findall(r"\d+", statuses)) == {"2"}, done.stderr
    assert not HEAVY & set(modules.split())


@pytest.mark.parametrize(
    ("given", "words", "offered"),
    [
        (["run", "qwen3-0"], 2, "qwen3-0.6b"),
        (["run", "--dtype", "bf"], 3, "bfloat16"),
        (["embed", "m", "--pooling", "weig"], 4, "weighted_mean"),
        (["doc"], 1, "doctor"),
        (["run", "--max-n"], 2, "--max-new-tokens"),
    ],
)
def test_the_shell_completes(given, words, offered):
    environment = {
        **os.environ,
        "_TORCHAX_SERVE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["torchax-serve", *given]),
        "COMP_CWORD": str(words),
    }
    code = f"import sys, atexit\natexit.register(lambda: print(*sys.modules, file=sys.stderr))\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert offered in done.stdout.split()
    assert not HEAVY & {name.split(".")[0] for name in done.stderr.split()}


def test_flags_of_vllm_and_sglang_are_accepted():
    names = {flag for command in typer.main.get_command(app).commands["run"].params for flag in command.opts}
    assert {"--max-tokens", "-n", "--temp", "--tp", "--tensor-parallel-size", "--trust-remote-code"} <= names
    assert {"--torch-dtype", "--hf-token", "--download-dir", "--system-prompt", "--repeat-penalty"} <= names
    plan = {flag for command in typer.main.get_command(app).commands["plan"].params for flag in command.opts}
    assert {"--max-model-len", "--max-num-seqs", "--page-size", "--block-size"} <= plan


def test_hints_name_only_missing_flags():
    """One that every command has would never be shown; flags that a hint names exist."""
    commands = typer.main.get_command(app).commands.values()
    flags = [
        {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)} for command in commands
    ]
    assert not [hint for hint in HINTS if all(hint in each for each in flags)]
    named = {flag for hint in HINTS.values() for flag in re.findall(r"--[a-z-]+[a-z]", hint)}
    assert named <= set().union(*flags)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("dtype is 'int8', expected auto", "--dtype is 'int8', expected auto"),
        ("top_k: expected 1, got 2; None leaves it unset", "--top-k: expected 1, got 2; leave the option out"),
        ("mesh, tensor_parallel: expected one", "--mesh, --tensor-parallel: expected one"),
        ("it needs allow_pickle=True, or pass token=", "it needs --allow-pickle, or pass --token"),
        ("HF_HUB_OFFLINE or local_files_only: run once", "HF_HUB_OFFLINE or --offline: run once"),
        ("pass cache_dir= to a folder", "pass --cache-dir to a folder"),
        ("so pass top_k, or give stop; pass token", "so pass --top-k, or give --stop; pass --token"),
        ("texts[3]: expected some text", "TEXT 4: expected some text"),
        # words of a sentence, code, and arguments without a flag stay
        ("a token that may read it: no mesh", "a token that may read it: no mesh"),
        ("expected n_heads, got model.top_k_proj", "expected n_heads, got model.top_k_proj"),
        ("engine=EngineOptions(kv_cache_dtype='int8')", "engine=EngineOptions(kv_cache_dtype='int8')"),
        ("stop: expected text", "--stop: expected text"),
        ("expected 0 with enable_prefix_caching=False", "expected 0 with --no-enable-prefix-caching"),
        ("kv_offloading_bytes: expected 0", "--kv-offloading-size: expected 0"),
    ],
)
def test_messages_name_flags(message, expected):
    command = next(each.function for each in COMMANDS.all() if each.name == "run")
    parameters = with_exit_status(command).__signature__.parameters.values()
    assert in_flags(message, flags_of(parameters)) == expected


def test_options_of_the_server_are_named_by_their_flags():
    flags = {name.replace("-", "_"): f"--{name}" for name in ("watchdog", "served-model-name")}
    assert in_flags("watchdog_s: expected 1", flags) == "--watchdog: expected 1"
    assert in_flags("served_model_names: expected a name", flags) == "--served-model-name: expected a name"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full is Linux's")
def test_a_full_disk_behind_stdout_is_one_line(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, "cache", "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: expected room to write the output, got none (No space left on device)")
