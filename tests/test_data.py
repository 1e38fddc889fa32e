"""Datasets, their corruption into candidate sets, and the views of features."""

import numpy as np
import pytest
import torch

import data
import irnet
from conftest import SHARED, prepared
from test_crowd import features


@pytest.mark.parametrize(("classes", "q", "eta"), [(10, 0.3, 0.3), (10, 0.5, 0.1), (100, 0.05, 0.2)])
def test_corrupt_has_the_rates_of_the_paper(classes, q, eta):
    n = 60_000
    y = torch.arange(n) % classes
    s = data.corrupt(y, classes, q, eta, torch.Generator().manual_seed(1))
    noisy = irnet.is_noisy(s, y)
    assert noisy.float().mean().item() == pytest.approx(eta * (1 - q ** (classes - 1)), abs=0.006)
    size = s.sum(1).float()
    for part in (noisy, ~noisy):  # |S| = 1 + (C-1) q either way: the flip keeps it
        assert size[part].mean().item() == pytest.approx(1 + (classes - 1) * q, rel=0.02)
    # without noise every wrong label is a candidate with probability q, whichever it is
    clean = data.corrupt(y, classes, q, 0.0, torch.Generator().manual_seed(2))
    assert not irnet.is_noisy(clean, y).any()
    offset = torch.stack([clean[torch.arange(n), (y + k) % classes].float().mean() for k in (1, 2, classes - 1)])
    assert (offset - q).abs().max() < 0.01


def test_corrupt_puts_the_intruder_anywhere_outside():
    """From the same draw with and without noise: one label out, one uniformly chosen non-candidate in."""
    y = torch.full((30_000,), 2)
    clean = data.corrupt(y, 5, 0.25, 0.0, torch.Generator().manual_seed(3))
    noisy = data.corrupt(y, 5, 0.25, 0.9, torch.Generator().manual_seed(3))
    flipped = irnet.is_noisy(noisy, y)
    assert torch.equal(noisy[~flipped], clean[~flipped])
    came = noisy[flipped] & ~clean[flipped]
    assert came.sum(1).eq(1).all() and torch.equal(noisy.sum(1), clean.sum(1))
    alone = clean[flipped].sum(1) == 1  # S = {2}: 0, 1, 3 and 4 are equally likely
    share = came[alone].float().mean(0)
    assert share[2] == 0 and (share[[0, 1, 3, 4]] - 0.25).abs().max() < 0.02


def test_corrupt_keeps_full_sets_clean_and_follows_its_seed():
    y = torch.zeros(1000, dtype=torch.long)
    s = data.corrupt(y, 3, 0.9, 0.9, torch.Generator().manual_seed(0))
    assert s.all(1).float().mean() > 0.7 and not irnet.is_noisy(s, y)[s.all(1)].any()
    again = data.corrupt(y, 3, 0.9, 0.9, torch.Generator().manual_seed(0))
    other = data.corrupt(y, 3, 0.9, 0.9, torch.Generator().manual_seed(1))
    assert torch.equal(s, again) and not torch.equal(s, other)
    assert data.corrupt(y, 1, 0.5, 0.5).all()  # one class


def test_digits_are_embedded():
    d = data.load("digits")
    assert d.images.shape == (1437, 1, 8, 8) and d.test_images.shape == (360, 1, 8, 8)
    assert d.images.dtype == torch.uint8 and d.images.max() == 255 and d.labels.unique().tolist() == list(range(10))
    small = data.load("digits", size=16, limit_train=50, limit_test=7)
    assert small.images.shape == (50, 1, 16, 16) and len(small.test_labels) == 7
    assert torch.equal(small.labels, d.labels[:50])


@pytest.mark.skipif(not (SHARED / "KMNIST").exists(), reason="needs ../shared/data")
def test_kmnist_and_own_data_are_found():
    d = data.load("kmnist", SHARED, limit_test=100)
    assert d.images.shape == (60_000, 1, 28, 28) and len(d.test_images) == 100
    pixels = d.images.float() / 255
    assert pixels.mean().item() == pytest.approx(d.mean[0], abs=1e-3)
    assert pixels.std().item() == pytest.approx(d.std[0], abs=1e-3)
    own = data.load(str(SHARED / "cifar10n_12k.npz"), limit_train=5000)
    assert own.images.shape == (5000, 3, 32, 32) and own.candidates.shape == (5000, 10)
    assert 0.01 < irnet.noise_level(own.candidates, own.labels) < 0.03


def test_views_of_features_are_gaussian_noise_in_their_own_scale():
    x, y = features(4000)
    np.savez("t.npz", x_train=x, candidates=np.eye(8, dtype=bool)[y])
    _, learner, samples = prepared("--dataset t.npz --feature-noise 0.25".split())
    batch = samples.images[:3000]
    for kind, factor in (("w", 0.25), ("s", 0.5)):
        noise = ((learner.views.view(kind, batch) - batch) / samples.images.std(0)).flatten(1)
        assert noise.std(0).tolist() == pytest.approx([factor] * 12, rel=0.06)
        assert noise.mean(0).abs().max() < 0.05
    assert torch.equal(learner.views.plain(batch), batch)
