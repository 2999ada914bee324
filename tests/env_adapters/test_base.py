"""The contract's own code path, through the smallest adapter there is."""

import pytest

import env_adapters
from env_adapters.base import AnyText, Outcome, Task, TextEnv
from env_adapters.errors import EpisodeStateError, UnknownSplitError, UnknownTaskError, did_you_mean
from env_adapters.protocols import Action, ReActText


class Door(TextEnv):
    """Open the door, and it is done."""

    name = "door"
    protocol = ReActText()
    instruction = "Open the door."
    splits = ("train",)

    @classmethod
    def tasks(cls, split):
        cls.check_split(split)
        return [Task(cls.name, "front", "doors", split)]

    def _begin(self, task_id, seed):
        if task_id not in (None, "front"):
            raise UnknownTaskError(f"`task_id` is {task_id!r}; the only task is 'front'.")
        self.seed = seed
        return "A door."

    def _act(self, action: Action) -> Outcome:
        if action.text == "open door":
            return Outcome("It opens.", 1.0, success=True, done=True)
        if action.text == "break door":
            return Outcome("It breaks.", 0.25, done=True)
        if action.text == "knock":
            return Outcome("Knock, knock.", 0.5, success=True)
        return Outcome("Nothing happens.", 0.5, invalid=True)

    def _current_score(self):
        return 0.5

    def admissible_actions(self):
        return ["open door"]


@pytest.fixture
def door():
    env = Door()
    yield env
    env.close()


def test_reset_returns_observation_and_info(door):
    observation, info = door.reset(seed=3, options={"task_id": "front"})
    assert observation == "A door."
    assert info == {"success": False, "score": 0.0, "action": "", "invalid": False}
    assert door.seed == 3


def test_step_to_success(door):
    door.reset()
    assert door.step("Thought: easy.\nAction: open door") == (
        "It opens.",
        1.0,
        True,
        False,
        {"success": True, "score": 1.0, "action": "open door", "invalid": False},
    )


def test_an_end_in_failure_gives_no_reward(door):
    door.reset()
    _, reward, terminated, _, info = door.step("Action: break door")
    assert (reward, terminated, info["success"], info["score"]) == (0.0, True, False, 0.25)


def test_success_before_the_end_gives_no_reward_yet(door):
    door.reset()
    _, reward, terminated, _, info = door.step("Action: knock")
    assert (reward, terminated, info["success"]) == (0.0, False, True)


def test_a_reply_without_action_is_invalid_and_keeps_the_score(door):
    door.reset()
    observation, reward, terminated, _, info = door.step("  \n ")
    assert (observation, reward, terminated) == (ReActText.no_action_observation, 0.0, False)
    assert info == {"success": False, "score": 0.5, "action": "", "invalid": True}


def test_admissible_actions_only_when_asked_for(door):
    assert "admissible_actions" not in door.reset()[1]
    _, info = door.reset(options={"admissible_actions": True})
    assert info["admissible_actions"] == ["open door"]
    assert door.step("Action: wait")[4]["admissible_actions"] == ["open door"]
    assert "admissible_actions" not in door.step("Action: open door")[4]  # nothing is admissible after the end


def test_order_of_calls(door):
    with pytest.raises(EpisodeStateError, match="call `reset` first"):
        door.step("Action: open door")
    door.reset()
    door.step("Action: open door")
    with pytest.raises(EpisodeStateError, match="no episode running"):
        door.step("Action: open door")
    door.reset()
    with pytest.raises(UnknownTaskError):
        door.reset(options={"task_id": "back"})
    with pytest.raises(EpisodeStateError):  # the failed reset ended the episode before it
        door.step("Action: open door")
    door.kill()
    door.close()
    with pytest.raises(EpisodeStateError, match="closed 'door' environment"):
        door.reset()


def test_a_reply_must_be_text(door):
    door.reset()
    with pytest.raises(TypeError, match="`reply` must be a str, got int: 7"):
        door.step(7)


def test_standing_messages():
    assert Door.standing_messages() == [{"role": "system", "content": "Open the door."}]

    class Polite(Door):
        acknowledgement = "OK."

    assert Polite.standing_messages() == [
        {"role": "user", "content": "Open the door."},
        {"role": "assistant", "content": "OK."},
    ]


def test_unknown_split():
    with pytest.raises(UnknownSplitError, match=r"`split` is 'trian'.*\['train'\]\. Did you mean 'train'\?"):
        Door.tasks("trian")


def test_did_you_mean():
    assert did_you_mean("tset", ["train", "test"]) == " Did you mean 'test'?"
    assert did_you_mean("xyz", ["train", "test"]) == ""


def test_any_text_contains_every_string_and_samples_with_its_seed():
    space = AnyText()
    assert space.contains("\ud800\x00")
    assert not space.contains(b"bytes")
    space.seed(5)
    first = [space.sample() for _ in range(5)]
    space.seed(5)
    assert [space.sample() for _ in range(5)] == first
    assert all(first)


def test_public_names_are_all_there():
    assert set(env_adapters.__all__) <= set(dir(env_adapters))
    for name in env_adapters.__all__:
        assert getattr(env_adapters, name).__name__ == name or name == "Layout"
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        env_adapters.nonsense  # noqa: B018


def test_details_become_part_of_the_info(door, monkeypatch):
    monkeypatch.setattr(
        Door, "_act", lambda self, action: Outcome("", score=0.5, details={"weight": 3, "score": 9.0, "action": "x"})
    )
    door.reset()
    info = door.step("Action: wait")[4]
    assert info == {"success": False, "score": 0.5, "action": "wait", "invalid": False, "weight": 3}
    assert Outcome("").details == {}


def test_instruction_and_tools_are_the_same_for_all_tasks_by_default():
    assert Door.standing_messages("front") == Door.standing_messages()
    assert Door.tools("front") is Door.tools() is None
