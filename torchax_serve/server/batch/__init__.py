"""Files of requests in OpenAI's batch format, answered by the server's application."""

from torchax_serve.server.batch.results import open_results
from torchax_serve.server.batch.run import BatchCounts, run_batch

__all__ = ["BatchCounts", "open_results", "run_batch"]
