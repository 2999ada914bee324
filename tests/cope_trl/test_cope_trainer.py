"""The trainer's loss and gradients against an independent Eq. 5, and what must not change them."""

import math

import pytest
import torch
from support import BACK, GO, MIXED_SCRIPTS, TALK, make_config, make_model, make_tokenizer, scripted_trainer

from cope_trl.forecast.attention import BRANCHED
from cope_trl.forecast.packing import ForecastRows, pack_rows
from cope_trl.forecast.windows import forecast_windows

ENGINES = ["shared_prefix", "separate"]


def reference_loss(model, trainer, trajectories, horizon=2, reduction="mean", group=4):
    """Eq. 5 by brute force: one forward a window, plain logits, no padding, nothing shared."""
    total = 0.0
    groups = [trajectories[i : i + group] for i in range(0, len(trajectories), group)]
    for members in groups:
        successes = [t for t in members if t.success]
        for trajectory in successes:
            per_window = []
            for window in forecast_windows(trajectory, horizon):
                branch = trainer.chat.branch(window.targets, "list")
                cut = trainer.chat.history_cut(window.history_end)
                ids = torch.tensor([[*trajectory.ids[:cut], *branch.ids]])
                log_probs = torch.log_softmax(model(input_ids=ids).logits[0, :-1].double(), dim=-1)
                chosen = log_probs.gather(1, ids[0, 1:, None])[:, 0]
                mask = torch.tensor([0] * cut + list(branch.loss_mask), dtype=torch.bool)[1:]
                per_window.append(-chosen[mask].mean() if reduction == "mean" else -chosen[mask].sum())
            windows = torch.stack(per_window)
            value = windows.mean() if reduction == "mean" else windows.sum()
            total = total + value / max(1, len(successes))
    return total / len(groups)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12))


def forecast_only(trainer, scale=1.0):
    """Loss and gradients of λ·L_AF alone: advantages are zeroed, λ is 1."""
    buffer = trainer._generate_and_score_completions([dict(row) for row in trainer.rows_to_play])
    buffer["advantages"] = torch.zeros_like(buffer["advantages"])
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, buffer)
    loss.backward()
    return loss.detach(), gradients(trainer.model), buffer


def build(tmp_path, model=None, scripts=MIXED_SCRIPTS, goals=(2, 3), tokenizer=None, **changes):
    changes = {"per_device_train_batch_size": 8, "forecast_coef": 1.0, "gradient_checkpointing": False, **changes}
    model = model if model is not None else make_model()
    trainer = scripted_trainer(model, make_config(tmp_path, **changes), goals, scripts, tokenizer)
    trainer.model.train()
    trainer.rows_to_play = [row for row in trainer.train_dataset for _ in range(4)]
    return trainer


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_both_engines_equal_brute_force(tmp_path, architecture):
    """Ragged windows, left padding, an episode cut by the token limit, a group without a success."""
    results = {}
    for engine in ENGINES:
        trainer = build(tmp_path, make_model(architecture), forecast_engine=engine, max_completion_length=230)
        loss, grads, _ = forecast_only(trainer)
        results[engine] = (loss, grads)
    played = trainer.trajectories
    assert any(t.truncated and t.turns for t in played)
    assert [t.success for t in played] == [True, True, False, True, False, False, False, False]
    model = make_model(architecture)
    expected = reference_loss(model, trainer, played)
    expected.backward()
    reference = gradients(model)
    for engine, (loss, grads) in results.items():
        assert relative(loss, expected.detach()) < 1e-5, engine
        assert set(grads) == set(reference)
        for name, grad in grads.items():
            assert relative(grad, reference[name]) < 1e-5, (engine, name)


@pytest.mark.parametrize(
    ("attention", "engine", "expected"),
    [
        ("sdpa", "shared_prefix", BRANCHED["sdpa"]),
        ("sdpa", "separate", "sdpa"),
        ("eager", "shared_prefix", BRANCHED["eager"]),
        ("eager", "separate", "eager"),
    ],
)
def test_the_shared_prefix_replaces_the_attention(tmp_path, attention, engine, expected):
    trainer = build(tmp_path, make_model(attn_implementation=attention), forecast_engine=engine)
    assert trainer.model.config._attn_implementation == expected
    again = build(tmp_path, trainer.model, forecast_engine="auto")
    assert again.forecast_engine == "shared_prefix"


