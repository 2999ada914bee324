"""Small parts the tests share: tokenizers trained on the spot, tiny models, a toy environment, scripted policies."""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cope_trl.rollout.generation import Generation
from env_adapters.base import Outcome, Task, TextEnv
from env_adapters.errors import UnknownTaskError
from env_adapters.protocols import Action, ReActText

_TRL_TEMPLATES = Path(trl.__file__).parent / "chat_templates"

# Two templates TRL does not ship: ChatML with a default system message, and instruction tags without a prompt of
# their own that also refuse two user turns in a row.
_DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_INSTRUCTION_TAGS = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}[INST] "
    "{{ m['content'] }} [/INST]{% else %} {{ m['content'] | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)

FORMATS: dict[str, tuple[str, str]] = {  # name → (template or its file, end-of-turn token)
    "qwen2_5": ("qwen2_5.jinja", "<|im_end|>"),
    "qwen3": ("qwen3.jinja", "<|im_end|>"),
    "llama3": ("llama3.jinja", "<|eot_id|>"),
    "gemma": ("gemma.jinja", "<end_of_turn>"),
    "smollm2": (_DEFAULT_SYSTEM, "<|im_end|>"),
    "mistral": (_INSTRUCTION_TAGS, "</s>"),
}
_SPECIALS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]"),
]
_BOS = {"llama3": "<|begin_of_text|>", "gemma": "<bos>", "mistral": "<s>"}
_CORPUS = [
    "Plan ahead: list the next 3 actions you will take to make progress on the task, starting with the action you "
    "take right now, one action per line.",
    "Thought: I think. Action: go right",
    "You are in room 3. You see a door and a key. system user assistant model Be helpful.",
]
VOCABULARY = 420


def make_tokenizer(name: str = "qwen2_5") -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the chat template of one model family."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=_SPECIALS, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    template, end = FORMATS[name]
    if template.endswith(".jinja"):
        template = (_TRL_TEMPLATES / template).read_text(encoding="utf-8")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token="<|endoftext|>",
        bos_token=_BOS.get(name),
        additional_special_tokens=[token for token in _SPECIALS if token not in (end, "<|endoftext|>")],
        chat_template=template,
        padding_side="left",
    )


_ARCHITECTURES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def make_model(architecture: str = "qwen2", seed: int = 0, **changes: object) -> torch.nn.Module:
    """A two-layer float32 model with grouped-query attention (4 heads, 2 key-value heads)."""
    config_class, model_class = _ARCHITECTURES[architecture]
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
        **changes,
    }
    if architecture == "qwen3":
        settings.setdefault("head_dim", 8)
    torch.manual_seed(seed)
    model = model_class(config_class(**settings))
    # Larger weights than the default initialisation: attention must matter for a mask error to show.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model


def make_talker(**changes: object) -> torch.nn.Module:
    """A model that ends a turn after four tokens on average, so that its episodes have several turns."""
    model = make_model(**changes)
    model.generation_config.eos_token_id = [2, *range(5, VOCABULARY, 4)]
    return model


class CountEnv(TextEnv):
    """Reach the goal with `n` times the action "go" (task id `count-n`); "back" has no effect."""

    name = "count"
    protocol = ReActText()
    instruction = "Say go until you are there."
    acknowledgement = "OK."
    max_turns = 6
    max_turns_eval = 8

    @classmethod
    def tasks(cls, split: str) -> Sequence[Task]:
        cls.check_split(split)
        numbers = range(1, 5) if split == "train" else range(5, 7)
        return [Task("count", f"count-{n}", f"n{n}", split) for n in numbers]

    @classmethod
    def check_task_id(cls, task_id: str) -> None:
        if not task_id.removeprefix("count-").isdigit():
            raise UnknownTaskError(f"`task_id` is {task_id!r}; use 'count-1', 'count-2', and so on.")

    def _begin(self, task_id: str | None, seed: int | None) -> str:
        self.check_task_id(task_id or "count-1")
        self.goal, self.done = int((task_id or "count-1").removeprefix("count-")), 0
        return f"You are in room 0. Go to room {self.goal}."

    def _act(self, action: Action) -> Outcome:
        invalid = action.text != "go"
        self.done += not invalid
        won = self.done == self.goal
        text = (
            "Nothing happens." if invalid else f"You are in room {self.done}." + " You see a door." * (self.done % 3)
        )
        return Outcome(text, score=self.done / self.goal, success=won, done=won, invalid=invalid)


