"""Side-by-side measurements: ``python -m benchmarks`` runs them all, ``python -m benchmarks.NAME`` one of them."""
