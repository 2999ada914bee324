"""The turn loop against an independent account of where an episode must end, at every cut point."""

import threading
import time
from dataclasses import replace
from functools import cache

import gymnasium
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import BACK, FORMATS, GO, TALK, CountEnv, OneByOne, ScriptedPolicy, make_tokenizer

from cope_trl.chat import ChatFormat
from cope_trl.rollout.episodes import EpisodeLimits, EpisodePlayer
from cope_trl.rollout.generation import Generation
from cope_trl.rollout.pool import EnvironmentPool
from cope_trl.types import TaskRef
from env_adapters.errors import MissingDependencyError, UnknownEnvironmentError, UnknownTaskError
from env_adapters.protocols import ToolCall

BROAD = EpisodeLimits({"": 6}, max_tokens_per_turn=200, max_completion_length=5000)
MESSAGES = CountEnv.standing_messages()


class Watched(CountEnv):
    """Notes every reply it is given and how it was reset."""

    replies: list[str] = []  # noqa: RUF012 - emptied by `play`
    resets: list[tuple] = []  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        Watched.resets.append((seed, options))
        return super().reset(seed=seed, options=options)

    def step(self, reply):
        Watched.replies.append(reply)
        return super().step(reply)


class LoggedPolicy(ScriptedPolicy):
    """Reports a log-probability that tells which id it belongs to."""

    def __call__(self, prompts, max_new_tokens):
        generations = super().__call__(prompts, max_new_tokens)
        return [Generation(g.ids, [logprob(i) for i in g.ids]) for g in generations]


def logprob(token: int) -> float:
    return -(token + 1) / 1000


@cache
def chat_of(name: str = "qwen2_5") -> ChatFormat:
    return ChatFormat(make_tokenizer(name))


@pytest.fixture
def pool():
    pool = EnvironmentPool(lambda name: Watched(), timeout=10.0)
    yield pool
    pool.close()


# One pool for all examples of a property: making threads for each would only cost time.
_SHARED = EnvironmentPool(lambda name: Watched(), timeout=10.0)


@pytest.fixture(params=["lock step", "as ready"], autouse=True, scope="module")
def schedule(request):
    """Every test holds for episodes in lock step and for episodes at their own pace."""
    play.schedule = request.param
    yield request.param
    play.schedule = "lock step"


def play(scripts, goals, limits=BROAD, pool=None, chat=None, policy=LoggedPolicy, end=None, stop_ids=(), **kwargs):
    """Play `count-n` for each goal; script i is what episode i says."""
    chat = chat or chat_of()
    Watched.replies, Watched.resets = [], []
    policy = policy(chat.tokenizer, scripts, chat.end_of_turn_id if end is None else end)
    sampler = OneByOne(policy) if play.schedule == "as ready" else policy
    player = EpisodePlayer(pool or _SHARED, sampler, chat, stop_ids, **kwargs.pop("player", {}))
    tasks = [TaskRef("count", f"count-{goal}") for goal in goals]
    trajectories = player.play(tasks, [MESSAGES] * len(tasks), limits, **kwargs)
    play.policy = policy
    return trajectories


play.schedule = "lock step"


def check_invariants(trajectory, chat=None):
    """What holds of every trajectory, however it ended."""
    chat = chat or chat_of()
    size, prompt = len(trajectory.completion_ids), len(trajectory.prompt_ids)
    assert size == len(trajectory.completion_mask) >= 1
    sampled = {i for turn in trajectory.turns for i in range(turn.start - prompt, turn.end - prompt)}
    assert [int(i in sampled) for i in range(size)] == list(trajectory.completion_mask)
    previous = 0
    for turn in trajectory.turns:
        assert previous <= turn.history_end <= turn.start <= turn.end <= prompt + size
        assert turn.start - turn.history_end == len(chat.generation_prompt_ids)
        assert list(trajectory.ids[turn.history_end : turn.start]) == chat.generation_prompt_ids
        assert bool(turn.target) == bool(turn.action)
        assert turn.target in turn.reply
        previous = turn.end
    if trajectory.logprobs is not None:
        pairs = zip(trajectory.completion_ids, trajectory.completion_mask, strict=True)
        assert list(trajectory.logprobs) == [logprob(i) if kept else 0.0 for i, kept in pairs]
    assert not (trajectory.success and (trajectory.truncated or trajectory.failed))
    assert trajectory.failed == (trajectory.error is not None)


