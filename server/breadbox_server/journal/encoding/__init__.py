"""The journal's records: entries and snapshots as protobuf messages, with checksums."""
