"""Calls on threads."""

import threading


def at_once(call, items, timeout_s=300):
    """What `call` makes of each of `items`, on a thread each, which all begin together; the first error is raised."""
    start, found, errors = threading.Barrier(len(items)), [None] * len(items), []

    def run(index, item):
        start.wait()
        try:
            found[index] = call(item)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(items)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), f"a call took more than {timeout_s} s"
    return found
