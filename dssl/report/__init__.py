"""Pages and figures for people: one template, self-contained, in light and dark."""
