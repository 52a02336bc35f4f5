"""Numbers from traces."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from serving_peers.jobs import JobResult, Trace

PERCENTILES = (50, 90, 99)


def rates_of_batches(turns: Sequence[Sequence[JobResult]], prompt_len: int) -> dict[str, float | None]:
    """Of turns of a job with one token per request and one with all, from the medians of their times.

    What a system needs for the tokens behind the first is what they add to the time of the same requests. So it does
    not matter whether it computes all prompts first, or some of them beside the first answers.
    """
    prefill_s, total_s = (statistics.median(turn[which].total_s for turn in turns) for which in (0, 1))
    full = turns[0][1].traces
    num_new = sum(len(trace.token_ids) for trace in full)
    added_s, num_added = total_s - prefill_s, num_new - len(full)
    cpu_s = [statistics.median(turn[which].cpu_s or 0.0 for turn in turns) for which in (0, 1)]
    return {
        "prefill tokens/s": len(full) * prompt_len / prefill_s,
        "decode tokens/s": num_added / added_s if added_s > 0 else None,
        "decode tokens/s of a processor": num_added / (cpu_s[1] - cpu_s[0]) if cpu_s[1] > cpu_s[0] else None,
        "new tokens/s overall": num_new / total_s,
        "TTFT s, median": statistics.median(trace.ttft_s for turn in turns for trace in turn[1].traces),
    }


def numbers_of_mix(turns: Sequence[Sequence[JobResult]]) -> dict[str, float]:
    """The median time for all requests; percentiles over the requests of all turns."""
    traces = [trace for turn in turns for trace in turn[0].traces]
    tpots = [trace.tpot_s for trace in traces if trace.tpot_s is not None]
    numbers = {"total s": statistics.median(turn[0].total_s for turn in turns)}
    for label, values in (("TTFT s", [trace.ttft_s for trace in traces]), ("TPOT s", tpots)):
        for percentile in PERCENTILES:
            numbers[f"{label}, p{percentile}"] = float(np.percentile(values, percentile))
    return numbers


def hit_and_miss(turns: Sequence[Sequence[JobResult]]) -> tuple[float, float]:
    """Median times to first token: of requests whose beginning is in the cache, and of those where it is not."""
    miss_s, hit_s = (statistics.median(turn[which].traces[0].ttft_s for turn in turns) for which in (0, 1))
    return hit_s, miss_s


def tpot_of_flood(turns: Sequence[Sequence[JobResult]], flood_after: int) -> tuple[float, float]:
    """Times per token of running requests: median with the flood, median without.

    Counted are the tokens that a request got between the flood's arrival and its end (the last first token of a long
    prompt), and the same tokens of its like in the undisturbed job. Of each turn the request that suffers most stands
    for all.
    """
    worst: list[tuple[float, float]] = []
    for calm, disturbed in turns:
        num_running = len(calm.traces)
        flood = disturbed.traces[num_running:]
        arrived_s, ended_s = min(each.arrived_s for each in flood), max(each.token_times_s[-1] for each in flood)
        pairs = [
            pair
            for alone, beside in zip(calm.traces, disturbed.traces[:num_running], strict=True)
            if (pair := _tpots_between(beside, alone, arrived_s, ended_s)) is not None
        ]
        if len(pairs) < num_running:
            raise RuntimeError(
                f"the flood came after {flood_after} tokens of each running request and left {num_running - len(pairs)}"
                " without two tokens beside it; give them longer answers"
            )
        worst.append(max(pairs, key=lambda pair: pair[0] / pair[1]))
    return statistics.median(pair[0] for pair in worst), statistics.median(pair[1] for pair in worst)


def _tpots_between(beside: Trace, alone: Trace, from_s: float, to_s: float) -> tuple[float, float] | None:
    times = beside.token_times_s
    first = max(index for index, time_s in enumerate(times) if time_s <= from_s or index == 0)
    # The token that is under way when the flood ends belongs to it: it may be the one that waited.
    last = next((index for index, time_s in enumerate(times) if time_s >= to_s), len(times) - 1)
    if last <= first:
        return None
    calm = alone.token_times_s
    return (times[last] - times[first]) / (last - first), (calm[last] - calm[first]) / (last - first)


def part_of_first_tokens(ours: Sequence[Sequence[JobResult]], theirs: Sequence[Sequence[JobResult]]) -> float:
    """Part of all requests whose first tokens are equal: systems that run the same model agree but for rounding."""
    equal = [
        a.token_ids[0] == b.token_ids[0]
        for turn, other in zip(ours, theirs, strict=True)
        for job, peer in zip(turn, other, strict=True)
        for a, b in zip(job.traces, peer.traces, strict=True)
    ]
    return sum(equal) / len(equal)
