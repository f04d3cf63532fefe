"""What replies must be before they are used."""
