"""Chat-template arithmetic in token ids.

An episode grows by appending: sampled ids are kept as they are, and what lies between two policy turns (the end of the
assistant's turn, the observation as a user turn, the next generation prompt) is rendered once from the template and
cut at the right place. Nothing is ever re-tokenised, so the ids trained are the ids sampled.

Text that comes from an environment is encoded as plain text: a control token spelled out in an observation does not
become one.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError as JinjaError
from transformers import PreTrainedTokenizerBase

from cope_trl.errors import TemplateError
from cope_trl.forecast.prompts import LIST_SEPARATOR, MERGE_SEPARATOR, NEXT_ACTION, plan_ahead
from cope_trl.types import Branch, Layout

# A private-use character: no template strips it and no tokenizer holds it as a control token.
_MARK = "\ue0c0"
Message = Mapping[str, Any]


class ChatFormat:
    """Renders the parts of an episode in the format of one tokenizer's chat template.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        chat_template: template to use instead of the tokenizer's own.
        template_kwargs: extra variables of the template, for example `{"enable_thinking": False}`.

    Attributes:
        chat_template: the template in force (TRL's training variant where the tokenizer's own rewrites history).
        replaced: whether TRL's training variant replaced the tokenizer's own template.
        merged: whether the template refuses two user turns in a row, so that a plan-ahead request is appended to the
            observation's turn instead of following it.
        generation_prompt_ids: (G,) ids that open an assistant turn; empty for some templates.
        user_close_ids: ids that close a user turn, where a plan-ahead request goes before them; empty elsewhere.
        end_of_turn_id: id that closes an assistant turn.

    Raises:
        [`TemplateError`]: the template cannot be used, with the reason and the remedy.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise TemplateError(
                f"`processing_class` is a {type(tokenizer).__name__}, which is not a fast tokenizer; character "
                "offsets are needed. Load it with `AutoTokenizer.from_pretrained(..., use_fast=True)`."
            )
        template = chat_template or tokenizer.chat_template
        if template is None:
            raise TemplateError(
                f"The tokenizer {tokenizer.name_or_path!r} has no chat template. Use an instruct model, or set one "
                "with `trl.clone_chat_template`."
            )
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.chat_template: str = template
        self.replaced = False
        specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._specials = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"(?!)")
        self._ensure_prefix_preserving()
        self._cut_parts()

    # ---------------------------------------------------------------- episodes

    def prompt_ids(
        self, messages: Sequence[Message], observation: str, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Ids of the standing messages, the first observation as a user turn, and the generation prompt.

        A conversation that already ends with a user message gets the observation appended to it. The JSON schemas in
        `tools` are shown as the template shows tools; one that does not is an error.
        """
        *head, last = [*messages, {"role": "user", "content": _MARK}]
        if head and head[-1]["role"] == "user":
            last = {"role": "user", "content": f"{head.pop()['content']}{MERGE_SEPARATOR}{_MARK}"}
        text = self._render([*head, last], generation_prompt=True, tools=tools)
        self._check_tools(text, tools)
        before, found, after = text.rpartition(_MARK)
        if not found:
            raise TemplateError("The chat template dropped the last user message of the prompt.")
        ids = self._encode_around(before, observation, after)
        gen = self.generation_prompt_ids
        if gen and ids[-len(gen) :] != gen:
            raise TemplateError("The chat template renders another generation prompt here than after a later turn.")
        return ids

    def _check_tools(self, text: str, tools: Sequence[Mapping[str, Any]] | None) -> None:
        for tool in tools or ():
            name = tool.get("function", tool).get("name", "")
            if name not in text:
                raise TemplateError(
                    f"The chat template of {self.tokenizer.name_or_path!r} shows no tool {name!r}: it "
                    "renders no tools. Use a model whose template does (Qwen2.5, Qwen3, Llama 3.1), or set another."
                )

    def turn_suffix_ids(self, observation: str, last_id: int) -> list[int]:
        """Ids between two policy turns: what closes the assistant's turn, the observation, the generation prompt.

        Args:
            observation: the environment's answer.
            last_id: last id the policy sampled; if it is another stop token than the template's end of turn, the
                template's own is added.
        """
        closing = [] if last_id == self.end_of_turn_id else [self.end_of_turn_id]
        return closing + self._encode_around(self._after_turn, observation, self._user_close + self._generation_text)

    # ---------------------------------------------------------------- forecasts

    def history_cut(self, history_end: int) -> int:
        """Where a branch leaves the episode: h_t's end, or before its end-of-turn token in the merged layout."""
        return history_end - len(self.user_close_ids)

    def branch(self, targets: Sequence[str], layout: Layout) -> Branch:
        """Tokens of one forecast window (paper C.6): request, generation prompt, target actions, end of turn.

        Args:
            targets: the actions a_t … a_t+K, each non-empty.
            layout: `"list"` (one assistant turn, an action a line) or `"turns"` (an assistant turn an action).
        """
        ids = self._encode(
            self._plan_open + plan_ahead(len(targets), layout) + self._user_close + self._generation_text
        )
        mask, offsets = [0] * len(ids), [-1] * len(ids)

        def add(new: Sequence[int], trained: int, new_offsets: Sequence[int] | None = None) -> None:
            ids.extend(new)
            mask.extend([trained] * len(new))
            offsets.extend(new_offsets if new_offsets is not None else [-1] * len(new))

        if layout == "list":
            add(*self._encode_targets(targets))
            add([self.end_of_turn_id], 1)
        else:
            for k, target in enumerate(targets):
                if k:
                    add(self.turn_suffix_ids(NEXT_ACTION, self.end_of_turn_id), 0)
                new = self._encode_plain(target)
                add(new, 1, [k] * len(new))
                add([self.end_of_turn_id], 1)
        return Branch(tuple(ids), tuple(mask), tuple(offsets))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a policy turn, without control tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    # ---------------------------------------------------------------- encoding

    def _render(
        self,
        messages: Sequence[Message],
        generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.template_kwargs,
            )
        except JinjaError as error:
            raise TemplateError(
                f"The chat template refuses a conversation with the roles {[m['role'] for m in messages]}: {error}"
            ) from error

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _encode_plain(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def _encode_around(self, before: str, content: str, after: str) -> list[int]:
        """Encode template text around foreign content, whose control tokens stay plain text."""
        content = _encodable(content.strip() if self._trims else content)
        if self._specials.search(content):
            return self._encode(before) + self._encode_plain(content) + self._encode(after)
        return self._encode(before + content + after)

    def _encode_targets(self, targets: Sequence[str]) -> tuple[list[int], int, list[int]]:
        encoded = self.tokenizer(
            LIST_SEPARATOR.join(targets),
            add_special_tokens=False,
            split_special_tokens=True,
            return_offsets_mapping=True,
        )
        ends, position = [], 0
        for target in targets:
            position += len(target)
            ends.append(position)
            position += 1
        offsets = []
        for start, _ in encoded["offset_mapping"]:
            k = next((k for k, end in enumerate(ends) if start <= end), len(ends) - 1)
            offsets.append(-1 if start == ends[k] else k)  # the line break belongs to no action
        return encoded["input_ids"], 1, offsets

    # ---------------------------------------------------------------- reading the template once

    def _ensure_prefix_preserving(self) -> None:
        if self._is_prefix_preserving():
            return
        from trl.chat_template_utils import get_training_chat_template

        original = self.tokenizer.chat_template
        try:
            self.tokenizer.chat_template = self.chat_template
            replacement = get_training_chat_template(self.tokenizer)
        except ValueError:
            replacement = None
        finally:
            self.tokenizer.chat_template = original
        if replacement is not None:
            self.chat_template, self.replaced = replacement, True
        if replacement is None or not self._is_prefix_preserving():
            raise TemplateError(
                f"The chat template of {self.tokenizer.name_or_path!r} rewrites earlier turns when a later one is "
                "added, so sampled tokens would not be the tokens trained, and TRL has no training variant of it. "
                "Pass a tokenizer whose `chat_template` renders earlier turns unchanged."
            )

    def _is_prefix_preserving(self) -> bool:
        """Whether each conversation renders as a prefix of its continuation, with and without a thinking block."""
        for reply in ("Action: look", "<think>\nLet me see.\n</think>\n\nAction: look"):
            messages: list[dict[str, str]] = []
            previous = ""
            for turn in range(3):
                messages.append({"role": "user", "content": f"observation {turn}"})
                asked = self._render(messages, generation_prompt=True)
                messages.append({"role": "assistant", "content": reply})
                answered = self._render(messages)
                if not (asked.startswith(previous) and answered.startswith(self._render(messages[:-1]))):
                    return False
                previous = answered
        return True

    def _cut_parts(self) -> None:
        user, assistant = {"role": "user", "content": _MARK}, {"role": "assistant", "content": _MARK}
        asked = self._render([user])
        prompted = self._render([user], generation_prompt=True)
        if not prompted.startswith(asked):
            raise TemplateError("The chat template changes the user's turn when it adds a generation prompt.")
        self._generation_text = prompted[len(asked) :]
        self.generation_prompt_ids = self._encode(self._generation_text) if self._generation_text else []
        self._user_close = asked.rpartition(_MARK)[2]
        self._trims = f" {_MARK} " not in self._render([{"role": "user", "content": f" {_MARK} "}])
        following = self._render([user, assistant, user])
        _, _, between = following[: following.rindex(_MARK)].rpartition(_MARK)
        self.end_of_turn_id, self._after_turn = self._split_end_of_turn(between)
        try:
            twice = self._render([user, user])
            self.merged = not twice.startswith(asked)
        except TemplateError:
            self.merged = True
        if self.merged:
            self._plan_open = MERGE_SEPARATOR
            self.user_close_ids = self._measure_user_close()
        else:
            self._plan_open = twice[len(asked) :].rpartition(_MARK)[0]
            self.user_close_ids = []

    def _split_end_of_turn(self, between: str) -> tuple[int, str]:
        match = self._specials.search(between)
        if match is None:
            raise TemplateError(
                "The chat template closes the assistant's turn with no special token, so the end of a turn cannot be "
                f"recognised; between two turns it renders {between!r}. Use a template with an end-of-turn token."
            )
        return self.tokenizer.convert_tokens_to_ids(match.group()), between[match.end() :]

    def _measure_user_close(self) -> list[int]:
        close = self._encode(self._user_close)
        for probe in ("look", "You see 3.", "a b?"):
            if self._encode(probe + self._user_close)[-len(close) :] != close:
                raise TemplateError(
                    "The end of the user's turn does not have tokens of its own in this template, so a plan-ahead "
                    "request cannot be placed before it."
                )
        return close


def _encodable(text: str) -> str:
    """Replace lone surrogates, which no tokenizer can encode."""
    return text.encode("utf-8", "replace").decode("utf-8")
