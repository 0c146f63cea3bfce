"""Recorded columns and rows to episodes, for `files` and `training`."""
