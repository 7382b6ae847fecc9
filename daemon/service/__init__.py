"""The daemon as a service of its user: a LaunchAgent on macOS, systemd units on Linux."""
