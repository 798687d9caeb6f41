"""What a time on part of an H200 says about an H20: ranges of times, and of the ratio to a peer. All are estimates."""

from __future__ import annotations

from dataclasses import dataclass

# At and above this share of the in-place ceiling the kernel is said to be limited by memory.
SATURATED = 0.95


@dataclass(frozen=True)
class Card:
    """Datasheet figures: memory bandwidth in TB/s and multiprocessors."""

    name: str
    bandwidth_tbs: float
    sms: int


H200 = Card("H200", 4.8, 132)
H20 = Card("H20", 4.0, 78)


@dataclass(frozen=True)
class Projection:
    """The range of a time on another card, from a measured time; `bound` says which end is more likely."""

    low_us: float
    high_us: float
    bound: str

    def likely(self) -> tuple[float, float]:
        """The high end alone where memory limits the kernel, else the whole range."""
        return (self.high_us if self.bound == "memory" else self.low_us), self.high_us


def project(
    measured_us: float, of_ceiling: float | None, sms: int, source: Card, target: Card
) -> Projection:
    """Scales a time by the ratio of multiprocessors and by the ratio of datasheet bandwidths.

    The time of a kernel that memory limits grows with the ratio of bandwidths. The time of a kernel that is limited by
    what its multiprocessors can issue or keep in flight grows with the ratio of multiprocessors. An unclear case lies
    between the two.
    """
    by_memory = measured_us * source.bandwidth_tbs / target.bandwidth_tbs
    by_sms = measured_us * sms / target.sms
    bound = "memory" if of_ceiling is not None and of_ceiling >= SATURATED else "unclear"
    return Projection(min(by_memory, by_sms), max(by_memory, by_sms), bound)


def ratio_range(ours: Projection, peer: Projection) -> tuple[float, float]:
    """The range of the peer's time over ours."""
    (ours_low, ours_high), (peer_low, peer_high) = ours.likely(), peer.likely()
    return peer_low / ours_high, peer_high / ours_low
