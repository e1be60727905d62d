"""numba kernels on uint8 planes (channels x height x width), each equal to Pillow bit for bit, and corruptions."""