def expected_end(full, won, limits):
    """Where the unlimited episode `full` must end under `limits`: (completion ids, turns, executed, success).

    An account of its own, in terms of the spans of the whole episode.
    """
    prompt = len(full.prompt_ids)
    room = limits.max_completion_length
    if limits.max_total_tokens is not None:
        room = min(room, limits.max_total_tokens - prompt)
    for index, turn in enumerate(full.turns):
        start, end = turn.start - prompt, turn.end - prompt
        allowed = min(end, room, start + limits.max_tokens_per_turn)
        if allowed < end:
            return full.completion_ids[:allowed], index + 1, index, False
        if index + 1 == len(full.turns) and won:
            return full.completion_ids[:end], index + 1, index + 1, True
        last = index + 1 == limits.max_turns[""] or index + 1 == len(full.turns)
        if last or full.turns[index + 1].start - prompt >= room:
            return full.completion_ids[:end], index + 1, index + 1, False
    raise AssertionError


def check_cut(full, limits, cut):
    ids, turns, executed, success = expected_end(full, full.success, limits)
    check_invariants(cut)
    assert cut.completion_ids == ids
    assert cut.prompt_ids == full.prompt_ids
    assert len(cut.turns) == turns
    assert cut.turns[:executed] == full.turns[:executed]
    assert (cut.success, cut.truncated, cut.failed) == (success, not success, False)
    assert cut.score == (cut.turns[executed - 1].score if executed else 0.0)
    assert len(cut.completion_ids) <= limits.max_completion_length
    for turn in cut.turns[executed:]:  # the turn that was cut: kept, and never executed
        assert (turn.action, turn.target, turn.observation) == ("", "", "")
        assert turn.end - turn.start >= 1
        assert full.turns[executed].reply.startswith(turn.reply.rstrip("�"))
    assert Watched.replies == [turn.reply for turn in full.turns[:executed]]


LONG = ([BACK, GO, TALK, GO, GO], 3)


def test_the_whole_episode(pool):
    (full,) = play([LONG[0]], [LONG[1]], pool=pool)
    check_invariants(full)
    assert (full.success, full.truncated, full.failed, full.score) == (True, False, False, 1.0)
    assert [turn.action for turn in full.turns] == ["back", "go", "", "go", "go"]
    assert [turn.invalid for turn in full.turns] == [True, False, True, False, False]
    assert [turn.score for turn in full.turns] == pytest.approx([0, 1 / 3, 0, 2 / 3, 1])
    assert full.first_observation == "You are in room 0. Go to room 3."
    assert full.turns[1].observation == "You are in room 1. You see a door."
    assert full.layout == "list"
    assert full.environment_seconds > 0
    # What was trained is what was sampled, id for id.
    tokenizer, end = chat_of().tokenizer, chat_of().end_of_turn_id
    sampled = [i for reply in LONG[0] for i in [*tokenizer(reply, add_special_tokens=False)["input_ids"], end]]
    kept = [i for i, m in zip(full.completion_ids, full.completion_mask, strict=True) if m]
    assert kept == sampled
    # Each prompt of the policy is the episode so far, to the end of the generation prompt.
    assert play.policy.seen == [list(full.ids[: turn.start]) for turn in full.turns]


def test_every_cut_point_of_the_completion():
    (full,) = play([LONG[0]], [LONG[1]])
    for limit in range(1, len(full.completion_ids) + 3):
        limits = replace(BROAD, max_completion_length=limit)
        (cut,) = play([LONG[0]], [LONG[1]], limits)
        check_cut(full, limits, cut)
    assert cut.success


def test_every_cut_point_of_the_context():
    (full,) = play([LONG[0]], [LONG[1]])
    for limit in range(len(full.prompt_ids) + 1, len(full.ids) + 2):
        limits = replace(BROAD, max_total_tokens=limit)
        (cut,) = play([LONG[0]], [LONG[1]], limits)
        assert len(cut.ids) <= limit
        check_cut(full, limits, cut)
    assert cut.success


