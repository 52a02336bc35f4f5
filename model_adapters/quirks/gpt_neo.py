"""GPT-Neo cuts its causal masks out of a table by the number of keys, as if the newest key were the last."""

LEANS = True
