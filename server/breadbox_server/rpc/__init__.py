"""The gRPC surface: it converts and calls the parts of `driver.py`. For `app.py`."""
