"""The paper's tables and figures as data, the recipes that make them at three scales, and what runs and compares them."""
