"""A federation of real machines: keys and certificates, and thin wrappers of Flower's commands."""
