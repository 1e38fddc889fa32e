"""The CUDA path without a card: whole training steps on a fake CUDA device.

Under FakeTensorMode tensors have shapes, types and devices but no data: mixing in a CPU tensor raises, and so does
anything that the host would have to read (.item(), boolean indexing). backward() alone needs a real card.
"""

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import augment
import data
import irnet
import losses
import models
import train
from harness import options, ranks
from paper import baselines, plus

SHAPES = {"resnet18": (3, 32), "narrow": (1, 28), "cnn": (1, 28)}
CLASSES, N, BATCH = 10, 64, 16


def host_order(n: int, generator) -> torch.Tensor:
    """Orders are drawn on the host, from a CPU generator: reading them reads no device. A fake has no numbers."""
    order = torch.arange(n, device="cpu")
    order.tolist = lambda: list(range(n))
    return order


@pytest.fixture
def fake_cuda(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: None)
    monkeypatch.setattr(augment, "_host_order", host_order)
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_default_device("cuda")
        try:
            torch.zeros(1).to("cuda", copy=True)
        except RuntimeError as error:
            torch.set_default_device(None)
            pytest.skip(f"this torch pretends no card where there is no driver: {str(error).splitlines()[0]}")
        yield
        torch.set_default_device(None)


def setup(base: str, arch: str, extra: str) -> tuple[train.Learner, data.Samples]:
    """As train.prepare does, with everything built on the fake device (modules cannot be moved there)."""
    channels, size = SHAPES[arch]
    images, labels = torch.zeros(N, channels, size, size, dtype=torch.uint8), torch.zeros(N, dtype=torch.long)
    dataset = data.Dataset("fake", images, labels, images, labels, CLASSES, (0.5,) * channels, (0.5,) * channels)
    samples = data.Samples(dataset, torch.ones(N, CLASSES, dtype=torch.bool), 8, None, "cuda")
    shape = dict(arch=arch, pair=base == "dividemix") | dataset.shape
    network = models.build(**shape, pico=dict(queue_size=64) if base in options.PICO_FAMILY else None)
    more = {"pico+": dict(queue_size=64, start=1)}
    more |= dict.fromkeys(("supervised", "dividemix"), dict(labels=samples.labels))
    method = baselines.METHODS[base](samples.candidates, **more.get(base, {}))
    if base == "dividemix":
        method.clean = torch.zeros(2, N)  # after the warm-up
    method.nearest = True  # PiCO+ in its last stage
    refine = irnet.IRNet(samples.candidates, 0.01)
    trained = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1, momentum=0.9, foreach=True)
    # a part of the batch is looked at again, or all of it
    again = dict(extra=extra, share=0.5 if arch == "cnn" else 1.0, always=False)
    more = dict(views=data.ImageViews(), augmented=data.ImageViews(), batch_size=BATCH, device=samples.device)
    parts = dict(network=network, shape=shape, base=method, refine=refine, optimizer=optimizer)
    return train.Learner(**parts, **again, **more, precision=ranks.Precision("bf16", samples.device)), samples


def step(learner: train.Learner, samples: data.Samples, monkeypatch, correcting: bool) -> tuple[torch.Tensor, ...]:
    """One step; numbers copied from the host in it make the host wait for all that the card has to do."""
    original = torch.tensor

    def tensor(*values, device=None, **options):
        if torch.device(device or "cuda").type == "cuda":
            raise RuntimeError("the host waits")
        return original(*values, device=device, **options)

    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(torch, "as_tensor", tensor)
    index, x = next(samples.batches(torch.arange(N), BATCH))
    return train.train_step(learner, index, x, samples.labels[index], correcting)


CASES = [(base, arch, after) for base in losses.BASES for arch in SHAPES for after in (False, True)]
CASES += [(base, "cnn", True) for base in baselines.METHODS if base not in losses.BASES]


@pytest.mark.parametrize(("base", "arch", "correcting"), CASES)
def test_a_whole_step_stays_on_the_device(fake_cuda, base, arch, correcting, monkeypatch):
    learner, samples = setup(base, arch, "ws")
    learner.refine.weights_after = "1/C" if arch == "cnn" else "value"
    loss, tau, counts = step(learner, samples, monkeypatch, correcting)
    assert loss.shape == () and tau.shape == (BATCH,) and counts.shape == (6,)
    assert {t.device.type for t in (loss, tau, counts)} == {"cuda"}


@pytest.mark.parametrize(("base", "missing"), [("proden", None), ("pico", 0.1)])
def test_a_step_of_irnet_plus_stays_there_too(fake_cuda, base, missing, monkeypatch):
    """The neighbours' votes, the own sets besides, and mixing."""
    learner, samples = setup(base, "cnn", "w")
    learner.refine, learner.plus = plus.Plus(samples.candidates, 0.01, e0=1), True
    learner.refine.end_epoch(0.5)
    learner.refine.missing = missing
    learner.refine.begin_epoch(lambda function: torch.zeros(N, 8))
    assert [t.device.type for t in step(learner, samples, monkeypatch, True)] == ["cuda"] * 3


@pytest.mark.parametrize(
    ("plant", "complaint"),
    [
        (lambda p, s: irnet.margin(p, s).sum().item(), "_local_scalar_dense"),
        (lambda p, s: irnet.margin(p, s) + torch.zeros(BATCH, device="cpu"), "on the same device"),
        (lambda p, s: p[s], "nonzero"),
        (lambda p, s: p * torch.tensor(0.5, device=p.device), "the host waits"),
    ],
    ids=["item", "cpu tensor", "boolean index", "numbers from the host"],
)
def test_the_check_catches_what_is_planted(fake_cuda, monkeypatch, plant, complaint):
    learner, samples = setup("proden", "cnn", "w")
    original = irnet.hits
    monkeypatch.setattr(irnet, "hits", lambda p, c, y: (plant(p, c), original(p, c, y))[1])
    with pytest.raises(Exception, match=complaint):
        step(learner, samples, monkeypatch, False)


def test_ranks_on_cards_use_torchs_own_batch_normalisation(fake_cuda):
    network = models.build("resnet18", 3, 32, CLASSES)
    names = list(network.state_dict())
    ranks.synchronise(network)
    norms = [m for m in network.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == 20 and all(isinstance(norm, torch.nn.SyncBatchNorm) for norm in norms)
    assert list(network.state_dict()) == names  # a checkpoint fits any number of ranks
    with models.running_statistics_frozen(network):
        assert not any(norm.track_running_stats for norm in norms)
