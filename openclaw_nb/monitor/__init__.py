"""What the workers tell of their progress, kept and answered from: events in, histories out."""
