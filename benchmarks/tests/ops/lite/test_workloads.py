"""The workloads: their generator, their statistics, and what thresholds do to them."""

import functools
import math

import pytest
import torch

from benchmarks.ops.lite import problem as lite
from benchmarks.ops.lite import workloads
from benchmarks.ops.lite.workloads import HEAD_TYPES, WORKLOADS, Shape
from liteattention_sm89 import LiteAttention, lite_attention
from liteattention_sm89.quality import compare
from liteattention_sm89.replay import replay

LN2 = math.log(2)


def splitmix(state):
    """One number of the published generator, with Python's integers."""
    z = state % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5])
def test_numbers_are_those_of_the_published_generator(seed):
    """Box and Muller on SplitMix64, whose first number from state 0 is E220A8397B1DCDAF."""
    stride = 0x9E3779B97F4A7C15
    assert splitmix(stride) == 0xE220A8397B1DCDAF
    start, draw = splitmix(seed), workloads._Normal("cpu", seed)
    found = [draw((3,)), draw((2, 2))]
    bits = [splitmix(start + n * stride) for n in range(1, 5)]
    pairs = [((((b >> 40) + 1) / 2**24), (b & 0xFFFFFF) / 2**24 * 2 * math.pi) for b in bits]
    parts = [[math.sqrt(-2 * math.log(u)) * f(a) for u, a in pairs] for f in (math.cos, math.sin)]
    want = [parts[0][0], parts[0][1], parts[1][0]]
    assert found[0].tolist() == pytest.approx(want, rel=1e-5, abs=1e-6)
    want = [*parts[0][2:], *parts[1][2:]]
    assert found[1].flatten().tolist() == pytest.approx(want, rel=1e-5, abs=1e-6)
    assert found[0].dtype == torch.float32 and found[1].shape == (2, 2)


def test_numbers_are_normal():
    x = workloads._Normal("cpu", 1)((500_001,)).double()
    moments = [float((x**n).mean()) for n in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.03)
    assert float((x[1:] * x[:-1]).mean()) == pytest.approx(0, abs=0.01)
    half = 250_001
    assert float((x[: half - 1] * x[half:]).mean()) == pytest.approx(0, abs=0.01)
    assert 4.3 < float(x.abs().max()) < 6


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_repeat_and_differ_by_seed_and_step(name):
    shape = Shape(2, (4, 4, 4), 5, 32)
    first, again, other = (list(WORKLOADS[name](shape, 3, "cpu", seed)) for seed in (1, 1, 2))
    assert len(first) == 3
    for step, same, different in zip(first, again, other):
        for a, b, c in zip(step, same, different):
            assert a.shape == (2, 64, 5, 32) and a.dtype == torch.bfloat16 and a.isfinite().all()
            assert torch.equal(a, b) and not torch.equal(a, c)
    for before, after in zip(first, first[1:]):
        assert not any(torch.equal(a, b) for a, b in zip(before, after))


def test_grids_hold_their_tokens():
    for tokens, grid in workloads.GRIDS.items():
        assert Shape(1, grid, 1, 2).tokens == tokens


def logits(step, h=0, b=0):
    """In log2 units, [S, S]."""
    q, k, _ = step
    return q[b, :, h].float() @ k[b, :, h].float().T * (q.shape[-1] ** -0.5 / LN2)


def next_mask(step, read, threshold, direction, size):
    """The lists that head 0 leaves behind, square tiles; bool [M, N]."""
    tops = logits(step).unflatten(1, (-1, size)).amax(-1).unflatten(0, (-1, size))
    peaks = tops[None]
    return (lite.margins(peaks, read[None], direction) > threshold)[0]


def test_simulation_settles_on_the_diagonal():
    """The published densities: half of the tiles after one pass, the diagonal after two, for thresholds of -5 to 0."""
    steps = list(workloads.simulation(Shape(1, (1, 1, 1024), 1, 128), 3, "cpu", 0))
    for threshold in (-1.0, -4.0):
        read = torch.ones(8, 8, dtype=torch.bool)
        read = next_mask(steps[0], read, threshold, 1, 128)
        assert torch.equal(read, torch.ones(8, 8, dtype=torch.bool).tril())
        read = next_mask(steps[1], read, threshold, -1, 128)
        assert torch.equal(read, torch.eye(8, dtype=torch.bool))
    (q, k, v), later = steps[0], steps[2]
    assert float((k - q).float().std()) == pytest.approx(0.3, rel=0.05)
    for a, b in zip((q, k, v), later):
        assert float((a.float() - b.float()).std()) == pytest.approx(0.02, rel=0.15)


