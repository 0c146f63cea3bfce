"""What the server shows to Prometheus, and the port where it does.

Callers: any room but the core.
"""