@pytest.mark.parametrize("engine", ENGINES)
def test_left_padding_does_not_matter(tmp_path, engine):
    """A long first observation pads the other group's prompts on the left."""
    scripts = [[GO]] * 8
    trainer = build(tmp_path, scripts=scripts, goals=(1, 2000000), forecast_engine=engine, max_completion_length=80)
    loss, _, buffer = forecast_only(trainer)
    assert buffer["prompt_mask"].min() == 0
    expected = reference_loss(make_model(), trainer, trainer.trajectories)
    assert relative(loss, expected.detach()) < 1e-5


@pytest.mark.parametrize("engine", ENGINES)
def test_sum_reduction_is_eq_5_to_the_letter(tmp_path, engine):
    trainer = build(tmp_path, forecast_engine=engine, forecast_reduction="sum")
    loss, _, _ = forecast_only(trainer)
    expected = reference_loss(make_model(), trainer, trainer.trajectories, reduction="sum")
    assert relative(loss, expected.detach()) < 1e-5


@pytest.mark.parametrize("engine", ENGINES)
def test_forecasts_are_scored_at_temperature_one(tmp_path, engine):
    losses = []
    for temperature in (1.0, 0.6):
        trainer = build(tmp_path, forecast_engine=engine, temperature=temperature)
        losses.append(forecast_only(trainer)[:2])
    assert relative(losses[1][0], losses[0][0]) < 1e-6
    for name, grad in losses[1][1].items():
        assert relative(grad, losses[0][1][name]) < 1e-5, name


@pytest.mark.parametrize("engine", ENGINES)
def test_eager_attention_and_gradient_checkpointing_change_nothing(tmp_path, engine):
    base = forecast_only(build(tmp_path, forecast_engine=engine))
    eager = forecast_only(build(tmp_path, make_model(attn_implementation="eager"), forecast_engine=engine))
    assert relative(eager[0], base[0]) < 1e-5
    trainer = build(tmp_path, forecast_engine=engine, gradient_checkpointing=True)
    trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = forecast_only(trainer)
    assert relative(checkpointed[0], base[0]) < 1e-6
    for name, grad in checkpointed[1].items():
        assert relative(grad, base[1][name]) < 1e-5, name


def one_update(tmp_path, micro_batch, accumulation, engine="shared_prefix", **changes):
    trainer = build(
        tmp_path,
        forecast_engine=engine,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        optim="sgd",
        max_grad_norm=0.0,
        weight_decay=0.0,
        learning_rate=0.05,
        **changes,
    )
    trainer.train()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_update_does_not_depend_on_the_micro_batch(tmp_path, engine):
    start = {name: p.detach().clone() for name, p in make_model().named_parameters()}
    whole = one_update(tmp_path, 8, 1, engine)
    for micro_batch, accumulation in ((4, 2), (2, 4), (1, 8)):
        parts = one_update(tmp_path, micro_batch, accumulation, engine)
        for name, value in parts.items():
            assert relative(value - start[name], whole[name] - start[name]) < 2e-4, (micro_batch, name)


def test_separate_update_takes_a_step_of_its_own(tmp_path):
    """With SGD, a policy step of zero and then a forecast step equal the joint step on the forecast alone."""
    joint = one_update(tmp_path, 4, 2, scripts=[[GO]] * 8)  # all succeed: the policy's gradient is zero
    separate = one_update(tmp_path, 4, 2, scripts=[[GO]] * 8, forecast_update="separate")
    for name, value in separate.items():
        assert relative(value, joint[name]) < 1e-6, name
    slower = one_update(tmp_path, 4, 2, scripts=[[GO]] * 8, forecast_update="separate", forecast_lr_scale=0.5)
    start = {name: p.detach() for name, p in make_model().named_parameters()}
    for name, value in slower.items():
        assert relative(2 * (value - start[name]), joint[name] - start[name]) < 1e-3, name
    none = one_update(tmp_path, 4, 2, scripts=[[BACK]] * 8, forecast_update="separate")
    for name, value in none.items():
        assert torch.equal(value, start[name]), name


