"""Writes the answers of tiny models to some hundred requests, or compares them with those written before.

``python tests/unchanged/golden_answers.py FILE`` writes; with ``--check`` it compares, to the bit. Run it before and
after a change that should change no answer, on the same machine with the same packages.
"""

import argparse
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from golden_models import MODELS, VOCAB_SIZE, served
from text_answers import completion, outcome, streamed

from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import SamplingParams

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


def all_answers(names):
    found = {}
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODELS:
            if names and not any(each in name for each in names):
                continue
            began = time.monotonic()
            with served(name, Path(root)) as model:
                found[name] = model_answers(model)
                found[name]["description"] = repr(model)
            print(f"{name}: {len(found[name])} answers, {time.monotonic() - began:.0f} s", file=sys.stderr)
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
        print(f"{start}: {found[start]['model']}", file=sys.stderr)
    print(*differences(found["first start"], found["second start"]), sep="\n", file=sys.stderr)
    return found


def differences(old, new, where=""):
    """The places where two JSON values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from differences(old.get(key, "<absent>"), new.get(key, "<absent>"), f"{where} / {key}")
    elif old != new:
        yield f"{where}:\n  was {str(old)[:600]}\n  is  {str(new)[:600]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="compare with the file in place of writing it")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of models")
    arguments = parser.parse_args()
    found = json.loads(re.sub(r"request \d+: ", "request: ", json.dumps(all_answers(arguments.only))))
    num_answers = sum(map(len, found.values()))
    num_answers += sum(len(each) for name, start in found.items() if "start" in name for each in start.values())
    if not arguments.check:
        arguments.file.write_text(json.dumps(found, indent=1))
        print(f"{num_answers} answers written")
        return
    wanted = json.loads(arguments.file.read_text())
    places = list(differences({name: wanted[name] for name in found}, found))
    print(*places[:40], sep="\n")
    print(f"{num_answers} answers, {len(places)} differences")
    sys.exit(bool(places))


if __name__ == "__main__":
    main()
