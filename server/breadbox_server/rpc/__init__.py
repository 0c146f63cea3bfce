"""The gRPC surface: methods, append stream, interceptors, statuses, connections, health, who leads.

Callers: `app.py`. Decides nothing: it converts and calls the parts of `driver.py`.

More than thirteen modules: append streams and untaken answers have two each, of one idea.
"""
