"""Tables with natural clients, read from packages that ship them: nothing is drawn here."""
