"""The gradient ratio against two backward passes of their own."""

import pytest
import torch

from cope_trl.forecast.gradients import GradientRatio


def make_net(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()


def losses(net, batch):
    torch.manual_seed(batch)
    policy, forecast = net(torch.randn(4, 5).double()), net(torch.randn(6, 5).double())
    return policy.square().mean(), 0.1 * forecast.abs().sum()


def norm(net):
    return sum(p.grad.square().sum() for p in net.parameters() if p.grad is not None).sqrt()


def expected_ratio(batches):
    norms = []
    for which in (1, 0):
        net = make_net()
        sum(losses(net, batch)[which] for batch in batches).backward()
        norms.append(float(norm(net)))
    return norms[0] / norms[1]


@pytest.mark.parametrize("batches", [[1], [1, 2, 3]])
def test_ratio_of_two_separate_backwards(batches):
    net, ratio = make_net(), GradientRatio()
    assert not ratio.pending
    for batch in batches:
        policy, forecast = losses(net, batch)
        ratio.add(forecast, net.parameters())
        (policy + forecast).backward()  # the graph is still there
    assert ratio.pending
    assert ratio.measure(net.parameters()) == pytest.approx(expected_ratio(batches), rel=1e-6)
    assert not ratio.pending


def test_the_real_gradient_is_untouched():
    net, plain = make_net(), make_net()
    policy, forecast = losses(net, 1)
    GradientRatio().add(forecast, net.parameters())
    assert all(p.grad is None for p in net.parameters())
    (policy + forecast).backward()
    sum(losses(plain, 1)).backward()
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_measurement_starts_afresh():
    ratio = GradientRatio()
    for batch in (1, 2):
        net = make_net()
        policy, forecast = losses(net, batch)
        ratio.add(forecast, net.parameters())
        (policy + forecast).backward()
        assert ratio.measure(net.parameters()) == pytest.approx(expected_ratio([batch]), rel=1e-6)


def test_parameters_that_are_frozen_or_unused_do_not_count():
    net = make_net()
    net[0].weight.requires_grad_(False)
    extra = torch.nn.Parameter(torch.ones(2).double())  # only the policy uses it
    other = torch.nn.Parameter(torch.ones(2).double())  # nobody uses it
    policy, forecast = losses(net, 1)
    parameters = [*net.parameters(), extra, other]
    ratio = GradientRatio()
    ratio.add(forecast, parameters)
    (policy + forecast + 3 * extra.sum()).backward()
    alone = make_net()
    alone[0].weight.requires_grad_(False)
    losses(alone, 1)[1].backward()
    expected = float(norm(alone))
    alone.zero_grad()
    losses(alone, 1)[0].backward()
    policy_norm = (float(norm(alone)) ** 2 + 2 * 9) ** 0.5
    assert ratio.measure(parameters) == pytest.approx(expected / policy_norm, rel=1e-6)


def test_without_a_policy_gradient_there_is_no_ratio():
    net, ratio = make_net(), GradientRatio()
    _, forecast = losses(net, 1)
    ratio.add(forecast, net.parameters())
    forecast.backward()
    assert ratio.measure(net.parameters()) is None
    assert ratio.measure([]) is None


def test_ranks_average_their_parts_and_all_of_them_take_part():
    """Two ranks, the second without a forecast: the averaged gradients give the ratio."""
    nets = [make_net(), make_net()]
    ratios = [GradientRatio(), GradientRatio()]
    policy, forecast = losses(nets[0], 1)
    ratios[0].add(forecast, nets[0].parameters())
    (policy + forecast).backward()
    losses(nets[1], 2)[0].backward()
    for a, b in zip(*(net.parameters() for net in nets), strict=True):  # what data parallelism does
        a.grad = b.grad = (a.grad + b.grad) / 2
    seen = [[], []]

    def recording(index):
        return lambda tensor: seen[index].append(tensor.clone()) or tensor

    for index in (0, 1):
        ratios[index].measure(nets[index].parameters(), recording(index))
    assert [t.shape for t in seen[0]] == [t.shape for t in seen[1]]  # equally many collective calls
    assert all((t == 0).all() for t in seen[1])

    # The sum of the two divided by two, as each rank would see it.
    ratio = GradientRatio()
    policy, forecast = losses(make := make_net(), 1)
    ratio.add(forecast, make.parameters())
    for parameter, averaged in zip(make.parameters(), nets[0].parameters(), strict=True):
        parameter.grad = averaged.grad
    measured = ratio.measure(make.parameters(), lambda tensor: tensor / 2)
    parts = [make_net(), make_net()]
    (losses(parts[0], 1)[1] / 2).backward()
    ((losses(parts[1], 1)[0] + losses(parts[1], 2)[0]) / 2).backward()
    assert measured == pytest.approx(float(norm(parts[0]) / norm(parts[1])), rel=1e-6)


def test_a_warning_comes_once_a_run_of_high_ratios():
    ratio = GradientRatio(threshold=0.5, patience=3)
    told = [ratio.stays_high(value) for value in (0.9, 0.6, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 0.1, 2, 2, 2, 2)]
    assert [i for i, high in enumerate(told) if high] == [5, 11]


def test_lower_precision_is_summed_in_float32():
    parameter = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    torch.manual_seed(0)
    part, rest = torch.rand(2, 1000).bfloat16()
    ratio = GradientRatio()
    ratio.add((part * parameter).sum(), [parameter])
    parameter.grad = part + rest
    policy = (parameter.grad - part).double()
    expected = float(part.double().norm() / policy.norm())
    assert ratio.measure([parameter]) == pytest.approx(expected, rel=1e-5)
