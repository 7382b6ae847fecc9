"""Hostile input: what a fuzzer chooses, run against the real code (docs/security.md)."""
