"""Act with policies in environments, for the server (players) or for files (generator)."""