def test_separate_update_makes_no_step_without_a_success(tmp_path, monkeypatch):
    """Adam would move the weights by its momentum, whatever the gradient."""
    trainer = build(tmp_path, scripts=[[GO]] * 8, forecast_update="separate")
    trainer.train()
    trainer._step_inputs = [({}, pack_rows([[], []], [0.0, 0.0], "mean"))]

    def step(*_args, **_kwargs):
        raise AssertionError("the optimizer was called")

    monkeypatch.setattr(trainer.optimizer, "step", step)
    trainer._forecast_step()
    assert trainer._step_inputs == []


@pytest.mark.parametrize("engine", ENGINES)
def test_no_gradient_from_what_is_not_a_target(tmp_path, engine):
    """Labels are the target tokens alone: changing any weightless branch token's label changes nothing."""
    trainer = build(tmp_path, forecast_engine=engine)
    _, _, buffer = forecast_only(trainer)
    targets = buffer["forecast_weight"] > 0
    expected = sum(
        sum(sum(trainer.chat.branch(w.targets, "list").loss_mask) for w in forecast_windows(t, 2))
        for t in trainer.trajectories
        if t.success
    )
    assert int(targets.sum()) == expected
    ids = buffer["forecast_ids"][targets]
    text = trainer.chat.tokenizer.decode(ids)
    assert "Plan" not in text
    assert set(text.replace("<|im_end|>", "\n").split()) == {"go", "back"}


def test_a_branch_never_feeds_into_the_policy_loss(tmp_path):
    """Log-probabilities of the completion are the same with and without branches in the row."""
    plain = build(tmp_path, forecast_coef=0.0)
    with_branches = build(tmp_path, forecast_engine="shared_prefix")
    losses = []
    for trainer in (plain, with_branches):
        buffer = trainer._generate_and_score_completions([dict(row) for row in trainer.rows_to_play])
        trainer.current_gradient_accumulation_steps = 1
        seen = {}
        original = trainer._get_per_token_logps_and_entropies

        def spy(*args, original=original, seen=seen, **kwargs):
            seen["out"] = original(*args, **kwargs)
            return seen["out"]

        trainer._get_per_token_logps_and_entropies = spy
        trainer._compute_loss(trainer.model, buffer)
        losses.append(seen["out"])
    mask = (buffer["completion_mask"] * buffer["tool_mask"]).bool()  # what the policy's loss counts
    for a, b in zip(losses[0][:2], losses[1][:2], strict=True):
        assert torch.allclose(a[mask], b[mask], atol=1e-5)


@pytest.mark.parametrize("scripts", [MIXED_SCRIPTS, [[BACK], [BACK, BACK, TALK]]])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_policys_gradient_is_plain_grpos(tmp_path, attention, scripts):
    """Packed with branches that weigh nothing, against a padded forward; also where nothing succeeded."""
    results = []
    for coef in (0.0, 1e-20):
        trainer = build(tmp_path, make_model(attn_implementation=attention), scripts, forecast_coef=coef, beta=0.0)
        buffer = trainer._generate_and_score_completions([dict(row) for row in trainer.rows_to_play])
        # Rewards are equal where nothing succeeds: advantages of their own show what flows.
        buffer["advantages"] = torch.linspace(-1, 1, len(buffer["advantages"]))
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer._compute_loss(trainer.model, buffer)
        loss.backward()
        results.append((loss.detach(), gradients(trainer.model)))
    assert relative(results[1][0], results[0][0]) < 1e-5
    for name, grad in results[1][1].items():
        assert relative(grad, results[0][1][name]) < 1e-5, name


