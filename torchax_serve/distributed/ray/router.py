"""Request router of Ray Serve by prefix and load.

Ray sends this module as a copy to the processes that route: state of such a process lies in modules that it imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from torchax_serve.distributed.ray.prefix_affinity import PrefixAffinity, choose_replica, note_replicas

MOST_AHEAD = 4


class PrefixRouter(RequestRouter):
    """Router that sends a request to the replica that has seen its prefix.

    A replica that is much busier than another is not chosen. A request that names its `replica` goes there.
    """

    def initialize_state(self, most_ahead: int = MOST_AHEAD) -> None:
        """Initializes the router; called by Ray with the deployment's ``request_router_kwargs``."""
        self._most_ahead, self._prefixes = most_ahead, PrefixAffinity()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Takes the replicas that there are now; called by Ray."""
        super().update_replicas(replicas)
        by_name: dict[str, list[str]] = {}
        for each in replicas:
            by_name.setdefault(each.replica_id.deployment_id.name, []).append(each.replica_id.unique_id)
        for name, ids in by_name.items():
            note_replicas(name, ids)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns replicas one by one, the preferred one first; Ray tries the next if one is full."""
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if not by_id:
            return []
        request = _request(pending_request)
        if (named := request.get("replica")) in by_id:
            return [[by_id[named]]]
        lengths = self.replica_queue_len_cache
        loads = {name: lengths.get(replica.replica_id) or 0 for name, replica in by_id.items()}
        text = request.get("prefix")
        owner = None if text is None else self._prefixes.replica_for(text, by_id)
        return [[by_id[name]] for name in choose_replica(owner, loads, self._most_ahead)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Records the replica that computes this prefix."""
        text = _request(pending_request).get("prefix")
        if text is not None:
            self._prefixes.record(text, replica_id.unique_id)


def _request(pending: PendingRequest | None) -> Mapping[str, Any]:
    request: Any = pending.args[0] if pending is not None and pending.args else None
    return request if isinstance(request, dict) else {}
