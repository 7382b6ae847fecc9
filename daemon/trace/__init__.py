"""Trace and replay: what the actors told each other, in a file, and the same requests once more."""
