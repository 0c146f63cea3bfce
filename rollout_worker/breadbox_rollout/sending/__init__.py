"""Send fragments and reports to the server, and follow models; for `acting` and `app.py`."""
