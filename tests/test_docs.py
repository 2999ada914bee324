"""The documentation against the code: marked blocks run, links lead somewhere, metrics and settings are explained."""

import dataclasses
import re
from pathlib import Path

import datasets
import pytest

from cope_trl import CoPEConfig, TaskRef, Trajectory, TrajectoryWriter, Turn
from cope_trl.metrics import RunningMeans
from env_adapters import registry

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "examples/README.md", *(ROOT / "docs").rglob("*.md")])
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
RUN = re.compile(r"^<!-- run -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def anchors(name: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text(name), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture
def fresh_folder(tmp_path, monkeypatch):
    """An empty working folder with one episode of the quick start in it; what a block registers is forgotten after."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    turn = Turn(4, 5, 7, "Action: use lamp 1", "use lamp 1", "use lamp 1", observation="You turn on the lamp 1.")
    task = TaskRef("household", "tiny-train-00001", "look")
    episode = Trajectory(task, (1, 2, 3, 4, 5), (6, 7), (1, 1), (turn,), success=True)
    TrajectoryWriter("runs/quickstart/trajectories").write([episode], step=0)


@pytest.mark.parametrize("name", [name for name in NAMES if RUN.search(text(name))])
def test_marked_blocks_run(name, fresh_folder):
    """The blocks of a page run in order and share their names."""
    namespace = {"__name__": "__docs__"}
    for block in RUN.findall(text(name)):
        exec(compile(block, name, "exec"), namespace)
    if "trainer" in namespace:
        assert namespace["trainer"].state.global_step == 1
        namespace["trainer"].close()


def test_the_environments_page_is_run():
    assert len(RUN.findall(text("docs/environments.md"))) == 3


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    for link in LINK.findall(text(name)):
        path, _, anchor = link.partition("#")
        if path.startswith("http"):
            continue
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), f"{name}: {link}"
        if anchor:
            assert anchor in anchors(target.resolve().relative_to(ROOT).as_posix()), f"{name}: {link}"


def test_every_page_is_in_the_index():
    index = {
        (ROOT / "docs" / link).resolve() for link in LINK.findall(text("docs/index.md")) if not link.startswith("http")
    }
    assert {page for page in PAGES if page.name != "README.md" and page.name != "index.md"} <= index


def test_every_metric_is_explained():
    page = text("docs/metrics.md")
    # The update is logged as its two parts.
    renamed = {"time/update": "time/policy", "time/forecast_step": "time/forecast"}
    missing = [name for name in RunningMeans(2).names if f"`{renamed.get(name, name)}`" not in page]
    assert not missing


def test_every_forecast_setting_is_explained():
    page = text("docs/method.md")
    names = [field.name for field in dataclasses.fields(CoPEConfig) if field.name.startswith("forecast_")]
    missing = [name for name in names if f"`{name}`" not in page]
    assert not missing


@pytest.mark.parametrize("name", ["README.md", "docs/environments.md"])
def test_every_environment_is_in_the_tables(name):
    for environment in registry._BUILT_IN:
        assert f"`{environment}`" in text(name)


@pytest.mark.parametrize("name", NAMES)
def test_configs_and_scripts_named_in_a_page_exist(name):
    for path in re.findall(r"\b(?:configs|examples)/[\w/]+\.(?:yaml|py)", text(name)):
        assert (ROOT / path).exists(), f"{name}: {path}"


def test_every_example_is_listed():
    page = text("examples/README.md")
    scripts = [path.relative_to(ROOT / "examples").as_posix() for path in (ROOT / "examples").rglob("*.py")]
    assert not [script for script in scripts if script not in page]
