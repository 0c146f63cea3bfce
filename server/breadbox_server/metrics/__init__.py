"""What the server shows to Prometheus, and the port for it. For any room but the core."""
