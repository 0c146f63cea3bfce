"""Convert protobuf messages and statuses to values and errors, and choose a server."""
