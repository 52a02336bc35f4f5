"""Answers of tiny models to some hundred requests: token ids, log-probabilities, finish reasons, error texts.

``python tests/unchanged/golden_answers.py write`` writes them to `golden_answers.json`, ``check`` compares with it; a
file may follow. Log-probabilities are compared to `TOLERANCE`, as their bits depend on the processor, and with
``--exact`` to the bit. A change that is meant to change answers writes the file anew.
"""

import argparse
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import recorded
from golden_models import MODELS, VOCAB_SIZE, served
from text_answers import completion, outcome, streamed

from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import SamplingParams

FILE = recorded.FOLDER / "golden_answers.json"
TOLERANCE, NUM_DIGITS = 1e-5, 6

PROMPT_LENS = (1, 3, 7, 12, 19, 30)
SHARED = [11, 12, 13, 14, 15, 16, 17, 18, 19]  # two pages of a prefix that prompts share
PARAMS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1e-6, "seed": 1},
    {"temperature": 1.3, "top_k": 9, "seed": 2, "logprobs": 2},
    {"temperature": 0.8, "top_p": 0.7, "seed": 3},
    {"temperature": 0.8, "min_p": 0.1, "seed": 4, "logprobs": 0},
    {"temperature": 0.8, "typical_p": 0.6, "seed": 5},
    {"temperature": 0.8, "top_h": 0.5, "seed": 6},
    {"temperature": 0.8, "epsilon_cutoff": 0.02, "eta_cutoff": 0.02, "seed": 7},
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
    {"temperature": 0.0, "logprobs": -1},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logprobs": 1},
    {"temperature": 0.7, "presence_penalty": 0.9, "frequency_penalty": 0.7, "seed": 8},
    {"temperature": 0.0, "no_repeat_ngram_size": 2},
    {"temperature": 0.0, "bad_words_ids": [[5], [7, 8]], "suppress_tokens": [9, 10]},
    {"temperature": 0.0, "sequence_bias": {(20,): 3.0, (21, 22): -2.0}},
    {"temperature": 0.0, "logit_bias": {30: 4.0, 31: -4.0}},
    {"temperature": 1.0, "allowed_token_ids": [40, 41, 42, 43], "seed": 9},
    {"temperature": 0.0, "stop_token_ids": list(range(3, 20)), "min_new_tokens": 3},
    {"temperature": 0.0, "eos_token_id": list(range(50, 70))},
    {"temperature": 0.0, "ignore_eos": True, "stop_token_ids": [*range(20, 50)]},
    {"n": 3, "temperature": 0.9, "seed": 10},
    {"n": 2, "temperature": 0.9, "seed": 2**64 - 1, "logprobs": 0},
    {"num_beams": 2},
    {"priority": -1, "temperature": 0.5, "seed": 11, "cache_salt": "one"},
    {"temperature": 0.0, "speculate": False, "max_new_tokens": 20},
    {"temperature": 0.0, "max_new_tokens": 1},
    {"temperature": 0.0, "max_new_tokens": 1000},
    {"temperature": 0.0, "adapter": "red"},
    {"temperature": 0.6, "adapter": "blue", "seed": 12},
    {"temperature": 0.0, "adapter": "none of them"},
    {"temperature": 0.0, "logprobs": 25},
    {"stop": "a"},
    {"temperature": 0.0, "allowed_token_ids": [VOCAB_SIZE + 3]},
    {"temperature": 0.0, "n": 2},
]
BAD_PROMPTS = [[], [-1], [VOCAB_SIZE], [True], [1.5], "text", list(range(3, 90)), None, [[1, 2]]]


class EvenTokens:
    """Masks of a request that may use even tokens only."""

    def fill(self, bitmask, output_ids):
        bitmask[:] = np.int32(0x55555555)


def prompts():
    """Prompts of different lengths, every other one with a shared prefix."""
    draw = np.random.default_rng(0)
    for index, length in enumerate(itertools.cycle(PROMPT_LENS)):
        own = [int(token) for token in draw.integers(3, VOCAB_SIZE, length)]
        yield [*SHARED, *own] if index % 2 else own


