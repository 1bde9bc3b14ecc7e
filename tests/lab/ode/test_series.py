"""Time series with gaps, and the ODE-RNN that reads them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ocnopt import OCNOpt
from ocnopt.lab import data
from ocnopt.lab.models import build
from ocnopt.lab.models.ode.series import GatedUnit


def series(count: int = 40, times: int = 20, channels: int = 3) -> data.Dataset:
    """Lengths from 5 to ``times``; values are never 0 before the end."""
    generator = torch.Generator().manual_seed(0)

    def split(seed: int) -> data.Split:
        generator.manual_seed(seed)
        lengths = torch.randint(5, times + 1, (count,), generator=generator)
        mask = (torch.arange(times) < lengths[:, None])[..., None].expand(-1, -1, channels)
        values = torch.where(mask, torch.rand(count, times, channels, generator=generator) + 1, 0.0)
        return data.Split(values, torch.arange(count) % 4, lengths, mask)

    classes = ("a", "b", "c", "d")
    return data.Dataset("made up", "classification", split(0), split(1), None, classes, (times, channels), "here")


def test_the_fraction_that_was_asked_for_is_lost() -> None:
    whole = series()
    thin = data.irregular(whole, 0.4)
    assert thin.input_shape == (20, 4)
    for before, after in ((whole.train, thin.train), (whole.test, thin.test)):
        observed = after.x[..., -1] == 1
        assert torch.equal(observed.sum(1), before.lengths - (0.4 * before.lengths).long())
        assert torch.equal(after.x[..., :-1][observed], before.x[observed])
        assert (after.x[~observed] == 0).all()
        assert not (observed & (torch.arange(20) >= before.lengths[:, None])).any()
        assert torch.equal(after.mask[..., 0], observed)
    assert "40% of the observations" in thin.notes[-1]


def test_what_is_lost_depends_on_the_seed_and_differs_from_series_to_series() -> None:
    one, same, other = (data.irregular(series(), 0.5, seed=seed).train.x for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    full = series().train.lengths == 20
    assert len(one[full][..., -1].unique(dim=0)) == int(full.sum())


def test_nothing_missing_is_only_a_channel_more() -> None:
    thin = data.irregular(series(), 0.0).train
    assert torch.equal(thin.x[..., -1].sum(1).long(), thin.lengths)
    assert torch.equal(thin.x[..., :-1], series().train.x)


def test_a_stride_takes_every_so_many_th_time() -> None:
    whole, thin = series().train, data.irregular(series(), 0.0, stride=3).train
    assert torch.equal(thin.x[..., :-1], whole.x[:, ::3])
    assert torch.equal(thin.lengths, thin.x[..., -1].sum(1).long())


@pytest.mark.parametrize("missing", [0.99, 1 - 1e-12])
def test_every_series_keeps_an_observation(missing: float) -> None:
    assert (data.irregular(series(), missing).train.x[..., -1].sum(1) == 1).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((1.0,), "missing must lie in 0..1, 1 excluded, got 1.0"), ((-0.1,), "missing must lie"), ((0.5, 0), "stride")],
)
def test_bad_arguments_are_named(arguments: tuple[float, ...], message: str) -> None:
    missing, *stride = arguments
    with pytest.raises(ValueError, match=message):
        data.irregular(series(), missing, stride=int(stride[0]) if stride else 1)


def test_images_are_no_series() -> None:
    with pytest.raises(ValueError, match="DIGITS is no time series"):
        data.irregular(data.load("DIGITS"), 0.1)


# --- the network ---


def network(**options: object) -> torch.nn.Module:
    return build("ode_rnn", (20, 4), 4, hidden=6, width=8, tolerance=1e-6, **options).double()


def samples() -> Tensor:
    return data.irregular(series(6), 0.5).train.x.double()


def test_a_sample_does_not_see_the_others() -> None:
    """Solved together from observation to observation of the whole batch, each is what it would be alone."""
    net, x = network(), samples()
    together = net(x)
    alone = torch.cat([net(x[i : i + 1]) for i in range(len(x))])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_only_observations_count() -> None:
    net, x = network(), samples()
    observed = x[..., -1:] == 1
    other = torch.where(observed, x, torch.randn_like(x))
    other[..., -1] = x[..., -1]
    assert torch.equal(net(x), net(other))
    changed = torch.where(observed, x + 0.1, x)
    changed[..., -1] = x[..., -1]
    assert not torch.isclose(net(x), net(changed)).all(1).any()


def test_the_time_between_observations_counts() -> None:
    net = network(time=5.0)
    x = torch.zeros(2, 20, 4, dtype=torch.float64)
    x[:, 0] = 1.0
    x[0, 3], x[1, 17] = 1.0, 1.0
    with torch.no_grad():
        net.ode.field[0].weight.mul_(5)
        out = net(x)
    assert not torch.isclose(out[0], out[1], rtol=1e-3).any()


def test_the_state_waits_after_the_last_observation() -> None:
    net, x = network(), samples()
    longer = torch.cat([x, torch.zeros(len(x), 5, 4, dtype=x.dtype)], 1)
    net.time = 1.0
    before = net(x)
    net.time = 25 / 20
    torch.testing.assert_close(net(longer), before, rtol=1e-5, atol=1e-6)


def test_the_unit_is_that_of_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = GatedUnit(3, 5).double(), torch.nn.GRUCell(3, 5).double()
    with torch.no_grad():
        theirs.bias_hh.zero_()  # torch's candidate has a bias inside the reset gate; ours has one
        for i, part in enumerate((ours.reset, ours.update, ours.new)):
            rows = slice(5 * i, 5 * i + 5)
            part.weight.copy_(torch.cat([theirs.weight_ih[rows], theirs.weight_hh[rows]], 1))
            part.bias.copy_(theirs.bias_ih[rows])
    # torch: n = tanh(W x + b + r ∘ (U h)); ours: tanh(W x + U (r ∘ h) + b), the form of Cho et al.
    x, h = torch.randn(4, 3, dtype=torch.float64), torch.zeros(4, 5, dtype=torch.float64)
    torch.testing.assert_close(ours(x, h), theirs(x, h))
    h = torch.randn(4, 5, dtype=torch.float64)
    both = torch.cat([x, h], 1)
    r, z = ours.reset(both).sigmoid(), ours.update(both).sigmoid()
    expected = z * h + (1 - z) * ours.new(torch.cat([x, r * h], 1)).tanh()
    torch.testing.assert_close(ours(x, h), expected)


@pytest.mark.parametrize("gradient", ["adjoint", "discretize"])
def test_all_layers_have_kronecker_curvature(gradient: str, recwarn: pytest.WarningsRecorder) -> None:
    net, x = network(gradient=gradient), samples()
    optimizer = OCNOpt(net.parameters(), 1e-2, model=net, curvature="kronecker", refresh_every=2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), torch.arange(len(x)) % 4)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert [str(w.message) for w in recwarn] == []
    assert net.ode.nfe.curvature > 0


def test_bad_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"input_shape must be \(times, channels \+ 1\)"):
        build("ode_rnn", (1, 8, 8), 4)
    with pytest.raises(ValueError, match="hidden must be at least 1; got 0"):
        build("ode_rnn", (8, 3), 4, hidden=0)
