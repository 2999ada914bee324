"""Every name of TRL and Transformers that the trainers rely on, pinned: an upgrade that moves one fails here first."""

import dataclasses
import inspect
from types import SimpleNamespace

import pytest
import torch
from support import make_model, make_tokenizer
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import supports_tool_calling
from trl.distributed import DistributedBackend
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import add_fused_lm_head

from cope_trl.engine_trainer import EngineTrainer
from cope_trl.episode_trainer import EpisodeTrainer
from cope_trl.rollout.endpoint import EndpointPolicy


def parameters(function):
    return list(inspect.signature(function).parameters)


def source(function):
    return inspect.getsource(function)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("_generate_and_score_completions", ["self", "inputs"]),
        ("_calculate_rewards", ["self", "inputs", "prompts", "completions", "completion_ids_list"]),
        ("_compute_loss", ["self", "model", "inputs"]),
        ("training_step", ["self", "model", "inputs", "num_items_in_batch"]),
        ("log", ["self", "logs", "start_time"]),
        ("_clip_grad_norm", ["self", "model"]),
        ("_generate", ["self", "prompts"]),
    ],
)
def test_signatures_of_overridden_methods(method, expected):
    assert parameters(getattr(GRPOTrainer, method)) == expected


def test_per_token_log_probs_signature():
    names = parameters(GRPOTrainer._get_per_token_logps_and_entropies)
    assert names[:5] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]
    assert {"compute_entropy", "compute_aux_loss"} <= set(names)


def test_the_rollout_function_gets_prompts_only_and_may_mask_environment_tokens():
    code = source(GRPOTrainer._generate)
    assert "self.rollout_func(prompts, self)" in code
    assert '{"prompt_ids", "completion_ids", "logprobs"}' in code
    assert 'extra_fields.pop("env_mask", None)' in code


def test_the_fields_of_a_rollout_reach_the_reward_functions_but_not_the_loss():
    code = source(GRPOTrainer._generate_and_score_completions)
    assert code.index("inp[key] = values[i]") < code.index("self._calculate_rewards(")
    assert "extra_fields" not in code[code.index("output = {\n") :]


def test_a_row_whose_rewards_are_all_nan_leaves_the_baseline_alone():
    code = source(GRPOTrainer._generate_and_score_completions)
    assert "unscorable_mask = torch.isnan(rewards_per_func).all(dim=1)" in code
    assert "torch.nan_to_num(advantages, nan=0.0)" in code
    assert "gather(rewards_per_func)" in source(GRPOTrainer._calculate_rewards)


def test_a_turn_is_sampled_from_ids_under_a_limit_that_can_be_set():
    assert parameters(GRPOTrainer._generate_single_turn)[:5] == [
        "self",
        "prompt_ids",
        "images",
        "multimodal_fields",
        "num_generations",
    ]
    code = source(GRPOTrainer._generate_single_turn)
    assert "generation_config=self.generation_config" in code
    assert "self.vllm_generation.generate(" in code
    assert '"max_new_tokens": self.max_completion_length' in source(GRPOTrainer.__init__)


def test_what_trls_own_rollout_returns():
    code = source(GRPOTrainer._generate)
    assert (
        "return prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images"
        in code
    )
    loop = source(GRPOTrainer._tool_call_loop)
    assert "self._generate_single_turn(" in loop
    assert "return tool_mask, completions, completion_ids, logprobs, tool_call_count, tool_failure_count" in loop
    assert 'result = {"error": str(e)}' in loop  # how a call that raised is told apart
    assert "completions[idx_with_tool].append(tool_message)" in loop


def test_rewards_are_computed_while_the_batchs_environments_stand():
    code = source(GRPOTrainer._generate_and_score_completions)
    assert code.index("self.environments.append(") < code.index("self._generate(prompts)")
    assert code.index("self._generate(prompts)") < code.index("self._calculate_rewards(inputs, prompts, completions,")
    assert "self.environments" in source(GRPOTrainer._calculate_rewards)


