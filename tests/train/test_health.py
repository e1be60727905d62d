"""The verdict on real runs that collapsed and real runs that did not; their curves are kept beside this file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dssl import Objective, SimSiam, SimSiamConfig, named_graph
from dssl.methods import METHODS
from dssl.training.health import COLLAPSED, Observation, RunMonitor, likely_cause, observe, patience, rank_share
from tests.rejecting import states

CURVES = sorted((Path(__file__).parent / "curves").glob("*.jsonl"))
COLLAPSED_RUNS = [file for file in CURVES if json.loads(file.read_text().partition("\n")[0])["collapsed"]]
"""All runs of heavy pairs, one of DSSL at a high rate whose kNN accuracy fell below where it began, DINO at a high rate, DINO and
SwAV with soft targets, and LeJEPA without its regularizer."""
HEALTHY_RUNS = [file for file in CURVES if file not in COLLAPSED_RUNS]


def verdicts(file: Path) -> list[tuple[float, str]]:
    """What the monitor would have said at each check: (epoch, verdict)."""
    about, *checks = [json.loads(line) for line in file.read_text().splitlines()]
    steps, graph = about["steps_per_epoch"], named_graph(about["graph"])
    settings = METHODS[about["method"]](**about.get("settings", {}))
    health = RunMonitor(
        graph, patience=patience(steps), predictions_from=settings.predictions_checked_from,
        guess=settings.loss_of_guessing(),
    )  # fmt: skip
    return [((check["step"] + 1) / steps, health.judge(Observation(**check)).status) for check in checks]


@pytest.mark.parametrize("file", HEALTHY_RUNS, ids=lambda file: file.stem)
def test_no_alarm_at_any_epoch_of_a_healthy_run(file: Path) -> None:
    assert {verdict for _, verdict in verdicts(file)} <= {"too early", "healthy"}


@pytest.mark.parametrize("file", COLLAPSED_RUNS, ids=lambda file: file.stem)
def test_no_collapsed_run_is_missed(file: Path) -> None:
    said = verdicts(file)
    assert said[-1][1] in ("partial collapse", "collapsed")
    if file.name.startswith(("cifar10", "shapes2")):  # ten thousand or five thousand images: by the fifth epoch
        latest = 7 if "byol" in file.name else 5  # BYOL's predictions are judged from step 1,000 on
        assert {verdict for epoch, verdict in said if epoch <= latest} & {"partial collapse", "collapsed"}


def test_the_loss_of_guessing_is_a_collapse_whatever_the_spread() -> None:
    healthy = replace(constant(0.5), edges={"h1->h2": 4.84, "h2->h1": 4.85})
    settings = METHODS["swav"](prototypes=128)
    for loss, expected in ((4.84, "collapsed"), (4.6, "healthy")):
        health = RunMonitor(named_graph("heavy"), patience=0, guess=settings.loss_of_guessing())
        verdict = health.judge(replace(healthy, edges={"h1->h2": loss, "h2->h1": 4.85}))
        assert verdict.status == expected
        assert ("4.85" in verdict.reason) == (expected == "collapsed")
        again = RunMonitor(named_graph("heavy"), patience=0, guess=settings.loss_of_guessing())
        again.load_state(health.state())
        assert [*again.losses] == [loss]


def test_there_are_enough_curves_to_mean_something() -> None:
    assert len(HEALTHY_RUNS) >= 10
    assert len(COLLAPSED_RUNS) >= 5
    words = {word for file in CURVES for word in file.stem.split("-")}
    assert words >= {"simsiam", "byol", "simclr", "moco", "lejepa", "swav", "dino", "standard", "dssl"}


@pytest.mark.parametrize(("steps_per_epoch", "expected"), [(1, 100), (39, 117), (156, 468), (390, 500), (10_009, 500)])
def test_a_long_epoch_does_not_delay_the_first_verdict(steps_per_epoch: int, expected: int) -> None:
    assert patience(steps_per_epoch) == expected


def constant(value: float) -> Observation:
    names = ("h1", "h2")
    same = dict.fromkeys(names, value)
    return Observation(
        step=0, loss=-0.9, edges={"h1->h2": -0.9, "h2->h1": -0.8}, spread=same, rank=same, source=same, target=same
    )


def test_a_collapse_names_view_edge_and_three_remedies() -> None:
    health = RunMonitor(named_graph("heavy"), patience=3)
    first, second, third = (health.judge(replace(constant(COLLAPSED / 2), step=step)) for step in range(3))
    assert (first.status, second.status, third.status) == ("too early", "too early", "collapsed")
    assert third.edge == "h1->h2"  # the easier of the two
    assert len(third.remedies) == 3
    assert "--graph dssl" in third.remedies[0]
    assert "0.10" in third.reason


def test_one_bad_look_is_no_collapse() -> None:
    health = RunMonitor(named_graph("heavy"), patience=1)
    for value in (0.9, 0.9, 0.9, 0.1, 0.9):
        assert health.judge(constant(value)).status == "healthy"


def test_nan_is_divergence_at_once() -> None:
    health = RunMonitor(named_graph("heavy"), patience=99)
    verdict = health.judge(constant(float("nan")))
    assert verdict.status == "diverged"
    assert health.judge(constant(0.9)).status == "diverged"  # nothing comes back from there


def test_weights_that_are_no_numbers_stop_a_run_whose_loss_is_one() -> None:
    """An overflow in the optimiser's state: the checkpoint is not written, and the next look must say why."""
    health = RunMonitor(named_graph("heavy"), patience=1)
    health.note_divergence(constant(0.9), first=-1)
    said = health.judge(replace(constant(0.9), step=7))
    assert said.status == "diverged"
    states(said.reason, "weights", "loss")


