"""Clock, background jobs, errors, wire conversion; for any room but the core.

Imports its model only.
"""
