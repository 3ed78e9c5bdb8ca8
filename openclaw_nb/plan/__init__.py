"""Pure decisions: no files, no clock, no threads, no torch."""
