"""The supervised rows: the same encoder on the same images, trained with their labels from scratch."""

from typing import Any

import torch

from dssl import rng
from dssl.config import RunConfig
from dssl.errors import DsslError
from dssl.evaluate import classifier
from dssl.evaluate.classifier import Setting, Training
from dssl.evaluate.features import Progress
from dssl.evaluate.result import Result, count_correct
from dssl.evaluate.runner import aligned_labels
from dssl.models import build_encoder, feature_dim
from dssl.models.whitened import WhitenedEncoder, whiten
from dssl.train.prepare import images_to_whiten, normalization_of, open_data, open_test_data
from dssl.world import pick_device


def train_supervised(
    config: RunConfig, training: Training, *, progress: Progress | None = None
) -> tuple[Result, dict[str, Any]]:
    """Accuracy on the whole test set after the last epoch; also how many steps and images it took."""
    train, test = open_data(config), open_test_data(config)
    if test is None:
        raise DsslError(f"{config.data} has no labelled test images: nothing can be measured on it")
    train_labels, test_labels, classes = aligned_labels(train, test)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.key(config.seed, "supervised") % 2**63)
        encoder = build_encoder(config.encoder, image_size=config.image_size, channels=config.channels)
    normalization = normalization_of(config, train)
    if isinstance(encoder, WhitenedEncoder):
        whiten(encoder, images_to_whiten(config, train, normalization))
    dim = feature_dim(encoder, image_size=config.image_size, channels=config.channels)
    encoder.to(pick_device(config.device))
    head = classifier.new_head(dim, len(classes), seed=config.seed)
    setting = Setting(
        image_size=config.image_size,
        channels=config.channels,
        normalization=normalization,
        seed=config.seed,
        threads=config.threads,
    )
    used = classifier.train_classifier(
        encoder, head, train, labels=train_labels, training=training, setting=setting, freeze=False, progress=progress
    )
    predicted = classifier.predict(encoder, head, test, setting=setting)
    steps = used.epochs * (len(train) // used.batch_size)
    protocol = {
        "kind": "supervised",
        "train_images": len(train),
        "test_images": len(test),
        "train_data": train.name,
        "test_data": test.name,
        "seed": config.seed,
        "epochs": used.epochs,
        "batch_size": used.batch_size,
        "rate": used.rate,
        "weight_decay": used.weight_decay,
        "policy": used.policy,
    }
    correct = count_correct(predicted, torch.from_numpy(test_labels))
    result = Result(name="supervised from scratch", correct=correct, total=len(test_labels), protocol=protocol)
    return result, {"steps": steps, "images": len(train), "fingerprint": train.fingerprint}
