"""Colocated vLLM under the trainer: log-probabilities, weight sync, limits and stop tokens, importance correction.

But where they say otherwise, these tests sample with an engine that is asked for one turn of one episode at a time.
"""

import json
import shutil

import pytest
import torch
from support import make_config

pytest.importorskip("vllm")
from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("these tests are for vLLM's CPU backend", allow_module_level=True)

from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoTokenizer
from vllm import SamplingParams

from cope_trl.cope_trainer import CoPETrainer
from cope_trl.rollout.generation import TransformersPolicy

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CLOSE = {"rtol": 0, "atol": 1e-4}
CONTEXT = 1024


def every_other(completions, **_):
    """Rewards that differ within every group, so that every step has a gradient."""
    return [float(i % 2) for i in range(len(completions))]


def lora(rank_stabilized=False):
    return LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], use_rslora=rank_stabilized)


class Compared(CoPETrainer):
    """Keeps, of every batch, the sampled log-probabilities and those of the model that is about to be updated."""

    compared = ()
    played = ()

    def _rollout(self, prompts, trainer):
        output = super()._rollout(prompts, trainer)
        mask = [torch.tensor(e.completion_mask, dtype=torch.bool) for e in self.trajectories]
        sampled = [torch.tensor(e.logprobs)[m] for e, m in zip(self.trajectories, mask, strict=True)]
        own = [reference(self.model, e, self.temperature)[m] for e, m in zip(self.trajectories, mask, strict=True)]
        self.compared = [*self.compared, (torch.cat(sampled), torch.cat(own))]
        self.played = [*self.played, *self.trajectories]
        return output


@torch.no_grad()
def reference(model, episode, temperature):
    """Log-probabilities of an episode's completion: one forward pass, nothing padded, nothing cached."""
    ids = torch.tensor([episode.ids])
    logits = model(input_ids=ids).logits[0, len(episode.prompt_ids) - 1 : -1] / temperature
    return torch.log_softmax(logits.float(), -1).gather(-1, ids[0, len(episode.prompt_ids) :, None])[:, 0]


def build(folder, model, tasks, **changes):
    peft_config = changes.pop("peft_config", None)
    settings = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": CONTEXT,
        "max_turns": 5,
        "max_turns_eval": 5,
        "max_completion_length": 400,
        "forecast_coef": 0.1,
        **changes,
    }
    return Compared(
        model=model,
        reward_funcs=every_other,
        args=make_config(folder, **settings),
        train_dataset=tasks,
        peft_config=peft_config,
    )


@torch.no_grad()
def engine_log_probs(trainer, ids):
    """The engine's log-probabilities of a fixed sequence, all tokens but the first."""
    parameters = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = trainer.vllm_generation.llm.generate(
        [{"prompt_token_ids": ids}], sampling_params=parameters, use_tqdm=False
    )
    return torch.tensor([chosen[i].logprob for i, chosen in zip(ids[1:], output.prompt_logprobs[1:], strict=True)])


@torch.no_grad()
def model_log_probs(model, ids):
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_log_probs_are_those_of_the_model_at_its_temperature(tmp_path, agent, tasks, temperature):
    trainer = build(tmp_path, agent, tasks, temperature=temperature, max_steps=2)
    trainer.train()
    assert len(trainer.compared) == 2
    for sampled, own in trainer.compared:
        assert len(sampled) > 40
        assert torch.allclose(sampled, own, **CLOSE)
        assert own.min() < -0.1
    assert trainer.lock_step_reason is None
    # At another temperature they would not agree.
    episode = max(trainer.played, key=lambda e: len(e.turns))
    assert len(episode.turns) > 1
    model = trainer.model
    assert not torch.allclose(reference(model, episode, temperature), reference(model, episode, 1.3), atol=1e-2)


