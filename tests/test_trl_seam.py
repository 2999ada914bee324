"""Every name of TRL and Transformers that the trainers rely on, pinned: an upgrade that moves one fails here first."""

import inspect

import pytest
import torch
from support import make_model, make_tokenizer
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import supports_tool_calling
from trl.trainer.utils import add_fused_lm_head

from cope_trl.episode_trainer import EpisodeTrainer


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