def test_a_view_that_collapsed_fully_is_not_hidden_by_one_of_low_rank() -> None:
    now = replace(constant(0.9), spread={"h1": 0.06, "h2": 0.5}, rank={"h1": 0.5, "h2": 0.005})
    said = RunMonitor(named_graph("heavy"), patience=0).judge(now)
    assert (said.status, said.view) == ("collapsed", "h1")


def test_the_reason_names_what_was_judged() -> None:
    now = replace(constant(0.1), source={"h1": 0.9, "h2": 0.9})
    for step, word in ((10, "embeddings"), (1000, "predictions")):
        said = RunMonitor(named_graph("heavy"), patience=0, predictions_from=1000).judge(replace(now, step=step))
        assert said.reason.startswith(word)


@pytest.mark.parametrize("rows", [128, 32, 16, 8, 2])
def test_two_points_are_a_collapse_however_few_images_a_process_has(rows: int) -> None:
    """A global batch of 128 on eight processes is looked at by sixteen rows."""
    generator = torch.Generator().manual_seed(0)
    healthy = torch.randn(rows, 64, generator=generator)
    collapsed = torch.where(
        torch.arange(rows)[:, None] % 16 == 15, healthy[:1], -healthy[:1]
    )  # nearly all in one point
    collapsed = collapsed + 0.001 * healthy
    for values, expected in ((healthy, "healthy"), (collapsed, "partial collapse")):
        now = replace(constant(0.9), rank=dict.fromkeys(("h1", "h2"), rank_share(values)), rows=rows)
        assert RunMonitor(named_graph("heavy"), patience=0).judge(now).status == expected


def test_the_likely_cause_points_at_a_heavy_view() -> None:
    graph = named_graph("ablation-h")
    losses = {edge.name: -0.5 for edge in graph.edges} | {"s1->s2": -0.99}
    assert likely_cause(graph, "s1", losses).target_views[0].startswith("h")
    assert likely_cause(named_graph("standard"), "s1", {"s1->s2": -0.2, "s2->s1": -0.4}).name == "s2->s1"


