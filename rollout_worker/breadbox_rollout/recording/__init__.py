"""Record episodes into files, for `processes` and `acting`."""
