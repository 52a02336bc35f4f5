"""transformers' ``generate`` on a static batch: requests that come together and have the same lengths."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from serving_peers.jobs import Job, JobResult, RequestGate, answer_jobs, own_output
from serving_peers.settings import settings_of_process


class GateStreamer(BaseStreamer):
    """Notes the tokens of each step for all rows; the prompt comes before them."""

    def __init__(self, gate: RequestGate) -> None:
        self._gate = gate
        self._seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._seen_prompt:
            now_s = self._gate.now_s()
            for trace, token in zip(self._gate.traces, value.tolist(), strict=True):
                trace.add([token], now_s)
        self._seen_prompt = True

    def end(self) -> None:
        pass


# cache_implementation "static": of fixed shapes, for which transformers compiles its steps on a GPU
OPTIONS = ("cache_implementation", "dtype", "num_threads")


def run(model: Any, job: Job, options: dict[str, Any]) -> JobResult:
    shapes = {(len(each.prompt_ids), each.max_new_tokens, each.at_s, each.after_tokens) for each in job.arrivals}
    if len(shapes) > 1 or any(each.at_s or each.after_tokens is not None for each in job.arrivals):
        raise ValueError("expected requests of one length that come together: a static batch takes no others")
    ids = torch.tensor([each.prompt_ids for each in job.arrivals], device=model.device)
    config = GenerationConfig(do_sample=False, max_new_tokens=job.arrivals[0].max_new_tokens, **options)
    gate = RequestGate(job)
    model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=GateStreamer(gate))
    return JobResult(gate.finish())


def main() -> None:
    output = own_output()
    settings = settings_of_process(*OPTIONS)
    options = dict(settings.options)
    if threads := options.pop("num_threads", None):
        torch.set_num_threads(int(str(threads)))
    model = AutoModelForCausalLM.from_pretrained(settings.folder, dtype=options.pop("dtype", "auto")).eval()
    if torch.cuda.is_available():
        model = model.to("cuda")
    facts = {"versions": {"transformers": version("transformers"), "torch": torch.__version__}}
    answer_jobs(output, lambda job: run(model, job, options), lambda: facts)


if __name__ == "__main__":
    main()
