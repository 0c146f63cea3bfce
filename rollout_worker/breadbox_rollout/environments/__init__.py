"""Run environments as rows of shared arrays, for `processes`, `recording`, `acting`."""
