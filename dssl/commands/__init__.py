"""One module a command: a dataclass ``Arguments`` and a function ``run``."""
