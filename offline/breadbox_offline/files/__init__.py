"""Readers and writers of files, and datasets of many, for users and `main.py`."""
