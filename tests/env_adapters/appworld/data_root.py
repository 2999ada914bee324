"""Makes a small AppWorld data root in `$APPWORLD_ROOT` with AppWorld's own engine; run by AppWorld's interpreter.

Two people, notes of theirs, and five tasks about them, in the layout of the benchmark's download. Nothing of it may be
committed: it derives from AppWorld's apps, whose licence forbids that.
"""

import importlib
import json
import os
from pathlib import Path

from appworld.apps import get_all_apps
from appworld.apps.api_lib import set_local_dbs
from appworld.apps.model_lib import CachedDBHandler
from appworld.collections.api_docs import ApiDocCollection
from appworld.collections.models import ModelCollection
from appworld.common.constants import CANARY_STRING, DB_VERSION
from appworld.common.datetime import DateTime
from appworld.common.utils import freeze_time

DATA = Path(os.environ["APPWORLD_ROOT"], "data")
APPS = get_all_apps()
WITH_ACCOUNT = [app for app in APPS if app not in ("admin", "api_docs", "supervisor")]
TODAY = DateTime(2023, 6, 1, 9, 30, 0)
OWNER = {
    "first_name": "Eva",
    "last_name": "Moor",
    "email": "eva.moor@gmail.com",
    "phone_number": "5550100",
    "birthday": "1991-02-03",
    "sex": "female",
}
FRIEND = {**OWNER, "first_name": "Tom", "last_name": "Hill", "email": "tom.hill@gmail.com", "phone_number": "5550101"}
NOTES = {
    "eva.moor@gmail.com": [("Shopping", "bread\ntea\nsalt\nplums", ["home"]), ("Plans", "learn to sail", ["later"])],
    "tom.hill@gmail.com": [("Private", "only for Tom", [])],
}
# Task id: split, instruction, answer, and the note that has to be new afterwards (title, content).
TASKS = {
    "aaaa001_1": ("train", "How many lines has my note 'Shopping' in Simple Note?", 4, None),
    "aaaa001_2": ("train", "Write a note 'Call' with the text 'ring Tom' in Simple Note.", None, ("Call", "ring Tom")),
    "aaaa002_1": ("dev", "Which text has my note 'Plans' in Simple Note?", "learn to sail", None),
    "aaaa003_1": ("test_normal", "Write a note 'Buy' with the text 'jam' in Simple Note.", None, ("Buy", "jam")),
    "aaaa004_1": ("test_challenge", "Write a note 'Pay' with the text 'rent' in Simple Note.", None, ("Pay", "rent")),
}
STATE_TESTS = """import json


def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):
    with test("the answer is right"):
        test.answer(json.loads(models.end.supervisor.Task.find_one().answer), ground_truth_answer)
    with test("nothing else has changed"):
        test.case(models.changed_model_names(), "==", set(private_data.changed))
    if private_data.note:
        with test("one note is new and reads as asked"):
            added, updated, removed = models.changed_records("simple_note.Note")
            test.case([[note.title, note.content] for note in added], "==", [private_data.note])
            test.case(len(updated) + len(removed), "==", 0)
"""


def write(path: Path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def password(person: dict, app: str) -> str:
    return f"{person['first_name']}+{app}"


def make_base_databases() -> None:
    docs = ApiDocCollection.build(load_apps=tuple(get_all_apps(skip_admin=True)))
    for app, by_name in docs.items():
        write(
            DATA / "api_docs" / "standard" / f"{app}.json",
            {name: {**doc, "canary_string": CANARY_STRING} for name, doc in by_name.items()},
        )
    (DATA / "base_dbs").mkdir(parents=True)
    set_local_dbs(str(DATA / "base_dbs"), str(DATA / "base_dbs"), APPS, create=True)
    models = {app: importlib.import_module(f"appworld.apps.{app}.models") for app in APPS}
    wanted = ("app_name", "api_name", "path", "method", "description", "parameters", "response_schemas")
    for by_name in docs.values():
        rows = [{key: doc[key] for key in wanted} for doc in by_name.values()]
        table = models["api_docs"].ApiDoc
        table.save_all([table(app_name_=row.pop("app_name"), **row) for row in rows])
    for person in (OWNER, FRIEND):
        owner = models["admin"].MainUser(**person)
        owner.save()
        for app in WITH_ACCOUNT:
            models["admin"].AccountPassword(
                main_user_id=owner.id, account_name=app, password=password(person, app)
            ).save()
            login = "phone_number" if app == "phone" else "email"
            names = {key: person[key] for key in ("first_name", "last_name", login)}
            models[app].User.create_save(**names, password=password(person, app), verified=True)
    for email, notes in NOTES.items():
        user = models["simple_note"].User.find_one(email=email)
        for title, content, tags in notes:
            models["simple_note"].Note(user_id=user.id, title=title, content=content, tags=tags).save()
    CachedDBHandler.reset()


def make_task(task_id: str, instruction: str, answer, note) -> None:
    folder = DATA / "tasks" / task_id
    contact = {key: OWNER[key] for key in ("first_name", "last_name", "email", "phone_number")}
    specs = {
        "instruction": instruction,
        "supervisor": contact,
        "datetime": TODAY.isoformat(),
        "db_version": DB_VERSION,
    }
    write(folder / "specs.json", {**specs, "canary_string": CANARY_STRING})
    with freeze_time(TODAY):
        models = ModelCollection.load(
            to_db_home_path=f":memory:task_input-{task_id}",
            from_db_home_path=str(DATA / "base_dbs"),
            load_apps=list(APPS),
        )
        supervisor = models.supervisor.Supervisor(**OWNER)
        supervisor.save()
        models.supervisor.Task(supervisor_id=supervisor.id, instruction=instruction).save()
        for app in WITH_ACCOUNT:
            models.supervisor.AccountPassword(
                supervisor_id=supervisor.id, account_name=app, password=password(OWNER, app)
            ).save()
        models.save(
            db_home_path=str(folder / "dbs"),
            format="changes",
            app_names=list(APPS),
            delete_if_exists=True,
            save_model_hashes=True,
        )
        models.close()
    tests = [
        ("the answer is right", "no_op_fail"),
        ("nothing else has changed", "no_op_fail" if note else "no_op_pass"),
    ]
    tests += [("one note is new and reads as asked", "no_op_fail")] if note else []
    truth = folder / "ground_truth"
    # AppWorld computes what is missing here, with packages it does not install.
    counts = {"num_apps": 1, "num_apis": 3, "num_api_calls": 4, "num_solution_code_lines": 5}
    write(truth / "metadata.json", {"difficulty": 1, "mode": "minimal", **counts})
    write(truth / "public_data.json", {})
    write(truth / "private_data.json", {"changed": ["simple_note.Note"] if note else [], "note": note})
    write(truth / "answer.json", json.dumps(answer))
    write(truth / "test_data.json", [{"requirement": name, "label": label} for name, label in tests])
    write(truth / "evaluation.py", STATE_TESTS)


with freeze_time(TODAY.subtract(days=40)):
    make_base_databases()
for task_id, (_, instruction, answer, note) in TASKS.items():
    make_task(task_id, instruction, answer, note)
for split in ("train", "dev", "test_normal", "test_challenge"):
    write(DATA / "datasets" / f"{split}.txt", "\n".join(key for key, task in TASKS.items() if task[0] == split))
