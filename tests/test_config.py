"""Configurations: strict in, the same out, differences in words."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dssl import config_io
from dssl.cli import main
from dssl.config import CheckpointConfig, OptimizerConfig, RunConfig
from dssl.methods import BYOLConfig, SimCLRConfig, SimSiamConfig, VICRegConfig
from dssl.recipes import RECIPES, recipe
from tests.rejecting import rejects


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("method", ["simsiam", "byol", "simclr"])
def test_every_recipe_survives_the_way_through_json(name: str, method: str) -> None:
    config = recipe(name, method=method)
    assert config_io.from_dict(config_io.to_dict(config)) == config
    assert config_io.difference(config_io.to_dict(config), config) == []


def test_recipes_have_the_settings_of_the_paper() -> None:
    cifar = recipe("cifar10")
    assert (cifar.encoder, cifar.batch_size, cifar.epochs, cifar.image_size) == ("resnet18-cifar", 512, 800, 32)
    optimizer = cifar.optimizer
    assert (optimizer.rate, optimizer.weight_decay, optimizer.fixed_predictor_rate) == (0.03, 5e-4, False)
    assert cifar.method == SimSiamConfig(projector_layers=2, hidden=2048, output=2048, bottleneck=512)
    imagenet = recipe("imagenet")
    assert (imagenet.encoder, imagenet.batch_size, imagenet.epochs, imagenet.image_size) == ("resnet50", 512, 100, 224)
    assert (imagenet.optimizer.rate, imagenet.optimizer.weight_decay) == (0.05, 1e-4)
    assert imagenet.method == SimSiamConfig(projector_layers=3)
    assert recipe("cifar10", method="byol").method == BYOLConfig(hidden=4096, output=256, momentum=0.996)
    # SimCLR: a rate of 4.0 at a batch of 1024 on CIFAR-10 and of 0.6 at 512 on ImageNet, as rate x batch / 256
    assert recipe("cifar10", method="simclr").optimizer.rate * 1024 / 256 == pytest.approx(4.0)
    assert recipe("imagenet", method="simclr").optimizer.rate * 512 / 256 == pytest.approx(0.6)
    assert recipe("imagenet", method="simclr").method == SimCLRConfig(temperature=0.1)


def test_a_recipe_is_changed_by_names_tables_and_settings() -> None:
    byol = BYOLConfig(output=7)
    assert recipe("cifar10", method=byol) == replace(recipe("cifar10", method="byol"), method=byol)
    ours, usual = recipe("cifar10", optimizer={"rate": 0.5}), recipe("cifar10")
    assert ours == replace(usual, optimizer=replace(usual.optimizer, rate=0.5))
    with rejects("'epochz'", "'epochs'"):
        recipe("shapes", epochz=3)
    with rejects("epochs", "'3'", "int"):
        recipe("shapes", epochs="3")


def test_toml_with_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('epochs = 3\nmethod = "byol"\n[optimizer]\nrate = 1\nwarmup_epochs = 1\n')
    config = config_io.load(file)
    assert config.epochs == 3
    assert config.method == BYOLConfig()
    assert config.optimizer == OptimizerConfig(rate=1.0, warmup_epochs=1)


@pytest.mark.parametrize(
    ("plain", "facts"),
    [
        ({"epoch": 3}, ["'epoch'", "'epochs'"]),
        ({"epochs": "3"}, ["epochs", "'3'", "int"]),
        ({"epochs": 3.0}, ["epochs", 3.0, "int"]),
        ({"seed": True}, ["seed", True, "int"]),
        ({"compile": 1}, ["compile", 1, "bool"]),
        ({"epochs": 0}, ["epochs", 0, 1]),
        ({"batch_size": 1}, ["batch_size", 1, 2, "BatchNorm"]),
        ({"optimizer": {"rte": 1}}, ["'optimizer.rte'", "'optimizer.rate'"]),
        ({"lerning_rate": 1}, ["'lerning_rate'", "'optimizer.rate'"]),
        ({"optimizer": {"rate": float("nan")}}, ["optimizer.rate", "nan", 0]),
        ({"optimizer": {"rate": -1.0}}, ["optimizer.rate", -1.0, 0]),
        ({"optimizer": {"momentum": 1.0}}, ["optimizer.momentum", 1.0, 1]),
        ({"optimizer": 3}, ["optimizer", 3, "table"]),
        ({"optimizer": {"warmup_epochs": 1000}}, ["optimizer.warmup_epochs", 1000, 100]),
        ({"method": "byl"}, ["'byl'", "'byol'"]),
        ({"method": {"name": "byol", "bottleneck": 3}}, ["'method.bottleneck'", "method.momentum"]),
        ({"method": {"name": "simclr", "temperature": 0}}, ["method.temperature", 0.0]),
        ({"method": 7}, ["method", 7, "table"]),
        ({"precision": "fp8"}, ["precision", "'fp8'", "auto, bf16, fp16, fp32, fp64"]),
        ({"channels": 0}, ["channels", 0, "1,024"]),
        ({"channels": 4}, ["normalization", "cifar10", "measure", "4 channels"]),
        ({"range": "1"}, ["range", "'1'", "0,4095"]),
        ({"channels": True}, ["channels", True, "int"]),
        ({"graph": "s1<->s1"}, ["s1->s1"]),
        ({"graph": "s1<->s2, h1->s1, h1 = rra(2,5)(s1)"}, ["'rra'", "'ra'"]),
        ({"heavy": "rra(2,5)"}, ["'rra'", "'ra'"]),
        ({"normalization": "mine"}, ["normalization", "mine", "cifar10", "imagenet", "measure"]),
        ({"bad_share": 1.5}, ["bad_share", 1.5, 1]),
        ({"checkpoint": {"keep": 0}}, ["checkpoint.keep", 0, 1]),
        ({"init": 3}, ["init", 3, "Path"]),
    ],
)
def test_nonsense_is_refused_by_name(plain: dict[str, object], facts: list[object]) -> None:
    with rejects(*facts):
        config_io.from_dict(plain)


@pytest.mark.parametrize("text", ["epochs = ", "[epochs", "epochs = 3\nepochs = 4", "\xff"])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(text.encode("latin-1"))
    with rejects(file):
        config_io.load(file)


def test_difference_names_what_matters_and_nothing_else() -> None:
    old = RunConfig()
    new = replace(old, epochs=200, threads=7, checkpoint=CheckpointConfig(keep=9), optimizer=OptimizerConfig(rate=0.5))
    assert config_io.difference(config_io.to_dict(old), new) == ["epochs: 100 -> 200", "optimizer.rate: 0.03 -> 0.5"]
    assert config_io.fingerprint(old) != config_io.fingerprint(new)
    assert config_io.fingerprint(old) == config_io.fingerprint(replace(old, threads=3, knn_every=1))


def test_results_keep_their_names_when_settings_are_added() -> None:
    """As the version before the guard computed them: a setting that came later counts only where it changes something."""
    assert config_io.fingerprint(RunConfig()) == "b97bc5c6d5ddccf9"
    before = {"simsiam": "cefe9bf54f3da438", "byol": "b097c957203ec231", "simclr": "cad3892d64bb774f"}
    assert {name: config_io.fingerprint(recipe("cifar10", method=name)) for name in before} == before
    guarded = replace(RunConfig(), method=SimSiamConfig(guard=1.0))
    assert config_io.fingerprint(guarded) != config_io.fingerprint(RunConfig())


def test_the_earlier_spelling_of_a_setting_is_read_and_keeps_its_fingerprint(tmp_path: Path) -> None:
    config = recipe("shapes", method="vicreg")
    plain = config_io.to_dict(config)
    assert plain["method"]["regularize"] == "similarity"
    earlier = {**plain, "method": {"name": "vicreg", "regularise": "all"}}
    assert config_io.from_dict(earlier).method == VICRegConfig(regularize="all")
    assert config_io.fingerprint(config) == "baba691613761006"  # as the earlier spelling had it
    file = tmp_path / "config.json"
    words = ["train", "shapes", "--method", "vicreg", "--method.regularise", "all", "--write-config", str(file)]
    assert main(words) == 0
    assert json.loads(file.read_text())["method"]["regularize"] == "all"


def test_the_earlier_name_of_a_setting_is_read() -> None:
    plain = config_io.to_dict(recipe("adapt", adapt={"max_drift": 0.1}))
    earlier = plain | {"adapt": {key.replace("max_", "most_"): value for key, value in plain["adapt"].items()}}
    config = config_io.from_dict(earlier)
    assert config.adapt is not None
    assert config.adapt.max_drift == 0.1
    assert config_io.difference(earlier, config) == []
    assert config_io.difference(earlier, recipe("adapt")) == ["adapt.max_drift: 0.1 -> 0.2"]
    assert config_io.fingerprint(config) != config_io.fingerprint(recipe("adapt"))


def test_a_setting_that_came_later_had_its_default_before() -> None:
    plain = config_io.to_dict(recipe("shapes"))
    del plain["bad_share"], plain["limit"], plain["optimizer"]["clip"]
    assert config_io.difference(plain, recipe("shapes")) == []
    assert config_io.difference(plain, recipe("shapes", limit=50)) == ["limit: None -> 50"]