def spied_forwards(trainer):
    """Shape of the ids and number of the labels of each forward, as they are made."""
    seen = []

    def note(module, args, kwargs):
        labels = kwargs.get("shift_labels", kwargs.get("labels"))
        seen.append((tuple(kwargs["input_ids"].shape), labels.numel(), "shift_labels" in kwargs))

    trainer.model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


@pytest.mark.parametrize("scripts", [MIXED_SCRIPTS, [[BACK]] * 8])
@pytest.mark.parametrize("update", ["joint", "separate"])
def test_one_forward_without_padding_scores_what_is_trained(tmp_path, update, scripts):
    """A micro-batch of eight ragged rows, most of them without branches, or all."""
    trainer = build(tmp_path, scripts=scripts, forecast_update=update)
    buffer = trainer._generate_and_score_completions([dict(row) for row in trainer.rows_to_play])
    played = trainer.trajectories
    trainer.current_gradient_accumulation_steps = 1
    seen = spied_forwards(trainer)
    branches, targets = int((buffer["forecast_window"] >= 0).sum()), int((buffer["forecast_weight"] > 0).sum())
    sampled = int((buffer["completion_mask"] * buffer["tool_mask"]).sum())
    if update == "joint":
        trainer._compute_loss(trainer.model, buffer)
        assert seen == [((1, sum(len(t.ids) for t in played) + branches), sampled + targets, True)]
    else:
        trainer._score_alone(trainer.model, buffer, ForecastRows.from_buffer(buffer))
        won = [t for t in played if t.success] or played[:1]  # another rank may need the forward
        assert seen == [((1, sum(len(t.ids) for t in won) + branches), targets, True)]


def test_the_separate_engine_forwards_little_padding_and_scores_targets_only(tmp_path):
    trainer = build(tmp_path, forecast_engine="separate", forecast_batch_size=2)
    buffer = trainer._generate_and_score_completions([dict(row) for row in trainer.rows_to_play])
    trainer.current_gradient_accumulation_steps = 1
    seen = spied_forwards(trainer)
    trainer._compute_loss(trainer.model, buffer)
    policy, *forecasts = seen
    assert not policy[2]  # TRL's own forward
    means = trainer._means["train"].flush()
    forwarded = sum(rows * columns for (rows, columns), _, _ in forecasts)
    assert means["tokens/forecast"] <= forwarded <= 1.1 * means["tokens/forecast"]
    assert sum(labels for _, labels, _ in forecasts) == int((buffer["forecast_weight"] > 0).sum())


def test_old_log_probs_of_tokens_that_do_not_count_cannot_overflow(tmp_path):
    """An environment's token may be as unlikely as it likes: its ratio is 1, not an overflow times 0."""
    trainer = build(tmp_path)
    buffer = trainer._generate_and_score_completions([dict(row) for row in trainer.rows_to_play])
    trainer.current_gradient_accumulation_steps = 1
    expected = trainer._compute_loss(trainer.model, buffer).detach()
    counted = (buffer["completion_mask"] * buffer["tool_mask"]).bool()
    assert not counted.all()
    plain = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([buffer["prompt_ids"], buffer["completion_ids"]], dim=1),
        torch.cat([buffer["prompt_mask"], buffer["completion_mask"]], dim=1),
        buffer["completion_ids"].size(1),
    )[0].detach()
    buffer["old_per_token_logps"] = torch.where(counted, plain, -200.0)
    assert relative(trainer._compute_loss(trainer.model, buffer).detach(), expected) < 1e-5


def test_trained_ids_are_the_sampled_ids(tmp_path):
    trainer = build(tmp_path)
    buffer = trainer._generate_and_score_completions([dict(row) for row in trainer.rows_to_play])
    tokenizer, end = trainer.chat.tokenizer, trainer.chat.end_of_turn_id
    for row, trajectory in enumerate(trainer.trajectories):
        mask = (buffer["tool_mask"] * buffer["completion_mask"])[row].bool()
        script = MIXED_SCRIPTS[row]
        sampled = []
        for turn in range(len(trajectory.turns)):
            reply = script[min(turn, len(script) - 1)]
            sampled += [*tokenizer(reply, add_special_tokens=False)["input_ids"], end]
        assert buffer["completion_ids"][row][mask].tolist() == sampled


