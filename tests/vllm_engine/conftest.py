"""vLLM for real, on its CPU backend: one warm-started agent, and engines that live as long as the session.

`make test-vllm` runs these tests in a virtual environment of their own; elsewhere they are skipped. Not changed from
how TRL starts an engine: everything but the following three.

- float32 instead of bfloat16, so that the engine's log-probabilities must equal the trainer's to five digits.
- No compilation, which takes a minute.
- Linear layers by plain torch. On processors for which vLLM packs a linear layer's weights anew, its CPU backend then
  drops the originals, so that no weight can be loaded a second time. GPU backends pack nothing.
"""

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as in TRL's colocated mode: in this process

import pytest

from cope_trl.data.tasks import load_tasks
from cope_trl.local_agent.warm_start import WarmStartArguments, warm_start


@pytest.fixture(scope="session")
def tasks():
    """Two household tasks of the smallest size."""
    return load_tasks("household", "train", size="tiny", limit=2)


@pytest.fixture(scope="session")
def agent(tasks, tmp_path_factory):
    """Folder of an agent with heads 32 wide (vLLM's smallest on CPU) that has seen the two tasks solved."""
    sizes = WarmStartArguments(
        demonstrations=160, demonstration_noise=0.3, warm_start_steps=80, hidden_size=64, layers=2
    )
    return str(
        warm_start(
            sizes,
            tmp_path_factory.mktemp("agent"),
            environment="household",
            task_ids=tasks["task_id"],
            max_turns=8,
            horizon=2,
            seed=1,
            disable_tqdm=True,
        )
    )


@pytest.fixture(scope="session", autouse=True)
def engines():
    """TRL's engines, each started once and then used again: what it holds is overwritten before the first sample.

    So a trainer whose weights did not reach the engine would sample from those of the test before.
    """
    import trl.generation.vllm_generation as seam
    import vllm._custom_ops as operators
    import vllm.model_executor.layers.utils as layers

    started, start = {}, seam.LLM

    def engine(**asked):
        key = (asked["model"], asked["max_model_len"], asked["max_num_seqs"])
        if key not in started:
            started[key] = start(**asked, dtype="float32", enforce_eager=True)
        return started[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "_supports_onednn", False)
        patch.setattr(layers, "check_cpu_sgl_kernel", lambda *_: False)
        patch.setattr(seam, "LLM", engine)
        yield started
