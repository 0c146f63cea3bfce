"""Steps in memory: arrays, index, priorities, samples."""
