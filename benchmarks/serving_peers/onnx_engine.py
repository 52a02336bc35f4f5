"""ONNX Runtime GenAI's engine of batches."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import numpy as np
import onnxruntime_genai  # type: ignore[import-not-found]

from serving_peers.jobs import Job, JobResult, RequestGate, answer_jobs, own_output
from serving_peers.settings import SystemSettings, settings_of_process

OPTIONS = ("num_threads", "max_num_seqs")
NUM_EVENTS = 1024  # more than a step of any batch here has


class OnnxEngine:
    def __init__(self, settings: SystemSettings) -> None:
        options: dict[str, Any] = settings.options
        config = onnxruntime_genai.Config(settings.folder)
        chosen: dict[str, Any] = {
            "engine": {"static_batching": {"max_batch_size": options.get("max_num_seqs", 32)}},
            "search": {"max_length": settings.max_len},
        }
        if "num_threads" in options:
            chosen["model"] = {"decoder": {"session_options": {"intra_op_num_threads": options["num_threads"]}}}
        config.overlay(json.dumps(chosen))
        self._max_len = settings.max_len
        self._engine = onnxruntime_genai.Engine(onnxruntime_genai.Model(config))
        self._events = self._engine.create_event_buffer(NUM_EVENTS)
        self.max_num_seqs = self._engine.get_capabilities().configured_max_batch_size

    def _begin(self, prompt_ids: list[int], max_new_tokens: int) -> Any:
        options = onnxruntime_genai.RequestOptions()
        options.set_max_session_tokens(self._max_len)
        request = self._engine.create_request(options=options)
        turn = onnxruntime_genai.TurnOptions(request)
        turn.set_max_generated_tokens(max_new_tokens)
        turn.set_min_generated_tokens(max_new_tokens)  # the end of the text is not sampled before
        turn.set_do_sample(False)
        request.begin_turn(np.array(prompt_ids, dtype=np.int32), turn)
        return request

    def run(self, job: Job) -> JobResult:
        flags = onnxruntime_genai.EngineEventFlags
        gate, requests = RequestGate(job), list[tuple[Any, int]]()
        while gate.is_open or self._engine.has_pending_requests():
            for index in gate.take_due():
                arrival = job.arrivals[index]
                requests.append((self._begin(arrival.prompt_ids, arrival.max_new_tokens), index))
            if not self._engine.has_pending_requests():
                continue
            events = self._engine.run(self._events)
            now_s = gate.now_s()
            for event in events:
                if event.flags & flags.FAILED:
                    raise RuntimeError(f"a request failed: {event.error_code}")
                if event.flags & flags.TOKEN:
                    index = next(at for request, at in requests if request == event.request)
                    gate.traces[index].add([int(event.token)], now_s)
        for request, _ in requests:
            request.close()
        return JobResult(gate.finish())


def main() -> None:
    output = own_output()
    settings = settings_of_process(*OPTIONS)
    engine = OnnxEngine(settings)
    facts = {
        "versions": {name: version(name) for name in ("onnxruntime", "onnxruntime-genai")},
        "max_num_seqs": engine.max_num_seqs,
    }
    answer_jobs(output, engine.run, lambda: facts)


if __name__ == "__main__":
    main()
