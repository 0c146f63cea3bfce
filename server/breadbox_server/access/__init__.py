"""Tokens, rights of methods, TLS, credentials. For `rpc`, `gateway`, `admission` and `app.py`."""
