"""One process of a launched run: trains the cases named on the command line and leaves what came of each in a file.

`conftest.py` starts it with the engines' own launcher:  worker.py FOLDER ENGINE CASE...
"""

import os
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from datasets import Dataset
from support import BACK, GO, MIXED_SCRIPTS, count_rows, make_config, make_model, make_tokenizer, scripted_trainer
from transformers import TrainerCallback

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
GOALS = (2, 3)
# A plain step: what is compared is the gradient. The length of a turn never depends on what is sampled.
PLAIN = {"optim": "sgd", "max_grad_norm": 1e9, "weight_decay": 0.0, "learning_rate": 0.05, "forecast_coef": 0.5}
ADAPTER = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
WON, EARLY_AND_LATE = [[GO]], [[GO]] * 4 + [[BACK]] * 4


def prepare_engine(name):
    """What an engine needs on a machine without GPUs."""
    if name == "fsdp2":
        # accelerate shards on GPUs alone. Told that the two processes are devices, it does on gloo what it does there.
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    if name.startswith("zero"):
        import deepspeed

        # Its reduction through shared memory takes minutes to compile; gloo reduces the same numbers.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def settings(engine, folder, **changes):
    cpu_engine = engine in ("one", "ddp")
    return make_config(
        folder,
        **{
            **PLAIN,
            "per_device_train_batch_size": 4 // WORLD,
            "gradient_accumulation_steps": 2,
            "use_cpu": cpu_engine,
            "ddp_backend": None if engine == "one" else "gloo",
            "gradient_checkpointing": False,
            **changes,
        },
    )


def whole_state(trainer):
    """The weights on every rank, gathered from wherever they are."""
    names = dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
    with trainer._dist.gather_params(list(names.values())):
        return {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for name, p in names.items()
        }


class CountSteps(TrainerCallback):
    """Optimizer steps that were really made."""

    made = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.made += 1


def trained(engine, folder, scripts=MIXED_SCRIPTS, model=None, resume=None, peft_config=None, **changes):
    model = make_model() if model is None else model
    config = settings(engine, folder, **changes)
    trainer = scripted_trainer(model, config, GOALS, scripts, peft_config=peft_config)
    before, steps = whole_state(trainer), CountSteps()
    trainer.add_callback(steps)
    trainer.train(resume_from_checkpoint=resume)
    kind = str(trainer.accelerator.distributed_type).rsplit(".", 1)[-1]
    result = {
        "kind": kind,
        "processes": trainer.accelerator.num_processes,
        "stage": trainer._dist.zero_stage,
        "forecast_engine": trainer.forecast_engine,
        "log": trainer.state.log_history[0],
        "last": trainer.state.log_history[-2],
        "steps": steps.made,
        "before": before,
        "state": whole_state(trainer),
    }
    return trainer, result


def adapter(engine, folder, **changes):
    """Forecasting alone trains an adapter: every episode succeeds, so the policy's own gradient is 0."""
    from peft import LoraConfig

    torch.manual_seed(0)
    config = LoraConfig(**ADAPTER, **changes)
    trainer, result = trained(engine, folder, WON, peft_config=config, learning_rate=1.0)
    trainer.save_model(str(folder / "adapter"))
    ids = torch.arange(5, 45)[None]
    trainer.model_wrapped.eval()
    with torch.no_grad():
        result["logits"] = trainer.model_wrapped(input_ids=ids).logits.float()
    return result


def reference(engine, folder):
    """An adapter that is no zero at the start is pulled towards the base model, and only by the KL term."""
    from peft import LoraConfig

    torch.manual_seed(0)
    config = LoraConfig(**ADAPTER, init_lora_weights=False)
    return trained(engine, folder, WON, peft_config=config, beta=0.5, forecast_coef=0.0)[1]


def resumed(engine, folder):
    """Four steps in one go, and two steps, a checkpoint, and two more."""
    changes = {"optim": "adamw_torch", "learning_rate": 1e-3, "gradient_accumulation_steps": 1, "max_steps": 4}
    changes |= {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}
    goes = trained(engine, folder / "run", **changes)[1]
    again = trained(engine, folder / "run", resume=str(folder / "run" / "checkpoint-2"), **changes)[1]
    return {**goes, "resumed": again}


