"""What is checked before the first round, so that a run does not fail hours later."""
