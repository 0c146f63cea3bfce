"""The Breadbox server: an asyncio shell around the pure core in `breadbox_server.core`."""
