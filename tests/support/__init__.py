"""What tests share: models, fixtures that start real processes, fakes."""
