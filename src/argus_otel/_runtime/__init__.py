"""What every stage stands on: errors, clock, guard, counters, bundled data."""
