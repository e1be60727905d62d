"""Pretraining: ``from dssl.training import train``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dssl.training.pretrain import train

__all__ = ["train"]


def __getattr__(name: str) -> object:
    """Pretraining imports nearly everything; whoever wants only another module of this package need not wait for it."""
    if name in __all__:
        from dssl.training import pretrain

        return getattr(pretrain, name)
    raise AttributeError(f"module 'dssl.training' has no attribute {name!r}")