def model_answers(model):
    """Requests of one model: each by itself for its error, those that are right together."""
    found, right = {}, []
    for index, (options, prompt) in enumerate(zip(PARAMS, prompts(), strict=False)):
        params = SamplingParams(**{"max_new_tokens": 9, **options})
        name = f"{index} {options}"
        found[name] = outcome(
            lambda prompt=prompt, params=params: [*map(completion, model.generate_batch([prompt], params))]
        )
        if not isinstance(found[name], dict):
            right.append((prompt, params))
    found["together"] = outcome(
        lambda: [
            *map(completion, model.generate_batch([prompt for prompt, _ in right], [params for _, params in right]))
        ]
    )
    greedy = SamplingParams(max_new_tokens=6, temperature=0)
    for prompt in BAD_PROMPTS:
        found[f"prompt {prompt!r}"] = outcome(lambda prompt=prompt: streamed(model.stream(prompt, greedy)))
        found[f"tokens of {prompt!r}"] = outcome(lambda prompt=prompt: [*model.iter_tokens(prompt, params=greedy)])
    drawn = SamplingParams(max_new_tokens=8, temperature=1.0)
    found["masks"] = outcome(lambda: [*model.iter_tokens([5, 6, 7], params=drawn, seed=4, masks=EvenTokens())])
    found["stop in tokens"] = outcome(lambda: [*model.iter_tokens([5, 6], params=SamplingParams(stop="x"))])
    found["n in tokens"] = outcome(lambda: [*model.iter_tokens([5, 6], params=SamplingParams(n=2, temperature=1.0))])
    found["no config"] = outcome(lambda: [*model.iter_tokens([5, 6], {"max_new_tokens": 3})])
    found["no params"] = outcome(lambda: streamed(model.stream([5, 6], {"max_new_tokens": 3})))
    return found


def answers_of(name, root):
    """Answers of the model `name`, without the ids of requests in errors."""
    with served(name, root) as model:
        found = {**model_answers(model), "description": repr(model)}
    return json.loads(re.sub(r"request \d+: ", "request: ", json.dumps(found)))


def all_answers(names=()):
    """Answers of all models, or of those whose names have a part of `names`."""
    found = {}
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (name for name, model in MODELS.items() if model.takes_text):
            if not names or any(each in name for each in names):
                found[name] = answers_of(name, Path(root))
                print(f"{name}: {len(found[name])} answers", file=sys.stderr)
        if not names or "embedded" in names:
            found |= embedded_answers(Path(root) / "embedded")
    return found


def embedded_answers(folder):
    """Answers of the embedded model at a first start and a second one, which are equal."""
    shutil.copytree(EMBEDDED, folder)  # whose start has not been recorded
    found = {}
    for start in ("first start", "second start"):
        command = [sys.executable, Path(__file__).with_name("text_answers.py"), str(folder)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[start] = json.loads(done.stdout.splitlines()[-1].replace(str(folder), "MODEL"))
    print(*recorded.differences(found["first start"], found["second start"]), sep="\n", file=sys.stderr)
    return found


def rounded(value):
    """A JSON value with numbers of `NUM_DIGITS` digits behind the point."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, NUM_DIGITS) if isinstance(value, float) else value


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["write", "check"])
    parser.add_argument("file", type=Path, nargs="?", default=FILE)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of models")
    parser.add_argument("--exact", action="store_true", help="log-probabilities to the bit")
    arguments = parser.parse_args()
    found = {"answers": all_answers(arguments.only)}
    if arguments.action == "write":
        recorded.write(arguments.file, found if arguments.exact else rounded(found))
        return
    wanted, is_same = recorded.read(arguments.file)
    if not is_same:
        sys.exit(f"{arguments.file} is of other versions; compare with a commit (tests/unchanged/compare.py)")
    wanted = {"answers": {name: wanted["answers"][name] for name in found["answers"]}}
    places = list(recorded.differences(wanted, found, 0.0 if arguments.exact else TOLERANCE))
    print(*places, f"{len(places)} differences", sep="\n")
    sys.exit(bool(places))


if __name__ == "__main__":
    main()