def test_every_cut_point_of_a_turn():
    (full,) = play([LONG[0]], [LONG[1]])
    longest = max(turn.end - turn.start for turn in full.turns)
    for limit in range(1, longest + 2):
        limits = replace(BROAD, max_tokens_per_turn=limit)
        (cut,) = play([LONG[0]], [LONG[1]], limits)
        check_cut(full, limits, cut)
        assert cut.success == (limit >= longest)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    script=st.lists(st.sampled_from([GO, BACK, TALK, "Action: ünï 🚪", "x"]), min_size=1, max_size=5),
    goal=st.integers(1, 4),
    turns=st.integers(1, 6),
    per_turn=st.integers(1, 30),
    completion=st.integers(1, 260),
    context=st.none() | st.integers(1, 260),
)
def test_limits_in_any_combination(script, goal, turns, per_turn, completion, context):
    (full,) = play([script], [goal])
    total = None if context is None else len(full.prompt_ids) + context
    limits = EpisodeLimits({"": turns}, per_turn, completion, max_total_tokens=total)
    (cut,) = play([script], [goal], limits)
    check_cut(full, limits, cut)


def test_episodes_of_one_call_do_not_touch_each_other():
    """Limits bind each episode at its own length: together is the same as alone."""
    scripts, goals = [[GO], LONG[0], [TALK, GO], ["Thought: " + "so " * 20 + "Action: go"]], [2, 3, 1, 1]
    limits = replace(BROAD, max_completion_length=90, max_tokens_per_turn=25)
    alone = [play([script], [goal], limits)[0] for script, goal in zip(scripts, goals, strict=True)]
    together = play(scripts, goals, limits)
    assert [replace(t, environment_seconds=0.0) for t in together] == [
        replace(t, environment_seconds=0.0) for t in alone
    ]
    assert [t.truncated for t in together] == [False, True, False, True]


