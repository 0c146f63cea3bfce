"""A rollout worker in a thread of the test: feeds a server until told to stop."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import gymnasium
import torch

import breadbox
from breadbox.model.errors import ClosedError, SessionEndedError
from breadbox.model.fragment import Fragment
from breadbox.model.types import ModelState
from breadbox_policies import PolicyModule, make_policy, set_policy_weights
from support.local_rollout import LocalRollout


class Feeder:
    """Adopts each version and appends what environments give under it."""

    def __init__(
        self,
        address: str,
        *,
        policy: str,
        make_env: Callable[[], gymnasium.Env[Any, Any]],
        env_count: int,
        steps_per_fragment: int,
        fragments_max: int | None,
    ) -> None:
        self._client = breadbox.connect(address)
        self._stop = threading.Event()
        env = make_env()
        self._policy: PolicyModule = make_policy(policy, env.observation_space, env.action_space)
        env.close()
        self._rollout = LocalRollout(
            make_env, env_count=env_count, steps_per_fragment=steps_per_fragment, seed=11
        )
        self._fragments_max = fragments_max
        self._state: ModelState | None = None
        self.appended: list[tuple[str, str, int]] = []
        """(session, worker, index) of every fragment appended."""
        self.failures: list[Exception] = []
        self._thread = threading.Thread(target=self._run, name="feeder")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._client.close()
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._rollout.close()

    def _run(self) -> None:
        torch.set_num_threads(1)
        try:
            while not self._stop.is_set():
                if not self._adopt():
                    continue
                if self._fragments_max is not None and len(self.appended) >= self._fragments_max:
                    self._stop.wait(0.05)
                    continue
                self._append()
        except ClosedError:
            return
        except Exception as error:  # noqa: BLE001  Raised by `feeding` in the test's thread.
            self.failures.append(error)

    def _adopt(self) -> bool:
        """Take over newer weights; whether there are any."""
        newer = self._client.load_model(self._state, max_wait_s=0.5 if self._state is None else 0.0)
        if newer is None:
            return self._state is not None
        before, (self._state, weights) = self._state, newer
        if before is None or self._state.session_id != before.session_id:
            for worker in self._rollout.workers:
                worker.fragment_index = 0
        set_policy_weights(self._policy, weights)
        return True

    def _append(self) -> None:
        state = self._state
        assert state is not None
        assert state.model_version is not None
        fragments: list[Fragment] = self._rollout.collect(
            self._policy, 1, session_id=state.session_id, model_version=state.model_version
        )
        with suppress(SessionEndedError):
            self._client.append_many(fragments)
            self.appended += [(f.session_id, f.worker_id, f.fragment_index) for f in fragments]


@contextmanager
def feeding(
    address: str,
    *,
    policy: str = "mlp",
    make_env: Callable[[], gymnasium.Env[Any, Any]] = lambda: gymnasium.make("CartPole-v1"),
    env_count: int = 8,
    steps_per_fragment: int = 16,
    fragments_max: int | None = None,
) -> Iterator[Feeder]:
    """Feed the server at *address* within the block; fails it if the feeder failed."""
    feeder = Feeder(
        address,
        policy=policy,
        make_env=make_env,
        env_count=env_count,
        steps_per_fragment=steps_per_fragment,
        fragments_max=fragments_max,
    )
    feeder.start()
    try:
        yield feeder
    finally:
        feeder.stop()
    assert [] == feeder.failures, feeder.failures
