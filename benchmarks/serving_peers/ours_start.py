"""torchax-serve for the measurement of a start: imports what `serve` imports, and nothing for the benchmark's sake."""

from __future__ import annotations

from typing import Any

from serving_peers.jobs import Job, JobResult, RequestGate, answer_jobs, own_output
from serving_peers.settings import settings_of_process
from torchax_serve import EngineOptions, SamplingParams, serve

OF_SERVE = ("dtype", "quantization")


def run(model: Any, job: Job) -> JobResult:
    gate = RequestGate(job)
    for index in gate.take_due():
        arrival = job.arrivals[index]
        params = SamplingParams(max_new_tokens=arrival.max_new_tokens, temperature=0, ignore_eos=True)
        for token in model.iter_tokens(arrival.prompt_ids, params=params):
            gate.traces[index].add([int(token)], gate.now_s())
    return JobResult(gate.finish())


def main() -> None:
    output = own_output()
    settings = settings_of_process(*OF_SERVE)
    chosen: dict[str, Any] = settings.options
    with serve(settings.folder, engine=EngineOptions(max_num_seqs=1), **chosen) as model:
        answer_jobs(output, lambda job: run(model, job), dict)


if __name__ == "__main__":
    main()
