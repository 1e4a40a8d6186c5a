"""Products, quotients and powers of LNSTensors whose gradients are clamped once."""
