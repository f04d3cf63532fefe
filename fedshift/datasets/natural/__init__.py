"""Tables whose clients are natural, such as airlines; they are read from packages of others."""
