"""A bundle answers in a process without PyTorch, with the tokens of eager transformers and of the engine."""

import json

import pytest
from exported import FEW, NUM_TOKENS, PROMPTS, output_of, run

from torchax_serve import SamplingParams

GREEDY = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)

# Eight requests of different kinds at once, then one after the other; prints tokens, log-probabilities and text.
SCRIPT = """
import json, sys
from torchax_serve import SamplingParams, serve

def mixed(model, prompts, num_tokens):
    greedy = dict(max_new_tokens=num_tokens, ignore_eos=True)
    kinds = [
        *(SamplingParams(**greedy) for _ in prompts),
        SamplingParams(**greedy, temperature=0.8, seed=3, top_k=20),
        SamplingParams(**greedy, repetition_penalty=1.3),
        SamplingParams(**greedy, no_repeat_ngram_size=2),
        SamplingParams(**greedy, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_new_tokens=num_tokens, temperature=0.5, seed=4, top_p=0.9),
    ]
    ids = [*prompts, *(prompts[0] for _ in kinds[len(prompts):])]
    streams = [model.stream(prompt, params) for prompt, params in zip(ids, kinds)]
    for stream in streams:
        list(stream)
    scored = streams[-2]
    return {
        "tokens": [stream.token_ids for stream in streams],
        "logprobs": [round(each.logprob, 3) for each in scored.logprobs],
        "chat": model.chat("What is 3 plus 4?", SamplingParams(max_new_tokens=8)),
    }
"""
START = """
model = serve(sys.argv[1])
print(json.dumps({**mixed(model, json.loads(sys.argv[2]), int(sys.argv[3])), "repr": repr(model)}))
model.close()
"""


def answers(bundle, **environment):
    return json.loads(output_of(SCRIPT + START, bundle, json.dumps(PROMPTS), NUM_TOKENS, **environment))


def test_eight_mixed_requests_without_pytorch(bundle, served, expected, tmp_path):
    found = answers(bundle, refused=FEW, XDG_CACHE_HOME=str(tmp_path))
    assert found["tokens"][: len(PROMPTS)] == expected
    here = {}
    exec(SCRIPT, here)
    assert len(found["tokens"]) == 8
    assert {name: found[name] for name in ("tokens", "logprobs", "chat")} == here["mixed"](
        served, [*PROMPTS], NUM_TOKENS
    )
    assert found["repr"].startswith("<BundleModel")


@pytest.mark.thorough
def test_a_processor_without_kernels_and_compiler_runs_the_other_programs(bundle, expected, tmp_path):
    other = "from model_adapters.ops.cpu import build; build.machine_key = lambda: 'another processor'\n"
    arguments = bundle, json.dumps(PROMPTS), NUM_TOKENS
    done = run(other + SCRIPT + START, *arguments, CXX="no-compiler", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"][: len(PROMPTS)] == expected
    assert done.stderr.count("no CPU kernels") == 1


RUN = """
from torchax_serve.cli.main import main
main()
"""


def test_run_takes_a_bundle(bundle, served):
    shown = output_of(RUN, "run", bundle, "-p", "What is 3 plus 4?", "--max-new-tokens", "8")
    assert shown.strip() == served.chat("What is 3 plus 4?", SamplingParams(max_new_tokens=8)).strip()


BATCH = """
from torchax_serve.cli.main import main
sys.argv = ["torchax-serve", "batch", *sys.argv[1:]]
main()
"""


def test_batch_takes_a_bundle_without_pytorch(bundle, served, tmp_path):
    body = {"model": bundle.name, "prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(request))
    (line,) = output_of(BATCH, tmp_path / "in.jsonl", "-", "--model", bundle).splitlines()
    (expected,) = served.generate_batch([[5, 6, 7]], SamplingParams(max_new_tokens=6))
    assert json.loads(line)["response"]["body"]["choices"][0]["token_ids"] == list(expected.token_ids)