@pytest.mark.parametrize("adapter", [None, "lora", "rslora"])
def test_an_update_reaches_the_engine(tmp_path, agent, tasks, adapter):
    peft_config = None if adapter is None else lora(adapter == "rslora")
    trainer = build(tmp_path, agent, tasks, peft_config=peft_config, max_steps=1)
    before = trainer.evaluate_tasks(tasks)  # the first sample loads the weights
    fixed = list(before[0].ids)
    start = engine_log_probs(trainer, fixed)
    assert torch.allclose(start, model_log_probs(trainer.model, fixed), **CLOSE)
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0
    assert torch.equal(engine_log_probs(trainer, fixed), start)  # not before the next sample
    after = trainer.evaluate_tasks(tasks)
    updated = engine_log_probs(trainer, fixed)
    assert float((updated - start).abs().max()) > 0.05
    assert torch.allclose(updated, model_log_probs(trainer.model, fixed), **CLOSE)
    # The same prompts were sampled before: no cached key or value of the old weights is used again.
    for episode in after:
        mask = torch.tensor(episode.completion_mask, dtype=torch.bool)
        own = reference(trainer.model, episode, 1.0)
        assert torch.allclose(torch.tensor(episode.logprobs)[mask], own[mask], **CLOSE)


@pytest.fixture
def answers(monkeypatch):
    """Makes a trainer's engine keep the answers of every finished request; returns the list of them."""

    def watch(trainer):
        engine, kept = trainer.vllm_generation.llm.llm_engine, []
        step = engine.step

        def keep():
            outputs = step()
            kept.extend(output for output in outputs if output.finished)
            return outputs

        monkeypatch.setattr(engine, "step", keep)
        return kept

    return watch


@pytest.mark.parametrize("schedule", ["auto", "lock_step"])
def test_limits_of_turn_and_episode_hold_in_every_turn(tmp_path, agent, tasks, answers, schedule):
    changes = {"max_turns": 8, "max_completion_length": 100, "max_tokens_per_turn": 7, "max_steps": 2}
    trainer = build(tmp_path, agent, tasks, rollout_schedule=schedule, **changes)
    assert (trainer.lock_step_reason is None) == (schedule == "auto")
    kept = answers(trainer)
    trainer.train()
    played = trainer.played
    assert max(len(output.outputs[0].token_ids) for output in kept) == 7  # by the engine, not cut off afterwards
    end = trainer.chat.end_of_turn_id
    lengths = [turn.end - turn.start for episode in played for turn in episode.turns]
    assert max(lengths) == 7
    assert len(set(lengths)) > 1
    for episode in played:
        assert len(episode.completion_ids) <= 100
        for i, turn in enumerate(episode.turns):
            ids = episode.ids[turn.start : turn.end]
            assert end not in ids[:-1]
            assert (ids[-1] == end) or (i == len(episode.turns) - 1 and episode.truncated)
    assert trainer.vllm_generation.max_completion_length == 100  # the limit of a turn is gone after it


def test_an_episode_is_the_same_whatever_is_played_beside_it(tmp_path, agent, tasks):
    trainer = build(tmp_path, agent, tasks, temperature=0.7, per_device_eval_batch_size=8)
    several = tasks.select([0, 1] * 4)
    together = [e.ids for e in trainer.evaluate_tasks(several)]
    assert len(set(together)) == len(together)  # seeds differ, also those of one task
    assert [e.ids for e in trainer.evaluate_tasks(several.select(range(3)))] == together[:3]
    trainer.args.max_concurrent_episodes = 1
    assert [e.ids for e in trainer.evaluate_tasks(several.select(range(3)))] == together[:3]


def test_a_turn_computes_what_is_new_in_its_prompt(tmp_path, agent, tasks, answers):
    trainer = build(tmp_path, agent, tasks, max_turns_eval=30, max_completion_length=900)
    block = trainer.vllm_generation.llm.llm_engine.vllm_config.cache_config.block_size
    trainer.evaluate_tasks(tasks.select([0]))  # hands over the weights, which empties the cache
    trainer.vllm_generation.llm.reset_prefix_cache()
    kept = answers(trainer)
    (episode,) = max(
        (trainer.evaluate_tasks(tasks.select([i])) for i in (0, 1)), key=lambda played: len(played[0].turns)
    )
    turns = [
        answer for answer in kept if tuple(answer.prompt_token_ids) == episode.ids[: len(answer.prompt_token_ids)]
    ]
    assert len(turns) >= len(episode.turns) > 2
    assert len(episode.ids) > 2 * block
    known = 0
    for turn in turns:
        # Whole blocks are kept; of the turn before, all but its last token has been computed.
        assert turn.num_cached_tokens >= known // block * block
        known = len(turn.prompt_token_ids) + len(turn.outputs[0].token_ids) - 1
    assert turns[-1].num_cached_tokens >= block


