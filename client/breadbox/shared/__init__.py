"""Small tools of clients and server alike: outage lines, log throttling, tasks, child processes.

Callers: any room and any distribution.
"""
