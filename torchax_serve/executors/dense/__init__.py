"""Execution of one request or a static batch on a dense cache."""
