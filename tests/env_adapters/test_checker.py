"""`check_env`: one deliberately broken environment for each of its messages."""

import gymnasium
import pytest

from env_adapters.base import Outcome, Task, TextEnv
from env_adapters.checker import check_env
from env_adapters.errors import EnvAdapterError, EnvContractError, EpisodeStateError, UnknownTaskError
from env_adapters.protocols import ReActText


class Good(TextEnv):
    """Keeps the contract: `open door` succeeds."""

    name = "good"
    protocol = ReActText()
    instruction = "Open the door."
    splits = ("train",)

    @classmethod
    def tasks(cls, split):
        cls.check_split(split)
        return [Task(cls.name, "front", "", split)]

    def _begin(self, task_id, seed):
        if task_id not in (None, "front"):
            raise UnknownTaskError(f"`task_id` is {task_id!r}")
        return "A door."

    def _act(self, action):
        opened = action.text == "open door"
        return Outcome("It opens." if opened else "Nothing happens.", float(opened), opened, opened, not opened)

    def admissible_actions(self):
        return ["open door"]


def broken(**attributes):
    """The good environment with some attributes replaced."""
    return type("Broken", (Good,), attributes)()


def changed_step(**changes):
    """The good environment with some of the values that `step` returns replaced."""

    def step(self, reply):
        names = ("observation", "reward", "terminated", "truncated", "info")
        values = dict(zip(names, Good.step(self, reply), strict=True))
        return tuple({**values, **changes}.values())

    return broken(step=step)


def changed_info(method, drop=(), **changes):
    """The good environment with some of the info of `reset` or `step` replaced."""

    def call(self, *args, **kwargs):
        *rest, info = getattr(Good, method)(self, *args, **kwargs)
        info = {key: value for key, value in {**info, **changes}.items() if key not in drop}
        return (*rest, info)

    return broken(**{method: call})


def raising(error):
    def method(self, *args, **kwargs):
        raise error

    return method


def tasks_of(make):
    def tasks(cls, split):
        cls.check_split(split)
        return make(split)

    return classmethod(tasks)


def test_the_good_one_passes_and_is_closed():
    env = Good()
    check_env(env, replies=["Action: look", "Action: open door"])
    with pytest.raises(EpisodeStateError):
        env.reset()


def test_the_error_is_one_of_this_package():
    assert issubclass(EnvContractError, EnvAdapterError)


class Plain(gymnasium.Env):
    """A text environment that knows nothing of this package but its errors."""

    playing = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.playing = True
        return "Say yes.", self.info("", False)

    def step(self, reply):
        if not self.playing:
            raise EpisodeStateError("reset first")
        yes = reply == "yes"
        self.playing = not yes
        return "", float(yes), yes, False, self.info(reply, yes)

    def info(self, reply, yes):
        return {"success": yes, "score": float(yes), "action": reply, "invalid": not yes}

    def close(self):
        self.playing = False


def test_a_plain_text_environment_passes_too():
    check_env(Plain(), replies=["yes"])


def test_gymnasiums_own_order_error_is_accepted():
    check_env(gymnasium.wrappers.OrderEnforcing(Plain()), replies=["yes"])


# ------------------------------------------------------------------ one broken environment a message


def forgetful_reset(self, *, seed=None, options=None):
    self.count = getattr(self, "count", 0) + 1
    _, info = Good.reset(self, seed=seed, options=options)
    return f"Door number {self.count}.", info


def ends_on_anything(self, action):
    return Outcome("Over.", done=True)


def chokes_on(text):
    def act(self, action):
        if text in action.text:
            raise ValueError("cannot take it")
        return Good._act(self, action)

    return act


def step_without_order(self, reply):
    return "", 0.0, False, False, {"success": False, "score": 0.0, "action": reply, "invalid": not reply}


def step_forgets_the_end(self, reply):
    self._playing = self._playing or hasattr(self, "ended")
    result = Good.step(self, reply)
    if result[2]:
        self.ended = True
    return result


def close_once(self):
    if self._closed:
        raise RuntimeError("already closed")
    Good.close(self)


