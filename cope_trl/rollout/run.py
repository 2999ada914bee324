"""The episodes of one call of `EpisodePlayer.play`: which are to come, which are played, which are over."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cope_trl.chat import ChatFormat, Message
from cope_trl.rollout.episode import Episode, EpisodeLimits
from cope_trl.rollout.pool import Call, EnvironmentPool
from cope_trl.spans import Spans
from cope_trl.types import TaskRef, Trajectory


@dataclass(slots=True)
class Run:
    """B episodes, see [`~cope_trl.rollout.episodes.EpisodePlayer`] for what plays them.

    Attributes:
        live: episodes being played, by index.
        done: trajectories of those over, by index.
    """

    pool: EnvironmentPool
    chat: ChatFormat
    stop_ids: frozenset[int]
    limits: EpisodeLimits
    tasks: Sequence[TaskRef]
    messages: Sequence[Sequence[Message]]
    seeds: Sequence[int | None]
    sampling_seeds: Sequence[str]
    max_concurrent: int | None
    on_finished: Callable[[list[Trajectory]], None]
    spans: Spans
    live: dict[int, Episode] = field(default_factory=dict)
    done: dict[int, Trajectory] = field(default_factory=dict)
    _todo: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._todo.extend(range(len(self.tasks)))

    @property
    def unfinished(self) -> bool:
        """Whether any episode is still to be played."""
        return bool(self._todo or self.live)

    def admit(self) -> Episode | None:
        """Begin the next episode with an environment of its own; `None` if there is none, or no room for it yet."""
        if not self._todo or (self.max_concurrent is not None and len(self.live) >= self.max_concurrent):
            return None
        index = self._todo.popleft()
        task = self.tasks[index]
        episode = Episode(index, task, self.messages[index], self.pool.acquire(task.environment))
        self.live[index] = episode
        return episode

    def reset_call(self, episode: Episode) -> Call:
        """The call that resets an episode's environment."""
        options = {"task_id": episode.task.task_id}
        return Call(episode.handle, "reset", kwargs={"seed": self.seeds[episode.index], "options": options})

    def retire(self, episodes: Sequence[Episode]) -> None:
        """Keep the trajectories of episodes that are over, and give their environments back."""
        for episode in episodes:
            self.done[episode.index] = episode.finish(self.chat)
            del self.live[episode.index]
            self.pool.release(episode.handle)
        if episodes:
            self.on_finished([self.done[episode.index] for episode in episodes])
