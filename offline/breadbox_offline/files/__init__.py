"""Read and write files, and datasets of many files, for users and `main.py`."""
