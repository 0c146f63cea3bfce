"""What all payload stores share: protocols, deadlines, keys, URLs.

Callers: the stores, and whatever opens one.
"""
