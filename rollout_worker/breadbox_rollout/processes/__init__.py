"""Environment processes under supervision, for `acting` and `worker.py`."""
