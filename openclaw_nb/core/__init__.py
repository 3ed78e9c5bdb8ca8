"""What every layer may use: errors and small pieces of text."""
