"""vLLM, by its offline loop of steps or by its asynchronous engine. Runs in an environment that has vLLM."""

from __future__ import annotations

import asyncio
import time
from importlib.metadata import version
from typing import Any

import vllm  # type: ignore[import-not-found]
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

from serving_peers.jobs import Job, JobResult, RequestGate, answer_jobs, own_output
from serving_peers.settings import SystemSettings, settings_of_process

OPTIONS = ("front", "enforce_eager", "max_num_seqs", "dtype")


def engine_arguments(settings: SystemSettings) -> dict[str, Any]:
    """vLLM's own defaults, but for what all systems are told. The size of the cache is read from the environment."""
    chosen = settings.options
    arguments = {
        "model": settings.folder,
        "max_model_len": settings.max_len,
        "skip_tokenizer_init": True,
        "enforce_eager": chosen.get("enforce_eager", False),
    }
    arguments |= {name: chosen[name] for name in ("max_num_seqs", "dtype") if name in chosen}
    return arguments


def sampling(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_new_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


class OfflineFront:
    """What `LLM.generate` does, its loop of steps written out so that requests may come between two of them."""

    def __init__(self, settings: SystemSettings) -> None:
        self._engine = vllm.LLM(**engine_arguments(settings)).llm_engine
        self._num_jobs = 0

    @property
    def cache_config(self) -> Any:
        return self._engine.vllm_config.cache_config

    def run(self, job: Job) -> JobResult:
        self._num_jobs += 1
        gate, num_cached = RequestGate(job), 0
        while gate.is_open or self._engine.has_unfinished_requests():
            for index in gate.take_due():
                arrival = job.arrivals[index]
                prompt = {"prompt_token_ids": arrival.prompt_ids}
                self._engine.add_request(f"{self._num_jobs}-{index}", prompt, sampling(arrival.max_new_tokens))
            if not self._engine.has_unfinished_requests():
                time.sleep(gate.until_next_s() or 0.0)
                continue
            outputs = self._engine.step()
            now_s = gate.now_s()
            for output in outputs:
                index = int(output.request_id.split("-")[1])
                gate.traces[index].add(list(output.outputs[0].token_ids), now_s)
                num_cached += (output.num_cached_tokens or 0) if output.finished else 0
        return JobResult(gate.finish(), num_cached)


class AsyncFront:
    """What vLLM's server is built on: requests enter at once, whatever the engine is doing."""

    def __init__(self, settings: SystemSettings) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs  # type: ignore[import-not-found]
        from vllm.v1.engine.async_llm import AsyncLLM  # type: ignore[import-not-found]

        self._loop = asyncio.new_event_loop()  # one for the engine's life: it keeps a task in it

        async def make() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(settings)))

        self._engine = self._loop.run_until_complete(make())
        self._num_jobs = 0

    @property
    def cache_config(self) -> Any:
        return self._engine.vllm_config.cache_config

    def run(self, job: Job) -> JobResult:
        return self._loop.run_until_complete(self._run(job))

    async def _run(self, job: Job) -> JobResult:
        self._num_jobs += 1
        gate, progress, num_cached = RequestGate(job), asyncio.Event(), 0

        async def read(index: int) -> None:
            nonlocal num_cached
            arrival, name = job.arrivals[index], f"{self._num_jobs}-{index}"
            prompt = {"prompt_token_ids": arrival.prompt_ids}
            async for output in self._engine.generate(prompt, sampling(arrival.max_new_tokens), name):
                gate.traces[index].add(list(output.outputs[0].token_ids), gate.now_s())
                num_cached += (output.num_cached_tokens or 0) if output.finished else 0
                progress.set()

        await gate.serve(read, progress)
        return JobResult(gate.finish(), num_cached)


FRONTS: dict[str, type[OfflineFront] | type[AsyncFront]] = {"offline": OfflineFront, "async": AsyncFront}


def main() -> None:
    output = own_output()
    settings = settings_of_process(*OPTIONS)
    front = FRONTS[str(settings.options.get("front", "offline"))](settings)
    cache = front.cache_config
    facts = {
        "versions": {"vllm": vllm.__version__, "torch": version("torch"), "transformers": version("transformers")},
        "front": settings.options.get("front", "offline"),
        "kv_cache_bytes": (cache.num_gpu_blocks or 0) * cache.block_size * settings.kv_token_bytes,
    }
    answer_jobs(output, front.run, lambda: facts)


if __name__ == "__main__":  # vLLM's own processes import this module again
    main()
