"""The commands of the light client, one module each, loaded by name."""
