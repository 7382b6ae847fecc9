"""The Trio actors and the pure policies they run."""