def test_a_run_that_ends_early_leaves_nothing_in_the_engine(tmp_path, agent, tasks):
    trainer = build(tmp_path, agent, tasks, per_device_eval_batch_size=8, max_turns_eval=30)
    several, engine = tasks.select([0, 1] * 4), trainer.vllm_generation.llm.llm_engine
    expected = [e.ids for e in trainer.evaluate_tasks(several)]
    left = []

    def stop(finished):
        left.append(engine.get_num_unfinished_requests())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate_tasks(several, stop)
    assert left[0] > 0
    assert not engine.has_unfinished_requests()
    assert [e.ids for e in trainer.evaluate_tasks(several)] == expected


def test_greedy_episodes_are_those_of_lock_step(tmp_path, agent, tasks):
    played = [
        greedy(build(tmp_path / schedule, agent, tasks, rollout_schedule=schedule), tasks)
        for schedule in ("auto", "lock_step")
    ]
    assert played[0] == played[1]


@pytest.fixture
def agent_with_another_stop_token(agent, tmp_path):
    """The same agent, but its folder says generation ends at the padding token; the context is 256 tokens."""
    folder = tmp_path / "agent"
    shutil.copytree(agent, folder)
    for name, changes in {
        "generation_config.json": {"eos_token_id": 0},
        "config.json": {"eos_token_id": 0},
        "tokenizer_config.json": {"eos_token": "<|endoftext|>"},
    }.items():
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return str(folder)


def test_the_engine_stops_at_the_templates_end_of_turn_and_knows_its_own_context(
    tmp_path, agent_with_another_stop_token, tasks
):
    context = 256
    changes = {"vllm_max_model_length": context, "max_turns": 30, "max_turns_eval": 30, "max_steps": 1}
    trainer = build(tmp_path, agent_with_another_stop_token, tasks, **changes)
    tokenizer = AutoTokenizer.from_pretrained(agent_with_another_stop_token)
    assert tokenizer.eos_token_id == 0 != trainer.chat.end_of_turn_id
    trainer.train()
    # The engine refuses a prompt beyond its context, which an observation after a finished turn may make it.
    played = [*trainer.trajectories, *trainer.evaluate_tasks(tasks.select([0, 1] * 8))]
    assert any(len(episode.turns) > 2 for episode in played)
    assert max(len(episode.ids) for episode in played) > context - 30
    assert all(len(episode.ids) <= context and not episode.failed for episode in played)


@pytest.mark.parametrize("corrected", [True, False])
def test_training_with_and_without_importance_correction(tmp_path, agent, tasks, corrected):
    trainer = build(tmp_path, agent, tasks, vllm_importance_sampling_correction=corrected, max_steps=2)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert all(log["grad_norm"] > 0 for log in trainer.state.log_history[:2])
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    logged = trainer.state.log_history[1]
    assert ("sampling/importance_sampling_ratio/mean" in logged) == corrected
    if corrected:  # engine and trainer agree, so nothing is corrected
        assert logged["sampling/importance_sampling_ratio/min"] == pytest.approx(1, abs=1e-3)
        assert logged["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-3)


def greedy(trainer, tasks):
    trainer.vllm_generation.temperature = 0.0
    return [(e.task, e.ids, e.success) for e in trainer.evaluate_tasks(tasks)]


@pytest.mark.parametrize("rank_stabilized", [False, True])
def test_a_saved_adapter_plays_the_same_when_it_is_loaded_again(tmp_path, agent, tasks, rank_stabilized):
    trainer = build(tmp_path / "a", agent, tasks, peft_config=lora(rank_stabilized), max_steps=2)
    untrained = greedy(trainer, tasks)
    trainer.vllm_generation.temperature = 1.0
    trainer.train()
    trained = greedy(trainer, tasks)
    assert trained != untrained
    trainer.save_model(str(tmp_path / "adapter"))
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert saved["use_rslora"] == rank_stabilized
    # In a new trainer, whose engine starts out from the base model.
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", is_trainable=True)
    again = build(tmp_path / "b", model, tasks)
    assert greedy(again, tasks) == trained
    # And without vLLM.
    policy = TransformersPolicy(model.eval(), again.eos_token_ids, again.processing_class.pad_token_id, 0.0)
    again._sample_turn = policy
    assert [(e.task, e.ids, e.success) for e in again.evaluate_tasks(tasks)] == trained