@pytest.mark.parametrize("gate", ["success", "mixed", "all"])
@pytest.mark.parametrize("script", [[GO], [BACK]])
def test_groups_of_one_outcome_stay_finite(tmp_path, gate, script):
    trainer = build(tmp_path, scripts=[script], forecast_gate=gate, max_steps=1)
    trainer.train()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    logged = trainer.state.log_history[0]
    assert math.isfinite(logged["loss"])
    forecasts = (gate == "success" and script == [GO]) or gate == "all"
    assert (logged["forecast/windows"] > 0) == forecasts
    assert (logged["forecast/loss"] > 0) == forecasts


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("micro_batch", "accumulation"), [(8, 1), (4, 2)])
def test_metrics_of_a_step(tmp_path, engine, micro_batch, accumulation):
    trainer = build(
        tmp_path,
        forecast_engine=engine,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        forecast_coef=0.01,
        forecast_grad_norm_steps=1,
        learning_rate=1e-3,
    )
    trainer.train()
    logged = trainer.state.log_history[0]
    played = trainer.trajectories
    assert logged["episode/success"] == pytest.approx(3 / 8)
    assert logged["episode/turns"] == pytest.approx(sum(len(t.turns) for t in played) / 8)
    assert logged["episode/truncated"] == pytest.approx(5 / 8)
    assert logged["episode/failed"] == 0
    turns = [turn for t in played for turn in t.turns]
    assert logged["episode/invalid_action_rate"] == pytest.approx(sum(t.invalid for t in turns) / len(turns))
    assert logged["forecast/group_success"] == pytest.approx(1 / 2)
    assert logged["forecast/windows"] == sum(len(forecast_windows(t, 2)) for t in played if t.success)
    assert logged["tokens/policy"] == sum(len(t.ids) for t in played)
    windows = [window for t in played if t.success for window in forecast_windows(t, 2)]
    branches = sum(len(trainer.chat.branch(window.targets, "list").ids) for window in windows)
    histories = sum(trainer.chat.history_cut(window.history_end) for window in windows)
    shared = engine == "shared_prefix"
    assert logged["tokens/forecast"] == branches + (0 if shared else histories)
    assert logged.get("tokens/saved", 0) == (histories if shared else 0)
    assert logged["forecast/grad_ratio"] > 0
    assert 0 <= logged["forecast/accuracy_k1"] <= 1
    expected = reference_loss(make_model(), trainer, played)
    assert logged["forecast/loss"] == pytest.approx(float(expected.detach()), rel=1e-4)
    for name in ("time/rollout", "time/policy", "time/forecast"):
        assert logged[name] > 0


def test_gradient_ratio_is_the_ratio_of_separate_backwards(tmp_path):
    trainer = build(tmp_path, forecast_coef=0.5, forecast_grad_norm_steps=1, max_grad_norm=1e9, optim="sgd")
    trainer.train()
    ratio = trainer.state.log_history[0]["forecast/grad_ratio"]
    norms = []
    for coef, zero in ((0.5, True), (0.0, False)):
        other = build(tmp_path, forecast_coef=coef)
        buffer = other._generate_and_score_completions([dict(row) for row in other.rows_to_play])
        if zero:
            buffer["advantages"] = torch.zeros_like(buffer["advantages"])
        other.current_gradient_accumulation_steps = 1
        other._compute_loss(other.model, buffer).backward()
        norms.append(math.sqrt(sum(float(g.square().sum()) for g in gradients(other.model).values())))
    assert ratio == pytest.approx(norms[0] / norms[1], rel=1e-3)


def test_merged_layout_trains_too(tmp_path):
    tokenizer = make_tokenizer("gemma")
    trainer = build(tmp_path, tokenizer=tokenizer, forecast_engine="shared_prefix")
    loss, _, _ = forecast_only(trainer)
    expected = reference_loss(make_model(), trainer, trainer.trajectories)
    assert relative(loss, expected.detach()) < 1e-5
