"""TextWorld's PDDL engine, imported a second time and made fast there; the stock modules stay as they are.

The stock engine parses every text it needs anew, at every step, with parsers that break when two threads use them.
Here three of its modules are executed once more, outside `sys.modules`, and a few names in these private copies are
bound to other things:

- every parse is remembered, and all parsing and translating happens under one lock;
- a game is translated for the engine once instead of four times (twice at load, twice at reset), and never for the
  planner, which nothing here uses;
- contexts of the text grammar are copied one level deep, for their values are never changed;
- expressions of the grammar are compiled once;
- facts are not kept for ever. The stock class remembers every fact of every game ever loaded.

`textworld` is imported by the first call of [`copy_of_textworld`]: it is an optional dependency.
"""

import contextlib
import copy
import functools
import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

# How many are remembered. A game's translation and grammar take up to 1.5 MB, and rollouts of one task follow one
# another, so a few suffice. The other texts are short, and almost all the same in every game.
GAMES = 64
TEXTS = 4096

_lock = threading.RLock()
_copied: types.SimpleNamespace | None = None


def copy_of_textworld() -> types.SimpleNamespace:
    """The private copies: `pddl` (with `PddlEnv`), `logic` and `textgen`. Made by the first call."""
    global _copied
    with _lock:
        if _copied is None:
            textgen, logic, pddl = (
                _execute_again(f"textworld.envs.pddl.{name}") for name in ("textgen", "logic", "pddl")
            )
            translator = _translator()
            _remember_parses(textgen)
            logic.ContextSensitiveGrammar = textgen.ContextSensitiveGrammar
            logic._parse_and_convert = _remembered(logic._parse_and_convert, GAMES, rule_name="pddlStart")
            logic.Proposition = _facts_not_kept(logic.Proposition)
            logic.fast_downward = pddl.fast_downward = translator
            pddl.pddl_logic = logic
            _copied = types.SimpleNamespace(textgen=textgen, logic=logic, pddl=pddl)
        return _copied


def _execute_again(name: str) -> Any:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------------- the text grammar


def _remembered(parse: Callable[..., Any], maxsize: int = TEXTS, **rule: str) -> Callable[..., Any]:
    """A parser that remembers. Its results are shared, so nobody may change them."""

    @functools.lru_cache(maxsize=maxsize)
    def parse_once(text: str) -> Any:
        with _lock:
            return parse(text, **rule)

    return lambda text, **_: parse_once(text)


def _remember_parses(textgen: Any) -> None:
    symbols = _remembered(textgen._parse_and_convert, rule_name="symbols")
    query = _remembered(textgen.Rule.parse_conjunctive_query)

    def clone(value: Any) -> Any:
        """A copy as deep as anything is changed: symbols, and the symbols inside them."""
        if isinstance(value, list):
            return [clone(part) for part in value]
        twin = copy.copy(value)
        for inner in ("symbol", "expression"):
            if isinstance(getattr(value, inner, None), textgen.Symbol):
                setattr(twin, inner, clone(getattr(value, inner)))
        return twin

    def copy_context(context: Any) -> Any:
        return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}

    def derive(self: Any, context: Any = None) -> Any:
        context = context or self.context
        names = {**context["variables"], "self": self, "context": context}
        return [textgen.TerminalSymbol(eval(_compiled(self.expression), textgen.__dict__, names))]

    textgen._parse_and_convert = lambda text, **_: clone(symbols(text))
    textgen.Rule = types.SimpleNamespace(parse_conjunctive_query=query)
    textgen.deepcopy = clone
    textgen.copy_context = copy_context
    textgen.EvalSymbol.derive = derive


@functools.lru_cache(maxsize=TEXTS)
def _compiled(expression: str) -> types.CodeType:
    return compile(expression.strip(), "<grammar>", "eval")


# ----------------------------------------------------------------------------------------------------------- the facts


def _facts_not_kept(proposition: Any) -> Any:
    """A subclass of TextWorld's `Proposition` without its memory of every instance; equal to those of the class."""

    class Forgetful(type(proposition)):  # type: ignore[misc]
        __call__ = type.__call__

    class Fact(proposition, metaclass=Forgetful):
        __slots__ = ()

        def negate(self) -> Any:
            name = self.name.split("not_", 1)[1] if self.is_negation else f"not_{self.name}"
            return Fact(name, self.arguments)

    return Fact


# ------------------------------------------------------------------------------------------------------ the translator


def _translator() -> Any:
    """`fast_downward` with a memory for translations, and libraries that are never given the planner's half."""
    with _same_process_state():
        import fast_downward
        import fast_downward.translate.translate  # reads sys.argv when it is imported

    stock = fast_downward.pddl2sas
    # The same function with one name of its module bound to another thing: it takes the whole process's standard
    # output for itself otherwise, and with it what other threads print.
    names = {**stock.__globals__, "CapturingStdout": contextlib.nullcontext}
    quiet = types.FunctionType(stock.__code__, names, stock.__name__, stock.__defaults__)

    @functools.lru_cache(maxsize=GAMES)
    def translate_once(domain: str, problem: str) -> Any:
        with _same_process_state():
            return quiet(domain, problem)

    @functools.lru_cache(maxsize=GAMES)  # answers without waiting for the lock
    def translate(domain: str, problem: str) -> Any:
        with _lock:
            return translate_once(domain, problem)

    def pddl2sas(domain: str, problem: str, verbose: bool = False, optimize: bool = False) -> Any:
        return (None, "") if optimize else translate(domain, problem)

    return types.SimpleNamespace(
        **{**vars(fast_downward), "pddl2sas": pddl2sas, "load_lib": lambda: _Library(fast_downward.load_lib())}
    )


class _Library:
    """One loaded copy of the engine's shared library, without its planner."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def load_sas_replan(self, sas: bytes) -> None:
        pass


class _OthersGoOn:
    """A standard output that drops what one thread prints and passes on everything else."""

    def __init__(self, stdout: Any) -> None:
        self._stdout = stdout
        self.silenced: int | None = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self.silenced else self._stdout.write(text)


@contextlib.contextmanager
def _same_process_state() -> Iterator[None]:
    """Put `sys.argv` and `sys.stdout` back, both of which the translator replaces, and keep it quiet."""
    argv, stdout = sys.argv, sys.stdout
    quiet = _OthersGoOn(stdout)
    sys.argv = ["translate.py", "domain", "task"]  # what the translator parses when it is imported
    sys.stdout = quiet
    try:
        yield
    finally:
        sys.argv = argv
        if sys.stdout is quiet:  # else another thread has put its own there meanwhile, and will put ours back
            sys.stdout = stdout
        quiet.silenced = None
