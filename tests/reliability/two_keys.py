"""Whether the time of an answer tells one key what another has asked; a command, since it measures times.

    python tests/reliability/two_keys.py --trials 60 --model FOLDER

In each trial one key sends a long prompt; then another key sends the same one and, in random order, one that nobody has
sent. The chance that a request for the known prompt is the quicker of the two is 0.5 if times tell nothing; the exit
status is 1 if it is outside of what 1 in 1,000 runs would show. The first key's own second request, whose salt is the
same, is the control: where it is not the quicker one, a larger model is needed.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from server_process import Process

ALICE, BOB = "alice-0123456789", "bob-0123456789"
WORDS = list("abcdefghijklmnopqrstuvwxyz")


def ask(client, url, key, prompt):
    """Seconds to the answer, and the tokens found in the cache."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    began = time.perf_counter()
    answer = client.post(f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    seconds = time.perf_counter() - began
    assert answer.status_code == 200, answer.text
    return seconds, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def quicker(first, second):
    """Chance that a value of `first` is below one of `second` (Mann and Whitney, 1947)."""
    return sum((a < b) + (a == b) / 2 for a in first for b in second) / (len(first) * len(second))


def middle(seconds):
    """Median in milliseconds."""
    return 1000 * statistics.median(seconds)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--words", type=int, default=350)
    parser.add_argument("--model", help="folder; by default the embedded model")
    arguments = parser.parse_args()
    rng = random.Random(1)
    keys = ("--api-key", f"alice:{ALICE}", "--api-key", f"bob:{BOB}")
    process = Process(*([arguments.model] if arguments.model else []), "--served-model-name", "tiny", *keys)
    known, fresh, own = [], [], []
    try:
        process.wait_until_ready(within_s=600)
        with httpx.Client(timeout=600) as client:

            def prompt():
                return " ".join(rng.choice(WORDS) for _ in range(arguments.words))

            for trial in range(arguments.trials + 5):
                shared = prompt()
                ask(client, process.url, ALICE, shared)
                turns = [(known, shared), (fresh, prompt())]
                rng.shuffle(turns)
                for seconds, text in turns:
                    taken, num_cached = ask(client, process.url, BOB, text)
                    assert num_cached == 0, f"{num_cached} cached tokens of another key's prompt"
                    if trial >= 5:  # the first ones compile
                        seconds.append(taken)
                taken, num_cached = ask(client, process.url, ALICE, shared)
                assert num_cached > 0
                own.append(taken)
    finally:
        process.stop()
    chance, control = quicker(known, fresh), quicker(own, fresh)
    bound = 3.29 * ((2 * len(known) + 1) / (12 * len(known) ** 2)) ** 0.5  # of 0.5, two-sided, 1 in 1,000
    print(
        f"another key's prompt is the quicker one with a chance of {chance:.2f} (0.5 +- {bound:.2f}), the own", end=" "
    )
    print(f"one with {control:.2f}; no cached tokens across keys")
    print(f"medians: known {middle(known):.1f} ms, fresh {middle(fresh):.1f} ms, own {middle(own):.1f} ms")
    sys.exit(abs(chance - 0.5) > bound)


if __name__ == "__main__":
    main()
