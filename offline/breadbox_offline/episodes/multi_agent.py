"""`MultiAgentEpisode`: an `Episode` per agent, each with a clock of environment steps."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox_offline.episodes.episode import Episode
from breadbox_offline.episodes.serialized import episode_from_state, episode_to_state
from breadbox_offline.errors import EpisodeJoinError, EpisodeShapeError, EpisodeStateError


@dataclass(slots=True, eq=False, kw_only=True)
class MultiAgentEpisode:
    """Hold environment steps of several agents; `EpisodeShapeError` if clocks do not fit."""

    id: str
    agents: dict[str, Episode]
    """By agent id; the episodes carry the same id and agent id."""
    clocks: dict[str, NDArray[np.int64]]
    """Per agent, int64[T + 1], ascending: environment step of each observation."""
    terminated: bool = False
    """All agents are done because the environment reached a terminal state."""
    truncated: bool = False
    """The episode was cut off for all agents."""
    t_started: int = 0
    """Environment step at which this run starts."""

    def __post_init__(self) -> None:
        if self.agents.keys() != self.clocks.keys():
            raise EpisodeShapeError(f"episode {self.id!r}: clocks of other agents than episodes")
        for agent_id, episode in self.agents.items():
            clock = self.clocks[agent_id]
            if len(clock) != len(episode) + 1 or (np.diff(clock) < 1).any():
                raise EpisodeShapeError(
                    f"episode {self.id!r}, agent {agent_id!r}: a clock of {len(clock)} ascending "
                    f"steps was wanted for {len(episode)} steps"
                )

    @classmethod
    def from_agents(
        cls,
        episode_id: str,
        episodes: Iterable[Episode],
        *,
        clocks: Mapping[str, NDArray[np.int64]] | None = None,
    ) -> "MultiAgentEpisode":
        """Join agents' episodes; without clocks all act at every step. Raises EpisodeShapeError."""
        agents: dict[str, Episode] = {}
        for episode in episodes:
            agent_id = episode.agent_id
            if agent_id is None or agent_id in agents:
                raise EpisodeShapeError(f"episode {episode_id!r}: agent {agent_id!r} twice or none")
            agents[agent_id] = episode
        clocks = clocks or {
            agent_id: episode.t_started + np.arange(len(episode) + 1)
            for agent_id, episode in agents.items()
        }
        done = [episode for episode in agents.values() if episode.is_done]
        is_over = bool(agents) and len(done) == len(agents)
        return cls(
            id=episode_id,
            agents=agents,
            clocks=dict(clocks),
            terminated=is_over and all(episode.terminated for episode in done),
            truncated=is_over and not all(episode.terminated for episode in done),
            t_started=min((int(clock[0]) for clock in clocks.values()), default=0),
        )

    @property
    def t(self) -> int:
        """Environment step after the last one."""
        return max((int(clock[-1]) for clock in self.clocks.values()), default=self.t_started)

    def __len__(self) -> int:
        """Environment steps."""
        return self.t - self.t_started

    @property
    def is_done(self) -> bool:
        """Whether nothing can follow for any agent."""
        return self.terminated or self.truncated

    def agent_step_count(self) -> int:
        """Steps of all agents together."""
        return sum(len(episode) for episode in self.agents.values())

    def slice(self, start: int, stop: int) -> "MultiAgentEpisode":
        """Return environment steps `start` to `stop` (0 is the first held).

        A step belongs to the slice in which its agent acted; agents that did not act are left out.
        Raises EpisodeShapeError if the range is empty or out of bounds.
        """
        if not 0 <= start < stop <= len(self):
            raise EpisodeShapeError(
                f"episode {self.id!r}: no steps {start}..{stop} in one of {len(self)} steps"
            )
        low, high = self.t_started + start, self.t_started + stop
        agents, clocks = {}, {}
        for agent_id, episode in self.agents.items():
            clock = self.clocks[agent_id]
            first, last = np.searchsorted(clock[:-1], [low, high]).tolist()
            if first < last:
                agents[agent_id] = episode.slice(first, last)
                clocks[agent_id] = clock[first : last + 1]
        reaches_end = stop == len(self)
        return MultiAgentEpisode(
            id=self.id,
            agents=agents,
            clocks=clocks,
            terminated=self.terminated and reaches_end,
            truncated=self.truncated and reaches_end,
            t_started=low,
        )

    def join(self, later: "MultiAgentEpisode") -> "MultiAgentEpisode":
        """Return this run and the one that follows as one; agents may join or leave at the seam.

        Raises EpisodeJoinError for another episode, an end between, or parts that do not continue.
        """
        if self.id != later.id or self.is_done:
            raise EpisodeJoinError(f"episode {self.id!r} is not continued by {later.id!r}")
        agents, clocks = dict(self.agents), dict(self.clocks)
        for agent_id, episode in later.agents.items():
            if agent_id in agents:
                agents[agent_id] = agents[agent_id].join(episode)
                clocks[agent_id] = np.concatenate([clocks[agent_id][:-1], later.clocks[agent_id]])
            else:
                agents[agent_id], clocks[agent_id] = episode, later.clocks[agent_id]
        return MultiAgentEpisode(
            id=self.id,
            agents=agents,
            clocks=clocks,
            terminated=later.terminated,
            truncated=later.truncated,
            t_started=self.t_started,
        )

    def to_state(self) -> dict[str, Any]:
        """The episode as plain values and arrays (`pack_message` serializes them)."""
        return {
            "id_": self.id,
            "agents": {agent_id: episode_to_state(each) for agent_id, each in self.agents.items()},
            "clocks": dict(self.clocks),
            "is_terminated": self.terminated,
            "is_truncated": self.truncated,
            "t_started": self.t_started,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "MultiAgentEpisode":
        """Return the episode that `to_state` described; `EpisodeStateError` if malformed."""
        try:
            return cls(
                id=str(state["id_"]),
                agents={
                    str(agent_id): episode_from_state(held)
                    for agent_id, held in state["agents"].items()
                },
                clocks={
                    str(agent_id): np.asarray(clock, dtype=np.int64)
                    for agent_id, clock in state["clocks"].items()
                },
                terminated=bool(state["is_terminated"]),
                truncated=bool(state["is_truncated"]),
                t_started=int(state["t_started"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise EpisodeStateError(f"not a multi-agent episode: {error!r}") from error


AnyEpisode = Episode | MultiAgentEpisode


def flatten_agents(episodes: Iterable[AnyEpisode]) -> list[Episode]:
    """Every agent's episode, in the order of episodes and, within one, of agents."""
    flat: list[Episode] = []
    for episode in episodes:
        if isinstance(episode, MultiAgentEpisode):
            flat.extend(episode.agents.values())
        else:
            flat.append(episode)
    return flat
