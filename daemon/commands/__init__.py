"""The commands, one module each; `daemon.cli` collects them."""
