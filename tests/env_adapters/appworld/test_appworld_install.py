"""Finding AppWorld's interpreter, and `cope-trl envs install appworld`; nothing is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

from env_adapters.appworld import AppWorldEnv, install
from env_adapters.appworld.interpreter import APPWORLD, DEFAULT_VENV, find_python
from env_adapters.errors import EnvAdapterError, MissingDependencyError


def make_venv(folder: Path, *, appworld: bool = True, apps: bool = True) -> Path:
    """A folder that looks like a virtual environment; returns its interpreter."""
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("")
    (folder / "bin" / "python").symlink_to(sys.executable)
    package = folder / "lib" / "python3.11" / "site-packages" / "appworld"
    if appworld:
        package.mkdir(parents=True)
    if appworld and apps:
        (package / "apps" / "supervisor").mkdir(parents=True)
    return folder / "bin" / "python"


@pytest.fixture(autouse=True)
def nothing_here(tmp_path, monkeypatch):
    monkeypatch.delenv("APPWORLD_PYTHON", raising=False)
    monkeypatch.delenv("APPWORLD_ROOT", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_the_argument_then_the_variable_then_the_default(tmp_path, monkeypatch):
    with pytest.raises(
        MissingDependencyError, match="the default virtual environment is .*`cope-trl envs install appworld`"
    ):
        AppWorldEnv.check_requirements()
    default = make_venv(DEFAULT_VENV.expanduser())
    assert find_python() == str(default)
    monkeypatch.setenv("APPWORLD_PYTHON", str(make_venv(tmp_path / "variable")))
    assert find_python() == str(tmp_path / "variable/bin/python")
    assert find_python(make_venv(tmp_path / "argument")) == str(tmp_path / "argument/bin/python")
    AppWorldEnv.check_requirements()


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    with pytest.raises(MissingDependencyError, match="`python` is '/no/python', which is no program"):
        find_python("/no/python")
    with pytest.raises(MissingDependencyError, match=f"needs the package `{APPWORLD}`"):
        find_python(make_venv(tmp_path / "bare", appworld=False))
    monkeypatch.setenv("APPWORLD_PYTHON", str(make_venv(tmp_path / "packed", apps=False)))
    with pytest.raises(
        MissingDependencyError, match=r"APPWORLD_PYTHON\) lacks the source of its apps: .*-m appworld.cli install"
    ):
        find_python()


@pytest.fixture
def commands(monkeypatch):
    """What would have been run; making an environment makes one that looks complete."""
    run = []
    version = {"answer": "Python 3.12.1"}

    def record(command, **options):
        run.append((list(command), options.get("env") or {}))
        if command[-1] == "--version":
            return subprocess.CompletedProcess(command, 0, version["answer"], "")
        if command[1:3] == ["-m", "venv"]:
            make_venv(Path(command[3]))
        code = version.get("code", 0) if "pip" in command else 0
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(subprocess, "run", record)
    monkeypatch.setattr(install.venv, "create", lambda folder, **options: make_venv(Path(folder)))
    return run, version


def ran(commands):
    return [" ".join(command[1:4]) for command, _ in commands[0] if command[-1] != "--version"]


def test_the_steps_of_an_installation(tmp_path, commands, capsys):
    install.main(["--venv", str(tmp_path / "venv")])
    assert ran(commands)[:2] == ["-m pip install", "-m appworld.cli install"]
    assert commands[0][1][0][-1] == APPWORLD
    assert all(command[0].startswith(str(tmp_path / "venv")) for command, _ in commands[0][1:])
    # Nothing is written to the home folder or to the folder it is called from.
    assert commands[0][2][1]["APPWORLD_CACHE"].startswith(str(tmp_path / "venv"))
    said = capsys.readouterr().out
    assert f"export APPWORLD_PYTHON={tmp_path / 'venv/bin/python'}" in said


def test_the_default_needs_no_variable(commands, capsys):
    install.main([])
    assert "APPWORLD_PYTHON" not in capsys.readouterr().out
    assert find_python() == str(DEFAULT_VENV.expanduser() / "bin/python")


def test_another_interpreter_and_the_data(tmp_path, commands, monkeypatch, capsys):
    monkeypatch.setattr(install, "find_root", lambda root: root)
    monkeypatch.setattr(install, "task_ids", lambda root, split: ["x"] * 3)
    install.main(
        ["--venv", str(tmp_path / "v"), "--python", "/usr/bin/python3.12", "--data", "--root", str(tmp_path / "r")]
    )
    assert commands[0][1][0] == ["/usr/bin/python3.12", "-m", "venv", str(tmp_path / "v")]
    command, environment = commands[0][-1]
    assert command[1:] == ["-m", "appworld.cli", "download", "data"]
    assert environment["APPWORLD_ROOT"] == str(tmp_path / "r")
    said = capsys.readouterr().out
    assert "test_challenge 3" in said
    assert f"export APPWORLD_ROOT={tmp_path / 'r'}" in said


def test_an_environment_made_earlier_is_brought_up_to_date(tmp_path, commands):
    make_venv(tmp_path / "venv")
    install.main(["--venv", str(tmp_path / "venv")])
    assert ran(commands)[0] == "-m pip install"


def test_what_stops_an_installation(tmp_path, commands):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(EnvAdapterError, match="holds something else than a virtual environment"):
        install.main(["--venv", str(tmp_path / "mine")])
    assert commands[0] == []
    commands[1]["answer"] = "Python 3.10.9"
    with pytest.raises(MissingDependencyError, match=r"'Python 3.10.9'\), but AppWorld needs Python 3.11 or later"):
        install.main(["--venv", str(tmp_path / "v"), "--python", "python3.10"])
    assert not (tmp_path / "v").exists()
    commands[1].update(answer="Python 3.13.0", code=1)
    with pytest.raises(EnvAdapterError, match=r"-m pip install .*failed with exit code 1"):
        install.main(["--venv", str(tmp_path / "v")])


def test_an_interpreter_that_is_none(tmp_path):
    with pytest.raises(MissingDependencyError, match="'/no/python', which cannot be run"):
        install.main(["--venv", str(tmp_path / "v"), "--python", "/no/python"])


def test_help_names_the_command(capsys):
    with pytest.raises(SystemExit):
        install.main(["--help"])
    assert "usage: cope-trl envs install appworld" in capsys.readouterr().out
