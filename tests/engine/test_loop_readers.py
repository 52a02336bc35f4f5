"""Wake-ups of asynchronous readers: at once for first tokens and ends, together and with rests for the others."""

import asyncio

from torchax_serve.engine import loop_readers
from torchax_serve.engine.loop_readers import LoopReaders


class Handle:
    """Stands for a handle; counts its wake-ups."""

    def __init__(self):
        self.num_wakes = 0

    def wake(self):
        self.num_wakes += 1


async def turns(number=3):
    """Lets the loop run what is due."""
    for _ in range(number):
        await asyncio.sleep(0)


def test_tokens_of_quick_steps_wake_their_readers_together(monkeypatch):
    monkeypatch.setattr(loop_readers, "WAKE_INTERVAL_S", 1000.0)

    async def main():
        loop = asyncio.get_running_loop()
        real_time, moved_s = loop.time, 0.0
        monkeypatch.setattr(loop, "time", lambda: real_time() + moved_s, raising=False)
        readers, handles, urgent = LoopReaders(), [Handle(), Handle()], Handle()
        readers.notify([], handles)
        await turns()
        assert [each.num_wakes for each in handles] == [1, 1]
        for _ in range(5):  # steps within the rest
            readers.notify([], handles[:1])
            await turns()
        assert [each.num_wakes for each in handles] == [1, 1]
        readers.notify([urgent], handles[1:])
        assert urgent.num_wakes == 1
        await turns()
        assert [each.num_wakes for each in handles] == [1, 1]
        moved_s = 1001.0
        readers.notify([], [])
        loop.call_soon(lambda: None)  # so that the loop looks at its timers
        await turns(6)
        assert min(each.num_wakes for each in handles) >= 2

    asyncio.run(main())
