"""Turn recorded columns and rows into episodes, for `files` and `training`."""
