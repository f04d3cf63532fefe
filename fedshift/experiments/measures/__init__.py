"""What is measured of models, weights and clients while a run goes on."""
