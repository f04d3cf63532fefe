"""What tests share: small federations, data in official layouts, mistakes with their messages."""
