"""A policy at work on environments, for the service (players) or files (generator)."""