def test_an_importance_ratio_is_in_the_batch():
    code = source(GRPOTrainer._generate_and_score_completions)
    assert 'output["importance_sampling_ratio"] = vllm_importance_sampling_ratio' in code
    assert 'output["tool_mask"] = tool_mask' in code


def test_the_constructor_takes_what_ours_passes_on():
    names = parameters(GRPOTrainer.__init__)
    assert names[1:12] == [
        *("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
        *("reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config"),
    ]
    assert names[12:] == ["tools", "rollout_func", "environment_factory"]
    assert parameters(EpisodeTrainer.__init__)[1 : len(names)] == names[1:]


def test_the_buffer_is_shuffled_and_split_by_row():
    code = source(GRPOTrainer._prepare_inputs)
    assert "shuffle_sequence_dict(generation_batch)" in code
    assert "split_tensor_dict(generation_batch, self.args.steps_per_generation)" in code


def test_which_templates_render_tool_calls():
    assert supports_tool_calling(make_tokenizer("qwen2_5"))
    assert not supports_tool_calling(make_tokenizer("gemma"))


def test_the_loss_is_scaled_for_accumulation_by_the_trainer_itself():
    assert GRPOTrainer.loss_is_scaled_for_ga is True
    assert "self.current_gradient_accumulation_steps" in source(GRPOTrainer._compute_loss)
    assert "self.current_gradient_accumulation_steps = len(batch_samples)" in source(Trainer._run_epoch)


def test_a_step_ends_after_the_optimizer_stepped_and_gradients_were_cleared():
    code = source(Trainer._run_epoch)
    clip, step = code.index("self._clip_grad_norm(model)"), code.index("self.optimizer.step()")
    clear, end = code.index("model.zero_grad()"), code.index("callback_handler.on_step_end(")
    assert clip < step < clear < end


def test_attributes_set_by_the_constructor():
    code = source(GRPOTrainer.__init__)
    for name in (
        "self.eos_token_ids = eos_token_ids",
        "self.generation_kwargs = generation_kwargs",
        "self.generation_config = GenerationConfig(",
        "self.num_generations_eval = ",
        "self.aux_loss_enabled = ",
        "self.mask_truncated_completions = ",
        "self.rollout_func = rollout_func",
        "self.tools = ",
        "self.environments = None",
        "self.chat_template = ",
        "self.chat_template_kwargs = ",
        "self.reward_func_names = ",
        "self.reward_weights = ",
        "self.temperature = ",
        "self.use_vllm = ",
        "self._is_vlm = ",
        "self._tokenizer = ",
        '_metrics = {"train": defaultdict(list), "eval": defaultdict(list)}',
    ):
        assert name in code, name


def test_metrics_are_averaged_and_prefixed_when_logged():
    code = source(GRPOTrainer.log)
    assert "sum(valid) / len(valid)" in code
    assert 'f"eval_{key}": val' in code


def test_configuration_fields_that_change_their_default_exist():
    defaults = {name: field.default for name, field in GRPOConfig.__dataclass_fields__.items()}
    assert defaults["loss_type"] == "dapo"
    assert defaults["use_bias_correction_kl"] is True
    assert defaults["vllm_importance_sampling_correction"] is True
    assert defaults["scale_rewards"] == "group"
    assert {"beta", "entropy_coef", "max_completion_length"} <= set(defaults)


def test_the_fused_head_scores_preshifted_labels_and_can_be_added_twice():
    assert parameters(add_fused_lm_head) == ["model", "temperature", "cast_lm_head_to_fp32", "outputs"]
    model = make_model()
    ids = torch.randint(5, 400, (1, 7))
    logits = model(input_ids=ids).logits
    add_fused_lm_head(model, 0.5, outputs=("log_probs", "entropy"))
    add_fused_lm_head(model, 2.0, outputs=("log_probs", "entropy", "is_top1"))
    labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], dim=1)
    output = model(input_ids=ids, shift_labels=labels, fused_lm_head=True)
    assert output.log_probs.shape == output.is_top1.shape == labels.shape
    expected = torch.log_softmax(logits / 2.0, -1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    assert torch.allclose(output.log_probs[0, :-1], expected, atol=1e-5)
    assert output.log_probs[0, -1] == 0
    assert torch.equal(output.is_top1[0, :-1].bool(), logits[0, :-1].argmax(-1) == ids[0, 1:])
    assert torch.allclose(model(input_ids=ids).logits, logits)


def test_an_attention_of_our_own_gets_the_models_keyword_arguments_and_a_ready_mask():
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    assert callable(AttentionInterface.register)
    assert callable(AttentionMaskInterface.register)
    assert parameters(repeat_kv) == ["hidden_states", "n_rep"]
    assert parameters(sdpa_attention_forward)[:7] == [
        "module",
        "query",
        "key",
        "value",
        "attention_mask",
        "dropout",
        "scaling",
    ]
    model = make_model()
    assert model._supports_attention_backend
    assert model.config._attn_implementation == "sdpa"
    ready = torch.ones((1, 1, 1, 1), dtype=torch.bool)
    embeds = torch.zeros((1, 4, model.config.hidden_size))
    assert masking_utils.create_causal_mask(model.config, embeds, ready, None) is ready


def test_where_a_run_stands_is_counted_in_micro_batches():
    code = source(GRPOTrainer._prepare_inputs)
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in code
    assert "if self._step % generate_every == 0 or self._buffered_inputs is None:" in code
    assert "self._buffered_inputs[self._step % self.args.steps_per_generation]" in code
    assert "self._step += 1" in source(GRPOTrainer.training_step)
    assert "_step" not in source(Trainer._load_rng_state)  # nobody else restores it
    assert "self.state.global_step != self._last_loaded_step" in source(GRPOTrainer._generate)


def test_signatures_of_what_saves_and_resumes():
    assert parameters(GRPOTrainer._save_checkpoint) == ["self", "model", "trial"]
    assert parameters(Trainer._save_rng_state) == ["self", "output_dir"]
    assert parameters(Trainer._load_rng_state) == ["self", "checkpoint"]
    assert parameters(Trainer._init_training_state) == [
        "self",
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ]
    assert parameters(Trainer.train)[:2] == ["self", "resume_from_checkpoint"]


def test_the_last_file_of_a_checkpoint_is_the_trainers_state():
    code = source(Trainer._save_checkpoint)
    assert code.index("self._save_rng_state(output_dir)") < code.index("self.state.save_to_json(")
    assert code.index("self.state.save_to_json(") < code.index("self._push_from_checkpoint(output_dir)")
    assert 'checkpoint_folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"' in code
    assert "self._get_output_dir(trial=trial)" in code


def test_a_resume_loads_the_generators_once_right_before_its_first_step():
    code = source(Trainer._run_epoch)
    assert code.count("self._load_rng_state(resume_from_checkpoint)") == 2  # at an epoch's start, or after skipping
    assert (
        code.index("self.get_batch_samples(epoch_iterator")
        < code.rindex("self._load_rng_state(")
        < code.index("self.training_step(")
    )
    loop = source(Trainer._inner_training_loop)
    assert loop.index("self.get_train_dataloader()") < loop.index("self._init_training_state(")
    assert "epochs_trained = int(self.state.global_step // num_update_steps_per_epoch)" in source(
        Trainer._init_training_state
    )


def test_the_sampler_draws_one_permutation_an_epoch_from_a_generator_of_its_own():
    from trl.trainer.utils import RepeatSampler

    assert not hasattr(RepeatSampler, "set_epoch")  # or a resume would not have to wind it forward
    straight, wound = (RepeatSampler(range(6), mini_repeat_count=1, seed=3) for _ in range(2))
    first, second = list(straight), list(straight)
    assert first != second
    next(iter(wound))
    assert list(wound) == second
    assert "return RepeatSampler(" in source(GRPOTrainer._get_train_sampler)


def test_the_card_that_is_completed(tmp_path):
    from trl.trainer.utils import generate_model_card

    from cope_trl.model_card import NO_BASE_MODEL

    card = generate_model_card(
        base_model=None,
        model_name="agent",
        hub_model_id="user/agent",
        dataset_name=None,
        tags=["trl"],
        wandb_url=None,
        trackio_url=None,
        trainer_name="CoPE",
        trainer_citation="@article{cope}",
        paper_title="CoPE",
        paper_id="2610.20597",
    )
    parts = [NO_BASE_MODEL, "\n## Quick start\n", "\n## Training procedure\n", "\n### Framework versions\n"]
    positions = [card.text.index(part) for part in [*parts, "\n## Citations\n", "@article{cope}"]]
    assert positions == sorted(positions)
    assert set(GRPOTrainer._paper) == {"title", "id", "citation"}
    assert GRPOTrainer._name == "GRPO"
    assert parameters(GRPOTrainer.create_model_card) == ["self", "model_name", "dataset_name", "tags"]


def test_a_push_in_the_background_fails_silently():
    from transformers.utils.hub import PushInProgress

    assert "futures.wait(self.jobs)" in source(PushInProgress.wait_until_done)  # which raises nothing
    assert "run_as_future=True" in source(Trainer._push_from_checkpoint)
    assert parameters(Trainer._push_from_checkpoint) == ["self", "checkpoint_folder"]
    assert 'ignore_patterns=["_*", f"{PREFIX_CHECKPOINT_DIR}-*"]' in source(Trainer.push_to_hub)
    assert "self.push_in_progress.wait_until_done()" in source(Trainer._finish_current_push)
    assert "self._finish_current_push()" in source(Trainer._finalize_training)


def test_an_environments_public_methods_are_tools_and_its_observation_ends_the_prompt():
    code = source(GRPOTrainer.__init__)
    assert "inspect.getmembers(type(instance), predicate=inspect.isfunction)" in code
    assert 'elif not member_name.startswith("_"):' in code
    assert "self.reward_func_names.append(env_type.__name__)" in code
    code = source(GRPOTrainer._generate_and_score_completions)
    assert "observation = environment.reset(**reset_kwargs)" in code
    assert '"content": content + observation' in code


def test_vllm_samples_under_a_limit_and_with_stop_tokens_that_can_be_set():
    code = source(VLLMGeneration.generate)
    assert "max_completion_length = self.max_completion_length" in code
    assert '"max_tokens": max_completion_length' in code
    assert '"generation_kwargs": self.generation_kwargs' in code  # a server
    assert "generation_kwargs.update(self.generation_kwargs)" in code  # colocated
    assert "self.generation_kwargs = generation_kwargs or {}" in source(VLLMGeneration.__init__)
    code = source(GRPOTrainer._generate_single_turn)
    stale, sample = "self.state.global_step != self._last_loaded_step", "self.vllm_generation.generate("
    assert code.index(stale) < code.index(sample)


def test_a_shared_vllm_engine_answers_a_rank_by_the_number_of_its_own_prompts():
    """Why `SharedEngine` exists: by position, and for the limit of the rank that calls."""
    code = source(VLLMGeneration.generate)
    assert "accelerator.process_index * len(prompts)" in code
    assert "tp_slice = slice(local_rank_in_group * orig_size, (local_rank_in_group + 1) * orig_size)" in code
    assert "self.tp_group, _ = torch.distributed.new_subgroups_by_enumeration(" in source(VLLMGeneration._init_vllm)
    assert "self.vllm_generation.llm.llm_engine.model_config.max_model_len" in source(GRPOTrainer._tool_call_loop)


def test_how_sharded_weights_are_gathered_for_sampling():
    turn = source(GRPOTrainer._generate_single_turn)
    assert turn.count("gather_deepspeed3_params=self.args.ds3_gather_for_generation") == 2
    assert turn.count("unwrap_model_for_generation(\n                    self.model_wrapped,") == 2
    assert isinstance(DistributedBackend.is_zero3, property)
    assert "self._dist = DistributedBackend(self.accelerator)" in source(GRPOTrainer.__init__)
    names = inspect.signature(unwrap_model_for_generation).parameters
    assert {"model", "accelerator", "gradient_checkpointing_kwargs"} <= set(names)
    assert names["gather_deepspeed3_params"].default is True


class Sampled(Exception):
    """Carries what an engine was asked to sample with."""


def sampling_of_trl(mode: str, **changes) -> tuple[dict, SimpleNamespace]:
    """What TRL hands to vLLM for one prompt, and the `VLLMGeneration` that does."""

    def ask(*_, **asked):
        raise Sampled(asked)

    settings = {
        "mode": mode,
        "accelerator": SimpleNamespace(is_main_process=True, process_index=0),
        "repetition_penalty": 1.1,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": None,
        "max_completion_length": 9,
        "logprobs": 0,
        "generation_kwargs": {"stop_token_ids": [2], "top_k": 6},
        "structured_outputs_regex": None,
        "tensor_parallel_size": 1,
        "enable_sleep_mode": False,
        "model": torch.nn.Linear(1, 1),
        "llm": SimpleNamespace(generate=ask),
        **changes,
    }
    engine = SimpleNamespace(**settings)
    engine.vllm_client = VLLMClient.__new__(VLLMClient)
    engine.vllm_client.base_url, engine.vllm_client.model = "http://server", "served"
    engine.vllm_client._post = ask
    with pytest.raises(Sampled) as raised:
        VLLMGeneration.generate(engine, [[1, 2]], None, 1)
    (asked,) = raised.value.args
    return asked["json" if mode == "server" else "sampling_params"], engine


def test_colocated_vllm_samples_a_turn_as_trl_would(monkeypatch):
    monkeypatch.setattr(vllm_generation, "SamplingParams", dict, raising=False)
    asked, engine = sampling_of_trl("colocate")
    ours = EngineTrainer._vllm_sampling(SimpleNamespace(vllm_generation=engine))
    assert ours | {"max_tokens": 9} == asked
    assert ours["top_k"] == 6


def test_a_server_is_asked_for_a_turn_as_trl_would():
    asked, engine = sampling_of_trl("server", min_p=0.1)
    assert asked.pop("return_tokens_as_token_ids")  # names the others it could return
    sampling = EngineTrainer._vllm_sampling(SimpleNamespace(vllm_generation=engine))
    policy = EndpointPolicy.__new__(EndpointPolicy)
    policy.base_url, policy.model, policy.context, policy.sampling = "http://server/v1", "served", None, sampling
    bodies = []
    policy._ask = lambda method, path, body: (
        bodies.append(body) or {"choices": [{"index": 0, "token_ids": [3], "logprobs": {"token_logprobs": [-1.0]}}]}
    )
    policy.sample([1, 2], 9, seed=4)
    assert bodies == [asked | {"seed": 4, "prompt": [[1, 2]]}]
    assert 'f"{self.base_url}/v1/completions"' in source(VLLMClient.generate)


def test_weights_are_handed_over_once_a_step_before_a_rollout():
    code = source(GRPOTrainer._generate)
    stale, sync = "self.state.global_step != self._last_loaded_step", "self.vllm_generation.sync_weights()"
    fresh, play = "self._last_loaded_step = self.state.global_step", "self.rollout_func(prompts,"
    places = [code.index(part) for part in (stale, sync, fresh, play)]
    assert places == sorted(places)
    assert parameters(VLLMGeneration.sync_weights) == ["self"]
    sync = source(VLLMGeneration.sync_weights)
    assert "self.llm.reset_prefix_cache()" in sync  # no key of the old weights is used again
    assert "if accelerator.is_main_process:\n                self.vllm_client.update_named_params(" in sync
    assert "self._last_loaded_step = -1" in source(GRPOTrainer.__init__)


def test_how_a_colocated_engine_is_started_and_where_a_server_is():
    code = source(VLLMGeneration._init_vllm)
    assert "self.llm = LLM(" in code
    assert 'logprobs_mode="processed_logprobs"' in code
    assert "prefix_caching" not in code  # on, as is vLLM's default
    assert "base_url = self.server_base_url" in code
    assert 'base_url = f"http://{self.server_host}:{self.server_port}"' in code
    fields = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert {"vllm_tensor_parallel_size", "vllm_enable_sleep_mode", "vllm_structured_outputs_regex"} <= fields


def test_the_loss_reads_only_the_log_probs_of_sampled_tokens():
    """Why the others need no logits: every use is multiplied by the mask, so they need only be finite."""
    code = source(GRPOTrainer._compute_loss)
    assert 'mask = completion_mask if "tool_mask" not in inputs else completion_mask * inputs["tool_mask"]' in code
    assert 'old_per_token_logps = inputs.get("old_per_token_logps")' in code
    assert "log_ratio = per_token_logps - old_per_token_logps" in code
    assert "loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()" in code
    assert code.count("entropies * effective_mask") == 2
    assert "global_masked_mean(entropies)" in code
    for function in (GRPOTrainer.get_off_policy_mask, GRPOTrainer.get_gamma_weights):
        assert "* mask" in source(function)
    assert "entropies[mask.bool()]" in source(GRPOTrainer.get_high_entropy_mask)


def test_attention_that_is_replaced_and_how():
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import masking_utils
    from transformers.integrations.flex_attention import flex_attention_forward
    from transformers.integrations.sdpa_attention import use_gqa_in_sdpa
    from transformers.masking_utils import eager_mask, sdpa_mask
    from transformers.models.qwen2 import modeling_qwen2

    assert parameters(use_gqa_in_sdpa) == ["attention_mask", "key", "value"]
    assert callable(eager_mask)
    assert callable(sdpa_mask)
    names = parameters(modeling_qwen2.eager_attention_forward)
    assert names[:5] == ["module", "query", "key", "value", "attention_mask"]
    assert "ALL_ATTENTION_FUNCTIONS.get_interface(" in source(modeling_qwen2.Qwen2Attention.forward)
    assert "isinstance(attention_mask, (torch.Tensor, BlockMask)) and len(attention_mask.shape) == 4" in source(
        masking_utils._preprocess_mask_arguments
    )
    assert "if isinstance(attention_mask, BlockMask):" in source(flex_attention_forward)
    assert parameters(BlockMask.from_kv_blocks)[:7] == [
        *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
        *("BLOCK_SIZE", "mask_mod", "seq_lengths"),
    ]


def test_what_a_turn_is_sampled_with_and_what_needs_gradients():
    """Where the kept cache takes its settings from, and how the reference model's time is told from the update's."""
    code = source(GRPOTrainer.__init__)
    settings = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    assert all(f'"{name}": ' in code for name in settings)
    assert "generation_kwargs.update(args.generation_kwargs)" in code
    assert "self.generation_config = GenerationConfig(**generation_kwargs, disable_compile=True)" in code
    assert "self._is_vlm = True" in code
    assert "self.use_transformers_continuous_batching" in source(GRPOTrainer._generate_single_turn)
    code = source(GRPOTrainer._generate_and_score_completions)
    scoring = code.index("self._get_per_token_logps_and_entropies(")
    assert code.rindex("torch.no_grad()", 0, scoring) > code.index("self._generate(")
    assert "torch.no_grad" not in source(GRPOTrainer._compute_loss)
    loop = source(Trainer._run_epoch) + source(Trainer._inner_training_loop)
    before, step = "on_pre_optimizer_step(", "self.optimizer.step()"
    assert loop.index(before) < loop.index(step) < loop.index("on_optimizer_step(")
