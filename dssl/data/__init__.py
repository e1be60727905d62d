"""Images from anywhere, in an order and with views that depend only on seed, epoch and step."""

from dssl.data.decode import UnreadableImage
from dssl.data.files import NoSplitError
from dssl.data.quarantine import Quarantine, check_sample
from dssl.data.sources import Source, Subset, open_source, require_labels
from dssl.data.statistics import Statistics, measure

__all__ = [
    "NoSplitError",
    "Quarantine",
    "Source",
    "Statistics",
    "Subset",
    "UnreadableImage",
    "check_sample",
    "measure",
    "open_source",
    "require_labels",
]
