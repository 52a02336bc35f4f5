"""OpenVINO GenAI's continuous batching."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import openvino
import openvino_genai  # type: ignore[import-not-found]

from serving_peers.jobs import Job, JobResult, RequestGate, answer_jobs, own_output
from serving_peers.settings import SystemSettings, settings_of_process

OPTIONS = ("num_threads", "max_num_seqs", "inference_precision")
BLOCK_LEN = 32  # tokens of a block of its cache on CPUs


def start(settings: SystemSettings) -> Any:
    """A pipeline with its own defaults, but for what all systems are told."""
    options: dict[str, Any] = settings.options
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = settings.kv_cache_bytes // (settings.kv_token_bytes * BLOCK_LEN)
    if "max_num_seqs" in options:
        scheduler.max_num_seqs = options["max_num_seqs"]
    properties: dict[str, Any] = {}
    if "num_threads" in options:
        properties["INFERENCE_NUM_THREADS"] = options["num_threads"]
    if "inference_precision" in options:
        properties["INFERENCE_PRECISION_HINT"] = options["inference_precision"]
    return openvino_genai.ContinuousBatchingPipeline(settings.folder, scheduler, "CPU", properties)


def run(pipeline: Any, job: Job) -> JobResult:
    gate, handles = RequestGate(job), {}
    while gate.is_open or handles:
        for index in gate.take_due():
            arrival = job.arrivals[index]
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = arrival.max_new_tokens
            config.ignore_eos = True
            config.do_sample = False
            ids = openvino.Tensor(np.array([arrival.prompt_ids], dtype=np.int64))
            handles[index] = pipeline.add_request(index, ids, config)
        if not handles:
            continue
        pipeline.step()
        now_s = gate.now_s()
        for index, handle in list(handles.items()):
            trace = gate.traces[index]
            while handle.can_read():
                for output in handle.read().values():
                    trace.add(list(output.generated_ids), now_s)
            if len(trace.token_ids) >= job.arrivals[index].max_new_tokens:
                del handles[index]
    while pipeline.has_non_finished_requests():
        pipeline.step()
    return JobResult(gate.finish())


def main() -> None:
    output = own_output()
    settings = settings_of_process(*OPTIONS)
    pipeline = start(settings)
    blocks = settings.kv_cache_bytes // (settings.kv_token_bytes * BLOCK_LEN)
    facts = {
        "versions": {name: version(name) for name in ("openvino", "openvino-genai")},
        "kv_cache_bytes": blocks * BLOCK_LEN * settings.kv_token_bytes,  # as if in 16 bits; its default is 8
    }
    answer_jobs(output, lambda job: run(pipeline, job), lambda: facts)


if __name__ == "__main__":
    main()
