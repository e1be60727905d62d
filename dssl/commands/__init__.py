"""One module a command, with a dataclass ``Arguments`` and a function ``run``; ``weights`` is what several of them share."""
