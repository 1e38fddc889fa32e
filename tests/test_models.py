"""Networks: shapes, the paper's parameter count, batch statistics, PiCO's prototypes, key encoder and queue."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import models


def tiny_pico(classes=4, embedding=128, **options):
    torch.manual_seed(0)
    encoders = (models.Encoder("mlp", 1, 8, classes, embedding=embedding) for _ in range(2))
    return models.PiCO(*encoders, classes, embedding, **({"queue_size": 24} | options))


def test_two_encoders_have_the_parameters_of_table_6():
    net = models.build("resnet18", 3, 32, 10, pico={})
    assert models.parameter_count(net) == 23_004_564


@pytest.mark.parametrize("arch", list(models.BACKBONES))
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (1, 28), (3, 32)])
def test_backbones_shapes_and_stem(arch, channels, size):
    net = models.build(arch, channels, size, 7, (0.5,) * channels, (0.2,) * channels, pico={"queue_size": 8})
    logits, q = net.embed(torch.rand(2, channels, size, size))
    assert logits.shape == (2, 7) and q.shape == (2, 128)
    assert torch.allclose(q.norm(dim=1), torch.ones(2))
    if arch == "resnet18":
        stem = net.query.backbone
        assert stem.conv1.weight.shape == (64, channels, 3, 3) and stem.conv1.stride == (1, 1)
        assert isinstance(stem.maxpool, nn.Identity)


def test_wide_has_twice_the_channels_of_cnn():
    cnn, wide = (models.build(arch, 1, 28, 10) for arch in ("cnn", "wide"))
    shapes = [[tuple(p.shape) for p in net.parameters() if p.ndim == 4] for net in (cnn, wide)]
    assert shapes[0] == [(32, 1, 3, 3), (64, 32, 3, 3), (128, 64, 3, 3)]
    assert shapes[1] == [(64, 1, 3, 3), (128, 64, 3, 3), (256, 128, 3, 3)]
    # 4 batch normalisations, the hidden layer and the classifier come to the convolutions
    more = 2 * (64 + 128 + 256 + 256) + (256 * 9 + 1) * 256 + 257 * 10
    assert models.parameter_count(wide) == 9 * (64 + 128 * 64 + 256 * 128) + more


def test_narrow_is_a_residual_network_that_halves_three_times():
    net = models.build("narrow", 1, 28, 10).eval()
    *convolutions, top, _, _ = net.backbone  # stem and blocks, then Linear, BatchNorm, ReLU
    x, sides = torch.rand(2, 1, 28, 28), []
    for part in convolutions[:-1]:
        x = part(x)
        sides.append(x.shape[-1])
    assert sides[0] == 14 and sides[-2:] == [7, 4] and top.in_features == 64 * 4 * 4 and x.shape[1] == 64
    block = convolutions[-2]  # y = relu(F(x) + W x): without F, the halved x alone
    for p in block.bn2.parameters():
        nn.init.zeros_(p)
    x = torch.rand(2, 32, 7, 7)
    assert torch.allclose(block(x), block.downsample(x).relu())


def test_encoder_normalises_its_images():
    net = models.build("mlp", 3, 8, 4, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)).eval()
    x = torch.rand(5, 3, 8, 8)
    mean, std = torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1), torch.tensor([0.5, 0.6, 0.7]).view(3, 1, 1)
    assert torch.allclose(net(x), net.classifier(net.backbone((x - mean) / std)), atol=1e-6)


def test_peek_uses_the_batch_but_records_nothing():
    net = models.build("cnn", 1, 8, 4)
    x = torch.rand(16, 1, 8, 8)
    buffers = {k: v.clone() for k, v in net.named_buffers()}
    peeked = net.peek(x)
    assert not peeked.requires_grad
    assert all(torch.equal(v, buffers[k]) for k, v in net.named_buffers())
    assert torch.allclose(peeked, net(x), atol=1e-6)  # batch statistics; this call records them
    assert not torch.equal(net.backbone[2].running_mean, buffers["backbone.2.running_mean"])
    net.eval()
    assert torch.equal(net.peek(x), net(x))


@pytest.mark.parametrize("seed", range(5))
def test_prototypes_equal_the_update_one_after_the_other(seed):
    g = torch.Generator().manual_seed(seed)
    net = tiny_pico(classes=6, prototype_momentum=0.9)
    net.prototypes = F.normalize(torch.randn(6, 128, generator=g), dim=1)
    want = net.prototypes.clone()
    q = F.normalize(torch.randn(50, 128, generator=g), dim=1)
    labels = torch.randint(5, (50,), generator=g)  # class 5 gets none
    for vector, label in zip(q, labels, strict=True):
        want[label] = 0.9 * want[label] + 0.1 * vector
    want = F.normalize(want, dim=1)
    net.update_prototypes(q, labels)
    assert (net.prototypes - want).abs().max() < 1e-6


def test_key_encoder_follows_and_queue_goes_round():
    net = tiny_pico(key_momentum=0.9, queue_size=8)
    with torch.no_grad():
        for p in net.query.parameters():
            p.add_(1.0)
    before = [p.clone() for p in net.key.parameters()]
    net.keys(torch.rand(4, 1, 8, 8))
    for old, new, query in zip(before, net.key.parameters(), net.query.parameters(), strict=True):
        assert torch.allclose(new, 0.9 * old + 0.1 * query, atol=1e-6)
    for start in (0, 5, 10):  # 5 at a time into 8 places
        net.enqueue(torch.arange(start, start + 5.0)[:, None].expand(5, 128), torch.arange(start, start + 5))
    assert net.queue_labels.tolist() == [8, 9, 10, 11, 12, 13, 14, 7] and net.pointer == 7
    assert net.queue[:, 0].tolist() == [8, 9, 10, 11, 12, 13, 14, 7]
    copy = tiny_pico(queue_size=8)
    copy.load_state_dict(net.state_dict())
    assert copy.pointer == 7


def test_prototypes_equal_the_released_codes():
    g = json.loads(Path(__file__).with_name("golden.json").read_text())["prototypes"]
    c = {k: torch.tensor(v) for k, v in g.items()}
    net = tiny_pico(prototype_momentum=g["momentum"], classes=3, embedding=4)
    net.prototypes = c["before"]
    net.update_prototypes(c["features"], c["labels"])
    assert torch.allclose(net.prototypes, c["after"], atol=1e-6)
