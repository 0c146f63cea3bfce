"""Tokens, roles, TLS, credentials. For `rpc`, `gateway`, `admission` and `app.py`."""
