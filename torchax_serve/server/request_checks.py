"""Checks of lists and numbers in a request before any work is done for it."""

from __future__ import annotations

from torchax_serve.sampling_params import MAX_STOPS
from torchax_serve.server.errors import bad_request
from torchax_serve.server.options import RequestLimits
from torchax_serve.server.schemas import TextRequest


def check_counts(request: TextRequest, limits: RequestLimits) -> None:
    """Raises ApiError, 400, for a number of answers or of stop strings beyond the limits."""
    num_answers = 1 if request.n is None else request.n
    if not 1 <= num_answers <= limits.max_answers:
        raise bad_request(
            f"n: expected a whole number from 1 to {limits.max_answers}, got {num_answers}", "n", "invalid_value"
        )
    if request.best_of is not None and request.best_of != num_answers:
        raise bad_request(f"best_of: expected n={num_answers}, got {request.best_of}", "best_of", "invalid_value")
    if isinstance(request.stop, list) and len(request.stop) > MAX_STOPS:
        raise bad_request(
            f"stop: expected at most {MAX_STOPS} strings, got {len(request.stop)}", "stop", "invalid_value"
        )
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options: expected stream true with it", "stream_options", "invalid_value")
