"""Steps in memory: arrays, index, priorities, samples.

Callers: `mirror`.
"""
