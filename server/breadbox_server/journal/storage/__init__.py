"""Places for a journal, and claims. For `journal`, `maintenance` and `app.py`."""
