"""Request router of Ray Serve by prefix and load. Loaded by Ray, from its path."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from torchax_serve.distributed.ray.prefix_affinity import PrefixAffinity, choose_replica, prefix_key

MOST_AHEAD = 4


class PrefixRouter(RequestRouter):
    """Router that sends a request to the replica that has seen its prefix.

    A replica that is much busier than another is not chosen.
    """

    def initialize_state(self, most_ahead: int = MOST_AHEAD) -> None:
        """Initializes the router; called by Ray with the deployment's ``request_router_kwargs``."""
        self._most_ahead, self._prefixes = most_ahead, PrefixAffinity()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns replicas one by one, the preferred one first; Ray tries the next if one is full."""
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if not by_id:
            return []
        lengths = self.replica_queue_len_cache
        loads = {name: lengths.get(replica.replica_id) or 0 for name, replica in by_id.items()}
        text = _text(pending_request)
        owner = None if text is None else self._prefixes.replica_for(text, by_id)
        return [[by_id[name]] for name in choose_replica(owner, loads, self._most_ahead)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Records the replica that computes this prefix."""
        text = _text(pending_request)
        if text is not None:
            self._prefixes.record(text, replica_id.unique_id)


def _text(pending: PendingRequest | None) -> str | None:
    request: Any = pending.args[0] if pending is not None and pending.args else None
    return prefix_key(request) if isinstance(request, dict) else None