@contextmanager
def counted_gathers(counts):
    """Count the times that DeepSpeed collects many parameters at once, and single modules one after the other."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    enter, fetch = GatheredParameters.__enter__, Coordinator.fetch_sub_module

    def counting_enter(self):
        counts["whole"] += self.enabled and len(self.params) > 5
        return enter(self)

    def counting_fetch(self, *args, **kwargs):
        counts["modules"] += 1
        return fetch(self, *args, **kwargs)

    GatheredParameters.__enter__, Coordinator.fetch_sub_module = counting_enter, counting_fetch
    try:
        yield
    finally:
        GatheredParameters.__enter__, Coordinator.fetch_sub_module = enter, fetch


def sampling(tokenizer, turns, **changes):
    """Settings under which every turn samples 12 ids, always the same ones, and ends properly."""
    forced = {"forced_eos_token_id": tokenizer.eos_token_id}
    return {"max_turns": turns, "max_tokens_per_turn": 12, "top_k": 1, "generation_kwargs": forced, **changes}


def sampled(engine, folder, turns=30, gather=True):
    """Real sampling at every turn, 1 turn on one rank against many on the other; the scripts decide what is played."""
    tokenizer = make_tokenizer()
    changes = sampling(tokenizer, turns, ds3_gather_for_generation=gather, max_completion_length=2048)
    trainer = scripted_trainer(make_model(), settings(engine, folder, **changes), (1, 2), EARLY_AND_LATE, tokenizer)
    said, counts = [], {"whole": 0, "modules": 0}
    scripted, generate = type(trainer)._sample_turn, type(trainer)._generate

    def sample_turn(self, prompts, max_new_tokens):
        real = super(type(trainer), self)._sample_turn(prompts, max_new_tokens)
        said.append([generation.ids for generation in real])
        return scripted(self, prompts, max_new_tokens)

    def counted_generate(self, prompts):
        with counted_gathers(counts) if engine == "zero3" else nullcontext():
            return generate(self, prompts)

    type(trainer)._sample_turn, type(trainer)._generate = sample_turn, counted_generate
    trainer.train()
    gathers = trainer.args.ds3_gather_for_generation
    log = trainer.state.log_history[0]
    return {"said": said, "counts": counts, "gathers": gathers, "log": log, "state": whole_state(trainer)}


def from_disk(engine, folder):
    """The command line's way: a model by its path, a reference model, evaluations around the training."""
    tokenizer = make_tokenizer()
    config = settings(engine, folder, beta=0.1, max_steps=2, **sampling(tokenizer, 3), max_turns_eval=3)
    trainer = scripted_trainer(str(folder.parent / "model"), config, GOALS, MIXED_SCRIPTS, tokenizer)
    scripted = type(trainer)._sample_turn
    tasks, counts = Dataset.from_list(count_rows(5, 6, 7)), {"whole": 0, "modules": 0}

    def evaluate():
        del type(trainer)._sample_turn
        with counted_gathers(counts) if engine == "zero3" else nullcontext():
            played = trainer.evaluate_tasks(tasks)
        type(trainer)._sample_turn = scripted
        return [trajectory.completion_ids for trajectory in played]

    before = evaluate()
    trainer.train()
    after = evaluate()
    log = trainer.state.log_history[1]
    return {"before": before, "after": after, "counts": counts, "log": log, "state": whole_state(trainer)}


CASES = {
    "shared_prefix": lambda engine, folder: trained(engine, folder)[1],
    "separate": lambda engine, folder: trained(engine, folder, forecast_engine="separate", forecast_batch_size=3)[1],
    "lora": adapter,
    "rslora": lambda engine, folder: adapter(engine, folder, use_rslora=True),
    "reference": reference,
    "resumed": resumed,
    "sampled": sampled,
    "from_disk": from_disk,
    "sampled_in_shards": lambda engine, folder: sampled(engine, folder, turns=4, gather=False),
}


def main(folder, engine, names):
    torch.set_num_threads(1)
    prepare_engine(engine)
    for name in names:
        result = CASES[name](engine, Path(folder) / name)
        if int(os.environ.get("RANK", "0")) == 0:
            torch.save(result, f"{folder}/{name}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
