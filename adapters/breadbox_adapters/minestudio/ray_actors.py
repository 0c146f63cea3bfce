"""Classes that are Ray actors for who has Ray, and plain classes for who has not."""

from typing import Any


class RayActorClass:
    """Gives a class the two class methods by which Ray's users make actors of one.

    Ray is imported when one of them is called.
    """

    @classmethod
    def remote(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a Ray actor of it, with Ray's default options; returns its handle."""
        return cls.options().remote(*args, **kwargs)

    @classmethod
    def options(cls, **options: Any) -> Any:
        """The class as a Ray actor class with options, whose `remote` makes the actor."""
        import ray

        actor_class = ray.remote(cls)
        return actor_class.options(**options) if options else actor_class