@pytest.mark.parametrize(
    ("text", "view", "edge", "remedy"),
    [
        # one heavy view in a mean makes it a heavy target
        ("s1<->s2, s3->mean(s1,h1)", "s3", "s3->mean(s1,h1)", "heavy view such as h1"),
        # a small crop is judged as any other view, and its target is a standard one
        ("s1<->s2, l1->mean(s1,s2), l1 = crop(0.05,0.3)@16(image)", "l1", "l1->mean(s1,s2)", "lower --optimizer.rate"),
        # what a frozen teacher makes of a heavy view cannot collapse
        ("s1<->s2, h1->teacher(h1)", "h1", "h1->teacher(h1)", "lower --optimizer.rate"),
        ("s1<->s2, h1->teacher(h1), s1->h1:0..1", "s1", "s1->h1", "heavy view such as h1"),
    ],
)
def test_a_collapse_with_an_addition_names_its_view_and_edge(text: str, view: str, edge: str, remedy: str) -> None:
    graph = named_graph(text)
    spread = dict.fromkeys(graph.encoded, 0.9) | {view: 0.1}
    losses = {one.name: -0.5 for one in graph.edges}
    now = Observation(
        step=0, loss=-0.9, edges=losses, spread=spread, rank=spread, source={}, target={"teacher(h1)": 0.0}
    )
    verdict = RunMonitor(graph, patience=0).judge(now)
    assert (verdict.status, verdict.view, verdict.edge) == ("collapsed", view, edge)
    assert remedy in verdict.remedies[0]


def test_state_survives_json() -> None:
    health = RunMonitor(named_graph("heavy"), patience=2)
    for value in (0.9, 0.1, 0.1):
        health.judge(constant(value))
    again = RunMonitor(named_graph("heavy"), patience=2)
    again.load_state(json.loads(json.dumps(health.state())))
    for value in (0.1, 0.9, 0.1, 0.05):
        assert health.judge(constant(value)) == again.judge(constant(value))


def test_effective_rank_of_known_matrices() -> None:
    assert rank_share(torch.ones(64, 32)) == pytest.approx(1 / 32, rel=0.01)
    assert rank_share(torch.eye(32)) == pytest.approx(1.0, rel=1e-5)
    two = torch.zeros(10, 8)
    two[:5, 0] = two[5:, 1] = 1.0
    assert rank_share(two) == pytest.approx(2 / 8, rel=0.01)
    assert rank_share(torch.full((4, 4), torch.nan)) != rank_share(torch.full((4, 4), torch.nan))


def test_the_rank_is_what_earlier_versions_logged_up_to_rounding() -> None:
    """Their formula in float32, without a cut for small singular values: thresholds and old curves keep their meaning."""

    def before(embedding: torch.Tensor) -> float:
        rows = torch.nn.functional.normalize(embedding[:256].float(), dim=1)
        gram = rows @ rows.T if rows.shape[0] <= rows.shape[1] else rows.T @ rows
        singular = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
        share = singular / singular.sum().clamp_min(1e-12)
        return float(torch.exp(-(share * torch.log(share.clamp_min(1e-12))).sum())) / len(singular)

    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(300, 64, generator=generator)
    decaying = noise * torch.exp(-torch.arange(64) / 8)
    nearly_one_point = torch.ones(300, 64) + 0.05 * noise
    for embedding in (noise, noise[:40], decaying, nearly_one_point, noise.bfloat16()):
        assert rank_share(embedding) == pytest.approx(before(embedding), rel=1e-4)
    one_direction = noise[:, :1] @ noise[:1]  # rank 1: all else was rounding
    assert rank_share(one_direction) == pytest.approx(before(one_direction), abs=2e-3)


