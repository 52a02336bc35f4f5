"""MPT cuts its biases by the number of keys, and takes no positions that would say so: distances are all it knows."""

LEANS = True
