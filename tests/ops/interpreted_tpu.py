"""TPU kernels in interpret mode: memory begins as NaN, DMAs come late, and accesses that nothing orders are reported.

JAX compares each access to a buffer with all earlier ones, and asks the traceback for the line of each, which takes
minutes for a kernel of many small accesses. Here one whose clock is behind those of all earlier ones is compared with
none of them, since nothing races with it, and lines are found for reports alone. A JAX whose class is another one than
that of 0.10 has its own.
"""

import inspect

import numpy as np
from jax._src import source_info_util
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState
from jax.experimental.pallas import tpu as pltpu

PARAMS = pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan", detect_races=True)
IS_KNOWN = "num_cores" in inspect.signature(RaceDetectionState).parameters
"""Whether JAX's class is the one that `AccessesInOrder` is made for."""


class Line:
    """Where an access is written, which is looked up when it is printed."""

    def __init__(self, source_info):
        self.source_info = source_info

    def __str__(self):
        return "pallas_call" if self.source_info is None else source_info_util.summarize(self.source_info)


class AccessesInOrder(RaceDetectionState):
    """Reports the races that JAX's own class does."""

    def __init__(self, num_cores):
        super().__init__(num_cores)
        # Of each buffer, the greatest count of each core in the clocks of its reads, and of its writes.
        self._newest_reads, self._newest_writes = {}, {}

    def check_read(self, device_id, local_core_id, clock, buffer_key, rnge, source_info=None):
        with self.lock:
            is_last = _is_behind(clock, self._newest_writes.get(buffer_key))
            _note(self._newest_reads, buffer_key, clock)
            if is_last:
                self.reads[buffer_key].append((device_id, local_core_id, clock, rnge, Line(source_info)))
        if not is_last:
            super().check_read(device_id, local_core_id, clock, buffer_key, rnge, source_info)

    def check_write(self, device_id, local_core_id, clock, buffer_key, rnge, source_info=None):
        with self.lock:
            newest = self._newest_reads.get(buffer_key), self._newest_writes.get(buffer_key)
            is_last = all(_is_behind(clock, each) for each in newest)
            _note(self._newest_writes, buffer_key, clock)
            if is_last:
                self.writes[buffer_key].append((device_id, local_core_id, clock, rnge, Line(source_info)))
        if not is_last:
            super().check_write(device_id, local_core_id, clock, buffer_key, rnge, source_info)


def _is_behind(clock, newest):
    """Returns whether all clocks of which `newest` is the greatest come before this one."""
    return newest is None or bool((newest <= clock).all() and (newest < clock).any())


def _note(newest, buffer_key, clock):
    known = newest.get(buffer_key)
    newest[buffer_key] = clock if known is None else np.maximum(known, clock)


if IS_KNOWN:
    interpret_pallas_call.RaceDetectionState = AccessesInOrder
