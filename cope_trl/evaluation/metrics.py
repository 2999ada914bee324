"""Episodes to Score and Succ. (paper B.4), and the table that shows them before and after training."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypedDict

from cope_trl.types import Trajectory
from env_adapters import registry
from env_adapters.errors import EnvAdapterError

if TYPE_CHECKING:
    from rich.table import Table


class Summary(TypedDict):
    """Means over a set of episodes; `None` where no episode counts.

    Keys:
        episodes: number of episodes that count, those that did not fail.
        failed: number of episodes the environment broke in; they are in no mean.
        success: Succ., the share of successes, 0 to 1.
        score: Score, the mean graded score, on the benchmark's scale.
        turns: mean number of turns.
        truncated: share of episodes ended by a limit on turns or tokens, 0 to 1.
    """

    episodes: int
    failed: int
    success: float | None
    score: float | None
    turns: float | None
    truncated: float | None


class EnvironmentSummary(Summary):
    """A summary with the summary of each family (only where tasks have one)."""

    families: dict[str, Summary]


class Results(Summary):
    """A summary with the summary of each environment. `score` is `None` over several environments: scales differ."""

    environments: dict[str, EnvironmentSummary]


def summarize(episodes: Iterable[Trajectory | Mapping[str, Any]]) -> Results:
    """Return Score, Succ., turns, truncation and failures: over everything, by environment and by family.

    Every mean is over episodes, so that a mean over a larger set is weighted by counts; but Score and Succ. of an
    environment that says so (`TextEnv.mean_over_families`, as τ²-bench does) are unweighted means over its families.

    Args:
        episodes: trajectories, or rows with the same fields (`environment`, `family`, `success`, `score`, `turns`,
            `truncated`, `failed`; `turns` a list or a number; only `success` is required).

    Source: paper B.4.
    """
    rows = [_row(episode) for episode in episodes]
    environments = {name: _environment(name, own) for name, own in _grouped(rows, "environment").items()}
    results = Results(**_means(rows), environments=environments)
    if len(environments) > 1:
        results["score"] = None
    for only in environments.values() if len(environments) == 1 else ():
        results["success"], results["score"] = only["success"], only["score"]
    return results


def _environment(name: str, rows: Sequence[dict[str, Any]]) -> EnvironmentSummary:
    families = {family: _means(part) for family, part in _grouped(rows, "family").items() if family}
    summary = EnvironmentSummary(**_means(rows), families=families)
    if families and _mean_over_families(name):
        played = [family for family in families.values() if family["episodes"]]
        summary["success"] = fmean(f["success"] or 0.0 for f in played) if played else None
        summary["score"] = fmean(f["score"] or 0.0 for f in played) if played else None
    return summary


def _mean_over_families(name: str) -> bool:
    try:
        return bool(getattr(registry.resolve(name), "mean_over_families", False))
    except EnvAdapterError:  # an environment of the caller's own, or one that is not installed here
        return False


def _row(episode: Trajectory | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(episode, Trajectory):
        task = episode.task
        fields = {name: getattr(episode, name) for name in ("success", "score", "turns", "truncated", "failed")}
        fields |= {"environment": task.environment, "family": task.family}
    else:
        fields = dict(episode)
    turns = fields.get("turns", 0)
    return {
        "environment": fields.get("environment") or "",
        "family": fields.get("family") or "",
        "success": bool(fields["success"]),
        "score": float(fields.get("score") or 0.0),
        "turns": turns if isinstance(turns, int | float) else len(turns),
        "truncated": bool(fields.get("truncated")),
        "failed": bool(fields.get("failed")),
    }


def _grouped(rows: Iterable[dict[str, Any]], key: str) -> dict[str, list[dict[str, Any]]]:
    groups = defaultdict(list)
    for row in rows:
        groups[row[key]].append(row)
    return {name: groups[name] for name in sorted(groups)}


def _means(rows: Sequence[dict[str, Any]]) -> Summary:
    counted = [row for row in rows if not row["failed"]]

    def mean(key: str) -> float | None:
        return fmean(row[key] for row in counted) if counted else None

    return Summary(
        episodes=len(counted),
        failed=len(rows) - len(counted),
        success=mean("success"),
        score=mean("score"),
        turns=mean("turns"),
        truncated=mean("truncated"),
    )


# ------------------------------------------------------------------------------------------------- the table

_NOTHING = "–"
_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("Succ. %", "success", lambda value: f"{100 * value:.1f}"),
    ("Score", "score", lambda value: f"{value:.2f}"),
    ("Turns", "turns", lambda value: f"{value:.1f}"),
    ("Cut %", "truncated", lambda value: f"{100 * value:.1f}"),
)
_HEADER = ("Tasks", "Episodes", *(name for name, _, _ in _COLUMNS))


def results_table(before: Results, after: Results | None = None, *, title: str | None = None) -> "Table":
    """Return the results as a rich table: a line for each environment, and below it one for each of its families.

    Args:
        before: results to show, of the model before training if `after` is given.
        after: results after training; each cell then reads `before → after`.
        title: heading of the table.
    """
    from rich import box
    from rich.table import Table

    # Without vertical lines, so that `before → after` fits a terminal of 80 columns.
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.caption, table.caption_justify = _failures(before, after), "left"
    for name in _HEADER:
        first = name == _HEADER[0]
        table.add_column(name, justify="left" if first else "right", no_wrap=not first, overflow="fold")
    for heads, label, cells in _lines(before, after):
        table.add_row(label if heads else f"  {label}", *cells, style="bold" if heads else None)
    return table


def results_markdown(before: Results, after: Results | None = None) -> str:
    """Return the same table as [`results_table`] in Markdown, for a report or a model card."""
    lines = [list(_HEADER), ["---", *["---:"] * (len(_HEADER) - 1)]]
    lines += [[f"**{label}**" if heads else label, *cells] for heads, label, cells in _lines(before, after)]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    failures = _failures(before, after)
    return f"{text}\n\n{failures}\n" if failures else f"{text}\n"


def _lines(before: Results, after: Results | None) -> Iterator[tuple[bool, str, list[str]]]:
    """Each line: whether it heads a section, its label, its cells."""
    results = [before] if after is None else [before, after]
    names = _union(result["environments"] for result in results)
    if len(names) != 1:
        yield True, "all environments", _cells(results)
    for name in names:
        own = [result["environments"].get(name) for result in results]
        yield True, name or "(no name)", _cells(own)
        for family in _union(summary["families"] for summary in own if summary is not None):
            yield False, family, _cells([None if s is None else s["families"].get(family) for s in own])


def _cells(summaries: Sequence[Summary | None]) -> list[str]:
    counts = [_NOTHING if summary is None else str(summary["episodes"]) for summary in summaries]
    cells = [counts[0] if len(set(counts)) == 1 else " → ".join(counts)]
    for _, key, show in _COLUMNS:
        values = [None if summary is None else summary[key] for summary in summaries]  # type: ignore[literal-required]
        cells.append(" → ".join(_NOTHING if value is None else show(value) for value in values))
    return cells


def _failures(before: Results, after: Results | None) -> str | None:
    counts = [before["failed"]] if after is None else [before["failed"], after["failed"]]
    if not any(counts):
        return None
    return f"Failed episodes, in no mean: {' → '.join(map(str, counts))}"


def _union(keys: Iterable[Iterable[str]]) -> list[str]:
    return sorted({key for part in keys for key in part})
