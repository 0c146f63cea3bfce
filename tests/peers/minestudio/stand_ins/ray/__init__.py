"""As much of Ray as MineStudio's online training uses, with threads for processes."""

import itertools
import threading
import traceback
from concurrent.futures import Future
from queue import SimpleQueue

from . import actor, train, util  # noqa: F401, TID252

_named = {}
failures = []
"""What actors' methods raised, and nobody may have asked for."""
_numbers = itertools.count()


class ObjectRef:
    def __init__(self, future):
        self.future = future


class _Method:
    def __init__(self, handle, name):
        self._handle, self._name = handle, name

    def remote(self, *args, **kwargs):
        future = Future()
        self._handle._calls.put((future, self._name, args, kwargs))
        return ObjectRef(future)


class ActorHandle:
    def __init__(self, instance, concurrency):
        self._instance = instance
        self._calls = SimpleQueue()
        for _ in range(concurrency):
            name = f"{type(instance).__name__}-{next(_numbers)}"
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self):
        while True:
            future, name, args, kwargs = self._calls.get()
            try:
                future.set_result(getattr(self._instance, name)(*args, **kwargs))
            except Exception as error:  # noqa: BLE001
                traceback.print_exc()  # Nobody may ask for it, as of MineStudio's senders.
                failures.append(error)
                future.set_exception(error)

    def __getattr__(self, name):
        return _Method(self, name)


class ActorClass:
    def __init__(self, made_of, **options):
        self._made_of, self._options = made_of, options

    def options(self, **options):
        return ActorClass(self._made_of, **(self._options | options))

    def remote(self, *args, **kwargs):
        handle = ActorHandle(
            self._made_of(*args, **kwargs), self._options.get("max_concurrency", 1)
        )
        if "name" in self._options:
            _named[self._options["name"]] = handle
        return handle


def remote(*args, **options):
    if args:
        return ActorClass(args[0])
    return lambda made_of: ActorClass(made_of, **options)


def init(*args, **kwargs):
    pass


def put(value):
    future = Future()
    future.set_result(value)
    return ObjectRef(future)


def get(refs):
    if isinstance(refs, list):
        return [get(ref) for ref in refs]
    return refs.future.result()


def get_actor(name):
    if name not in _named:
        raise ValueError(name)
    return _named[name]