def test_a_collapsed_encoder_is_seen_in_its_embeddings() -> None:
    """Not a curve but the thing itself: an encoder that gives a constant."""

    class Constant(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.ones(len(images), 8) + 1e-6 * images.mean()

    torch.manual_seed(0)
    graph = named_graph("standard")
    objective = Objective(
        SimSiam(Constant(), feature_dim=8, settings=SimSiamConfig(hidden=16, output=16, bottleneck=4)), graph
    ).eval()
    views = {name: torch.randn(32, 3, 4, 4) for name in ("s1", "s2")}
    health = RunMonitor(graph, patience=1)
    assert health.judge(observe(0, objective(views))).status == "collapsed"


def test_predictions_are_judged_where_projections_cannot_fall() -> None:
    """SimSiam's projections stay apart while its predictions become one; BYOL's predictions start out as one."""
    now = replace(constant(0.9), source={"h1": 0.05, "h2": 0.05})
    assert RunMonitor(named_graph("heavy"), patience=0, predictions_from=0).judge(now).status == "collapsed"
    assert RunMonitor(named_graph("heavy"), patience=0).judge(now).status == "healthy"


def test_narrow_predictions_of_a_view_that_pulls_no_other_are_no_collapse() -> None:
    """From a view of RA(8,16) little can be told: BYOL's DSSL learned with a spread of 0.25 there and of 0.65 elsewhere."""
    names = ("s1", "s2", "h1", "h2")
    wide = dict.fromkeys(names, 0.75)
    now = replace(constant(0.9), spread=wide, rank=wide, edges={"h1->s1": -0.5}, source=wide | {"h1": 0.1, "h2": 0.1})
    for graph, expected in (("dssl", "healthy"), ("s1->s2, s1<->h1, s2<->h2", "collapsed"), ("h1->s1", "collapsed")):
        seen = now if "s2" in graph or graph == "dssl" else replace(now, source={"h1": 0.1})
        assert RunMonitor(named_graph(graph), patience=0, predictions_from=0).judge(seen).status == expected
    one = replace(now, source=wide | {"s1": 0.1})
    assert RunMonitor(named_graph("dssl"), patience=0, predictions_from=0).judge(one).status == "collapsed"


def test_a_run_that_recovers_from_a_long_collapse_is_not_healthy() -> None:
    """With a falling rate predictions spread again at the end, and the encoder is worse than an untrained one."""
    health = RunMonitor(named_graph("heavy"), patience=1)
    for step in range(40):
        health.judge(replace(constant(0.1), step=step))
    resumed = RunMonitor(named_graph("heavy"), patience=1)
    resumed.load_state(json.loads(json.dumps(health.state())))
    for watch in (health, resumed):
        said = [watch.judge(replace(constant(0.9), step=step)) for step in range(40, 80)]
        assert said[-1].status == "partial collapse"
        states(said[-1].reason, "0 and 41", "52%")
        assert (said[-1].view, said[-1].edge, len(said[-1].remedies)) == ("h1", "h1->h2", 3)


def test_a_short_collapse_is_forgiven() -> None:
    health = RunMonitor(named_graph("heavy"), patience=1)
    said = [health.judge(replace(constant(0.1 if 40 <= step < 50 else 0.9), step=step)).status for step in range(100)]
    assert {"collapsed", "healthy"} <= set(said[40:60])
    assert said[-1] == "healthy"


def test_the_memory_of_commit_a7351d8_is_read() -> None:
    health = RunMonitor(named_graph("heavy"), patience=1)
    spell = {"view": "h1", "edge": "h1->h2", "since": 3, "until": 9, "lowest": 0.1, "looks": 4}
    below = {
        "verdict": "below where it started",
        "step": 8,
        "view": "",
        "edge": "",
        "reason": "worse",
        "remedies": ["a"],
    }
    state = {"spreads": {"h1": [0.9]}, "ranks": {"h1": [0.5]}, "verdict": "below where it started", "seen": 12}
    health.load_state(state | {"spell": spell, "below": below, "last_close": 4})
    assert health.episode is not None
    assert (health.episode.checks, health.seen, health.last_near_start) == (4, 12, 4)
    assert health.verdict is health.below is not None
    assert (health.verdict.status, health.verdict.remedies) == ("below where it started", ("a",))
