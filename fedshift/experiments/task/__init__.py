"""From a configuration to data, clients, target and first model."""
