"""Count and show metrics for Prometheus on an HTTP port. For any room but the core."""
