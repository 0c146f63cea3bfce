"""Small tools of clients and server: outage lines, log throttling, tasks, ends of steps."""
