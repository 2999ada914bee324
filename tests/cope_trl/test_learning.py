"""A world that must be learned: from at most 30% success to at least 80%, at a fixed seed and number of steps."""

import pytest
import torch

from cope_trl import CoPEConfig, CoPETrainer, load_tasks
from cope_trl.evaluation.metrics import summarize
from cope_trl.local_agent.warm_start import WarmStartArguments, warm_start

STEPS = 70


@pytest.mark.slow
def test_four_tiny_household_tasks_are_learned(tmp_path):
    torch.set_num_threads(2)
    tasks = load_tasks("household", size="tiny", limit=4)
    agent = warm_start(
        WarmStartArguments(
            demonstrations=1200, demonstration_noise=0.5, warm_start_steps=350, hidden_size=64, layers=2
        ),
        tmp_path / "agent",
        environment="household",
        task_ids=tasks["task_id"],
        max_turns=8,
        horizon=2,
        seed=7,
        disable_tqdm=True,
    )
    trainer = CoPETrainer(
        model=str(agent),
        args=CoPEConfig(
            output_dir=str(tmp_path / "run"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            num_generations=8,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            per_device_eval_batch_size=100,
            max_steps=STEPS,
            learning_rate=4e-4,
            warmup_steps=3,
            beta=0.0,
            entropy_coef=0.0,
            max_turns=8,
            max_turns_eval=8,
            max_tokens_per_turn=16,
            max_completion_length=512,
            seed=7,
        ),
        train_dataset=tasks,
    )
    repeated = tasks.select([i % 4 for i in range(100)])
    before = summarize(trainer.evaluate_tasks(repeated))["success"]
    trainer.train()
    after = summarize(trainer.evaluate_tasks(repeated))["success"]
    curve = [entry["episode/success"] for entry in trainer.state.log_history if "episode/success" in entry]
    assert len(curve) == STEPS
    assert before <= 0.30, before
    assert after >= 0.80, (before, after, curve)
    nll = [entry["forecast/nll_k1"] for entry in trainer.state.log_history if "forecast/nll_k1" in entry]
    # Which episodes are forecast changes as harder tasks begin to succeed: hence the best stretch, not the last one.
    best = min(sum(nll[i : i + 5]) / 5 for i in range(len(nll) - 4))
    assert best < 0.8 * sum(nll[:3]) / 3, nll
