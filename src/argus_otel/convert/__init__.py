"""Foreign traces to our tables. What a source does not say stays null."""