def test_a_policy_that_goes_on_too_long_is_cut():
    """One call samples for all episodes, up to the largest of their limits; each keeps its own."""

    class Talker(LoggedPolicy):
        def __call__(self, prompts, max_new_tokens):
            return super().__call__(prompts, 10**6)

    (full,) = play([LONG[0]], [LONG[1]])
    for limit in (1, len(full.completion_ids) // 2, len(full.completion_ids) - 1):
        limits = replace(BROAD, max_completion_length=limit)
        (cut,) = play([LONG[0]], [LONG[1]], limits, policy=Talker)
        check_cut(full, limits, cut)


def test_turn_limit_by_environment_and_the_default():
    (cut,) = play([[BACK]], [2], replace(BROAD, max_turns={"count": 2, "": 5}))
    assert (len(cut.turns), cut.truncated, cut.success) == (2, True, False)
    (cut,) = play([[BACK]], [2], replace(BROAD, max_turns={"other": 2, "": 5}))
    assert len(cut.turns) == 5
    assert replace(BROAD, max_turns={}).turns("count") == 30


def test_success_on_the_last_allowed_turn_counts():
    (won,) = play([[GO]], [2], replace(BROAD, max_turns={"": 2}))
    assert (won.success, won.truncated) == (True, False)
    (cut,) = play([[GO]], [3], replace(BROAD, max_turns={"": 2}))
    assert (cut.success, cut.truncated, cut.score) == (False, True, pytest.approx(2 / 3))


def test_a_prompt_that_is_too_long_fails_its_episode_only():
    short, long = play([[GO], [GO]], [1, 10**40], replace(BROAD, max_completion_length=60))
    size = len(short.prompt_ids)
    assert size < len(long.prompt_ids)
    limits = replace(BROAD, max_prompt_length=size)
    short, long = play([[GO], [GO]], [1, 10**40], limits)
    assert short.success
    assert (long.failed, long.truncated, long.turns) == (True, False, ())
    assert f"{len(long.prompt_ids)} tokens, more than `max_prompt_length`={size}" in long.error
    assert (long.completion_mask, long.logprobs) == ((0,), (0.0,))
    assert len(long.prompt_ids) > size  # kept whole
    (at_limit,) = play([[GO]], [1], replace(BROAD, max_prompt_length=size))
    assert not at_limit.failed


def test_a_prompt_that_fills_the_context_fails():
    (full,) = play([[GO]], [1])
    (episode,) = play([[GO]], [1], replace(BROAD, max_total_tokens=len(full.prompt_ids)))
    assert episode.failed
    assert f"leaves no room in the model's context of {len(full.prompt_ids)}" in episode.error


def test_a_reply_without_end_of_turn_is_never_executed(pool):
    (cut,) = play([[GO]], [1], pool=pool, end=chat_of().tokenizer.convert_tokens_to_ids("o"))
    assert (cut.truncated, cut.success, Watched.replies) == (True, False, [])
    assert cut.turns[0].reply.startswith("Thought")


def test_an_empty_generation_truncates():
    def silent(tokenizer, scripts, end):
        return lambda prompts, max_new_tokens: [Generation([], []) for _ in prompts]

    (cut,) = play([[GO]], [1], policy=silent)
    check_invariants(replace(cut, logprobs=None))
    assert (cut.truncated, cut.failed, cut.completion_mask, cut.logprobs) == (True, False, (0,), (0.0,))
    assert (cut.turns[0].start, cut.turns[0].end) == (len(cut.prompt_ids),) * 2
    assert Watched.replies == []


def test_without_log_probabilities_there_are_none():
    (full,) = play([LONG[0]], [LONG[1]], policy=ScriptedPolicy)
    assert full.logprobs is None
    check_invariants(full)


def test_another_stop_token_ends_a_turn_and_the_template_closes_it():
    chat = chat_of()
    stop = chat.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    (full,) = play([[GO]], [2], end=stop, stop_ids=[stop])
    check_invariants(full)
    assert full.success
    first, second = full.turns
    assert full.ids[first.end - 1] == stop
    assert full.ids[first.end] == chat.end_of_turn_id
    assert full.completion_mask[first.end - len(full.prompt_ids)] == 0
    assert first.reply == second.reply == GO


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_histories_are_what_the_template_renders(name):
    """`ids[:history_end]` is the conversation so far without a generation prompt, `ids[:start]` with it."""
    chat = chat_of(name)
    # What these templates write before every reply, a model of theirs writes too.
    opening = {"mistral": " ", "qwen3": "<think>\nHm.\n</think>\n\n"}.get(name, "")
    (full,) = play([[opening + reply for reply in LONG[0]]], [LONG[1]], chat=chat)
    assert full.success
    check_invariants(full, chat)
    messages = [*MESSAGES, {"role": "user", "content": full.first_observation}]
    for turn in full.turns:
        for end, prompted in ((turn.history_end, False), (turn.start, True)):
            text = chat.tokenizer.apply_chat_template(
                messages, chat_template=chat.chat_template, tokenize=False, add_generation_prompt=prompted
            )
            assert chat.tokenizer(text, add_special_tokens=False)["input_ids"] == list(full.ids[:end]), (
                turn,
                prompted,
            )
        messages.append({"role": "assistant", "content": turn.reply})
        messages.append({"role": "user", "content": turn.observation})


# ---------------------------------------------------------------- several ranks


class Meeting:
    """Two ranks that ask each other after every turn, as a collective call would make them."""

    def __init__(self):
        self.barrier, self.flags = threading.Barrier(2, timeout=20), [False, False]

    def of(self, rank):
        def any_active(local):
            self.flags[rank] = local
            self.barrier.wait()
            result = any(self.flags)
            self.barrier.wait()
            return result

        return any_active


def test_ranks_call_the_policy_equally_often():
    """One turn against thirty: the rank that has finished keeps sampling a placeholder."""
    meeting, calls, played = Meeting(), [[], []], [None, None]

    def rank(index, scripts, goals):
        chat, pool = chat_of(), EnvironmentPool(lambda name: CountEnv())
        inner = ScriptedPolicy(chat.tokenizer, scripts, chat.end_of_turn_id)

        def policy(prompts, max_new_tokens):
            calls[index].append((len(prompts), [len(p) for p in prompts], max_new_tokens))
            return inner(prompts, max_new_tokens)

        player = EpisodePlayer(pool, policy, chat, [], meeting.of(index))
        tasks = [TaskRef("count", f"count-{n}") for n in goals]
        limits = replace(BROAD, max_turns={"": 30})
        played[index] = player.play(tasks, [MESSAGES] * len(tasks), limits)
        pool.close()

    threads = [threading.Thread(target=rank, args=a) for a in ((0, [[GO]] * 2, (1, 1)), (1, [[BACK]], (2,)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(calls[0]) == len(calls[1]) == 30
    assert calls[0][0][0] == 2
    assert calls[0][1:] == [(1, [1], 1)] * 29
    assert all(size == 1 and lengths[0] > 1 for size, lengths, _ in calls[1])
    assert [len(t.turns) for t in (*played[0], *played[1])] == [1, 1, 30]
    assert all(t.success for t in played[0])


def test_a_rank_without_an_episode_left_samples_the_placeholder(schedule):
    if schedule != "lock step":
        pytest.skip("at their own pace, ranks do not wait for one another")
    answers = iter([True, True, True, False])
    (won,) = play([[GO]], [1], player={"any_active": lambda local: next(answers)})
    assert won.success
    assert play.policy.seen[1:] == [[chat_of().end_of_turn_id]] * 2
    assert next(answers, "spent") == "spent"


def test_nothing_to_play():
    assert play([], []) == []


# ---------------------------------------------------------------- environments of any kind


class Plain(gymnasium.Env):
    """A Gymnasium environment that knows nothing of this package."""

    ends = (1.0, True, False, {})

    def reset(self, *, seed=None, options=None):
        self.options = options
        return "Say go.", {}

    def step(self, action):
        if "go" in action:
            return ("Done.", *self.ends)
        return "Again.", 0.25, False, False, {}


def play_plain(env, scripts=((" hm\n", " go \n"),), limits=BROAD, **kwargs):
    pool = EnvironmentPool(env if callable(env) else lambda name: env, timeout=10.0)
    try:
        return play(scripts, [1] * len(scripts), limits, pool=pool, **kwargs)
    finally:
        pool.close()


def test_a_plain_gymnasium_environment():
    env = Plain()
    (played,) = play_plain(env)
    check_invariants(played)
    assert (played.success, played.failed, played.layout, played.score) == (True, False, "list", 0.0)
    assert [(t.action, t.target, t.invalid, t.is_call) for t in played.turns] == [
        ("hm", "hm", False, False),
        ("go", "go", False, False),
    ]
    assert [t.observation for t in played.turns] == ["Again.", "Done."]
    assert env.options == {"task_id": "count-1"}


@pytest.mark.parametrize(
    ("ends", "success", "truncated"),
    [
        ((1.0, True, False, {}), True, False),
        ((0.99, True, False, {}), False, False),
        ((1.0, True, False, {"success": False}), False, False),
        ((0.0, True, False, {"success": True}), True, False),
        ((1.0, False, True, {"success": True}), False, True),  # its own step limit is no success
    ],
)
def test_what_counts_as_success(ends, success, truncated):
    env = Plain()
    env.ends = ends
    (played,) = play_plain(env)
    assert (played.success, played.truncated, played.failed) == (success, truncated, False)
    assert len(played.turns) == 2


def test_success_before_the_end_is_not_final():
    """An environment that reports success on the way, but is cut by a limit, has not succeeded."""
    env = Plain()
    env.ends = (1.0, False, False, {"success": True, "score": 1.0})
    (played,) = play_plain(env, limits=replace(BROAD, max_turns={"": 2}))
    assert (played.success, played.truncated, played.score) == (False, True, 1.0)


def test_an_action_that_is_no_part_of_the_reply_is_not_a_target():
    env = Plain()
    env.ends = (1.0, True, False, {"action": "GO NORTH"})
    (played,) = play_plain(env)
    assert (played.turns[-1].action, played.turns[-1].target) == ("GO NORTH", "go")


def test_final_flags_come_from_the_protocol():
    """A message said twice is known to be without effect only when the whole episode is."""

    class Desk(CountEnv):
        protocol = ToolCall()

        def _act(self, action):
            return replace(super()._act(action), invalid=False, done=action.text == "bye")

    (played,) = play_plain(Desk(), [["Hello.", "Hello.", "<tool_call>{}</tool_call>", "bye"]])
    assert [t.invalid for t in played.turns] == [False, True, False, False]
    assert [t.is_call for t in played.turns] == [False, False, True, False]
    assert played.layout == "turns"


# ---------------------------------------------------------------- what can break


class Fragile(CountEnv):
    """Breaks in the episode with seed 1."""

    made = 0
    where, error = "reset", OSError("no disk")

    def __init__(self):
        Fragile.made += 1

    def _begin(self, task_id, seed):
        self.breaks = self.where if seed == 1 else None
        if self.breaks == "reset":
            raise self.error
        return super()._begin(task_id, seed)

    def step(self, reply):
        if self.breaks == "step" and self.done == 1:
            raise self.error
        observation, reward, terminated, truncated, info = super().step(reply)
        if self.breaks == "info" and self.done == 2:
            info["score"] = None
        return observation, reward, terminated, truncated, info


@pytest.mark.parametrize(
    ("where", "turns", "message"),
    [
        ("reset", 0, "environment 'count': `reset` raised OSError: no disk"),
        ("step", 2, "environment 'count': `step` raised OSError: no disk"),
        ("info", 2, "environment 'count': its answer could not be used: TypeError"),
    ],
)
def test_an_environment_that_breaks_fails_its_own_episode(where, turns, message):
    Fragile.made, Fragile.where = 0, where
    pool = EnvironmentPool(lambda name: Fragile(), timeout=10.0)
    played = play([[GO]] * 3, [3] * 3, pool=pool, seeds=[0, 1, 2])
    assert [t.failed for t in played] == [False, True, False]
    assert [t.success for t in played] == [True, False, True]
    broken = played[1]
    check_invariants(replace(broken, logprobs=None))
    assert broken.error.startswith(message)
    assert (broken.truncated, broken.success, len(broken.turns)) == (False, False, turns)
    assert Fragile.made == 3
    assert all(t.success for t in play([[GO]] * 3, [3] * 3, pool=pool))  # only the broken one is made anew
    assert Fragile.made == 4
    pool.close()


class Desk(CountEnv):
    """Tools that depend on the task, and details of every step."""

    @classmethod
    def tools(cls, task_id=None):
        name = f"tool_of_{task_id.replace('-', '_')}"
        return [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}]

    def _act(self, action):
        outcome = super()._act(action)
        return replace(outcome, details={"writes": self.done, "score": 99.0})


def test_tools_of_the_task_are_in_the_prompt_and_details_in_the_turns():
    desks = EnvironmentPool(lambda _: Desk(), timeout=10.0)
    first, second = play([[GO], [GO]], (1, 2), pool=desks)
    desks.close()
    text = [chat_of().tokenizer.decode(t.prompt_ids) for t in (first, second)]
    assert "tool_of_count_1" in text[0]
    assert "tool_of_count_1" not in text[1]
    assert "tool_of_count_2" in text[1]
    assert [turn.details for turn in second.turns] == [{"writes": 1}, {"writes": 2}]
    assert second.turns[0].score == 0.5  # details cannot stand for what the contract says


def test_environments_are_reused_between_plays():
    Fragile.made = 10
    pool = EnvironmentPool(lambda name: Fragile(), timeout=10.0)
    for _ in range(3):
        assert all(t.success for t in play([[GO]] * 4, [2] * 4, pool=pool))
    assert Fragile.made == 14
    pool.close()


@pytest.mark.parametrize("error", [UnknownTaskError, UnknownEnvironmentError, MissingDependencyError])
def test_a_users_mistake_is_raised_and_the_pool_stays_usable(error, schedule):
    Fragile.made, Fragile.where, Fragile.error = 0, "reset", error("say it right")
    pool = EnvironmentPool(lambda name: Fragile(), timeout=10.0)
    try:
        with pytest.raises(error, match="say it right"):
            play([[GO]] * 3, [1] * 3, pool=pool, seeds=[0, 1, 2])
        assert all(t.success for t in play([[GO]] * 3, [1] * 3, pool=pool))
        # At their own pace, environments still at work when the mistake is raised are given up.
        assert Fragile.made in ([4] if schedule == "lock step" else [4, 5, 6])
    finally:
        Fragile.error = OSError("no disk")
        pool.close()


def test_an_unknown_task_of_the_toy_environment(pool):
    with pytest.raises(UnknownTaskError, match="count-x"):
        play([[GO]], ["x"], pool=pool)


def test_seeds_and_task_ids_reach_the_environment(pool):
    play([[GO]] * 2, [1, 2], pool=pool, seeds=[7, None])
    expected = [(7, {"task_id": "count-1"}), (None, {"task_id": "count-2"})]
    assert sorted(Watched.resets, key=str) == sorted(expected, key=str)


def test_rows_that_do_not_match_are_refused(pool):
    player = EpisodePlayer(pool, ScriptedPolicy(chat_of().tokenizer, [[GO]], 2), chat_of(), [])
    with pytest.raises(ValueError, match="`messages` has 1 entries for 2 tasks"):
        player.play([TaskRef("count", "count-1")] * 2, [MESSAGES], BROAD)


def test_time_in_the_environment_is_counted_to_its_own_episode():
    class Slow(CountEnv):
        def _act(self, action):
            time.sleep(0.02)
            return super()._act(action)

    pool = EnvironmentPool(lambda name: Slow(), timeout=10.0)
    for _ in range(20):
        (played,) = play([[GO]], [2], pool=pool)
        assert 0.04 <= played.environment_seconds < 0.06 + 0.5
    pool.close()
