"""Move payload bytes for clients without access to the store. For `rpc`."""
