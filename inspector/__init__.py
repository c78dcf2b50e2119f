"""Use cases: plans, executor, oracle, metrics, verdicts and the command line."""
