"""llama.cpp by its C interface (`llama_shim.cc`): a loop of steps as its server has, without HTTP."""

from __future__ import annotations

import ctypes
import itertools
import os
from pathlib import Path
from typing import Any

from serving_peers.jobs import Job, JobResult, RequestGate, answer_jobs, own_output
from serving_peers.settings import SystemSettings, settings_of_process

OPTIONS = ("num_threads", "max_num_seqs", "library")
BATCH_LEN = 2048  # llama-server's own default of --batch-size
FLASH_PADDING = 256  # llama.cpp rounds the context of a sequence up to a multiple of this


class Sequence:
    """A request that runs: how much of its prompt is computed, and what comes next."""

    def __init__(self, index: int, slot: int, prompt_ids: list[int], max_new_tokens: int) -> None:
        self.index, self.slot = index, slot
        self.pending = list(prompt_ids)  # tokens not computed yet: of the prompt, then the last one generated
        self.num_computed, self.num_left = 0, max_new_tokens


class LlamaEngine:
    def __init__(self, settings: SystemSettings) -> None:
        options: dict[str, Any] = settings.options
        self._library = ctypes.CDLL(options["library"])
        self._library.engine_open.restype = ctypes.c_void_p
        self._library.engine_system_info.restype = ctypes.c_char_p
        self._num_slots = int(options.get("max_num_seqs", 32))
        slot_len = -(-settings.max_len // FLASH_PADDING) * FLASH_PADDING
        model = Path(settings.folder)
        path = str(model if model.is_file() else next(model.glob("*.gguf")))
        threads = int(options.get("num_threads") or len(os.sched_getaffinity(0)))
        pointer = self._library.engine_open(
            path.encode(), threads, slot_len * self._num_slots, self._num_slots, BATCH_LEN
        )
        if not pointer:
            raise RuntimeError(f"llama.cpp could not load {path}; its log says why")
        self._engine = ctypes.c_void_p(pointer)
        self.context_len = int(self._library.engine_context_len(self._engine))
        self.system_info = self._library.engine_system_info().decode()

    def run(self, job: Job) -> JobResult:
        gate, running, free = RequestGate(job), [], list(range(self._num_slots))
        waiting: list[int] = []
        while gate.is_open or waiting or running:
            waiting += gate.take_due()
            while waiting and free:
                index = waiting.pop(0)
                arrival = job.arrivals[index]
                running.append(Sequence(index, free.pop(0), arrival.prompt_ids, arrival.max_new_tokens))
            if running:
                self._step(running, gate)
            for done in [each for each in running if not each.num_left]:
                running.remove(done)
                free.append(done.slot)
                self._library.engine_forget(self._engine, done.slot)
        return JobResult(gate.finish())

    def _step(self, running: list[Sequence], gate: RequestGate) -> None:
        """Sequences that decode come first, then as much of prompts as a batch holds: llama-server's order."""
        rows: list[tuple[int, int, int, int]] = []  # token, position, slot, whether its logits are read
        read: dict[int, Sequence] = {}
        for each in sorted(running, key=lambda sequence: len(sequence.pending)):
            taken, each.pending = each.pending[: BATCH_LEN - len(rows)], each.pending[BATCH_LEN - len(rows) :]
            rows += [(token, each.num_computed + i, each.slot, 0) for i, token in enumerate(taken)]
            each.num_computed += len(taken)
            if taken and not each.pending:
                rows[-1] = (*rows[-1][:3], 1)
                read[len(rows) - 1] = each
        numbers = ctypes.c_int32 * len(rows)
        columns = [numbers(*column) for column in itertools.islice(zip(*rows, strict=True), 3)]
        is_read, found = (ctypes.c_int8 * len(rows))(*(row[3] for row in rows)), numbers()
        code = self._library.engine_step(self._engine, len(rows), *columns, is_read, found)
        if code:
            raise RuntimeError(f"llama_decode returned {code}; its log says why")
        now_s = gate.now_s()
        for row, each in read.items():
            gate.traces[each.index].add([found[row]], now_s)
            each.pending, each.num_left = [found[row]], each.num_left - 1


def main() -> None:
    output = own_output()
    settings = settings_of_process(*OPTIONS)
    engine = LlamaEngine(settings)
    facts = {"system_info": engine.system_info, "kv_cache_bytes": engine.context_len * settings.kv_token_bytes}
    answer_jobs(output, engine.run, lambda: facts)


if __name__ == "__main__":
    main()
