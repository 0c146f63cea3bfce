"""The core's values: inputs, entries, events, errors, limits, ids. No decisions. For any room."""
