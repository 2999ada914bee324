"""The card: what it says of the run, and that TRL's own parts are still there."""

import dataclasses
import importlib.metadata

import pytest
from datasets import Dataset
from huggingface_hub import ModelCard
from matplotlib.figure import Figure
from support import GO, CountEnv, count_rows, make_config, make_model, scripted_trainer
from trl import GRPOTrainer

from cope_trl import model_card
from cope_trl.evaluation.plots import success_curve
from cope_trl.model_card import CardFacts, complete_text, packages_of, success_of
from env_adapters import register, registry

LOG = [
    {"step": 5, "loss": 0.5, "episode/success": 0.25},
    {"step": 10, "loss": 0.4, "episode/success": float("nan")},
    {"step": 10, "eval_episode/success": 0.4},
    {"step": 15, "episode/success": 0.75},
]


@pytest.fixture
def facts(tmp_path):
    return CardFacts(
        args=make_config(tmp_path, forecast_horizon=3, learning_rate=3e-4),
        forecast_coef=0.05,
        environments=["household"],
        step=15,
        log_history=LOG,
        citations={"GRPO": "@article{grpo}"},
        repository="user/agent",
        trajectories=True,
    )


TEXT = """
# Model Card for agent

This model is a fine-tuned version of [None](https://huggingface.co/None).

## Quick start

Ask it anything.

## Training procedure

It was trained.

### Framework versions

- TRL: 1.16.0

## Citations

Cite TRL as:

```bibtex
@software{trl}
```"""


def section(text, title):
    return text.split(f"### {title}\n")[1].split("\n##")[0]


def test_the_settings_in_force_are_listed(facts):
    text = complete_text(TEXT, facts, picture=True)
    forecasting = section(text, "Forecasting")
    assert "| `forecast_coef`: λ, weight of the forecasting loss | 0.05 |" in forecasting
    assert "| `forecast_horizon`: K, largest future offset | 3 |" in forecasting
    assert "up to 4 each" in forecasting
    assert "| `learning_rate`: learning rate | 0.0003 |" in section(text, "Policy")
    assert "| optimizer steps | 15 |" in section(text, "Policy")
    separate = dataclasses.replace(facts, args=make_config("x", forecast_update="separate", forecast_lr_scale=0.5))
    assert "| separate, at 0.5 times" in complete_text(TEXT, separate, picture=False)


def test_without_forecasting_the_card_says_plain_grpo(facts):
    text = complete_text(TEXT, dataclasses.replace(facts, forecast_coef=0.0), picture=False)
    assert "plain GRPO" in section(text, "Forecasting")
    assert "forecast_horizon" not in text


def test_success_is_told_from_what_was_logged(facts):
    assert success_of(LOG) == [(5, 0.25), (15, 0.75)]
    success = section(complete_text(TEXT, facts, picture=True), "Success")
    assert "25.0% as logged at step 5, 75.0% at step 15" in success
    assert "evaluation episodes: 40.0% at step 10" in success
    assert "](assets/success_curve.png)" in success
    assert "[trajectories](./trajectories)" in success
    unknown = dataclasses.replace(facts, log_history=[{"step": 1, "loss": 1.0}])
    assert "### Success" not in complete_text(TEXT, unknown, picture=False)


def test_what_was_there_stays_in_its_place(facts):
    text = complete_text(TEXT, facts, picture=False)
    order = [
        "# Model Card",
        "not on the Hub",
        "## Quick start",
        "cope-trl eval --model user/agent",
        "It was trained.",
        "###",
    ]
    order += [
        "### Framework versions",
        "- CoPE for TRL: ",
        "- TRL: 1.16.0",
        "## Citations",
        "@software{trl}",
        "@article{grpo}",
    ]
    positions = [text.index(part) for part in order]
    assert positions == sorted(positions)
    assert "Ask it anything" not in text
    assert "None](" not in text
    # An environment that only the training script knows cannot be played by name.
    own = complete_text(TEXT, dataclasses.replace(facts, environments=["household", "mine"]), picture=False)
    assert "Ask it anything." in own
    assert "| `mine` | of the training script |" in own


def test_packages_of_an_environment_are_those_it_plays_with(monkeypatch):
    assert packages_of("household") == {"cope_trl": importlib.metadata.version("cope_trl")}
    assert packages_of("nothing") == {}
    pytest.importorskip("scienceworld")
    assert packages_of("scienceworld")["scienceworld"] == importlib.metadata.version("scienceworld")
    assert "nltk" not in packages_of("scienceworld")
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    register("foreign", type("Foreign", (CountEnv,), {"__module__": "pytest.somewhere"}))
    assert packages_of("foreign")["pytest"] == pytest.__version__


def test_a_trainer_writes_the_card_with_every_checkpoint(tmp_path):
    config = make_config(tmp_path, max_steps=2, save_strategy="steps", save_steps=2, forecast_coef=0.2)
    trainer = scripted_trainer(make_model(), config, (1,), [[GO], ["Action: back"]])
    trainer.train()
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.tags == ["generated_from_trainer", "cope", "grpo", "trl"]
    assert "0.2 |" in section(card.text, "Forecasting")
    assert "50.0% as logged at step 1, 50.0% at step 2" in section(card.text, "Success")
    assert "| `count` | of the training script |" in card.text
    for entry in (trainer._paper["citation"], GRPOTrainer._paper["citation"]):
        assert entry in card.text
    assert "arXiv:2610.20597" in card.text
    assert (tmp_path / model_card.PICTURE).read_bytes().startswith(b"\x89PNG")
    trainer.create_model_card(model_name="agent", dataset_name="user/tasks", tags="mine")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.datasets == "user/tasks"
    assert "(https://huggingface.co/datasets/user/tasks)" in card.text
    assert {"mine", "cope"} <= set(card.data.tags)
    trainer.close()


def test_the_picture_shows_success_alone(tmp_path, monkeypatch):
    headings = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda self, path: (headings.extend(a.get_title(loc="left") for a in self.axes), save(self, path)),
    )
    path = success_curve([{**entry, "episode/turns": 3.0} for entry in LOG], tmp_path / "deep/curve.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert headings == ["Success rate"]


def test_before_anything_is_logged_the_card_has_no_picture(tmp_path):
    trainer = scripted_trainer(make_model(), make_config(tmp_path), (1,), [[GO]])
    trainer.create_model_card()
    assert "### Policy" in (tmp_path / "README.md").read_text()
    assert "| `count` |" in (tmp_path / "README.md").read_text()  # its rows say so
    assert not (tmp_path / "assets").exists()
    trainer.close()


def test_rows_of_a_stream_name_their_environments_when_they_are_played(tmp_path):
    rows = Dataset.from_list(count_rows(1, 1)).to_iterable_dataset()
    trainer = scripted_trainer(make_model(), make_config(tmp_path), (1,), [[GO]], train_dataset=rows)
    assert trainer._card_facts().environments == []
    trainer.train()
    assert trainer._card_facts().environments == ["count"]
    trainer.close()
