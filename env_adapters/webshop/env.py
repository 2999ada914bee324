"""The WebShop adapter."""

import importlib.util
import json
import os
from collections.abc import Sequence

from env_adapters.base import Outcome, Task, TextEnv
from env_adapters.errors import EnvAdapterError, EpisodeStateError, MissingDependencyError, did_you_mean
from env_adapters.protocols import Action, ReActText
from env_adapters.webshop.browser import Browser, parse
from env_adapters.webshop.shop import check_data, open_shop, opened_shop
from env_adapters.webshop.tasks import check_index, draw_split, parse_task_id, task_id_of

PACKAGES = ("nltk", "regex", "rapidfuzz")
OBSERVATION_MODES = ("text", "text_rich")
LINE_END = "\n"
SEARCH = "search[<keywords>]"
# The paper's prompt (Appendix C.2), word for word: results compare only under the same one.
INSTRUCTION = (
    "You are web shopping. I will give you instructions about what to do. You have to follow the instructions. Every "
    "round I will give you an observation and a list of available actions, you have to respond an action based on the "
    "state and instruction. You can use search action if search is available. You can click one of the buttons in "
    "clickables. An action should be of the following structure: search[keywords] click[value] If the action is not "
    "valid, perform nothing. Keywords in search are up to you, but the value in click must be a value in the list of "
    "available actions. Remember that your keywords in search should be carefully designed. Your response should use "
    "the following format: Thought: I think … Action: click[something]"
)


class WebShopEnv(TextEnv):
    """Shopping by instruction in a text web shop (Yao et al., 2022), as the paper plays it.

    An episode ends with `click[buy now]`. The score is the shop's graded reward, 0 to 1; success is a reward of
    exactly 1. Invalid are the actions that the shop ignores; the page is then shown again.

    A task id fixes the whole episode, random search results included. It also says which catalogue it belongs to:
    `webshop_17` to the data folder, `synthetic_17` to a generated one that needs no files. Any environment plays both.

    All environments of a process share one shop a catalogue, which is built by the first `reset` and kept.

    Args:
        data: the catalogue that `reset` draws a task from where it is given none: `"real"` or `"synthetic"`. `None`
            stands for `"real"`.
        root: the data folder; by default what `$WEBSHOP_DATA` names, else `~/.cache/cope_trl/webshop`.
        available_actions: whether observations end with a line that lists what can be done, as the prompt promises.
        strict_options: compare chosen options with the goal's as upstream does, under which some goals cannot score 1
            (docs/environments/webshop.md); `False` compares names and values.
        observation_mode: `"text"` or `"text_rich"`, upstream's two forms. Only the second one marks what was clicked.

    Raises:
        EnvAdapterError: `data` or `observation_mode` is none of these.
    """

    name = "webshop"
    protocol = ReActText()
    instruction = INSTRUCTION
    acknowledgement = "Ok."
    splits = ("train", "test", "all")
    max_turns = 15
    max_turns_eval = 15
    data_maker = "env_adapters.webshop.make_data:main"

    def __init__(
        self,
        data: str | None = None,
        root: str | os.PathLike[str] | None = None,
        *,
        available_actions: bool = True,
        strict_options: bool = True,
        observation_mode: str = "text",
    ) -> None:
        check_data(data)
        if observation_mode not in OBSERVATION_MODES:
            raise EnvAdapterError(
                f"`observation_mode` is {observation_mode!r}, but it must be one of {list(OBSERVATION_MODES)}."
                + did_you_mean(str(observation_mode), OBSERVATION_MODES)
            )
        self.data = data or "real"
        self.root = root
        self.available_actions = available_actions
        self.strict_options = strict_options
        self._rich = observation_mode == "text_rich"
        self._browser: Browser | None = None

    @classmethod
    def tasks(cls, split: str, data: str | None = None, root: str | os.PathLike[str] | None = None) -> Sequence[Task]:
        """Tasks of `"train"`, `"test"` or `"all"`, by running id. The family is the category of the product.

        With the paper's data there are 3,930, 200 and 6,910 tasks.

        Args:
            split: one of the three.
            data, root: as in the constructor.

        Raises:
            UnknownSplitError: there is no such split.
            EnvDataError: the data folder is missing or damaged.
        """
        cls.check_split(split)
        shop = open_shop(data, root)
        data = data or "real"
        return [
            Task(cls.name, task_id_of(data, index), shop.goals[index].product.category, split)
            for index in draw_split(shop, data, split)
        ]

    @classmethod
    def check_requirements(cls) -> None:
        """Raise [`MissingDependencyError`] unless `nltk`, `regex` and `rapidfuzz` are installed; imports none."""
        missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
        if missing:
            raise MissingDependencyError(
                f"The environment 'webshop' needs the package {' and '.join(f'`{name}`' for name in missing)}, which "
                "is not installed: `pip install 'cope_trl[webshop]'`."
            )

    @classmethod
    def check_task_id(cls, task_id: str) -> None:
        """Raise [`UnknownTaskError`] for an id that no task has.

        A number beyond the last goal of the data folder is noticed here once this process has opened it, else by
        `reset`.
        """
        data, index = parse_task_id(task_id)
        shop = opened_shop(data)
        if shop is not None:
            check_index(task_id, index, len(shop.goals))

    @property
    def browser(self) -> Browser:
        """The session of the current episode. Raises before the first `reset`."""
        if self._browser is None:
            raise EpisodeStateError("The 'webshop' environment has no page yet; call `reset` first.")
        return self._browser

    def admissible_actions(self) -> list[str]:
        """Every click that has an effect now, and [`SEARCH`] in place of all searches where there is a search bar."""
        browser = self.browser
        # Upstream reads an action greedily, so a value with a bracket in it cannot be clicked.
        clicks = [f"click[{word}]" for word in browser.clickables if word != "search"]
        return [SEARCH] * browser.page.search_bar + [action for action in clicks if parse(action)[0] == "click"]

    def expert_action(self) -> str | None:
        """The next action of an expert that knows the product; `None` once the episode is over.

        It searches with words of the instruction where they find the product, else with the title. For a goal out
        of reach it buys what was asked for all the same.
        """
        from env_adapters.webshop.expert import next_action

        return next_action(self.browser) if self._playing else None

    def _begin(self, task_id: str | None, seed: int | None) -> str:
        self.check_requirements()
        if task_id is None:
            data = self.data
            drawn = draw_split(shop := open_shop(data, self.root), data, "train")
            index = drawn[int(self.np_random.integers(len(drawn)))]
        else:
            data, index = parse_task_id(task_id)
            shop = open_shop(data, self.root)
            check_index(task_id, index, len(shop.goals))
        self._browser = Browser(shop, shop.goals[index], strict_options=self.strict_options)
        return self._observation()

    def _act(self, action: Action) -> Outcome:
        browser = self.browser
        valid = browser.act(action.text)
        reward = browser.last_reward
        if reward is None:
            return Outcome(self._observation(), invalid=not valid)
        return Outcome(browser.observation(self._rich), score=reward.total, success=reward.total == 1.0, done=True)

    def _observation(self) -> str:
        text = self.browser.observation(self._rich)
        if not self.available_actions:
            return text
        actions = {
            "has_search_bar": self.browser.page.search_bar,
            "clickables": [word for word in self.browser.clickables if word != "search"],
        }
        return f"{text.removesuffix(LINE_END)}\nAvailable actions: {json.dumps(actions, ensure_ascii=False)}"
