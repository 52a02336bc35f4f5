"""GPT-Neo and MPT cut by the number of keys, as if the newest key were the last, and take nothing else to count by.

GPT-Neo cuts its causal masks out of a table, MPT its biases, which are distances.
"""

LEANS = True
