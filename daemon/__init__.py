"""The daemon process: command line, configuration, wiring, sessions, shutdown."""
