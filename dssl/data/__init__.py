"""Images from anywhere, in an order and with views that depend only on seed, epoch and step."""

from dssl.data.decode import UnreadableImage
from dssl.data.quarantine import Quarantine, check_sample, measure
from dssl.data.source import NoSplitError, Source, Subset, open_source, require_labels

__all__ = [
    "NoSplitError", "Quarantine", "Source", "Subset", "UnreadableImage", "check_sample", "measure", "open_source",
    "require_labels",
]  # fmt: skip
