"""The demo: three runs on built-in images that show in minutes what direction in the loss is good for.

All of its settings are in ``settings``; they were chosen so that the three runs take about four minutes on two cores.
SimSiam first forgets what an untrained network can do and then learns: it needs steps more than it needs pixels, hence 16 px.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from dssl.config import RunConfig
from dssl.methods import SimSiamConfig
from dssl.recipes import recipe
from dssl.report.run_data import RunData
from dssl.training.knn import OnlineKnn
from dssl.training.prepare import untrained_encoder

IMAGES, EPOCHS = 5_000, 16
HEAVY = "ra(2,5)"
RUNS: dict[str, str] = {"standard pair": "standard", "heavy pair": "heavy", "DSSL": "dssl"}
"""From the name of a run to its view graph."""
Clocks = tuple[Callable[[], float], Callable[[], float]]
"""Seconds of processor time and of the wall clock."""
_BUSY = 0.8
"""Of a core: below it something else is using the machine."""
_BROKEN = ("collapsed", "partial collapse", "diverged")


def settings(graph: str, *, seed: int = 0) -> RunConfig:
    """The configuration of one of the three runs; they differ in the graph alone."""
    usual = recipe("shapes", method="simsiam")
    return dataclasses.replace(
        usual,
        data=f"figures:{IMAGES}",
        encoder="whitened",
        image_size=16,
        method=SimSiamConfig(hidden=512, output=128, bottleneck=128),
        optimizer=dataclasses.replace(usual.optimizer, rate=0.8, fixed_predictor_rate=True),
        graph=graph,
        heavy=HEAVY,
        epochs=EPOCHS,
        seed=seed,
        precision="fp32",  # its outcome was measured in fp32, and bf16 gains little on images this small
    )


def untrained_accuracies(config: RunConfig) -> dict[str, float]:
    """kNN accuracy in percent of raw pixels and of the run's encoder before its first step, measured as in the run."""
    encoder, data = untrained_encoder(config)
    return {
        name: float(OnlineKnn(config, data, network).measure()["knn"])
        for name, network in (("raw pixels", nn.Flatten()), ("untrained encoder", encoder))
    }


@contextmanager
def busy_machine_noticed(
    say: Callable[[str], None], *, clocks: Clocks = (time.process_time, time.perf_counter), every: float = 10.0
) -> Iterator[None]:
    """While the block runs, say once if other programs leave it too little of the processor.

    It computes in one torch thread, beside the threads that make views: on idle cores it uses more than one of them.
    """
    done = threading.Event()

    def watch() -> None:
        before = [clock() for clock in clocks]
        while not done.wait(every):
            now = [clock() for clock in clocks]
            share = (now[0] - before[0]) / max(now[1] - before[1], 1e-9)
            if share < _BUSY:
                say(f"this machine is busy: the demo gets {share:.1f} of a core and needs one; it will take longer")
                return
            before = now

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """The result of one run."""

    verdict: str
    spread: float | None
    knn: float | None
    images: int
    """Test images of the kNN accuracy."""

    @property
    def broken(self) -> bool:
        return self.verdict in _BROKEN

    @classmethod
    def of(cls, run: RunData) -> "DemoRun":
        return cls(verdict=run.verdict.status, spread=run.spread, knn=run.knn, images=run.knn_images or 0)


def sentences(runs: Mapping[str, DemoRun], untrained: Mapping[str, float]) -> list[str]:
    """Four sentences computed from the results; each says what came out, whether the paper predicts it or not."""
    standard, heavy, dssl = (runs[name] for name in RUNS)
    if any(one.verdict == "too early" for one in runs.values()):
        states = ", ".join(f"{name} {_state(one)}" for name, one in runs.items())
        first = ["The runs were too short for a verdict on each of them.", f"At their end: {states}."]
    else:
        first = [_first(standard, heavy), _second(dssl, heavy)]
    return [*first, _third(standard, heavy, dssl), _fourth(dssl, untrained)]


def _first(standard: DemoRun, heavy: DemoRun) -> str:
    if heavy.broken and not standard.broken:
        return (
            f"Pulling heavy views towards each other broke the heavy pair ({_state(heavy)}), while the same network with the "
            f"standard pair is fine ({_state(standard)})."
        )
    if heavy.broken:
        return (
            f"The heavy pair broke ({_state(heavy)}), but so did the standard pair ({_state(standard)}): "
            "this run does not show that the heavy views caused it."
        )
    return (
        f"The heavy pair did not break in this run ({_state(heavy)}; standard pair: {_state(standard)}), "
        "unlike in the paper."
    )


def _second(dssl: DemoRun, heavy: DemoRun) -> str:
    if not dssl.broken and heavy.broken:
        return (
            f"DSSL learns from the same heavy views and is {_state(dssl)}: "
            "they are pulled towards their standard views and never pull."
        )
    if not dssl.broken:
        return f"DSSL, which lets heavy views be pulled and never pull, is {_state(dssl)} as well: here there was nothing to fix."
    return f"DSSL broke too in this run ({_state(dssl)}), which the paper does not predict."


def _third(standard: DemoRun, heavy: DemoRun, dssl: DemoRun) -> str:
    if standard.knn is None or heavy.knn is None or dssl.knn is None:
        return "The kNN accuracy was not measured for all three."
    compared = [
        f"{_difference(dssl.knn, one.knn, dssl.images)} {name} ({one.knn:.1f} %)"
        for name, one in (("the standard pair", standard), ("the heavy pair", heavy))
        if one.knn is not None
    ]
    return f"In kNN accuracy DSSL has {dssl.knn:.1f} %: {', and '.join(compared)}."


def _fourth(dssl: DemoRun, untrained: Mapping[str, float]) -> str:
    without = " and ".join(f"{value:.1f} % with {name}" for name, value in untrained.items())
    if dssl.knn is None:
        return f"Without training the kNN accuracy is {without}."
    gain = _difference(dssl.knn, max(untrained.values()), dssl.images)
    return f"Without training the kNN accuracy is {without}: DSSL is {gain} the better of them."


def _state(run: DemoRun) -> str:
    return run.verdict if run.spread is None else f"{run.verdict}, spread {run.spread:.2f}"


def _difference(first: float, second: float, images: int) -> str:
    """``6.0 points above``, or level where the 95 % interval of the difference includes 0.

    The interval is cautious: it treats the two accuracies as if they were of different test images.
    """
    shares = (first / 100, second / 100)
    chance = 196 * math.sqrt(sum(share * (1 - share) for share in shares) / max(1, images))
    if abs(first - second) <= chance:
        return f"level (within chance, ±{chance:.1f} points) with"
    return f"{abs(first - second):.1f} points {'above' if first > second else 'below'}"
