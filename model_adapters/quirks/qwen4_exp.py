"""Qwen4-Exp appends positions to those its indexer keeps, so that keys and positions end with the newest token."""

LEANS = True
