"""A server that speaks SGLang's contract, and faults it can be given."""
