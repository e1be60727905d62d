"""Trials of a search for a policy, as made up for tests."""

from dssl.state import Status
from dssl.training.tune import Trial


def trial(policy: str, score: float, *, verdict: Status = "healthy", seconds: float = 10.0) -> Trial:
    reason = "" if verdict == "healthy" else "embeddings of view h1 have a spread of 0.05"
    return Trial(
        policy=policy,
        retrieval=score,
        error=0.01,
        rotation=0.4,
        rank=9.0,
        verdict=verdict,
        reason=reason,
        seconds=seconds,
    )