def step_after_close(self, reply):
    self._playing = self._playing or self._closed
    return Good.step(self, reply)


def ignores_task_ids(self, task_id, seed):
    return "A door."


def wrong_unknown_task_error(self, task_id, seed):
    if task_id not in (None, "front"):
        raise KeyError(task_id)
    return "A door."


BROKEN = {
    "must be a gymnasium.Env, got object": object,
    "`name` must be a non-empty str, got ''": lambda: broken(name=""),
    "`instruction` must be a non-empty str, got None": lambda: broken(instruction=None),
    "`protocol` must be a non-empty Protocol, got 'react'": lambda: broken(protocol="react"),
    "`splits` must be a non-empty tuple, got ()": lambda: broken(splits=()),
    "`acknowledgement` must be a str or None, got 1": lambda: broken(acknowledgement=1),
    "`score_range` must be (smallest, largest), got (1.0, 0.0)": lambda: broken(score_range=(1.0, 0.0)),
    "`tasks('train')` raised OSError('no data')": lambda: broken(tasks=classmethod(raising(OSError("no data")))),
    "`tasks('train')` is empty": lambda: broken(tasks=tasks_of(lambda split: [])),
    "must hold Task objects whose task_id is a str": lambda: broken(tasks=tasks_of(lambda split: ["front"])),
    "its environment must be 'good' and its split 'train'": lambda: broken(
        tasks=tasks_of(lambda split: [Task("other", "front", "", split)])
    ),
    "`tasks('train')` holds a task id twice": lambda: broken(
        tasks=tasks_of(lambda split: [Task("good", "front", "", split)] * 2)
    ),
    "unknown split must raise UnknownSplitError, but it returned": lambda: broken(
        check_split=classmethod(lambda cls, split: None)
    ),
    "unknown split must raise UnknownSplitError, not KeyError": lambda: broken(
        check_split=classmethod(lambda cls, split: {"train": 0}[split])
    ),
    "`step` before `reset` must raise EpisodeStateError, but it returned": lambda: broken(step=step_without_order),
    "`step` before `reset` must raise EpisodeStateError, not TypeError": lambda: broken(step=raising(TypeError("x"))),
    "`reset` with the task id 'front' raised OSError": lambda: broken(_begin=raising(OSError("x"))),
    "`reset` must return (observation, info), got 'A door.'": lambda: broken(reset=lambda self, **kw: "A door."),
    "The observation of `reset` must be a str, got 7": lambda: broken(_begin=lambda self, task_id, seed: 7),
    "The info of `reset` must be a dict, got None": lambda: broken(reset=lambda self, **kw: ("A door.", None)),
    "The info of `reset` lacks the key 'invalid'": lambda: changed_info("reset", drop=["invalid"]),
    "`info['success']` of `reset` must be a bool, got 0": lambda: changed_info("reset", success=0),
    "`info['score']` of `reset` must be a float, got 1": lambda: changed_info("reset", score=1),
    "`info['action']` of `reset` must be a str, got None": lambda: changed_info("reset", action=None),
    "`info['score']` of `reset` is 100.0, outside of [0.0, 1.0]": lambda: changed_info("reset", score=100.0),
    "`info['score']` of `reset` is nan": lambda: changed_info("reset", score=float("nan")),
    "`info['success']` is True after `reset`": lambda: changed_info("reset", success=True),
    "with the same task id 'front' and seed gave different observations": lambda: broken(reset=forgetful_reset),
    "`info['admissible_actions']` must be a list of str or None, got ('look',)": lambda: broken(
        admissible_actions=lambda self: ("look",)
    ),
    "An unknown task id must raise UnknownTaskError, but `reset` returned": lambda: broken(_begin=ignores_task_ids),
    "An unknown task id must raise UnknownTaskError, not KeyError": lambda: broken(_begin=wrong_unknown_task_error),
    "`step` with a reply raised ValueError('cannot take it')": lambda: broken(_act=chokes_on("look")),
    "`step` with NUL characters raised ValueError('cannot take it')": lambda: broken(_act=chokes_on("\x00")),
    "`step` with a lone surrogate raised": lambda: broken(_act=chokes_on("\ud800")),
    "`step` with 100 kB raised": lambda: broken(_act=chokes_on("north")),
    "`step` with letters of many scripts raised": lambda: broken(_act=chokes_on("你好")),
    "The episode ended on letters of many scripts": lambda: broken(_act=ends_on_anything),
    "An empty reply must give `info['action'] == ''`": lambda: changed_info("step", invalid=False),
    "`step` must return (observation, reward, terminated, truncated, info)": lambda: broken(
        step=lambda self, reply: Good.step(self, reply)[:4]
    ),
    "The observation of `step` must be a str, got b''": lambda: changed_step(observation=b""),
    "The reward must be 0.0 or 1.0, got 0.5": lambda: changed_step(reward=0.5),
    "The reward must be 0.0 or 1.0, got False": lambda: changed_step(reward=False),
    "`terminated` must be a bool, got 0": lambda: changed_step(terminated=0),
    "`truncated` must be a bool, got None": lambda: changed_step(truncated=None),
    "The info of `step` must be a dict, got []": lambda: changed_step(info=[]),
    "The info of `step` lacks the key 'score'": lambda: changed_info("step", drop=["score"]),
    "success must end it": lambda: changed_info("step", success=True),
    "The reward is 1.0 with `info['success']` False": lambda: changed_step(reward=1.0),
    "`step` after the end of an episode must raise EpisodeStateError": lambda: broken(step=step_forgets_the_end),
    "The first `close()` raised OSError": lambda: broken(close=raising(OSError("x"))),
    "`close()` on a closed environment, which must do nothing, raised RuntimeError": lambda: broken(close=close_once),
    "`step` after `close` must raise EpisodeStateError": lambda: broken(step=step_after_close),
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_environment(message):
    with pytest.raises(EnvContractError) as caught:
        check_env(BROKEN[message](), replies=["Action: open door"])
    assert message in str(caught.value)


def test_a_step_in_between_shows_what_a_reset_leaves_behind():
    def begin(self, task_id, seed):
        Good._begin(self, task_id, seed)
        return f"{getattr(self, 'steps', 0)} steps."

    def act(self, action):
        self.steps = getattr(self, "steps", 0) + 1
        return Good._act(self, action)

    with pytest.raises(EnvContractError, match="gave different observations: '0 steps.' and '1 steps.'"):
        check_env(broken(_begin=begin, _act=act))


def test_replies_that_do_not_end_the_episode_are_told():
    with pytest.raises(EnvContractError, match="that should end the episode did not"):
        check_env(Good(), replies=["Action: look"])


def test_long_values_are_cut_in_messages():
    with pytest.raises(EnvContractError, match=r"… \(30002 characters\)") as caught:
        check_env(broken(reset=lambda self, **kw: "long" * 7500))
    assert len(str(caught.value)) < 400


def test_a_task_id_that_does_not_exist_is_told():
    with pytest.raises(EnvContractError, match="`reset` with the task id 'back' raised UnknownTaskError"):
        check_env(Good(), task_id="back")


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("standing_messages", [], r"`standing_messages\('front'\)` must be a non-empty list"),
        ("standing_messages", [{"role": "user"}], r"`standing_messages\('front'\)` must be"),
        ("tools", {"name": "ring"}, r"`tools\('front'\)` must be None or a list"),
        ("tools", [{"name": "ring"}], r"`tools\('front'\)` must be None or a list"),
        ("tools", [{"type": "function", "function": {"name": 3}}], r"`tools\('front'\)` must be None or a list"),
    ],
)
def test_the_prompt_of_a_task(attribute, value, message):
    with pytest.raises(EnvContractError, match=message):
        check_env(broken(**{attribute: classmethod(lambda cls, task_id=None: value)}))


def test_tools_of_a_task():
    tools = [{"type": "function", "function": {"name": "ring", "parameters": {}}}]
    check_env(broken(tools=classmethod(lambda cls, task_id=None: tools)))
