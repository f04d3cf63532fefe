"""What users can try on their own federation before it meets the world."""
