"""Benchmarks of Breadbox. `python -m bench --help` says what there is."""
