"""launchd, systemd and Homebrew: how the service is installed and removed."""
