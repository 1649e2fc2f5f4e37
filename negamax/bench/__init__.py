"""Workloads, accuracy suites and measurements behind 'negamax bench'."""