def test_nothing_can_be_skipped_at_random():
    (step,) = workloads.random(Shape(1, (1, 1, 1024), 1, 128), 1, "cpu", 0)
    every = torch.ones(8, 8, dtype=torch.bool)
    assert torch.equal(next_mask(step, every, -10.0, 1, 128), every)
    assert float(logits(step).std()) == pytest.approx(1 / LN2, rel=0.02)


@pytest.mark.parametrize("name", HEAD_TYPES)
def test_structured_logits_fall_with_the_distance(name):
    """Averaged over tokens and 32 heads they follow the kernel up to the noise of as many random features."""
    shape, kind = Shape(1, (6, 6, 6), 32, 64), HEAD_TYPES[name]
    (q, k, _), *_ = workloads.structured(shape, 1, "cpu", 3, dtype=torch.float32, types=(name,))
    signal = 1 - workloads.LEVELS[0] ** 2 / 2
    scores = torch.einsum("shd,thd->st", q[0], k[0]).view(6, 6, 6, 6, 6, 6) / 32 * 64**-0.5
    for axis, reach in enumerate(kind.reach):
        for distance in (0, 1, 3):
            places = [torch.arange(6)] * 3
            start = torch.meshgrid(
                *(p[: 6 - distance] if a == axis else p for a, p in enumerate(places)),
                indexing="ij",
            )
            end = [p + distance * (a == axis) for a, p in enumerate(start)]
            found = float(scores[(*start, *end)].mean())
            want = signal * kind.peak * math.exp(-((distance / reach) ** 2) / 2)
            assert found == pytest.approx(want, abs=0.06 * kind.peak)


def test_structured_noise_fades_and_remembers():
    """Differences between two tokens at the same place in two batch rows are noise alone."""
    steps = [
        q[0, :, :].float() - q[1, :, :].float()
        for q, _, _ in workloads.structured(
            Shape(2, (4, 8, 8), 4, 32), 8, "cpu", 0, dtype=torch.float32
        )
    ]
    levels = [float(d.std()) / (0.35 * math.sqrt(2)) for d in steps]
    assert levels == pytest.approx([0.8 - 0.1 * t for t in range(8)], rel=0.02)
    a, b = (d.flatten() for d in steps[:2])
    assert float(torch.corrcoef(torch.stack([a, b]))[0, 1]) == pytest.approx(
        math.sqrt(1 - 0.25**2), abs=0.01
    )


def test_structured_values_are_smooth():
    _, _, v = next(
        workloads.structured(Shape(1, (4, 8, 8), 8, 32), 1, "cpu", 0, dtype=torch.float32)
    )
    grid = v[0].view(4, 8, 8, 8, 32)
    assert float(v.std()) == pytest.approx(math.sqrt(1 + 0.08**2), rel=0.02)
    for axis in range(3):
        product = float((grid * grid.roll(1, axis)).mean())
        assert product == pytest.approx(0.25, abs=0.03)
    assert float((grid * grid.roll(2, 2)).mean()) == pytest.approx(0.0, abs=0.03)


def mass(step, listed, size):
    """Share of the attention of head 0 that the listed tiles hold, averaged over the rows."""
    weights = (logits(step) * LN2).softmax(-1).unflatten(1, (-1, size)).sum(-1)
    return float(weights.unflatten(0, (-1, size)).mean(1)[listed].sum() / len(listed))


