"""Episodes into files, for `processes` and `acting`."""
