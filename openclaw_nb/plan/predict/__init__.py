"""What each strategy would cost a cell, from one short profile of it: pure, no clock, no torch."""
