"""Floor 2: small pure functions from schedule to schedule, each result proved."""
