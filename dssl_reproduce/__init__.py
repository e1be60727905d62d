"""The tables and figures of the paper as data, the settings of each scale, and the jobs that reproduce them."""
