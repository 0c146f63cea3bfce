class ActorHandle:
    """For annotations."""
