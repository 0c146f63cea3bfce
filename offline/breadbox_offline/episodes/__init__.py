"""Episodes, the buffer that holds them, and draws from it; for any room but `decoding`."""
