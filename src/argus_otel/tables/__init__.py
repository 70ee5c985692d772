"""What the second half hands on: Arrow schemas, and findings."""
