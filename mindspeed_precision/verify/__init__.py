"""What must hold in one run alone, and what two launches must have in common."""
