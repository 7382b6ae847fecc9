"""One behaviour of the whole product a file, with real processes."""
