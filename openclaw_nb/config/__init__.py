"""The configuration file: read, checked, settled with what was asked for, and shown with what it has set."""
