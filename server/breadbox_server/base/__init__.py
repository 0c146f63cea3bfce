"""Clock, jobs, errors, wire conversion; for any room but the core, whose model it imports."""
