"""transformers' continuous batching: the manager behind ``generate_batch``."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from serving_peers.jobs import Job, JobResult, RequestGate, answer_jobs, own_output
from serving_peers.settings import SystemSettings, settings_of_process


def start(settings: SystemSettings) -> Any:
    """A running manager: its own defaults, and the cache that all systems get."""
    model = AutoModelForCausalLM.from_pretrained(settings.folder, dtype=settings.options.get("dtype", "auto")).eval()
    if torch.cuda.is_available():
        model = model.to("cuda")
    defaults = ContinuousBatchingConfig()
    blocks = settings.kv_cache_bytes // (settings.kv_token_bytes * defaults.page_size)
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=settings.max_len),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=int(blocks)),
    )
    manager.start()
    return manager


def run(manager: Any, job: Job) -> JobResult:
    """Times are those that the manager notes by itself: handing tokens out one by one would slow it down."""
    if any(each.after_tokens is not None for each in job.arrivals):
        raise ValueError("expected requests with a time: no token is seen here before its request has ended")
    gate, indices = RequestGate(job), dict[str, int]()
    began = time.perf_counter() - gate.now_s()
    num_done = 0
    while num_done < len(job.arrivals):
        for index in gate.take_due():
            arrival = job.arrivals[index]
            name = manager.add_request(
                arrival.prompt_ids, max_new_tokens=arrival.max_new_tokens, record_timestamps=True
            )
            indices[name] = index
        until_s = gate.until_next_s()
        output = manager.get_result(timeout=1.0 if until_s is None else max(until_s, 1e-4))
        if output is None:
            if not manager.is_running():
                raise RuntimeError("the manager's thread has ended; its log says why")
            continue
        if output.error:
            raise RuntimeError(f"a request failed: {output.error}")
        trace = gate.traces[indices[output.request_id]]
        for token, at_s in zip(output.generated_tokens, output.timestamps, strict=True):
            trace.add([token], at_s - began)
        num_done += 1
    return JobResult(gate.finish())


def facts(manager: Any, settings: SystemSettings) -> dict[str, Any]:
    config = manager.continuous_batching_config
    return {
        "versions": {"transformers": version("transformers"), "torch": torch.__version__},
        "kv_cache_bytes": (config.num_blocks or 0) * config.page_size * settings.kv_token_bytes,
        "max_batch_tokens": config.max_batch_tokens,
        "attention": manager.model.config._attn_implementation,
    }


def main() -> None:
    output = own_output()
    settings = settings_of_process("dtype")
    manager = start(settings)
    try:
        answer_jobs(output, lambda job: run(manager, job), lambda: facts(manager, settings))
    finally:
        manager.stop(block=True, hard_stop=True)


if __name__ == "__main__":
    main()
