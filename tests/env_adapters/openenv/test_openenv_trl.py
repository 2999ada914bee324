"""An OpenEnv environment in TRL's own way: an `environment_factory` around OpenEnv's own client."""

import random

import pytest
from driven import call, driven_trainer, prompt_rows, roll_out

pytest.importorskip("openenv")


@pytest.fixture(scope="module")
def guess(launch):
    return launch(function="foreign_world:serve_guess")


@pytest.fixture
def guess_environment(guess):
    """As its users write it: one client an instance, tools that step, a reward."""
    from openenv.core.generic_client import GenericEnvClient

    clients = []

    class Guess:
        def __init__(self):
            self._client = GenericEnvClient(base_url=guess.url).sync()
            clients.append(self._client)

        def reset(self, **row):
            self.reward = 0.0
            return self._client.reset(seed=row["goal"]).observation["hint"]

        def guess(self, number: str) -> str:
            """Guess the number.

            Args:
                number: from 1 to 9.
            """
            result = self._client.step({"message": number})
            self.reward = result.reward or 0.0
            return result.observation["hint"]

        def get_reward(self) -> float:
            return self.reward

    yield Guess
    for client in clients:
        client.close()


def test_episodes_on_an_openenv_server_are_forecast_from(guess_environment, tmp_path):
    right = str(random.Random(7).randint(1, 9))
    wrong = str(int(right) % 9 + 1)
    hit, miss, done = call("guess", number=right), call("guess", number=wrong), "That is all."
    scripts = [[miss, hit, done], [miss, done], [hit, done], [done]]
    trainer = driven_trainer(
        tmp_path, scripts, prompt_rows(7), environment_factory=guess_environment, max_steps=1, forecast_coef=0.1
    )
    buffer = roll_out(trainer)
    assert [t.success for t in trainer.trajectories] == [True, False, True, False]
    assert [t.score for t in trainer.trajectories] == [1.0, 0.25, 1.0, 0.0]
    assert [turn.observation for turn in trainer.trajectories[0].turns] == ["No.", "Right.", ""]
    assert trainer.trajectories[0].turns[1].target == hit
    assert int(buffer["forecast_window"].max(dim=1).values.add(1).clamp(min=0).sum()) == 3  # two windows and one
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["episode/success"] == 0.5
    assert logged["forecast/windows"] == 3
