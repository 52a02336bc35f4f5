"""torchax-serve, as a program that embeds it uses it: many asynchronous readers of one served model."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import jax

from serving_peers.jobs import Job, JobResult, RequestGate, answer_jobs, own_output
from serving_peers.settings import settings_of_process
from torchax_serve import SamplingParams, serve
from torchax_serve.bench.machine import Machine
from torchax_serve.bench.timed_model import count_programs
from torchax_serve.engine.options import EngineOptions
from torchax_serve.entrypoints.served_model import ServedModel

OF_ENGINE = ("max_num_seqs", "max_num_batched_tokens", "page_size", "max_num_steps", "max_decode_slowdown")
OF_SERVE = ("dtype", "quantization")
OPTIONS = (*OF_ENGINE, *OF_SERVE, "warm_up")  # the last: compile all programs before the first request


async def run_requests(model: ServedModel, job: Job) -> RequestGate:
    """Every request by a caller of its own."""
    gate, progress = RequestGate(job), asyncio.Event()

    async def read(index: int) -> None:
        arrival, trace = job.arrivals[index], gate.traces[index]
        params = SamplingParams(max_new_tokens=arrival.max_new_tokens, temperature=0, ignore_eos=True)
        stream: Any = model.iter_tokens(arrival.prompt_ids, params=params)
        async for token in stream:
            trace.add([token], gate.now_s())
            progress.set()

    await gate.serve(read, progress)
    return gate


def run(model: ServedModel, job: Job) -> JobResult:
    before = model.engine.stats().scheduler.num_hit_tokens
    with count_programs() as programs:
        gate = asyncio.run(run_requests(model, job))
    hits = model.engine.stats().scheduler.num_hit_tokens - before
    return JobResult(gate.finish(), hits, programs[0])


def facts(model: ServedModel, page_size: int, token_bytes: int, engine_bytes: int) -> dict[str, Any]:
    stats = model.engine.stats()
    page_bytes = page_size * token_bytes
    machine = Machine.here()
    return {
        "machine": dataclasses.asdict(machine) | {"is_busy": machine.is_busy},
        "state": str(stats),
        "num_programs": stats.num_programs,
        "num_preemptions": stats.scheduler.num_preemptions,
        "host_s": stats.host_s,
        "busy_s": stats.busy_s,
        "num_steps": stats.num_steps,
        "kv_cache_bytes": sum(group.num_pages for group in stats.scheduler.pages) * page_bytes,
        "engine_bytes": engine_bytes,  # of all its arrays on the device
    }


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def main() -> None:
    output = own_output()
    settings = settings_of_process(*OPTIONS)
    chosen: dict[str, Any] = settings.options
    of_engine = {name: chosen[name] for name in OF_ENGINE if name in chosen}
    options = EngineOptions(max_model_len=settings.max_len, kv_cache_memory_bytes=settings.kv_cache_bytes, **of_engine)
    token_bytes = settings.kv_token_bytes * (2 if chosen.get("dtype") == "float32" else 1)
    of_serve = {name: chosen[name] for name in OF_SERVE if name in chosen}
    with serve(settings.folder, engine=options, **of_serve) as model:
        before = live_bytes()
        _ = model.engine  # made when first used
        engine_bytes = live_bytes() - before
        if chosen.get("warm_up", True):
            model.engine.warm_up()
        answer_jobs(
            output,
            lambda job: run(model, job),
            lambda: facts(model, options.page_size, token_bytes, engine_bytes),
        )


if __name__ == "__main__":
    main()
