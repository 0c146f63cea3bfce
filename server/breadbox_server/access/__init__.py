"""Who may call what: bearer tokens, rights of methods, TLS, generated credentials.

Callers: `rpc`, `gateway`, `admission` and `app.py`.
"""