def test_drift_moves_what_matters_where_a_list_cannot_follow():
    shape, size = Shape(1, (8, 8, 8), 1, 64), 32
    steps = list(workloads.drift(shape, 6, "cpu", 0, at=4))
    read, held, shares = torch.ones(16, 16, dtype=torch.bool), [], []
    for number, step in enumerate(steps):
        held.append(mass(step, read, size))
        shares.append(float(read.float().mean()))
        read = next_mask(step, read, -6.0, 1 if number % 2 == 0 else -1, size)
    assert shares[3] < 0.6 and held[3] > 0.9
    assert held[4] < 0.5
    settled = logits(steps[3]).argmax(-1), logits(steps[5]).argmax(-1)
    assert float(((settled[1] - settled[0]) % 512 == 256).float().mean()) > 0.5
    default = list(workloads.drift(shape, 6, "cpu", 0))
    assert torch.equal(default[2][0], steps[2][0]) and not torch.equal(default[3][0], steps[3][0])
    assert all(torch.equal(a[1], b[1]) for a, b in zip(default, steps))


# Density, cosine, relative L1 and probability kept, by call, for tiles of 128 keys. At -8 heads differ widely.
PUBLISHED = {
    -1.0: [(1.0, 1.0, 0.0, 1.0), (0.516, 0.99643, None, None), (0.0312, 0.98897, 0.145, 0.872)],
    -5.0: [(1.0, 1.0, 0.0, 1.0), (0.519, 0.99638, None, None), (0.0349, 0.98879, 0.147, 0.871)],
    -8.0: [(1.0, 1.0, 0.0, 1.0), (0.820, 0.99929, None, None), (0.633, 0.99791, 0.047, 0.953)],
}
BOUNDS = {
    -1.0: (0.003, 4e-4, 0.008, 0.008),
    -5.0: (0.005, 4e-4, 0.008, 0.008),
    -8.0: (0.15, 2e-3, 0.02, 0.02),
}


@functools.cache
def simulated():
    """The steps of the simulation, and exact attention of each; no threshold changes them."""
    steps = workloads.simulation(Shape(1, (1, 1, 4096), 1, 128), 3, "cpu", 0)
    attention = torch.nn.functional.scaled_dot_product_attention
    return [
        (step, attention(*(x.float().transpose(1, 2) for x in step)).flatten()) for step in steps
    ]


@pytest.mark.parametrize("threshold", PUBLISHED)
def test_the_simulation_gives_the_published_figures(threshold):
    mask, direction = None, 1
    for ((q, k, v), exact), want in zip(simulated(), PUBLISHED[threshold]):
        out, _, after = lite_attention(
            q, k, v, mask, threshold=threshold, direction=direction, block_n=128
        )
        (found,) = compare(q, k, v, [(out, mask)], block_n=128)
        cosine = torch.cosine_similarity(out.float().transpose(1, 2).flatten(), exact, dim=0)
        values = (found.density, float(cosine), found.l1, 1 - found.dropped)
        for value, expected, bound in zip(values, want, BOUNDS[threshold]):
            assert expected is None or value == pytest.approx(expected, abs=bound)
        mask, direction = after, -direction


def final(types, threshold, workload=workloads.structured, grid=(4, 16, 16), **options):
    """The last of six steps of 1024 tokens."""
    steps = list(workload(Shape(1, grid, 2, 64), 6, "cpu", 1, types=types))
    track = replay(steps, {"": LiteAttention(threshold=threshold)}, every=6, **options)[""]
    return track.last


def test_head_types_keep_different_shares_of_the_tiles():
    """The order of the types, and what thresholds trade, as for 4096 tokens."""
    found = {name: final((name,), -6.0) for name in HEAD_TYPES}
    spatial, temporal, local, diffuse = (found[name].density for name in HEAD_TYPES)
    assert spatial < 0.3 < local < 0.7 < temporal < 0.85 < diffuse == 1
    assert 0.001 < found["spatial"].l1 < 0.05 and found["diffuse"].l1 < 0.003
    strict, loose = final(("local",), -10.0), final(("local",), -2.0)
    assert strict.density > local > loose.density
    assert strict.l1 < found["local"].l1 < loose.l1 > 0.03


def test_drift_is_followed_after_a_refresh_only():
    """Six steps that move after three: an error of the size of the result, unless lists are reset after the move."""
    options = {"workload": workloads.drift, "grid": (8, 8, 16)}
    lost, reset = (final(("local",), -4.0, refresh=r, **options) for r in (None, 4))
    assert lost.l1 > 0.9 and lost.dropped > 0.9
    assert reset.l1 < 0.03 and lost.density < reset.density < 1
    assert final(("local",), -math.inf, **options).l1 < 0.003
