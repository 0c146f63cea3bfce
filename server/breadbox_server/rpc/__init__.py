"""The gRPC surface: methods, interceptors, statuses, connections, health, who leads.

Callers: `app.py`. Decides nothing: it converts and calls the parts of `driver.py`.
"""
