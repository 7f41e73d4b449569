"""The parts of the yardstick: strategies, histories, variants, the journal and the tables."""
