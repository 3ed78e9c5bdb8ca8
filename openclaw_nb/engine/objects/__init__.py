"""Which model, optimizer and loader a cell trains with."""
