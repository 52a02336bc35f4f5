"""Shared parts of the commands: options, errors, output."""
