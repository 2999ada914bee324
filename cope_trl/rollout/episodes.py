"""Playing episodes: tasks × an environment pool × something that samples turns → trajectories.

With a [`~cope_trl.rollout.generation.TurnEngine`] every episode goes at its own pace (`rollout/streaming.py`). With a
[`~cope_trl.rollout.generation.Policy`] the episodes of a process advance in lock step, one policy call a turn. Where
ranks must make that call equally often, `any_active` tells a rank that has finished to go on with a placeholder.
"""

from collections.abc import Callable, Sequence

from cope_trl.chat import ChatFormat, Message
from cope_trl.rollout.episode import EpisodeLimits
from cope_trl.rollout.generation import Policy, TurnEngine
from cope_trl.rollout.pool import EnvironmentPool
from cope_trl.rollout.run import Run
from cope_trl.rollout.streaming import Stream
from cope_trl.spans import Spans
from cope_trl.types import TaskRef, Trajectory

__all__ = ["EpisodeLimits", "EpisodePlayer"]


class EpisodePlayer:
    """Plays episodes.

    Args:
        pool: where environments come from.
        policy: samples the turns.
        chat: renders what lies between two turns.
        stop_ids: ids that end a policy turn.
        any_active: tells whether any rank still plays, given whether this one does; the default asks nobody else.
            Only asked in lock step.
        max_concurrent: most episodes played at a time, each with an environment of its own; `None` plays all at once.
        spans: notes where the time goes.
    """

    def __init__(
        self,
        pool: EnvironmentPool,
        policy: Policy | TurnEngine,
        chat: ChatFormat,
        stop_ids: Sequence[int],
        any_active: Callable[[bool], bool] = bool,
        max_concurrent: int | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.pool = pool
        self.policy = policy
        self.chat = chat
        self.stop_ids = frozenset(stop_ids) | {chat.end_of_turn_id}
        self.any_active = any_active
        self.max_concurrent = max_concurrent
        self.spans = spans or Spans()

    def play(
        self,
        tasks: Sequence[TaskRef],
        messages: Sequence[Sequence[Message]],
        limits: EpisodeLimits,
        seeds: Sequence[int | None] | None = None,
        sampling_seeds: Sequence[str] | None = None,
        on_finished: Callable[[list[Trajectory]], None] = lambda finished: None,
    ) -> list[Trajectory]:
        """Play each task once.

        Args:
            tasks: B tasks; the same task may appear several times (a group).
            messages: B lists of standing messages (a dataset's `prompt` column).
            limits: when an episode is cut.
            seeds: B seeds for `reset`, or `None`.
            sampling_seeds: B seeds of the random numbers that decide the policy's tokens, where it is a
                [`~cope_trl.rollout.generation.TurnEngine`]; `None` numbers the episodes.
            on_finished: called with the episodes that have just ended, for progress.

        Returns:
            B trajectories in the order of the tasks. Failures and truncations are marked, never raised.

        Raises:
            ValueError: `messages` or the seeds are not as many as the tasks.
            One of `USER_MISTAKES`: an environment cannot be made, or does not know its task.
        """
        count = len(tasks)
        run = Run(
            pool=self.pool,
            chat=self.chat,
            stop_ids=self.stop_ids,
            limits=limits,
            tasks=tasks,
            messages=messages,
            seeds=seeds if seeds is not None else [None] * count,
            sampling_seeds=sampling_seeds if sampling_seeds is not None else [str(index) for index in range(count)],
            max_concurrent=self.max_concurrent,
            on_finished=on_finished,
            spans=self.spans,
        )
        for name in ("messages", "seeds", "sampling_seeds"):
            if len(getattr(run, name)) != count:
                raise ValueError(f"`{name}` has {len(getattr(run, name))} entries for {count} tasks; give one a task")
        if callable(self.policy):
            self._play_in_step(run, self.policy)
        else:
            Stream(run, self.policy).play()
        return [run.done[index] for index in range(count)]

    # ---------------------------------------------------------------- lock step

    def _play_in_step(self, run: Run, policy: Policy) -> None:
        try:
            while True:
                self._begin(run)
                if not self.any_active(bool(run.live)):
                    return
                self._turn(run, policy)
                self._retire(run)
        finally:
            for episode in run.live.values():
                self.pool.release(episode.handle)

    def _begin(self, run: Run) -> None:
        # Those that fail at once make room for others.
        while admitted := list(iter(run.admit, None)):
            with self.spans("environment"):
                results = self.pool.run([run.reset_call(episode) for episode in admitted])
            for episode, result in zip(admitted, results, strict=True):
                episode.begin(result, self.chat, run.limits)
            self._retire(run)

    def _retire(self, run: Run) -> None:
        run.retire([episode for episode in run.live.values() if not episode.active])

    def _turn(self, run: Run, policy: Policy) -> None:
        active, limits = list(run.live.values()), run.limits
        with self.spans("generate"):
            if not active:  # another rank still plays: keep the collective calls in step
                policy([[self.chat.end_of_turn_id]], 1)
                return
            longest = max(episode.budget(limits) for episode in active)
            generations = policy([episode.ids for episode in active], longest)
        answered = [
            episode
            for episode, generation in zip(active, generations, strict=True)
            if episode.record(generation, self.chat, limits, self.stop_ids)
        ]
        with self.spans("environment"):
            results = self.pool.run([episode.step_call() for episode in answered])
        for episode, result in zip(answered, results, strict=True):
            episode.observe(result, self.chat, limits)
