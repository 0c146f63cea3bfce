"""The processes of one distributed learner.

Callers: `training` and `app.py`.
"""
