"""What every room of the server uses: clock, background jobs, errors, wire conversion.

Callers: any room but the core. Imports the core's model only.
"""
