"""The command line: `breadbox <command>`."""
