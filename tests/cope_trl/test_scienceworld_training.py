"""Real ScienceWorld through the trainer: two steps of a tiny model, LoRA on."""

import math
import shutil

import pytest
import torch
from support import make_config, make_model, make_tokenizer

from cope_trl import CoPETrainer, load_tasks
from cope_trl.rollout.generation import Generation


@pytest.mark.jvm
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("java") is None, reason="needs Java")
def test_a_gold_path_is_played_scored_and_forecast(tmp_path):
    pytest.importorskip("scienceworld")
    from env_adapters.scienceworld.env import gold_actions

    tasks = load_tasks("scienceworld", families=["find-living-thing"], limit=1)
    gold = gold_actions(tasks[0]["task_id"])
    tokenizer = make_tokenizer()

    class HalfExpert(CoPETrainer):
        """Every second rollout follows the gold path; the others wait."""

        def _rollout(self, prompts, trainer):
            self.turn = 0
            return super()._rollout(prompts, trainer)

        def _sample_turn(self, prompts, max_new_tokens):
            turn, self.turn = self.turn, self.turn + 1
            says = [gold[turn] if len(prompts) == 1 or i % 2 == 0 else "wait1" for i in range(len(prompts))]
            end = self.chat.end_of_turn_id
            encoded = [tokenizer(f"Action: {text}", add_special_tokens=False)["input_ids"] for text in says]
            return [Generation([*ids, end]) for ids in encoded]

    config = make_config(
        tmp_path,
        per_device_train_batch_size=2,
        num_generations=2,
        max_turns=len(gold),
        max_completion_length=60_000,
        max_tokens_per_turn=300,
        environment_timeout=120.0,
    )
    model = make_model(max_position_embeddings=65_536)
    trainer = HalfExpert(model=model, args=config, train_dataset=tasks, processing_class=tokenizer)
    trainer.train()
    trainer.close()
    won, lost = trainer.trajectories
    assert (won.success, won.score, won.failed) == (True, 100.0, False)
    assert (lost.success, lost.truncated) == (False, True)
    assert [turn.action for turn in won.turns] == gold
    logged = trainer.state.log_history[0]
    assert logged["forecast/windows"] == len(gold)
    assert math.isfinite(logged["loss"])
    assert all(torch.isfinite(p).all() for p in model.parameters())
