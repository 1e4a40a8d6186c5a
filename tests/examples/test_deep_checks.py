"""The checks of the deep nets' claims, and the theory that they are compared with."""

from __future__ import annotations

import functools
import math
import sys

import pytest

from tests.examples.modules import example

fit = example("vanilla/deep_vanilla").fit


def errors(octaves: float) -> dict[int, dict[int, float]]:
    """Errors that rise through 50 % at depth 16 * 2^(octaves (bits - 3))."""
    return {
        bits: {
            depth: 90.0 if depth > 16 * 2 ** (octaves * (bits - 3)) else 10.0
            for depth in (2**power for power in range(16))
        }
        for bits in (3, 4, 5)
    }


@pytest.mark.parametrize("octaves", [1.0, 2.0, 3.0])
def test_deep_vanilla_fits_the_octaves_of_depth_a_bit(octaves: float) -> None:
    one = fit([errors(octaves)])
    assert one["figure"] == pytest.approx(octaves)
    assert one["verdict"] == "undecided"  # one seed, however well its three depths lie on a line
    assert "3 bits 23, 4 bits" in one["note"]
    two = fit([errors(octaves), errors(octaves + 0.5)])
    assert two["low"] < octaves + 0.25 < two["high"]
    assert fit([errors(octaves)] * 2)["verdict"] == "undecided"  # the same at both seeds


def test_deep_vanilla_is_undecided_where_no_depth_fails() -> None:
    all_train = {bits: {10: 5.0, 100: 9.0} for bits in (3, 4, 5)}
    found = fit([all_train])
    assert found["verdict"] == "undecided"
    assert math.isnan(found["figure"])


def test_deep_vanilla_leaves_no_seed_out_for_what_it_found() -> None:
    """If a seed trains at every depth of 5 bits, it has no slope, and the claim has no figure."""
    deep = errors(2.0) | {5: dict.fromkeys(errors(2.0)[5], 5.0)}
    found = fit([errors(1.9), errors(2.1), deep])
    assert found["verdict"] == "undecided"


def test_signals_follow_mean_field_theory_at_the_critical_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the critical point (chi = 1) equal inputs stay equal, and the distance of near ones
    stays."""
    monkeypatch.setitem(sys.modules, "net", net := example("vanilla/net"))
    signal = example("vanilla/signal_propagation")
    sigma_w = math.sqrt(1.05)
    sigma_b, q = net.critical_bias(sigma_w)
    after = functools.partial(signal.correlation, q=q, sigma_w=sigma_w, sigma_b=sigma_b)
    assert after(1.0) == pytest.approx(1.0, abs=1e-9)
    assert (1 - after(1 - 1e-5)) / 1e-5 == pytest.approx(1.0, abs=1e-3)
    q = signal.fixed_point(math.sqrt(2))
    apart = signal.correlation(1 - 1e-5, q, math.sqrt(2), 0.0)
    assert (1 - apart) / 1e-5 > 1.1  # chaos: with Kaiming's weights they separate
