"""The process group: forming, collectives whose waits can be ended, shortcuts between ranks of one host."""
