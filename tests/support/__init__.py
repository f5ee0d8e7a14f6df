"""What several test files use: tiny models, runs, stand-ins, cases."""
