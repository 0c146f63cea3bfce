"""Hold episodes in a buffer and draw from it; for any room but `decoding`."""
