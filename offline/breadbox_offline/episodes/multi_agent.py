"""`MultiAgentEpisode`: an `Episode` per agent, each with a clock of environment steps."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from breadbox_offline.episodes.episode import Episode
from breadbox_offline.errors import EpisodeJoinError, EpisodeShapeError


@dataclass(slots=True, eq=False, kw_only=True)
class MultiAgentEpisode:
    """Environment steps of several agents; raises `EpisodeShapeError` if clocks do not match."""

    id: str
    agents: dict[str, Episode]
    """Episodes by agent id; they have the same id, and their agent id."""
    clocks: dict[str, NDArray[np.int64]]
    """int64[T + 1] by agent id, ascending: environment step of each observation."""
    terminated: bool = False
    """True if all agents are done because the environment reached a terminal state."""
    truncated: bool = False
    """True if the episode was cut off for all agents."""
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
        """Return the number of environment steps."""
        return self.t - self.t_started

    @property
    def is_done(self) -> bool:
        """True if no step can follow for any agent."""
        return self.terminated or self.truncated

    def agent_step_count(self) -> int:
        """Return the number of steps of all agents together."""
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
        """Return this episode and the part that follows it as one; agents may join or leave.

        Raises EpisodeJoinError for another episode, an end between, or parts that do not follow.
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


AnyEpisode = Episode | MultiAgentEpisode


def flatten_agents(episodes: Iterable[AnyEpisode]) -> list[Episode]:
    """Return every agent's episode, in the order of episodes and, within one, of agents."""
    flat: list[Episode] = []
    for episode in episodes:
        if isinstance(episode, MultiAgentEpisode):
            flat.extend(episode.agents.values())
        else:
            flat.append(episode)
    return flat
