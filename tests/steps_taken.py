"""Steps of an engine, counted once none is under way: it runs one ahead of the answers that it has handed out."""

import time


def steps_taken(model):
    for _ in range(1000):
        stats = model.engine.stats()
        if not (stats.scheduler.num_in_flight or stats.scheduler.num_running):
            return stats.num_steps
        time.sleep(0.01)
    raise AssertionError("the engine is still at work after ten seconds")
