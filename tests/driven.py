"""What tests of TRL-driven rollouts share: a world with tools, tool calls as text, a trainer that says a script."""

import json

from datasets import Dataset
from support import ScriptedPolicy, make_config, make_model, make_tokenizer

from cope_trl.cope_trainer import CoPETrainer


class Stairs:
    """Climb to the floor that the row names; `slide` breaks."""

    def reset(self, goal: int = 2, **row) -> str:
        self.goal, self.floor = goal, 0
        return f"You are on floor 0. Climb to floor {goal}."

    def climb(self, steps: int = 1) -> str:
        """Climb the stairs.

        Args:
            steps: how many floors to climb.
        """
        self.floor += steps
        return f"You are on floor {self.floor}."

    def slide(self) -> str:
        """Slide down the banister."""
        raise ValueError("the banister is broken")

    @property
    def success(self) -> bool:
        return self.floor == self.goal

    def get_reward(self) -> float:
        return 0.5 * self.success


class Well(Stairs):
    """The same world with another tool, and no word of its own on success."""

    success = property()  # hidden: reading it is an AttributeError, as if it were not there

    def dig(self) -> str:
        """Dig one floor down."""
        self.floor += 1
        return "You dig."

    def get_reward(self) -> float:
        return float(self.floor == self.goal)


def call(name: str, thought: str = "", **arguments) -> str:
    """A reply with one tool call, as Qwen's templates write it."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"{thought}<tool_call>\n{body}\n</tool_call>"


CLIMB, SLIDE, DONE = call("climb", "Up. ", steps=1), call("slide"), "I am there."


def prompt_rows(*goals: int, **columns) -> Dataset:
    """Rows with a prompt and the goal."""
    messages = [{"role": "user", "content": "Use the tools. "}]
    return Dataset.from_list([{"prompt": messages, "goal": goal, **columns} for goal in goals])


def constant(value: float):
    """A reward function that gives every completion the same."""

    def steady(completions, **_):
        return [value] * len(completions)

    return steady


class Driven(CoPETrainer):
    """Says what is scripted, whoever drives: rollout i of the batch (over all ranks) gets script i."""

    scripts: list[list[str]]
    end = "<|im_end|>"

    def _generate_and_score_completions(self, inputs):
        first = self.accelerator.process_index * len(inputs)
        chosen = [self.scripts[(first + i) % len(self.scripts)] for i in range(len(inputs))]
        self.script = ScriptedPolicy(self._tokenizer, chosen, self._tokenizer.convert_tokens_to_ids(self.end))
        return super()._generate_and_score_completions(inputs)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        super()._generate_single_turn  # noqa: B018 - the seam is there
        replies = self.script(prompt_ids, self.max_completion_length)
        return [reply.ids for reply in replies], None


def driven_trainer(folder, scripts, dataset=None, model=None, tokenizer=None, **kwargs):
    """A trainer whose completions are scripted and rolled out by TRL. Keywords go to the trainer or to the config."""
    own = ("reward_funcs", "tools", "rollout_func", "environment_factory", "success_fn", "peft_config", "eval_dataset")
    arguments = {name: kwargs.pop(name) for name in own if name in kwargs}
    trainer = type("Driven", (Driven,), {"scripts": scripts})(
        model=model if model is not None else make_model(),
        args=make_config(folder, **kwargs),
        train_dataset=prompt_rows(2) if dataset is None else dataset,
        processing_class=tokenizer or make_tokenizer(),
        **arguments,
    )
    trainer.model.train()
    return trainer


def roll_out(trainer):
    """One batch of every row four times; the trajectories are then in `trainer.trajectories`."""
    rows = [dict(row) for row in trainer.train_dataset for _ in range(4)]
    return trainer._generate_and_score_completions(rows)
