"""A federation of real machines: keys and certificates, and thin calls of Flower's own commands."""
