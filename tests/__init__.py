"""Tests: each part has a folder of its name, `system/` holds one behaviour a file."""