class ScriptedPolicy:
    """Says the scripted replies, one a turn, to whichever prompts are asked first; then repeats the last one.

    Args:
        tokenizer: encodes the replies.
        scripts: one list of replies for each episode, in the order of the episodes.
        end: id appended to each reply; `None` leaves the turn open.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, scripts: Iterable[Sequence[str]], end: int | None) -> None:
        self.tokenizer, self.end = tokenizer, end
        self.scripts = [list(script) for script in scripts]
        self.seen: list[list[int]] = []
        self._turn: dict[int, int] = {}
        self._known: list[list[int]] = []

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Generation]:
        self.seen.extend(list(prompt) for prompt in prompts)
        generations, used = [], set()
        for prompt in prompts:
            if len(prompt) == 1:  # the placeholder of a rank that has finished
                generations.append(Generation(list(prompt)))
                continue
            episode = self._episode(list(prompt), used)
            used.add(episode)
            turn = self._turn.get(episode, 0)
            self._turn[episode] = turn + 1
            script = self.scripts[episode]
            ids = self.tokenizer(script[min(turn, len(script) - 1)], add_special_tokens=False)["input_ids"]
            ids = ids + ([] if self.end is None else [self.end])
            self._known[episode] = [*prompt, *ids]
            generations.append(Generation(ids[:max_new_tokens]))
        return generations

    def _episode(self, prompt: list[int], used: set[int]) -> int:
        """The episode this prompt continues, else the next new one."""
        for index, known in enumerate(self._known):
            if index not in used and prompt[: len(known)] == known:
                return index
        self._known.append(prompt)
        return len(self._known) - 1


class OneByOne:
    """A `TurnEngine` over a policy: one turn at a time, the next one drawn at random from those asked for.

    First turns keep the order of the episodes, by which a [`ScriptedPolicy`] tells them apart.
    """

    def __init__(self, policy, seed: int = 0) -> None:
        self.policy, self.rng = policy, random.Random(seed)
        self.seeds: list[str] = []
        self.open_now: set[int] = set()
        self.most_open = 0
        self._asked: dict[int, tuple] = {}
        self._begun: set[int] = set()

    def open(self, seed: str) -> int:
        self.seeds.append(seed)
        key = len(self.seeds)
        self.open_now.add(key)
        self.most_open = max(self.most_open, len(self.open_now))
        return key

    def sample(self, episode, ids, limit, deliver) -> None:
        assert episode in self.open_now
        assert episode not in self._asked
        self._asked[episode] = (list(ids), limit, deliver)

    def advance(self) -> bool:
        waiting = min(self.open_now - self._begun, default=None)
        ready = [key for key in self._asked if key in self._begun or key == waiting]
        if not ready:
            return False
        key = self.rng.choice(sorted(ready))
        self._begun.add(key)
        ids, limit, deliver = self._asked.pop(key)
        deliver(self.policy([ids], limit)[0])
        return True

    def close(self, episode: int) -> None:
        self.open_now.remove(episode)
        self._asked.pop(episode, None)


def count_rows(*goals: int) -> list[dict]:
    """Dataset rows of the toy environment."""
    prompt = CountEnv.standing_messages()
    return [{"prompt": prompt, "environment": "count", "task_id": f"count-{n}", "family": f"n{n}"} for n in goals]


def make_config(folder: object, **changes: object):
    """A CPU configuration: one group of four a step, no KL, no entropy bonus, no checkpoints."""
    from cope_trl.cope_config import CoPEConfig

    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_steps": 1,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "max_tokens_per_turn": 24,
        "max_completion_length": 1024,
        "disable_tqdm": True,
        "beta": 0.0,
        "entropy_coef": 0.0,
        "forecast_grad_norm_steps": 0,
        "shuffle_dataset": False,
        "learning_rate": 1e-2,
        **changes,
    }
    return CoPEConfig(**settings)


def scripted_trainer(model, config, goals: Sequence[int], scripts: Sequence[Sequence[str]], tokenizer=None, **kwargs):
    """A `CoPETrainer` whose policy says what is scripted: rollout i of the batch (over all ranks) gets script i.

    Everything else is the real thing. Scripts are reused in turn when there are fewer than rollouts.
    """
    from datasets import Dataset

    from cope_trl.cope_trainer import CoPETrainer

    tokenizer = tokenizer or make_tokenizer()

    class Scripted(CoPETrainer):
        def _rollout(self, prompts, trainer):
            first = self.accelerator.process_index * len(prompts)
            chosen = [scripts[(first + i) % len(scripts)] for i in range(len(prompts))]
            self.script = ScriptedPolicy(tokenizer, chosen, self.chat.end_of_turn_id)
            return super()._rollout(prompts, trainer)

        def _sample_turn(self, prompts, max_new_tokens):
            return self.script(prompts, max_new_tokens)

    kwargs.setdefault("environments", {"count": CountEnv})
    if "train_dataset" not in kwargs:
        kwargs["train_dataset"] = Dataset.from_list(count_rows(*goals))
    return Scripted(
        model=model,
        args=config,
        processing_class=tokenizer,
        **kwargs,
    )


def half_expert_trainer(model, config, tasks, replies: Sequence[str], idle: str, **kwargs):
    """A `CoPETrainer` on real environments: even rollouts say `replies`, one a turn; odd ones always say `idle`.

    Args:
        tasks: dataset with the one task that `replies` solve.
    """
    from cope_trl.cope_trainer import CoPETrainer

    tokenizer = make_tokenizer()

    class HalfExpert(CoPETrainer):
        def _rollout(self, prompts, trainer):
            self.script = ScriptedPolicy(tokenizer, [replies, [idle]] * (len(prompts) // 2), self.chat.end_of_turn_id)
            return super()._rollout(prompts, trainer)

        def _sample_turn(self, prompts, max_new_tokens):
            return self.script(prompts, max_new_tokens)

    return HalfExpert(model=model, args=config, train_dataset=tasks, processing_class=tokenizer, **kwargs)


# Eight rollouts of two tasks with goal 2 or 3: successes of several lengths, detours, a failure, an unfinished one.
GO, BACK, TALK = "Thought: on. Action: go", "Action: back", "I do not know.\n\nAction:"
MIXED_SCRIPTS = [
    [GO],
    [BACK, GO, BACK, GO],
    [BACK],
    [TALK, GO],
    [BACK],
    [TALK],
    [BACK, TALK, BACK],
    ["Action: back and forth"],
]
